#pragma once

#include <cstddef>

// Where ADAPTRT_RACE_DETECTOR is defined, ThreadSanitizer takes every emulated thread for a thread, and knows
// of no order among those of a block but what __syncthreads and __syncwarp make: an access to shared or
// global memory that lacks one of them is reported, whatever turns the threads happened to take. Shuffles,
// votes and tensor core instructions order no memory, and make no order here. Blocks run one after another,
// and races between them are not seen. Elsewhere all of this is nothing.
namespace adaptrt::cuda::emulation::race_detector {

#ifdef ADAPTRT_RACE_DETECTOR

/// Tells which emulated thread runs from here on; nullptr, as told by make_thread, is none.
[[nodiscard]] void* this_thread();
[[nodiscard]] void* make_thread();
void end_thread(void* thread);
void change_thread(void* thread);

/// What comes before release(place) in one thread comes before what follows a later acquire(place) in
/// another.
void release(void* place);
void acquire(void* place);

/// Accesses that are made on behalf of the running thread by what the detector does not look into.
void note_read(const void* address, std::size_t bytes);
void note_write(void* address, std::size_t bytes);

/// While it lives, the running thread does things for other threads, which are not looked at.
class Pause {
 public:
  Pause();
  ~Pause();
  Pause(const Pause&) = delete;
  Pause& operator=(const Pause&) = delete;
};

/// Races that were reported since the last call.
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
