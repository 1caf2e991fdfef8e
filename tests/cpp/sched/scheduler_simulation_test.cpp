#include <algorithm>
#include <atomic>
#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "adaptrt/core/error.h"
#include "world.h"

namespace adaptrt::testing::scheduler_simulation_test {
namespace {

/// Random traffic in a random small world: few blocks and pages, shared prefixes and block beginnings, forks,
/// beams, shared encoder inputs, states, drafts, priorities, cancels, failing steps, background loads that
/// may fail, pins, cleared prefix caches, steps that are planned ahead. World checks the invariants, the KV
/// and the state that every token reads, and every finished answer.
class Simulation {
 public:
  explicit Simulation(int seed)
      : random_(static_cast<std::uint64_t>(seed)), config_(draw_config()), world_(config_) {
    if (below(3) == 0) return;
    world_.make_drafts = [this](Sequence& sequence) {
      sequence.drafts = World::coming_tokens(sequence, below(5));
      if (!sequence.drafts.empty() && below(2) == 0) sequence.drafts.back() ^= 1;
    };
  }

  void run(int num_steps) {
    for (int i = 0; i < num_steps; ++i) {
      if (below(3) == 0) arrive();
      disturb();
      step();
    }
    // No more arrivals: everything left must end.
    std::int64_t left = 0;
    for (std::uint64_t id = 0; id < world_.num_made(); ++id) {
      const Sequence& sequence = world_.any_sequence(id);
      if (sequence.state == SequenceState::kFinished || sequence.state == SequenceState::kNew) continue;
      left += (1 + sequence.num_forks) * (sequence.prompt_length + sequence.max_tokens);
    }
    for (std::int64_t steps = 0; !world_.scheduler.empty(); ++steps) {
      step();
      BOOST_TEST_REQUIRE(steps < 20 * left);
    }
    BOOST_TEST(world_.memory.block_pool().num_used() == 0);
    const CrossBlockPool* cross = world_.memory.cross_pool();
    if (cross != nullptr) {
      BOOST_TEST(cross->num_available() == cross->num_blocks());
      if (!config_.enable_block_reuse) BOOST_TEST(cross->num_cached() == 0);
    }
    if (world_.memory.has_states()) BOOST_TEST(world_.memory.state_pool()->stats().used_slots == 0);
    BOOST_TEST(world_.num_finished > 0);
  }

 private:
  static constexpr std::uint64_t kGarbage = 0xdead;

  std::int32_t below(std::int32_t n) {
    return static_cast<std::int32_t>(random_() % static_cast<std::uint64_t>(n));
  }

  WorldConfig draw_config() {
    WorldConfig config;
    config.tokens_per_block = 1 + below(6);
    config.num_blocks = 1 + (24 + below(120)) / config.tokens_per_block;
    config.enable_block_reuse = below(4) > 0;
    config.partial_reuse = static_cast<PartialReuse>(below(3));
    config.policy = static_cast<CapacitySchedulerPolicy>(below(3));
    config.adapter_fairness = below(3) > 0;
    config.limits = {.max_batch_size = 1 + below(8),
                     .max_num_tokens = 1 + below(40),
                     .enable_chunked_context = below(2) == 0,
                     .max_reusable_prompt_len = below(4) == 0 ? 12 : 1 << 20,
                     .max_times_skipped = below(6)};
    if (config.limits.enable_chunked_context && below(2) == 0) {
      config.chunking = ContextChunkingPolicy::kEqualProgress;
    }
    config.device_pages = below(3) == 0 ? 0 : 1 + below(4);
    config.num_load_workers = below(3);
    if (config.num_load_workers > 0 && below(2) == 0) {
      config.in_load = [loads = std::make_shared<std::atomic<int>>(0)] {
        if (++*loads % 20 == 0) throw StepError("a load fails now and then");
      };
    }
    if (below(4) == 0) {
      config.num_cross_blocks = 1 + below(20);
      config.limits.max_reusable_prompt_len = 0;
    } else if (below(2) == 0) {
      config.has_states = true;
      config.num_state_snapshots = below(6);
    }
    return config;
  }

  void arrive() {
    std::vector<std::int32_t> prompt(1 + below(30));
    for (auto& token : prompt) token = below(2);  // so that prefixes often match
    RequestOptions options;
    if (below(3) == 0) options.priority = static_cast<float>(below(3)) / 2.0F;
    if (below(6) == 0) options.cache_salt = 1;
    options.compute_whole_prompt = below(8) == 0;
    if (config_.device_pages > 0 && below(3) > 0) {
      const std::int32_t task = below(6);
      const auto pages = static_cast<std::int32_t>(1 + task % config_.device_pages);
      try {
        options.adapter = world_.adapter(static_cast<std::uint64_t>(task), pages);
      } catch (const LoraCacheFullError&) {  // too large next to the pinned adapters
        return;
      }
    }
    const std::int32_t max_tokens = 1 + below(20);
    if (below(3) == 0) options.num_sequences = 2 + below(4);
    if (options.num_sequences > 1) options.are_beams = below(2) == 0;
    std::int64_t encoder_length = 0;
    if (config_.num_cross_blocks > 0) {
      // Usually at most a step's tokens and the available blocks.
      const auto most =
          std::min(config_.limits.max_num_tokens, config_.num_cross_blocks * config_.tokens_per_block);
      encoder_length = std::min(1 + 5 * below(6), most + 2);
      auto tokens = std::make_shared<std::vector<std::int32_t>>(static_cast<std::size_t>(encoder_length));
      std::ranges::fill(*tokens, below(3));  // so that inputs often match
      options.encoder_tokens = std::move(tokens);
      options.compute_encoder_input = below(4) == 0;
    }
    if (world_.scheduler.check_capacity(static_cast<std::int64_t>(prompt.size()), max_tokens,
                                        options.num_sequences, options.are_beams, encoder_length)) {
      return;
    }
    world_.add(std::move(prompt), max_tokens, options);
  }

  void disturb() {
    if (below(40) == 0 && world_.num_made() > 0) world_.cancel(world_.any_sequence(random_()));
    if (below(300) == 0) world_.memory.reset_reuse();
    if (config_.device_pages == 0 || below(50) != 0) return;
    const auto entries = world_.cache().list();
    if (entries.empty()) return;
    const auto& entry = entries[static_cast<std::size_t>(below(static_cast<std::int32_t>(entries.size())))];
    if (entry.pinned) {
      world_.cache().unpin(entry.task_id);
      return;
    }
    try {
      world_.cache().pin(entry.task_id);
    } catch (const LoraCacheFullError&) {  // running requests hold the pages
    } catch (const StepError&) {           // its load failed
    }
  }

  /// Takes the plan that was made ahead, if there is one with sequences left, or makes one.
  void plan() {
    world_.scheduler.end_ahead();
    if (ahead_.empty()) {
      world_.scheduler.release_kept_leases();
      world_.plan_only();
      return;
    }
    std::swap(world_.plan, ahead_);
    ahead_.clear();
    for (const auto& violation : check_invariants(world_.plan, world_.scheduler)) BOOST_ERROR(violation);
  }

  /// Plans the next step before the tokens of this one are known, if it can.
  void plan_ahead() {
    places_.clear();
    if (config_.has_states || !world_.scheduler.plan_ahead(world_.plan, ahead_)) return;
    for (const PlannedSequence& entry : ahead_.entries) {
      places_.push_back(&world_.kv_at(*entry.sequence, entry.first_token));
    }
  }

  void step() {
    plan();
    BOOST_TEST_REQUIRE(world_.plan.unservable.empty());
    BOOST_TEST_REQUIRE(world_.plan.empty() == world_.scheduler.empty());
    if (config_.policy != CapacitySchedulerPolicy::kMaxUtilization)
      BOOST_TEST_REQUIRE(world_.plan.preempted.empty());
    for (const Sequence* sequence : world_.scheduler.waiting().list()) {
      BOOST_TEST_REQUIRE(sequence->times_skipped <=
                         config_.limits.max_times_skipped + config_.limits.max_batch_size);
    }
    plan_ahead();
    world_.scheduler.release_kept_leases();
    if (below(200) == 0) {
      world_.fail_step();
    } else {
      world_.run_planned();
    }
    // The device may compute the next step now, also the rows of sequences that have ended.
    for (std::uint64_t* place : places_) *place = kGarbage;
  }

  std::mt19937_64 random_;
  WorldConfig config_;
  World world_;
  StepPlan ahead_;
  std::vector<std::uint64_t*> places_;  // KV that the step of ahead_ writes
};

BOOST_AUTO_TEST_SUITE(scheduler_simulation)

BOOST_DATA_TEST_CASE(everything_finishes_and_nothing_is_read_wrong, boost::unit_test::data::xrange(60),
                     seed) {
  Simulation(seed).run(600);
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::testing::scheduler_simulation_test
