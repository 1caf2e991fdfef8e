// Bidirectional attention, compared with its definition and in different batches.

#include <algorithm>
#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "adaptrt/cpu/cpu_engine.h"
#include "cpu/random_model.h"
#include "cpu/step_arrays.h"
#include "emulated_tiles/kernel_tables.h"

namespace adaptrt::testing::bidirectional_test {
namespace {

namespace data = boost::unit_test::data;

constexpr std::int64_t kHeads = 4;
constexpr std::int64_t kKvHeads = 2;
constexpr std::int64_t kHeadDim = 12;
constexpr std::int64_t kQuery = kHeads * kHeadDim;
constexpr std::int64_t kKey = kKvHeads * kHeadDim;
constexpr std::int64_t kReach = 5;
constexpr float kEpsilon = 1e-3F;

struct Options {
  DType dtype = DType::kFloat32;
  std::int32_t sliding_window = 0;
  bool biased = false;
  bool rotated = false;
  bool sinks = false;
};

constexpr Options kOptions[] = {{},
                                {.sliding_window = 9},
                                {.biased = true},
                                {.sliding_window = 70, .biased = true, .rotated = true},
                                {.sinks = true}};

/// A program whose embedding is [q | k | v] and whose logits are the normalised output of one attention op.
class AttentionAlone {
 public:
  explicit AttentionAlone(const Options& options) : random_(7) {
    program.dtype = options.dtype;
    program.vocab_size = kQuery;
    program.num_layers = 1;
    program.max_batch_size = 4;
    program.max_num_tokens = 300;
    program.max_input_len = program.max_seq_len = 200;
    program.tokens_per_block = 16;
    const DType activation = activation_dtype(options.dtype);
    const BufferId qkv = buffer(DType::kFloat32, RowKind::kTokens, kQuery + 2 * kKey);
    const BufferId cosine = buffer(DType::kFloat32, RowKind::kTokens, 1);
    const BufferId sine = buffer(DType::kFloat32, RowKind::kTokens, 1);
    const BufferId attended = buffer(activation, RowKind::kTokens, kQuery);
    const BufferId last = buffer(activation, RowKind::kLogits, kQuery);
    const BufferId stream = buffer(DType::kFloat32, RowKind::kTokens, kQuery);
    program.logits = buffer(DType::kFloat32, RowKind::kLogits, kQuery);
    EmbeddingOp embedding{.table = storage_.matrix(options.dtype, kQuery, kQuery + 2 * kKey, 1.5F, &random_),
                          .output = qkv};
    rows_ = unpack(embedding.table);
    program.body.push_back(embedding);
    frequency_ = options.rotated ? 0.3F : 0.0F;
    program.body.push_back(
        RopeTableOp{.inverse_frequencies = storage_.vector({frequency_}), .cosine = cosine, .sine = sine});
    AttentionOp attention;
    attention.kind = AttentionKind::kBidirectional;
    attention.shape = {kHeads, kKvHeads, kHeadDim};
    attention.qkv = qkv;
    attention.cosine = cosine;
    attention.sine = sine;
    attention.output = attended;
    attention.scale = kScale;
    attention.sliding_window = options.sliding_window;
    window_ = options.sliding_window;
    if (options.biased) {
      attention.position_bias = storage_.vector(kHeads * (2 * kReach + 1), -2.0F, 2.0F, &random_);
      bias_ = attention.position_bias.data;
    }
    if (options.sinks) {
      // The sink of the last head takes nearly all of the weight.
      attention.sinks = storage_.vector({-3.0F, 0.5F, 2.0F, 30.0F});
      sinks_ = attention.sinks.data;
    }
    program.body.push_back(attention);
    LinearOp dense{.input = attended, .output = stream, .parts = {}};
    dense.parts.push_back({.weight = identity(options.dtype), .bias = {}});
    program.body.push_back(dense);
    program.head.push_back(RmsNormOp{.input = stream,
                                     .output = last,
                                     .weight = storage_.vector(std::vector<float>(kQuery, 1.0F)),
                                     .epsilon = kEpsilon,
                                     .gather_logit_rows = true});
    LinearOp logits{.input = last, .output = program.logits, .parts = {}};
    logits.parts.push_back({.weight = identity(options.dtype), .bias = {}});
    program.head.push_back(logits);
  }

  Program program;

  [[nodiscard]] Piece piece(std::size_t tokens) {
    Piece made;
    for (std::size_t i = 0; i < tokens; ++i) {
      made.tokens.push_back(static_cast<std::int32_t>(random_.below(kQuery)));
    }
    made.prompt_length = static_cast<std::int32_t>(tokens);
    return made;
  }

  /// Returns the float64 logits of one row of a sequence.
  [[nodiscard]] std::vector<double> expected(const std::vector<std::int32_t>& tokens, std::size_t row) const {
    std::vector<double> out(kQuery, 0.0);
    const auto position = static_cast<std::int64_t>(row);
    const auto last = static_cast<std::int64_t>(tokens.size()) - 1;
    const std::int64_t reach = window_ == 0 ? last : window_ - 1;
    for (std::int64_t head = 0; head < kHeads; ++head) {
      const std::int64_t kv_head = head * kKvHeads / kHeads;
      const auto query = rotated(tokens[row], head * kHeadDim, position);
      const std::int64_t first = std::max<std::int64_t>(0, position - reach);
      std::vector<double> weights;
      double total = sinks_ == nullptr ? 0.0 : std::exp(static_cast<double>(sinks_[head]));
      for (std::int64_t key = first; key <= std::min(last, position + reach); ++key) {
        const auto keys = rotated(tokens[static_cast<std::size_t>(key)], kQuery + kv_head * kHeadDim, key);
        double score = 0.0;
        for (std::size_t d = 0; d < keys.size(); ++d) score += query[d] * keys[d];
        score *= kScale;
        if (bias_ != nullptr) {
          score += bias_[head * (2 * kReach + 1) + kReach + std::clamp(key - position, -kReach, kReach)];
        }
        weights.push_back(std::exp(score));
        total += weights.back();
      }
      for (std::size_t i = 0; i < weights.size(); ++i) {
        const auto token = tokens[static_cast<std::size_t>(first) + i];
        for (std::int64_t d = 0; d < kHeadDim; ++d) {
          out[static_cast<std::size_t>(head * kHeadDim + d)] +=
              weights[i] / total * element(token, kQuery + kKey + kv_head * kHeadDim + d);
        }
      }
    }
    double square = 0.0;
    for (const double value : out) square += value * value / static_cast<double>(kQuery);
    for (double& value : out) value /= std::sqrt(square + kEpsilon);
    return out;
  }

 private:
  static constexpr float kScale = 0.3F;

  BufferId buffer(DType dtype, RowKind rows, std::int64_t width) {
    const std::int64_t count = rows == RowKind::kTokens ? program.max_num_tokens : program.max_batch_size;
    const auto id = static_cast<BufferId>(program.buffers.size());
    program.buffers.push_back({"b" + std::to_string(id), dtype, rows, width, program.arena_bytes});
    program.arena_bytes += (static_cast<std::size_t>(count * width) * size_of(dtype) + 63) / 64 * 64;
    return id;
  }

  PanelMatrix identity(DType dtype) {
    std::vector<float> values(static_cast<std::size_t>(kQuery * kQuery), 0.0F);
    for (std::size_t i = 0; i < kQuery; ++i) values[i * (kQuery + 1)] = 1.0F;
    return storage_.matrix(dtype, kQuery, kQuery, values);
  }

  [[nodiscard]] double element(std::int32_t token, std::int64_t column) const {
    return rows_[static_cast<std::size_t>(token * (kQuery + 2 * kKey) + column)];
  }
  [[nodiscard]] std::vector<double> rotated(std::int32_t token, std::int64_t column,
                                            std::int64_t position) const {
    std::vector<double> head;
    for (std::int64_t d = 0; d < kHeadDim; ++d) head.push_back(element(token, column + d));
    const double angle = frequency_ * static_cast<double>(position);
    const double first = head[0];
    head[0] = first * std::cos(angle) - head[1] * std::sin(angle);
    head[1] = head[1] * std::cos(angle) + first * std::sin(angle);
    return head;
  }

  Random random_;
  Storage storage_;
  std::vector<float> rows_;
  const float* bias_ = nullptr;
  const float* sinks_ = nullptr;
  std::int64_t window_ = 0;
  float frequency_ = 0.0F;
};

std::unique_ptr<Engine> engine_of(const AttentionAlone& model, int threads, const KernelTable& kernels) {
  return make_cpu_engine(model.program, std::make_shared<ThreadPool>(threads), kernels);
}

BOOST_AUTO_TEST_SUITE(bidirectional)

BOOST_DATA_TEST_CASE(rows_see_their_sequence_before_and_behind, data::make({0, 1, 2, 3, 4}), options) {
  AttentionAlone model(kOptions[options]);
  const auto engine = engine_of(model, 2, find_kernels(""));
  const std::vector<Piece> pieces = {model.piece(1), model.piece(150), model.piece(17)};
  const auto logits = logits_of(engine.get(), StepArrays(pieces).input());
  std::size_t at = 0;
  for (const Piece& piece : pieces) {
    for (std::size_t row = 0; row < piece.tokens.size(); ++row) {
      for (const double expected : model.expected(piece.tokens, row)) {
        BOOST_TEST_REQUIRE(std::abs(logits[at] - expected) < 2e-5,
                           "row " << row << ": " << logits[at] << " is not " << expected);
        ++at;
      }
    }
  }
}

BOOST_DATA_TEST_CASE(bits_do_not_depend_on_the_crowd,
                     kernel_tables() * data::make({0, 1, 2}) * data::make({0, 3, 4}), name, dtype_index,
                     number) {
  Options options = kOptions[number];
  options.dtype = static_cast<DType>(dtype_index);
  AttentionAlone model(options);
  const std::vector<Piece> pieces = {model.piece(3), model.piece(129), model.piece(64)};
  const auto together = logits_of(engine_of(model, 3, kernel_table(name)).get(), StepArrays(pieces).input());
  const auto engine = engine_of(model, 1, kernel_table(name));
  std::size_t at = 0;
  for (const Piece& piece : pieces) {
    const auto alone = logits_of(engine.get(), StepArrays({piece}).input());
    BOOST_TEST(std::memcmp(alone.data(), together.data() + at, alone.size() * sizeof(float)) == 0);
    at += alone.size();
  }
}

bool says(const std::exception& error, const std::string& words) {
  return std::string(error.what()).find(words) != std::string::npos;
}

void check_is_unusable(const Program& program, const std::string& words) {
  const auto problems = program.validate();
  BOOST_TEST_REQUIRE(!problems.empty());
  BOOST_CHECK_EXCEPTION(problems.throw_if_any<EngineError>("program"), EngineError,
                        [&](const auto& error) { return says(error, words); });
}

BOOST_AUTO_TEST_CASE(unusable_biases_are_found) {
  AttentionAlone model({.biased = true});
  std::get<AttentionOp>(model.program.body[2]).position_bias.size = 40;
  check_is_unusable(model.program, "position_bias has 40 elements");
}

BOOST_AUTO_TEST_CASE(unusable_sinks_are_found) {
  AttentionAlone model({.sinks = true});
  std::get<AttentionOp>(model.program.body[2]).sinks.size = 3;
  check_is_unusable(model.program, "sinks has 3 elements; it must have 4");
}

BOOST_AUTO_TEST_CASE(one_body_has_one_kind_of_attention) {
  AttentionAlone model({});
  AttentionOp causal = std::get<AttentionOp>(model.program.body[2]);
  causal.kind = AttentionKind::kCausal;
  causal.layer = 1;
  model.program.num_layers = 2;
  model.program.body.insert(model.program.body.begin() + 3, causal);
  check_is_unusable(model.program, "causal and bidirectional attention");
}

BOOST_AUTO_TEST_CASE(int8_kv_cache_is_refused_without_a_kv_cache) {
  AttentionAlone model({});
  model.program.int8_kv_cache = true;
  check_is_unusable(model.program, "int8_kv_cache is given, but no keys and values are kept");
}

BOOST_AUTO_TEST_CASE(there_are_no_blocks) {
  AttentionAlone model({});
  const auto engine = engine_of(model, 1, find_kernels(""));
  BOOST_TEST(!engine->info().has_kv_cache);
  BOOST_TEST(engine->info().max_reusable_prompt_len == 0);
  BOOST_TEST(!engine->info().has_adapter_start_positions);
  BOOST_CHECK_THROW(engine->allocate_kv_blocks(4), EngineError);
}

BOOST_AUTO_TEST_CASE(sequences_that_are_not_whole_are_refused) {
  AttentionAlone model({});
  const auto engine = engine_of(model, 1, find_kernels(""));
  const auto check = [&](const Piece& piece, const std::string& words) {
    StepArrays step({piece});
    BOOST_CHECK_EXCEPTION(logits_of(engine.get(), step.input()), StepError,
                          [&](const auto& error) { return says(error, words); });
  };
  Piece piece = model.piece(9);
  piece.prompt_length = 12;
  check(piece, "sequence 0: has 9 of 12 tokens from position 0 on; the engine keeps no keys and values");
  piece.prompt_length = 9;
  piece.first_position = 3;
  check(piece, "sequence 0: has 9 of 9 tokens from position 3 on");
  piece.first_position = 0;
  StepArrays copying({piece});
  copying.copies_from = {0};
  copying.copies_to = {1};
  BOOST_CHECK_EXCEPTION(logits_of(engine.get(), copying.input()), StepError,
                        [](const auto& error) { return says(error, "the pool has 0 blocks"); });
  BOOST_TEST(logits_of(engine.get(), StepArrays({piece}).input()).size() == 9U * kQuery);
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::testing::bidirectional_test
