#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cuda/kernels/launch.h"
#include "cuda/kernels/platform.h"
#include "cuda/kernels/ptx.h"
#include "cuda/kernels/rows/checks.h"
#include "cuda/kernels/states/sequence.h"
#include "cuda/kernels/warp_sums.h"

namespace adaptrt::cuda::states {

/// Two numbers of a head's token.
struct Gates {
  float strength;
  float decay;
};

/// A head's row of a token in global memory.
struct HeadRow {
  const float* reader;  ///< [state rows], by which the output reads the state
  const float* writer;  ///< [state rows], by which the token changes the state
  const float* values;  ///< [state columns]
};

__device__ inline float softplus(float x) {
  return x > 20.0F ? x : log1pf(expf(x));
}

/// Advances the states [rows, columns] of heads over the tokens of sequences, each in order:
///
///   state = decay * state + writer^T change,  output = reader state
///
/// A rule says what reader, writer, decay and change are. It is a class with
///   SequenceStates states;
///   __device__ std::int64_t rows(), columns(), heads();   of a state
///   __device__ HeadRow row(row, head);
///   __device__ Gates gates(row, head);
///   static constexpr bool kNormalizes;      reader and writer are multiplied by factors(sums of squares)
///   static constexpr bool kReadsFirst;      change depends on writer state
///   __device__ float change(value, gates, writer state);
///   __device__ float output(sum, value, head);
///   float* outputs;                                        [tokens, heads, columns]
///
/// Grid: x pieces of kColumns columns, y heads, z sequences. kLanes threads share a column: thread i has the
/// rows i, i + kLanes, ... of the state, in registers. All threads of a block copy kTokens tokens to shared
/// memory, and then each column advances over them by itself.
template <typename Rule, int kRowsOfThread>
class Recurrence {
 public:
  using Parameters = Rule;
  static constexpr int kThreads = 128;
  static constexpr int kBlocksPerMultiprocessor = 3;
  static constexpr int kLanes = 4;
  static constexpr int kColumns = kThreads / kLanes;
  static constexpr int kRows = kRowsOfThread * kLanes;

 private:
  static constexpr int kTokens = 16;
  static constexpr int kWarps = kThreads / kWarpSize;
  static constexpr int kSums = 4;
  static_assert(kColumns == kWarpSize);
  static_assert(kRows % kWarpSize == 0);
  static_assert(kRowsOfThread % kSums == 0);

  struct Token {
    float reader[kRows];
    float writer[kRows];
    float values[kColumns];
    Gates gates;
  };

 public:
  static constexpr std::size_t kSharedBytes = kTokens * sizeof(Token);

  __device__ static void run(const Rule& rule) {
    allow_next_kernel();
    const auto thread = static_cast<int>(threadIdx.x);
    const int lane = thread % kLanes;
    const std::int64_t first_column = static_cast<std::int64_t>(blockIdx.x) * kColumns;
    const std::int64_t column = first_column + thread / kLanes;
    const bool has_column = column < rule.columns();
    const std::int64_t head = blockIdx.y;
    const Sequence sequence(rule.states, blockIdx.z);
    wait_for_previous_kernel();
    const bool has_state = sequence.state != nullptr && has_column;
    float* own = has_state ? sequence.state + (head * rule.rows() + lane) * rule.columns() + column : nullptr;
    float state[kRowsOfThread] = {};
    if (has_state) {
      ADAPTRT_UNROLL
      for (int i = 0; i < kRowsOfThread; ++i) {
        if (i * kLanes + lane < rule.rows()) state[i] = own[i * kLanes * rule.columns()];
      }
    }
    for (std::int64_t begin = sequence.begin; begin < sequence.end; begin += kTokens) {
      const auto count = static_cast<int>(min(sequence.end - begin, std::int64_t{kTokens}));
      __syncthreads();  // others may still read the tokens before
      for (int i = thread / kWarpSize; i < count; i += kWarps) {
        load_token(rule, begin + i, head, first_column, &tokens()[i]);
      }
      __syncthreads();
      for (int i = 0; i < count; ++i) {
        const Token& token = tokens()[i];
        const float value = token.values[thread / kLanes];
        const float sum = advance(token, lane, value, rule, state);
        if (lane == 0 && has_column) {
          const std::int64_t row = begin + i;
          rule.outputs[(row * rule.heads() + head) * rule.columns() + column] = rule.output(sum, value, head);
        }
      }
    }
    if (!has_state || !rule.states.advances) return;
    ADAPTRT_UNROLL
    for (int i = 0; i < kRowsOfThread; ++i) {
      if (i * kLanes + lane < rule.rows()) own[i * kLanes * rule.columns()] = state[i];
    }
  }

 private:
  __device__ static Token* tokens() { return reinterpret_cast<Token*>(shared_memory()); }

  /// Warp: copies a head's row of a token, with zeros after its end.
  __device__ static void load_token(const Rule& rule, std::int64_t row, std::int64_t head,
                                    std::int64_t first_column, Token* token) {
    constexpr int kLoads = kRows / kWarpSize;
    const auto lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const HeadRow from = rule.row(row, head);
    float reader[kLoads];
    float writer[kLoads];
    ADAPTRT_UNROLL
    for (int i = 0; i < kLoads; ++i) {
      const int at = i * kWarpSize + lane;
      reader[i] = at < rule.rows() ? from.reader[at] : 0.0F;
      writer[i] = at < rule.rows() ? from.writer[at] : 0.0F;
    }
    const std::int64_t column = first_column + lane;
    token->values[lane] = column < rule.columns() ? from.values[column] : 0.0F;
    if (lane == 0) token->gates = rule.gates(row, head);
    float reader_factor = 1.0F;
    float writer_factor = 1.0F;
    if constexpr (Rule::kNormalizes) {
      reader_factor = rule.reader_factor(sum_of_squares(reader));
      writer_factor = rule.writer_factor(sum_of_squares(writer));
    }
    ADAPTRT_UNROLL
    for (int i = 0; i < kLoads; ++i) {
      token->reader[i * kWarpSize + lane] = reader[i] * reader_factor;
      token->writer[i * kWarpSize + lane] = writer[i] * writer_factor;
    }
  }

  /// Warp: the sum over all threads.
  template <int kLoads>
  __device__ static float sum_of_squares(const float (&values)[kLoads]) {
    float sum = 0.0F;
    ADAPTRT_UNROLL
    for (int i = 0; i < kLoads; ++i) sum = fmaf(values[i], values[i], sum);
    return sum_over_lanes(sum);
  }

  /// Adds up add(i) for the rows of a column. There are kSums sums, so that additions need not wait for each
  /// other.
  template <typename Add>
  __device__ static float sum_rows(const Add& add) {
    float sums[kSums] = {};
    ADAPTRT_UNROLL
    for (int i = 0; i < kRowsOfThread; ++i) sums[i % kSums] = add(i, sums[i % kSums]);
    return sum_over_lanes<kLanes>((sums[0] + sums[1]) + (sums[2] + sums[3]));
  }

  /// Advances the state of a column by a token. Returns its sum with the reader.
  __device__ static float advance(const Token& token, int lane, float value, const Rule& rule,
                                  float (&state)[kRowsOfThread]) {
    const Gates gates = token.gates;
    float found = 0.0F;
    if constexpr (Rule::kReadsFirst) {
      found =
          sum_rows([&](int i, float sum) { return fmaf(token.writer[i * kLanes + lane], state[i], sum); });
    }
    const float change = rule.change(value, gates, found);
    return sum_rows([&](int i, float sum) {
      state[i] = fmaf(token.writer[i * kLanes + lane], change, state[i] * gates.decay);
      return fmaf(token.reader[i * kLanes + lane], state[i], sum);
    });
  }
};

/// Enqueues a rule. The number of rows alone chooses the kernel, and with it the order of sums.
template <typename Rule>
void launch_rule(const Rule& rule, void* stream) {
  const auto launch_rows = [&]<int kRowsOfThread>() {
    using Kernel = Recurrence<Rule, kRowsOfThread>;
    launch<Kernel>({.x = rows::blocks_for(rule.columns(), Kernel::kColumns),
                    .y = static_cast<std::uint32_t>(rule.heads()),
                    .z = static_cast<std::uint32_t>(rule.states.sequences),
                    .shared_bytes = Kernel::kSharedBytes,
                    .overlaps_previous = true},
                   rule, stream);
  };
  if (rule.rows() <= 32) {
    launch_rows.template operator()<8>();
  } else if (rule.rows() <= 128) {
    launch_rows.template operator()<32>();
  } else {
    launch_rows.template operator()<64>();
  }
}

}  // namespace adaptrt::cuda::states
