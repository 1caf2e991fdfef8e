#include "state_memory.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <string>

#include "adaptrt/core/error.h"

namespace adaptrt {
namespace {

/// Bytes that one thread copies or clears at a time.
constexpr std::size_t kPieceBytes = std::size_t{1} << 18;

/// Calls body(first byte, bytes) for pieces of `bytes` bytes.
template <class Body>
void for_each_piece(std::size_t bytes, ThreadPool& threads, const Body& body) {
  const auto pieces = static_cast<std::int64_t>((bytes + kPieceBytes - 1) / kPieceBytes);
  threads.parallel_for(pieces, 1, [&](std::int64_t begin, std::int64_t end, int) {
    const std::size_t first = static_cast<std::size_t>(begin) * kPieceBytes;
    body(first, std::min(static_cast<std::size_t>(end) * kPieceBytes, bytes) - first);
  });
}

}  // namespace

void StateMemory::allocate(std::int32_t num_slots) {
  if (num_slots_ != 0) throw ConfigError("the states were allocated before");
  if (num_slots < 1) {
    throw ConfigError("num_slots is " + std::to_string(num_slots) + "; expected at least 1");
  }
  std::size_t bytes = 0;
  const bool overflow = __builtin_mul_overflow(slot_bytes(), static_cast<std::size_t>(num_slots), &bytes);
  try {
    if (overflow) throw std::bad_alloc();
    memory_ = HugeArray(bytes);
  } catch (const std::bad_alloc&) {
    throw ConfigError("cannot allocate the states of " + std::to_string(num_slots) + " sequences of " +
                      std::to_string(slot_bytes()) + " bytes each");
  }
  num_slots_ = num_slots;
}

void StateMemory::copy(std::span<const std::int32_t> from, std::span<const std::int32_t> to,
                       ThreadPool& threads) {
  for (std::size_t i = 0; i < from.size(); ++i) {
    const std::byte* source = slot(from[i]);
    std::byte* target = slot(to[i]);
    for_each_piece(slot_bytes(), threads, [&](std::size_t first, std::size_t bytes) {
      std::memcpy(target + first, source + first, bytes);
    });
  }
}

void StateMemory::clear(std::int32_t slot_index, ThreadPool& threads) {
  std::byte* target = slot(slot_index);
  for_each_piece(slot_bytes(), threads,
                 [&](std::size_t first, std::size_t bytes) { std::memset(target + first, 0, bytes); });
}

void StateMemory::require_slot(std::int32_t slot_index, std::size_t bytes) const {
  if (slot_index >= 0 && slot_index < num_slots_ && bytes == slot_bytes()) return;
  throw EngineError("slot " + std::to_string(slot_index) + " of " + std::to_string(num_slots_) + ", and " +
                    std::to_string(bytes) + " bytes of states; expected " + std::to_string(slot_bytes()));
}

void StateMemory::read(std::int32_t slot_index, std::span<std::byte> bytes) const {
  require_slot(slot_index, bytes.size());
  std::memcpy(bytes.data(), slot(slot_index), slot_bytes());
}

void StateMemory::write(std::int32_t slot_index, std::span<const std::byte> bytes) {
  require_slot(slot_index, bytes.size());
  std::memcpy(slot(slot_index), bytes.data(), slot_bytes());
}

}  // namespace adaptrt
