#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

#include "adaptrt/core/error.h"
#include "adaptrt/engine/check_step_input.h"

namespace adaptrt {
namespace {

class EncoderInputChecker {
 public:
  EncoderInputChecker(const StepInput& input, const EngineInfo& info, std::int32_t num_blocks)
      : input_(input), encoder_(input.encoder), info_(info), num_blocks_(num_blocks) {}

  void run() {
    // Each stage reads only data that the earlier stages have found valid.
    check_sizes();
    finish();
    check_offsets();
    check_tokens();
    finish();
    check_blocks();
    finish();
  }

 private:
  void finish() const { problems_.throw_if_any<StepError>("engine step: encoder"); }
  void add(std::string problem) { problems_.add(std::move(problem)); }

  void check_size(const char* name, std::size_t size, std::int64_t expected) {
    if (static_cast<std::int64_t>(size) == expected) return;
    add(std::string(name) + " has " + std::to_string(size) + " elements, not " + std::to_string(expected));
  }

  void check_sizes() {
    const auto sequences = static_cast<std::int64_t>(input_.prompt_lengths.size());
    const auto tokens = static_cast<std::int64_t>(encoder_.token_ids.size());
    if (num_blocks_ == 0) add("the KV pool of encoder inputs is not allocated");
    if (input_.max_cross_blocks < 1) add("max_cross_blocks is less than 1");
    check_size("encoder_lengths", input_.encoder_lengths.size(), sequences);
    check_size("cross_block_tables", input_.cross_block_tables.size(), sequences * input_.max_cross_blocks);
    if (encoder_.empty()) {
      if (encoder_.count() > 0) add("there are encoder inputs without tokens");
      return;
    }
    if (tokens > info_.max_num_tokens) {
      add(std::to_string(tokens) + " tokens; a step takes at most max_num_tokens " +
          std::to_string(info_.max_num_tokens));
    }
    check_size("offsets", encoder_.offsets.size(), encoder_.count() + 1);
    check_size("block_tables", encoder_.block_tables.size(), encoder_.count() * input_.max_cross_blocks);
    if (!encoder_.outputs.empty()) check_size("outputs", encoder_.outputs.size(), encoder_.count());
    for (const DeviceAdapter* adapter : encoder_.adapters) {
      // Adapters of sequences were already checked.
      if (adapter == nullptr || std::ranges::find(input_.adapters, adapter) != input_.adapters.end())
        continue;
      add("the adapter of task " + std::to_string(adapter->task_id) + " is of no sequence of the step");
    }
    if (encoder_.count() > info_.max_batch_size) {
      add(std::to_string(encoder_.count()) + " inputs; a step takes at most max_batch_size " +
          std::to_string(info_.max_batch_size));
    }
  }

  void check_offsets() {
    if (encoder_.empty()) return;
    if (encoder_.offsets.front() != 0 ||
        encoder_.offsets.back() != static_cast<std::int64_t>(encoder_.token_ids.size())) {
      add("offsets do not run from 0 to the tokens");
    }
    for (std::size_t i = 1; i < encoder_.offsets.size(); ++i) {
      const std::int32_t length = encoder_.offsets[i] - encoder_.offsets[i - 1];
      if (length < 1 || length > info_.max_encoder_input_len) {
        add("input " + std::to_string(i - 1) + " has " + std::to_string(length) +
            " tokens; accepted: 1 to max_encoder_input_len " + std::to_string(info_.max_encoder_input_len));
      }
    }
  }

  void check_tokens() {
    for (std::size_t i = 0; i < encoder_.token_ids.size(); ++i) {
      const std::int32_t id = encoder_.token_ids[i];
      if (id >= 0 && id < info_.vocab_size) continue;
      add("token " + std::to_string(i) + " is " + std::to_string(id) + "; the vocabulary has " +
          std::to_string(info_.vocab_size));
    }
  }

  /// Checks the blocks of the first `length` tokens in a row of a table.
  void check_row(const std::string& of, std::int32_t length, std::span<const std::int32_t> row) {
    const std::int64_t blocks = (std::int64_t{length} + info_.tokens_per_block - 1) / info_.tokens_per_block;
    if (blocks > input_.max_cross_blocks) {
      add(of + " needs " + std::to_string(blocks) + " blocks; its table has " +
          std::to_string(input_.max_cross_blocks));
      return;
    }
    for (const std::int32_t block : row.first(static_cast<std::size_t>(blocks))) {
      if (block >= 0 && block < num_blocks_) continue;
      add(of + " has block " + std::to_string(block) + " in its table; the pool of encoder inputs has " +
          std::to_string(num_blocks_) + " blocks");
      return;
    }
  }

  void check_blocks() {
    const auto width = static_cast<std::size_t>(input_.max_cross_blocks);
    for (std::size_t i = 0; i < input_.encoder_lengths.size(); ++i) {
      const std::int32_t length = input_.encoder_lengths[i];
      const std::string of = "sequence " + std::to_string(i);
      if (length < 1 || length > info_.max_encoder_input_len) {
        add(of + " has an encoder input of " + std::to_string(length) +
            " tokens; accepted: 1 to max_encoder_input_len " + std::to_string(info_.max_encoder_input_len));
        continue;
      }
      check_row(of, length, input_.cross_block_tables.subspan(i * width, width));
    }
    std::vector<std::int32_t> written;
    for (std::size_t i = 0; i + 1 < encoder_.offsets.size(); ++i) {
      const std::int32_t length = encoder_.offsets[i + 1] - encoder_.offsets[i];
      const auto row = encoder_.block_tables.subspan(i * width, width);
      check_row("input " + std::to_string(i), length, row);
      for (const std::int32_t block : row) {
        if (block >= 0) written.push_back(block);
      }
    }
    std::ranges::sort(written);
    if (std::ranges::adjacent_find(written) != written.end()) add("a block is written by two inputs");
  }

  const StepInput& input_;
  const EncoderInputs& encoder_;
  const EngineInfo& info_;
  std::int32_t num_blocks_;
  Problems problems_;
};

}  // namespace

void check_encoder_inputs(const StepInput& input, const EngineInfo& info, std::int32_t num_blocks) {
  if (info.has_encoder()) {
    EncoderInputChecker(input, info, num_blocks).run();
  } else if (input.encoder.count() > 0 || !input.encoder_lengths.empty()) {
    throw StepError("engine step: it has encoder inputs; the engine has no encoder");
  }
}

}  // namespace adaptrt
