#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "adaptrt/core/dtype.h"
#include "adaptrt/core/panels.h"

namespace adaptrt {

/// What records of a NeuronTable are a multiple of: what files are read in past the system's cache.
inline constexpr std::size_t kRecordAlignment = 4096;

/// The neurons of an MLP whose gate is a ReLU's, so that one can be read from a file by itself: up W[count,
/// size] and down W[size, count] once more, neuron by neuron. A record has row i of up, then column i of
/// down, then zeros up to a multiple of kRecordAlignment.
struct NeuronTable {
  const std::byte* data = nullptr;
  /// The engine's type.
  DType dtype = DType::kFloat32;
  std::int64_t count = 0;
  std::int64_t size = 0;
  /// Keeps `data` alive where nothing else does.
  std::shared_ptr<const void> owner = nullptr;

  [[nodiscard]] bool is_empty() const { return count == 0; }
  /// Of a row or a column.
  [[nodiscard]] std::size_t vector_bytes() const { return static_cast<std::size_t>(size) * size_of(dtype); }
  [[nodiscard]] std::size_t record_bytes() const {
    return (2 * vector_bytes() + kRecordAlignment - 1) / kRecordAlignment * kRecordAlignment;
  }
  [[nodiscard]] std::size_t bytes() const { return static_cast<std::size_t>(count) * record_bytes(); }
  [[nodiscard]] const std::byte* record(std::int64_t neuron) const {
    return data + static_cast<std::size_t>(neuron) * record_bytes();
  }
  /// Of down.
  [[nodiscard]] const std::byte* column(std::int64_t neuron) const { return record(neuron) + vector_bytes(); }
};

/// Whether an MLP of these sizes can have a table: rows of up and columns of down in whole panels.
[[nodiscard]] constexpr bool can_have_neurons(DType dtype, std::int64_t count, std::int64_t size) {
  return can_have_rows(dtype, count, size) && can_have_rows(dtype, size, count);
}

}  // namespace adaptrt
