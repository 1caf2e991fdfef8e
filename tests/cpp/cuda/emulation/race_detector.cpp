#include "emulation/race_detector.h"

#ifdef ADAPTRT_RACE_DETECTOR

#include <sanitizer/tsan_interface.h>

#include <atomic>

// ThreadSanitizer functions that its header does not declare.
extern "C" {
void __tsan_read_range(void* address, unsigned long bytes);
void __tsan_write_range(void* address, unsigned long bytes);
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
}

namespace {
std::atomic<int> reports = 0;
}  // namespace

// ThreadSanitizer calls this.
extern "C" {
/// A race makes run_grid throw, which tests can expect, instead of failing the process at its end. Every race
/// is reported, not only the first at an address or source location.
__attribute__((visibility("default"))) const char* __tsan_default_options();
__attribute__((visibility("default"))) void __tsan_on_report(void* report);

const char* __tsan_default_options() {
  return "exitcode=0:suppress_equal_addresses=0:suppress_equal_stacks=0";
}

void __tsan_on_report(void* /*report*/) {
  ++reports;
}
}

namespace adaptrt::cuda::emulation::race_detector {

void* this_thread() {
  return __tsan_get_current_fiber();
}

void* make_thread() {
  return __tsan_create_fiber(0);
}

void end_thread(void* thread) {
  __tsan_destroy_fiber(thread);
}

void change_thread(void* thread) {
  __tsan_switch_to_fiber(thread, __tsan_switch_to_fiber_no_sync);
}

void release(void* place) {
  __tsan_release(place);
}

void acquire(void* place) {
  __tsan_acquire(place);
}

void note_read(const void* address, std::size_t bytes) {
  __tsan_read_range(const_cast<void*>(address), bytes);
}

void note_write(void* address, std::size_t bytes) {
  __tsan_write_range(address, bytes);
}

Pause::Pause() {
  AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
  AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
}

Pause::~Pause() {
  AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
  AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
}

int take_reports() {
  return reports.exchange(0);
}

}  // namespace adaptrt::cuda::emulation::race_detector

#endif
