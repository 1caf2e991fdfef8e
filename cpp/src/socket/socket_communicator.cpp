#include "adaptrt/socket/socket_communicator.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "adaptrt/core/error.h"

namespace adaptrt {
namespace {

#ifdef MSG_NOSIGNAL
constexpr int kNoSignal = MSG_NOSIGNAL;

void forbid_signals(int /*socket*/) {}
#else
// macOS has an option of the socket instead.
constexpr int kNoSignal = 0;

void forbid_signals(int socket) {
  const int on = 1;
  setsockopt(socket, SOL_SOCKET, SO_NOSIGPIPE, &on, sizeof(on));
}
#endif

}  // namespace

SocketCommunicator::SocketCommunicator(int socket, std::int32_t rank, std::string peer,
                                       std::optional<std::chrono::milliseconds> time_limit,
                                       std::chrono::milliseconds time_to_explain)
    : socket_(socket),
      rank_(rank),
      peer_(std::move(peer)),
      time_limit_(time_limit),
      time_to_explain_(time_to_explain) {
  int type = 0;
  socklen_t size = sizeof(type);
  if (getsockopt(socket_, SOL_SOCKET, SO_TYPE, &type, &size) != 0 || type != SOCK_STREAM) {
    throw ConfigError("file descriptor " + std::to_string(socket_) + " is no stream socket");
  }
  forbid_signals(socket_);
}

SocketCommunicator::~SocketCommunicator() {
  close(socket_);
}

bool SocketCommunicator::is_lost() const {
  const std::lock_guard lock(mutex_);
  return failure_.has_value();
}

void SocketCommunicator::exchange(std::span<const OutgoingMessage> sent,
                                  std::span<const IncomingMessage> received) {
  throw_if_lost();
  for (const OutgoingMessage& message : sent) send(message.bytes);
  for (const IncomingMessage& message : received) receive(message.bytes, true);
}

void SocketCommunicator::wait_for(const IncomingMessage& message) {
  throw_if_lost();
  receive(message.bytes, false);
}

void SocketCommunicator::lose(const std::string& reason) {
  {
    const std::lock_guard lock(mutex_);
    if (failure_) return;
    failure_ = reason;
  }
  is_known_.notify_all();
  shutdown(socket_, SHUT_RDWR);
}

void SocketCommunicator::send(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t count = ::send(socket_, bytes.data(), bytes.size(), MSG_DONTWAIT | kNoSignal);
    if (count > 0) {
      bytes = bytes.subspan(static_cast<std::size_t>(count));
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      poll_for(POLLOUT, true);
    } else if (errno != EINTR) {
      throw_closed();
    }
  }
}

void SocketCommunicator::receive(std::span<std::byte> bytes, bool has_limit) {
  while (!bytes.empty()) {
    const ssize_t count = recv(socket_, bytes.data(), bytes.size(), MSG_DONTWAIT);
    if (count > 0) {
      bytes = bytes.subspan(static_cast<std::size_t>(count));
    } else if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
      poll_for(POLLIN, has_limit);
    } else if (count == 0 || errno != EINTR) {
      throw_closed();
    }
  }
}

void SocketCommunicator::poll_for(short events, bool has_limit) {
  pollfd waiting{.fd = socket_, .events = events, .revents = 0};
  const int limit = has_limit && time_limit_ ? static_cast<int>(time_limit_->count()) : -1;
  const int ready = poll(&waiting, 1, limit);
  if (ready == 0) {
    throw_lost(peer_ + " has not answered for " + std::to_string(time_limit_->count()) + " ms");
  }
  if (ready < 0 && errno != EINTR) throw_closed();
}

void SocketCommunicator::throw_closed() {
  {
    std::unique_lock lock(mutex_);
    is_known_.wait_for(lock, time_to_explain_, [&] { return failure_.has_value(); });
  }
  throw_lost(peer_ + " has ended");
}

void SocketCommunicator::throw_lost(const std::string& reason) {
  lose(reason);
  throw_if_lost();
  throw EngineError(reason);
}

void SocketCommunicator::throw_if_lost() const {
  const std::lock_guard lock(mutex_);
  if (failure_) throw EngineError(*failure_);
}

}  // namespace adaptrt
