#include "adaptrt/core/thread_pool.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <vector>

namespace adaptrt::thread_pool_test {
namespace {

BOOST_AUTO_TEST_SUITE(thread_pool)

BOOST_DATA_TEST_CASE(every_index_is_visited_once,
                     boost::unit_test::data::make({1, 2, 4}) * boost::unit_test::data::make({0, 1, 7, 1000}) *
                         boost::unit_test::data::make({1, 3, 1000}),
                     num_threads, count, grain) {
  ThreadPool pool(num_threads);
  std::vector<std::atomic<int>> visits(static_cast<std::size_t>(count));
  std::atomic<bool> in_range{true};
  pool.parallel_for(count, grain, [&](std::int64_t begin, std::int64_t end, int thread) {
    if (thread < 0 || thread >= num_threads || end - begin > grain || begin >= end) in_range = false;
    for (std::int64_t i = begin; i < end; ++i) ++visits[static_cast<std::size_t>(i)];
  });
  BOOST_TEST(in_range);
  for (const auto& visit : visits) BOOST_TEST(visit == 1);
}

// Each thread's next chunk is the announced one, unless none was announced.
BOOST_DATA_TEST_CASE(a_body_that_looks_ahead_is_told_the_next_chunk,
                     boost::unit_test::data::make({1, 2, 4}) * boost::unit_test::data::make({1, 7, 1000}) *
                         boost::unit_test::data::make({1, 3, 1000}),
                     num_threads, count, grain) {
  struct alignas(64) Told {
    std::int64_t next;
    int chunks_ahead = 0;
  };
  ThreadPool pool(num_threads);
  std::vector<std::atomic<int>> visits(static_cast<std::size_t>(count));
  std::vector<Told> told(static_cast<std::size_t>(num_threads), Told{count});
  std::atomic<bool> as_told{true};
  pool.parallel_for(count, grain, [&](const ThreadPool::Chunk& chunk, int thread) {
    Told& mine = told[static_cast<std::size_t>(thread)];
    if (mine.next != count && mine.next != chunk.begin) as_told = false;
    if (chunk.next != count) ++mine.chunks_ahead;
    mine.next = chunk.next;
    for (std::int64_t i = chunk.begin; i < chunk.end; ++i) ++visits[static_cast<std::size_t>(i)];
  });
  BOOST_TEST(as_told);
  for (const auto& visit : visits) BOOST_TEST(visit == 1);
  int chunks_ahead = 0;
  for (const Told& mine : told) {
    BOOST_TEST(mine.next == count);
    chunks_ahead += mine.chunks_ahead;
  }
  const std::int64_t chunks = (count + grain - 1) / grain;
  if (num_threads == 1) BOOST_TEST(chunks_ahead == chunks - 1);
  // If there are few chunks, workers that are about to yield their cores may take all of them.
  if (chunks > 300) BOOST_TEST(chunks_ahead > 0);
}

BOOST_AUTO_TEST_CASE(loops_follow_each_other_and_see_what_the_one_before_wrote) {
  ThreadPool pool(4);
  // The values are not atomic: a loop's writes must be visible to the next loop in any thread.
  std::vector<std::int64_t> values(64, 0);
  for (int loop = 0; loop < 2000; ++loop) {
    pool.parallel_for(64, 1 + loop % 5, [&](std::int64_t begin, std::int64_t end, int) {
      for (std::int64_t i = begin; i < end; ++i) {
        values[static_cast<std::size_t>(i)] = values[static_cast<std::size_t>(i)] + i;
      }
    });
  }
  for (std::int64_t i = 0; i < 64; ++i) BOOST_TEST(values[static_cast<std::size_t>(i)] == 2000 * i);
}

BOOST_AUTO_TEST_CASE(a_worker_that_lets_others_have_its_core_leaves_no_chunk_behind) {
  // More threads than cores, and chunks longer than the interval at which workers yield.
  ThreadPool pool(static_cast<int>(std::thread::hardware_concurrency()) + 2);
  std::atomic<int> visits{0};
  for (int loop = 0; loop < 3; ++loop) {
    pool.parallel_for(16, 1, [&](std::int64_t, std::int64_t, int) {
      const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(2);
      while (std::chrono::steady_clock::now() < end) {
      }
      ++visits;
    });
    BOOST_TEST(visits == 16 * (loop + 1));
  }
}

BOOST_AUTO_TEST_CASE(sleeping_workers_wake_for_a_loop) {
  ThreadPool pool(3);
  for (int loop = 0; loop < 5; ++loop) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    std::atomic<int> arrived{0};
    // Ends only when three threads are in it at the same time.
    pool.parallel_for(3, 1, [&](std::int64_t, std::int64_t, int) {
      ++arrived;
      while (arrived < 3) std::this_thread::yield();
    });
    BOOST_TEST(arrived == 3);
  }
}

BOOST_AUTO_TEST_CASE(a_held_up_worker_holds_up_its_own_chunk_only) {
  ThreadPool pool(2);
  std::atomic<int> done{0};
  // The waiting chunk ends only after all others are done, so the other thread must take all of them.
  pool.parallel_for(100, 1, [&](std::int64_t begin, std::int64_t, int) {
    if (begin == 0) {
      while (done < 99) std::this_thread::yield();
    }
    ++done;
  });
  BOOST_TEST(done == 100);
}

BOOST_DATA_TEST_CASE(an_exception_reaches_the_caller_and_the_pool_goes_on,
                     boost::unit_test::data::make({1, 4}), num_threads) {
  ThreadPool pool(num_threads);
  for (int loop = 0; loop < 50; ++loop) {
    BOOST_CHECK_THROW(pool.parallel_for(100, 1,
                                        [](std::int64_t begin, std::int64_t, int) {
                                          if (begin % 10 == 3) throw std::runtime_error("chunk");
                                        }),
                      std::runtime_error);
    std::atomic<int> visits{0};
    pool.parallel_for(100, 1, [&](std::int64_t, std::int64_t, int) { ++visits; });
    BOOST_TEST(visits == 100);
  }
}

// Sanitizers reserve more memory than any limit allows.
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
/// True if the process cannot reserve `bytes` of address space. qemu ignores the limits that its programs
/// set.
bool is_beyond_limit(std::size_t bytes) {
  void* reserved = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) return true;
  munmap(reserved, bytes);
  return false;
}

BOOST_AUTO_TEST_CASE(a_thread_that_cannot_be_made_leaves_none_behind) {
  constexpr rlim_t kLimit = rlim_t{1} << 30;
  constexpr int kNoLimits = 2;
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);  // instead of waiting indefinitely
    const rlimit memory{.rlim_cur = kLimit, .rlim_max = kLimit};
    setrlimit(RLIMIT_AS, &memory);
    if (!is_beyond_limit(2 * kLimit)) _exit(kNoLimits);
    try {
      const ThreadPool pool(10'000);
    } catch (const std::system_error&) {
      _exit(0);
    }
    _exit(1);
  }
  int status = -1;
  BOOST_TEST(waitpid(child, &status, 0) == child);
  if (WIFEXITED(status) && WEXITSTATUS(status) == kNoLimits) {
    BOOST_TEST_MESSAGE("skipped: this process cannot limit its memory");
    return;
  }
  BOOST_TEST(status == 0);
}
#endif

BOOST_AUTO_TEST_CASE(fewer_than_one_thread_is_one) {
  BOOST_TEST(ThreadPool(0).num_threads() == 1);
}

BOOST_AUTO_TEST_CASE(busy_time_is_measured_on_request_and_taken_once) {
  using Clock = std::chrono::steady_clock;
  ThreadPool pool(3);
  const auto spin = [](std::int64_t, std::int64_t, int) {
    const auto end = Clock::now() + std::chrono::microseconds(200);
    while (Clock::now() < end) {
    }
  };
  BOOST_TEST(pool.take_busy_seconds().empty());
  pool.measure_busy_time();
  pool.parallel_for(20, 1, spin);
  double busy = 0.0;
  for (const double seconds : pool.take_busy_seconds()) busy += seconds;
  BOOST_TEST(busy >= 20 * 200e-6);
  pool.parallel_for(1, 1, spin);  // runs in the calling thread
  const auto alone = pool.take_busy_seconds();
  BOOST_REQUIRE(alone.size() == 3);
  BOOST_TEST(alone[0] >= 200e-6);
  BOOST_TEST(alone[1] + alone[2] == 0.0);
  BOOST_TEST(pool.take_busy_seconds() == std::vector<double>(3, 0.0), boost::test_tools::per_element());
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::thread_pool_test
