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

/// A plan whose logits tell what it was given, token by token:
enum LogitColumn : std::size_t {
  kTokenSum,      ///< sum of the sequence's token ids up to this one, read back from the last layer's KV pool
  kPosition,      ///< the token's position
  kPromptLength,  ///< the sequence's
  kRank,          ///< rank of FakePlan::kLayer, kModule in the row of the sequence's slot, -1 for the base
  kFirstOfA,      ///< the first element of A there, as an integer
  kFirstOfB,
  kMagnitude,  ///< the first of the magnitudes; 0 without
  kWeight,     ///< the first float of the external weight
  kVocabSize = 64,
};

/// What the contexts of a plan share: the plan's description, and what they were asked to do. Everything that
/// a real plan would not survive is a std::logic_error: tensors that are missing, lie elsewhere than on the
/// device, are too small or too large for the profile; a pool whose output is not itself; sequences of one
/// slot that are apart; a context that is changed after it was captured, or gone before its work is done.
struct FakePlan {
  static constexpr std::int32_t kLayer = 1;
  static constexpr LoraModule kModule = LoraModule::kAttnK;

  TensorRtProgram program;
  std::shared_ptr<HostDevice> device;
  /// Runs by the name of the profile, those of graphs included, and what was put into a stream by enqueue().
  std::map<std::string, int> runs;
  std::map<std::string, int> enqueues;
  /// Contexts by the name of the profile, those that are gone included.
  std::map<std::string, int> contexts;
  /// Sizes of input_ids and block_tables of the newest run.
  std::int64_t num_tokens = 0;
  std::vector<std::int64_t> block_tables_shape;
  /// Tensors whose shape was set, since the test cleared this.
  std::multiset<std::string> shapes_set;
  /// The next call about this tensor throws StepError.
  std::string refused_tensor;
  bool fail_next_enqueue = false;
};

/// A plan of two layers with the LoRA sites of small_layout().
[[nodiscard]] std::shared_ptr<FakePlan> make_fake_plan(StreamTime time = StreamTime::kAtOnce);

[[nodiscard]] TensorRtContexts make_contexts(const std::shared_ptr<FakePlan>& plan);

}  // namespace adaptrt::testing
