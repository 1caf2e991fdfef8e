#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "adaptrt/engine/engine.h"
#include "message.h"

namespace adaptrt {

/// Adds a step, whose adapters become their load ids; 0: the base model. Steps with encoder inputs are not
/// for engines of several ranks.
void add_step(const StepInput& input, MessageWriter* message);

/// A step as another rank runs it.
class ReceivedStep {
 public:
  /// `find` gives the adapter of a load id, and throws where there is none.
  void read(MessageReader* message, const std::function<const DeviceAdapter*(std::uint64_t)>& find);
  /// Views of what was read last.
  [[nodiscard]] StepInput input() const;

 private:
  std::vector<std::int32_t> token_ids_;
  std::vector<std::int32_t> positions_;
  std::vector<std::int32_t> sequence_offsets_;
  std::vector<std::int32_t> prompt_lengths_;
  std::vector<std::int32_t> block_tables_;
  std::int32_t max_blocks_per_sequence_ = 0;
  std::vector<const DeviceAdapter*> adapters_;
  std::vector<std::int32_t> adapters_from_;
  std::vector<std::int32_t> logit_rows_;
  std::vector<std::int32_t> copies_from_;
  std::vector<std::int32_t> copies_to_;
  std::vector<std::int32_t> hidden_rows_;
};

}  // namespace adaptrt
