#include "weight_sections.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "adaptrt/core/error.h"

namespace adaptrt {
namespace {

std::size_t bytes_of(std::span<const std::span<const std::byte>> pieces, std::size_t padding) {
  std::size_t bytes = padding;
  for (const auto& piece : pieces) bytes += piece.size();
  return bytes_in_section(bytes);
}

}  // namespace

std::size_t bytes_in_section(std::size_t bytes) {
  return (bytes + WeightRing::kAlignment - 1) / WeightRing::kAlignment * WeightRing::kAlignment;
}

std::optional<NeuronWeights> MeasuredWeights::neurons(const PanelMatrix& up, const PanelMatrix& down) {
  if (!has_neurons_) return std::nullopt;
  sizes_.mlps.push_back({.count = static_cast<std::size_t>(up.n),
                         .vector_bytes = static_cast<std::size_t>(up.k) * size_of(up.dtype),
                         .section = bytes_in_section(up.bytes()) + bytes_in_section(down.bytes())});
  return NeuronWeights{};
}

void MeasuredWeights::enter(std::int32_t section) {
  section_ = section;
  if (section != kNoSection) sizes_.sections.resize(static_cast<std::size_t>(section) + 1);
}

const std::byte* MeasuredWeights::copy(std::span<const Piece> pieces, std::size_t padding) {
  (section_ == kNoSection ? sizes_.outside : sizes_.sections.back()) += bytes_of(pieces, padding);
  static constexpr std::byte kSomewhere{};
  return &kSomewhere;
}

std::vector<bool> streamed_sections(const WeightSizes& sizes, std::size_t weight_memory) {
  const std::size_t count = sizes.sections.size();
  std::size_t all = sizes.outside;
  for (const std::size_t bytes : sizes.sections) all += bytes;
  if (all <= weight_memory) return std::vector<bool>(count, false);
  const std::size_t largest = count == 0 ? 0 : std::ranges::max(sizes.sections);
  const std::size_t least = sizes.outside + WeightRing::kSlots * largest;
  if (weight_memory < least) {
    throw ConfigError("weight_memory is " + std::to_string(weight_memory) + "; expected at least " +
                      std::to_string(std::min(least, all)) + ": " + std::to_string(sizes.outside) +
                      " bytes stay on the GPU, and two layers of at most " + std::to_string(largest) +
                      " bytes take turns there");
  }
  // Not all sections fit, so more than kSlots of them stream.
  const std::size_t num_streamed = count - (weight_memory - least) / largest;
  std::vector<bool> streamed;
  for (std::size_t i = 0; i < count; ++i) {
    streamed.push_back((i + 1) * num_streamed / count > i * num_streamed / count);
  }
  return streamed;
}

const std::byte* StreamedWeights::copy(std::span<const Piece> pieces, std::size_t padding) {
  if (section_ == kNoSection || !streamed_[static_cast<std::size_t>(section_)]) {
    return resident_.place(pieces, padding);
  }
  const auto before = std::count(streamed_.begin(), streamed_.begin() + section_, true);
  const WeightRing::Place place = ring_.append(static_cast<std::size_t>(before), bytes_of(pieces, padding));
  std::byte* next = place.on_host;
  for (const Piece& piece : pieces) next = std::ranges::copy(piece, next).out;
  std::memset(next, 0, padding);
  return place.on_device;
}

}  // namespace adaptrt
