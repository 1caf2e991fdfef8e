// An engine whose weights do not all fit into memory gives the bits of one with mapped weights.

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <numeric>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "adaptrt/core/error.h"
#include "adaptrt/cpu/cpu_engine.h"
#include "adaptrt/cpu/kernel_table.h"
#include "adaptrt/weight_file/weight_file.h"
#include "cpu/random_model.h"
#include "cpu/step_arrays.h"
#include "emulated_tiles/kernel_tables.h"
#include "support/sanitized.h"
#include "support/temporary_directory.h"

namespace adaptrt::testing::weight_memory_test {
namespace {

namespace data = boost::unit_test::data;

constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
constexpr Quantization kQuantizations[] = {{.algo = QuantAlgo::kW8A16},
                                           {.algo = QuantAlgo::kW8A8},
                                           {.algo = QuantAlgo::kW4A16, .group_size = 16},
                                           {.algo = QuantAlgo::kW4A8, .group_size = 16}};
constexpr std::int32_t kBlocks = 24;
constexpr std::size_t kPlenty = std::size_t{1} << 30;

/// A program whose weights are in a file. Its data pointers are not valid memory: reading them crashes.
class ProgramInFile {
 public:
  explicit ProgramInFile(const Program& source) : program(source) {
    std::string content(1000, 'h');
    std::map<const void*, std::size_t> offsets;
    const auto put = [&](const void* weights, std::size_t count, std::size_t alignment = 64) {
      if (weights == nullptr || offsets.contains(weights)) return;
      content.resize((content.size() + alignment - 1) / alignment * alignment, '\0');
      offsets.emplace(weights, content.size());
      content.append(static_cast<const char*>(weights), count);
    };
    visit([&](const PanelMatrix& matrix) { put(matrix.data, matrix.bytes()); },
          [&](const VectorView& vector) {
            put(vector.data, static_cast<std::size_t>(vector.size) * sizeof(float));
          },
          [&](const NeuronTable& neurons) { put(neurons.data, neurons.bytes(), kRecordAlignment); });
    bytes = content.size();
    std::ofstream(path(), std::ios::binary) << content;
    void* reserved = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    BOOST_REQUIRE(reserved != MAP_FAILED);
    mapping_ = static_cast<std::byte*>(reserved);
    const auto address = [&](const void* data) { return mapping_ + offsets.at(data); };
    visit(
        [&](PanelMatrix& matrix) {
          if (matrix.data != nullptr) matrix.data = address(matrix.data);
        },
        [&](VectorView& vector) {
          if (vector.data != nullptr) vector.data = reinterpret_cast<const float*>(address(vector.data));
        },
        [&](NeuronTable& neurons) {
          if (neurons.data != nullptr) neurons.data = address(neurons.data);
        });
    content_ = std::move(content);
  }
  ~ProgramInFile() { munmap(mapping_, bytes); }
  ProgramInFile(const ProgramInFile&) = delete;
  ProgramInFile& operator=(const ProgramInFile&) = delete;

  [[nodiscard]] std::string path() const { return (directory_.path() / "rank0.engine").string(); }
  [[nodiscard]] std::unique_ptr<Engine> engine(std::size_t memory, int threads = 2,
                                               const WeightUsage& usage = {},
                                               const std::string& kernels = "") const {
    const WeightMemory weights{.path = path(), .mapping = {mapping_, bytes}, .bytes = memory, .usage = usage};
    const auto pool = std::make_shared<ThreadPool>(threads);
    const KernelTable& table = kernels.empty() ? find_kernels("") : kernel_table(kernels);
    auto made = make_cpu_engine(program, pool, table, nullptr, nullptr, &weights);
    made->allocate_kv_blocks(kBlocks);
    return made;
  }
  void restore() const { std::ofstream(path(), std::ios::binary) << content_; }

  Program program;
  std::size_t bytes = 0;

 private:
  template <class Matrix, class Vector, class Neurons>
  void visit(const Matrix& matrix, const Vector& vector, const Neurons& neurons) {
    const auto of_parts = [&](std::vector<LinearPart>& parts) {
      for (LinearPart& part : parts) {
        matrix(part.weight);
        vector(part.bias);
      }
    };
    for (auto* ops : {&program.encoder, &program.body, &program.head}) {
      for (Op& op : *ops) {
        if (auto* embedding = std::get_if<EmbeddingOp>(&op)) matrix(embedding->table);
        if (auto* norm = std::get_if<RmsNormOp>(&op)) vector(norm->weight);
        if (auto* rope = std::get_if<RopeTableOp>(&op)) vector(rope->inverse_frequencies);
        if (auto* attention = std::get_if<AttentionOp>(&op)) {
          vector(attention->query_norm);
          vector(attention->key_norm);
        }
        if (auto* linear = std::get_if<LinearOp>(&op)) {
          of_parts(linear->parts);
          neurons(linear->neurons);
        }
        if (auto* experts = std::get_if<ExpertsOp>(&op)) {
          of_parts(experts->gate_up);
          of_parts(experts->down);
          vector(experts->routing.bias);
        }
      }
    }
  }

  TemporaryDirectory directory_;
  std::byte* mapping_ = nullptr;
  std::string content_;
};

/// Returns the minimum memory that the engine needs, from its error for less.
std::size_t least_memory(const ProgramInFile& file) {
  try {
    const auto engine = file.engine(1);
  } catch (const ConfigError& error) {
    const std::string text = error.what();
    const std::string before = "weight_memory is 1; accepted: ";
    BOOST_REQUIRE(text.starts_with(before));
    return std::stoull(text.substr(before.size()));
  }
  BOOST_FAIL("one byte is enough");
  return 0;
}

struct Steps {
  Steps(RandomModel* model, std::uint64_t seed)
      : adapters{model->adapter(21, false), model->adapter(22, true)} {
    Random random(seed);
    const auto tokens = [&](std::size_t count) {
      std::vector<std::int32_t> made(count);
      for (auto& token : made) token = static_cast<std::int32_t>(random.below(model->program.vocab_size));
      return made;
    };
    const std::vector<std::int32_t> blocks[] = {{0, 1, 2, 3, 4, 5}, {6, 7, 8, 9}, {10, 11}};
    steps.emplace_back(std::vector<Piece>{{tokens(70), 0, 70, blocks[0], adapters.data()},
                                          {tokens(9), 0, 40, blocks[1], &adapters[1]}});
    steps.emplace_back(std::vector<Piece>{{tokens(1), 70, 70, blocks[0], adapters.data()},
                                          {tokens(31), 9, 40, blocks[1], &adapters[1]},
                                          {tokens(5), 0, 5, blocks[2], nullptr}});
    for (std::int32_t i = 0; i < 3; ++i) {
      steps.emplace_back(std::vector<Piece>{{tokens(1), 71 + i, 70, blocks[0], adapters.data()},
                                            {tokens(1), 40 + i, 40, blocks[1], &adapters[1]},
                                            {tokens(1), 5 + i, 5, blocks[2], nullptr}});
    }
  }
  [[nodiscard]] std::vector<std::vector<float>> run(Engine* engine) const {
    std::vector<std::vector<float>> logits;
    for (const StepArrays& step : steps) logits.push_back(logits_of(engine, step.input()));
    return logits;
  }

  std::vector<DeviceAdapter> adapters;
  std::vector<StepArrays> steps;
};

void check_same(const std::vector<std::vector<float>>& found,
                const std::vector<std::vector<float>>& expected) {
  BOOST_REQUIRE(found.size() == expected.size());
  for (std::size_t i = 0; i < found.size(); ++i) {
    BOOST_REQUIRE(found[i].size() == expected[i].size());
    BOOST_TEST(std::memcmp(found[i].data(), expected[i].data(), found[i].size() * sizeof(float)) == 0,
               "step " << i);
  }
}

/// Checks nine budgets, from memory for all weights down to the minimum.
void check_budgets(ModelOptions options) {
  options.max_rank = 9;
  options.max_num_tokens = 400;
  RandomModel model(options);
  const Steps steps(&model, 5);
  const auto mapped = make_cpu_engine(model.program, std::make_shared<ThreadPool>(2));
  mapped->allocate_kv_blocks(kBlocks);
  BOOST_TEST(!mapped->weight_placement().has_value());
  const auto expected = steps.run(mapped.get());
  const ProgramInFile file(model.program);
  const auto whole = file.engine(kPlenty);
  check_same(steps.run(whole.get()), expected);
  const WeightPlacement all = whole->weight_placement().value();
  BOOST_TEST(all.file_bytes == 0U);
  BOOST_TEST(all.bytes_read >= file.bytes - 1000 - kFilePage);
  BOOST_TEST(all.bytes_read <= all.resident_bytes);
  const std::size_t least = least_memory(file);
  BOOST_REQUIRE(least < all.resident_bytes);
  std::set<std::size_t> different;
  for (std::size_t i = 0; i < 9; ++i) {
    const std::size_t memory = least + (all.resident_bytes - 1 - least) * i / 8;
    const auto engine = file.engine(memory, 1 + static_cast<int>(i % 3));
    check_same(steps.run(engine.get()), expected);
    check_same(steps.run(engine.get()), expected);
    const WeightPlacement placement = engine->weight_placement().value();
    BOOST_TEST(placement.resident_bytes + placement.buffer_bytes <= memory);
    BOOST_TEST(placement.bytes_read > placement.resident_bytes - kFilePage);
    different.insert(placement.resident_bytes + placement.buffer_bytes);
  }
  BOOST_TEST(different.size() > 2U);
}

}  // namespace

/// Steps over a truncated file fail, and give the same results as before once the file is restored.
template <class AnySteps>
void check_cut_short(const AnySteps& steps, const ProgramInFile& file, Engine* engine) {
  const auto expected = steps.run(engine);
  std::filesystem::resize_file(file.path(), file.bytes / 3);
  for (int i = 0; i < 3; ++i) {
    BOOST_CHECK_EXCEPTION(static_cast<void>(steps.run(engine)), StepError, [&](const StepError& error) {
      return std::string(error.what()).starts_with(file.path() + ": ends at byte ");
    });
  }
  file.restore();
  check_same(steps.run(engine), expected);
}

BOOST_AUTO_TEST_SUITE(weight_memory)

BOOST_DATA_TEST_CASE(every_budget_gives_the_same_bits, data::make({0, 1, 2}), dtype) {
  check_budgets({.dtype = kDTypes[dtype],
                 .num_layers = 4,
                 .shape = {.hidden_size = 144, .attention = {4, 2, 36}},
                 .intermediate_size = 200,
                 .biases = true});
}

BOOST_DATA_TEST_CASE(of_quantised_weights, data::make({0, 1, 2}), index) {
  check_budgets({.dtype = DType::kBFloat16,
                 .num_layers = 4,
                 .shape = {.hidden_size = 160, .attention = {4, 2, 40}},
                 .intermediate_size = 320,
                 .biases = true,
                 .quantization = kQuantizations[index]});
}

BOOST_DATA_TEST_CASE(of_experts, data::make({0, 2}), dtype) {
  check_budgets({.dtype = kDTypes[dtype],
                 .num_layers = 3,
                 .shape = {.hidden_size = 96, .attention = {4, 2, 24}},
                 .intermediate_size = 136,
                 .num_experts = 8,
                 .routing = {.top_k = 2, .norm_topk_prob = true, .scales_inputs = true},
                 .biases = true});
}

/// ReLU-gated layers whose neurons are stored one by one.
ModelOptions neuron_options(DType dtype, LinearEpilogue activation, float gate_bias) {
  return {.dtype = dtype,
          .num_layers = 3,
          .shape = {.hidden_size = 128, .attention = {4, 2, 32}},
          .intermediate_size = 320,
          .biases = true,
          .activation = activation,
          .threshold = activation == LinearEpilogue::kReluMul ? 0.25F : 0.0F,
          .gate_bias = gate_bias,
          .is_sparse = true,
          .has_neurons = true,
          .max_rank = 9};
}

/// Makes a usage in which some neurons and experts are frequent and others are never used.
WeightUsage usage_of(const Program& program) {
  WeightUsage usage{.tokens = 100, .of_ops = {}};
  for (std::size_t op = 0; op < program.body.size(); ++op) {
    std::size_t count = 0;
    const auto* linear = std::get_if<LinearOp>(&program.body[op]);
    const auto* experts = std::get_if<ExpertsOp>(&program.body[op]);
    if (linear != nullptr && is_relu_gated(linear->epilogue)) {
      count = static_cast<std::size_t>(linear->neurons.count);
    } else if (experts != nullptr) {
      count = static_cast<std::size_t>(experts->num_experts());
    }
    for (std::size_t i = 0; i < count; ++i) {
      usage.of_ops[op].push_back(static_cast<std::uint32_t>(i * 37 % 101));
    }
  }
  return usage;
}

/// Single tokens of a few sequences, which read neurons, between steps of many rows.
struct SparseSteps {
  SparseSteps(RandomModel* model, std::uint64_t seed)
      : adapters{model->adapter(21, false), model->adapter(22, true, 0, true)} {
    Random random(seed);
    const DeviceAdapter* adapter_of[] = {nullptr, adapters.data(), &adapters[1], nullptr, adapters.data()};
    for (int i = 0; i < 14; ++i) {
      const int sequences = i % 7 == 6 ? 5 : 1 + i % 4;
      std::vector<Piece> pieces;
      for (int s = 0; s < sequences; ++s) {
        const auto token = static_cast<std::int32_t>(random.below(model->program.vocab_size));
        pieces.push_back({{token}, i, 1, {s}, adapter_of[(s + i) % 5]});
      }
      steps.emplace_back(pieces);
    }
  }
  [[nodiscard]] std::vector<std::vector<float>> run(Engine* engine) const {
    std::vector<std::vector<float>> logits;
    for (const StepArrays& step : steps) logits.push_back(logits_of(engine, step.input()));
    return logits;
  }

  std::vector<DeviceAdapter> adapters;
  std::vector<StepArrays> steps;
};

constexpr float kClosed = -20.0F;
constexpr float kSparse = -1.3F;
constexpr float kHalfOpen = 0.0F;

/// Budgets in fifths between the minimum memory and memory for all weights; these take all branches. For odd
/// ones, frequent neurons come first.
const std::vector<std::size_t> kBudgets = {0, 1, 5};

BOOST_DATA_TEST_CASE(of_neurons_that_are_read_as_their_gates_open,
                     kernel_tables() * data::make({0, 2}) * data::xrange(sanitized(1, 2)) *
                         data::make({kClosed, kSparse, kHalfOpen}),
                     kernels, dtype, activation, gate_bias) {
  const auto gate = activation == 0 ? LinearEpilogue::kReluMul : LinearEpilogue::kReluMulRelu;
  RandomModel model(neuron_options(kDTypes[dtype], gate, gate_bias));
  const SparseSteps steps(&model, 5);
  const KernelTable& table = kernel_table(kernels);
  const auto mapped = make_cpu_engine(model.program, std::make_shared<ThreadPool>(2), table);
  mapped->allocate_kv_blocks(kBlocks);
  const auto expected = steps.run(mapped.get());
  // The same model without neurons.
  Program dense = model.program;
  for (Op& op : dense.body) {
    auto* linear = std::get_if<LinearOp>(&op);
    if (linear != nullptr) linear->neurons = {};
  }
  const auto dense_engine = make_cpu_engine(dense, std::make_shared<ThreadPool>(2), table);
  dense_engine->allocate_kv_blocks(kBlocks);
  check_same(steps.run(dense_engine.get()), expected);
  const ProgramInFile file(model.program);
  const WeightUsage usage = usage_of(model.program);
  const std::size_t least = least_memory(file);
  const std::size_t all = file.engine(kPlenty)->weight_placement()->resident_bytes;
  BOOST_REQUIRE(least < all);
  for (const std::size_t i : kBudgets) {
    const std::size_t memory = i == 5 ? kPlenty : least + (all - least) * i / 5;
    const auto engine =
        file.engine(memory, 1 + static_cast<int>(i % 3), i % 2 == 0 ? WeightUsage{} : usage, kernels);
    check_same(steps.run(engine.get()), expected);
    check_same(steps.run(engine.get()), expected);
    const WeightPlacement placement = engine->weight_placement().value();
    BOOST_TEST(placement.resident_bytes + placement.buffer_bytes <= memory);
    BOOST_TEST((placement.file_bytes == 0) == (i == 5));
  }
}

BOOST_AUTO_TEST_CASE(neurons_whose_gates_are_closed_are_not_read) {
  RandomModel model(neuron_options(DType::kBFloat16, LinearEpilogue::kReluMul, kClosed));
  const ProgramInFile file(model.program);
  const auto engine = file.engine(least_memory(file) + 300000);
  const auto read_of = [&](std::size_t tokens) {
    std::vector<std::int32_t> ids(tokens, 3);
    const StepArrays step({{.tokens = ids, .first_position = 0, .prompt_length = 300, .blocks = {0, 1, 2}}});
    logits_of(engine.get(), step.input());
    const std::uint64_t before = engine->weight_placement()->bytes_read;
    logits_of(engine.get(), step.input());
    return engine->weight_placement()->bytes_read - before;
  };
  const std::uint64_t up_and_down = 3 * 2 * 320 * 128 * 2;
  BOOST_TEST(read_of(40) >= up_and_down);
  BOOST_TEST(read_of(1) < up_and_down);
}

BOOST_AUTO_TEST_CASE(neurons_that_a_text_used_most_are_kept) {
  RandomModel model(neuron_options(DType::kBFloat16, LinearEpilogue::kReluMul, kSparse));
  const ProgramInFile file(model.program);
  const SparseSteps steps(&model, 8);
  const std::size_t memory = least_memory(file) + 500000;
  // The usage of these steps, derived from the bits of the gated layers' outputs.
  const auto read_with = [&](const WeightUsage& usage) {
    const auto engine = file.engine(memory, 2, usage);
    const std::uint64_t before = engine->weight_placement()->bytes_read;
    const std::size_t kept = engine->weight_placement()->resident_bytes;
    static_cast<void>(steps.run(engine.get()));
    return std::pair(engine->weight_placement()->bytes_read - before, kept);
  };
  WeightUsage all = usage_of(model.program);
  for (auto& [op, counts] : all.of_ops) std::ranges::fill(counts, 90);
  BOOST_TEST(read_with(all).second > read_with({}).second - 2 * kFilePage);
  for (auto& [op, counts] : all.of_ops) counts.pop_back();
  BOOST_CHECK_EXCEPTION(
      static_cast<void>(file.engine(memory, 2, all)), EngineError, [](const EngineError& error) {
        return std::string(error.what()).starts_with("the usage of weights does not have the 320");
      });
}

BOOST_AUTO_TEST_CASE(neurons_of_a_file_that_is_cut_short_fail_the_step_and_no_other) {
  RandomModel model(neuron_options(DType::kFloat32, LinearEpilogue::kReluMul, kSparse));
  const SparseSteps steps(&model, 6);
  const ProgramInFile file(model.program);
  const auto engine = file.engine(least_memory(file));
  check_cut_short(steps, file, engine.get());
}

BOOST_AUTO_TEST_CASE(experts_that_no_token_takes_are_not_read) {
  RandomModel model({.num_layers = 1,
                     .shape = {.hidden_size = 96, .attention = {4, 2, 24}},
                     .intermediate_size = 136,
                     .num_experts = 8,
                     .routing = {.top_k = 2, .norm_topk_prob = true}});
  const ProgramInFile file(model.program);
  const auto engine = file.engine(least_memory(file) + 400000);
  const WeightPlacement before = engine->weight_placement().value();
  BOOST_TEST(before.file_bytes > 0U);
  const StepArrays one({{.tokens = {3}, .first_position = 0, .prompt_length = 1, .blocks = {0}}});
  const auto logits = logits_of(engine.get(), one.input());
  const std::uint64_t read = engine->weight_placement()->bytes_read - before.bytes_read;
  BOOST_TEST(read <= before.file_bytes / 8 * 2 + 8 * kFilePage);
  BOOST_TEST(read > 0U);
  BOOST_TEST((logits_of(engine.get(), one.input()) == logits));
  BOOST_TEST(engine->weight_placement()->bytes_read == before.bytes_read + read);
}

BOOST_AUTO_TEST_CASE(slots_begin_with_the_experts_that_a_text_used_most) {
  RandomModel model({.num_layers = 1,
                     .shape = {.hidden_size = 96, .attention = {4, 2, 24}},
                     .intermediate_size = 136,
                     .num_experts = 8,
                     .routing = {.top_k = 2, .norm_topk_prob = true}});
  const ProgramInFile file(model.program);
  const auto usage = std::make_shared<WeightUsageCounter>();
  const auto counted =
      make_cpu_engine(model.program, std::make_shared<ThreadPool>(1), "", nullptr, nullptr, nullptr, usage);
  counted->allocate_kv_blocks(kBlocks);
  const StepArrays one({{.tokens = {3}, .first_position = 0, .prompt_length = 1, .blocks = {0}}});
  const auto expected = logits_of(counted.get(), one.input());
  WeightUsage known = usage->read();
  BOOST_TEST(known.tokens == 1);
  BOOST_REQUIRE(known.of_ops.size() == 1U);
  std::vector<std::uint32_t>& counts = known.of_ops.begin()->second;
  BOOST_REQUIRE(counts.size() == 8U);
  BOOST_TEST(std::ranges::count(counts, 1U) == 2);
  BOOST_TEST(std::ranges::count(counts, 0U) == 6);
  const std::size_t memory = least_memory(file) + 400000;  // enough for the linear layers
  const auto read_with = [&](const WeightUsage& given) {
    const auto engine = file.engine(memory, 2, given);
    const std::uint64_t before = engine->weight_placement()->bytes_read;
    BOOST_TEST((logits_of(engine.get(), one.input()) == expected));
    return engine->weight_placement()->bytes_read - before;
  };
  BOOST_TEST(read_with(known) == 0U);
  BOOST_TEST(read_with({}) > 0U);
  counts.pop_back();
  BOOST_CHECK_EXCEPTION(
      static_cast<void>(file.engine(least_memory(file), 2, known)), EngineError,
      [](const EngineError& error) {
        return std::string(error.what()).starts_with("the usage of weights does not have the 8 ");
      });
}

// A neuron counts once for each row with an open gate.
BOOST_DATA_TEST_CASE(usage_counts_open_gates, data::make({0, 2}), dtype) {
  RandomModel model(neuron_options(kDTypes[dtype], LinearEpilogue::kReluMul, kSparse));
  const SparseSteps steps(&model, 5);
  const auto usage_with = [&](bool has_neurons) {
    Program program = model.program;
    for (Op& op : program.body) {
      auto* linear = std::get_if<LinearOp>(&op);
      if (linear != nullptr && !has_neurons) linear->neurons = {};
    }
    auto usage = std::make_shared<WeightUsageCounter>();
    const auto engine =
        make_cpu_engine(program, std::make_shared<ThreadPool>(2), "", nullptr, nullptr, nullptr, usage);
    engine->allocate_kv_blocks(kBlocks);
    // Reading never waits for a step and does not affect it.
    std::atomic<bool> is_over = false;
    bool has_shrunk = false;
    std::thread reader([&] {
      for (std::int64_t tokens = 0; !is_over; std::this_thread::yield()) {
        const std::int64_t now = usage->read().tokens;
        has_shrunk = has_shrunk || now < tokens;
        tokens = now;
      }
    });
    static_cast<void>(steps.run(engine.get()));
    is_over = true;
    reader.join();
    BOOST_TEST(!has_shrunk);
    return usage->read();
  };
  const WeightUsage usage = usage_with(true);
  const WeightUsage dense = usage_with(false);
  BOOST_TEST(usage.tokens == dense.tokens);
  BOOST_TEST((usage.of_ops == dense.of_ops));
  BOOST_TEST(usage.of_ops.size() == 3U);
  std::int64_t tokens = 0;
  for (const StepArrays& step : steps.steps) tokens += static_cast<std::int64_t>(step.tokens.size());
  BOOST_TEST(usage.tokens == tokens);
  for (const auto& [op, counts] : usage.of_ops) {
    const double open =
        std::accumulate(counts.begin(), counts.end(), 0.0) / static_cast<double>(tokens * 320);
    BOOST_TEST(open > 0.02);
    BOOST_TEST(open < 0.3);
  }
}

BOOST_AUTO_TEST_CASE(a_file_that_is_cut_short_fails_the_step_and_no_other) {
  for (const std::int32_t experts : {0, 8}) {
    RandomModel model({.num_layers = 3,
                       .shape = {.hidden_size = 96, .attention = {4, 2, 24}},
                       .intermediate_size = 136,
                       .num_experts = experts,
                       .routing = {.top_k = 2, .norm_topk_prob = true},
                       .max_rank = 4});
    const Steps steps(&model, 6);
    const ProgramInFile file(model.program);
    const auto engine = file.engine(least_memory(file));
    check_cut_short(steps, file, engine.get());
  }
}

BOOST_AUTO_TEST_CASE(a_file_that_is_not_there_is_an_error_of_the_engine) {
  RandomModel model({});
  const ProgramInFile file(model.program);
  std::filesystem::remove(file.path());
  BOOST_CHECK_EXCEPTION(static_cast<void>(file.engine(kPlenty)), EngineError, [&](const EngineError& error) {
    return std::string(error.what()) == file.path() + ": cannot be read: No such file or directory";
  });
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace adaptrt::testing::weight_memory_test
