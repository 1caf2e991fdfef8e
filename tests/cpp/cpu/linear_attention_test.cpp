// Linear attention, compared with its definition in float64, and in steps and crowds of every kind.

#include <algorithm>
#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "adaptrt/core/error.h"
#include "adaptrt/cpu/cpu_engine.h"
#include "cpu/random_storage.h"
#include "cpu/step_arrays.h"
#include "emulated_tiles/kernel_tables.h"

namespace adaptrt::testing::linear_attention_test {
namespace {

namespace data = boost::unit_test::data;

constexpr DeltaShape kShape{
    .num_key_heads = 2, .num_value_heads = 4, .key_dim = 5, .value_dim = 70};  // two pieces of columns
constexpr std::int64_t kValues = 280;
constexpr std::int64_t kConvolved = 2 * 10 + kValues;  // two pieces of columns
constexpr std::int64_t kTaps = 4;
constexpr float kEpsilon = 1e-3F;

std::size_t at(std::int64_t index) {
  return static_cast<std::size_t>(index);
}

double sigmoid(double x) {
  return 1.0 / (1.0 + std::exp(-x));
}

/// A program whose embeddings are [q | k | v | z] and [b | a], and whose logits are the output of linear
/// attention, multiplied by the sigmoid of z, and normalised.
class LinearAttentionAlone {
 public:
  explicit LinearAttentionAlone(DType dtype) : random_(3) {
    program.dtype = dtype;
    program.vocab_size = kValues;
    program.num_layers = 1;
    program.max_batch_size = 4;
    program.max_num_tokens = 64;
    program.max_input_len = program.max_seq_len = 60;
    program.tokens_per_block = 16;
    const DType activation = activation_dtype(dtype);
    const BufferId qkvz = buffer(DType::kFloat32, RowKind::kTokens, kConvolved + kValues);
    const BufferId gates = buffer(DType::kFloat32, RowKind::kTokens, 2 * kShape.num_value_heads);
    const BufferId attended = buffer(DType::kFloat32, RowKind::kTokens, kValues);
    const BufferId normed = buffer(activation, RowKind::kTokens, kValues);
    const BufferId stream = buffer(DType::kFloat32, RowKind::kTokens, kValues);
    const BufferId last = buffer(activation, RowKind::kLogits, kValues);
    program.logits = buffer(DType::kFloat32, RowKind::kLogits, kValues);
    rows_ = embed(qkvz, kConvolved + kValues);
    gates_ = embed(gates, 2 * kShape.num_value_heads);
    convolution_ = storage_.vector(kTaps * kConvolved, -1.0F, 1.0F, &random_);
    program.body.push_back(CausalConvolutionOp{.values = qkvz, .weight = convolution_, .taps = kTaps});
    log_decay_ = storage_.vector(kShape.num_value_heads, -3.0F, 1.0F, &random_);
    time_bias_ = storage_.vector({-1.0F, 0.5F, 25.0F, 0.0F});  // the third is beyond softplus's bound
    program.body.push_back(GatedDeltaOp{.shape = kShape,
                                        .qkv = qkvz,
                                        .gates = gates,
                                        .output = attended,
                                        .log_decay = log_decay_,
                                        .time_bias = time_bias_});
    weight_ = storage_.vector(kShape.value_dim, 0.5F, 1.5F, &random_);
    program.body.push_back(GatedRmsNormOp{
        .input = attended, .gate = qkvz, .output = normed, .weight = weight_, .epsilon = kEpsilon});
    program.body.push_back(SigmoidGateOp{.gate = qkvz, .output = normed});
    LinearOp dense{.input = normed, .output = stream, .parts = {}};
    dense.parts.push_back({.weight = identity(dtype), .bias = {}});
    program.body.push_back(dense);
    program.head.push_back(RmsNormOp{.input = stream,
                                     .output = last,
                                     .weight = storage_.vector(std::vector<float>(at(kValues), 1.0F)),
                                     .epsilon = kEpsilon,
                                     .gather_logit_rows = true});
    LinearOp logits{.input = last, .output = program.logits, .parts = {}};
    logits.parts.push_back({.weight = identity(dtype), .bias = {}});
    program.head.push_back(logits);
  }

  Program program;

  [[nodiscard]] std::vector<std::int32_t> tokens(std::size_t count) {
    std::vector<std::int32_t> made(count);
    for (auto& token : made) token = static_cast<std::int32_t>(random_.below(kValues));
    return made;
  }

  /// Returns the float64 logits [tokens, kValues] of a sequence.
  [[nodiscard]] std::vector<double> expected(const std::vector<std::int32_t>& tokens) const {
    std::vector<double> logits;
    std::vector<double> state(at(kShape.state_size()), 0.0);
    for (std::size_t row = 0; row < tokens.size(); ++row) {
      const auto qkv = convolved(tokens, row);
      std::vector<double> out;
      for (std::int64_t head = 0; head < kShape.num_value_heads; ++head) {
        const auto values = advanced(tokens[row], qkv, head, &state);
        out.insert(out.end(), values.begin(), values.end());
      }
      double square = 0.0;
      for (std::int64_t i = 0; i < kValues; ++i) {
        const double z = rows_[at(tokens[row] * (kConvolved + kValues) + kConvolved + i)];
        out[at(i)] *= z * sigmoid(z) * sigmoid(z);
        square += out[at(i)] * out[at(i)] / static_cast<double>(kValues);
      }
      for (const double value : out) logits.push_back(value / std::sqrt(square + kEpsilon));
    }
    return logits;
  }

 private:
  BufferId buffer(DType dtype, RowKind rows, std::int64_t width) {
    const std::int64_t count = rows == RowKind::kTokens ? program.max_num_tokens : program.max_batch_size;
    const auto id = static_cast<BufferId>(program.buffers.size());
    program.buffers.push_back({"b" + std::to_string(id), dtype, rows, width, program.arena_bytes});
    program.arena_bytes += (at(count * width) * size_of(dtype) + 63) / 64 * 64;
    return id;
  }

  std::vector<float> embed(BufferId output, std::int64_t width) {
    const EmbeddingOp op{.table = storage_.matrix(program.dtype, kValues, width, 1.5F, &random_),
                         .output = output};
    program.body.push_back(op);
    return unpack(op.table);
  }

  PanelMatrix identity(DType dtype) {
    std::vector<float> values(at(kValues * kValues), 0.0F);
    for (std::size_t i = 0; i < at(kValues); ++i) values[i * (at(kValues) + 1)] = 1.0F;
    return storage_.matrix(dtype, kValues, kValues, values);
  }

  [[nodiscard]] std::vector<double> convolved(const std::vector<std::int32_t>& tokens,
                                              std::size_t row) const {
    std::vector<double> made;
    for (std::int64_t column = 0; column < kConvolved; ++column) {
      double sum = 0.0;
      for (std::int64_t tap = 0; tap < kTaps; ++tap) {
        const std::int64_t from = static_cast<std::int64_t>(row) - kTaps + 1 + tap;
        if (from < 0) continue;
        sum += static_cast<double>(convolution_.data[tap * kConvolved + column]) *
               static_cast<double>(rows_[at(tokens[at(from)] * (kConvolved + kValues) + column)]);
      }
      made.push_back(sum * sigmoid(sum));
    }
    return made;
  }

  /// Returns a head of q or k, divided by its L2 norm.
  static std::vector<double> normalized(const std::vector<double>& qkv, std::int64_t first) {
    const auto begin = qkv.begin() + first;
    std::vector<double> made(begin, begin + kShape.key_dim);
    double square = 1e-6;
    for (const double value : made) square += value * value;
    for (double& value : made) value /= std::sqrt(square);
    return made;
  }

  /// Advances the state of a value head, and returns its normalised output.
  [[nodiscard]] std::vector<double> advanced(std::int32_t token, const std::vector<double>& qkv,
                                             std::int64_t head, std::vector<double>* state) const {
    const std::int64_t key_head = head / 2;
    const auto query = normalized(qkv, key_head * kShape.key_dim);
    const auto key = normalized(qkv, kShape.key_size() + key_head * kShape.key_dim);
    const float* gates = gates_.data() + at(token * 2 * kShape.num_value_heads);
    const double beta = sigmoid(gates[head]);
    const double time = static_cast<double>(gates[kShape.num_value_heads + head]) +
                        static_cast<double>(time_bias_.data[head]);
    const double decay =
        std::exp(-std::exp(static_cast<double>(log_decay_.data[head])) * std::log1p(std::exp(time)));
    std::vector<double> out;
    double square = 0.0;
    for (std::int64_t column = 0; column < kShape.value_dim; ++column) {
      const auto element = [&](std::int64_t i) -> double& {
        return (*state)[at((head * kShape.key_dim + i) * kShape.value_dim + column)];
      };
      double known = 0.0;
      for (std::int64_t i = 0; i < kShape.key_dim; ++i) known += decay * element(i) * key[at(i)];
      const double value = qkv[at(2 * kShape.key_size() + head * kShape.value_dim + column)];
      double sum = 0.0;
      for (std::int64_t i = 0; i < kShape.key_dim; ++i) {
        element(i) = decay * element(i) + key[at(i)] * (value - known) * beta;
        sum += element(i) * query[at(i)] / std::sqrt(static_cast<double>(kShape.key_dim));
      }
      out.push_back(sum);
      square += sum * sum / static_cast<double>(kShape.value_dim);
    }
    for (std::int64_t column = 0; column < kShape.value_dim; ++column) {
      out[at(column)] *= static_cast<double>(weight_.data[column]) / std::sqrt(square + kEpsilon);
    }
    return out;
  }

  Random random_;
  Storage storage_;
  std::vector<float> rows_;
  std::vector<float> gates_;
  VectorView convolution_;
  VectorView log_decay_;
  VectorView time_bias_;
  VectorView weight_;
};

std::unique_ptr<Engine> engine_of(const LinearAttentionAlone& model, int threads,
                                  const KernelTable& kernels) {
  auto engine = make_cpu_engine(model.program, std::make_shared<ThreadPool>(threads), kernels);
  engine->allocate_kv_blocks(16);
  engine->allocate_states(5);
  return engine;
}

/// Tokens [begin, end) of a sequence in a slot.
struct Part {
  const std::vector<std::int32_t>* tokens;
  std::int64_t begin;
  std::int64_t end;
  std::int32_t slot;
};

StepArrays step_of(const std::vector<Part>& parts) {
  std::vector<Piece> pieces;
  std::vector<std::int32_t> slots;
  for (const Part& part : parts) {
    Piece piece;
    piece.tokens.assign(part.tokens->begin() + part.begin, part.tokens->begin() + part.end);
    piece.first_position = static_cast<std::int32_t>(part.begin);
    piece.prompt_length = static_cast<std::int32_t>(part.tokens->size());
    for (std::int32_t block = 0; block < (part.end + 15) / 16; ++block) {
      piece.blocks.push_back(3 * part.slot + block);
    }
    pieces.push_back(piece);
    slots.push_back(part.slot);
  }
  StepArrays arrays(pieces);
  arrays.state_slots = slots;
  return arrays;
}

std::vector<float> run(Engine* engine, const std::vector<Part>& parts) {
  return logits_of(engine, step_of(parts).input());
}

void append(std::vector<float>* all, const std::vector<float>& more) {
  all->insert(all->end(), more.begin(), more.end());
}

void check_same_bits(const std::vector<float>& found, const std::vector<float>& expected) {
  BOOST_TEST_REQUIRE(found.size() == expected.size());
  BOOST_TEST(std::memcmp(found.data(), expected.data(), found.size() * sizeof(float)) == 0);
}

BOOST_AUTO_TEST_SUITE(linear_attention)

BOOST_AUTO_TEST_CASE(it_is_its_definition) {
  LinearAttentionAlone model(DType::kFloat32);
  const auto engine = engine_of(model, 2, find_kernels(""));
  const auto tokens = model.tokens(40);
  const auto logits = run(engine.get(), {{&tokens, 0, 40, 2}});
  const auto expected = model.expected(tokens);
  for (std::size_t i = 0; i < expected.size(); ++i) {
    BOOST_TEST_REQUIRE(std::abs(logits[i] - expected[i]) < 5e-5,
                       "element " << i << ": " << logits[i] << " is not " << expected[i]);
  }
}

BOOST_DATA_TEST_CASE(bits_depend_neither_on_steps_nor_on_the_crowd, kernel_tables() * data::make({0, 1, 2}),
                     name, dtype_index) {
  LinearAttentionAlone model(static_cast<DType>(dtype_index));
  const auto first = model.tokens(21);
  const auto second = model.tokens(9);
  const auto alone = engine_of(model, 1, kernel_table(name));
  const auto of_first = run(alone.get(), {{&first, 0, 21, 0}});
  const auto of_second = run(alone.get(), {{&second, 0, 9, 0}});  // the slot had another sequence

  const auto engine = engine_of(model, 3, kernel_table(name));
  std::vector<float> found_first;
  std::vector<float> found_second;
  const auto step = [&](std::int64_t begin, std::int64_t end, std::int64_t begin2, std::int64_t end2) {
    const auto logits = run(engine.get(), {{&second, begin2, end2, 1}, {&first, begin, end, 4}});
    const auto rows = static_cast<std::ptrdiff_t>((end2 - begin2) * kValues);
    found_second.insert(found_second.end(), logits.begin(), logits.begin() + rows);
    found_first.insert(found_first.end(), logits.begin() + rows, logits.end());
  };
  step(0, 2, 0, 1);
  step(2, 17, 1, 5);
  step(17, 18, 5, 9);
  append(&found_first, run(engine.get(), {{&first, 18, 21, 4}}));
  check_same_bits(found_first, of_first);
  check_same_bits(found_second, of_second);
}

BOOST_AUTO_TEST_CASE(a_copied_state_goes_on_like_the_original) {
  LinearAttentionAlone model(DType::kFloat32);
  const auto engine = engine_of(model, 2, find_kernels(""));
  const auto tokens = model.tokens(12);
  const auto whole = run(engine.get(), {{&tokens, 0, 12, 0}});
  run(engine.get(), {{&tokens, 0, 5, 3}});
  // Both copies are of the state before the step, although a sequence of the step advances it.
  StepArrays arrays = step_of({{&tokens, 5, 12, 3}, {&tokens, 5, 12, 1}});
  arrays.state_copies_from = {3, 1};
  arrays.state_copies_to = {1, 2};
  const auto both = logits_of(engine.get(), arrays.input());
  const std::vector<float> rest(whole.begin() + 5 * kValues, whole.end());
  check_same_bits({both.begin(), both.begin() + 7 * kValues}, rest);
  check_same_bits({both.begin() + 7 * kValues, both.end()}, rest);
  check_same_bits(run(engine.get(), {{&tokens, 5, 12, 2}}), rest);
}

BOOST_AUTO_TEST_CASE(the_engine_says_how_many_bytes_a_state_has) {
  LinearAttentionAlone model(DType::kBFloat16);
  const EngineInfo info = cpu_engine_info(model.program, "");
  const std::int64_t floats = 3 * kConvolved + kShape.state_size();
  BOOST_TEST(info.state_bytes >= at(floats) * sizeof(float));
  BOOST_TEST(info.state_bytes < at(floats) * sizeof(float) + 128);
  BOOST_TEST(info.max_reusable_prompt_len == 60);
  BOOST_TEST(info.has_kv_cache);
  BOOST_TEST(info.kv_block_bytes == 0U);
  const auto engine = engine_of(model, 1, find_kernels(""));
  BOOST_CHECK_THROW(engine->allocate_states(1), ConfigError);
  const auto other = make_cpu_engine(model.program, std::make_shared<ThreadPool>(1), "");
  BOOST_CHECK_THROW(other->allocate_states(0), ConfigError);
}

void check_problem(const std::string& words, void (*change)(Program* program)) {
  LinearAttentionAlone model(DType::kFloat32);
  change(&model.program);
  const auto problems = model.program.validate();
  const bool is_found = std::ranges::any_of(
      problems.list(), [&](const std::string& problem) { return problem.find(words) != std::string::npos; });
  BOOST_TEST(is_found, words);
}

template <class Kind>
Kind& op_at(Program* program, std::size_t index) {
  return std::get<Kind>(program->body.at(index));
}

BOOST_AUTO_TEST_CASE(inconsistent_programs_are_refused) {
  BOOST_TEST(LinearAttentionAlone(DType::kFloat32).program.validate().empty());
  check_problem("values 'b0' is 580 wide; it must be at least 1200",
                [](Program* p) { op_at<CausalConvolutionOp>(p, 2).taps = 1; });
  check_problem("the weight has 1200 elements; it must have some for each of 7 taps",
                [](Program* p) { op_at<CausalConvolutionOp>(p, 2).taps = 7; });
  check_problem("taps is 0", [](Program* p) { op_at<CausalConvolutionOp>(p, 2).taps = 0; });
  check_problem("layer is 1", [](Program* p) { op_at<CausalConvolutionOp>(p, 2).layer = 1; });
  check_problem("layer 0 has 2 causal convolutions, not one",
                [](Program* p) { p->body.insert(p->body.begin() + 2, p->body[2]); });
  check_problem("layer 0 has 2 attention ops, not one",
                [](Program* p) { p->body.insert(p->body.begin() + 3, p->body[3]); });
  check_problem("num_value_heads is 4; expected a multiple of 3 key heads",
                [](Program* p) { op_at<GatedDeltaOp>(p, 3).shape.num_key_heads = 3; });
  check_problem("key_dim is 0", [](Program* p) { op_at<GatedDeltaOp>(p, 3).shape.key_dim = 0; });
  check_problem("'b1' is 8 wide; it must be 16",
                [](Program* p) { op_at<GatedDeltaOp>(p, 3).shape.num_value_heads = 8; });
  check_problem("log_decay has 3 elements", [](Program* p) { op_at<GatedDeltaOp>(p, 3).log_decay.size = 3; });
  check_problem("time_bias has 0 elements", [](Program* p) { op_at<GatedDeltaOp>(p, 3).time_bias = {}; });
  check_problem("qkv 'b1' is 8 wide; it must be at least 300",
                [](Program* p) { op_at<GatedDeltaOp>(p, 3).qkv = 1; });
  check_problem("the bytes of a sequence's states do not fit",
                [](Program* p) { op_at<GatedDeltaOp>(p, 3).shape = {2, 1 << 30, 1 << 20, 1 << 20}; });
  check_problem("the weight has 71 elements; it must have a divisor of 280",
                [](Program* p) { op_at<GatedRmsNormOp>(p, 4).weight.size = 71; });
  check_problem("gate 'b1' is 8 wide; it must be at least 280",
                [](Program* p) { op_at<GatedRmsNormOp>(p, 4).gate = 1; });
  check_problem("gate 'b1' is 8 wide; it must be at least 280",
                [](Program* p) { op_at<SigmoidGateOp>(p, 5).gate = 1; });
  check_problem("group_ranks is 2", [](Program* p) { op_at<GatedRmsNormOp>(p, 4).group_ranks = 2; });
  check_problem("group_ranks is 2; expected a divisor of 3 ranks", [](Program* p) {
    p->num_ranks = 3;
    op_at<GatedRmsNormOp>(p, 4).group_ranks = 2;
  });
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::testing::linear_attention_test
