#include "lowered_program.h"

#include <optional>
#include <utility>
#include <variant>

#include "ops/linear/packed_places.h"
#include "ranks/overlapped_sum.h"
#include "weights/placed_weights.h"

namespace adaptrt {
namespace {

/// An op whose weights are read from the file before it runs.
class StreamedOp final : public LoweredOp {
 public:
  StreamedOp(LoweredOpPtr op, WeightStream& stream, std::size_t unit)
      : op_(std::move(op)), stream_(stream), unit_(unit) {}

  void run(Step& step) override {
    const WeightStream::Held held = stream_.hold(unit_);
    op_->run(step);
  }

 private:
  LoweredOpPtr op_;
  WeightStream& stream_;
  std::size_t unit_;
};

}  // namespace

LoweredSection::LoweredSection(StepSection section, const std::vector<Op>& ops, const CpuContext& context,
                               const SectionRows& rows)
    : section_(section), program_ops_(ops) {
  const std::vector<PackedPlace> packed = find_packed_places(ops, context);
  ops_.reserve(ops.size());
  for (std::size_t i = 0; i < ops.size(); ++i) {
    const OpPlace place{.context = context,
                        .rows = rows,
                        .packed_input = i == 0 ? PackedPlace{} : packed[i - 1],
                        .packed_output = packed[i],
                        .all_reduce = find_all_reduce(ops, i)};
    LoweredOpPtr op = std::visit([&](const auto& found) { return lower(found, place); }, ops[i]);
    const auto unit = context.weights == nullptr ? std::nullopt : context.weights->stream_unit(section, i);
    if (unit) op = std::make_unique<StreamedOp>(std::move(op), context.weights->stream(), *unit);
    ops_.push_back(std::move(op));
  }
}

}  // namespace adaptrt
