// Measures only the attention ops of the CPU engine, with 16 query and 4 key-value heads of size 64: a decode
// step of 16 sequences and the prefill of a prompt. With a number of tokens as the last argument, it measures
// one sequence of that length: its decode step, and the last chunk of 512 tokens of its prompt.
//   attention_bench [threads] [rounds] [kernels] [bfloat16|int8] [tokens]

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "adaptrt/cpu/cpu_engine.h"
#include "adaptrt/engine/step_profile.h"
#include "adaptrt/measure/machine_limits.h"
#include "cpu/random_model.h"
#include "cpu/step_arrays.h"

namespace adaptrt {
namespace {

using testing::Piece;

constexpr int kManySequences = 16;
constexpr int kShortTokens = 1024;
constexpr int kPrompt = 512;
constexpr int kTokensPerBlock = 32;
constexpr int kLayers = 28;

/// Total time and cost of a step's attention ops.
struct Attention {
  double seconds = 0.0;
  OpCost cost;
};

Attention sum_of_attention(const StepRecord& step, const Program& program) {
  Attention sum;
  for (const auto& op : step.ops) {
    if (op.section != StepSection::kBody) continue;
    if (!std::holds_alternative<AttentionOp>(program.body[static_cast<std::size_t>(op.index)])) continue;
    sum.seconds += op.end - op.begin;
    sum.cost.kv_bytes += op.cost.kv_bytes;
    sum.cost.flops += op.cost.flops;
  }
  return sum;
}

/// The last tokens of `sequences` sequences with `context` tokens.
std::vector<Piece> decode(int sequences, int context) {
  std::vector<Piece> pieces;
  std::int32_t next_block = 0;
  for (int s = 0; s < sequences; ++s) {
    Piece piece{.tokens = {s}, .first_position = context - 1, .prompt_length = context};
    for (int used = 0; used < context; used += kTokensPerBlock) piece.blocks.push_back(next_block++);
    pieces.push_back(std::move(piece));
  }
  return pieces;
}

/// A chunk of kPrompt tokens of a sequence with `longest` tokens, whose blocks are those of decode().
Piece chunk(int sequence, int first_position, int longest) {
  Piece piece{.first_position = first_position, .prompt_length = longest};
  for (int i = 0; i < kPrompt; ++i) piece.tokens.push_back((sequence * 7919 + first_position + i) % 61);
  const int blocks = longest / kTokensPerBlock;
  for (int i = 0; i < blocks; ++i) piece.blocks.push_back(sequence * blocks + i);
  return piece;
}

void run(int num_threads, int rounds, const char* kernels, bool int8_kv_cache, int sequences, int longest) {
  const auto threads = std::make_shared<ThreadPool>(num_threads);
  // All other sizes are small, so that attention takes most of the time.
  const testing::RandomModel model({.dtype = DType::kBFloat16,
                                    .num_layers = kLayers,
                                    .shape = {64, 16, 4, 64},
                                    .intermediate_size = 64,
                                    .max_batch_size = sequences,
                                    .max_num_tokens = kPrompt,
                                    .max_seq_len = longest,
                                    .tokens_per_block = kTokensPerBlock,
                                    .int8_kv_cache = int8_kv_cache});
  const auto profile = std::make_shared<StepProfile>(static_cast<std::size_t>(rounds));
  const auto engine = make_cpu_engine(model.program, threads, kernels, profile);
  engine->allocate_kv_blocks(sequences * longest / kTokensPerBlock);
  const MachineLimits limits = measure_machine_limits(threads.get(), 3);
  std::printf("read bandwidth %.1f GB/s, bf16 peak %.0f GFLOP/s\n", limits.read_bandwidth * 1e-9,
              limits.bfloat16_flops * 1e-9);
  const auto step = [&](const std::vector<Piece>& pieces) {
    testing::StepArrays arrays(pieces);
    arrays.logit_rows = {0};
    engine->step(arrays.input(), [](std::int64_t, std::int64_t, const float*) {});
  };
  // Memory that was never written would be read from the system's single page of zeros.
  for (int sequence = 0; sequence < sequences; ++sequence) {
    for (int first = 0; first < longest; first += kPrompt) step({chunk(sequence, first, longest)});
  }
  const auto measure = [&](const std::string& name, const std::vector<Piece>& pieces) {
    step(pieces);
    (void)profile->take_steps();
    for (int round = 0; round < rounds; ++round) step(pieces);
    std::vector<Attention> sums;
    for (const auto& record : profile->take_steps()) sums.push_back(sum_of_attention(record, model.program));
    std::sort(sums.begin(), sums.end(),
              [](const Attention& a, const Attention& b) { return a.seconds < b.seconds; });
    const Attention& median = sums[sums.size() / 2];
    std::printf("%-28s %8.3f ms (least %8.3f)  %6.1f GB/s  %6.1f GFLOP/s\n", name.c_str(),
                median.seconds * 1e3, sums.front().seconds * 1e3,
                static_cast<double>(median.cost.kv_bytes) / median.seconds * 1e-9,
                static_cast<double>(median.cost.flops) / median.seconds * 1e-9);
  };
  if (sequences == 1) {
    measure("decode 1, context " + std::to_string(longest), decode(1, longest));
    measure("prefill of the last " + std::to_string(kPrompt), {chunk(0, longest - kPrompt, longest)});
    return;
  }
  for (const int context : {128, 512, longest}) {
    measure("decode 16, context " + std::to_string(context), decode(sequences, context));
  }
  measure("prefill " + std::to_string(kPrompt), {chunk(0, 0, longest)});
}

}  // namespace
}  // namespace adaptrt

int main(int argc, char** argv) {
  const int threads = argc > 1 ? std::atoi(argv[1]) : 2;
  const int rounds = argc > 2 ? std::atoi(argv[2]) : 15;
  const bool int8_kv_cache = argc > 4 && std::string_view(argv[4]) == "int8";
  const char* kernels = argc > 3 ? argv[3] : "";
  if (argc > 5) {
    adaptrt::run(threads, rounds, kernels, int8_kv_cache, 1, std::atoi(argv[5]));
  } else {
    adaptrt::run(threads, rounds, kernels, int8_kv_cache, adaptrt::kManySequences, adaptrt::kShortTokens);
  }
  return 0;
}
