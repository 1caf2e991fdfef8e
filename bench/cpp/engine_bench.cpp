// Measures the CPU engine on a 0.5B bfloat16 Llama shape with random weights, and the machine's limits.
//   engine_bench [threads] [rounds] [kernels]

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <vector>

#include "adaptrt/cpu/cpu_engine.h"
#include "adaptrt/measure/machine_limits.h"
#include "cpu/random_model.h"
#include "cpu/step_arrays.h"

namespace adaptrt {
namespace {

using testing::Piece;

double seconds(const std::function<void()>& body) {
  const auto begin = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

/// Minimum and median of the times of several rounds.
struct Times {
  double least = 0.0;
  double median = 0.0;
};

Times measure(int rounds, const std::function<void()>& body) {
  std::vector<double> times;
  for (int round = 0; round < rounds; ++round) times.push_back(seconds(body));
  std::sort(times.begin(), times.end());
  return {times.front(), times[times.size() / 2]};
}

/// Sequences of a batch, each with room for its context.
std::vector<Piece> batch(int sequences, int context, const std::vector<DeviceAdapter>& adapters, int block) {
  std::vector<Piece> pieces;
  std::int32_t next_block = 0;
  for (int s = 0; s < sequences; ++s) {
    Piece piece{.tokens = {(s * 7919 + 13) % 32000}, .first_position = context - 1, .prompt_length = context};
    for (int used = 0; used < context; used += block) piece.blocks.push_back(next_block++);
    if (!adapters.empty()) piece.adapter = &adapters[static_cast<std::size_t>(s) % adapters.size()];
    pieces.push_back(std::move(piece));
  }
  return pieces;
}

void run(int threads_wanted, int rounds, const char* kernels) {
  constexpr int kPrompt = 512;
  constexpr int kBatch = 16;
  constexpr int kContext = 512;
  const auto threads = std::make_shared<ThreadPool>(threads_wanted);
  testing::RandomModel model({.dtype = DType::kBFloat16,
                              .vocab_size = 32000,
                              .num_layers = 28,
                              .shape = {1024, 16, 4, 64},
                              .intermediate_size = 4096,
                              .max_batch_size = kBatch,
                              .max_num_tokens = kPrompt,
                              .max_seq_len = 2048,
                              .tokens_per_block = 64,
                              .max_rank = 16});
  std::vector<DeviceAdapter> adapters;
  for (int i = 0; i < kBatch; ++i)
    adapters.push_back(model.adapter(static_cast<std::uint64_t>(100 + i), false, 16));
  double weights = 0.0;
  for (const auto& ops : {model.program.body, model.program.head}) {
    for (const auto& op : ops) {
      const auto* linear = std::get_if<LinearOp>(&op);
      if (linear == nullptr) continue;
      for (const auto& part : linear->parts) weights += static_cast<double>(part.weight.bytes());
    }
  }
  const auto engine = make_cpu_engine(model.program, threads, kernels);
  engine->allocate_kv_blocks(kBatch * kContext / 64 + 8);
  const MachineLimits limits = measure_machine_limits(threads.get(), rounds);
  const double bandwidth = limits.read_bandwidth;
  const double peak = limits.bfloat16_flops;
  std::printf("threads %d, weights read by a decode step %.3f GB\n", threads->num_threads(), weights * 1e-9);
  std::printf("read bandwidth %.1f GB/s, bf16 peak %.0f GFLOP/s\n", bandwidth * 1e-9, peak * 1e-9);

  Piece prompt{.prompt_length = kPrompt};
  for (int i = 0; i < kPrompt; ++i) prompt.tokens.push_back((i * 7919 + 17) % 32000);
  for (int i = 0; i < kPrompt / 64; ++i) prompt.blocks.push_back(i);
  const auto time_step = [&](const std::vector<Piece>& pieces, bool last_only) {
    testing::StepArrays arrays(pieces);
    if (last_only) arrays.logit_rows = {arrays.logit_rows.back()};
    const auto step = [&] { engine->step(arrays.input(), [](std::int64_t, std::int64_t, const float*) {}); };
    step();
    return measure(rounds, step);
  };
  const auto print = [](const char* name, Times times, double tokens) {
    std::printf("%-34s %8.2f ms (median %8.2f)  %8.1f tok/s", name, times.least * 1e3, times.median * 1e3,
                tokens / times.least);
  };

  const Times prefill = time_step({prompt}, true);
  const double body_flops = (weights - 2.0 * 32000 * 1024) * kPrompt;
  print("prefill 512", prefill, kPrompt);
  std::printf("  %.0f%% of bf16 peak\n", 100.0 * body_flops / prefill.least / peak);
  prompt.adapter = adapters.data();
  print("prefill 512, rank 16", time_step({prompt}, true), kPrompt);
  std::printf("\n");
  const Times alone = time_step(batch(1, kContext, {}, 64), false);
  print("decode, batch 1", alone, 1);
  std::printf("  %.0f%% of bandwidth\n", 100.0 * weights / alone.least / bandwidth);
  const std::vector<DeviceAdapter> one(adapters.begin(), adapters.begin() + 1);
  print("decode, batch 1, rank 16", time_step(batch(1, kContext, one, 64), false), 1);
  std::printf("\n");
  const Times base = time_step(batch(kBatch, kContext, {}, 64), false);
  print("decode, batch 16", base, kBatch);
  std::printf("\n");
  const Times shared = time_step(batch(kBatch, kContext, one, 64), false);
  print("decode, batch 16, one rank 16", shared, kBatch);
  std::printf("  %.0f%% of the base\n", 100.0 * base.least / shared.least);
  const Times mixed = time_step(batch(kBatch, kContext, adapters, 64), false);
  print("decode, batch 16, 16 of rank 16", mixed, kBatch);
  std::printf("  %.0f%% of the base\n", 100.0 * base.least / mixed.least);
}

}  // namespace
}  // namespace adaptrt

int main(int argc, char** argv) {
  const int threads = argc > 1 ? std::atoi(argv[1]) : 2;
  const int rounds = argc > 2 ? std::atoi(argv[2]) : 7;
  adaptrt::run(threads, rounds, argc > 3 ? argv[3] : "");
  return 0;
}
