// The communicator over a fake MPI in one process, whose messages arrive when a test says so.

#include "adaptrt/mpi/mpi_communicator.h"

#include <algorithm>
#include <array>
#include <boost/test/unit_test.hpp>
#include <chrono>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "adaptrt/core/error.h"

namespace adaptrt::mpi_communicator_test {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr int kSuccess = 0;
constexpr int kFailure = 15;

/// A message that has started. MPI may access its buffer until it has ended.
struct Message {
  std::byte* bytes = nullptr;
  int size = 0;
  bool is_received = false;
  /// Time at which it completes; nullopt for never.
  std::optional<Clock::time_point> ends_at = {};
  /// Number of MPI_Test calls until it ends, after it was cancelled.
  std::optional<int> tests_left = {};
  bool has_ended = false;
};

struct FakeMpi {
  std::vector<std::unique_ptr<Message>> messages;
  /// Duration of a message; nullopt: it never arrives.
  std::optional<milliseconds> delay = milliseconds(0);
  /// Number of MPI_Test calls that a cancelled receive takes; nullopt: its message is in transit and it never
  /// ends.
  std::optional<int> tests_after_cancel = 3;
  int receives_that_fail = 0;
  bool tests_fail = false;

  void* begin(std::byte* bytes, int size, bool is_received) {
    Message message{.bytes = bytes, .size = size, .is_received = is_received};
    if (delay) message.ends_at = Clock::now() + *delay;
    messages.push_back(std::make_unique<Message>(message));
    return messages.back().get();
  }
  [[nodiscard]] std::ptrdiff_t count_active_receives() const {
    return std::ranges::count_if(
        messages, [](const auto& message) { return message->is_received && !message->has_ended; });
  }
};

FakeMpi fake;

std::shared_ptr<Communicator> make_communicator(milliseconds time_limit) {
  fake = FakeMpi{};
  // The test program itself, which defines the functions below.
  return make_mpi_communicator({.library = "", .handle_bytes = sizeof(void*)}, time_limit);
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

int MPI_Comm_rank(void* /*communicator*/, int* rank) {
  *rank = 0;
  return kSuccess;
}

int MPI_Comm_size(void* /*communicator*/, int* size) {
  *size = 2;
  return kSuccess;
}

int MPI_Isend(const void* /*bytes*/, int size, void* /*type*/, int /*to*/, int /*tag*/,
              void* /*communicator*/, void** request) {
  *request = fake.begin(nullptr, size, false);
  return kSuccess;
}

int MPI_Irecv(void* bytes, int size, void* /*type*/, int /*from*/, int /*tag*/, void* /*communicator*/,
              void** request) {
  if (fake.receives_that_fail > 0) {
    --fake.receives_that_fail;
    return kFailure;
  }
  *request = fake.begin(static_cast<std::byte*>(bytes), size, true);
  return kSuccess;
}

int MPI_Test(void** request, int* done, void* /*status*/) {
  auto& message = *static_cast<Message*>(*request);
  if (fake.tests_fail && !message.tests_left) return kFailure;
  if (message.tests_left && --*message.tests_left == 0) message.has_ended = true;
  if (message.ends_at && Clock::now() >= *message.ends_at) {
    if (message.is_received) std::fill_n(message.bytes, message.size, std::byte{7});
    message.has_ended = true;
  }
  *done = message.has_ended ? 1 : 0;
  return kSuccess;
}

int MPI_Cancel(void** request) {
  static_cast<Message*>(*request)->tests_left = fake.tests_after_cancel;
  return kSuccess;
}

}  // extern "C"
#pragma GCC visibility pop

namespace {

BOOST_AUTO_TEST_SUITE(mpi_communicator)

BOOST_AUTO_TEST_CASE(an_exchange_returns_when_all_messages_are_there) {
  const auto communicator = make_communicator(milliseconds(10000));
  BOOST_TEST(communicator->rank() == 0);
  BOOST_TEST(communicator->size() == 2);
  fake.delay = milliseconds(20);
  std::array<std::byte, 4> received{};
  const std::array<OutgoingMessage, 1> sent{{{1, received}}};
  const std::array<IncomingMessage, 1> incoming{{{1, received}}};
  communicator->exchange(sent, incoming);
  BOOST_TEST((received == std::array<std::byte, 4>{std::byte{7}, std::byte{7}, std::byte{7}, std::byte{7}}));
  BOOST_TEST(!communicator->is_lost());
}

// Rank 0 is silent as long as there are no requests.
BOOST_AUTO_TEST_CASE(waiting_for_a_command_has_no_limit_of_time) {
  const auto communicator = make_communicator(milliseconds(20));
  fake.delay = milliseconds(300);
  std::array<std::byte, 1> received{};
  communicator->wait_for({1, received});
  BOOST_TEST((received[0] == std::byte{7}));
  BOOST_TEST(!communicator->is_lost());
}

BOOST_AUTO_TEST_CASE(receives_have_ended_when_a_silent_rank_is_given_up) {
  const auto communicator = make_communicator(milliseconds(20));
  fake.delay.reset();
  {
    std::vector<std::byte> first(8);
    std::vector<std::byte> second(8);
    const std::array<OutgoingMessage, 1> sent{{{1, first}}};
    const std::array<IncomingMessage, 2> incoming{{{1, first}, {1, second}}};
    BOOST_CHECK_EXCEPTION(communicator->exchange(sent, incoming), EngineError, [](const EngineError& error) {
      return std::string(error.what()) == "rank 1 of 2 has not answered for 20 ms";
    });
    BOOST_TEST(fake.count_active_receives() == 0);
  }
  BOOST_TEST(communicator->is_lost());
  std::array<std::byte, 1> more{};
  BOOST_CHECK_THROW(communicator->wait_for({1, more}), EngineError);
  BOOST_TEST(fake.messages.size() == 3U);
}

BOOST_AUTO_TEST_CASE(receives_have_ended_when_mpi_fails) {
  const auto communicator = make_communicator(milliseconds(10000));
  fake.delay.reset();
  std::vector<std::byte> bytes(8);
  const std::array<IncomingMessage, 1> incoming{{{1, bytes}}};
  (void)communicator->begin_exchange({}, incoming);
  fake.receives_that_fail = 1;
  BOOST_CHECK_EXCEPTION(
      (void)communicator->begin_exchange({}, incoming), EngineError, [](const EngineError& error) {
        return std::string(error.what()) == "MPI_Irecv with rank 1 of 2 failed with MPI error 15";
      });
  BOOST_TEST(fake.count_active_receives() == 0);
  BOOST_TEST(communicator->is_lost());
}

BOOST_AUTO_TEST_CASE(receives_have_ended_when_a_test_fails) {
  const auto communicator = make_communicator(milliseconds(10000));
  fake.delay.reset();
  std::vector<std::byte> bytes(8);
  const std::array<IncomingMessage, 1> incoming{{{1, bytes}}};
  (void)communicator->begin_exchange({}, incoming);
  fake.tests_fail = true;
  BOOST_CHECK_THROW(communicator->exchange({}, incoming), EngineError);
  BOOST_TEST(communicator->is_lost());
}

// Its message is in transit, and the sending rank is gone.
BOOST_AUTO_TEST_CASE(a_receive_that_does_not_end_is_given_up_all_the_same) {
  const auto communicator = make_communicator(milliseconds(20));
  fake.delay.reset();
  fake.tests_after_cancel.reset();
  std::vector<std::byte> bytes(8);
  const std::array<IncomingMessage, 1> incoming{{{1, bytes}}};
  BOOST_CHECK_THROW(communicator->exchange({}, incoming), EngineError);
  BOOST_TEST(communicator->is_lost());
}

BOOST_AUTO_TEST_CASE(a_library_that_cannot_be_loaded_is_named) {
  BOOST_CHECK_EXCEPTION(
      make_mpi_communicator({.library = "/nowhere/libmpi.so", .handle_bytes = sizeof(void*)},
                            milliseconds(1)),
      ConfigError, [](const ConfigError& error) {
        const std::string text = error.what();
        return text.starts_with("MPI: ") && text.find("/nowhere/libmpi.so") != std::string::npos &&
               text.find("No such file") != std::string::npos;
      });
}

BOOST_AUTO_TEST_CASE(a_library_that_is_not_mpi_is_named_with_the_missing_function) {
  BOOST_CHECK_EXCEPTION(
      make_mpi_communicator({.library = "libm.so.6", .handle_bytes = sizeof(void*)}, milliseconds(1)),
      ConfigError, [](const ConfigError& error) {
        return std::string(error.what()).starts_with("MPI: libm.so.6 has no MPI_");
      });
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::mpi_communicator_test
