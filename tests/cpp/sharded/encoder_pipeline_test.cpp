// Pipeline stages of an encoder and a decoder in threads: encoder inputs pass through all stages, then each
// keeps what its layers read.

#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "adaptrt/core/error.h"
#include "adaptrt/cpu/cpu_engine.h"
#include "cpu/random_model.h"
#include "cpu/step_arrays.h"
#include "sharded/encoder_decoder.h"
#include "sharded/thread_pipeline.h"

namespace adaptrt::testing::encoder_pipeline_test {
namespace {

namespace data = boost::unit_test::data;

constexpr std::int32_t kCrossBlocks = 7;  // for the largest encoder input

/// Decoder sequences of these lengths, each with its own encoder input and its own blocks.
class Step {
 public:
  Step(const std::vector<std::int32_t>& lengths, std::vector<std::int32_t> encoder_lengths,
       bool encodes = true)
      : encoder_lengths_(std::move(encoder_lengths)),
        decoders_(pieces(lengths)),
        adapters_(lengths.size(), nullptr) {
    decoders_.logit_rows.clear();
    for (std::size_t i = 1; i < decoders_.offsets.size(); ++i) {
      decoders_.logit_rows.push_back(decoders_.offsets[i] - 1);
    }
    std::int32_t block = 0;
    for (const std::int32_t length : encoder_lengths_) {
      for (std::int32_t token = 0; token < length; ++token) {
        token_ids_.push_back(static_cast<std::int32_t>(random_.below(61)));
      }
      offsets_.push_back(static_cast<std::int32_t>(token_ids_.size()));
      const std::int32_t blocks = (length + 15) / 16;
      for (std::int32_t i = 0; i < kCrossBlocks; ++i) tables_.push_back(i < blocks ? block++ : -1);
      outputs_.emplace_back(static_cast<std::size_t>(length * kEncodedSize));
    }
    for (auto& output : outputs_) output_places_.push_back(output.data());
    if (encodes) return;
    token_ids_.clear();
    offsets_.clear();
    adapters_.clear();
    output_places_.clear();
  }

  [[nodiscard]] StepInput input() const {
    StepInput made = decoders_.input();
    made.encoder = {.token_ids = token_ids_,
                    .offsets = offsets_,
                    .block_tables = adapters_.empty() ? std::span<const std::int32_t>() : tables_,
                    .adapters = adapters_,
                    .outputs = output_places_};
    made.encoder_lengths = encoder_lengths_;
    made.cross_block_tables = tables_;
    made.max_cross_blocks = kCrossBlocks;
    return made;
  }
  [[nodiscard]] const std::vector<std::vector<float>>& outputs() const { return outputs_; }

 private:
  std::vector<Piece> pieces(const std::vector<std::int32_t>& lengths) {
    std::vector<Piece> made;
    std::int32_t block = 0;
    for (const std::int32_t length : lengths) {
      Piece piece{.prompt_length = length};
      for (std::int32_t i = 0; i < length; ++i) {
        piece.tokens.push_back(static_cast<std::int32_t>(random_.below(61)));
        if (i % 16 == 0) piece.blocks.push_back(block++);
      }
      made.push_back(piece);
    }
    return made;
  }

  Random random_{9};
  std::vector<std::int32_t> encoder_lengths_;
  StepArrays decoders_;
  std::vector<std::int32_t> token_ids_;
  std::vector<std::int32_t> offsets_ = {0};
  std::vector<std::int32_t> tables_;
  std::vector<const DeviceAdapter*> adapters_;
  std::vector<std::vector<float>> outputs_;
  std::vector<float*> output_places_;
};

class Stages : public Pipeline {
 public:
  Stages(const EncoderDecoder& model, std::int32_t layers)
      : Pipeline(layers, [&](std::int32_t stage) { return model.stage(stage); },
                 {.hidden_size = kEncodedSize, .max_reusable_prompt_len = 0}) {}
};

BOOST_AUTO_TEST_SUITE(encoder_pipeline)

/// Encoder inputs in one and several micro-batches, and a later step that reads the cached ones, also in
/// micro-batches.
BOOST_DATA_TEST_CASE(stages_make_what_one_engine_does, data::make({2, 4}) * data::make({0, 1}), layers,
                     type) {
  const DType dtype = type == 0 ? DType::kFloat32 : DType::kBFloat16;
  const EncoderDecoder model(layers, dtype);
  BOOST_TEST_REQUIRE(model.program.validate().empty());
  Stages stages(model, layers);
  const auto alone = make_cpu_engine(model.program, std::make_shared<ThreadPool>(1));
  alone->allocate_kv_blocks(Pipeline::kBlocks);
  alone->allocate_cross_kv_blocks(Pipeline::kBlocks);
  const std::vector<std::vector<std::int32_t>> encoder_lengths{{1, 9}, {100, 30}, {70, 64}, {3, 99}};
  for (const auto& lengths : encoder_lengths) {
    const Step step({2, 1}, lengths);
    const Step of_stages({2, 1}, lengths);
    BOOST_TEST((logits_of(stages.engine.get(), of_stages.input()) == logits_of(alone.get(), step.input())));
    BOOST_TEST((step.outputs() == of_stages.outputs()));
    const Step later({100, 90}, lengths, false);
    BOOST_TEST((logits_of(stages.engine.get(), later.input()) == logits_of(alone.get(), later.input())));
  }
}

BOOST_AUTO_TEST_CASE(refused_encoder_inputs_leave_the_stages_in_step) {
  const EncoderDecoder model(2, DType::kFloat32);
  Stages stages(model, 2);
  const Step good({2, 1}, {20, 70});
  const auto before = logits_of(stages.engine.get(), good.input());
  StepInput bad = good.input();
  bad.encoder.token_ids = bad.encoder.token_ids.first(5);
  BOOST_CHECK_THROW(logits_of(stages.engine.get(), bad), StepError);
  BOOST_TEST((logits_of(stages.engine.get(), good.input()) == before));
}

BOOST_AUTO_TEST_CASE(stages_that_do_not_fit_are_found) {
  const EncoderDecoder model(2, DType::kFloat32);
  const auto finds = [&](std::int32_t stage, const std::string& words,
                         const std::function<void(Program*)>& damage) {
    Program program = model.stage(stage);
    BOOST_TEST(program.validate().empty());
    damage(&program);
    std::string all;
    const Problems problems = program.validate();
    for (const auto& problem : problems.list()) all += "\n" + problem;
    BOOST_TEST(all.find(words) != std::string::npos, "'" << words << "' is not among:" << all);
  };
  const auto broadcast_of = [](Program* p) { return p->encoder.end() - 3; };
  finds(0, "encoder has 0 broadcast ops", [&](Program* p) { p->encoder.erase(broadcast_of(p)); });
  finds(0, "encoder has 2 broadcast ops", [&](Program* p) { p->encoder.push_back(*broadcast_of(p)); });
  finds(1, "the buffer is not encoder_output", [&](Program* p) {
    std::get<BroadcastOp>(*broadcast_of(p)).buffer = std::get<ReceiveOp>(p->encoder.front()).output;
  });
  finds(0, "belongs in the encoder", [&](Program* p) { p->body.push_back(*broadcast_of(p)); });
  finds(0, "belongs before the broadcast",
        [&](Program* p) { std::swap(*broadcast_of(p), *(broadcast_of(p) - 1)); });
  finds(0, "whose rows were not kept", [&](Program* p) {
    p->encoder.push_back(CastOp{std::get<SendOp>(*(broadcast_of(p) - 1)).input, p->encoder_output});
  });
  finds(1, "before it is written", [&](Program* p) { p->encoder.erase(broadcast_of(p) - 1); });
  Program program = model.program;
  program.encoder.push_back(BroadcastOp{program.encoder_output});
  BOOST_TEST(!program.validate().empty());
  const EncoderDecoder adapted(2, DType::kFloat32, 4);
  program = adapted.stage(1);
  BOOST_TEST(program.validate().empty());
  program.lora.num_encoder_layers = 1;  // the number of encoder layers in the stage
  BOOST_TEST(!program.validate().empty());
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::testing::encoder_pipeline_test
