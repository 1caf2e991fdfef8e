#include "placed_weights.h"

#include <sys/mman.h>

#include <unordered_set>
#include <utility>
#include <variant>

#include "weight_views.h"

namespace adaptrt {
namespace {

std::vector<Op>& ops_of(Program& program, std::size_t section) {
  std::vector<Op>* const sections[] = {&program.encoder, &program.body, &program.head};
  return *sections[section];
}

}  // namespace

PlacedWeights::PlacedWeights(Program* program, const WeightMemory& memory)
    : file_(std::make_shared<WeightFile>(memory.path)) {
  WeightPlan plan = plan_weights(*program, memory);
  read_resident(program, memory, plan);
  if (!plan.streamed.empty()) make_stream(program, memory, &plan);
  make_slots(*program, memory, &plan);
  placement_.resident_bytes = resident_.bytes();
  placement_.is_direct = file_->is_direct();
  lock();
}

void PlacedWeights::read_resident(Program* program, const WeightMemory& memory, const WeightPlan& plan) {
  const FilePages pages(plan.resident);
  resident_ = HugeArray(pages.bytes());
  file_->read(pages, resident_.data());
  std::unordered_set<std::size_t> offsets;
  for (const FileRange& range : plan.resident) offsets.insert(range.offset);
  for (std::size_t section = 0; section < units_.size(); ++section) {
    for (Op& op : ops_of(*program, section)) {
      for_each_matrix(op, [&](PanelMatrix& matrix) {
        const auto range = file_range(memory, matrix);
        if (range && offsets.contains(range->offset)) {
          matrix.data = resident_.data() + pages.place_of(range->offset);
        }
      });
      for_each_vector(op, [&](VectorView& vector) {
        const auto range = file_range(memory, vector);
        if (range) {
          vector.data = reinterpret_cast<const float*>(resident_.data() + pages.place_of(range->offset));
        }
      });
    }
  }
}

void PlacedWeights::make_stream(Program* program, const WeightMemory& memory, WeightPlan* plan) {
  std::vector<FilePages> pages;
  std::size_t first_of_body = 0;
  for (std::size_t section = 0; section < units_.size(); ++section) {
    units_[section].assign(ops_of(*program, section).size(), kNone);
  }
  for (const WeightPlan::Streamed& streamed : plan->streamed) {
    units_[static_cast<std::size_t>(streamed.section)][streamed.op] = pages.size();
    pages.push_back(streamed.pages);
    for (const FileRange& piece : streamed.pages.pieces()) placement_.file_bytes += piece.bytes;
    if (streamed.section == StepSection::kEncoder) ++first_of_body;
  }
  if (first_of_body == pages.size()) first_of_body = 0;
  stream_ = std::make_unique<WeightStream>(file_, std::move(pages), plan->ring_bytes, first_of_body);
  placement_.buffer_bytes += plan->ring_bytes;
  for (std::size_t unit = 0; unit < plan->streamed.size(); ++unit) {
    const WeightPlan::Streamed& streamed = plan->streamed[unit];
    Op& op = ops_of(*program, static_cast<std::size_t>(streamed.section))[streamed.op];
    for_each_matrix(op, [&](PanelMatrix& matrix) {
      matrix.data = stream_->address_of(unit, *file_offset(memory, matrix.data));
    });
  }
}

void PlacedWeights::make_slots(const Program& program, const WeightMemory& memory, WeightPlan* plan) {
  for (WeightPlan::Experts& layer : plan->experts) {
    const auto& op = std::get<ExpertsOp>(program.body[layer.op]);
    for (const FilePages& expert : layer.experts) placement_.file_bytes += expert.bytes();
    const auto& made =
        experts_.try_emplace(op.down.data(), op, memory, file_, std::move(layer.experts), layer.slots)
            .first->second;
    placement_.buffer_bytes += made.memory().bytes();
  }
}

void PlacedWeights::lock() {
  const auto lock_one = [](const HugeArray& array) {
    return array.bytes() == 0 || mlock(array.data(), array.bytes()) == 0;
  };
  placement_.is_locked = lock_one(resident_) && (!stream_ || lock_one(stream_->ring()));
  for (const auto& [parts, slots] : experts_) {
    placement_.is_locked = placement_.is_locked && lock_one(slots.memory());
  }
}

std::optional<WeightStream::Held> PlacedWeights::hold(StepSection section, std::size_t op) {
  if (!stream_) return std::nullopt;
  const std::size_t unit = units_[static_cast<std::size_t>(section)][op];
  if (unit == kNone) return std::nullopt;
  return stream_->hold(unit);
}

ExpertSlots* PlacedWeights::experts_of(const ExpertsOp& op) {
  const auto found = experts_.find(op.down.data());
  return found == experts_.end() ? nullptr : &found->second;
}

WeightPlacement PlacedWeights::placement() const {
  WeightPlacement now = placement_;
  now.bytes_read = file_->bytes_read();
  return now;
}

}  // namespace adaptrt
