#include <cstdint>

#include "adaptrt/cuda/state_kernels.h"
#include "cuda/kernels/element_type.h"
#include "cuda/kernels/launch.h"
#include "cuda/kernels/rows/checks.h"
#include "cuda/kernels/states/sequence.h"
#include "cuda/kernels/types.h"

namespace adaptrt::cuda {
namespace {

/// One column: its weights, and the inputs of the newest kTaps tokens, the oldest first.
template <int kTaps>
struct Taps {
  float weights[kTaps];
  float inputs[kTaps] = {};
  float bias;

  template <typename Work>
  __device__ Taps(const Work& work, std::int64_t column)
      : bias(work.bias == nullptr ? 0.0F : work.bias[column]) {
    ADAPTRT_UNROLL
    for (int tap = 0; tap < kTaps; ++tap) weights[tap] = work.weight[tap * work.width + column];
  }

  __device__ void load(const float* state, std::int64_t width) {
    ADAPTRT_UNROLL
    for (int tap = 1; tap < kTaps; ++tap) inputs[tap] = state[(tap - 1) * width];
  }
  __device__ void store(float* state, std::int64_t width) const {
    ADAPTRT_UNROLL
    for (int tap = 1; tap < kTaps; ++tap) state[(tap - 1) * width] = inputs[tap];
  }

  /// Takes the input of the next token. Returns its sum.
  __device__ float next(float input) {
    ADAPTRT_UNROLL
    for (int tap = 1; tap < kTaps; ++tap) inputs[tap - 1] = inputs[tap];
    inputs[kTaps - 1] = input;
    float sum = bias;
    ADAPTRT_UNROLL
    for (int tap = 0; tap < kTaps; ++tap) sum = fmaf(weights[tap], inputs[tap], sum);
    return sum;
  }
};

/// The convolution that overwrites its input.
struct InPlace {
  using Work = CausalConvolution;
  using Element = float;

  __device__ static Element load(const Work& work, std::int64_t row, std::int64_t column) {
    return work.values[row * work.stride + column];
  }
  __device__ static float input(Element element) { return element; }
  __device__ static void store(const Work& work, std::int64_t row, std::int64_t column, Element /*element*/,
                               float sum) {
    work.values[row * work.stride + column] = sum / (1.0F + expf(-sum));
  }
};

/// The convolution between two gates.
template <typename T>
struct BetweenGates {
  using Work = GatedConvolution;
  struct Element {
    float before;
    float after;
    float x;
  };

  __device__ static Element load(const Work& work, std::int64_t row, std::int64_t column) {
    const float* from = work.input + 3 * row * work.width + column;
    return {from[0], from[work.width], from[2 * work.width]};
  }
  __device__ static float input(const Element& element) { return element.before * element.x; }
  __device__ static void store(const Work& work, std::int64_t row, std::int64_t column,
                               const Element& element, float sum) {
    static_cast<T*>(work.output)[row * work.width + column] = from_float<T>(element.after * sum);
  }
};

/// Grid: x blocks of kThreads columns, y sequences. A thread has one column, and takes the rows one after the
/// other.
template <typename Kind, int kTaps>
class Convolution {
 public:
  using Parameters = typename Kind::Work;
  static constexpr int kThreads = 128;
  static constexpr int kBlocksPerMultiprocessor = 8;

  __device__ static void run(const Parameters& work) {
    allow_next_kernel();
    const std::int64_t column = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    const bool has_column = column < work.width;
    Taps<kTaps> taps(work, has_column ? column : 0);
    const states::Sequence sequence(work.states, blockIdx.y);
    wait_for_previous_kernel();
    if (!has_column) return;
    if (sequence.state != nullptr) taps.load(sequence.state + column, work.width);
    for (std::int64_t first = sequence.begin; first < sequence.end; first += kLoads) {
      typename Kind::Element elements[kLoads];
      ADAPTRT_UNROLL
      for (int i = 0; i < kLoads; ++i) {
        // The last row again, where there are no more rows.
        const std::int64_t row = first + i < sequence.end ? first + i : sequence.end - 1;
        elements[i] = Kind::load(work, row, column);
      }
      ADAPTRT_UNROLL
      for (int i = 0; i < kLoads; ++i) {
        if (first + i >= sequence.end) break;
        Kind::store(work, first + i, column, elements[i], taps.next(Kind::input(elements[i])));
      }
    }
    if (sequence.state != nullptr && work.states.advances) taps.store(sequence.state + column, work.width);
  }

 private:
  /// Rows whose loads are in flight together.
  static constexpr int kLoads = 8;
};

template <typename Kind, int kTaps = 1>
void launch_taps(const typename Kind::Work& work, void* stream) {
  if constexpr (kTaps < kMaxTaps) {
    if (work.taps > kTaps) return launch_taps<Kind, kTaps + 1>(work, stream);
  }
  using Kernel = Convolution<Kind, kTaps>;
  launch<Kernel>({.x = rows::blocks_for(work.width, Kernel::kThreads),
                  .y = static_cast<std::uint32_t>(work.states.sequences),
                  .overlaps_previous = true},
                 work, stream);
}

template <typename Work>
rows::Checks checks_of(const Work& work) {
  rows::Checks checks;
  states::check(&checks, work.states);
  checks.positive("width", work.width).positive("taps", work.taps, kMaxTaps);
  return checks;
}

}  // namespace

void enqueue(const CausalConvolution& work, void* stream) {
  checks_of(work).condition(work.stride >= work.width, "stride is below width").done("CausalConvolution");
  launch_taps<InPlace>(work, stream);
}

void enqueue(const GatedConvolution& work, void* stream) {
  checks_of(work).type(work.dtype).done("GatedConvolution");
  with_element_type(work.dtype, [&]<typename T>(TypeTag<T>) { launch_taps<BetweenGates<T>>(work, stream); });
}

}  // namespace adaptrt::cuda
