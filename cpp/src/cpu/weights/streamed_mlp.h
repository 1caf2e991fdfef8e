#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "adaptrt/cpu/cpu_engine.h"
#include "adaptrt/program/program.h"
#include "adaptrt/weight_file/record_cache.h"
#include "adaptrt/weight_file/weight_stream.h"
#include "weights/weight_plan.h"

namespace adaptrt {

/// An MLP that reads a neuron from the file when the neuron's gate opens. Steps with many rows or with most
/// gates open read the whole of up and down instead. For use by one thread.
class StreamedMlp {
 public:
  /// `plan` belongs to `program`, whose ops refer to the mapping of `memory` except for resident weights;
  /// `table` belongs to the MLP's neurons.
  StreamedMlp(const Program& program, const WeightMemory& memory, const WeightPlan::Mlp& plan,
              WeightStream* stream, RecordCache* cache, std::size_t table);

  /// Begins a step. `has_few_rows`: the step has few enough rows to read single neurons.
  void begin_step(bool has_few_rows);
  /// True if the step reads the whole of up and down.
  [[nodiscard]] bool reads_whole() const { return reads_whole_; }

  /// Parts of the gated layer and of the next one; they refer to the weights that were loaded last.
  [[nodiscard]] std::span<const LinearPart> gated() const { return gated_; }
  [[nodiscard]] std::span<const LinearPart> down() const { return down_; }

  // The following functions replace the weights in memory. They throw StepError.
  void hold_gate();
  /// Loads gate and up. This step then reads the whole of down too.
  void hold_gated();
  void hold_down();
  void release() { held_.reset(); }

  /// Reads neurons whose gates are open, in ascending order. Throws StepError.
  void bring(std::span<const std::int32_t> neurons);
  /// The record of a neuron that the last load has read; nullptr for other neurons.
  [[nodiscard]] const std::byte* record(std::int64_t neuron) const {
    return records_[static_cast<std::size_t>(neuron)];
  }
  /// The column of down of a neuron that the last load has read.
  [[nodiscard]] const std::byte* column(std::int64_t neuron) const { return record(neuron) + column_place_; }

 private:
  void read_whole(bool is_whole);
  void hold(std::size_t unit, LinearPart* part, std::size_t offset);

  WeightPlan::Mlp plan_;
  WeightStream& stream_;
  RecordCache& cache_;
  std::size_t table_;
  std::size_t column_place_;  ///< in a record
  std::vector<LinearPart> gated_;
  std::vector<LinearPart> down_;
  std::optional<WeightStream::Held> held_;
  std::vector<std::int32_t> brought_;
  std::vector<const std::byte*> records_;  ///< by neuron
  bool reads_whole_ = false;
  std::int32_t whole_steps_ = 0;  ///< number of next steps with few rows that read everything
};

}  // namespace adaptrt
