// Latent attention, compared with its definition in float64, and in steps and crowds of every kind.

#include <algorithm>
#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "adaptrt/cpu/cpu_engine.h"
#include "cpu/random_storage.h"
#include "cpu/step_arrays.h"
#include "emulated_tiles/kernel_tables.h"

namespace adaptrt::testing::latent_attention_test {
namespace {

namespace data = boost::unit_test::data;

// Two groups of heads, no width that is a multiple of 16, and an odd number of elements.
constexpr LatentShape kShape{
    .num_heads = 16, .latent_dim = 28, .rotary_dim = 6, .plain_dim = 11, .value_dim = 9};
constexpr std::int64_t kValues = kShape.num_heads * kShape.value_dim;
constexpr std::int64_t kQuery = kShape.plain_dim + kShape.rotary_dim;
constexpr std::int32_t kTokensPerBlock = 8;
constexpr std::int64_t kMostTokens = 150;  // several tiles
constexpr float kEpsilon = 1e-3F;
constexpr float kScale = 0.3F;
constexpr std::int32_t kNan = kValues - 1;  ///< a token whose compressed row is not finite

std::size_t at(std::int64_t index) {
  return static_cast<std::size_t>(index);
}

/// A program whose embeddings are queries and compressed rows, and whose logits are the normalised values.
class LatentAttentionAlone {
 public:
  explicit LatentAttentionAlone(DType dtype) : random_(5) {
    program.dtype = dtype;
    program.vocab_size = kValues;
    program.num_layers = 1;
    program.max_batch_size = 200;
    program.max_num_tokens = 200;
    program.max_input_len = program.max_seq_len = kMostTokens;
    program.tokens_per_block = kTokensPerBlock;
    const DType activation = activation_dtype(dtype);
    const BufferId queries = buffer(DType::kFloat32, RowKind::kTokens, kShape.num_heads * kQuery);
    const BufferId rows = buffer(DType::kFloat32, RowKind::kTokens, kShape.key_dim());
    const BufferId cosine = buffer(DType::kFloat32, RowKind::kTokens, kShape.rotary_dim / 2);
    const BufferId sine = buffer(DType::kFloat32, RowKind::kTokens, kShape.rotary_dim / 2);
    const BufferId qk = buffer(DType::kFloat32, RowKind::kTokens, (kShape.num_heads + 1) * kShape.key_dim());
    const BufferId attended = buffer(activation, RowKind::kTokens, kShape.num_heads * kShape.key_dim());
    const BufferId values = buffer(activation, RowKind::kTokens, kValues);
    const BufferId stream = buffer(DType::kFloat32, RowKind::kTokens, kValues);
    const BufferId last = buffer(activation, RowKind::kLogits, kValues);
    program.logits = buffer(DType::kFloat32, RowKind::kLogits, kValues);
    queries_ = embed(queries, kShape.num_heads * kQuery, 0.0F);
    rows_ = embed(rows, kShape.key_dim(), std::numeric_limits<float>::quiet_NaN());
    frequencies_ = storage_.vector({1.0F, 0.1F, 0.01F});
    program.body.push_back(RopeTableOp{.inverse_frequencies = frequencies_, .cosine = cosine, .sine = sine});
    norm_ = storage_.vector(kShape.latent_dim, 0.5F, 1.5F, &random_);
    program.body.push_back(LatentQueriesOp{.shape = kShape,
                                           .queries = queries,
                                           .rows = rows,
                                           .output = qk,
                                           .norm = norm_,
                                           .epsilon = kEpsilon,
                                           .keys = parts(kShape.latent_dim, kShape.plain_dim, &keys_)});
    AttentionOp attention;
    attention.shape = {kShape.num_heads, 1, kShape.key_dim(), true};
    attention.qkv = qk;
    attention.cosine = cosine;
    attention.sine = sine;
    attention.output = attended;
    attention.scale = kScale;
    attention.interleaved = true;
    program.body.push_back(attention);
    program.body.push_back(LatentValuesOp{.shape = kShape,
                                          .input = attended,
                                          .output = values,
                                          .values = parts(kShape.value_dim, kShape.latent_dim, &values_)});
    LinearOp dense{.input = values, .output = stream, .parts = {}};
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
    for (auto& token : made) token = static_cast<std::int32_t>(random_.below(kNan));
    return made;
  }

  /// Returns the float64 logits [tokens, kValues] of a sequence.
  [[nodiscard]] std::vector<double> expected(const std::vector<std::int32_t>& tokens) const {
    std::vector<double> logits;
    for (std::size_t row = 0; row < tokens.size(); ++row) {
      std::vector<double> out;
      double square = 0.0;
      for (std::int64_t head = 0; head < kShape.num_heads; ++head) {
        for (const double value : attended(tokens, row, head)) {
          out.push_back(value);
          square += value * value / static_cast<double>(kValues);
        }
      }
      for (const double value : out) logits.push_back(value / std::sqrt(square + kEpsilon));
    }
    return logits;
  }

 private:
  BufferId buffer(DType dtype, RowKind rows, std::int64_t width) {
    const auto id = static_cast<BufferId>(program.buffers.size());
    program.buffers.push_back({"b" + std::to_string(id), dtype, rows, width, program.arena_bytes});
    program.arena_bytes += (at(program.max_num_tokens * width) * size_of(dtype) + 63) / 64 * 64;
    return id;
  }

  /// `last`: a number in the row of the token kNan.
  std::vector<float> embed(BufferId output, std::int64_t width, float last) {
    std::vector<float> values(at(kValues * width));
    for (auto& value : values) value = random_.between(-1.5F, 1.5F);
    values.back() = last;
    const EmbeddingOp op{.table = storage_.matrix(program.dtype, kValues, width, values), .output = output};
    program.body.push_back(op);
    return unpack(op.table);
  }

  PanelMatrix identity(DType dtype) {
    std::vector<float> values(at(kValues * kValues), 0.0F);
    for (std::size_t i = 0; i < at(kValues); ++i) values[i * (at(kValues) + 1)] = 1.0F;
    return storage_.matrix(dtype, kValues, kValues, values);
  }

  std::vector<LinearPart> parts(std::int64_t n, std::int64_t k, std::vector<std::vector<float>>* unpacked) {
    std::vector<LinearPart> made;
    for (std::int64_t head = 0; head < kShape.num_heads; ++head) {
      made.push_back({.weight = storage_.matrix(program.dtype, n, k, 0.5F, &random_), .bias = {}});
      unpacked->push_back(unpack(made.back().weight));
    }
    return made;
  }

  [[nodiscard]] std::vector<double> latent(std::int32_t token) const {
    const float* row = rows_.data() + at(token * kShape.key_dim());
    double square = 0.0;
    for (std::int64_t i = 0; i < kShape.latent_dim; ++i) {
      square +=
          static_cast<double>(row[i]) * static_cast<double>(row[i]) / static_cast<double>(kShape.latent_dim);
    }
    std::vector<double> made;
    for (std::int64_t i = 0; i < kShape.latent_dim; ++i) {
      made.push_back(static_cast<double>(row[i]) * static_cast<double>(norm_.data[i]) /
                     std::sqrt(square + kEpsilon));
    }
    return made;
  }

  /// Rotates neighbours.
  [[nodiscard]] std::vector<double> rotated(const float* x, std::size_t position) const {
    std::vector<double> made;
    for (std::int64_t i = 0; i < kShape.rotary_dim / 2; ++i) {
      const double angle = static_cast<double>(position) * static_cast<double>(frequencies_.data[i]);
      const double first = x[2 * i];
      const double second = x[2 * i + 1];
      made.push_back(first * std::cos(angle) - second * std::sin(angle));
      made.push_back(second * std::cos(angle) + first * std::sin(angle));
    }
    return made;
  }

  /// Attention of one head to keys and values that are computed for each token.
  [[nodiscard]] std::vector<double> attended(const std::vector<std::int32_t>& tokens, std::size_t row,
                                             std::int64_t head) const {
    const float* query = queries_.data() + at((tokens[row] * kShape.num_heads + head) * kQuery);
    const auto turned = rotated(query + kShape.plain_dim, row);
    std::vector<double> out(at(kShape.value_dim), 0.0);
    double sum = 0.0;
    for (std::size_t key = 0; key <= row; ++key) {
      const auto compressed = latent(tokens[key]);
      const float* of_key = rows_.data() + at(tokens[key] * kShape.key_dim() + kShape.latent_dim);
      const auto turned_key = rotated(of_key, key);
      double score = 0.0;
      for (std::size_t i = 0; i < turned.size(); ++i) score += turned[i] * turned_key[i];
      for (std::int64_t i = 0; i < kShape.plain_dim; ++i) {
        for (std::int64_t j = 0; j < kShape.latent_dim; ++j) {
          score += static_cast<double>(query[i]) *
                   static_cast<double>(keys_[at(head)][at(j * kShape.plain_dim + i)]) * compressed[at(j)];
        }
      }
      const double weight = std::exp(score * static_cast<double>(kScale));
      sum += weight;
      for (std::int64_t i = 0; i < kShape.value_dim; ++i) {
        for (std::int64_t j = 0; j < kShape.latent_dim; ++j) {
          out[at(i)] += weight * static_cast<double>(values_[at(head)][at(i * kShape.latent_dim + j)]) *
                        compressed[at(j)];
        }
      }
    }
    for (double& value : out) value /= sum;
    return out;
  }

  Random random_;
  Storage storage_;
  std::vector<float> queries_;
  std::vector<float> rows_;
  std::vector<std::vector<float>> keys_;
  std::vector<std::vector<float>> values_;
  VectorView norm_;
  VectorView frequencies_;
};

std::unique_ptr<Engine> engine_of(const LatentAttentionAlone& model, int threads,
                                  const KernelTable& kernels) {
  auto engine = make_cpu_engine(model.program, std::make_shared<ThreadPool>(threads), kernels);
  engine->allocate_kv_blocks(40);
  return engine;
}

/// Tokens [begin, end) of a sequence, with the blocks from `first_block` on.
struct Part {
  const std::vector<std::int32_t>* tokens;
  std::int64_t begin;
  std::int64_t end;
  std::int32_t first_block;
};

std::vector<float> run(Engine* engine, const std::vector<Part>& parts) {
  std::vector<Piece> pieces;
  for (const Part& part : parts) {
    Piece piece;
    piece.tokens.assign(part.tokens->begin() + part.begin, part.tokens->begin() + part.end);
    piece.first_position = static_cast<std::int32_t>(part.begin);
    piece.prompt_length = static_cast<std::int32_t>(part.tokens->size());
    for (std::int32_t i = 0; i * kTokensPerBlock < part.end; ++i)
      piece.blocks.push_back(part.first_block + i);
    pieces.push_back(piece);
  }
  return logits_of(engine, StepArrays(pieces).input());
}

void append(std::vector<float>* all, const std::vector<float>& more) {
  all->insert(all->end(), more.begin(), more.end());
}

void check_same_bits(const std::vector<float>& found, const std::vector<float>& expected) {
  BOOST_TEST_REQUIRE(found.size() == expected.size());
  BOOST_TEST(std::memcmp(found.data(), expected.data(), found.size() * sizeof(float)) == 0);
}

/// Rounding of queries, keys, products and probabilities, relative to logits of about 1.
double tolerance_of(DType dtype) {
  if (dtype == DType::kFloat32) return 5e-5;
  return dtype == DType::kBFloat16 ? 0.08 : 0.01;
}

BOOST_AUTO_TEST_SUITE(latent_attention)

BOOST_DATA_TEST_CASE(it_is_its_definition, kernel_tables() * data::make({0, 1, 2}), name, dtype_index) {
  const auto dtype = static_cast<DType>(dtype_index);
  LatentAttentionAlone model(dtype);
  const auto engine = engine_of(model, 2, kernel_table(name));
  const auto tokens = model.tokens(70);
  const auto logits = run(engine.get(), {{&tokens, 0, 70, 3}});
  const auto expected = model.expected(tokens);
  double greatest = 0.0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    greatest = std::max(greatest, std::abs(static_cast<double>(logits[i]) - expected[i]));
  }
  BOOST_TEST(greatest < tolerance_of(dtype));
}

BOOST_DATA_TEST_CASE(bits_depend_neither_on_steps_nor_on_the_crowd, kernel_tables() * data::make({0, 1, 2}),
                     name, dtype_index) {
  LatentAttentionAlone model(static_cast<DType>(dtype_index));
  const auto first = model.tokens(kMostTokens);
  const auto second = model.tokens(9);
  const std::vector<std::int32_t> broken(9, kNan);
  const auto alone = engine_of(model, 1, kernel_table(name));
  const auto of_first = run(alone.get(), {{&first, 0, kMostTokens, 0}});
  const auto of_second = run(alone.get(), {{&second, 0, 9, 0}});

  const auto engine = engine_of(model, 3, kernel_table(name));
  // What a sequence left in its blocks does not reach the next one.
  BOOST_TEST(std::isnan(run(engine.get(), {{&broken, 0, 9, 20}}).back()));
  std::vector<float> found_first;
  std::vector<float> found_second;
  const auto step = [&](std::int64_t begin, std::int64_t end, std::int64_t begin2, std::int64_t end2) {
    const auto logits = run(engine.get(), {{&second, begin2, end2, 20}, {&first, begin, end, 0}});
    const auto rows = static_cast<std::ptrdiff_t>((end2 - begin2) * kValues);
    found_second.insert(found_second.end(), logits.begin(), logits.begin() + rows);
    found_first.insert(found_first.end(), logits.begin() + rows, logits.end());
  };
  step(0, 2, 0, 1);
  step(2, 67, 1, 5);
  step(67, 68, 5, 9);
  append(&found_first, run(engine.get(), {{&first, 68, 149, 0}}));
  append(&found_first, run(engine.get(), {{&first, 149, kMostTokens, 0}}));
  check_same_bits(found_first, of_first);
  check_same_bits(found_second, of_second);
}

BOOST_AUTO_TEST_CASE(a_token_is_stored_once) {
  LatentAttentionAlone model(DType::kBFloat16);
  const EngineInfo info = cpu_engine_info(model.program, "");
  constexpr std::int64_t kSlots = 16;  // a whole group
  BOOST_TEST(info.kv_block_bytes == at(kSlots * kShape.key_dim()) * size_of(DType::kBFloat16));
}

void check_problem(const std::string& words, void (*change)(Program* program)) {
  LatentAttentionAlone model(DType::kFloat32);
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
  BOOST_TEST(LatentAttentionAlone(DType::kFloat32).program.validate().empty());
  check_problem("num_heads is 0", [](Program* p) { op_at<LatentQueriesOp>(p, 3).shape.num_heads = 0; });
  check_problem("queries 'b0' is 272 wide; it must be 288",
                [](Program* p) { op_at<LatentQueriesOp>(p, 3).shape.plain_dim = 12; });
  check_problem("rows 'b1' is 34 wide; it must be 36",
                [](Program* p) { op_at<LatentQueriesOp>(p, 3).shape.rotary_dim = 8; });
  check_problem("output 'b4' is 578 wide; it must be 561",
                [](Program* p) { op_at<LatentQueriesOp>(p, 3).shape.latent_dim = 27; });
  check_problem("norm has 3 elements", [](Program* p) { op_at<LatentQueriesOp>(p, 3).norm.size = 3; });
  check_problem("there are 15 keys for 16 heads",
                [](Program* p) { op_at<LatentQueriesOp>(p, 3).keys.pop_back(); });
  check_problem("the output is one of the inputs", [](Program* p) {
    op_at<LatentQueriesOp>(p, 3).output = op_at<LatentQueriesOp>(p, 3).queries;
  });
  check_problem("its values are keys, and there are 2 key-value heads; expected 1",
                [](Program* p) { op_at<AttentionOp>(p, 4).shape.num_key_value_heads = 2; });
  check_problem("its values are keys, and it is not causal",
                [](Program* p) { op_at<AttentionOp>(p, 4).kind = AttentionKind::kBidirectional; });
  check_problem("its values are keys, and int8_kv_cache is given",
                [](Program* p) { p->int8_kv_cache = true; });
  check_problem("one of its values has a bias", [](Program* p) {
    op_at<LatentValuesOp>(p, 5).values[1].bias = op_at<LatentQueriesOp>(p, 3).norm;
  });
  check_problem("output 'b6' is 144 wide; it must be 160",
                [](Program* p) { op_at<LatentValuesOp>(p, 5).shape.value_dim = 10; });
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::testing::latent_attention_test
