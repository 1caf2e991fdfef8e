#include "neuron_weights.h"

#include <algorithm>
#include <cstring>
#include <tuple>

namespace adaptrt {
namespace {

/// Bytes on the device besides those of neurons.
std::size_t fixed_bytes(const WeightSizes& sizes) {
  std::size_t bytes = sizes.outside;
  for (const std::size_t section : sizes.sections) bytes += section;
  std::size_t largest = 0;
  for (const WeightSizes::Mlp& mlp : sizes.mlps) {
    largest = std::max(largest, mlp.section);
    bytes += bytes_in_section(mlp.count * sizeof(std::int32_t));
    bytes += 2 * WeightRing::kAlignment;  // the neurons' two allocations
  }
  return bytes + WeightRing::kSlots * largest;
}

/// Bytes of a neuron on the device.
std::size_t neuron_bytes(const WeightSizes::Mlp& mlp) {
  return 2 * mlp.vector_bytes;
}

using Chosen = std::vector<std::vector<bool>>;

/// Keeps as many MLPs whole as possible, and the same share of the others, all evenly. A whole one has no
/// flags.
Chosen choose_evenly(const WeightSizes& sizes, std::size_t bytes) {
  std::size_t largest = 0;
  for (const WeightSizes::Mlp& mlp : sizes.mlps) largest = std::max(largest, mlp.section);
  const std::size_t count = sizes.mlps.size();
  // Not all weights fit, so at least one MLP is divided.
  const std::size_t num_divided = count - std::min(count - 1, bytes / largest);
  const auto is_divided = [&](std::size_t i) {
    return (i + 1) * num_divided / count > i * num_divided / count;
  };
  std::size_t divided_bytes = 0;
  for (std::size_t i = 0; i < count; ++i) {
    if (is_divided(i)) {
      divided_bytes += sizes.mlps[i].count * neuron_bytes(sizes.mlps[i]);
    } else {
      bytes -= sizes.mlps[i].section;
    }
  }
  const double share = std::min(1.0, static_cast<double>(bytes) / static_cast<double>(divided_bytes));
  Chosen chosen(count);
  for (std::size_t i = 0; i < count; ++i) {
    if (!is_divided(i)) continue;
    const std::size_t neurons = sizes.mlps[i].count;
    const auto kept = static_cast<std::size_t>(static_cast<double>(neurons) * share);
    for (std::size_t neuron = 0; neuron < neurons; ++neuron) {
      chosen[i].push_back((neuron + 1) * kept / neurons > neuron * kept / neurons);
    }
  }
  return chosen;
}

Chosen choose_most_used(const WeightSizes& sizes, std::size_t bytes,
                        std::span<const std::vector<std::uint32_t>> usage) {
  struct Neuron {
    std::uint32_t count;
    std::size_t mlp;
    std::size_t index;
  };
  std::vector<Neuron> neurons;
  Chosen chosen;
  for (std::size_t mlp = 0; mlp < sizes.mlps.size(); ++mlp) {
    const bool is_known = mlp < usage.size() && !usage[mlp].empty();
    for (std::size_t i = 0; i < sizes.mlps[mlp].count; ++i) {
      neurons.push_back({is_known ? usage[mlp][i] : 0, mlp, i});
    }
    chosen.emplace_back(sizes.mlps[mlp].count);
  }
  std::ranges::stable_sort(neurons, std::ranges::greater{}, &Neuron::count);
  for (const Neuron& neuron : neurons) {
    const std::size_t needed = neuron_bytes(sizes.mlps[neuron.mlp]);
    if (needed > bytes) break;
    bytes -= needed;
    chosen[neuron.mlp][neuron.index] = true;
  }
  return chosen;
}

}  // namespace

std::optional<NeuronPlan> plan_neurons(const WeightSizes& sizes, std::size_t weight_memory,
                                       std::span<const std::vector<std::uint32_t>> usage) {
  const std::size_t fixed = fixed_bytes(sizes);
  if (sizes.mlps.empty() || weight_memory < fixed) return std::nullopt;
  const bool is_known = std::ranges::any_of(usage, [](const auto& counts) { return !counts.empty(); });
  const std::size_t left = weight_memory - fixed;
  NeuronPlan plan;
  for (const std::vector<bool>& chosen :
       is_known ? choose_most_used(sizes, left, usage) : choose_evenly(sizes, left)) {
    std::int32_t next = 0;
    std::vector<std::int32_t>& slots = plan.emplace_back();
    for (const bool is_resident : chosen) slots.push_back(is_resident ? next++ : -1);
  }
  return plan;
}

std::optional<NeuronWeights> PlacedNeurons::neurons(const PanelMatrix& up, const PanelMatrix& down) {
  const std::vector<std::int32_t>& slots = plan_[next_++];
  if (slots.empty()) return std::nullopt;
  const std::size_t section = section_++;
  const auto append = [&](const PanelMatrix& matrix) {
    const WeightRing::Place place = ring_.append(section, matrix.bytes());
    std::memcpy(place.on_host, matrix.data, matrix.bytes());
    return place;
  };
  const WeightRing::Place up_place = append(up);
  const WeightRing::Place down_place = append(down);
  const Allocation columns = memory_.emplace_back(device_.allocate_pinned(down.bytes()));
  transpose(down.data, down.n, down.k, columns.data());
  const Piece slot_bytes = std::as_bytes(std::span(slots));
  const auto* on_device = reinterpret_cast<const std::int32_t*>(resident_.place({&slot_bytes, 1}, 0));
  const auto vectors = [&](const std::byte* pinned, std::int64_t size) -> cuda::NeuronVectors {
    const std::size_t bytes = static_cast<std::size_t>(size) * size_of(up.dtype);
    return {.slots = on_device, .resident = copy_resident(slots, pinned, bytes), .pinned = pinned};
  };
  return NeuronWeights{.up = up_place.on_device,
                       .down = down_place.on_device,
                       .rows = vectors(up_place.on_host, up.k),
                       .columns = vectors(columns.data(), down.n)};
}

const std::byte* PlacedNeurons::copy_resident(std::span<const std::int32_t> slots, const std::byte* pinned,
                                              std::size_t vector_bytes) {
  const auto count =
      static_cast<std::size_t>(std::ranges::count_if(slots, [](std::int32_t slot) { return slot >= 0; }));
  if (count == 0) return nullptr;
  std::byte* const memory = memory_.emplace_back(device_.allocate(count * vector_bytes)).data();
  for (std::size_t i = 0; i < slots.size();) {
    std::size_t end = i + 1;  // of neurons that all stay on the device, whose vectors are copied at once
    if (slots[i] >= 0) {
      while (end < slots.size() && slots[end] >= 0) ++end;
      stream_.copy_to_device(memory + static_cast<std::size_t>(slots[i]) * vector_bytes,
                             pinned + i * vector_bytes, (end - i) * vector_bytes);
    }
    i = end;
  }
  return memory;
}

void transpose(const std::byte* matrix, std::int64_t rows, std::int64_t columns, std::byte* to) {
  constexpr std::int64_t kTile = 64;
  constexpr std::size_t kElement = sizeof(std::uint16_t);
  for (std::int64_t first_column = 0; first_column < columns; first_column += kTile) {
    for (std::int64_t first_row = 0; first_row < rows; first_row += kTile) {
      for (std::int64_t column = first_column; column < std::min(columns, first_column + kTile); ++column) {
        for (std::int64_t row = first_row; row < std::min(rows, first_row + kTile); ++row) {
          std::memcpy(to + static_cast<std::size_t>(column * rows + row) * kElement,
                      matrix + static_cast<std::size_t>(row * columns + column) * kElement, kElement);
        }
      }
    }
  }
}

}  // namespace adaptrt
