#include "adaptrt/weight_file/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <utility>

#include "adaptrt/core/error.h"

namespace adaptrt {
namespace {

/// A mapping for the signal handler, which may run in any thread between any two instructions.
struct Slot {
  std::atomic<bool> is_taken = false;
  std::atomic<std::uintptr_t> begin = 0;  // 0 if there is none yet
  std::atomic<std::uintptr_t> end = 0;
  std::atomic<bool> has_lost_pages = false;
};

constexpr std::size_t kMostMappings = 1024;
std::array<Slot, kMostMappings>
    slots;                         // NOLINT(cppcoreguidelines-avoid-non-const-global-variables): a handler's
struct sigaction previous_action;  // NOLINT(cppcoreguidelines-avoid-non-const-global-variables)
std::uintptr_t page_bytes = 0;     // NOLINT(cppcoreguidelines-avoid-non-const-global-variables)
std::atomic<bool> is_passed_on = false;  // NOLINT(cppcoreguidelines-avoid-non-const-global-variables)

timespec modification_time(const struct stat& file) {
#ifdef __APPLE__
  return file.st_mtimespec;
#else
  return file.st_mtim;
#endif
}

/// Replaces the lost pages from `address` on by zeros. Returns false if no mapping contains it.
bool replace_lost_pages(std::uintptr_t address) {
  for (Slot& slot : slots) {
    const std::uintptr_t begin = slot.begin.load();
    const std::uintptr_t end = slot.end.load();
    if (begin == 0 || address < begin || address >= end) continue;
    slot.has_lost_pages.store(true);  // before any thread can read the zeros
    const std::uintptr_t page = address - address % page_bytes;
    void* place = reinterpret_cast<void*>(page);  // NOLINT(performance-no-int-to-ptr)
    return mmap(place, end - page, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != MAP_FAILED;
  }
  return false;
}

void on_bus_error(int signal, siginfo_t* info, void* context) {
  const int kept_errno = errno;
  const bool is_replaced = replace_lost_pages(reinterpret_cast<std::uintptr_t>(info->si_addr));
  errno = kept_errno;
  if (is_replaced) return;
  // Handlers may pass faults on to each other: if one returns here, end the process.
  const bool is_default = previous_action.sa_handler == SIG_DFL || previous_action.sa_handler == SIG_IGN;
  if (is_default || is_passed_on.exchange(true)) {
    struct sigaction action{};
    action.sa_handler = SIG_DFL;
    sigaction(SIGBUS, &action, nullptr);  // the read faults again
    return;
  }
  if ((previous_action.sa_flags & SA_SIGINFO) != 0) {
    previous_action.sa_sigaction(signal, info, context);
  } else {
    previous_action.sa_handler(signal);
  }
  is_passed_on.store(false);
}

/// Other code may have installed its handler since the last mapping.
void install_handler() {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  page_bytes = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  struct sigaction current{};
  sigaction(SIGBUS, nullptr, &current);
  if ((current.sa_flags & SA_SIGINFO) != 0 && current.sa_sigaction == &on_bus_error) return;
  previous_action = current;
  struct sigaction action{};
  action.sa_sigaction = &on_bus_error;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  sigaction(SIGBUS, &action, nullptr);
}

std::size_t take_slot(std::span<const std::byte> mapping) {
  for (std::size_t i = 0; i < slots.size(); ++i) {
    if (slots[i].is_taken.exchange(true)) continue;
    const auto begin = reinterpret_cast<std::uintptr_t>(mapping.data());
    slots[i].has_lost_pages.store(false);
    slots[i].end.store(begin + mapping.size());
    slots[i].begin.store(begin);
    return i;
  }
  throw ConfigError("more than " + std::to_string(kMostMappings) +
                    " engine files are mapped in this process");
}

int open_for_reading(const std::string& path) {
  const int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor == -1) throw EngineError(path + ": cannot be read: " + std::strerror(errno));
  return descriptor;
}

}  // namespace

MappedFile::MappedFile(std::span<const std::byte> mapping, std::string path,
                       std::chrono::nanoseconds interval)
    : path_(std::move(path)), interval_(interval), descriptor_(open_for_reading(path_)) {
  try {
    first_ = status();
    next_look_ = std::chrono::steady_clock::now() + interval_;
    install_handler();
    slot_ = take_slot(mapping);
  } catch (...) {
    close(descriptor_);
    throw;
  }
}

MappedFile::~MappedFile() {
  slots[slot_].begin.store(0);
  slots[slot_].is_taken.store(false);
  close(descriptor_);
}

void MappedFile::check() {
  if (slots[slot_].has_lost_pages.load()) {
    throw EngineError(path_ + ": was cut while it was in use; its engine cannot go on");
  }
  const auto now = std::chrono::steady_clock::now();
  if (now < next_look_.load()) return;
  next_look_ = now + interval_;
  const struct stat found = status();
  const timespec written = modification_time(found);
  const timespec first = modification_time(first_);
  if (found.st_size == first_.st_size && written.tv_sec == first.tv_sec && written.tv_nsec == first.tv_nsec) {
    return;
  }
  throw EngineError(path_ + ": was written while it was in use; its engine cannot go on");
}

struct stat MappedFile::status() const {
  struct stat found{};
  if (fstat(descriptor_, &found) != 0) {
    throw EngineError(path_ + ": cannot be read: " + std::strerror(errno));
  }
  return found;
}

}  // namespace adaptrt
