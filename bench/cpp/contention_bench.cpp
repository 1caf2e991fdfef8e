// Measures steps of the CPU engine, with one thread and with several, with and without another process that
// keeps one core busy. Half of the 0.5B bfloat16 Llama shape, random weights.
//   contention_bench [threads] [rounds] [seconds per measurement]

#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "adaptrt/cpu/cpu_engine.h"
#include "cpu/random_model.h"
#include "cpu/step_arrays.h"

namespace adaptrt {
namespace {

using testing::Piece;
using Clock = std::chrono::steady_clock;

/// A process that computes endlessly.
class Competitor {
 public:
  /// `cpu`: the CPU that it runs on; -1: any. Create it before this process has threads.
  explicit Competitor(int cpu) : process_(fork()) {
    if (process_ != 0) {
      kill(process_, SIGSTOP);
      return;
    }
    if (cpu >= 0) {
      cpu_set_t cpus;
      CPU_ZERO(&cpus);
      CPU_SET(cpu, &cpus);
      sched_setaffinity(0, sizeof(cpus), &cpus);
    }
    volatile std::uint64_t count = 0;
    while (true) count = count + 1;
  }
  ~Competitor() {
    kill(process_, SIGKILL);
    waitpid(process_, nullptr, 0);
  }
  Competitor(const Competitor&) = delete;
  Competitor& operator=(const Competitor&) = delete;
  void run() const { kill(process_, SIGCONT); }
  void rest() const { kill(process_, SIGSTOP); }

 private:
  pid_t process_;
};

/// Sequences that all have `context` tokens already and compute `count` more.
std::vector<Piece> batch(int sequences, int context, int count) {
  std::vector<Piece> pieces;
  std::int32_t next_block = 0;
  for (int s = 0; s < sequences; ++s) {
    Piece piece{.first_position = context, .prompt_length = context + count};
    for (int i = 0; i < count; ++i) piece.tokens.push_back((s * 7919 + i * 17 + 13) % 8000);
    for (int used = 0; used < context + count; used += 64) piece.blocks.push_back(next_block++);
    pieces.push_back(std::move(piece));
  }
  return pieces;
}

/// Mean milliseconds per step, over `seconds` of steps.
double mean_step(Engine& engine, const std::vector<Piece>& pieces, double seconds) {
  testing::StepArrays arrays(pieces);
  const auto step = [&] { engine.step(arrays.input(), [](std::int64_t, std::int64_t, const float*) {}); };
  step();
  const auto begin = Clock::now();
  int steps = 0;
  double elapsed = 0.0;
  while (elapsed < seconds) {
    step();
    ++steps;
    elapsed = std::chrono::duration<double>(Clock::now() - begin).count();
  }
  return 1e3 * elapsed / steps;
}

void run(int most_threads, int rounds, double seconds) {
  const std::vector<std::pair<std::string, std::unique_ptr<Competitor>>> competitors = [] {
    std::vector<std::pair<std::string, std::unique_ptr<Competitor>>> all;
    all.emplace_back("alone", nullptr);
    all.emplace_back("beside a process", std::make_unique<Competitor>(-1));
    all.emplace_back("beside one on core 0", std::make_unique<Competitor>(0));
    all.emplace_back("beside one on core 1", std::make_unique<Competitor>(1));
    return all;
  }();
  testing::RandomModel model({.dtype = DType::kBFloat16,
                              .vocab_size = 8000,
                              .num_layers = 12,
                              .shape = {1024, 16, 4, 64},
                              .intermediate_size = 4096,
                              .max_batch_size = 16,
                              .max_num_tokens = 512,
                              .max_seq_len = 2048,
                              .tokens_per_block = 64,
                              .max_rank = 16});
  std::map<int, std::unique_ptr<Engine>> engines;
  for (const int threads : {1, most_threads}) {
    engines[threads] = make_cpu_engine(model.program, std::make_shared<ThreadPool>(threads), "");
    engines[threads]->allocate_kv_blocks(16 * 4);
  }
  const std::vector<std::pair<std::string, std::vector<Piece>>> works = {
      {"decode 1", batch(1, 128, 1)}, {"decode 16", batch(16, 128, 1)}, {"prefill 128", batch(1, 0, 128)}};
  std::map<std::string, std::vector<double>> times;
  for (int round = 0; round < rounds; ++round) {
    for (const auto& [work, pieces] : works) {
      for (const auto& [where, competitor] : competitors) {
        for (const auto& [threads, engine] : engines) {
          if (competitor) competitor->run();
          times[work + ", " + where + ", threads " + std::to_string(threads)].push_back(
              mean_step(*engine, pieces, seconds));
          if (competitor) competitor->rest();
        }
      }
    }
  }
  for (auto& [name, values] : times) {
    std::sort(values.begin(), values.end());
    std::printf("%-50s %8.2f ms  (%.2f to %.2f)\n", name.c_str(), values[values.size() / 2], values.front(),
                values.back());
  }
}

}  // namespace
}  // namespace adaptrt

int main(int argc, char** argv) {
  const int threads = argc > 1 ? std::atoi(argv[1]) : 2;
  const int rounds = argc > 2 ? std::atoi(argv[2]) : 5;
  adaptrt::run(threads, rounds, argc > 3 ? std::atof(argv[3]) : 0.5);
  return 0;
}
