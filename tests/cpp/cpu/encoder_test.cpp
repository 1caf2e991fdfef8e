// Encoder inputs and cross attention: valid steps and programs, and their results.

#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "adaptrt/core/error.h"
#include "adaptrt/cpu/cpu_engine.h"
#include "cpu/random_model.h"
#include "cpu/step_arrays.h"

namespace adaptrt::testing::encoder_test {
namespace {

constexpr std::int64_t kHeads = 4;
constexpr std::int64_t kKvHeads = 2;
constexpr std::int64_t kHeadDim = 12;
constexpr std::int64_t kQuery = kHeads * kHeadDim;
constexpr std::int64_t kKv = 2 * kKvHeads * kHeadDim;
constexpr std::int32_t kTokensPerBlock = 16;
constexpr float kScale = 0.3F;

/// A program whose encoder embeds [k | v] and whose body embeds q; its logits are the normalised output of
/// cross attention. Encoder ops: 0 embedding, 1 rope, 2 embedding, 3 attention, 4 cross keys. Body ops: 0 and
/// 1 embeddings, 2 rope, 3 attention, 4 cross attention, 5 linear.
class CrossAlone {
 public:
  CrossAlone() : random_(5) {
    program.vocab_size = kQuery;
    program.num_layers = 1;
    program.num_encoder_layers = 1;
    program.max_batch_size = 4;
    program.max_num_tokens = 100;
    program.max_input_len = program.max_seq_len = 100;
    program.max_encoder_input_len = 70;
    program.tokens_per_block = kTokensPerBlock;
    const AttentionShape shape{kHeads, kKvHeads, kHeadDim};
    using enum RowKind;
    const BufferId kv = buffer(kEncoderTokens, kKv);
    const BufferId encoder_qkv = buffer(kEncoderTokens, kQuery + kKv);
    const BufferId encoder_cosine = buffer(kEncoderTokens, 1);
    const BufferId encoder_sine = buffer(kEncoderTokens, 1);
    const BufferId encoded = buffer(kEncoderTokens, kQuery);
    const BufferId qkv = buffer(kTokens, kQuery + kKv);
    const BufferId q = buffer(kTokens, kQuery);
    const BufferId cosine = buffer(kTokens, 1);
    const BufferId sine = buffer(kTokens, 1);
    const BufferId own = buffer(kTokens, kQuery);
    const BufferId attended = buffer(kTokens, kQuery);
    const BufferId stream = buffer(kTokens, kQuery);
    const BufferId last = buffer(kLogits, kQuery);
    program.logits = buffer(kLogits, kQuery);
    program.encoder_output = encoded;
    keys_ = unpack(embed(kKv, kv, &program.encoder));
    rotate(encoder_cosine, encoder_sine, &program.encoder);
    embed(kQuery + kKv, encoder_qkv, &program.encoder);
    attend(AttentionKind::kBidirectional, shape, encoder_qkv, encoder_cosine, encoder_sine, encoded,
           &program.encoder);
    program.encoder.push_back(CrossKeysOp{.layer = 0, .shape = shape, .kv = kv});
    queries_ = unpack(embed(kQuery, q, &program.body));
    embed(kQuery + kKv, qkv, &program.body);
    rotate(cosine, sine, &program.body);
    attend(AttentionKind::kCausal, shape, qkv, cosine, sine, own, &program.body);
    program.body.push_back(
        CrossAttentionOp{.layer = 0, .shape = shape, .q = q, .output = attended, .scale = kScale});
    LinearOp dense{.input = attended, .output = stream, .parts = {}};
    dense.parts.push_back({.weight = identity(), .bias = {}});
    program.body.push_back(dense);
    program.head.push_back(RmsNormOp{.input = stream,
                                     .output = last,
                                     .weight = storage_.vector(std::vector<float>(kQuery, 1.0F)),
                                     .epsilon = 1e-3F,
                                     .gather_logit_rows = true});
    LinearOp logits{.input = last, .output = program.logits, .parts = {}};
    logits.parts.push_back({.weight = identity(), .bias = {}});
    program.head.push_back(logits);
  }

  Program program;

  [[nodiscard]] std::vector<std::int32_t> tokens(std::size_t count) {
    std::vector<std::int32_t> made(count);
    for (auto& token : made) token = static_cast<std::int32_t>(random_.below(kQuery));
    return made;
  }

  /// Returns the float64 logits of a decoder token over an encoder input.
  [[nodiscard]] std::vector<double> expected(std::int32_t token,
                                             const std::vector<std::int32_t>& input) const {
    std::vector<double> out(kQuery, 0.0);
    for (std::int64_t head = 0; head < kHeads; ++head) {
      const std::int64_t kv_head = head * kKvHeads / kHeads;
      std::vector<double> weights;
      double total = 0.0;
      for (const std::int32_t key : input) {
        double score = 0.0;
        for (std::int64_t d = 0; d < kHeadDim; ++d) {
          score += static_cast<double>(at(queries_, kQuery, token, head * kHeadDim + d)) *
                   at(keys_, kKv, key, kv_head * kHeadDim + d);
        }
        weights.push_back(std::exp(score * kScale));
        total += weights.back();
      }
      for (std::size_t i = 0; i < input.size(); ++i) {
        for (std::int64_t d = 0; d < kHeadDim; ++d) {
          out[static_cast<std::size_t>(head * kHeadDim + d)] +=
              weights[i] / total * at(keys_, kKv, input[i], kKv / 2 + kv_head * kHeadDim + d);
        }
      }
    }
    double square = 0.0;
    for (const double value : out) square += value * value / static_cast<double>(kQuery);
    for (double& value : out) value /= std::sqrt(square + 1e-3);
    return out;
  }

 private:
  static float at(const std::vector<float>& rows, std::int64_t width, std::int32_t row, std::int64_t column) {
    return rows[static_cast<std::size_t>(row * width + column)];
  }
  BufferId buffer(RowKind rows, std::int64_t width) {
    const std::int64_t count = rows == RowKind::kLogits ? program.max_batch_size : program.max_num_tokens;
    const auto id = static_cast<BufferId>(program.buffers.size());
    program.buffers.push_back({"b" + std::to_string(id), DType::kFloat32, rows, width, program.arena_bytes});
    program.arena_bytes += (static_cast<std::size_t>(count * width) * sizeof(float) + 63) / 64 * 64;
    return id;
  }
  PanelMatrix identity() {
    std::vector<float> values(static_cast<std::size_t>(kQuery * kQuery), 0.0F);
    for (std::size_t i = 0; i < kQuery; ++i) values[i * (kQuery + 1)] = 1.0F;
    return storage_.matrix(DType::kFloat32, kQuery, kQuery, values);
  }
  PanelMatrix embed(std::int64_t width, BufferId output, std::vector<Op>* ops) {
    const auto table = storage_.matrix(DType::kFloat32, kQuery, width, 1.5F, &random_);
    ops->push_back(EmbeddingOp{.table = table, .output = output});
    return table;
  }
  void rotate(BufferId cosine, BufferId sine, std::vector<Op>* ops) {
    ops->push_back(
        RopeTableOp{.inverse_frequencies = storage_.vector({0.0F}), .cosine = cosine, .sine = sine});
  }
  static void attend(AttentionKind kind, const AttentionShape& shape, BufferId qkv, BufferId cosine,
                     BufferId sine, BufferId output, std::vector<Op>* ops) {
    AttentionOp op;
    op.kind = kind;
    op.shape = shape;
    op.qkv = qkv;
    op.cosine = cosine;
    op.sine = sine;
    op.output = output;
    op.scale = kScale;
    ops->push_back(op);
  }

  Random random_;
  Storage storage_;
  std::vector<float> keys_;
  std::vector<float> queries_;
};

/// A step's arrays with encoder inputs: input i has the blocks from 8 i on.
struct Arrays {
  Arrays(const std::vector<Piece>& pieces, const std::vector<std::vector<std::int32_t>>& all_inputs,
         const std::vector<std::size_t>& inputs_of_pieces, const std::vector<std::size_t>& encoded)
      : decoder(pieces), adapters(encoded.size(), nullptr) {
    for (const std::size_t input : inputs_of_pieces) {
      lengths.push_back(static_cast<std::int32_t>(all_inputs[input].size()));
      add_table(input, &tables);
    }
    for (const std::size_t input : encoded) {
      token_ids.insert(token_ids.end(), all_inputs[input].begin(), all_inputs[input].end());
      offsets.push_back(static_cast<std::int32_t>(token_ids.size()));
      add_table(input, &encoder_tables);
    }
  }

  [[nodiscard]] StepInput input() const {
    StepInput made = decoder.input();
    made.encoder = {
        .token_ids = token_ids, .offsets = offsets, .block_tables = encoder_tables, .adapters = adapters};
    made.encoder_lengths = lengths;
    made.cross_block_tables = tables;
    made.max_cross_blocks = kMaxBlocks;
    return made;
  }

  static constexpr std::int32_t kMaxBlocks = 5;
  StepArrays decoder;
  std::vector<std::int32_t> token_ids;
  std::vector<std::int32_t> offsets = {0};
  std::vector<std::int32_t> encoder_tables;
  std::vector<const DeviceAdapter*> adapters;
  std::vector<std::int32_t> lengths;
  std::vector<std::int32_t> tables;

 private:
  static void add_table(std::size_t input, std::vector<std::int32_t>* all) {
    for (std::int32_t i = 0; i < kMaxBlocks; ++i) all->push_back(8 * static_cast<std::int32_t>(input) + i);
  }
};

std::unique_ptr<Engine> engine_of(const CrossAlone& model, int threads) {
  auto engine = make_cpu_engine(model.program, std::make_shared<ThreadPool>(threads));
  engine->allocate_kv_blocks(32);
  engine->allocate_cross_kv_blocks(24);
  return engine;
}

Piece piece_of(std::vector<std::int32_t> tokens, std::int32_t block) {
  Piece piece;
  piece.tokens = std::move(tokens);
  piece.prompt_length = static_cast<std::int32_t>(piece.tokens.size());
  piece.blocks = {block, block + 1};
  return piece;
}

BOOST_AUTO_TEST_SUITE(encoder)

BOOST_AUTO_TEST_CASE(tokens_see_their_encoder_input_whoever_shares_the_step) {
  CrossAlone model;
  const std::vector<std::vector<std::int32_t>> inputs = {model.tokens(70), model.tokens(1), model.tokens(17)};
  const std::vector<Piece> pieces = {piece_of(model.tokens(3), 0), piece_of(model.tokens(1), 2),
                                     piece_of(model.tokens(9), 4)};
  const auto engine = engine_of(model, 3);
  const auto together = logits_of(engine.get(), Arrays(pieces, inputs, {0, 1, 2}, {0, 1, 2}).input());
  std::size_t row = 0;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    for (const std::int32_t token : pieces[i].tokens) {
      const auto expected = model.expected(token, inputs[i]);
      for (std::size_t k = 0; k < expected.size(); ++k) {
        BOOST_TEST_REQUIRE(std::abs(together[row * kQuery + k] - expected[k]) < 2e-5);
      }
      ++row;
    }
  }
  // Encoded alone, and read by a later step.
  const auto alone = engine_of(model, 1);
  (void)logits_of(alone.get(), Arrays({pieces[1]}, inputs, {1}, {1}).input());
  (void)logits_of(alone.get(), Arrays({pieces[0]}, inputs, {0}, {0}).input());
  const auto later = logits_of(alone.get(), Arrays({pieces[1]}, inputs, {1}, {}).input());
  BOOST_TEST(std::memcmp(later.data(), together.data() + 3 * kQuery, later.size() * sizeof(float)) == 0);
}

BOOST_AUTO_TEST_CASE(decoders_may_be_much_longer_than_their_encoder_input) {
  CrossAlone model;
  const std::vector<std::vector<std::int32_t>> inputs = {model.tokens(2)};
  Piece piece = piece_of(model.tokens(100), 0);
  piece.blocks = {0, 1, 2, 3, 4, 5, 6};
  const auto engine = engine_of(model, 1);
  const auto logits = logits_of(engine.get(), Arrays({piece}, inputs, {0}, {0}).input());
  for (std::size_t row = 0; row < piece.tokens.size(); ++row) {
    const auto expected = model.expected(piece.tokens[row], inputs[0]);
    for (std::size_t k = 0; k < expected.size(); ++k) {
      BOOST_TEST_REQUIRE(std::abs(logits[row * kQuery + k] - expected[k]) < 2e-5);
    }
  }
}

BOOST_AUTO_TEST_CASE(bad_encoder_inputs_are_refused) {
  CrossAlone model;
  const auto engine = engine_of(model, 1);
  const std::vector<std::vector<std::int32_t>> inputs = {model.tokens(20), model.tokens(71)};
  const std::vector<Piece> pieces = {piece_of(model.tokens(2), 0)};
  const auto refuses = [&](const std::string& words, const std::function<void(Arrays*)>& damage,
                           std::size_t input = 0) {
    Arrays arrays(pieces, inputs, {0}, {input});
    damage(&arrays);
    BOOST_CHECK_EXCEPTION((void)logits_of(engine.get(), arrays.input()), StepError, [&](const auto& error) {
      BOOST_TEST(std::string(error.what()).find(words) != std::string::npos, error.what());
      return true;
    });
  };
  refuses("encoder_lengths has 0 elements, not 1", [](Arrays* a) { a->lengths.clear(); });
  refuses("accepted: 1 to max_encoder_input_len 70", [](Arrays*) {}, 1);
  refuses("token 3 is 48", [](Arrays* a) { a->token_ids[3] = kQuery; });
  refuses("has block 24 in its table", [](Arrays* a) { a->tables[1] = 24; });
  refuses("input 0 has block -1", [](Arrays* a) { a->encoder_tables[0] = -1; });
  refuses("a block is written by two inputs", [](Arrays* a) { a->encoder_tables[1] = a->encoder_tables[0]; });
  refuses("offsets do not run", [](Arrays* a) { a->offsets[1] = 19; });
  refuses("is of no sequence of the step", [](Arrays* a) {
    static const DeviceAdapter stranger{.task_id = 9, .sites = {}};
    a->adapters[0] = &stranger;
  });
  (void)logits_of(engine.get(), Arrays(pieces, inputs, {0}, {0}).input());
}

BOOST_AUTO_TEST_CASE(programs_that_cannot_be_are_found) {
  CrossAlone model;
  const auto finds = [&](const std::string& words, const std::function<void(Program*)>& damage) {
    Program program = model.program;
    damage(&program);
    std::string all;
    const Problems problems = program.validate();
    for (const auto& problem : problems.list()) all += "\n" + problem;
    BOOST_TEST(all.find(words) != std::string::npos, "'" << words << "' is not among:" << all);
  };
  BOOST_TEST(model.program.validate().empty());
  finds("layer 0 has 0 cross keys ops", [](Program* p) { p->encoder.pop_back(); });
  finds("an encoder's attention is bidirectional",
        [](Program* p) { std::get<AttentionOp>(p->encoder[3]).kind = AttentionKind::kCausal; });
  finds("max_encoder_input_len is 101", [](Program* p) { p->max_encoder_input_len = 101; });
  finds("there is no encoder", [](Program* p) { p->encoder.clear(); });
  finds("belongs in the encoder", [](Program* p) { p->body.push_back(p->encoder.back()); });
  finds("other heads than the keys",
        [](Program* p) { std::get<CrossAttentionOp>(p->body[4]).shape.num_key_value_heads = 4; });
  finds("has a row a token of encoder inputs, not a token",
        [](Program* p) { std::get<CrossAttentionOp>(p->body[4]).q = p->encoder_output; });
  finds("encoder layer 0 has 0 attention ops",
        [](Program* p) { std::get<AttentionOp>(p->encoder[3]).layer = 1; });
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::testing::encoder_test
