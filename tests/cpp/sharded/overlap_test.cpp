// Sums over ranks that overlap with the computation of their terms.

#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "adaptrt/core/error.h"
#include "adaptrt/cpu/cpu_engine.h"
#include "cpu/random_model.h"
#include "cpu/step_arrays.h"
#include "sharded/rank_programs.h"
#include "sharded/thread_ranks.h"
#include "support/sanitized.h"

namespace adaptrt::testing::overlap_test {
namespace {

namespace data = boost::unit_test::data;

/// Communicator of a rank that counts exchanges and delays them like a network.
class WatchedCommunicator final : public Communicator {
 public:
  enum class Kind {
    kAtOnce,  ///< an exchange completes when it begins
    kOverlapping,
    kReluctant,  ///< an exchange completes at the third check
  };

  WatchedCommunicator(std::shared_ptr<MailRoom> room, std::int32_t rank, Kind kind,
                      std::chrono::milliseconds time_limit)
      : under_(std::move(room), rank, time_limit), kind_(kind) {}

  [[nodiscard]] std::int32_t rank() const override { return under_.rank(); }
  [[nodiscard]] std::int32_t size() const override { return under_.size(); }
  [[nodiscard]] bool is_lost() const override { return under_.is_lost(); }
  void exchange(std::span<const OutgoingMessage> sent, std::span<const IncomingMessage> received) override {
    under_.exchange(sent, received);
  }
  void wait_for(const IncomingMessage& message) override { under_.wait_for(message); }

  ExchangeNumber begin_exchange(std::span<const OutgoingMessage> sent,
                                std::span<const IncomingMessage> received) override {
    if (begun == fails_at) throw EngineError("this rank has failed");
    ++begun;
    overlapping += under_way_ > 0 ? 1 : 0;
    ++under_way_;
    asked_ = 0;
    if (kind_ == Kind::kAtOnce) {
      under_.exchange(sent, received);
      return 0;
    }
    return under_.begin_exchange(sent, received);
  }
  [[nodiscard]] bool has_ended(ExchangeNumber exchange) override {
    ++looked_after;
    if (kind_ == Kind::kReluctant && ++asked_ % 3 != 0) return false;
    return kind_ == Kind::kAtOnce || under_.has_ended(exchange);
  }
  void end_exchange(ExchangeNumber exchange) override {
    if (kind_ != Kind::kAtOnce) under_.end_exchange(exchange);
    under_way_ = 0;
  }

  /// Number of exchanges, and number of those that began before another one was waited for.
  int begun = 0;
  int overlapping = 0;
  /// Number of checks for completion.
  int looked_after = 0;
  /// Number of exchanges after which this rank stops.
  int fails_at = -1;

 private:
  ThreadCommunicator under_;
  Kind kind_;
  int under_way_ = 0;
  int asked_ = 0;
};

using Kind = WatchedCommunicator::Kind;

std::ostream& operator<<(std::ostream& out, Kind kind) {
  return out << (kind == Kind::kAtOnce ? "at once" : kind == Kind::kReluctant ? "reluctant" : "overlapping");
}

/// The engines of all ranks, without the commands of steps.
class Ranks {
 public:
  Ranks(const Program& whole, std::int32_t num_ranks, MakeProgram make, Kind kind = Kind::kOverlapping,
        std::chrono::milliseconds time_limit = std::chrono::seconds(60)) {
    const auto room = std::make_shared<MailRoom>(num_ranks);
    for (std::int32_t rank = 0; rank < num_ranks; ++rank) {
      communicators.push_back(std::make_shared<WatchedCommunicator>(room, rank, kind, time_limit));
      engines_.push_back(make_cpu_engine(make(whole, rank, num_ranks), std::make_shared<ThreadPool>(2), "",
                                         nullptr, communicators.back()));
      engines_.back()->allocate_kv_blocks(kBlocks);
    }
  }

  /// Returns rank 0's logits, which must equal the other ranks'.
  std::vector<float> logits(const StepInput& input) {
    std::vector<std::vector<float>> found(engines_.size());
    for (const std::exception_ptr& failure : run(input, &found)) {
      if (failure) std::rethrow_exception(failure);
    }
    for (const auto& others : found) BOOST_TEST_REQUIRE((others == found[0]));
    return found[0];
  }

  /// Returns each rank's error in a step.
  std::vector<std::exception_ptr> failures(const StepInput& input) {
    std::vector<std::vector<float>> found(engines_.size());
    return run(input, &found);
  }

  static constexpr std::int32_t kBlocks = 128;
  std::vector<std::shared_ptr<WatchedCommunicator>> communicators;

 private:
  std::vector<std::exception_ptr> run(const StepInput& input, std::vector<std::vector<float>>* found) {
    std::vector<std::exception_ptr> failures(engines_.size());
    std::vector<std::jthread> threads;
    for (std::size_t rank = 0; rank < engines_.size(); ++rank) {
      threads.emplace_back([&, rank] {
        try {
          (*found)[rank] = logits_of(engines_[rank].get(), input);
        } catch (...) {
          failures[rank] = std::current_exception();
        }
      });
    }
    threads.clear();
    return failures;
  }

  std::vector<std::unique_ptr<Engine>> engines_;
};

/// Rows have 256 floats, in four panels. Sums over two ranks are split in two from 512 tokens on and in four
/// from 1024 on; sums over three ranks are split in two from 1536 on.
ModelOptions options() {
  return {.shape = {.hidden_size = 256, .attention = {2, 1, 8}},
          .intermediate_size = 32,
          .max_num_tokens = 1600,
          .max_seq_len = 1700,
          .max_rank = 4};
}

/// Tokens [begin, end) of one sequence, with logits for the last one.
StepArrays tokens_of(std::int32_t begin, std::int32_t end, const DeviceAdapter* adapter) {
  Piece piece{.first_position = begin, .prompt_length = end, .adapter = adapter, .adapter_from = 100};
  Random random(9);
  for (std::int32_t i = 0; i < end; ++i) {
    const auto token = static_cast<std::int32_t>(random.below(61));
    if (i >= begin) piece.tokens.push_back(token);
  }
  for (std::int32_t block = 0; block < Ranks::kBlocks; ++block) piece.blocks.push_back(block);
  StepArrays arrays({piece});
  arrays.logit_rows = {end - begin - 1};
  return arrays;
}

/// Computes the logits in steps so small that sums are not split.
std::vector<float> logits_in_pieces(Ranks* ranks, std::int32_t tokens, const DeviceAdapter* adapter) {
  constexpr std::int32_t kPiece = 150;
  std::vector<float> logits;
  for (std::int32_t begin = 0; begin < tokens; begin += kPiece) {
    const StepArrays piece = tokens_of(begin, std::min(begin + kPiece, tokens), adapter);
    logits = ranks->logits(piece.input());
  }
  return logits;
}

void check_same_bits(Ranks* ranks, std::int32_t tokens, const DeviceAdapter* adapter, bool overlaps) {
  const std::vector<float> expected = logits_in_pieces(ranks, tokens, adapter);
  for (const auto& communicator : ranks->communicators) {
    BOOST_TEST(communicator->begun > 0);
    BOOST_TEST(communicator->overlapping == 0);
  }
  const StepArrays whole = tokens_of(0, tokens, adapter);
  const std::vector<float> found = ranks->logits(whole.input());
  for (const auto& communicator : ranks->communicators)
    BOOST_TEST((communicator->overlapping > 0) == overlaps);
  for (const float logit : found) BOOST_TEST_REQUIRE(std::isfinite(logit));
  BOOST_TEST((found == expected));
  BOOST_TEST((ranks->logits(whole.input()) == found));
}

struct Size {
  std::int32_t ranks;
  std::int32_t tokens;
  bool overlaps;
};

std::ostream& operator<<(std::ostream& out, const Size& size) {
  return out << size.tokens << " tokens of " << size.ranks << " ranks";
}

const std::vector<Size> kSizes =
    kSanitizedPart ? std::vector<Size>{{2, 511, false}, {2, 770, true}, {3, 1600, true}}
                   : std::vector<Size>{
                         {2, 511, false}, {2, 512, true}, {2, 770, true}, {2, 1100, true}, {3, 1600, true}};
const std::vector<std::int32_t> kTokens =
    kSanitizedPart ? std::vector{40, 770} : std::vector{1, 40, 511, 512, 1600};
const std::vector<Kind> kKinds{Kind::kAtOnce, Kind::kOverlapping, Kind::kReluctant};

BOOST_AUTO_TEST_SUITE(overlap)

BOOST_DATA_TEST_CASE(sums_are_the_same_bits_however_they_are_cut, data::make(kSizes) * data::make(kKinds),
                     size, kind) {
  RandomModel model(options());
  const DeviceAdapter adapter = model.adapter(3, true);
  Ranks ranks(model.program, size.ranks, with_cut_layers, kind);
  check_same_bits(&ranks, size.tokens, &adapter, size.overlaps);
}

/// Inserts an unused layer between each summed layer and its sum.
Program with_layers_between(const Program& whole, std::int32_t rank, std::int32_t num_ranks) {
  Program program = with_cut_layers(whole, rank, num_ranks);
  LinearOp between;
  for (const Op& op : whole.body) {
    const auto* linear = std::get_if<LinearOp>(&op);
    if (linear != nullptr && linear->epilogue == LinearEpilogue::kStore) between = *linear;
  }
  between.lora_site = -1;
  between.output = add_term(between.output, &program);
  for (std::size_t i = 0; i < program.body.size(); ++i) {
    const auto* sum = std::get_if<AllReduceOp>(&program.body[i]);
    if (sum == nullptr) continue;
    between.input = sum->output;
    program.body.insert(program.body.begin() + static_cast<std::ptrdiff_t>(i++), between);
  }
  return program;
}

BOOST_DATA_TEST_CASE(sums_go_on_during_layers_that_do_without_them,
                     data::make({2, 3}) * data::make(kTokens) * data::make(kKinds), num_ranks, tokens, kind) {
  RandomModel model(options());
  const DeviceAdapter adapter = model.adapter(3, true);
  Ranks behind(model.program, num_ranks, with_cut_layers, kind);
  Ranks later(model.program, num_ranks, with_layers_between, kind);
  const StepArrays step = tokens_of(0, tokens, &adapter);
  const std::vector<float> expected = behind.logits(step.input());
  BOOST_TEST((later.logits(step.input()) == expected));
  BOOST_TEST((later.logits(step.input()) == expected));
  BOOST_TEST(later.communicators[0]->looked_after > 0);
  if (tokens < 512) BOOST_TEST(behind.communicators[0]->looked_after == 0);
}

// With six experts, ranks have two or three. 8192 expert rows are a slice: 4096 tokens with two experts per
// token, 1024 with eight.
BOOST_DATA_TEST_CASE(so_are_those_of_experts, data::make(kSizes) * data::make({2, 8}), size, top_k) {
  ModelOptions experts = options();
  experts.num_experts = top_k == 2 ? 6 : 12;
  experts.routing = {.top_k = top_k, .norm_topk_prob = true};
  experts.intermediate_size = 16;
  experts.max_rank = 0;
  const RandomModel model(experts);
  Ranks ranks(model.program, size.ranks, with_own_experts);
  check_same_bits(&ranks, size.tokens, nullptr, size.overlaps);
}

BOOST_DATA_TEST_CASE(a_rank_without_a_tokens_experts_has_a_term_as_well, data::make(kKinds), kind) {
  ModelOptions experts = options();
  experts.num_experts = 6;
  experts.routing = {.top_k = 1};
  experts.max_rank = 0;
  RandomModel model(experts);
  for (Op& op : model.program.body) {  // all tokens choose the first expert
    auto* router = std::get_if<LinearOp>(&op);
    if (router == nullptr || router->parts[0].weight.n != 6) continue;
    router->parts[0].bias = model.storage().vector({1e6F, 0.0F, 0.0F, 0.0F, 0.0F, 0.0F});
  }
  Ranks ranks(model.program, 2, with_own_experts, kind);
  check_same_bits(&ranks, 600, nullptr, true);
}

// The ranks' terms are one, two and three times the layer's output.
BOOST_DATA_TEST_CASE(terms_of_all_ranks_are_added_up, data::make({2, 3}), num_ranks) {
  const RandomModel model(options());
  Program scaled = model.program;
  for (Op& op : scaled.body) {
    auto* linear = std::get_if<LinearOp>(&op);
    if (linear == nullptr || linear->epilogue != LinearEpilogue::kAdd) continue;
    linear->scale = static_cast<float>(num_ranks * (num_ranks + 1) / 2);
  }
  const auto alone = make_cpu_engine(scaled, std::make_shared<ThreadPool>(2));
  alone->allocate_kv_blocks(Ranks::kBlocks);
  const StepArrays step = tokens_of(0, 1600, nullptr);
  const std::vector<float> expected = logits_of(alone.get(), step.input());
  Ranks ranks(model.program, num_ranks, with_cut_layers);
  const std::vector<float> found = ranks.logits(step.input());
  BOOST_TEST(ranks.communicators[0]->overlapping > 0);
  BOOST_TEST_REQUIRE(found.size() == expected.size());
  for (std::size_t i = 0; i < found.size(); ++i) {
    BOOST_TEST_REQUIRE(std::abs(found[i] - expected[i]) <= 1e-3F);
  }
}

// The first sum of a step has the exchanges 0, 1, ... The rank fails before the first, in the middle, and
// while the other rank waits for the last.
BOOST_DATA_TEST_CASE(a_rank_that_fails_while_a_sum_goes_on_is_named,
                     data::make({2, 3}) * data::make({0, 1, 2, 3}), num_ranks, fails_at) {
  const RandomModel model(options());
  const std::int32_t failing = num_ranks - 1;
  Ranks ranks(model.program, num_ranks, with_cut_layers, Kind::kOverlapping, std::chrono::milliseconds(300));
  ranks.communicators[static_cast<std::size_t>(failing)]->fails_at = fails_at;
  const StepArrays step = tokens_of(0, 1600, nullptr);
  for (int times = 0; times < 2; ++times) {
    const std::vector<std::exception_ptr> failures = ranks.failures(step.input());
    BOOST_CHECK_EXCEPTION(std::rethrow_exception(failures.back()), EngineError, [](const EngineError& error) {
      return std::string(error.what()) == "this rank has failed";
    });
    // Rank 0 names the failed rank, or a rank that waits for it.
    BOOST_CHECK_EXCEPTION(std::rethrow_exception(failures.front()), EngineError,
                          [](const EngineError& error) {
                            return std::string(error.what()).find("has not answered") != std::string::npos;
                          });
    if (num_ranks == 2) {
      BOOST_CHECK_EXCEPTION(
          std::rethrow_exception(failures.front()), EngineError,
          [](const EngineError& error) { return std::string(error.what()) == "rank 1 has not answered"; });
    }
  }
}

BOOST_AUTO_TEST_CASE(reading_the_input_of_a_finished_sum_is_refused) {
  const RandomModel model(options());
  Program program = with_cut_layers(model.program, 0, 2);
  BOOST_TEST(program.validate().empty());
  for (std::size_t i = 0; i < program.body.size(); ++i) {
    const auto* sum = std::get_if<AllReduceOp>(&program.body[i]);
    if (sum == nullptr) continue;
    const AllReduceOp again = *sum;
    program.body.insert(program.body.begin() + static_cast<std::ptrdiff_t>(i) + 1, again);
    break;
  }
  const std::vector<std::string> problems = program.validate().list();
  BOOST_TEST_REQUIRE(problems.size() == 1U);
  BOOST_TEST(problems[0].find("which a sum over ranks has used up") != std::string::npos);
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::testing::overlap_test
