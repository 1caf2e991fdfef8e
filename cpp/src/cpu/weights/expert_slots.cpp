#include "weights/expert_slots.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

#include "weights/weight_plan.h"

namespace adaptrt {

ExpertSlots::ExpertSlots(const ExpertsOp& op, const WeightMemory& memory, std::shared_ptr<WeightFile> file,
                         std::vector<FilePages> experts, std::size_t num_slots)
    : gate_up_(op.gate_up), down_(op.down), slots_(std::move(file), std::move(experts), num_slots) {
  const auto forget = [&](std::vector<LinearPart>& parts, std::vector<std::size_t>& offsets) {
    for (LinearPart& part : parts) {
      offsets.push_back(*file_offset(memory, part.weight.data));
      part.weight.data = nullptr;
    }
  };
  forget(gate_up_, gate_up_offsets_);
  forget(down_, down_offsets_);
  wanted_.reserve(num_slots);
}

void ExpertSlots::bring(std::span<const RowGroup> experts) {
  wanted_.clear();
  for (const RowGroup& group : experts) wanted_.push_back(group.first_part);
  bring_wanted();
}

void ExpertSlots::fill(std::span<const std::uint32_t> counts) {
  wanted_.resize(counts.size());
  std::iota(wanted_.begin(), wanted_.end(), std::size_t{0});
  std::ranges::stable_sort(wanted_, std::ranges::greater(),
                           [&](std::size_t expert) { return counts[expert]; });
  wanted_.resize(std::min(wanted_.size(), most()));
  // Evicts the experts that were used least.
  std::ranges::reverse(wanted_);
  for (const std::size_t expert : std::vector<std::size_t>(wanted_)) {
    wanted_.assign(1, expert);
    bring_wanted();
  }
}

void ExpertSlots::bring_wanted() {
  slots_.bring(wanted_);
  for (const std::size_t expert : wanted_) point(expert);
}

void ExpertSlots::point(std::size_t expert) {
  const std::size_t parts = gate_up_.size() / down_.size();
  for (std::size_t part = expert * parts; part < (expert + 1) * parts; ++part) {
    gate_up_[part].weight.data = slots_.address_of(expert, gate_up_offsets_[part]);
  }
  down_[expert].weight.data = slots_.address_of(expert, down_offsets_[expert]);
}

}  // namespace adaptrt
