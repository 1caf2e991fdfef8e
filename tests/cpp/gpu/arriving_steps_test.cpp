// Steps that read adapters whose copies still run.

#include <boost/test/unit_test.hpp>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "adaptrt/core/error.h"
#include "adaptrt/gpu/adapter_entries.h"
#include "adaptrt/gpu/gpu_engine.h"
#include "adaptrt/lora/lora_cache.h"
#include "cpu/step_arrays.h"
#include "lora/adapters.h"
#include "lora/hooked_pages.h"
#include "support/host_device.h"

namespace adaptrt::testing::arriving_steps_test {
namespace {

using enum AdapterReadiness;

constexpr std::int64_t kVocabSize = 8;
constexpr std::size_t kPageBytes = 8192;

LoraLayout layout_of_rows() {
  LoraLayout layout = small_layout(DType::kFloat16);
  layout.matrix_layout = MatrixLayout::kRows;
  return layout;
}

/// A model whose ops, one for each site, add up the elements of the adapters of a run's sequences.
class ReadingModel : public GpuModel {
 public:
  explicit ReadingModel(LoraLayout layout) : layout_(std::move(layout)), entries_(layout_) {}

  void load(const adaptrt::StepArrays& step_arrays, const GpuModelArrays& arrays, Device& /*device*/,
            Stream& /*stream*/) override {
    step_arrays_ = &step_arrays;
    arrays_ = arrays;
  }
  void set_kv_pools(std::span<const DeviceArray> /*pools*/) override {}
  void run(GpuStepKind /*kind*/, const RunShape& shape, Stream& stream) override {
    enqueue(shape, stream, [](std::size_t) {});
  }
  [[nodiscard]] std::function<void(Stream&)> make_graph_work(const RunShape& shape) override {
    return [this, shape](Stream& stream) { enqueue(shape, stream, [](std::size_t) {}); };
  }

 protected:
  /// `before_site`: called before the op of each site is enqueued.
  void enqueue(const RunShape& shape, Stream& stream, const std::function<void(std::size_t)>& before_site) {
    HostStream& host = host_stream(stream.handle());
    submit(host, [this, shape] {
      std::memset(arrays_.logits, 0, static_cast<std::size_t>(shape.logit_rows * kVocabSize) * sizeof(float));
    });
    for (std::size_t site = 0; site < layout_.sites.size(); ++site) {
      before_site(site);
      submit(host, [this, shape, site] { add_site(shape, site); });
    }
  }
  [[nodiscard]] const LoraLayout& layout() const { return layout_; }

 private:
  void add_site(const RunShape& shape, std::size_t site) const {
    const StepPlaces places = step_arrays_->places(shape);
    const auto at = [&](const StepArray& array) {
      return reinterpret_cast<const std::int32_t*>(arrays_.step_memory + array.offset);
    };
    for (std::int32_t sequence = 0; sequence < shape.sequences; ++sequence) {
      const std::int32_t slot = at(*places.adapter_slots)[sequence];
      if (slot == kNoSlot) continue;
      const std::int64_t sum = sum_of(site, static_cast<std::size_t>(slot));
      const std::int32_t* offsets = at(places.sequence_offsets);
      for (std::int32_t row = 0; row < shape.logit_rows; ++row) {
        const std::int32_t token = at(places.logit_rows)[row];
        if (token < offsets[sequence] || token >= offsets[sequence + 1]) continue;
        reinterpret_cast<float*>(arrays_.logits)[row * kVocabSize] += static_cast<float>(sum);
      }
    }
  }

  /// Adds up the bits of a site's A and B.
  [[nodiscard]] std::int64_t sum_of(std::size_t site, std::size_t slot) const {
    const LoraSite& place = layout_.sites[site];
    std::int64_t sum = 0;
    const auto add = [&](std::int64_t address, std::int64_t elements) {
      const auto* values = reinterpret_cast<const std::uint16_t*>(address);
      for (std::int64_t i = 0; i < elements; ++i) sum += values[i] % 4093;
    };
    for (std::size_t part = 0; part < place.parts.size(); ++part) {
      const auto entry = slot * static_cast<std::size_t>(entries_.count()) +
                         static_cast<std::size_t>(entries_.entry(site, part));
      const std::int32_t rank = reinterpret_cast<const std::int32_t*>(arrays_.adapters->ranks.address)[entry];
      if (rank == 0) continue;
      const auto* pointers =
          reinterpret_cast<const std::int64_t*>(arrays_.adapters->pointers.address) + entry * 3;
      add(pointers[0], rank * place.in_size);
      add(pointers[1], rank * place.parts[part].out_size);
    }
    return sum;
  }

  LoraLayout layout_;
  AdapterEntries entries_;
  const adaptrt::StepArrays* step_arrays_ = nullptr;
  GpuModelArrays arrays_;
};

/// Each op waits for its site only.
class WaitingModel final : public ReadingModel {
 public:
  using ReadingModel::ReadingModel;
  void run_on_arrival(GpuStepKind /*kind*/, const RunShape& shape, const StepArrivals& arrivals,
                      Stream& stream) override {
    ArrivalWaits waits(arrivals, stream);
    enqueue(shape, stream,
            [&](std::size_t site) { waits.await(load_position(layout(), static_cast<std::int32_t>(site))); });
  }
};

GpuModelDescription description() {
  GpuModelDescription model{
      .dtype = DType::kFloat16,
      .vocab_size = kVocabSize,
      .num_layers = 2,
      .attention = {{.num_attention_heads = 1, .num_key_value_heads = 1, .head_dim = 1},
                    {.num_attention_heads = 1, .num_key_value_heads = 1, .head_dim = 1}},
      .max_batch_size = 4,
      .max_num_tokens = 16,
      .max_input_len = 14,
      .max_seq_len = 16,
      .tokens_per_block = 4,
      .max_reusable_prompt_len = 14,
      .max_kv_blocks = 8,
      .num_adapter_slots = 4,
      .prefill = {.max_tokens = 16, .max_sequences = 4, .max_logit_rows = 4},
      .decode = {.max_tokens = 4, .max_sequences = 4, .max_logit_rows = 4},
      .lora = layout_of_rows()};
  model.skips_unused_adapters = true;
  return model;
}

SentAdapter adapter_of(std::uint32_t seed) {
  using enum LoraModule;
  return make_adapter({{kAttnQ, 0, 2, false},
                       {kMlpGateUp, 0, 7, false},
                       {kAttnDense, 1, 5, false},
                       {kMlpGateUp, 1, 8, false},
                       {kMlp4HToH, 1, 8, false}},
                      layout_of_rows(), seed, DType::kFloat16);
}

/// An engine on a device that does nothing before it is awaited, and a cache whose workers wait for their
/// copies only while the door is open.
struct World {
  explicit World(bool waits_by_site = true, std::int32_t num_workers = 1, std::int64_t pages = 6) {
    device->before_event_waits([this, executor = std::this_thread::get_id()] {
      if (std::this_thread::get_id() != executor) door.pass();
    });
    std::unique_ptr<GpuModel> model;
    if (waits_by_site) {
      model = std::make_unique<WaitingModel>(layout_of_rows());
    } else {
      model = std::make_unique<ReadingModel>(layout_of_rows());
    }
    engine = make_gpu_engine(description(), std::move(model), device, {});
    engine->allocate_kv_blocks(8);
    cache.emplace(layout_of_rows(), engine->make_adapter_pages(kPageBytes, pages, num_workers),
                  LoraCacheOptions{.host_bytes = 1 << 20, .num_load_workers = num_workers});
  }
  ~World() {
    for (const std::string& broken : cache->check_invariants()) BOOST_ERROR(broken);
    door.open();
  }
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  std::shared_ptr<const HostAdapter> admit(std::uint64_t task_id) {
    return cache->admit(adapter_of(static_cast<std::uint32_t>(task_id)).send(task_id));
  }
  /// Leases an adapter. With the door shut, its copies have not been awaited.
  std::optional<DeviceLease> lease(const std::shared_ptr<const HostAdapter>& adapter) {
    while (cache->ensure(*adapter, 1) != kReady) std::this_thread::yield();
    return cache->acquire(adapter);
  }
  void finish_loads() {
    door.open();
    while (cache->stats().loads_in_flight > 0) std::this_thread::yield();
  }
  [[nodiscard]] std::vector<float> run(const std::vector<Piece>& pieces) const {
    const std::vector<float> logits = logits_of(engine.get(), StepArrays(pieces).input());
    std::vector<float> sums;
    for (std::size_t row = 0; row < logits.size(); row += kVocabSize) sums.push_back(logits[row]);
    return sums;
  }
  /// Result of a prompt of two tokens with an adapter.
  [[nodiscard]] float prompt(const std::optional<DeviceLease>& lease) const {
    const std::vector<float> sums = run({prompt_of(&lease->adapter(), 0)});
    BOOST_TEST(sums.at(0) == sums.at(1));
    return sums.at(0);
  }
  [[nodiscard]] static Piece prompt_of(const DeviceAdapter* adapter, std::int32_t block) {
    return {.tokens = {1, 2}, .prompt_length = 2, .blocks = {block}, .adapter = adapter};
  }
  [[nodiscard]] static Piece decode_of(const DeviceAdapter* adapter, std::int32_t block) {
    return {.tokens = {3}, .first_position = 2, .prompt_length = 2, .blocks = {block}, .adapter = adapter};
  }

  std::shared_ptr<HostDevice> device = std::make_shared<HostDevice>(std::size_t{1} << 24, StreamTime::kLate);
  Door door;
  std::unique_ptr<Engine> engine;
  std::optional<LoraCache> cache;
};

/// Results of prompts with the adapters 1 and 2 after their loads.
std::pair<float, float> warm_results() {
  World world;
  const auto one = world.admit(1);
  const auto two = world.admit(2);
  const auto first = world.lease(one);
  const auto second = world.lease(two);
  world.finish_loads();
  const std::int64_t waits = world.device->calls("wait");
  const std::pair results{world.prompt(first), world.prompt(second)};
  BOOST_TEST(world.device->calls("wait") == waits);  // for nothing
  BOOST_TEST((results.first > 0 && results.second > 0 && results.first != results.second));
  return results;
}

BOOST_AUTO_TEST_SUITE(arriving_steps)

BOOST_AUTO_TEST_CASE(a_prompt_reads_an_adapter_whose_copies_run) {
  const float expected = warm_results().first;
  for (const bool waits_by_site : {true, false}) {
    World world(waits_by_site);
    world.door.shut();
    const auto lease = world.lease(world.admit(1));
    world.door.await_waiting(1);
    BOOST_TEST(world.cache->stats().loads_in_flight == 1);
    BOOST_TEST(world.prompt(lease) == expected);
    BOOST_TEST(world.cache->stats().loads_in_flight == 1);
    // By site, it waits for each layer once.
    BOOST_TEST(world.device->calls("wait") == (waits_by_site ? 2 : 1));
    world.finish_loads();
    BOOST_TEST(world.prompt(lease) == expected);
  }
}

BOOST_AUTO_TEST_CASE(a_captured_decode_reads_an_adapter_whose_copies_run) {
  const float expected = warm_results().first;
  World world;
  for (int time = 0; time < 2; ++time) {  // captured, then launched again
    world.door.shut();
    const auto lease = world.lease(world.admit(1));
    BOOST_TEST(world.run({World::decode_of(&lease->adapter(), 0)}).at(0) == expected);
    world.finish_loads();
    world.cache->unload(1);
  }
  BOOST_TEST(world.device->calls("capture") == 1);
  BOOST_TEST(world.cache->stats().device_misses == 2);
}

BOOST_AUTO_TEST_CASE(a_step_reads_adapters_of_two_streams) {
  const auto [first, second] = warm_results();
  for (const bool waits_by_site : {true, false}) {
    World world(waits_by_site, 2);
    world.door.shut();
    const auto one = world.lease(world.admit(1));
    const auto two = world.lease(world.admit(2));
    world.door.await_waiting(2);
    const std::vector<float> sums =
        world.run({World::prompt_of(&one->adapter(), 0), World::decode_of(nullptr, 1),
                   World::decode_of(&two->adapter(), 2)});
    BOOST_TEST(sums == (std::vector<float>{first, first, 0, second}), boost::test_tools::per_element());
  }
}

BOOST_AUTO_TEST_CASE(copies_that_fail_fail_the_steps_that_read_them) {
  const auto [first, second] = warm_results();
  World world(true, 2);
  const auto warm = world.lease(world.admit(2));
  world.finish_loads();
  const auto adapter = world.admit(1);
  world.device->fail("copy_to_device", Failure::kLate, 1);  // the second of the adapter's copies
  world.door.shut();
  auto lease = world.lease(adapter);
  world.door.await_waiting(1);
  BOOST_CHECK_THROW(static_cast<void>(world.prompt(lease)), StepError);
  BOOST_TEST(world.prompt(warm) == second);
  world.finish_loads();
  // It was leased when they failed, so later steps may still name it.
  BOOST_CHECK_THROW(static_cast<void>(world.prompt(lease)), StepError);
  BOOST_TEST(world.cache->stats().failed_loads == 1);
  BOOST_TEST(world.prompt(warm) == second);
  lease.reset();
  BOOST_TEST(world.cache->take_load_failures().size() == 1U);
  BOOST_TEST(world.prompt(world.lease(adapter)) == first);
}

BOOST_AUTO_TEST_CASE(a_failure_that_comes_before_the_step_fails_it_too) {
  World world;
  const auto adapter = world.admit(1);
  world.device->fail("copy_to_device", Failure::kLate, 0);
  world.door.shut();
  const auto lease = world.lease(adapter);
  world.finish_loads();
  BOOST_CHECK_THROW(static_cast<void>(world.prompt(lease)), StepError);
  static_cast<void>(world.cache->take_load_failures());
}

BOOST_AUTO_TEST_CASE(copies_that_cannot_be_enqueued_fail_the_load) {
  World world;
  const float expected = warm_results().first;
  const auto adapter = world.admit(1);
  world.device->fail("copy_to_device", Failure::kOnce, 1);
  BOOST_TEST((world.cache->ensure(*adapter, 1) == kLoading));
  while (world.cache->stats().loads_in_flight > 0) std::this_thread::yield();
  BOOST_TEST(world.cache->take_load_failures().size() == 1U);
  BOOST_TEST(world.cache->stats().device_pages_used == 0);
  BOOST_TEST(world.prompt(world.lease(adapter)) == expected);
}

BOOST_AUTO_TEST_CASE(an_unloaded_adapter_keeps_its_memory_until_its_copies_are_done) {
  const float expected = warm_results().first;
  World world;
  world.door.shut();
  auto adapter = world.admit(1);
  auto lease = world.lease(adapter);
  world.door.await_waiting(1);
  world.cache->unload(1);
  adapter = nullptr;
  // Another adapter must get neither its pinned memory nor its pages.
  const auto other = world.admit(2);
  BOOST_TEST(world.prompt(lease) == expected);
  lease.reset();
  BOOST_TEST(world.cache->stats().host_adapters == 2);
  world.finish_loads();
  while (world.cache->stats().host_adapters > 1) std::this_thread::yield();
  BOOST_TEST(world.prompt(world.lease(other)) == warm_results().second);
}

BOOST_AUTO_TEST_CASE(a_system_that_pins_nothing_stages_copies) {
  const float expected = warm_results().first;
  World world;
  world.device->limit_pinned(0);
  const auto adapter = world.admit(1);
  BOOST_TEST(!adapter->is_pinned());
  world.device->limit_pinned(std::size_t{1} << 20);
  BOOST_TEST(world.prompt(world.lease(adapter)) == expected);
  BOOST_TEST(world.cache->stats().staged_loads == 1);
  BOOST_TEST(world.cache->stats().pinned_bytes == 0U);
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::testing::arriving_steps_test
