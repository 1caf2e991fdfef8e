#include "support/allocations.h"

#include <dlfcn.h>
#include <execinfo.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <sstream>
#include <string>

namespace {

constexpr int kMostCalls = 12;

thread_local std::int64_t thread_allocations = 0;
thread_local bool is_spared = false;
std::atomic<std::int64_t> num_to_fail{0};
std::atomic<bool> is_watched{false};
std::atomic<std::int64_t> watched_allocations{0};
std::array<void*, kMostCalls> first_calls_made{};
int num_first_calls = 0;

/// Returns nullptr if there is no memory.
void* try_allocate(std::size_t bytes) noexcept {
  ++thread_allocations;
  if (is_watched && watched_allocations.fetch_add(1) == 0) {
    num_first_calls = backtrace(first_calls_made.data(), kMostCalls);
  }
  if (num_to_fail > 0 && !is_spared && num_to_fail.fetch_sub(1) > 0) return nullptr;
  return std::malloc(bytes != 0 ? bytes : 1);
}

void* allocate(std::size_t bytes) {
  void* memory = try_allocate(bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

// This is not inlined; otherwise GCC 12 reports that the pointer from operator new is passed to free().
[[gnu::noinline]] void release(void* memory) noexcept {
  std::free(memory);
}

std::string output_of(const std::string& command) {
  FILE* pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) return command;
  std::string text;
  std::array<char, 4096> piece;
  while (std::fgets(piece.data(), piece.size(), pipe) != nullptr) text += piece.data();
  pclose(pipe);
  return text;
}

}  // namespace

void* operator new(std::size_t bytes) {
  return allocate(bytes);
}
void* operator new[](std::size_t bytes) {
  return allocate(bytes);
}
// The nothrow operators are replaced too: AddressSanitizer's versions use memory that must not be freed here.
void* operator new(std::size_t bytes, const std::nothrow_t& /*tag*/) noexcept {
  return try_allocate(bytes);
}
void* operator new[](std::size_t bytes, const std::nothrow_t& /*tag*/) noexcept {
  return try_allocate(bytes);
}
void operator delete(void* memory) noexcept {
  release(memory);
}
void operator delete[](void* memory) noexcept {
  release(memory);
}
void operator delete(void* memory, std::size_t /*bytes*/) noexcept {
  release(memory);
}
void operator delete[](void* memory, std::size_t /*bytes*/) noexcept {
  release(memory);
}

namespace adaptrt::testing {

std::int64_t allocations_of_this_thread() {
  return thread_allocations;
}

AllocationWatch::AllocationWatch() {
  // The first call loads a library, which allocates memory.
  std::array<void*, 1> here{};
  backtrace(here.data(), 1);
  num_first_calls = 0;
  watched_allocations = 0;
  is_watched = true;
}

AllocationWatch::~AllocationWatch() {
  is_watched = false;
}

std::int64_t AllocationWatch::stop() {
  is_watched = false;
  return watched_allocations;
}

FailingAllocations::FailingAllocations(std::int64_t count) {
  is_spared = true;
  num_to_fail = count;
}

FailingAllocations::~FailingAllocations() {
  num_to_fail = 0;
  is_spared = false;
}

std::string AllocationWatch::first_calls() const {
  std::ostringstream command;
  command << "addr2line -Cfpe /proc/" << getpid() << "/exe" << std::hex;
  for (int i = 0; i < num_first_calls; ++i) {
    // The return address of a call may be in the next function.
    const auto* address = static_cast<const char*>(first_calls_made[static_cast<std::size_t>(i)]) - 1;
    Dl_info place{};
    if (dladdr(address, &place) != 0) {
      command << " 0x" << address - static_cast<const char*>(place.dli_fbase);
    }
  }
  return output_of(command.str());
}

}  // namespace adaptrt::testing
