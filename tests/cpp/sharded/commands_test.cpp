// Messages between rank 0's engine and other ranks, with engines that compute nothing.

#include <boost/test/unit_test.hpp>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "adaptrt/core/error.h"
#include "adaptrt/lora/host_pages.h"
#include "adaptrt/lora/lora_cache.h"
#include "adaptrt/sharded/sharded_engine.h"
#include "lora/adapters.h"
#include "sharded/thread_ranks.h"

namespace adaptrt::testing::commands_test {
namespace {

constexpr std::size_t kPageBytes = 8192;

/// Engine whose commands throw ConfigError a given number of times.
class IdleEngine final : public Engine {
 public:
  IdleEngine(std::string name, int failures) : name_(std::move(name)), failures_left_(failures) {
    info_.lora = small_layout();
    info_.state_bytes = 8;
  }

  [[nodiscard]] const EngineInfo& info() const override { return info_; }
  void allocate_kv_blocks(std::int32_t /*num_blocks*/) override { fail(); }
  void allocate_cross_kv_blocks(std::int32_t /*num_blocks*/) override { fail(); }
  void allocate_states(std::int32_t /*num_slots*/) override { fail(); }
  using Engine::step;
  void step(const StepInput& /*input*/, const LogitsSink& /*sink*/,
            const HiddenSink& /*hidden_sink*/) override {}
  [[nodiscard]] std::unique_ptr<AdapterPages> make_adapter_pages(std::size_t page_bytes,
                                                                 std::int64_t num_pages,
                                                                 std::int32_t /*num_copy_streams*/) override {
    fail();
    return std::make_unique<HostPages>(page_bytes, num_pages);
  }

 private:
  void fail() {
    if (failures_left_-- > 0) throw ConfigError("no memory on " + name_);
  }

  EngineInfo info_;
  std::string name_;
  int failures_left_;
};

/// Rank 0's engine, and another rank in a thread.
class TwoRanks {
 public:
  /// Number of failing commands on each rank.
  TwoRanks(int failures, int failures_of_other)
      : room_(std::make_shared<MailRoom>(2)),
        engine(make_sharded_engine(std::make_shared<IdleEngine>("rank 0", failures),
                                   std::make_shared<ThreadCommunicator>(room_, 0))),
        other_([this, failures_of_other] {
          IdleEngine local("rank 1", failures_of_other);
          ThreadCommunicator communicator(room_, 1);
          try {
            serve_rank(local, communicator);
          } catch (const EngineError& error) {
            end_of_other_ = error.what();
          }
        }) {}
  ~TwoRanks() { engine.reset(); }
  TwoRanks(const TwoRanks&) = delete;
  TwoRanks& operator=(const TwoRanks&) = delete;
  TwoRanks(TwoRanks&&) = delete;
  TwoRanks& operator=(TwoRanks&&) = delete;

  /// Returns the error that the other rank ended with; empty if none.
  std::string end() {
    engine->end_steps();
    other_.join();
    return end_of_other_;
  }

 private:
  std::shared_ptr<MailRoom> room_;
  std::string end_of_other_;

 public:
  std::unique_ptr<Engine> engine;

 private:
  std::jthread other_;
};

/// Returns the text of the error that a call throws; empty if none.
template <class Call>
std::string error_of(Call call) {
  try {
    call();
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

BOOST_AUTO_TEST_SUITE(commands)

// A reply that is not received would be taken for that of the next command.
BOOST_AUTO_TEST_CASE(replies_are_taken_where_rank_0_fails) {
  const std::vector<void (*)(Engine&)> calls{
      [](Engine& engine) { engine.allocate_kv_blocks(4); },
      [](Engine& engine) { engine.allocate_cross_kv_blocks(4); },
      [](Engine& engine) { engine.allocate_states(4); },
      [](Engine& engine) { static_cast<void>(engine.make_adapter_pages(kPageBytes, 1, 1)); },
  };
  for (const auto call : calls) {
    TwoRanks both(1, 2);
    BOOST_TEST(error_of([&] { call(*both.engine); }) == "no memory on rank 0");
    BOOST_TEST(error_of([&] { call(*both.engine); }) == "rank 1: no memory on rank 1");
    BOOST_TEST(error_of([&] { call(*both.engine); }) == "");
    BOOST_TEST(both.end() == "");
  }
}

/// Runs a step of one token with an adapter.
void step_with(Engine& engine, const DeviceAdapter& adapter) {
  const std::vector<std::int32_t> zeros(1);
  const std::vector<std::int32_t> ones(1, 1);
  const std::vector<std::int32_t> offsets{0, 1};
  const std::vector<const DeviceAdapter*> adapters{&adapter};
  engine.step({.token_ids = zeros,
               .positions = zeros,
               .sequence_offsets = offsets,
               .prompt_lengths = ones,
               .block_tables = zeros,
               .max_blocks_per_sequence = 1,
               .adapters = adapters,
               .logit_rows = {}},
              {});
}

BOOST_AUTO_TEST_CASE(ranks_forget_adapters_whose_pages_hold_others) {
  TwoRanks both(0, 0);
  LoraCache cache(small_layout(), both.engine->make_adapter_pages(kPageBytes, 1, 1), {.host_bytes = 1 << 20});
  const auto admit = [&](std::uint64_t task_id) {
    return cache.admit(
        make_adapter({{LoraModule::kAttnQ, 0, 2, false}}, small_layout(), static_cast<std::uint32_t>(task_id))
            .send(task_id));
  };
  DeviceAdapter replaced;
  for (const std::uint64_t task_id : {1, 2, 3}) {
    const auto lease = cache.acquire(admit(task_id));
    BOOST_TEST_REQUIRE(lease.has_value());
    step_with(*both.engine, lease->adapter());
    if (task_id == 2) replaced = lease->adapter();
  }
  step_with(*both.engine, replaced);
  BOOST_TEST(both.end() == "rank 0 names an adapter that it has not sent");
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::testing::commands_test
