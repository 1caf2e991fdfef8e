#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "program/program_fixture.h"

namespace adaptrt::testing::program_weights_test {
namespace {

BOOST_FIXTURE_TEST_SUITE(program_weights, ProgramFixture)

BOOST_AUTO_TEST_CASE(orders_that_lack_an_input_are_found) {
  model = RandomModel({.quantization = {.algo = QuantAlgo::kW8A16, .act_order = true}});
  PanelMatrix& weight = op_at<LinearOp>(&model.program, 5).parts[0].weight;
  std::vector<std::byte> bytes(weight.data, weight.data + weight.bytes());
  weight.data = bytes.data();
  BOOST_TEST(model.program.validate().list().empty());
  const std::size_t begin = bytes.size() - static_cast<std::size_t>(weight.k) * sizeof(std::int32_t);
  const std::int32_t second = weight.permutation()[1];
  for (const std::int32_t wrong : {std::int32_t{-1}, static_cast<std::int32_t>(weight.k), second}) {
    std::memcpy(bytes.data() + begin, &wrong, sizeof(wrong));
    finds("has input " + std::to_string(wrong) + " of " + std::to_string(weight.k) +
              " in the order of its inputs, which must have each of them once",
          [](Program*) {});
  }
}

BOOST_AUTO_TEST_CASE(unusable_quantization_is_found) {
  const auto of_dense = [](Program* p) -> Quantization& {
    return op_at<LinearOp>(p, 5).parts[0].weight.quantization;
  };
  finds("the table is quantised or compressed, which only linear layers can be",
        [](Program* p) { op_at<EmbeddingOp>(p, 0).table.quantization.algo = QuantAlgo::kW8A16; });
  finds("quantised in a way that is unknown",
        [&](Program* p) { of_dense(p).algo = static_cast<QuantAlgo>(9); });
  finds("group_size of 12; it must be a multiple of 8",
        [&](Program* p) { of_dense(p) = {.algo = QuantAlgo::kW4A16, .group_size = 12}; });
  finds("group_size of -8", [&](Program* p) { of_dense(p) = {.algo = QuantAlgo::kW4A16, .group_size = -8}; });
  const Quantization nf4{.algo = QuantAlgo::kW4A16, .group_size = 8, .code = WeightCode::kNF4};
  const auto changed = [&](auto change) {
    return [&, change](Program* p) {
      of_dense(p) = nf4;
      change(&of_dense(p));
    };
  };
  finds("inputs in groups of 0 of NF4, which must be whole",
        changed([](Quantization* how) { how->group_size = 0; }));
  finds("inputs in groups of 40 of NF4, which must be whole",
        changed([](Quantization* how) { how->group_size = 40; }));
  finds("both a code and zero points", changed([](Quantization* how) { how->zero_points = true; }));
  finds("an unknown code", changed([](Quantization* how) { how->code = static_cast<WeightCode>(77); }));
  finds("scales or values of an unknown type",
        changed([](Quantization* how) { how->scale_type = static_cast<DType>(9); }));
  finds("says what its values are rounded to, which only those of a code are",
        [&](Program* p) { of_dense(p) = {.algo = QuantAlgo::kW4A16, .value_type = DType::kBFloat16}; });
  finds("or a code, which W8A16 does not have",
        [&](Program* p) { of_dense(p) = {.algo = QuantAlgo::kW8A16, .code = WeightCode::kFP4}; });
  const auto of_bits = [&](std::int32_t bits, std::int64_t group_size) {
    return [&, bits, group_size](Program* p) {
      of_dense(p) = {.algo = QuantAlgo::kW4A16, .group_size = group_size, .bits = bits};
    };
  };
  finds("has weights of 5 bits; they may have 2, 3 or 4", of_bits(5, 0));
  finds("has weights of -2 bits", of_bits(-2, 0));
  finds("group_size of 8; it must be a multiple of 16", of_bits(2, 8));
  finds("group_size of 48; it must be a multiple of 32", of_bits(3, 48));
  finds("inputs; of 3 bits they must be a multiple of 32", [&](Program* p) {
    of_bits(3, 0)(p);
    op_at<LinearOp>(p, 5).parts[0].weight.k = 48;
  });
  finds("both a code and weights of 2 bits", changed([](Quantization* how) {
          how->group_size = 16;
          how->bits = 2;
        }));
  finds("bits, or a code, which W8A16 does not have",
        [&](Program* p) { of_dense(p) = {.algo = QuantAlgo::kW8A16, .bits = 3}; });
  finds("is W4A16 of E4M3, which only W8A16 may be",
        changed([](Quantization* how) { how->code = WeightCode::kE4M3; }));
  finds("of E4M3, an odd number", [&](Program* p) {
    of_dense(p) = {.algo = QuantAlgo::kW8A16, .code = WeightCode::kE4M3};
    op_at<LinearOp>(p, 5).parts[0].weight.k = 47;
  });
  finds("has groups, zero points, types",
        [&](Program* p) { of_dense(p) = {.algo = QuantAlgo::kW8A8, .zero_points = true}; });
  const auto with_minimums = [&](QuantAlgo algo, auto change) {
    return [&, algo, change](Program* p) {
      of_dense(p) = {.algo = algo, .group_size = 16, .minimums = true};
      change(&of_dense(p));
    };
  };
  finds("has minimums, and is W4A8; only W8A16 and W4A16", with_minimums(QuantAlgo::kW4A8, [](auto*) {}));
  finds("has minimums, and no groups",
        with_minimums(QuantAlgo::kW8A16, [](Quantization* how) { how->group_size = 0; }));
  finds("has both minimums and zero points",
        with_minimums(QuantAlgo::kW4A16, [](Quantization* how) { how->zero_points = true; }));
  finds("has both minimums and a code",
        with_minimums(QuantAlgo::kW4A16, [](Quantization* how) { how->code = WeightCode::kNF4; }));
  finds("is W4A16 of LLM_INT8, which only W8A16 may be",
        changed([](Quantization* how) { how->code = WeightCode::kLLMInt8; }));
  finds("is of LLM_INT8, which has one float32 scale an output", [&](Program* p) {
    of_dense(p) = {.algo = QuantAlgo::kW8A16, .scale_type = DType::kBFloat16, .code = WeightCode::kLLMInt8};
  });
  finds("has act_order, which only integers of W4A16 and W8A16 may have",
        changed([](Quantization* how) { how->act_order = true; }));
  finds("has act_order, which only integers of W4A16 and W8A16 may have",
        [&](Program* p) { of_dense(p) = {.algo = QuantAlgo::kW8A8, .act_order = true}; });
  finds("has act_order, which only integers of W4A16 and W8A16 may have",
        [&](Program* p) { of_dense(p) = {.algo = QuantAlgo::kW4A8, .act_order = true}; });
  finds("has a code, which only weights may have that are multiplied as W4A16", [&](Program* p) {
    of_dense(p) = {.algo = QuantAlgo::kW4A8, .group_size = 16, .code = WeightCode::kFP4};
  });
  finds("is quantised in a way that is unknown",
        [&](Program* p) { of_dense(p) = {.algo = static_cast<QuantAlgo>(5)}; });
  finds("has groups, zero points, types",
        [&](Program* p) { of_dense(p) = {.algo = QuantAlgo::kW8A8, .group_size = 16}; });
  finds("has groups, zero points, types",
        [&](Program* p) { of_dense(p) = {.algo = QuantAlgo::kW8A16, .scale_type = DType::kFloat16}; });
  finds("group_size of 12; it must be a multiple of 8",
        [&](Program* p) { of_dense(p) = {.algo = QuantAlgo::kW8A16, .group_size = 12}; });
  finds("its weights are quantised in different ways",
        [](Program* p) { op_at<LinearOp>(p, 3).parts[1].weight.quantization.algo = QuantAlgo::kW8A8; });
  const auto with_inputs = [&](std::int64_t k) {
    return [&, k](Program* p) {
      of_dense(p).algo = QuantAlgo::kW8A8;
      op_at<LinearOp>(p, 5).parts[0].weight.k = k;
    };
  };
  finds("65540 inputs; W8A8 sums at most 65536", with_inputs(65540));
  does_not_find("W8A8 sums at most", with_inputs(65536));
}

BOOST_AUTO_TEST_CASE(unusable_compression_is_found) {
  const auto compressed = [](Program* p) -> PanelMatrix& {
    PanelMatrix& weight = op_at<LinearOp>(p, 5).parts[0].weight;
    weight.outliers = 0;
    return weight;
  };
  finds("the table is quantised or compressed, which only linear layers can be",
        [](Program* p) { op_at<EmbeddingOp>(p, 0).table.outliers = 0; });
  finds("is compressed, which only bfloat16 can be", [&](Program* p) { compressed(p); });
  finds("is compressed and has 4 inputs, which must be a multiple of 8",
        [&](Program* p) { compressed(p).k = 4; });
  finds("has places for -3 outliers", [&](Program* p) { compressed(p).outliers = -3; });
  finds("has places for 1000000000 outliers", [&](Program* p) { compressed(p).outliers = 1000000000; });
}

BOOST_AUTO_TEST_CASE(unusable_weights_are_found) {
  finds("the table is [60, 48]", [](Program* p) { op_at<EmbeddingOp>(p, 0).table.n = 60; });
  finds("the table has no data", [](Program* p) { op_at<EmbeddingOp>(p, 0).table.data = nullptr; });
  finds("the table is bfloat16", [](Program* p) { op_at<EmbeddingOp>(p, 0).table.dtype = DType::kBFloat16; });
  finds("a weight is [48, 47]", [](Program* p) { op_at<LinearOp>(p, 3).parts[0].weight.k = 47; });
  finds("outputs of a part is", [](Program* p) { op_at<LinearOp>(p, 3).parts[0].weight.n = kHuge; });
  finds("outputs of a part is", [](Program* p) { op_at<LinearOp>(p, 3).parts[0].weight.n = -kHuge; });
  finds("output 'qkv' is 96 wide; it must be 72", [](Program* p) { op_at<LinearOp>(p, 3).parts.pop_back(); });
  finds("number of parts is 0", [](Program* p) { op_at<LinearOp>(p, 3).parts.clear(); });
  finds("the two parts differ", [](Program* p) { op_at<LinearOp>(p, 7).parts[1].weight.n = 36; });
  finds("a bias has 3 elements", [](Program* p) { op_at<LinearOp>(p, 3).parts[0].bias.size = 3; });
  finds("the weight has 0 elements", [](Program* p) { op_at<RmsNormOp>(p, 2).weight = {}; });
  finds("epsilon is", [](Program* p) { op_at<RmsNormOp>(p, 2).epsilon = std::nanf(""); });
  finds("epilogue is unknown", [](Program* p) {
    op_at<LinearOp>(p, 3).epilogue = static_cast<LinearEpilogue>(static_cast<int>(kLastLinearEpilogue) + 1);
  });
}

BOOST_AUTO_TEST_CASE(unusable_sparse_layers_are_found) {
  const auto make_sparse = [](Program* p) {
    LinearOp& first = op_at<LinearOp>(p, 7);
    first.epilogue = LinearEpilogue::kReluMul;
    first.parts[1].weight.has_rows = true;
  };
  finds(
      "has rows, and is float32 and [37, 48]; it must be float32 or bfloat16, and the sizes multiples of 64 "
      "and 1",
      make_sparse);
  finds("a weight has rows, which only what a ReLU gates can have",
        [](Program* p) { op_at<LinearOp>(p, 3).parts[0].weight.has_rows = true; });
  finds("a weight has rows, which only what a ReLU gates can have",
        [](Program* p) { op_at<LinearOp>(p, 7).parts[1].weight.has_rows = true; });
  finds("a weight has columns, which only one layer of a sparse input can have",
        [](Program* p) { op_at<LinearOp>(p, 8).parts[0].weight.has_columns = true; });
  finds("the table has columns", [](Program* p) { op_at<EmbeddingOp>(p, 0).table.has_columns = true; });
  const auto give_columns = [](Program* p) {
    op_at<LinearOp>(p, 8).has_sparse_input = true;
    op_at<LinearOp>(p, 8).parts[0].weight.has_columns = true;
  };
  finds("has columns, and is [48, 37]; the sizes must be multiples of 64 and 1", give_columns);
  finds("has columns, and is quantised or compressed", [&](Program* p) {
    give_columns(p);
    op_at<LinearOp>(p, 8).parts[0].weight.quantization.algo = QuantAlgo::kW8A16;
  });
  finds("has both rows and columns", [&](Program* p) {
    give_columns(p);
    op_at<LinearOp>(p, 8).parts[0].weight.has_rows = true;
  });
  finds("the table has rows", [](Program* p) { op_at<EmbeddingOp>(p, 0).table.has_rows = true; });
  finds("a weight has rows, where the layer has a scale or a softcap", [&](Program* p) {
    make_sparse(p);
    op_at<LinearOp>(p, 7).scale = 2.0F;
  });
  finds("has rows, and is quantised or compressed", [&](Program* p) {
    make_sparse(p);
    op_at<LinearOp>(p, 7).parts[1].weight.quantization.algo = QuantAlgo::kW8A16;
  });
  finds("the input is sparse, and a weight quantised or compressed", [](Program* p) {
    op_at<LinearOp>(p, 8).has_sparse_input = true;
    op_at<LinearOp>(p, 8).parts[0].weight.quantization.algo = QuantAlgo::kW8A16;
  });
  finds("has a threshold without a ReLU's gate", [](Program* p) { op_at<LinearOp>(p, 7).threshold = 0.5F; });
  finds("threshold is", [](Program* p) {
    op_at<LinearOp>(p, 7).epilogue = LinearEpilogue::kReluMulRelu;
    op_at<LinearOp>(p, 7).threshold = -0.5F;
  });
}

BOOST_AUTO_TEST_CASE(unusable_neurons_are_found) {
  // Op 7 is the gated layer; op 8 reads its output.
  model = RandomModel({.shape = {.hidden_size = 64, .attention = {4, 2, 16}},
                       .intermediate_size = 128,
                       .activation = LinearEpilogue::kReluMul,
                       .is_sparse = true,
                       .has_neurons = true});
  BOOST_TEST(model.program.validate().list().empty());
  for (const std::size_t op : {7U, 8U}) {
    const auto neurons = [=](Program* p) -> NeuronTable& { return op_at<LinearOp>(p, op).neurons; };
    finds("its neurons have no data", [&](Program* p) { neurons(p).data = nullptr; });
    finds("its neurons are bfloat16, the program float32",
          [&](Program* p) { neurons(p).dtype = DType::kBFloat16; });
    finds("has 64 neurons of 64; there must be 128 of 64, of one layer",
          [&](Program* p) { neurons(p).count = 64; });
    finds("has 128 neurons of 32; there must be 128 of 64, of one layer",
          [&](Program* p) { neurons(p).size = 32; });
    finds("has neurons, and a scale or a softcap", [=](Program* p) { op_at<LinearOp>(p, op).scale = 2.0F; });
    finds("has both neurons and rows",
          [=](Program* p) { op_at<LinearOp>(p, op).parts.back().weight.has_rows = true; });
    finds("has both neurons and columns",
          [=](Program* p) { op_at<LinearOp>(p, op).parts.back().weight.has_columns = true; });
    finds("has neurons, and a weight quantised or compressed", [=](Program* p) {
      op_at<LinearOp>(p, op).parts.back().weight.quantization.algo = QuantAlgo::kW8A16;
    });
  }
  finds("has both neurons and scores", [](Program* p) { op_at<LinearOp>(p, 7).scores = 0; });
  finds("has neurons, and neither a ReLU's gate nor a sparse input",
        [](Program* p) { op_at<LinearOp>(p, 8).has_sparse_input = false; });
  finds("has neurons outside the body",
        [](Program* p) { std::get<LinearOp>(p->head.back()).neurons = op_at<LinearOp>(p, 7).neurons; });
  model = RandomModel({});
  finds("has neurons, which layers of 37 and 48 of float32 cannot have", [](Program* p) {
    LinearOp& gated = op_at<LinearOp>(p, 7);
    gated.epilogue = LinearEpilogue::kReluMul;
    gated.neurons = {.data = op_at<EmbeddingOp>(p, 0).table.data, .count = 37, .size = 48};
  });
}

BOOST_AUTO_TEST_CASE(unusable_scores_of_gates_are_found) {
  // Op 6 is the norm, ops 7 to 9 are the predictor, op 10 is the gated layer.
  model = RandomModel({.intermediate_size = 64,
                       .activation = LinearEpilogue::kReluMul,
                       .is_sparse = true,
                       .predictor_rank = 5});
  BOOST_TEST(model.program.validate().list().empty());
  finds("has scores without a ReLU",
        [](Program* p) { op_at<LinearOp>(p, 10).epilogue = LinearEpilogue::kSiluMul; });
  finds("a weight has rows, which only what a ReLU gates can have",
        [](Program* p) { op_at<LinearOp>(p, 10).scores = kNoBuffer; });
  finds("scores 'predictor.inner' is 5 wide; it must be 64",
        [](Program* p) { op_at<LinearOp>(p, 10).scores = op_at<LinearOp>(p, 8).output; });
  finds("reads 'predictor.scores'", [](Program* p) { p->body.erase(p->body.begin() + 9); });
  finds("scores names buffer 99", [](Program* p) { op_at<LinearOp>(p, 10).scores = 99; });
  finds("has scores, and a scale or a softcap", [](Program* p) { op_at<LinearOp>(p, 10).scale = 2.0F; });
  finds("has scores, and a scale or a softcap", [](Program* p) { op_at<LinearOp>(p, 10).softcap = 2.0F; });
  finds("least_score is not finite", [](Program* p) { op_at<LinearOp>(p, 10).least_score = std::nanf(""); });
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::testing::program_weights_test
