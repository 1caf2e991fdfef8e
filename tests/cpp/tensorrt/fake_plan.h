#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "adaptrt/tensorrt/tensorrt_engine.h"
#include "support/host_device.h"

namespace adaptrt::testing {

/// A plan whose logits report its inputs, token by token.
enum LogitColumn : std::size_t {
  kTokenSum,      ///< sum of the sequence's token ids up to this one, read from the last layer's KV pool
  kPosition,      ///< the token's position
  kPromptLength,  ///< the sequence's prompt length
  kRank,          ///< rank of FakePlan::kLayer, kModule in the row of the sequence's slot; -1 for the base
                  ///< model
  kFirstOfA,      ///< first element of A there, as an integer
  kFirstOfB,
  kMagnitude,  ///< first magnitude; 0 if there are none
  kWeight,     ///< the first float of the external weight
  kVocabSize = 64,
};

/// State shared by the contexts of a plan: its description and a record of the calls. Anything that would
/// break a real plan throws std::logic_error: tensors that are missing, not on the device, or of a size
/// outside the profile; a pool that is not its own output; sequences of one slot that are not adjacent; a
/// context that changes after its capture, or is destroyed before its work is done.
struct FakePlan {
  static constexpr std::int32_t kLayer = 1;
  static constexpr LoraModule kModule = LoraModule::kAttnK;

  TensorRtProgram program;
  std::shared_ptr<HostDevice> device;
  /// Runs per profile name (including graph runs), and calls of enqueue().
  std::map<std::string, int> runs;
  std::map<std::string, int> enqueues;
  /// Contexts per profile name, including destroyed ones.
  std::map<std::string, int> contexts;
  /// Sizes of input_ids and block_tables of the newest run.
  std::int64_t num_tokens = 0;
  std::vector<std::int64_t> block_tables_shape;
  /// Tensors whose shape was set since the test cleared this.
  std::multiset<std::string> shapes_set;
  /// The next call for this tensor throws StepError.
  std::string refused_tensor;
  bool fail_next_enqueue = false;
};

/// A plan of two layers with the LoRA sites of small_layout().
[[nodiscard]] std::shared_ptr<FakePlan> make_fake_plan(StreamTime time = StreamTime::kAtOnce);

[[nodiscard]] TensorRtContexts make_contexts(const std::shared_ptr<FakePlan>& plan);

}  // namespace adaptrt::testing
