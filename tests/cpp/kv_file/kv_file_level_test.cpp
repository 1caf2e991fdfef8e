#include "adaptrt/kv_file/kv_file_level.h"

#include <boost/test/unit_test.hpp>
#include <chrono>
#include <cstddef>
#include <filesystem>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "files.h"
#include "support/allocations.h"

namespace adaptrt::testing::kv_file_level_test {
namespace {

using Time = SecondLevel::Time;

Time in_a_minute() {
  return Time::clock::now() + std::chrono::minutes(1);
}

/// A level over a pool whose blocks are TestBlock(number).
struct Level {
  explicit Level(std::size_t num_slots = 4, std::int32_t num_write_buffers = 8)
      : options{.directory = directory.path().string(),
                .layout = layout_of(num_slots),
                .num_write_buffers = num_write_buffers,
                .max_wait = std::chrono::minutes(1)} {
    open();
  }
  void open() {
    level.reset();
    level = std::make_unique<KvFileLevel>(
        options, KvBlockAccess{.read =
                                   [this](BlockId block, std::span<std::byte> bytes) {
                                     std::ranges::copy(TestBlock(block).bytes, bytes.begin());
                                   },
                               .write =
                                   [this](BlockId block, std::span<const std::byte> bytes) {
                                     BOOST_TEST(std::ranges::equal(TestBlock(block).bytes, bytes));
                                   }});
  }
  bool offload(std::int32_t number, std::optional<std::uint64_t> event = std::nullopt) {
    const TestBlock block(number);
    return level->offload(number, block.keyed(), event);
  }
  /// Offloads a block and waits until it is written.
  bool store(std::int32_t number, std::optional<std::uint64_t> event = std::nullopt) {
    const bool is_taken = offload(number, event);
    level->await_writes(in_a_minute());
    check();
    return is_taken;
  }
  bool contains(std::int32_t number) { return level->contains(TestBlock(number).key); }
  /// Returns how many of these blocks arrive, in order.
  std::size_t read(const std::vector<std::int32_t>& numbers) {
    std::vector<TestBlock> blocks;
    for (const std::int32_t number : numbers) blocks.emplace_back(number);
    std::vector<KeyedBlock> wanted;
    for (const TestBlock& block : blocks) wanted.push_back(block.keyed());
    level->begin_reads(wanted);
    std::size_t count = 0;
    while (count < numbers.size() && level->read_next(numbers[count])) ++count;
    level->end_reads();
    level->begin_step();
    return count;
  }
  std::vector<std::uint64_t> lost() {
    std::vector<std::uint64_t> hashes;
    while (const auto hash = level->take_lost_event()) hashes.push_back(*hash);
    return hashes;
  }
  void check() const {
    for (const auto& violation : level->check_invariants()) BOOST_ERROR(violation);
  }

  TemporaryDirectory directory;
  KvFileLevelOptions options;
  std::unique_ptr<KvFileLevel> level;
};

BOOST_AUTO_TEST_SUITE(kv_file_level)

BOOST_AUTO_TEST_CASE(blocks_come_back_written_or_not) {
  Level f;
  BOOST_TEST(f.offload(10));
  BOOST_TEST(f.offload(20));
  BOOST_TEST(f.contains(10));
  BOOST_TEST(!f.contains(30));
  BOOST_TEST(f.read({10, 20}) == 2U);
  f.level->await_writes(in_a_minute());
  BOOST_TEST(f.read({20, 10}) == 2U);
  const SecondLevelStats stats = f.level->stats();
  BOOST_TEST(stats.written_blocks == 2);
  BOOST_TEST(stats.read_blocks == 4);
  BOOST_TEST(stats.used_num_blocks == 2);
  BOOST_TEST(stats.max_num_blocks == 4);
  BOOST_TEST(stats.failed_blocks == 0);
  f.check();
}

BOOST_AUTO_TEST_CASE(a_block_is_written_once) {
  Level f;
  f.store(10);
  BOOST_TEST(f.store(10));
  BOOST_TEST(f.level->stats().written_blocks == 1);
}

BOOST_AUTO_TEST_CASE(blocks_outlive_the_level) {
  Level f;
  f.store(10);
  f.store(20);
  f.open();
  BOOST_TEST(f.level->stats().used_num_blocks == 2);
  BOOST_TEST(f.read({10, 20}) == 2U);
  f.check();
}

BOOST_AUTO_TEST_CASE(the_least_recently_used_block_is_replaced) {
  Level f(3);
  for (const std::int32_t number : {10, 20, 30}) f.store(number);
  BOOST_TEST(f.read({10}) == 1U);
  f.store(40);
  BOOST_TEST(f.contains(10));
  BOOST_TEST(!f.contains(20));
  f.open();  // in the order of the ages in the file; reads do not count
  f.store(50);
  BOOST_TEST(!f.contains(10));
  BOOST_TEST(f.contains(30));
}

BOOST_AUTO_TEST_CASE(blocks_that_are_written_after_a_start_are_newer_than_those_before_it) {
  Level f(3);
  for (const std::int32_t number : {10, 20, 30}) f.store(number);
  f.open();
  f.store(40);  // replaces 10
  f.open();
  f.store(50);
  BOOST_TEST(f.contains(40));
  BOOST_TEST(!f.contains(20));
  BOOST_TEST(f.contains(30));
}

BOOST_AUTO_TEST_CASE(a_thread_that_runs_out_of_memory_ends_the_level) {
  Level f;
  f.store(10, 5);
  f.level->begin_step();
  {
    const FailingAllocations failing(1);
    BOOST_TEST(f.read({10}) == 0U);
  }
  BOOST_TEST(f.level->stats().error == "std::bad_alloc");
  BOOST_TEST(!f.contains(10));
  BOOST_TEST(!f.offload(20));
  BOOST_TEST(!f.level->await_room(in_a_minute()));
  BOOST_TEST(f.lost() == std::vector<std::uint64_t>{5}, boost::test_tools::per_element());
  f.check();
  f.open();
  BOOST_TEST(f.read({10}) == 1U);
}

BOOST_AUTO_TEST_CASE(the_end_of_a_chain_is_replaced_first) {
  Level f(3);
  for (const std::int32_t number : {30, 20, 10}) f.store(number);
  BOOST_TEST(f.read({10, 20, 30}) == 3U);
  f.store(40);
  BOOST_TEST(f.contains(10));
  BOOST_TEST(f.contains(20));
  BOOST_TEST(!f.contains(30));
}

BOOST_AUTO_TEST_CASE(blocks_offloaded_at_the_end_are_kept_by_worth) {
  Level f(3);
  f.level->begin_closing(3);
  for (const std::int32_t number : {10, 20, 30}) {
    BOOST_TEST(f.level->await_room(in_a_minute()));
    BOOST_TEST(f.store(number));
  }
  f.open();
  f.store(40);
  BOOST_TEST(f.contains(10));
  BOOST_TEST(f.contains(20));
  BOOST_TEST(!f.contains(30));
}

BOOST_AUTO_TEST_CASE(no_request_waits_for_a_write) {
  Level f(8, 2);
  std::int64_t taken = 0;
  for (std::int32_t number = 0; number < 8; ++number) taken += f.offload(10 * number) ? 1 : 0;
  BOOST_TEST(taken >= 2);
  f.level->await_writes(in_a_minute());
  const SecondLevelStats stats = f.level->stats();
  BOOST_TEST(stats.written_blocks == taken);
  BOOST_TEST(stats.dropped_blocks == 8 - taken);
  f.check();
}

BOOST_AUTO_TEST_CASE(a_damaged_block_ends_the_chain_and_is_forgotten) {
  Level f;
  for (const std::int32_t number : {10, 20, 30}) f.store(number);
  damage(file_in(f.directory), kFirstSlot + kSlotBytes + 3000);
  BOOST_TEST(f.read({10, 20, 30}) == 1U);
  f.level->begin_step();
  BOOST_TEST(!f.contains(20));
  BOOST_TEST(f.contains(30));
  BOOST_TEST(f.level->stats().failed_blocks == 1);
  BOOST_TEST(f.level->stats().error == "");
  f.check();
  f.open();
  BOOST_TEST(!f.contains(20));  // also in the next process
  BOOST_TEST(f.store(20));
  BOOST_TEST(f.read({20, 30}) == 2U);
}

BOOST_AUTO_TEST_CASE(a_broken_disk_ends_the_level) {
  Level f;
  f.store(10);
  break_writes(file_in(f.directory));
  BOOST_TEST(f.store(20, 5));
  BOOST_TEST(f.level->stats().error.find("cannot be written") != std::string::npos);
  BOOST_TEST(f.level->stats().used_num_blocks == 0);
  BOOST_TEST(!f.contains(10));
  BOOST_TEST(!f.offload(30));
  BOOST_TEST(!f.level->await_room(in_a_minute()));
  BOOST_TEST(f.lost() == std::vector<std::uint64_t>{5}, boost::test_tools::per_element());
  f.check();
}

BOOST_AUTO_TEST_CASE(a_directory_that_goes_away_takes_nothing_along) {
  Level f;
  f.store(10);
  std::filesystem::remove_all(f.directory.path());
  BOOST_TEST(f.store(20));
  BOOST_TEST(f.read({10, 20}) == 2U);
}

BOOST_AUTO_TEST_CASE(a_read_that_takes_too_long_is_not_waited_for) {
  Level f;
  f.store(10);
  f.options.max_wait = std::chrono::nanoseconds(0);
  f.open();
  // Reads are late; blocks that arrive later are discarded, and the level stays usable.
  for (int round = 0; round < 20; ++round) {
    BOOST_TEST(f.read({10}) <= 1U);
    while (!f.contains(10)) {
      std::this_thread::yield();
      f.level->begin_step();
    }
    f.check();
  }
  BOOST_TEST(f.level->stats().failed_blocks == 0);
}

BOOST_AUTO_TEST_CASE(losses_of_blocks_that_events_told_of_are_told) {
  Level f(2);
  f.store(10, 1);
  f.store(20, 2);
  BOOST_TEST(f.level->take_back_event(TestBlock(10).key));
  BOOST_TEST(!f.level->take_back_event(TestBlock(10).key));
  BOOST_TEST(!f.level->take_back_event(TestBlock(30).key));
  f.store(30, 3);
  f.store(40, 4);
  BOOST_TEST(f.lost() == std::vector<std::uint64_t>{2}, boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(any_order_of_calls_keeps_everything_in_order) {
  std::mt19937 random(11);
  const auto below = [&](std::size_t end) { return static_cast<std::int32_t>(random() % end); };
  for (int round = 0; round < 20; ++round) {
    Level f(1 + below(6), 1 + below(4));
    if (below(3) == 0) f.options.max_wait = std::chrono::microseconds(below(50));
    for (int call = 0; call < 300; ++call) {
      switch (below(8)) {
        case 0:
        case 1:
        case 2:
          static_cast<void>(f.offload(10 * below(10), below(2) == 0 ? std::optional(call) : std::nullopt));
          break;
        case 3:
        case 4: {
          const TestBlock first(10 * below(10));
          const TestBlock second(10 * below(10));
          if (first.key == second.key || !f.level->contains(first.key) || !f.level->contains(second.key))
            break;
          f.level->begin_reads(std::vector{first.keyed(), second.keyed()});
          // Meanwhile, a block that is evicted for this one may be offloaded.
          static_cast<void>(f.offload(10 * below(10)));
          if (f.level->read_next(first.tokens[0]) && below(2) == 0) {
            static_cast<void>(f.offload(10 * below(10)));
            static_cast<void>(f.level->read_next(second.tokens[0]));
          }
          f.level->end_reads();
          break;
        }
        case 5:
          f.level->begin_step();
          break;
        case 6:
          if (below(10) == 0) damage(file_in(f.directory), kFirstSlot + below(kSlotBytes));
          break;
        default:
          static_cast<void>(f.level->take_back_event(TestBlock(10 * below(10)).key));
          f.lost();
      }
      f.check();
    }
    f.open();
    f.check();
  }
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::testing::kv_file_level_test
