// Measures ReLU-gated layers: a 0.5B bfloat16 Llama shape with random weights and ReLU gates, of which biases
// close nine in ten, half or none. A program that skips closed neurons, one that reads everything, and one
// with predictors alternate, step by step, on one thread pool. The predictors expect 12% of the gates to be
// open, of which one in six is not.
//   sparse_bench [threads] [rounds] [kernels]

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "adaptrt/cpu/cpu_engine.h"
#include "adaptrt/engine/step_profile.h"
#include "cpu/random_model.h"
#include "cpu/step_arrays.h"

namespace adaptrt {
namespace {

using testing::Piece;

constexpr int kBatch = 16;
constexpr int kContext = 512;
constexpr int kBlock = 64;
constexpr int kPrompt = 512;

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2),
                   values.end());
  return values[values.size() / 2];
}

/// Calls visit(gated layer, the layer that reads its output) for each MLP.
template <class Visit>
void for_each_mlp(Program* program, const Visit& visit) {
  for (std::size_t i = 0; i + 1 < program->body.size(); ++i) {
    auto* first = std::get_if<LinearOp>(&program->body[i]);
    if (first != nullptr && is_relu_gated(first->epilogue))
      visit(*first, std::get<LinearOp>(program->body[i + 1]));
  }
}

/// The model with this bias for all gates.
Program with_bias(const Program& dense, float bias, testing::Storage* storage) {
  Program program = dense;
  for_each_mlp(&program, [&](LinearOp& gated, LinearOp&) {
    const auto width = static_cast<std::size_t>(gated.parts[0].weight.n);
    gated.parts[0].bias = storage->vector(std::vector<float>(width, bias));
  });
  return program;
}

/// A program with the same results that skips closed neurons.
Program made_sparse(const Program& dense, testing::Storage* storage) {
  Program program = dense;
  for_each_mlp(&program, [&](LinearOp& gated, LinearOp& reader) {
    gated.parts[1].weight = storage->with_rows(gated.parts[1].weight);
    reader.parts[0].weight = storage->with_columns(reader.parts[0].weight);
    reader.has_sparse_input = true;
  });
  return program;
}

/// 88% of the normally distributed scores are below it. The mean square of the inner values is half of
/// 1.08^2.
constexpr float kLeastScore = 0.863F;

/// The program of made_sparse, in which gates are only read if a predictor with random weights expects them
/// to be open. It reads the normalised rows, whose scale is known, not the residual stream.
Program made_predicted(const Program& dense, std::int64_t rank, testing::Storage* storage) {
  Program program = made_sparse(dense, storage);
  const auto add_buffer = [&](const char* name, DType dtype, std::int64_t width) {
    program.buffers.push_back({name, dtype, RowKind::kTokens, width, program.arena_bytes});
    program.arena_bytes += static_cast<std::size_t>(kPrompt * width) * size_of(dtype);
    return static_cast<BufferId>(program.buffers.size()) - 1;
  };
  testing::Random random(3);
  const auto part = [&](std::int64_t outputs, std::int64_t inputs) {
    const float bound = std::sqrt(3.0F / static_cast<float>(inputs));
    return LinearPart{storage->matrix(DType::kBFloat16, outputs, inputs, bound, &random), {}};
  };
  const BufferId inner = add_buffer("inner", DType::kBFloat16, rank);
  BufferId scores = kNoBuffer;
  std::vector<Op> body;
  for (Op& op : program.body) {
    auto* gated = std::get_if<LinearOp>(&op);
    if (gated != nullptr && is_relu_gated(gated->epilogue)) {
      const PanelMatrix& gate = gated->parts[0].weight;
      if (scores == kNoBuffer) scores = add_buffer("scores", DType::kFloat32, gate.n);
      body.push_back(LinearOp{.input = gated->input,
                              .output = inner,
                              .epilogue = LinearEpilogue::kRelu,
                              .parts = {part(rank, gate.k)}});
      body.push_back(LinearOp{.input = inner, .output = scores, .parts = {part(gate.n, rank)}});
      gated->scores = scores;
      gated->least_score = kLeastScore;
      gated->parts[0].weight = storage->with_rows(gate);
    }
    body.push_back(op);
  }
  program.body = std::move(body);
  return program;
}

struct Sequences {
  int count;
  int tokens;
  const DeviceAdapter* adapter;
};

testing::StepArrays arrays_of(const Sequences& sequences) {
  std::vector<Piece> pieces;
  std::int32_t block = 0;
  for (int s = 0; s < sequences.count; ++s) {
    const int first = sequences.tokens == 1 ? kContext - 1 : 0;
    Piece piece{.first_position = first, .prompt_length = kContext, .adapter = sequences.adapter};
    for (int i = 0; i < sequences.tokens; ++i) piece.tokens.push_back((s * 7919 + i * 17 + 13) % 32000);
    for (int used = 0; used < kContext; used += kBlock) piece.blocks.push_back(block++);
    pieces.push_back(std::move(piece));
  }
  testing::StepArrays arrays(pieces);
  if (sequences.tokens > 1) arrays.logit_rows = {arrays.logit_rows.back()};
  return arrays;
}

/// One program's engine, and the bytes of weights that its steps read.
class Side {
 public:
  Side(const Program& program, const std::shared_ptr<ThreadPool>& threads, const char* kernels)
      : profile_(std::make_shared<StepProfile>(1)),
        engine_(make_cpu_engine(program, threads, kernels)),
        profiled_(make_cpu_engine(program, threads, kernels, profile_)) {
    for (auto* engine : {engine_.get(), profiled_.get()})
      engine->allocate_kv_blocks(kBatch * kContext / kBlock);
  }

  double seconds(const testing::StepArrays& arrays) {
    const auto begin = std::chrono::steady_clock::now();
    step(engine_.get(), arrays);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }

  double bytes_read(const testing::StepArrays& arrays) {
    step(profiled_.get(), arrays);
    double bytes = 0.0;
    for (const OpRecord& op : profile_->take_steps().front().ops)
      bytes += static_cast<double>(op.cost.weight_bytes);
    return bytes;
  }

 private:
  static void step(Engine* engine, const testing::StepArrays& arrays) {
    engine->step(arrays.input(), [](std::int64_t, std::int64_t, const float*) {});
  }

  std::shared_ptr<StepProfile> profile_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<Engine> profiled_;
};

void compare(const char* title, Side* sparse, Side* dense, const Sequences& sequences, int rounds) {
  const testing::StepArrays arrays = arrays_of(sequences);
  std::vector<double> sparse_times;
  std::vector<double> dense_times;
  std::vector<double> ratios;
  for (int round = -1; round < rounds; ++round) {
    const bool first = round % 2 == 0;
    double ours = first ? sparse->seconds(arrays) : 0.0;
    const double theirs = dense->seconds(arrays);
    if (!first) ours = sparse->seconds(arrays);
    if (round < 0) continue;  // warm-up
    sparse_times.push_back(ours);
    dense_times.push_back(theirs);
    ratios.push_back(theirs / ours);
  }
  std::sort(ratios.begin(), ratios.end());
  std::printf("  %-26s %7.2f ms, dense %7.2f ms: %.3f x (%.3f to %.3f); reads %4.0f of %4.0f MB\n", title,
              median(sparse_times) * 1e3, median(dense_times) * 1e3, median(ratios),
              ratios[ratios.size() / 4], ratios[ratios.size() * 3 / 4], sparse->bytes_read(arrays) * 1e-6,
              dense->bytes_read(arrays) * 1e-6);
  std::fflush(stdout);
}

void run(int num_threads, int rounds, const char* kernels) {
  const auto threads = std::make_shared<ThreadPool>(num_threads);
  testing::RandomModel model({.dtype = DType::kBFloat16,
                              .vocab_size = 32000,
                              .num_layers = 28,
                              .shape = {1024, {16, 4, 64}},
                              .intermediate_size = 4096,
                              .activation = LinearEpilogue::kReluMul,
                              .max_batch_size = kBatch,
                              .max_num_tokens = kPrompt,
                              .max_seq_len = kContext,
                              .tokens_per_block = kBlock,
                              .max_rank = 16});
  const DeviceAdapter adapter = model.adapter(7, false, 16);
  const Program sparse = made_sparse(model.program, &model.storage());
  // Sums are normally distributed, with a deviation of 1.04, or 1.67 with the adapter.
  struct Share {
    const char* closed;
    float bias;
    float bias_of_adapter;
  };
  for (const Share& share :
       {Share{"90%", -1.33F, -2.14F}, Share{"50%", 0.0F, 0.0F}, Share{"0%", 20.0F, 20.0F}}) {
    std::printf("%s of the gates closed, %d threads\n", share.closed, threads->num_threads());
    Side ours(with_bias(sparse, share.bias, &model.storage()), threads, kernels);
    Side theirs(with_bias(model.program, share.bias, &model.storage()), threads, kernels);
    compare("decode, 1", &ours, &theirs, {1, 1, nullptr}, rounds);
    compare("decode, 2", &ours, &theirs, {2, 1, nullptr}, rounds);
    compare("decode, 3", &ours, &theirs, {3, 1, nullptr}, rounds);
    compare("decode, 16", &ours, &theirs, {kBatch, 1, nullptr}, rounds);
    compare("prompt of 512", &ours, &theirs, {1, kPrompt, nullptr}, std::max(3, rounds / 4));
    Side our_adapted(with_bias(sparse, share.bias_of_adapter, &model.storage()), threads, kernels);
    Side their_adapted(with_bias(model.program, share.bias_of_adapter, &model.storage()), threads, kernels);
    compare("decode, 1, rank 16", &our_adapted, &their_adapted, {1, 1, &adapter}, rounds);
  }
  for (const int rank : {128, 256}) {
    const Program predicted = made_predicted(model.program, rank, &model.storage());
    std::printf("predictors of rank %d, 10%% of the gates open, %d threads\n", rank, threads->num_threads());
    for (const DeviceAdapter* worn : {static_cast<const DeviceAdapter*>(nullptr), &adapter}) {
      const float bias = worn == nullptr ? 1.0F : 1.6F;  // five in six of the normally distributed sums
      Side ours(with_bias(predicted, bias, &model.storage()), threads, kernels);
      Side theirs(with_bias(model.program, bias, &model.storage()), threads, kernels);
      const std::string adapted = worn == nullptr ? "" : ", rank 16";
      for (const int sequences : {1, 2, 3}) {
        const std::string title = "decode, " + std::to_string(sequences) + adapted;
        compare(title.c_str(), &ours, &theirs, {sequences, 1, worn}, rounds);
      }
      compare(("decode, 16" + adapted).c_str(), &ours, &theirs, {kBatch, 1, worn}, rounds);
      compare(("prompt of 512" + adapted).c_str(), &ours, &theirs, {1, kPrompt, worn},
              std::max(3, rounds / 4));
    }
  }
}

}  // namespace
}  // namespace adaptrt

int main(int argc, char** argv) {
  const int threads = argc > 1 ? std::atoi(argv[1]) : 2;
  const int rounds = argc > 2 ? std::atoi(argv[2]) : 31;
  adaptrt::run(threads, rounds, argc > 3 ? argv[3] : "");
  return 0;
}
