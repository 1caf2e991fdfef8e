#pragma once

#include <array>
#include <cstddef>
#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "adaptrt/core/panels.h"
#include "adaptrt/device/device.h"
#include "adaptrt/program/ops.h"

namespace adaptrt {

/// Copies of weights on the device. A weight that two ops share is copied once. Errors are those of
/// Device::allocate and Stream.
class DeviceWeights {
 public:
  /// Size of a half of the staging memory: large enough that starting a copy takes no noticeable time.
  static constexpr std::size_t kStagingBytes = std::size_t{32} << 20;

  DeviceWeights(Device& device, Stream& stream, std::size_t staging_bytes = kStagingBytes);
  DeviceWeights(const DeviceWeights&) = delete;
  DeviceWeights& operator=(const DeviceWeights&) = delete;
  ~DeviceWeights() = default;

  /// Returns the matrices [n, k] of a linear layer's parts, one below the other, as one matrix.
  [[nodiscard]] const void* matrices(std::span<const LinearPart> parts);
  [[nodiscard]] const void* matrix(const PanelMatrix& matrix);
  /// Returns nullptr for an empty vector.
  [[nodiscard]] const float* vector(const VectorView& vector);
  /// Returns the parts' biases, one behind the other, with zeros for parts without; nullptr if none has any.
  [[nodiscard]] const float* biases(std::span<const LinearPart> parts);

  /// Waits until all copies are complete, and frees the staging memory.
  void finish();
  /// Moves the copies out. Call finish() first.
  [[nodiscard]] std::vector<Allocation> take() { return std::move(memory_); }

 private:
  using Piece = std::span<const std::byte>;

  [[nodiscard]] const std::byte* copy(std::span<const Piece> pieces);
  void upload(std::byte* to, Piece piece);

  /// Pinned memory through which pieces are copied. One half is filled while the other is copied.
  struct Half {
    Allocation memory;
    std::unique_ptr<Event> copied;
  };

  Device& device_;
  Stream& stream_;
  std::array<Half, 2> staging_;
  std::size_t next_half_ = 0;
  std::vector<Allocation> memory_;
  /// Device addresses by the host addresses and sizes of the pieces.
  std::map<std::vector<std::pair<const std::byte*, std::size_t>>, const std::byte*> copies_;
};

}  // namespace adaptrt
