#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "adaptrt/core/error.h"

namespace adaptrt {

/// Commands of rank 0.
enum class CommandKind : std::uint32_t {
  kAllocateKv = 1,
  kAllocateCrossKv,
  kAllocateStates,
  kMakePages,
  kLoadAdapter,
  kStep,
  kEnd,
};

/// Precedes the body of each command.
struct CommandHeader {
  CommandKind kind = CommandKind::kEnd;
  std::uint32_t reserved = 0;
  std::uint64_t body_bytes = 0;
};

/// The body of a command: numbers, and lists preceded by their length, as raw bytes.
class MessageWriter {
 public:
  template <class Number>
  void add(Number value) {
    static_assert(std::is_trivially_copyable_v<Number>);
    append(&value, sizeof(value));
  }
  template <class Number>
  void add_list(std::span<const Number> values) {
    static_assert(std::is_trivially_copyable_v<Number>);
    add(static_cast<std::uint64_t>(values.size()));
    append(values.data(), values.size_bytes());
  }
  void clear() { bytes_.clear(); }
  [[nodiscard]] std::span<const std::byte> bytes() const { return bytes_; }

 private:
  void append(const void* data, std::size_t size) {
    if (size == 0) return;
    const std::size_t end = bytes_.size();
    bytes_.resize(end + size);
    std::memcpy(bytes_.data() + end, data, size);
  }
  std::vector<std::byte> bytes_;
};

/// Reads the data of a MessageWriter. Throws EngineError at the end of the bytes.
class MessageReader {
 public:
  explicit MessageReader(std::span<const std::byte> bytes) : bytes_(bytes) {}

  template <class Number>
  [[nodiscard]] Number number() {
    Number value;
    std::memcpy(&value, take(sizeof(value)).data(), sizeof(value));
    return value;
  }
  template <class Number>
  [[nodiscard]] std::vector<Number> list() {
    const auto count = number<std::uint64_t>();
    if (count > bytes_.size() / sizeof(Number)) throw EngineError("a command of rank 0 is cut off");
    std::vector<Number> values(count);
    const auto from = take(count * sizeof(Number));
    if (count > 0) std::memcpy(values.data(), from.data(), from.size());
    return values;
  }

 private:
  std::span<const std::byte> take(std::size_t size) {
    if (size > bytes_.size()) throw EngineError("a command of rank 0 is cut off");
    const auto taken = bytes_.first(size);
    bytes_ = bytes_.subspan(size);
    return taken;
  }
  std::span<const std::byte> bytes_;
};

/// How a command ended. After a failure the error's text follows the reply.
enum class Outcome : std::uint32_t { kDone = 0, kConfigError, kStepError, kEngineError };

/// A rank's reply to a command that rank 0 waits for.
struct CommandReply {
  Outcome outcome = Outcome::kDone;
  std::uint32_t message_bytes = 0;  ///< length of the text after it
};

/// The content of a reply that is not kDone.
struct Failure {
  Outcome outcome = Outcome::kEngineError;
  std::string message;
};

}  // namespace adaptrt
