#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "adaptrt/engine/engine.h"
#include "adaptrt/engine/engine_fields.h"
#include "message.h"

namespace adaptrt {

/// Writes a step. Adapters are written as their load ids (0 for the base model), and encoder outputs as a
/// flag per output that tells if it is wanted.
void add_step(const StepInput& input, MessageWriter* message);

/// A step as another rank runs it.
class ReceivedStep {
 public:
  using Find = std::function<const DeviceAdapter*(std::uint64_t)>;

  /// `find` returns the adapter of a load id, and throws if there is none.
  void read(MessageReader* message, const Find& find, std::int64_t encoder_hidden_size);
  /// Returns views of the step that was read last, with buffers for the wanted encoder outputs.
  [[nodiscard]] StepInput input() const;

 private:
  static void read_adapters(MessageReader* message, const Find& find,
                            std::vector<const DeviceAdapter*>* adapters);
  void read_encoder(MessageReader* message, const Find& find, std::int64_t hidden_size);

  template <std::size_t kCount>
  using Arrays = std::array<std::vector<std::int32_t>, kCount>;

  Arrays<kStepInputArrays.size()> arrays_;
  std::int32_t max_blocks_per_sequence_ = 0;
  std::int32_t max_cross_blocks_ = 0;
  std::vector<const DeviceAdapter*> adapters_;
  Arrays<kEncoderArrays.size()> encoder_arrays_;
  std::vector<const DeviceAdapter*> encoder_adapters_;
  std::vector<std::vector<float>> encoder_outputs_;
  std::vector<float*> encoder_output_places_;
};

}  // namespace adaptrt
