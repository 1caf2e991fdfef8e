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

/// An MLP whose neurons are read as their gates open. Steps of many rows, and those in which most gates are
/// open, read up and down whole instead. Of one thread.
class StreamedMlp {
 public:
  /// `plan` is of `program`, whose ops refer to the mapping of `memory`, but for what stays in memory;
  /// `table` is the one of the MLP's neurons.
  StreamedMlp(const Program& program, const WeightMemory& memory, const WeightPlan::Mlp& plan,
              WeightStream* stream, RecordCache* cache, std::size_t table);

  /// Whether the step that begins has so few rows that neurons may do.
  void begin_step(bool has_few_rows);
  /// Whether the step reads up and down whole.
  [[nodiscard]] bool reads_whole() const { return reads_whole_; }

  /// The gated layer's and the next one's, where the weights are that were asked for last.
  [[nodiscard]] std::span<const LinearPart> gated() const { return gated_; }
  [[nodiscard]] std::span<const LinearPart> down() const { return down_; }

  // What is in memory from now on, in place of what was before. They throw StepError.
  void hold_gate();
  /// Gate and up. This step reads down whole as well.
  void hold_gated();
  void hold_down();
  void release() { held_.reset(); }

  /// Reads neurons whose gates are open, in ascending order. Throws StepError.
  void bring(std::span<const std::int32_t> neurons);
  /// The record of a neuron that was brought last; nullptr of others.
  [[nodiscard]] const std::byte* record(std::int64_t neuron) const {
    return records_[static_cast<std::size_t>(neuron)];
  }
  /// Of a neuron that was brought last, the column of down.
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
  std::int32_t whole_steps_ = 0;  ///< of few rows, that will read everything without asking first
};

}  // namespace adaptrt
