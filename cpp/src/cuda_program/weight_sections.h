#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "device_weights.h"
#include "weight_ring.h"

namespace adaptrt {

/// Bytes of a program's weights on a device.
struct WeightSizes {
  /// An MLP whose neurons are read one by one.
  struct Mlp {
    std::size_t count = 0;         ///< neurons
    std::size_t vector_bytes = 0;  ///< of a neuron's row of up, or column of down
    std::size_t section = 0;       ///< bytes of up and down, as WeightRing takes them
  };

  std::size_t outside = 0;                 ///< of ops that belong to no section
  std::vector<std::size_t> sections = {};  ///< as WeightRing takes them; without the MLPs
  std::vector<Mlp> mlps = {};              ///< only if neurons are measured
};

/// Counts bytes and copies nothing. The addresses of its weights must not be used.
class MeasuredWeights final : public DeviceWeights {
 public:
  /// `has_neurons`: neurons of MLPs are measured, and these MLPs are left out of the sections.
  explicit MeasuredWeights(bool has_neurons) : has_neurons_(has_neurons) {}
  [[nodiscard]] std::optional<NeuronWeights> neurons(const PanelMatrix& up, const PanelMatrix& down) override;
  void enter(std::int32_t section) override;
  [[nodiscard]] const WeightSizes& sizes() const { return sizes_; }

 private:
  [[nodiscard]] const std::byte* copy(std::span<const Piece> pieces, std::size_t padding) override;

  bool has_neurons_;
  WeightSizes sizes_;
  std::int32_t section_ = kNoSection;
};

/// Bytes of some weights in a section, as WeightRing takes them.
[[nodiscard]] std::size_t bytes_in_section(std::size_t bytes);

/// Returns which sections stream if the weights on the device may take `weight_memory` bytes: as few as
/// possible, with the others evenly between them, so that copies go on while these compute. Throws
/// ConfigError if not even two slots fit.
[[nodiscard]] std::vector<bool> streamed_sections(const WeightSizes& sizes, std::size_t weight_memory);

/// Copies the weights of streamed sections to a ring, and the others to the device.
class StreamedWeights final : public DeviceWeights {
 public:
  /// `streamed`: of each section; the ring has the streamed ones.
  StreamedWeights(const std::vector<bool>& streamed, ResidentWeights& resident, WeightRing& ring)
      : streamed_(streamed), resident_(resident), ring_(ring) {}

  void enter(std::int32_t section) override { section_ = section; }

 private:
  [[nodiscard]] const std::byte* copy(std::span<const Piece> pieces, std::size_t padding) override;

  const std::vector<bool>& streamed_;
  ResidentWeights& resident_;
  WeightRing& ring_;
  std::int32_t section_ = kNoSection;
};

}  // namespace adaptrt
