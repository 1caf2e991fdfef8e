#pragma once

// Requests that are computed alone, and in crowds whose logits must have the same bits.

#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "adaptrt/cpu/cpu_engine.h"
#include "cpu/random_model.h"
#include "cpu/step_arrays.h"
#include "emulated_tiles/kernel_tables.h"
#include "support/sanitized.h"

namespace adaptrt::testing::crowds {

inline constexpr std::int32_t kNumBlocks = 160;

/// A model and its adapters; its engines differ only in the number of threads.
struct Served {
  Served(ModelOptions options, std::string kernels_name) : model(options), kernels(std::move(kernels_name)) {
    adapters.push_back(model.adapter(11, false));
    adapters.push_back(model.adapter(12, true));
    adapters.push_back(model.adapter(13, true, 1));
    adapters.push_back(model.adapter(14, false, options.max_rank));
  }

  [[nodiscard]] std::unique_ptr<Engine> engine(int threads) const {
    auto made = make_cpu_engine(model.program, std::make_shared<ThreadPool>(threads), kernel_table(kernels));
    made->allocate_kv_blocks(kNumBlocks);
    return made;
  }

  /// Returns the adapter of request i; nullptr for none.
  [[nodiscard]] const DeviceAdapter* adapter_of(std::size_t i) const {
    return i % 5 == 4 ? nullptr : &adapters[i % 5];
  }

  RandomModel model;
  std::string kernels;
  std::vector<DeviceAdapter> adapters;
};

/// A request whose tokens are all known, and its progress.
struct Request {
  Request(std::vector<std::int32_t> all, std::vector<std::int32_t> own_blocks,
          const DeviceAdapter* own_adapter)
      : tokens(std::move(all)), blocks(std::move(own_blocks)), adapter(own_adapter) {}

  /// Returns the next `count` tokens as a piece of a step.
  [[nodiscard]] Piece next(std::size_t count) const {
    const auto begin = tokens.begin() + static_cast<std::ptrdiff_t>(done);
    return {.tokens = {begin, begin + static_cast<std::ptrdiff_t>(count)},
            .first_position = static_cast<std::int32_t>(done),
            .prompt_length = static_cast<std::int32_t>(tokens.size()),
            .blocks = blocks,
            .adapter = adapter,
            .adapter_from = adapter_from};
  }

  std::vector<std::int32_t> tokens;
  std::vector<std::int32_t> blocks;
  const DeviceAdapter* adapter;
  std::int32_t adapter_from = 0;
  std::size_t done = 0;
  std::vector<float> logits;
};

/// Returns random tokens of a model.
inline std::vector<std::int32_t> random_tokens(const Served& served, std::size_t count, Random* random) {
  std::vector<std::int32_t> tokens(count);
  for (auto& token : tokens) {
    token = static_cast<std::int32_t>(random->below(served.model.program.vocab_size));
  }
  return tokens;
}

inline std::vector<Request> make_requests(const Served& served, std::size_t count, std::int64_t longest,
                                          Random* random) {
  const auto& program = served.model.program;
  std::vector<std::int32_t> blocks(kNumBlocks);
  std::iota(blocks.begin(), blocks.end(), 0);
  for (std::size_t i = blocks.size() - 1; i > 0; --i) {
    std::swap(blocks[i], blocks[static_cast<std::size_t>(random->below(static_cast<std::int64_t>(i) + 1))]);
  }
  std::vector<Request> requests;
  for (std::size_t i = 0; i < count; ++i) {
    std::vector<std::int32_t> tokens =
        random_tokens(served, static_cast<std::size_t>(1 + random->below(longest)), random);
    std::vector<std::int32_t> own;
    for (std::size_t used = 0; used < tokens.size();
         used += static_cast<std::size_t>(program.tokens_per_block)) {
      own.push_back(blocks.back());
      blocks.pop_back();
    }
    requests.emplace_back(std::move(tokens), std::move(own), served.adapter_of(i));
    // Every second adapter is active only from some position of its request on.
    Request& made = requests.back();
    if (i % 2 == 0) made.adapter_from = static_cast<std::int32_t>(made.tokens.size() / 2);
  }
  return requests;
}

/// Computes logits of all positions of each request, alone, in one chunk, with one thread.
inline void run_alone(const Served& served, std::vector<Request>* requests) {
  for (auto& request : *requests) {
    const auto engine = served.engine(1);
    const StepArrays arrays({request.next(request.tokens.size())});
    request.logits = logits_of(engine.get(), arrays.input());
  }
}

/// Runs all requests together in random chunks and batches, and checks each row of logits.
inline void check_crowd(const Served& served, std::vector<Request> requests, int threads, Random* random) {
  const auto engine = served.engine(threads);
  const auto vocab = static_cast<std::size_t>(served.model.program.vocab_size);
  while (true) {
    std::vector<Request*> chosen;
    std::vector<Piece> pieces;
    std::vector<std::size_t> counts;
    for (auto& request : requests) {
      const std::size_t left = request.tokens.size() - request.done;
      if (left == 0 || random->below(3) == 0) continue;
      const std::size_t count = random->below(2) == 0
                                    ? 1
                                    : 1 + static_cast<std::size_t>(random->below(
                                              std::min<std::int64_t>(40, static_cast<std::int64_t>(left))));
      chosen.push_back(&request);
      counts.push_back(std::min(count, left));
      pieces.push_back(request.next(counts.back()));
    }
    if (pieces.empty()) {
      if (std::all_of(requests.begin(), requests.end(),
                      [](const Request& r) { return r.done == r.tokens.size(); })) {
        return;
      }
      continue;
    }
    const StepArrays arrays(pieces);
    const auto logits = logits_of(engine.get(), arrays.input());
    std::size_t row = 0;
    for (std::size_t i = 0; i < chosen.size(); ++i) {
      const float* expected = chosen[i]->logits.data() + chosen[i]->done * vocab;
      BOOST_TEST_REQUIRE(
          std::memcmp(logits.data() + row * vocab, expected, counts[i] * vocab * sizeof(float)) == 0,
          "threads " << threads << " position " << chosen[i]->done << " count " << counts[i]);
      chosen[i]->done += counts[i];
      row += counts[i];
    }
  }
}

// Tokens of the longest request, and the numbers of threads for crowds. A step uses memory and threads in the
// same way with fewer.
inline constexpr std::int64_t kLongestRequest = sanitized(45, 150);
inline const std::vector<int> kThreadCounts = kSanitizedPart ? std::vector{3} : std::vector{2, 3};
inline const std::vector<int> kMoreThreadCounts = kSanitizedPart ? std::vector{3} : std::vector{1, 2, 3, 4};

inline void check_invariance(ModelOptions options, const std::string& kernels,
                             const std::vector<int>& thread_counts = kThreadCounts) {
  options.max_rank = 9;
  const Served served(options, kernels);
  Random random(options.seed + 100);
  auto requests = make_requests(served, 7, kLongestRequest, &random);
  run_alone(served, &requests);
  for (const int threads : thread_counts) check_crowd(served, requests, threads, &random);
}

}  // namespace adaptrt::testing::crowds
