#include "lora_case.h"

#include <cmath>
#include <cstddef>
#include <limits>

#include "adaptrt/lora/modules.h"

namespace adaptrt::cuda {
namespace {

constexpr std::int32_t kLayers = 2;
constexpr std::int32_t kLayer = 1;
constexpr std::int64_t kModules = kNumLoraModules;
/// Address in table entries without an adapter, which must not be read.
constexpr std::int64_t kNoAddress = 0x10;
constexpr std::uint16_t kNan = 0xffff;
/// Unit roundoff of float32, in which all sums are computed.
constexpr double kRounding = 0x1p-24;

double unit_of_rounding(DType dtype) {
  return dtype == DType::kFloat16 ? 0x1p-11 : 0x1p-8;
}

std::size_t at(std::int64_t index) {
  return static_cast<std::size_t>(index);
}

}  // namespace

LoraCase::LoraCase(const LoraShape& shape, FreshRandom* random) : shape_(shape) {
  offsets_.push_back(0);
  for (const auto length : shape_.lengths) offsets_.push_back(offsets_.back() + length);
  for (const auto size : shape_.out_sizes) out_ += size;
  for (std::size_t part = 0; part < shape_.out_sizes.size(); ++part) {
    module_ids_.push_back(static_cast<std::int32_t>(3 * part + 1));
  }
  fill_x(random);
  base_ = random_elements(tokens() * out_, random);
  const auto slots = static_cast<std::int64_t>(shape_.ranks.size());
  ranks_.assign(at(slots * kLayers * kModules), 0);
  pointers_.assign(at(slots * kLayers * kModules * 3), kNoAddress);
  shifts_.assign(at(slots * kLayers * kModules), kNoAddress);
  factors_.resize(shape_.ranks.size());
  for (std::int64_t slot = 0; slot < slots; ++slot) {
    for (std::size_t part = 0; part < shape_.out_sizes.size(); ++part) {
      const auto rank = shape_.ranks[at(slot)][part];
      factors_[at(slot)].push_back({rank, {}, {}, {}, {}});
      if (rank == 0) continue;
      auto& factors = factors_[at(slot)].back();
      factors.a = random_elements(static_cast<std::int64_t>(rank) * shape_.in, random);
      if (shape_.numbers == Numbers::kCancelling) cancel_halves(&factors.a, 1.0F);
      factors.b = random_elements(static_cast<std::int64_t>(shape_.out_sizes[part]) * rank, random);
      // Every second adapter has magnitudes.
      if (slot % 2 == 0) {
        for (std::int32_t i = 0; i < shape_.out_sizes[part]; ++i) {
          factors.magnitude.push_back(shape_.numbers == Numbers::kIntegers
                                          ? static_cast<float>(random->integer(1, 2))
                                          : random->real(0.5F, 2.0F));
        }
      }
      // Two of three adapters have shifts.
      for (std::int32_t i = 0; shape_.shifts && slot % 3 != 1 && i < shape_.out_sizes[part]; ++i) {
        factors.shift.push_back(shape_.numbers == Numbers::kIntegers
                                    ? static_cast<float>(random->integer(-2, 2))
                                    : random->real(-1.0F, 1.0F));
      }
      const auto entry = (slot * kLayers + kLayer) * kModules + module_ids_[part];
      ranks_[at(entry)] = rank;
      pointers_[at(3 * entry)] = reinterpret_cast<std::int64_t>(factors.a.data());
      pointers_[at(3 * entry + 1)] = reinterpret_cast<std::int64_t>(factors.b.data());
      pointers_[at(3 * entry + 2)] =
          factors.magnitude.empty() ? 0 : reinterpret_cast<std::int64_t>(factors.magnitude.data());
      shifts_[at(entry)] = factors.shift.empty() ? 0 : reinterpret_cast<std::int64_t>(factors.shift.data());
    }
  }
}

Elements LoraCase::random_elements(std::int64_t count, FreshRandom* random) const {
  Elements elements(count, shape_.odd_addresses, kNan);
  for (std::int64_t i = 0; i < count; ++i) {
    float number = 1.0F;
    if (shape_.numbers == Numbers::kIntegers) number = static_cast<float>(random->integer(-1, 1));
    if (shape_.numbers == Numbers::kReal) number = random->real(-1.0F, 1.0F);
    if (shape_.numbers == Numbers::kCancelling)
      number = std::ldexp(random->real(-1.0F, 1.0F), random->integer(0, 5));
    elements[i] = narrowed(number);
  }
  return elements;
}

void LoraCase::fill_x(FreshRandom* random) {
  x_ = random_elements(tokens() * shape_.in, random);
  if (shape_.numbers == Numbers::kCancelling) cancel_halves(&x_, -1.0F);
  if (shape_.numbers == Numbers::kInfinite) {
    for (std::int64_t token = 0; token < tokens(); ++token) {
      x_[token * shape_.in] = narrowed(std::numeric_limits<float>::infinity());
    }
  }
}

/// Sets the second half of each row of x or A to `sign` times the first half.
void LoraCase::cancel_halves(Elements* rows, float sign) const {
  const std::int64_t half = shape_.in / 2;
  for (std::int64_t row = 0; row < rows->size() / shape_.in; ++row) {
    for (std::int64_t i = 0; i < half; ++i) {
      const auto first = static_cast<float>(value((*rows)[row * shape_.in + i]));
      (*rows)[row * shape_.in + half + i] = narrowed(sign * first);
    }
  }
}

Elements LoraCase::run(std::int64_t first, std::int64_t last) const {
  return run_on(first, last, base_, false);
}

Elements LoraCase::run_in_place() const {
  return run_on(0, static_cast<std::int64_t>(shape_.lengths.size()), base_, true);
}

Elements LoraCase::run_tiled(std::int64_t many_tokens_from) const {
  LoraCase same = *this;
  same.shape_.many_tokens_from = many_tokens_from;
  return same.run();
}

Elements LoraCase::run_as_long_step() const {
  LoraCase same = *this;
  same.shape_.decode_tokens = 0;
  return same.run();
}

Elements LoraCase::run_on(std::int64_t first, std::int64_t last, Elements base, bool in_place) const {
  const LoraKernel kernel({.dtype = shape_.dtype,
                           .layer = kLayer,
                           .module_ids = module_ids_,
                           .out_sizes = shape_.out_sizes,
                           .max_rank = shape_.max_rank,
                           .dora = shape_.dora,
                           .many_tokens_from = shape_.many_tokens_from,
                           .decode_tokens = shape_.decode_tokens});
  const auto first_of_step = first_token(first);
  const auto tokens_of_step = first_token(last) - first_of_step;
  std::vector<std::int32_t> offsets;
  for (auto sequence = first; sequence <= last; ++sequence) {
    offsets.push_back(static_cast<std::int32_t>(first_token(sequence) - first_of_step));
  }
  const std::vector<std::int32_t> slots(shape_.slots.begin() + first, shape_.slots.begin() + last);
  Elements y(tokens_of_step * out_, shape_.odd_addresses, kNan);
  struct alignas(16) Workspace {
    std::uint16_t elements[8];
  };
  const auto workspace_bytes = kernel.workspace_bytes(tokens_of_step);
  std::vector<Workspace> workspace(at(workspace_bytes) / sizeof(Workspace));
  for (auto& line : workspace) {
    for (auto& element : line.elements) element = kNan;
  }
  std::uint16_t* own_base = base.data() + first_of_step * out_;
  kernel.enqueue({.tokens = tokens_of_step, .in = shape_.in, .sequences = last - first, .layers = kLayers},
                 {.x = x_.data() + first_of_step * shape_.in,
                  .base = own_base,
                  .sequence_offsets = offsets.data(),
                  .adapter_slots = slots.data(),
                  .ranks = ranks_.data(),
                  .pointers = pointers_.data(),
                  .shifts = shape_.shifts ? shifts_.data() : nullptr},
                 in_place ? own_base : y.data(), workspace.data(), nullptr);
  return in_place ? base : y;
}

Elements LoraCase::run_as_experts() const {
  const auto parts = static_cast<std::int64_t>(module_ids_.size());
  const auto experts = static_cast<std::int64_t>(shape_.ranks.size());
  // Slot 0 of the tables is poisoned; slot 1 has the adapters.
  constexpr std::int64_t kFirst = 5;
  const std::int64_t rows = (kFirst + experts * parts) / kModules + 1;
  std::vector<std::int32_t> ranks(at(2 * rows * kModules), 3);
  std::vector<std::int64_t> pointers(at(6 * rows * kModules), kNoAddress);
  std::vector<std::int64_t> shifts(at(2 * rows * kModules), kNoAddress);
  for (std::int64_t expert = 0; expert < experts; ++expert) {
    for (std::int64_t part = 0; part < parts; ++part) {
      const std::int64_t from = (expert * kLayers + kLayer) * kModules + module_ids_[at(part)];
      const std::int64_t to = rows * kModules + kFirst + expert * parts + part;
      ranks[at(to)] = ranks_[at(from)];
      shifts[at(to)] = shifts_[at(from)];
      std::copy_n(pointers_.begin() + 3 * from, 3, pointers.begin() + 3 * to);
    }
  }
  const std::int32_t tile = LoraKernel::tile_tokens(tokens(), shape_.many_tokens_from);
  std::vector<SlotTile> tiles;
  for (std::size_t sequence = 0; sequence < shape_.slots.size(); ++sequence) {
    const std::int32_t expert = shape_.slots[sequence];
    for (std::int32_t token = offsets_[sequence]; token < offsets_[sequence + 1]; token += tile) {
      tiles.push_back({token, expert < 0 ? -1 : 1, std::max(0, expert)});
    }
  }
  // Two tiles without tokens.
  const auto count = static_cast<std::int64_t>(tiles.size()) + 2;
  tiles.resize(at(count) + 1, {static_cast<std::int32_t>(tokens()), -1, 0});
  const LoraKernel kernel({.dtype = shape_.dtype,
                           .module_ids = module_ids_,
                           .out_sizes = shape_.out_sizes,
                           .max_rank = shape_.max_rank,
                           .dora = shape_.dora,
                           .many_tokens_from = shape_.many_tokens_from,
                           .decode_tokens = shape_.decode_tokens,
                           .expert_entry = kFirst});
  Elements y(tokens() * out_, shape_.odd_addresses, kNan);
  std::vector<std::int64_t> workspace(at(kernel.workspace_bytes(tokens())) / 8 + 2);
  void* aligned = workspace.data() + reinterpret_cast<std::uintptr_t>(workspace.data()) % 16 / 8;
  kernel.enqueue({.tokens = tokens(), .in = shape_.in, .layers = rows, .tiles = count},
                 {.x = x_.data(),
                  .base = base_.data(),
                  .ranks = ranks.data(),
                  .pointers = pointers.data(),
                  .shifts = shape_.shifts ? shifts.data() : nullptr,
                  .tiles = tiles.data()},
                 y.data(), aligned, nullptr);
  return y;
}

std::uint16_t LoraCase::narrowed(float number) const {
  return shape_.dtype == DType::kFloat16 ? float_to_float16(number) : float_to_bfloat16(number);
}

double LoraCase::value(std::uint16_t bits) const {
  return shape_.dtype == DType::kFloat16 ? float16_to_float(bits) : bfloat16_to_float(bits);
}

/// Rounds to the nearest number of the dtype; the step through float32 changes none of the test values.
double LoraCase::rounded(double number) const {
  return value(narrowed(static_cast<float>(number)));
}

std::int64_t LoraCase::wrong_elements(const Elements& y) const {
  std::int64_t wrong = 0;
  for (std::size_t sequence = 0; sequence < shape_.slots.size(); ++sequence) {
    const auto slot = shape_.slots[sequence];
    for (std::int64_t token = offsets_[sequence]; token < offsets_[sequence + 1]; ++token) {
      std::int64_t start = 0;
      for (std::size_t part = 0; part < shape_.out_sizes.size(); ++part) {
        const auto width = shape_.out_sizes[part];
        const Factors* factors = slot < 0 ? nullptr : &factors_[at(slot)][part];
        const auto rank = factors == nullptr ? 0 : factors->rank;
        // x A^T in float64, and the sum of the absolute terms.
        std::vector<double> shrunk(at(rank));
        std::vector<double> sizes(at(rank));
        for (std::int32_t row = 0; row < rank; ++row) {
          for (std::int64_t i = 0; i < shape_.in; ++i) {
            const double product = value(x_[token * shape_.in + i]) * value(factors->a[row * shape_.in + i]);
            shrunk[at(row)] += product;
            sizes[at(row)] += std::abs(product);
          }
        }
        for (std::int64_t column = 0; column < width; ++column) {
          const auto index = token * out_ + start + column;
          if (rank == 0) {
            wrong += y[index] == base_[index] ? 0 : 1;
          } else {
            double sum = value(base_[index]);
            double terms = std::abs(sum);
            double of_shrunk = 0.0;
            for (std::int32_t row = 0; row < rank; ++row) {
              const double b = value(factors->b[column * rank + row]);
              const double term = rounded(shrunk[at(row)]);
              sum += term * b;
              terms += std::abs(term * b);
              // The float32 sum may be rounded to the neighbour of the rounded float64 sum.
              of_shrunk += std::abs(b) * ((shape_.in + 2) * kRounding * sizes[at(row)] +
                                          2.0 * unit_of_rounding(shape_.dtype) * std::abs(term));
            }
            const double factor =
                shape_.dora && !factors->magnitude.empty() ? factors->magnitude[at(column)] : 1.0;
            const double shift = factors->shift.empty() ? 0.0 : factors->shift[at(column)];
            sum = sum * factor + shift;
            const double bound = ((rank + 3) * kRounding * terms + of_shrunk) * factor +
                                 kRounding * std::abs(shift) + unit_of_rounding(shape_.dtype) * std::abs(sum);
            // Comparisons with NaN are false, so NaN counts as wrong.
            const bool exact = shape_.numbers == Numbers::kIntegers || shape_.numbers == Numbers::kInfinite;
            const double got = value(y[index]);
            const bool right = exact ? got == rounded(sum) : std::abs(got - sum) <= bound;
            wrong += right ? 0 : 1;
          }
        }
        start += width;
      }
    }
  }
  return wrong;
}

}  // namespace adaptrt::cuda
