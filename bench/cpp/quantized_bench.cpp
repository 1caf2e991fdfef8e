// Compares engines of quantised weights with a bfloat16 engine, on a 0.5B Llama shape with random weights.
// Their steps alternate, so that disturbances of the machine affect all of them.
//   quantized_bench [threads] [rounds] [kernels]

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <variant>
#include <vector>

#include "adaptrt/cpu/cpu_engine.h"
#include "adaptrt/measure/machine_limits.h"
#include "cpu/random_model.h"
#include "cpu/step_arrays.h"

namespace adaptrt {
namespace {

using testing::Piece;

constexpr int kVocabulary = 32000;
constexpr int kContext = 512;
constexpr int kBlock = 64;
constexpr int kMostSequences = 16;

/// An engine and the times of its steps, by workload.
struct Contender {
  const char* name;
  std::unique_ptr<testing::RandomModel> model;
  std::unique_ptr<Engine> engine;
  double weight_bytes = 0.0;
  std::vector<double> times = {};

  [[nodiscard]] double median() {
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
  }
};

Contender make_contender(const char* name, const Quantization& quantization,
                         const std::shared_ptr<ThreadPool>& threads, const char* kernels) {
  Contender made{
      .name = name,
      .model = std::make_unique<testing::RandomModel>(testing::ModelOptions{.dtype = DType::kBFloat16,
                                                                            .vocab_size = kVocabulary,
                                                                            .num_layers = 24,
                                                                            .shape = {1024, 16, 4, 64},
                                                                            .intermediate_size = 2816,
                                                                            .max_batch_size = kMostSequences,
                                                                            .max_num_tokens = kContext,
                                                                            .max_seq_len = 2 * kContext,
                                                                            .tokens_per_block = kBlock,
                                                                            .quantization = quantization}),
      .engine = nullptr};
  for (const auto& ops : {made.model->program.body, made.model->program.head}) {
    for (const auto& op : ops) {
      const auto* linear = std::get_if<LinearOp>(&op);
      if (linear == nullptr) continue;
      for (const auto& part : linear->parts) made.weight_bytes += static_cast<double>(part.weight.bytes());
    }
  }
  made.engine = make_cpu_engine(made.model->program, threads, kernels);
  made.engine->allocate_kv_blocks(kMostSequences * kContext / kBlock);
  return made;
}

/// One decode for each of `sequences` sequences.
std::vector<Piece> decodes(int sequences) {
  std::vector<Piece> pieces;
  std::int32_t next_block = 0;
  for (int s = 0; s < sequences; ++s) {
    Piece piece{
        .tokens = {(s * 7919 + 13) % kVocabulary}, .first_position = kContext - 1, .prompt_length = kContext};
    for (int used = 0; used < kContext; used += kBlock) piece.blocks.push_back(next_block++);
    pieces.push_back(std::move(piece));
  }
  return pieces;
}

std::vector<Piece> prompt() {
  Piece piece{.prompt_length = kContext};
  for (int i = 0; i < kContext; ++i) piece.tokens.push_back((i * 7919 + 17) % kVocabulary);
  for (int i = 0; i < kContext / kBlock; ++i) piece.blocks.push_back(i);
  return {piece};
}

void compare(const char* workload, const std::vector<Piece>& pieces, int rounds, double bandwidth,
             std::vector<Contender>* contenders) {
  testing::StepArrays arrays(pieces);
  if (pieces.size() == 1) arrays.logit_rows = {arrays.logit_rows.back()};
  for (auto& contender : *contenders) contender.times.clear();
  for (int round = -1; round < rounds; ++round) {
    for (auto& contender : *contenders) {
      const auto begin = std::chrono::steady_clock::now();
      contender.engine->step(arrays.input(), [](std::int64_t, std::int64_t, const float*) {});
      const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
      if (round >= 0) contender.times.push_back(taken.count());
    }
  }
  const double base = contenders->front().median();
  std::printf("%s\n", workload);
  for (auto& contender : *contenders) {
    const double median = contender.median();
    std::printf("  %-12s least %8.2f ms, median %8.2f ms, %5.2f times %s, weights at %3.0f%% of bandwidth\n",
                contender.name, contender.times.front() * 1e3, median * 1e3, base / median,
                contenders->front().name, 100.0 * contender.weight_bytes / median / bandwidth);
  }
}

void run(int num_threads, int rounds, const char* kernels) {
  const auto threads = std::make_shared<ThreadPool>(num_threads);
  std::vector<Contender> contenders;
  contenders.push_back(make_contender("bfloat16", {}, threads, kernels));
  contenders.push_back(make_contender("W8A16", {.algo = QuantAlgo::kW8A16}, threads, kernels));
  contenders.push_back(make_contender("W8A8", {.algo = QuantAlgo::kW8A8}, threads, kernels));
  contenders.push_back(
      make_contender("W4A16 g128", {.algo = QuantAlgo::kW4A16, .group_size = 128}, threads, kernels));
  contenders.push_back(make_contender(
      "W4A16 g32 z", {.algo = QuantAlgo::kW4A16, .group_size = 32, .zero_points = true}, threads, kernels));
  contenders.push_back(make_contender(
      "W4A16 f16 s",
      {.algo = QuantAlgo::kW4A16, .group_size = 128, .zero_points = true, .scale_type = DType::kFloat16},
      threads, kernels));
  contenders.push_back(make_contender("NF4 b64",
                                      {.algo = QuantAlgo::kW4A16,
                                       .group_size = 64,
                                       .scale_type = DType::kFloat32,
                                       .code = WeightCode::kNF4,
                                       .value_type = DType::kBFloat16},
                                      threads, kernels));
  for (const std::int32_t bits : {2, 3}) {
    contenders.push_back(make_contender(bits == 2 ? "2 bits g128" : "3 bits g128",
                                        {.algo = QuantAlgo::kW4A16, .group_size = 128, .bits = bits}, threads,
                                        kernels));
    contenders.push_back(make_contender(bits == 2 ? "2 bits g64 z" : "3 bits g64 z",
                                        {.algo = QuantAlgo::kW4A16,
                                         .group_size = 64,
                                         .zero_points = true,
                                         .scale_type = DType::kFloat16,
                                         .bits = bits},
                                        threads, kernels));
  }
  contenders.push_back(
      make_contender("W4A8 g128", {.algo = QuantAlgo::kW4A8, .group_size = 128}, threads, kernels));
  contenders.push_back(make_contender(
      "W4A8 g32 z", {.algo = QuantAlgo::kW4A8, .group_size = 32, .zero_points = true}, threads, kernels));
  for (const std::int32_t bits : {2, 3}) {
    contenders.push_back(make_contender(bits == 2 ? "2 bits A8" : "3 bits A8",
                                        {.algo = QuantAlgo::kW4A8, .group_size = 128, .bits = bits}, threads,
                                        kernels));
  }
  for (const std::int64_t group_size : {0, 128}) {
    contenders.push_back(make_contender(group_size == 0 ? "FP8" : "FP8 b128",
                                        {.algo = QuantAlgo::kW8A16,
                                         .group_size = group_size,
                                         .scale_type = group_size == 0 ? DType::kBFloat16 : DType::kFloat32,
                                         .code = WeightCode::kE4M3,
                                         .value_type = DType::kBFloat16},
                                        threads, kernels));
  }
  const double bandwidth = measure_machine_limits(threads.get(), rounds).read_bandwidth;
  std::printf("%d threads, read bandwidth %.1f GB/s\n", threads->num_threads(), bandwidth * 1e-9);
  for (const auto& contender : contenders) {
    std::printf("  %-12s %7.1f MB read by a decode step\n", contender.name, contender.weight_bytes * 1e-6);
  }
  compare("decode, 1 sequence", decodes(1), rounds, bandwidth, &contenders);
  compare("decode, 4 sequences", decodes(4), rounds, bandwidth, &contenders);
  compare("decode, 16 sequences", decodes(16), rounds, bandwidth, &contenders);
  compare("prefill, 512 tokens", prompt(), std::max(3, rounds / 4), bandwidth, &contenders);
}

}  // namespace
}  // namespace adaptrt

int main(int argc, char** argv) {
  const int threads = argc > 1 ? std::atoi(argv[1]) : 2;
  const int rounds = argc > 2 ? std::atoi(argv[2]) : 21;
  adaptrt::run(threads, rounds, argc > 3 ? argv[3] : "");
  return 0;
}
