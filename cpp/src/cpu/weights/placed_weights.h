#pragma once

#include <array>
#include <cstddef>
#include <deque>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "adaptrt/core/huge_array.h"
#include "adaptrt/cpu/cpu_engine.h"
#include "adaptrt/engine/engine.h"
#include "adaptrt/engine/step_profile.h"
#include "adaptrt/program/program.h"
#include "adaptrt/weight_file/record_cache.h"
#include "adaptrt/weight_file/weight_stream.h"
#include "weights/expert_slots.h"
#include "weights/streamed_mlp.h"
#include "weights/weight_plan.h"

namespace adaptrt {

/// The weights of a program with limited memory. Some weights stay in memory; the others are loaded when they
/// are used.
class PlacedWeights {
 public:
  /// Reads the resident weights, and makes the program's ops point to them instead of to the mapping. Throws
  /// the errors of make_cpu_engine, StepError if a weight cannot be read, and std::bad_alloc.
  PlacedWeights(Program* program, const WeightMemory& memory);

  /// Unit of stream() with an op's weights; nullopt if the stream does not load them.
  [[nodiscard]] std::optional<std::size_t> stream_unit(StepSection section, std::size_t op) const;
  /// Loads the units of ops with a stream_unit().
  [[nodiscard]] WeightStream& stream() const { return *stream_; }
  /// Begins a step; see StreamedMlp::begin_step.
  void begin_step(bool has_few_rows);
  /// The MLP of a layer whose neurons are read one by one; nullptr for other layers.
  [[nodiscard]] StreamedMlp* mlp_of(const LinearOp& op);
  /// The slots of an op's experts; nullptr if all of its experts are in memory.
  [[nodiscard]] ExpertSlots* experts_of(const ExpertsOp& op);
  [[nodiscard]] WeightPlacement placement() const;

 private:
  static constexpr std::size_t kNone = static_cast<std::size_t>(-1);

  void read_resident(Program* program, const WeightMemory& memory, const WeightPlan& plan);
  void make_stream(Program* program, const WeightMemory& memory, WeightPlan* plan);
  void make_mlps(Program* program, const WeightMemory& memory, const WeightPlan& plan);
  void make_slots(const Program& program, const WeightMemory& memory, WeightPlan* plan);
  static void fill(const WeightUsage& usage, std::size_t op, ExpertSlots* slots);
  void lock();

  std::shared_ptr<WeightFile> file_;
  HugeArray resident_;
  std::unique_ptr<WeightStream> stream_;
  std::array<std::vector<std::size_t>, 3> units_;  ///< by section and op: of the stream, or kNone
  std::unique_ptr<RecordCache> neurons_;
  std::deque<StreamedMlp> mlps_;
  // The key is the address of the op's first part, which does not change when the program is moved.
  std::unordered_map<const LinearPart*, StreamedMlp*> mlp_of_;
  std::unordered_map<const LinearPart*, ExpertSlots> experts_;
  WeightPlacement placement_;
};

}  // namespace adaptrt
