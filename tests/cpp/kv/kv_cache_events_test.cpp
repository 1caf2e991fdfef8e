#include "adaptrt/kv/kv_cache_events.h"

#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "adaptrt/kv/block_pool.h"

namespace adaptrt::kv_cache_events_test {
namespace {

using std::chrono::milliseconds;
using Tokens = std::vector<std::int32_t>;

constexpr std::int32_t kTokensPerBlock = 2;
constexpr milliseconds kNow{0};

template <class Data>
const Data& data_of(const KVCacheEvent& event) {
  BOOST_TEST_REQUIRE(std::holds_alternative<Data>(event.data));
  return std::get<Data>(event.data);
}

std::vector<std::uint64_t> ids_of(const std::vector<KVCacheEvent>& events) {
  std::vector<std::uint64_t> ids;
  for (const KVCacheEvent& event : events) ids.push_back(event.event_id);
  return ids;
}

Tokens tokens_of(const KVCacheStoredBlockData& block) {
  Tokens tokens;
  for (const UniqueToken& token : block.tokens) tokens.push_back(token.token_id);
  return tokens;
}

/// A pool and a reader of its events.
struct Watched {
  explicit Watched(std::int32_t num_blocks, std::size_t max_size = 1000)
      : events(max_size, 64), pool(num_blocks, kTokensPerBlock, true, &events) {}

  std::vector<KVCacheEvent> latest() {
    for (const auto& violation : pool.check_invariants()) BOOST_ERROR(violation);
    events.flush();
    return events.get_latest_events(kNow);
  }
  /// Computes all of the tokens.
  BlockTable compute(const Tokens& tokens, const ReuseKey& key = {}) {
    BlockTable table;
    pool.reuse_prefix(table, key, tokens);
    const auto size = static_cast<std::int32_t>(tokens.size());
    BOOST_TEST_REQUIRE(pool.try_grow(table, size));
    pool.index_full_blocks(table, key, tokens, size);
    return table;
  }
  void cache(const Tokens& tokens, const ReuseKey& key = {}) {
    BlockTable table = compute(tokens, key);
    pool.release(table);
  }

  KVCacheEventManager events;
  BlockPool pool;
};

/// The cache's state as known from all events.
class Mirror {
 public:
  void read(const std::vector<KVCacheEvent>& events) {
    for (const KVCacheEvent& event : events) {
      BOOST_TEST_REQUIRE(event.event_id == next_id_);
      ++next_id_;
      if (const auto* stored = std::get_if<KVCacheStoredData>(&event.data)) add(*stored);
      if (const auto* removed = std::get_if<KVCacheRemovedData>(&event.data)) {
        for (const std::uint64_t hash : removed->block_hashes) BOOST_TEST_REQUIRE(blocks_.erase(hash) == 1U);
      }
      if (const auto* updated = std::get_if<KVCacheUpdatedData>(&event.data)) {
        BOOST_TEST_REQUIRE(updated->priority.has_value());
        std::int32_t& priority = blocks_.at(updated->block_hash).priority;
        BOOST_TEST_REQUIRE(priority == updated->priority->old_value);
        BOOST_TEST_REQUIRE(priority != updated->priority->new_value);
        priority = updated->priority->new_value;
      }
    }
  }
  /// Checks that everything known is in the pool.
  void require_found_in(const BlockPool& pool) const {
    for (const auto& [hash, block] : blocks_) {
      Tokens tokens;
      std::int32_t depth = 0;
      for (const Known* at = &block; at != nullptr; ++depth) {
        tokens.insert(tokens.begin(), at->tokens.begin(), at->tokens.end());
        at = at->parent ? &blocks_.at(*at->parent) : nullptr;
      }
      tokens.push_back(-1);  // the last token is never reused
      BOOST_TEST_REQUIRE(pool.match_prefix(block.key, tokens).num_blocks == depth);
    }
  }
  [[nodiscard]] std::size_t size() const { return blocks_.size(); }

 private:
  struct Known {
    std::optional<std::uint64_t> parent;
    Tokens tokens;
    ReuseKey key;
    std::int32_t priority;
  };

  void add(const KVCacheStoredData& stored) {
    std::optional<std::uint64_t> parent = stored.parent_hash;
    BOOST_TEST_REQUIRE((!parent || blocks_.contains(*parent)));
    BOOST_TEST_REQUIRE(!stored.blocks.empty());
    for (const KVCacheStoredBlockData& block : stored.blocks) {
      const Known known{.parent = parent,
                        .tokens = tokens_of(block),
                        .key = {.adapter_generation = block.lora_id.value_or(0),
                                .cache_salt = block.cache_salt_id,
                                .task_id = block.lora_id},
                        .priority = block.priority};
      BOOST_TEST_REQUIRE(blocks_.emplace(block.block_hash, known).second);
      parent = block.block_hash;
    }
  }

  std::map<std::uint64_t, Known> blocks_;
  std::uint64_t next_id_ = 0;
};

BOOST_AUTO_TEST_SUITE(kv_cache_events)

BOOST_AUTO_TEST_CASE(the_first_event_tells_the_size) {
  Watched watched(7);
  const auto events = watched.latest();
  BOOST_TEST_REQUIRE(events.size() == 1U);
  BOOST_TEST(events[0].event_id == 0U);
  BOOST_TEST(events[0].window_size == 64);
  BOOST_TEST(!events[0].attention_dp_rank.has_value());
  BOOST_TEST(
      (data_of<KVCacheCreatedData>(events[0]).num_blocks_per_cache_level == std::vector<std::int64_t>{7, 0}));
}

BOOST_AUTO_TEST_CASE(a_chain_is_stored_in_one_event) {
  Watched watched(8);
  static_cast<void>(watched.latest());
  watched.cache({1, 2, 3, 4, 5}, {.adapter_generation = 9, .cache_salt = 4, .task_id = 17});
  const auto events = watched.latest();
  BOOST_TEST_REQUIRE(events.size() == 1U);
  const auto& stored = data_of<KVCacheStoredData>(events[0]);
  BOOST_TEST(!stored.parent_hash.has_value());
  BOOST_TEST_REQUIRE(stored.blocks.size() == 2U);
  BOOST_TEST(tokens_of(stored.blocks[0]) == Tokens({1, 2}), boost::test_tools::per_element());
  BOOST_TEST(tokens_of(stored.blocks[1]) == Tokens({3, 4}), boost::test_tools::per_element());
  for (const KVCacheStoredBlockData& block : stored.blocks) {
    BOOST_TEST(block.lora_id.value() == 17U);
    BOOST_TEST(block.cache_salt_id.value() == 4U);
    BOOST_TEST(block.cache_level == kPrimaryLevel);
    BOOST_TEST(block.priority == kDefaultRetentionPriority);
    BOOST_TEST(block.tokens[1].token_extra_id == 0);
  }
}

BOOST_AUTO_TEST_CASE(stored_events_name_the_parent_block) {
  Watched watched(8);
  static_cast<void>(watched.latest());
  watched.cache({1, 2, 3, 4});
  watched.cache({1, 2, 5, 6});
  const auto events = watched.latest();
  BOOST_TEST_REQUIRE(events.size() == 2U);
  const auto& first = data_of<KVCacheStoredData>(events[0]);
  const auto& second = data_of<KVCacheStoredData>(events[1]);
  BOOST_TEST_REQUIRE(second.blocks.size() == 1U);
  BOOST_TEST(second.parent_hash.value() == first.blocks[0].block_hash);
  BOOST_TEST(tokens_of(second.blocks[0]) == Tokens({5, 6}), boost::test_tools::per_element());
  BOOST_TEST(!second.blocks[0].lora_id.has_value());
}

BOOST_AUTO_TEST_CASE(a_hash_is_of_adapter_salt_embeddings_and_all_tokens) {
  const auto digest = [](std::uint64_t value) { return Sha256().add_integer(value).finish(); };
  const PrefixDigests first = {{.position = 0, .digest = digest(1)}};
  const PrefixDigests second = {{.position = 0, .digest = digest(2)}};
  const PrefixDigests late = {{.position = 2, .digest = digest(1)}};
  const std::vector<std::pair<Tokens, ReuseKey>> contents = {
      {{1, 2, 3, 4}, {}},
      {{2, 1, 3, 4}, {}},
      {{1, 2, 4, 3}, {}},
      {{0, 0, 0, 0}, {}},
      {{1, 2, 3, 4}, {.adapter_generation = 1, .task_id = 1}},
      {{1, 2, 3, 4}, {.adapter_generation = 2, .task_id = 1}},
      {{1, 2, 3, 4}, {.cache_salt = 0}},
      {{1, 2, 3, 4}, {.cache_salt = 1}},
      {{1, 2, 3, 4}, {.adapter_generation = 1, .cache_salt = 1, .task_id = 1}},
      {{1, 2, 3, 4}, {.given = &first}},
      {{1, 2, 3, 4}, {.given = &second}},
      {{1, 2, 3, 4}, {.given = &late}},
  };
  std::set<std::uint64_t> hashes;
  std::vector<std::uint64_t> of_first;
  for (int round = 0; round < 2; ++round) {
    Watched watched(64);
    static_cast<void>(watched.latest());
    for (const auto& [tokens, key] : contents) {
      watched.cache(tokens, key);
      for (const KVCacheEvent& event : watched.latest()) {
        for (const KVCacheStoredBlockData& block : data_of<KVCacheStoredData>(event).blocks) {
          if (round == 0) of_first.push_back(block.block_hash);
          hashes.insert(block.block_hash);
        }
      }
    }
  }
  BOOST_TEST(of_first.size() == 22U);  // the first blocks of the third and last sequence equal the first
                                       // one's
  BOOST_TEST(hashes.size() == of_first.size());
}

BOOST_AUTO_TEST_CASE(removals_in_a_row_are_one_event) {
  Watched watched(3);
  watched.cache({1, 2, 3, 4, 5, 6});
  Mirror mirror;
  mirror.read(watched.latest());
  BlockTable table;
  BOOST_TEST_REQUIRE(watched.pool.try_grow(table, 4));
  const auto events = watched.latest();
  BOOST_TEST_REQUIRE(events.size() == 1U);
  BOOST_TEST(data_of<KVCacheRemovedData>(events[0]).block_hashes.size() == 2U);
  mirror.read(events);
  BOOST_TEST(mirror.size() == 1U);
  watched.pool.reset_reuse();
  mirror.read(watched.latest());
  BOOST_TEST(mirror.size() == 0U);
  watched.pool.release(table);
  BOOST_TEST(watched.latest().empty());
}

BOOST_AUTO_TEST_CASE(a_block_is_stored_with_its_priority_and_updated_when_that_changes) {
  Watched watched(4);
  static_cast<void>(watched.latest());
  BlockTable table = watched.compute({1, 2, 3, 4});
  watched.pool.set_retention(table, 1, {.priority = 80, .duration = milliseconds(10)});
  auto events = watched.latest();
  BOOST_TEST_REQUIRE(events.size() == 1U);
  const auto stored = data_of<KVCacheStoredData>(events[0]);
  BOOST_TEST(stored.blocks[0].priority == kDefaultRetentionPriority);
  BOOST_TEST(stored.blocks[1].priority == 80);

  watched.pool.set_retention(table, 0, {.priority = 20});
  watched.pool.set_retention(table, 0, {.priority = 20, .duration = milliseconds(500)});
  events = watched.latest();
  BOOST_TEST_REQUIRE(events.size() == 1U);
  const auto& updated = data_of<KVCacheUpdatedData>(events[0]);
  BOOST_TEST(updated.block_hash == stored.blocks[0].block_hash);
  BOOST_TEST(!updated.cache_level.has_value());
  BOOST_TEST((updated.priority == KVCacheEventDiffInt{kDefaultRetentionPriority, 20}));

  const BlockPool::Time begin{};
  watched.pool.set_time(begin);
  watched.pool.release(table);
  watched.pool.set_time(begin + milliseconds(10));
  events = watched.latest();
  BOOST_TEST_REQUIRE(events.size() == 1U);
  BOOST_TEST(data_of<KVCacheUpdatedData>(events[0]).block_hash == stored.blocks[1].block_hash);
  BOOST_TEST((data_of<KVCacheUpdatedData>(events[0]).priority ==
              KVCacheEventDiffInt{80, kDefaultRetentionPriority}));
}

BOOST_AUTO_TEST_CASE(the_oldest_are_dropped) {
  KVCacheEventManager events(3, 1);
  for (std::uint64_t hash = 0; hash < 2; ++hash) events.record_priority(hash, 0, 1);
  events.flush();
  for (std::uint64_t hash = 2; hash < 4; ++hash) events.record_priority(hash, 0, 1);
  events.flush();
  BOOST_TEST(ids_of(events.get_latest_events(kNow)) == std::vector<std::uint64_t>({1, 2, 3}),
             boost::test_tools::per_element());
  for (std::uint64_t hash = 4; hash < 9; ++hash) events.record_priority(hash, 0, 1);
  events.flush();
  BOOST_TEST(ids_of(events.get_latest_events(kNow)) == std::vector<std::uint64_t>({6, 7, 8}),
             boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(events_come_when_they_are_flushed) {
  KVCacheEventManager events(10, 1);
  events.record_created({1, 0});
  BOOST_TEST(events.get_latest_events(kNow).empty());
  events.flush();
  BOOST_TEST(events.get_latest_events(std::nullopt).size() == 1U);
  BOOST_TEST(events.get_latest_events(milliseconds(1)).empty());
}

BOOST_AUTO_TEST_CASE(waiting_readers_are_woken_by_events_and_by_the_end) {
  KVCacheEventManager events(10, 1);
  std::vector<std::size_t> sizes;
  std::thread reader([&] {
    while (sizes.empty() || sizes.back() > 0) sizes.push_back(events.get_latest_events(std::nullopt).size());
  });
  for (std::uint64_t hash = 0; hash < 5; ++hash) {
    events.record_priority(hash, 0, 1);
    events.flush();
  }
  events.record_removed(1);
  events.close();
  reader.join();
  std::size_t total = 0;
  for (const std::size_t size : sizes) total += size;
  BOOST_TEST(total == 6U);
  BOOST_TEST(events.is_closed());
  BOOST_TEST(events.get_latest_events(std::nullopt).empty());
}

BOOST_DATA_TEST_CASE(events_describe_the_cached_blocks, boost::unit_test::data::xrange(20), seed) {
  std::mt19937 random(static_cast<std::uint32_t>(seed));
  const auto below = [&](std::int32_t end) {
    return static_cast<std::int32_t>(random() % static_cast<std::uint32_t>(end));
  };
  Watched watched(12);
  Mirror mirror;
  std::vector<BlockTable> tables;
  BlockPool::Time now{};
  for (int step = 0; step < 400; ++step) {
    watched.pool.set_time(now += milliseconds(1));
    if (!tables.empty() && below(2) == 0) {
      watched.pool.release(tables.back());
      tables.pop_back();
    }
    Tokens tokens(static_cast<std::size_t>(1 + below(8)));
    for (auto& token : tokens) token = below(2);
    ReuseKey key;
    if (below(3) == 0) key = {.adapter_generation = 1, .cache_salt = std::nullopt, .task_id = 1};
    const auto match = watched.pool.match_prefix(key, tokens);
    const auto size = static_cast<std::int32_t>(tokens.size());
    if (watched.pool.blocks_for(size) - match.num_blocks <=
        watched.pool.num_available() - match.num_unused_blocks) {
      tables.push_back(watched.compute(tokens, key));
      for (std::int32_t i = 0; i < tables.back().num_indexed; ++i) {
        if (below(3) > 0) continue;
        BlockRetention retention{.priority = below(3) * 40};
        if (below(2) == 0) retention.duration = milliseconds(1 + below(20));
        watched.pool.set_retention(tables.back(), i, retention);
      }
    }
    if (below(100) == 0) watched.pool.reset_reuse();
    if (below(3) > 0) continue;
    mirror.read(watched.latest());
    mirror.require_found_in(watched.pool);
  }
  for (BlockTable& table : tables) watched.pool.release(table);
  mirror.read(watched.latest());
  mirror.require_found_in(watched.pool);
  BOOST_TEST(std::cmp_equal(mirror.size(), watched.pool.num_cached()));
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::kv_cache_events_test
