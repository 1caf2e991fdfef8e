// Bidirectional attention, compared with its definition and in different batches.

#include <algorithm>
#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
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
constexpr std::int32_t kWidth = kQuery + 2 * kKey;

struct Options {
  DType dtype = DType::kFloat32;
  std::int32_t sliding_window = 0;
  bool biased = false;
  bool rotated = false;
  bool sinks = false;
  /// True: rows are given with coordinates: position, window, and no position of a text token after them.
  bool given = false;
  /// True: attention is causal, but neighbours with equal numbers in place of the window see each other.
  bool joint = false;
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
    if (options.given) embedding.num_coordinates = 3;
    program.body.push_back(embedding);
    frequency_ = options.rotated ? 0.3F : 0.0F;
    RopeTableOp rope{.inverse_frequencies = storage_.vector({frequency_}), .cosine = cosine, .sine = sine};
    if (options.given) rope.columns = {kWidth};
    program.body.push_back(rope);
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
    if (options.joint) {
      attention.kind = AttentionKind::kCausal;
      attention.joint_column = kWidth + 1;
    } else if (options.given) {
      attention.window_column = kWidth + 1;
    }
    joint_ = options.joint;
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

  BufferId buffer(DType dtype, RowKind rows, std::int64_t width) {
    const std::int64_t count = rows == RowKind::kTokens ? program.max_num_tokens : program.max_batch_size;
    const auto id = static_cast<BufferId>(program.buffers.size());
    program.buffers.push_back({"b" + std::to_string(id), dtype, rows, width, program.arena_bytes});
    program.arena_bytes += (static_cast<std::size_t>(count * width) * size_of(dtype) + 63) / 64 * 64;
    return id;
  }

  [[nodiscard]] Piece piece(std::size_t tokens) {
    Piece made;
    for (std::size_t i = 0; i < tokens; ++i) {
      made.tokens.push_back(static_cast<std::int32_t>(random_.below(kQuery)));
    }
    made.prompt_length = static_cast<std::int32_t>(tokens);
    return made;
  }

  /// Returns the row of a token, with coordinates.
  [[nodiscard]] std::vector<float> given(std::int32_t token, float position, float window) const {
    const auto first = rows_.begin() + std::ptrdiff_t{token} * kWidth;
    std::vector<float> row(first, first + kWidth);
    row.insert(row.end(), {position, window, -1.0F});
    return row;
  }

  /// Returns the float64 logits of one row of a sequence. Rows attend only to keys [begin, end); they are
  /// rotated by `positions`, if there are any.
  [[nodiscard]] std::vector<double> expected(const std::vector<std::int32_t>& tokens, std::size_t row,
                                             std::int64_t begin = 0, std::int64_t end = 1 << 20,
                                             const std::vector<float>& positions = {}) const {
    const auto place = [&](std::int64_t index) {
      return positions.empty() ? static_cast<double>(index) : positions[static_cast<std::size_t>(index)];
    };
    std::vector<double> out(kQuery, 0.0);
    const auto position = static_cast<std::int64_t>(row);
    const auto last = static_cast<std::int64_t>(tokens.size()) - 1;
    const std::int64_t reach = window_ == 0 ? last : window_ - 1;
    for (std::int64_t head = 0; head < kHeads; ++head) {
      const std::int64_t kv_head = head * kKvHeads / kHeads;
      const auto query = rotated(tokens[row], head * kHeadDim, place(position));
      const std::int64_t first = std::max(begin, position - reach);
      std::vector<double> weights;
      double total = sinks_ == nullptr ? 0.0 : std::exp(static_cast<double>(sinks_[head]));
      const std::int64_t behind = joint_ ? last : position + reach;
      for (std::int64_t key = first; key <= std::min({last, end - 1, behind}); ++key) {
        const auto keys =
            rotated(tokens[static_cast<std::size_t>(key)], kQuery + kv_head * kHeadDim, place(key));
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

  PanelMatrix identity(DType dtype) {
    std::vector<float> values(static_cast<std::size_t>(kQuery * kQuery), 0.0F);
    for (std::size_t i = 0; i < kQuery; ++i) values[i * (kQuery + 1)] = 1.0F;
    return storage_.matrix(dtype, kQuery, kQuery, values);
  }

  [[nodiscard]] double element(std::int32_t token, std::int64_t column) const {
    return rows_[static_cast<std::size_t>(token * (kQuery + 2 * kKey) + column)];
  }
  [[nodiscard]] std::vector<double> rotated(std::int32_t token, std::int64_t column, double position) const {
    std::vector<double> head;
    for (std::int64_t d = 0; d < kHeadDim; ++d) head.push_back(element(token, column + d));
    const double angle = frequency_ * position;
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
  bool joint_ = false;
  float frequency_ = 0.0F;
};

std::unique_ptr<Engine> engine_of(const AttentionAlone& model, int threads, const KernelTable& kernels) {
  return make_cpu_engine(model.program, std::make_shared<ThreadPool>(threads), kernels);
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

/// Sequences whose rows are given, with random positions and windows.
class GivenSequences {
 public:
  explicit GivenSequences(AttentionAlone& model) {
    Random random(3);
    for (const std::size_t length : {1U, 150U, 17U}) {
      pieces.push_back(model.piece(length));
      std::vector<std::int64_t> ends;
      for (std::size_t end = 0; end < length; ends.push_back(static_cast<std::int64_t>(end)))
        end = std::min(length, end + 1 + static_cast<std::size_t>(random.below(40)));
      window_ends.push_back(ends);
      positions.emplace_back();
      std::size_t window = 0;
      for (std::size_t i = 0; i < length; ++i) {
        if (std::cmp_equal(i, ends[window])) ++window;
        positions.back().push_back(static_cast<float>(random.below(30)));
        rows_.push_back(
            model.given(pieces.back().tokens[i], positions.back().back(), window % 2 == 0 ? 7.0F : 6.0F));
      }
    }
  }

  [[nodiscard]] StepArrays arrays() const {
    StepArrays made(pieces);
    for (std::size_t i = 0; i < rows_.size(); ++i) {
      made.tokens[i] = 0;
      made.prompt_embedding_rows.push_back(static_cast<std::int32_t>(i));
      made.prompt_embeddings.push_back(rows_[i].data());
    }
    return made;
  }

  std::vector<Piece> pieces;
  std::vector<std::vector<std::int64_t>> window_ends;
  std::vector<std::vector<float>> positions;

 private:
  std::vector<std::vector<float>> rows_;
};

BOOST_AUTO_TEST_CASE(given_rows_have_positions_and_windows) {
  AttentionAlone model({.rotated = true, .given = true});
  BOOST_TEST(model.program.validate().empty());
  const auto engine = engine_of(model, 2, find_kernels(""));
  BOOST_TEST(engine->info().prompt_embedding_size == kWidth + 3);
  BOOST_TEST(engine->info().num_coordinates == 3);
  const GivenSequences sequences(model);
  const auto logits = logits_of(engine.get(), sequences.arrays().input());
  std::size_t at = 0;
  for (std::size_t sequence = 0; sequence < sequences.pieces.size(); ++sequence) {
    std::int64_t begin = 0;
    for (const std::int64_t end : sequences.window_ends[sequence]) {
      for (std::int64_t row = begin; row < end; ++row) {
        for (const double expected :
             model.expected(sequences.pieces[sequence].tokens, static_cast<std::size_t>(row), begin, end,
                            sequences.positions[sequence])) {
          BOOST_TEST_REQUIRE(std::abs(logits[at] - expected) < 2e-5,
                             "row " << row << ": " << logits[at] << " is not " << expected);
          ++at;
        }
      }
      begin = end;
    }
  }
}

/// The rows of an image, a run of neighbours with one number. The second step reads keys of the first one.
BOOST_DATA_TEST_CASE(rows_of_an_image_see_each_other, data::make({0, 9}), sliding_window) {
  struct Run {
    std::int64_t end;
    float number;
  };
  constexpr Run kRuns[] = {{5, -1.0F}, {40, 7.0F}, {60, 6.0F}, {70, -1.0F}, {150, 7.0F}};
  constexpr std::int32_t kLength = 150;
  AttentionAlone model({.sliding_window = sliding_window, .given = true, .joint = true});
  BOOST_TEST(model.program.validate().list() == std::vector<std::string>{}, boost::test_tools::per_element());
  const auto engine = engine_of(model, 2, find_kernels(""));
  BOOST_TEST(engine->info().joint_column == kWidth + 1);
  engine->allocate_kv_blocks(10);
  const Piece whole = model.piece(kLength);
  std::vector<std::vector<float>> rows;
  std::vector<std::int64_t> ends;
  for (const Run& run : kRuns) {
    while (std::cmp_less(rows.size(), run.end)) {
      const auto at = static_cast<std::int64_t>(rows.size());
      rows.push_back(model.given(whole.tokens[rows.size()], static_cast<float>(at), run.number));
      ends.push_back(run.number < 0.0F ? at + 1 : run.end);
    }
  }
  std::size_t row = 0;
  for (const std::int32_t end : {60, kLength}) {
    Piece part{.first_position = static_cast<std::int32_t>(row), .prompt_length = kLength};
    part.blocks = {9, 0, 8, 1, 7, 2, 6, 3, 5, 4};
    part.tokens.assign(static_cast<std::size_t>(end) - row, 0);
    StepArrays step({part});
    for (std::size_t i = 0; i < part.tokens.size(); ++i) {
      step.prompt_embedding_rows.push_back(static_cast<std::int32_t>(i));
      step.prompt_embeddings.push_back(rows[row + i].data());
    }
    const auto logits = logits_of(engine.get(), step.input());
    std::size_t at = 0;
    for (; std::cmp_less(row, end); ++row) {
      for (const double expected : model.expected(whole.tokens, row, 0, ends[row])) {
        BOOST_TEST_REQUIRE(std::abs(logits[at] - expected) < 2e-5,
                           "row " << row << ": " << logits[at] << " is not " << expected);
        ++at;
      }
    }
  }
}

BOOST_AUTO_TEST_CASE(rows_without_coordinates_have_their_own_positions) {
  AttentionAlone model({.rotated = true, .given = true});
  const auto engine = engine_of(model, 2, find_kernels(""));
  const Piece piece = model.piece(20);
  StepArrays step({piece});
  for (std::int32_t i = 0; i < 20; ++i) step.rotary_positions.push_back(3 * i);
  // Only token 4 has a row, and the row has no position; its window is that of tokens without rows.
  const auto row = model.given(piece.tokens[4], -1.0F, -1.0F);
  step.tokens[4] = 0;
  step.prompt_embedding_rows = {4};
  step.prompt_embeddings = {row.data()};
  const auto logits = logits_of(engine.get(), step.input());
  std::vector<float> positions;
  for (int i = 0; i < 20; ++i) positions.push_back(3.0F * static_cast<float>(i));
  std::size_t at = 0;
  for (std::size_t i = 0; i < 20; ++i) {
    for (const double expected : model.expected(piece.tokens, i, 0, 20, positions))
      BOOST_TEST_REQUIRE(std::abs(logits[at++] - expected) < 2e-5);
  }
}

BOOST_AUTO_TEST_CASE(unusable_columns_are_found) {
  const auto finds = [](const std::string& words, const auto& change) {
    AttentionAlone model({.given = true});
    change(model.program.body);
    check_is_unusable(model.program, words);
  };
  finds("a column is 98; the coordinates of given rows are [96, 98)",
        [](auto& body) { std::get<RopeTableOp>(body[1]).columns = {kWidth + 2}; });
  finds("there are 2 columns; there must be 1",
        [](auto& body) { std::get<RopeTableOp>(body[1]).columns = {kWidth, kWidth}; });
  finds("window_column is 95", [](auto& body) { std::get<AttentionOp>(body[2]).window_column = kWidth - 1; });
  finds("window_column is given, and it is causal or has a sliding window",
        [](auto& body) { std::get<AttentionOp>(body[2]).sliding_window = 3; });
  finds("joint_column is given, and it is not causal", [](auto& body) {
    auto& attention = std::get<AttentionOp>(body[2]);
    attention.window_column = -1;
    attention.joint_column = kWidth;
  });
  finds("num_coordinates is 17", [](auto& body) { std::get<EmbeddingOp>(body[0]).num_coordinates = 17; });
  finds("num_later_elements is -1",
        [](auto& body) { std::get<EmbeddingOp>(body[0]).num_later_elements = -1; });
  finds("first_column is 96; the columns that given rows have for 'b0' are [96, 96)", [](auto& body) {
    body.insert(body.begin() + 1, AddGivenColumnsOp{.output = 0, .first_column = kWidth});
  });
  finds("output 'b0' is 96 wide; it must be 192", [](auto& body) {
    body.insert(body.begin() + 1, JoinNeighboursOp{.input = 0, .output = 0, .count = 2});
  });
  finds("count is 0", [](auto& body) {
    body.insert(body.begin() + 1, JoinNeighboursOp{.input = 0, .output = 0, .count = 0});
  });
  finds("(join columns): belongs in the head",
        [](auto& body) { body.push_back(JoinColumnsOp{.inputs = {3}, .output = 4}); });
}

BOOST_AUTO_TEST_CASE(rows_are_joined_and_added) {
  AttentionAlone model({.given = true});
  auto& embedding = std::get<EmbeddingOp>(model.program.body[0]);
  embedding.num_later_elements = kWidth;
  std::get<RopeTableOp>(model.program.body[1]).columns = {2 * kWidth};
  std::get<AttentionOp>(model.program.body[2]).window_column = -1;
  // The hidden states are the columns of two neighbours after the addition, twice.
  const auto joined = model.buffer(DType::kFloat32, RowKind::kTokens, 2 * kWidth);
  const auto hidden = model.buffer(DType::kFloat32, RowKind::kLogits, 4 * kWidth);
  model.program.hidden = hidden;
  model.program.body.insert(model.program.body.begin() + 1,
                            AddGivenColumnsOp{.output = 0, .first_column = kWidth});
  model.program.body.insert(model.program.body.begin() + 2,
                            JoinNeighboursOp{.input = 0, .output = joined, .count = 2});
  model.program.head.insert(model.program.head.begin(),
                            JoinColumnsOp{.inputs = {joined, joined}, .output = hidden});
  BOOST_TEST(model.program.validate().list() == std::vector<std::string>{}, boost::test_tools::per_element());
  const auto engine = engine_of(model, 2, find_kernels(""));
  const Piece first = model.piece(3);
  const Piece second = model.piece(2);
  StepArrays step({first, second});
  std::vector<float> row(2 * kWidth, 0.5F);
  row.insert(row.end(), {0.0F, 0.0F, -1.0F});
  step.prompt_embedding_rows = {1};
  step.prompt_embeddings = {row.data()};
  step.hidden_rows = {0, 2, 3};
  const auto hidden_rows = results_of(engine.get(), step.input()).hidden;
  const auto row_of = [&](std::int32_t token) {
    auto made = model.given(token, 0, 0);
    made.resize(kWidth);
    return made;
  };
  const std::vector<float> sums(kWidth, 1.0F);
  const std::vector<float> none(kWidth, 0.0F);
  std::vector<float> expected;
  const auto add = [&](const std::vector<float>& a, const std::vector<float>& b) {
    for (int i = 0; i < 2; ++i) {
      expected.insert(expected.end(), a.begin(), a.end());
      expected.insert(expected.end(), b.begin(), b.end());
    }
  };
  add(row_of(first.tokens[0]), sums);
  add(row_of(first.tokens[2]), none);
  add(row_of(second.tokens[0]), row_of(second.tokens[1]));
  BOOST_TEST(hidden_rows == expected, boost::test_tools::per_element());
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
