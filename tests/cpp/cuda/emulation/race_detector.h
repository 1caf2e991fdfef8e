#pragma once

#include <cstddef>

// With ADAPTRT_RACE_DETECTOR, ThreadSanitizer treats every emulated thread as a thread. Within a block, only
// __syncthreads and __syncwarp order accesses. It reports an access to shared or global memory that lacks one
// of them, in any order that the threads happened to run. Shuffles, votes and tensor core instructions order
// no memory. Blocks run one after another, so races between blocks are not detected. Without the macro, these
// functions do nothing.
namespace adaptrt::cuda::emulation::race_detector {

#ifdef ADAPTRT_RACE_DETECTOR

/// Handles of emulated threads for the detector; change_thread() says which one runs from now on.
[[nodiscard]] void* this_thread();
[[nodiscard]] void* make_thread();
void end_thread(void* thread);
void change_thread(void* thread);

/// Orders accesses: those before release(place) in one thread come before those after a later acquire(place)
/// in another.
void release(void* place);
void acquire(void* place);

/// Records accesses for the running thread in code that is not instrumented.
void note_read(const void* address, std::size_t bytes);
void note_write(void* address, std::size_t bytes);

/// While this object exists, accesses of the running thread are ignored, because it works for other threads.
class Pause {
 public:
  Pause();
  ~Pause();
  Pause(const Pause&) = delete;
  Pause& operator=(const Pause&) = delete;
};

/// Number of races reported since the last call.
[[nodiscard]] int take_reports();

#else

inline void release(void* /*place*/) {}
inline void acquire(void* /*place*/) {}
inline void note_read(const void* /*address*/, std::size_t /*bytes*/) {}
inline void note_write(void* /*address*/, std::size_t /*bytes*/) {}
struct Pause {
  Pause() {}
};
[[nodiscard]] inline int take_reports() {
  return 0;
}

#endif

}  // namespace adaptrt::cuda::emulation::race_detector
