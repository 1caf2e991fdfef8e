#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "device_weights.h"
#include "weight_ring.h"
#include "weight_sections.h"

namespace adaptrt {

/// Place of each neuron of each MLP: the index of its vectors among those on the device; -1: they are in
/// pinned host memory. No places: the MLP stays on the device as whole matrices.
using NeuronPlan = std::vector<std::vector<std::int32_t>>;

/// Chooses the neurons that stay on the device if all weights there may take `weight_memory` bytes. The
/// weights of other ops, and two slots for the whole matrices of an MLP, take theirs first. Returns nullopt
/// if those do not fit.
///
/// `usage`: counts of each neuron, by MLP; the most used ones stay, and of equal ones the first. A missing or
/// empty element: nothing is known. If nothing is known of any MLP, all neurons are equally good. Then as
/// many MLPs as possible stay whole, evenly between the others, so that runs with many rows copy less; and an
/// even share of the others' neurons.
[[nodiscard]] std::optional<NeuronPlan> plan_neurons(const WeightSizes& sizes, std::size_t weight_memory,
                                                     std::span<const std::vector<std::uint32_t>> usage);

/// Places up and down of MLPs in a ring, as one section for each, and their neurons on the device or in
/// pinned host memory. Other weights stay on the device.
class PlacedNeurons final : public DeviceWeights {
 public:
  /// The plan must live until the last call.
  PlacedNeurons(const NeuronPlan& plan, Device& device, Stream& stream, ResidentWeights& resident,
                WeightRing& ring)
      : plan_(plan), device_(device), stream_(stream), resident_(resident), ring_(ring) {}

  [[nodiscard]] std::optional<NeuronWeights> neurons(const PanelMatrix& up, const PanelMatrix& down) override;
  /// Moves the neurons' memory out.
  [[nodiscard]] std::vector<Allocation> take() { return std::move(memory_); }

 private:
  [[nodiscard]] const std::byte* copy(std::span<const Piece> pieces, std::size_t padding) override {
    return resident_.place(pieces, padding);
  }
  /// Copies vectors from pinned memory to the device. Returns where they are.
  [[nodiscard]] const std::byte* copy_resident(std::span<const std::int32_t> slots, const std::byte* pinned,
                                               std::size_t vector_bytes);

  const NeuronPlan& plan_;
  Device& device_;
  Stream& stream_;
  ResidentWeights& resident_;
  WeightRing& ring_;
  std::size_t next_ = 0;     ///< MLP
  std::size_t section_ = 0;  ///< of the ring
  std::vector<Allocation> memory_;
};

/// Writes the transpose of a matrix [rows, columns] of 2-byte elements.
void transpose(const std::byte* matrix, std::int64_t rows, std::int64_t columns, std::byte* to);

}  // namespace adaptrt
