#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "adaptrt/core/panels.h"
#include "adaptrt/cuda/sparse_kernels.h"
#include "adaptrt/device/device.h"
#include "adaptrt/gpu/staged_copies.h"
#include "adaptrt/program/ops.h"

namespace adaptrt {

/// Quantised matrices of a linear layer's parts on the device, one below the other. See
/// cuda::QuantizedProductKernel for their layout.
struct QuantizedMatrices {
  const void* weights = nullptr;
  const float* scales = nullptr;
  const std::uint8_t* zeros = nullptr;  ///< nullptr without zero points
};

/// Weights of a ReLU-gated MLP whose neurons are read one by one in runs with few rows.
struct NeuronWeights {
  const void* up = nullptr;          ///< T [neurons, size] on the device, while the MLP's section is there
  const void* down = nullptr;        ///< T [size, neurons] on the device, while the MLP's section is there
  cuda::NeuronVectors rows = {};     ///< of up
  cuda::NeuronVectors columns = {};  ///< of down
};

/// Number of a section of a program; see lower().
inline constexpr std::int32_t kNoSection = -1;

/// Addresses of weights on the device, for the ops that read them. Errors are those of Device::allocate and
/// Stream.
class DeviceWeights {
 public:
  DeviceWeights() = default;
  DeviceWeights(const DeviceWeights&) = delete;
  DeviceWeights& operator=(const DeviceWeights&) = delete;
  virtual ~DeviceWeights() = default;

  /// From now on, weights are of ops of this section; kNoSection at first.
  virtual void enter(std::int32_t /*section*/) {}

  /// Returns the matrices [n, k] of a linear layer's parts, one below the other, as one matrix, and then the
  /// rows of zeros of padded_rows().
  [[nodiscard]] const void* matrices(std::span<const LinearPart> parts);
  /// Returns the quantised matrices of a linear layer's parts, and the padded_rows(), whose scales are 0.
  [[nodiscard]] QuantizedMatrices quantized_matrices(std::span<const LinearPart> parts);
  /// Returns a matrix and its padded_rows().
  [[nodiscard]] const void* matrix(const PanelMatrix& matrix);
  /// Returns nullptr for an empty vector.
  [[nodiscard]] const float* vector(const VectorView& vector);
  /// Returns the parts' biases, one behind the other, with zeros for parts without; nullptr if none has any.
  [[nodiscard]] const float* biases(std::span<const LinearPart> parts);

  /// Returns where the neurons of a ReLU-gated MLP are; nullopt: its layers are read whole. `up` and `down`
  /// are plain matrices.
  [[nodiscard]] virtual std::optional<NeuronWeights> neurons(const PanelMatrix& /*up*/,
                                                             const PanelMatrix& /*down*/) {
    return std::nullopt;
  }

  /// Bytes on the host. Only those of weights stay there; others are zeros.
  using Piece = std::span<const std::byte>;

 private:
  /// Places pieces one after the other, and `padding` bytes of zeros after them. Returns their address on
  /// the device.
  [[nodiscard]] virtual const std::byte* copy(std::span<const Piece> pieces, std::size_t padding) = 0;
};

/// Copies weights to the device, where they stay. A weight that two ops share is copied once.
class ResidentWeights final : public DeviceWeights {
 public:
  /// staging_bytes: see StagedCopies.
  ResidentWeights(Device& device, Stream& stream, std::size_t staging_bytes = StagedCopies::kHalfBytes);

  [[nodiscard]] const std::byte* place(std::span<const Piece> pieces, std::size_t padding) {
    return copy(pieces, padding);
  }
  /// Waits until all copies are complete, and frees the staging memory.
  void finish() { copies_.finish(); }
  /// Moves the copies out. Call finish() first.
  [[nodiscard]] std::vector<Allocation> take() { return std::move(memory_); }

 private:
  [[nodiscard]] const std::byte* copy(std::span<const Piece> pieces, std::size_t padding) override;

  Device& device_;
  Stream& stream_;
  StagedCopies copies_;
  std::vector<Allocation> memory_;
  /// Device addresses by the host addresses and sizes of the pieces.
  std::map<std::vector<std::pair<const std::byte*, std::size_t>>, const std::byte*> addresses_;
};

}  // namespace adaptrt
