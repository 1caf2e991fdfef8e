#include "rank_commands.h"

#include <algorithm>

#include "adaptrt/engine/acked_send.h"

namespace adaptrt {

RowSink guarded(const RowSink& sink, std::exception_ptr* refusal) {
  if (!sink) return {};
  return [&sink, refusal](std::int64_t first_row, std::int64_t rows, const float* values) {
    if (*refusal) return;
    try {
      sink(first_row, rows, values);
    } catch (...) {
      *refusal = std::current_exception();
    }
  };
}

MessageWriter& RankCommands::new_body() {
  body_.clear();
  return body_;
}

void RankCommands::send(CommandKind kind) {
  const CommandHeader header{.kind = kind, .body_bytes = body_.bytes().size()};
  send_to_others(std::as_bytes(std::span(&header, 1)));
  if (header.body_bytes > 0) send_to_others(body_.bytes());
}

void RankCommands::send_load(const AdapterLoad& load) {
  add_load(load, &new_body());
  send(CommandKind::kLoadAdapter);
  if (load.adapter->bytes() > 0) send_to_others({load.adapter->data(), load.adapter->bytes()});
}

void RankCommands::dismiss() noexcept {
  if (!std::exchange(has_others_, false)) return;
  try {
    body_.clear();
    send(CommandKind::kEnd);
  } catch (const std::exception&) {
    // A rank is lost; the failing step has already reported it.
  }
}

std::optional<Failure> RankCommands::receive_reply(std::int32_t rank) {
  CommandReply reply;
  receive(rank, std::as_writable_bytes(std::span(&reply, 1)));
  return read_failure(rank, reply);
}

std::optional<Failure> RankCommands::wait_for_reply(std::int32_t rank) {
  CommandReply reply;
  communicator_->wait_for({rank, std::as_writable_bytes(std::span(&reply, 1))});
  return read_failure(rank, reply);
}

std::optional<Failure> RankCommands::read_failure(std::int32_t rank, const CommandReply& reply) {
  if (reply.outcome == Outcome::kDone) return std::nullopt;
  Failure failure{reply.outcome, std::string(reply.message_bytes, '\0')};
  receive(rank, std::as_writable_bytes(std::span(failure.message)));
  return failure;
}

void RankCommands::receive_rows(std::int32_t rank, std::size_t count, std::int64_t width, std::size_t slice,
                                bool tells, const RowSink& sink) {
  for (std::size_t first = 0; first < count; first += slice) {
    const std::size_t rows = std::min(slice, count - first);
    received_.resize(rows * static_cast<std::size_t>(width));
    receive(rank, std::as_writable_bytes(std::span(received_)));
    if (tells) acknowledge(rank, *communicator_);
    sink(static_cast<std::int64_t>(first), static_cast<std::int64_t>(rows), received_.data());
  }
}

void RankCommands::send_to_others(std::span<const std::byte> bytes) {
  sent_.clear();
  for (std::int32_t rank = 1; rank < communicator_->size(); ++rank) sent_.push_back({rank, bytes});
  communicator_->exchange(sent_, {});
}

void RankCommands::receive(std::int32_t rank, std::span<std::byte> bytes) {
  const IncomingMessage message{rank, bytes};
  communicator_->exchange({}, {&message, 1});
}

}  // namespace adaptrt
