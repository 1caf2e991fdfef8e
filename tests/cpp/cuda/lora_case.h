#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "adaptrt/core/dtype.h"
#include "adaptrt/cuda/lora_kernel.h"

namespace adaptrt::cuda {

/// Memory of exactly this many elements, so that AddressSanitizer detects accesses outside; optionally
/// unaligned by one element.
class Elements {
 public:
  Elements() = default;
  Elements(std::int64_t count, bool odd_address, std::uint16_t fill)
      : skipped_(odd_address ? 1 : 0), bits_(static_cast<std::size_t>(count) + skipped_, fill) {}

  [[nodiscard]] std::uint16_t* data() { return bits_.data() + skipped_; }
  [[nodiscard]] const std::uint16_t* data() const { return bits_.data() + skipped_; }
  std::uint16_t& operator[](std::int64_t i) { return data()[i]; }
  [[nodiscard]] std::uint16_t operator[](std::int64_t i) const { return data()[i]; }
  [[nodiscard]] std::int64_t size() const { return static_cast<std::int64_t>(bits_.size() - skipped_); }
  bool operator==(const Elements&) const = default;

 private:
  std::size_t skipped_ = 0;
  std::vector<std::uint16_t> bits_;
};

/// Different random numbers in every run; the seed is printed so that a failure can be repeated.
class FreshRandom {
 public:
  FreshRandom() : seed_(std::random_device{}()), engine_(seed_) {}
  [[nodiscard]] std::uint32_t seed() const { return seed_; }
  int integer(int low, int high) { return std::uniform_int_distribution<int>(low, high)(engine_); }
  float real(float low, float high) { return std::uniform_real_distribution<float>(low, high)(engine_); }

 private:
  std::uint32_t seed_;
  std::mt19937 engine_;
};

enum class Numbers : std::uint8_t {
  kReal,
  kIntegers,    ///< small integers: every sum and the result are exact
  kCancelling,  ///< inputs whose halves cancel, so that the result depends on the order of the sum
  kInfinite,    ///< ones, with infinity in each token's first input
};

/// The sizes of a step; its content is random.
struct LoraShape {
  DType dtype = DType::kBFloat16;
  std::int32_t in = 64;
  std::vector<std::int32_t> out_sizes = {64};
  std::int32_t max_rank = 16;
  /// Indexed by adapter and part; 0: the part is not adapted.
  std::vector<std::vector<std::int32_t>> ranks = {};
  /// Number of tokens of each sequence, and its adapter; -1 for none.
  std::vector<std::int32_t> lengths = {};
  std::vector<std::int32_t> slots = {};
  bool dora = false;
  bool shifts = false;  ///< true: some adapters have shifts
  bool odd_addresses = false;
  Numbers numbers = Numbers::kReal;
  /// Small, so that a step with few tokens counts as one with many.
  std::int64_t many_tokens_from = 256;
  std::int64_t decode_tokens = LoraKernel::kDecodeTokens;
};

/// A step of LoraKernel in host memory, with a float64 reference.
class LoraCase {
 public:
  LoraCase(const LoraShape& shape, FreshRandom* random);

  /// Returns the kernel's result for only the sequences `first` .. `last` - 1.
  [[nodiscard]] Elements run(std::int64_t first, std::int64_t last) const;
  [[nodiscard]] Elements run() const { return run(0, static_cast<std::int64_t>(shape_.lengths.size())); }
  /// The same with y and base in the same memory.
  [[nodiscard]] Elements run_in_place() const;
  /// Returns the result for all sequences if tiles for many tokens are used from `many_tokens_from` on.
  [[nodiscard]] Elements run_tiled(std::int64_t many_tokens_from) const;
  /// Returns the result without the kernels for decode steps.
  [[nodiscard]] Elements run_as_long_step() const;
  /// Returns the result of tiles of a layer of experts: the adapters are those of the experts of one slot.
  [[nodiscard]] Elements run_as_experts() const;

  /// Number of elements of y that differ from the float64 result by more than rounding; integers and infinity
  /// must be equal.
  [[nodiscard]] std::int64_t wrong_elements(const Elements& y) const;

  [[nodiscard]] std::int64_t tokens() const { return offsets_.back(); }
  [[nodiscard]] std::int64_t out() const { return out_; }
  [[nodiscard]] std::int64_t first_token(std::int64_t sequence) const {
    return offsets_[static_cast<std::size_t>(sequence)];
  }
  [[nodiscard]] const Elements& base() const { return base_; }

 private:
  struct Factors {
    std::int32_t rank = 0;
    Elements a;
    Elements b;
    std::vector<float> magnitude;
    std::vector<float> shift;
  };

  [[nodiscard]] Elements run_on(std::int64_t first, std::int64_t last, Elements base, bool in_place) const;
  [[nodiscard]] std::uint16_t narrowed(float number) const;
  [[nodiscard]] double value(std::uint16_t bits) const;
  [[nodiscard]] double rounded(double value) const;
  Elements random_elements(std::int64_t count, FreshRandom* random) const;
  void fill_x(FreshRandom* random);
  void cancel_halves(Elements* rows, float sign) const;

  LoraShape shape_;
  std::int64_t out_ = 0;
  std::vector<std::int32_t> offsets_;
  Elements x_;
  Elements base_;
  std::vector<std::vector<Factors>> factors_;  ///< indexed by adapter and part
  std::vector<std::int32_t> module_ids_;
  std::vector<std::int32_t> ranks_;
  std::vector<std::int64_t> pointers_;
  std::vector<std::int64_t> shifts_;
};

}  // namespace adaptrt::cuda
