#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "adaptrt/core/compressed_panels.h"
#include "ops/linear/linear_spec.h"

namespace adaptrt {

/// Panels [begin, end) of a layer's outputs.
struct PanelRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

/// The units of a linear layer and their addresses. A unit is a panel of columns; in a gated layer, the same
/// panel of both parts.
class LinearUnits {
 public:
  /// Units of `panels` of each group.
  LinearUnits(const LinearSpec& spec, PanelRange panels) : spec_(spec), panels_(panels) {}

  /// Number of units of each group.
  [[nodiscard]] std::int64_t count() const { return panels_.end - panels_.begin; }
  [[nodiscard]] bool is_gated() const { return adaptrt::is_gated(spec_.epilogue); }

  /// Place of panel `unit`, counted through a group's parts one after another.
  [[nodiscard]] PanelPlace place_of(std::int64_t unit, std::size_t first_part) const {
    PanelPlace place{first_part, panels_.begin + unit};
    for (; place.panel >= panel_count(spec_.parts[place.part].weight.n); ++place.part) {
      place.panel -= panel_count(spec_.parts[place.part].weight.n);
    }
    return place;
  }

  /// The first panel of a unit.
  [[nodiscard]] PanelPlace first_place_of(std::int64_t unit, std::size_t first_part) const {
    return is_gated() ? PanelPlace{first_part, unit} : place_of(unit, first_part);
  }

  [[nodiscard]] const std::byte* panel_data(PanelPlace place) const {
    const PanelMatrix& weight = spec_.parts[place.part].weight;
    return weight.data + weight.offset(place.panel);
  }

  /// Address of the weights of a group's unit.
  [[nodiscard]] const std::byte* panel_of(const RowGroup& group, std::int64_t unit) const {
    return panel_data(first_place_of(unit, group.first_part));
  }

  /// Address of a panel's weights from input `inputs.begin` on, if the panel is stored in the order of
  /// inputs.
  [[nodiscard]] const std::byte* inputs_data(PanelPlace place, InputRange inputs) const {
    const PanelMatrix& weight = spec_.parts[place.part].weight;
    const std::byte* panel = panel_data(place);
    if (inputs.begin == 0) return panel;
    if (weight.is_compressed(place.panel)) {
      return panel + compressed_input_offset(inputs.begin, weight.outliers);
    }
    if (weight.quantization.algo != QuantAlgo::kNone) return panel;
    return panel + panel_bytes(weight.dtype, panel_width(weight.n, place.panel), inputs.begin);
  }

  using ActivationSpans = std::array<MemorySpan, 16>;
  /// Memory of share `index` of `count` shares of the packed rows' inputs; limited by the room for spans.
  [[nodiscard]] std::span<const MemorySpan> activations_of(const PackedRows& packed, std::int64_t rows,
                                                           InputRange inputs, std::int64_t index,
                                                           std::int64_t count, ActivationSpans* spans) const {
    if (!packed.has_value() || spec_.quantization().algo != QuantAlgo::kNone) return {};
    const auto step_of = [](std::int64_t input) { return input * 2 / PackedSteps::kRowBytes; };
    const std::int64_t steps = step_of(inputs.end) - step_of(inputs.begin);
    const std::byte* first = packed.data + step_of(inputs.begin) * packed.step_bytes;
    std::size_t used = 0;
    for (std::int64_t s = steps * index / count; s < steps * (index + 1) / count && used < spans->size();
         ++s) {
      (*spans)[used++] = {first + s * packed.step_bytes, rows * PackedSteps::kRowBytes};
    }
    return std::span(*spans).first(used);
  }

 private:
  const LinearSpec& spec_;
  PanelRange panels_;
};

}  // namespace adaptrt
