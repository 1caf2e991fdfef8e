#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "adaptrt/core/dtype.h"
#include "adaptrt/core/panels.h"

namespace adaptrt {

/// Alignment in bytes of a NeuronTable's records: direct file reads, which bypass the page cache, need it.
inline constexpr std::size_t kRecordAlignment = 4096;

/// A second copy of the weights of a ReLU-gated MLP, neuron by neuron, so that one neuron can be read from a
/// file: up W[count, size] and down W[size, count]. Record i has row i of up, then column i of down, then
/// zeros up to a multiple of kRecordAlignment.
struct NeuronTable {
  const std::byte* data = nullptr;
  /// The engine's type.
  DType dtype = DType::kFloat32;
  std::int64_t count = 0;
  std::int64_t size = 0;
  /// Keeps `data` alive; nullptr if something else does.
  std::shared_ptr<const void> owner = nullptr;

  [[nodiscard]] bool is_empty() const { return count == 0; }
  /// Bytes of a row or a column.
  [[nodiscard]] std::size_t vector_bytes() const { return static_cast<std::size_t>(size) * size_of(dtype); }
  [[nodiscard]] std::size_t record_bytes() const {
    return (2 * vector_bytes() + kRecordAlignment - 1) / kRecordAlignment * kRecordAlignment;
  }
  [[nodiscard]] std::size_t bytes() const { return static_cast<std::size_t>(count) * record_bytes(); }
  [[nodiscard]] const std::byte* record(std::int64_t neuron) const {
    return data + static_cast<std::size_t>(neuron) * record_bytes();
  }
  /// Address of the neuron's column of down.
  [[nodiscard]] const std::byte* column(std::int64_t neuron) const { return record(neuron) + vector_bytes(); }
};

/// True if an MLP of these sizes can have a table: rows of up and columns of down must fill whole panels.
[[nodiscard]] constexpr bool can_have_neurons(DType dtype, std::int64_t count, std::int64_t size) {
  return can_have_rows(dtype, count, size) && can_have_rows(dtype, size, count);
}

}  // namespace adaptrt
