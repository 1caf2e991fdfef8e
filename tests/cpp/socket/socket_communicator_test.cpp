// Two ends of a socket in threads: messages arrive, and a lost process is reported.

#include "adaptrt/socket/socket_communicator.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <boost/test/unit_test.hpp>
#include <chrono>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "adaptrt/core/error.h"

namespace adaptrt::testing::socket_communicator_test {
namespace {

using std::chrono::milliseconds;

struct Pair {
  explicit Pair(milliseconds limit) {
    std::array<int, 2> ends{};
    BOOST_TEST_REQUIRE(socketpair(AF_UNIX, SOCK_STREAM, 0, ends.data()) == 0);
    first = std::make_unique<SocketCommunicator>(ends[0], 0, "the second", limit, milliseconds(5000));
    second = std::make_unique<SocketCommunicator>(ends[1], 1, "the first", std::nullopt, milliseconds(0));
  }
  std::unique_ptr<SocketCommunicator> first;
  std::unique_ptr<SocketCommunicator> second;
};

std::vector<std::byte> pattern(std::size_t size) {
  std::vector<std::byte> bytes(size);
  for (std::size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>(i * 7 % 251);
  return bytes;
}

auto says(const std::string& text) {
  return [text](const EngineError& error) { return error.what() == text; };
}

void send(SocketCommunicator& from, std::int32_t to, std::span<const std::byte> bytes) {
  const OutgoingMessage message{to, bytes};
  from.exchange({&message, 1}, {});
}

BOOST_AUTO_TEST_SUITE(socket_communicator)

BOOST_AUTO_TEST_CASE(a_descriptor_that_is_no_socket_stays_the_callers) {
  std::array<int, 2> ends{};
  BOOST_TEST_REQUIRE(pipe(ends.data()) == 0);
  BOOST_CHECK_THROW(SocketCommunicator(ends[0], 0, "the second", std::nullopt, milliseconds(0)), ConfigError);
  for (const int end : ends) BOOST_TEST(close(end) == 0);
}

BOOST_AUTO_TEST_CASE(messages_longer_than_the_socket_holds_arrive_in_order) {
  Pair pair(milliseconds(10000));
  const auto large = pattern(5'000'000);
  const auto small = pattern(3);
  std::vector<std::byte> got_large(large.size());
  std::vector<std::byte> got_small(small.size());
  std::jthread other([&] {
    pair.second->wait_for({0, got_small});
    pair.second->wait_for({0, got_large});
    send(*pair.second, 0, large);
  });
  const std::vector<OutgoingMessage> sent{{1, small}, {1, large}};
  std::vector<std::byte> answer(large.size());
  const IncomingMessage wanted{1, answer};
  pair.first->exchange(sent, {&wanted, 1});
  other.join();
  BOOST_TEST((got_small == small));
  BOOST_TEST((got_large == large));
  BOOST_TEST((answer == large));
  BOOST_TEST(!pair.first->is_lost());
  BOOST_TEST(pair.first->rank() == 0);
  BOOST_TEST(pair.second->rank() == 1);
}

BOOST_AUTO_TEST_CASE(a_silent_process_is_lost_for_good) {
  Pair pair(milliseconds(30));
  std::array<std::byte, 1> byte{};
  const IncomingMessage wanted{1, byte};
  BOOST_CHECK_EXCEPTION(pair.first->exchange({}, {&wanted, 1}), EngineError,
                        says("the second has not answered for 30 ms"));
  BOOST_TEST(pair.first->is_lost());
  BOOST_CHECK_EXCEPTION(pair.first->wait_for(wanted), EngineError,
                        says("the second has not answered for 30 ms"));
}

BOOST_AUTO_TEST_CASE(a_process_that_takes_nothing_is_lost) {
  Pair pair(milliseconds(30));
  BOOST_CHECK_EXCEPTION(send(*pair.first, 1, pattern(5'000'000)), EngineError,
                        says("the second has not answered for 30 ms"));
}

BOOST_AUTO_TEST_CASE(a_wait_ends_with_the_reason_that_another_thread_knows) {
  Pair pair(milliseconds(10000));
  std::jthread watcher([&] {
    std::this_thread::sleep_for(milliseconds(20));
    pair.first->lose("rank 3 has ended");
    pair.first->lose("and so has rank 0");
  });
  std::array<std::byte, 1> byte{};
  BOOST_CHECK_EXCEPTION(pair.first->wait_for({1, byte}), EngineError, says("rank 3 has ended"));
  BOOST_CHECK_EXCEPTION(send(*pair.first, 1, byte), EngineError, says("rank 3 has ended"));
}

BOOST_AUTO_TEST_CASE(the_reason_may_come_behind_the_end) {
  Pair pair(milliseconds(10000));
  pair.second.reset();
  std::jthread watcher([&] {
    std::this_thread::sleep_for(milliseconds(20));
    pair.first->lose("rank 0 was killed");
  });
  std::array<std::byte, 1> byte{};
  BOOST_CHECK_EXCEPTION(pair.first->wait_for({1, byte}), EngineError, says("rank 0 was killed"));
}

BOOST_AUTO_TEST_CASE(without_a_reason_the_end_is_told) {
  Pair pair(milliseconds(10000));
  pair.first.reset();
  std::array<std::byte, 1> byte{};
  BOOST_CHECK_EXCEPTION(pair.second->wait_for({0, byte}), EngineError, says("the first has ended"));
  BOOST_TEST(pair.second->is_lost());
}

BOOST_AUTO_TEST_CASE(messages_sent_before_the_end_arrive) {
  Pair pair(milliseconds(10000));
  send(*pair.first, 1, pattern(100));
  pair.first->lose("shut down");
  std::vector<std::byte> bytes(100);
  pair.second->wait_for({0, bytes});
  BOOST_TEST((bytes == pattern(100)));
}

BOOST_AUTO_TEST_CASE(other_files_are_refused) {
  const int file = open("/dev/null", O_RDONLY);
  BOOST_CHECK_THROW(SocketCommunicator(file, 0, "nobody", std::nullopt, milliseconds(0)), ConfigError);
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::testing::socket_communicator_test
