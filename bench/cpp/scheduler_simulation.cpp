// Simulates the scheduler and the bookkeeping of KV pool and LoRA cache for a million requests, without an
// engine: a cost model gives each step's virtual time. docs/scheduling.md has the model and results.
//   scheduler_simulation [requests] [adapters]

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <memory>
#include <random>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "adaptrt/kv/sequence_memory.h"
#include "adaptrt/lora/lora_cache.h"
#include "adaptrt/lora/pack_adapter.h"
#include "adaptrt/sched/scheduler.h"
#include "lora/adapters.h"

namespace adaptrt {
namespace {

/// Costs in seconds on the machine of docs/performance.md, "CPUs without AMX": a 0.5B bfloat16 model on two
/// cores, adapters of rank 8.
struct CostModel {
  double weights = 0.020;  ///< reading the weights once: minimum of a step
  double token = 0.00093;  ///< products of one token
  double adapter = 0.001;  ///< reading one adapter, and its tokens' extra cost over the base model
  double load = 0.0026;    ///< loading one adapter to the device level

  [[nodiscard]] double step(std::int32_t num_tokens, std::int64_t num_adapters,
                            std::int64_t num_loads) const {
    return std::max(weights, token * num_tokens) + adapter * static_cast<double>(num_adapters) +
           load * static_cast<double>(num_loads);
  }
};

struct Traffic {
  std::int64_t num_requests = 0;
  std::uint64_t num_adapters = 0;
  double rate = 0.0;        ///< requests per second of all adapters, without the flood's
  double burstiness = 1.0;  ///< coefficient of variation of the Gamma-distributed gaps between arrivals
  double popularity = 1.0;  ///< requests for adapter i are proportional to i ^ -popularity
  double flood = 0.0;       ///< adapter 0 sends this many times as many requests as all others together
  std::size_t most_waiting =
      1000;  ///< if the queue is longer, the flood's requests are rejected, but no others
  std::int32_t shared_prefix = 64;  ///< common prefix of all prompts of an adapter, in tokens
  std::int32_t longest_prompt = 256;
  std::int32_t longest_output = 128;
};

struct Machine {
  std::int32_t max_batch_size = 16;
  std::int32_t max_num_tokens = 512;
  std::int32_t num_blocks = 400;
  std::int32_t tokens_per_block = 64;
  std::int64_t device_adapters = 64;
};

/// Generates one request at a time, in the order of arrival.
class Generator {
 public:
  struct Arrival {
    double time = 0.0;
    std::uint64_t adapter = 0;
    std::int32_t prompt_length = 0;
    std::int32_t max_tokens = 0;
  };

  explicit Generator(const Traffic& traffic)
      : traffic_(traffic),
        gap_(1.0 / (traffic.burstiness * traffic.burstiness),
             traffic.burstiness * traffic.burstiness / (traffic.rate * (1.0 + traffic.flood))) {
    double sum = 0.0;
    for (std::uint64_t i = 1; i <= traffic.num_adapters; ++i) {
      cumulative_.push_back(sum += std::pow(static_cast<double>(i), -traffic.popularity));
    }
    draw();
  }
  [[nodiscard]] bool done() const { return num_drawn_ > traffic_.num_requests; }
  [[nodiscard]] const Arrival& next() const { return next_; }
  void draw() {
    ++num_drawn_;
    next_.time += gap_(random_);
    const bool is_flood = unit_(random_) * (1.0 + traffic_.flood) < traffic_.flood;
    const auto place = std::ranges::lower_bound(cumulative_, unit_(random_) * cumulative_.back());
    // Adapter 0 is reserved for a flood.
    next_.adapter = is_flood ? 0 : static_cast<std::uint64_t>(place - cumulative_.begin()) + 1;
    next_.prompt_length =
        8 + static_cast<std::int32_t>(random_() % static_cast<std::uint64_t>(traffic_.longest_prompt - 7));
    next_.max_tokens =
        8 + static_cast<std::int32_t>(random_() % static_cast<std::uint64_t>(traffic_.longest_output - 7));
  }

 private:
  Traffic traffic_;
  std::mt19937_64 random_{1};
  std::gamma_distribution<double> gap_;
  std::uniform_real_distribution<double> unit_;
  std::vector<double> cumulative_;
  Arrival next_;
  std::int64_t num_drawn_ = 0;
};

struct Request final : Sequence {
  double arrived = 0.0;
};

/// Waiting times for the first token, in seconds.
class Waits {
 public:
  void add(double wait) { waits_.push_back(static_cast<float>(wait)); }
  [[nodiscard]] double percentile(double share) {
    if (waits_.empty()) return 0.0;
    const auto place =
        waits_.begin() + static_cast<std::ptrdiff_t>(share * static_cast<double>(waits_.size() - 1));
    std::ranges::nth_element(waits_, place);
    return *place;
  }

 private:
  std::vector<float> waits_;
};

class Simulation {
 public:
  Simulation(const Traffic& traffic, const Machine& machine, const SchedulerConfig& config)
      : traffic_(traffic),
        generator_(traffic),
        memory_({.num_blocks = machine.num_blocks, .tokens_per_block = machine.tokens_per_block}),
        cache_(make_cache(machine)),
        scheduler_(config,
                   {.max_batch_size = machine.max_batch_size,
                    .max_num_tokens = machine.max_num_tokens,
                    .enable_chunked_context = true,
                    .max_reusable_prompt_len = 1 << 20},
                   memory_, cache_.get()),
        used_in_step_(traffic.num_adapters + 1) {
    for (std::uint64_t task = 0; task <= traffic.num_adapters; ++task) {
      static_cast<void>(cache_->admit(adapter_.send(task, true)));
    }
  }

  void run(const char* name) {
    const std::clock_t begin = std::clock();
    while (!generator_.done() || !scheduler_.empty()) {
      while (!generator_.done() && generator_.next().time <= now_) arrive();
      if (scheduler_.empty()) {
        now_ = generator_.next().time;
      } else {
        step();
      }
    }
    const double seconds = static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
    print(name, seconds);
  }

  static void print_head() {
    std::printf(
        "| run | requests/s | tokens/s | first token, others: p50, p99, s | flood's: p50, p99, s | refused | "
        "loads of adapters | evicted | KV blocks reused | preempted | CPU seconds | us a step |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n");
  }

 private:
  static LoraLayout layout() {
    LoraLayout layout;
    layout.num_layers = 1;
    layout.max_rank = 1;
    layout.target_modules = {LoraModule::kAttnDense};
    layout.sites.push_back({0, 6, {{LoraModule::kAttnDense, 8}}});
    return layout;
  }
  std::unique_ptr<LoraCache> make_cache(const Machine& machine) const {
    const LoraLayout small = layout();
    const ModuleRank largest{.module = LoraModule::kAttnDense, .rank = small.max_rank};
    return std::make_unique<LoraCache>(
        small,
        std::make_unique<HostPages>(image_bytes(small, small.sites[0], std::span(&largest, 1)),
                                    machine.device_adapters),
        LoraCacheOptions{.host_bytes = std::size_t{1} << 30U});
  }

  void arrive() {
    const Generator::Arrival arrival = generator_.next();
    generator_.draw();
    if (arrival.adapter == 0 && scheduler_.waiting().size() >= traffic_.most_waiting) {
      ++num_refused_;
      return;
    }
    auto owned = std::make_unique<Request>();
    Request& request = *owned;
    request.id = next_id_++;
    request.arrived = arrival.time;
    request.prompt_length = arrival.prompt_length;
    request.max_tokens = arrival.max_tokens;
    LoraConfig lora;
    lora.task_id = arrival.adapter;
    request.adapter = cache_->admit(lora);
    request.tokens.reserve(static_cast<std::size_t>(arrival.prompt_length + arrival.max_tokens));
    for (std::int32_t i = 0; i < arrival.prompt_length; ++i) {
      request.tokens.push_back(i < traffic_.shared_prefix ? i : static_cast<std::int32_t>(request.id));
    }
    scheduler_.add(request);
    requests_.emplace(request.id, std::move(owned));
  }

  void step() {
    scheduler_.plan(plan_);
    ++num_steps_;
    num_preempted_ += static_cast<std::int64_t>(plan_.preempted.size());
    const std::int64_t loads = cache_->stats().device_misses;
    std::int64_t num_adapters = 0;
    for (const PlannedSequence& entry : plan_.entries) {
      std::int64_t& used = used_in_step_[entry.sequence->adapter->task_id()];
      if (std::exchange(used, num_steps_) != num_steps_) ++num_adapters;
    }
    now_ += cost_.step(plan_.num_tokens, num_adapters, loads - std::exchange(num_loads_, loads));
    scheduler_.commit(plan_);
    for (const PlannedSequence& entry : plan_.entries) {
      if (!entry.wants_logits) continue;
      auto& request = static_cast<Request&>(*entry.sequence);
      request.tokens.push_back(static_cast<std::int32_t>(request.id));
      if (request.num_generated() == 1) {
        (request.adapter->task_id() == 0 ? flood_waits_ : waits_).add(now_ - request.arrived);
      }
      if (request.num_generated() < request.max_tokens) continue;
      ++num_finished_;
      num_tokens_ += request.num_tokens();
      scheduler_.remove(request);
      requests_.erase(request.id);
    }
  }

  void print(const char* name, double seconds) {
    const LoraCacheStats lora = cache_->stats();
    std::printf(
        "| %s | %.2f | %.0f | %.2f, %.2f | %.2f, %.2f | %lld | %lld | %lld | %.0f%% | %lld | %.1f | %.1f |\n",
        name, static_cast<double>(num_finished_) / now_, static_cast<double>(num_tokens_) / now_,
        waits_.percentile(0.5), waits_.percentile(0.99), flood_waits_.percentile(0.5),
        flood_waits_.percentile(0.99), static_cast<long long>(num_refused_),
        static_cast<long long>(lora.device_misses), static_cast<long long>(lora.device_evictions),
        100.0 * memory_.block_pool().stats().cache_hit_rate, static_cast<long long>(num_preempted_), seconds,
        1e6 * seconds / static_cast<double>(num_steps_));
    std::fflush(stdout);
  }

  Traffic traffic_;
  CostModel cost_;
  testing::SentAdapter adapter_ =
      testing::make_adapter({{.module = LoraModule::kAttnDense, .layer = 0, .rank = 1}}, layout());
  Generator generator_;
  SequenceMemoryPool memory_;
  std::unique_ptr<LoraCache> cache_;
  Scheduler scheduler_;
  StepPlan plan_;
  std::unordered_map<std::uint64_t, std::unique_ptr<Request>> requests_;
  std::vector<std::int64_t> used_in_step_;  // by adapter: the newest step that used it
  double now_ = 0.0;
  std::uint64_t next_id_ = 1;
  std::int64_t num_steps_ = 0;
  std::int64_t num_loads_ = 0;
  std::int64_t num_finished_ = 0;
  std::int64_t num_tokens_ = 0;
  std::int64_t num_refused_ = 0;
  std::int64_t num_preempted_ = 0;
  Waits waits_;
  Waits flood_waits_;
};

void run(std::int64_t num_requests, std::uint64_t num_adapters) {
  const Traffic usual{.num_requests = num_requests, .num_adapters = num_adapters, .rate = 3.0};
  Traffic bursts = usual;
  bursts.burstiness = 2.0;
  Traffic even = usual;
  even.popularity = 0.0;
  Traffic flood = usual;
  flood.flood = 50.0;
  Traffic even_flood = flood;
  even_flood.popularity = 0.0;
  Traffic long_queue = even_flood;
  long_queue.most_waiting = 100000;
  SchedulerConfig by_arrival;
  by_arrival.adapter_fairness = false;
  const SchedulerConfig fair;
  SchedulerConfig pausing;
  pausing.capacity_scheduler_policy = CapacitySchedulerPolicy::kMaxUtilization;

  Simulation::print_head();
  const auto simulate = [](const char* name, const Traffic& traffic, const SchedulerConfig& config,
                           const Machine& machine = {}) {
    std::make_unique<Simulation>(traffic, machine, config)->run(name);
  };
  simulate("power law, by arrival", usual, by_arrival);
  simulate("power law, fair", usual, fair);
  simulate("bursts, by arrival", bursts, by_arrival);
  simulate("bursts, fair", bursts, fair);
  simulate("bursts, fair, 60 KV blocks", bursts, fair, {.num_blocks = 60});
  simulate("bursts, fair, 60 KV blocks, MAX_UTILIZATION", bursts, pausing, {.num_blocks = 60});
  simulate("power law and a flood, by arrival", flood, by_arrival);
  simulate("power law and a flood, fair", flood, fair);
  simulate("all alike, fair", even, fair);
  simulate("all alike and a flood, by arrival", even_flood, by_arrival);
  simulate("all alike and a flood, fair", even_flood, fair);
  simulate("the same, 100,000 waiting, by arrival", long_queue, by_arrival);
  simulate("the same, 100,000 waiting, fair", long_queue, fair);
}

}  // namespace
}  // namespace adaptrt

int main(int argc, char** argv) {
  const std::int64_t requests = argc > 1 ? std::atoll(argv[1]) : 1000000;
  const std::int64_t adapters = argc > 2 ? std::atoll(argv[2]) : 10000;
  if (requests < 1 || adapters < 1) {
    std::fprintf(stderr, "usage: scheduler_simulation [requests] [adapters], both at least 1\n");
    return 1;
  }
  adaptrt::run(requests, static_cast<std::uint64_t>(adapters));
  return 0;
}
