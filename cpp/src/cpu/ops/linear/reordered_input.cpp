#include "ops/linear/reordered_input.h"

#include <algorithm>
#include <span>
#include <variant>
#include <vector>

#include "op_sizes.h"

namespace adaptrt {
namespace {

template <class Element>
void reorder(const std::byte* from, std::span<const std::int32_t> order, std::byte* to) {
  const auto* source = reinterpret_cast<const Element*>(from);
  auto* target = reinterpret_cast<Element*>(to);
  for (const std::int32_t input : order) *target++ = source[input];
}

}  // namespace

std::int64_t ReorderedInput::find_orders(const LinearCall& call) const {
  std::vector<std::uint8_t>& orders = context_.memory.linear.order_of_part;
  orders.assign(spec_.parts.size(), 0);
  std::size_t most = 0;
  for (const RowGroup& group : call.groups) {
    const auto parts = spec_.parts.subspan(group.first_part, spec_.parts_per_group);
    for (std::size_t part = 0; part < parts.size(); ++part) {
      const auto order = parts[part].weight.input_order();
      std::size_t same = 0;
      while (same < part && !std::ranges::equal(parts[same].weight.input_order(), order)) ++same;
      orders[group.first_part + part] = static_cast<std::uint8_t>(same);
      most = std::max(most, same);
    }
  }
  return static_cast<std::int64_t>(most) + 1;
}

void ReorderedInput::make(const LinearCall& call, RowRange rows) const {
  auto group = std::ranges::upper_bound(call.groups, rows.begin, {},
                                        [](const RowGroup& each) { return each.rows.end; });
  for (; group != call.groups.end() && group->rows.begin < rows.end; ++group) {
    const RowRange shared{std::max(rows.begin, group->rows.begin), std::min(rows.end, group->rows.end)};
    for (std::size_t i = 0; i < spec_.parts_per_group; ++i) {
      const std::size_t part = group->first_part + i;
      if (order_of(part) != static_cast<std::int64_t>(i)) continue;  // another part's
      const auto order = spec_.parts[part].weight.input_order();
      const Rows made = this->rows(call, order_of(part));
      for (std::int64_t row = shared.begin; row < shared.end; ++row) {
        if (call.input.dtype == DType::kFloat32) {
          reorder<std::uint32_t>(call.input.row(row), order, made.row(row));
        } else {
          reorder<std::uint16_t>(call.input.row(row), order, made.row(row));
        }
      }
    }
  }
}

ReorderedSize reordered_size(const Program& program) {
  ReorderedSize size;
  const auto element = static_cast<std::int64_t>(size_of(activation_dtype(program.dtype)));
  const auto add = [&](const std::vector<LinearPart>& parts, std::size_t groups) {
    if (parts.empty() || !parts.front().weight.quantization.reordered) return;
    size.orders = std::max(size.orders, static_cast<std::int64_t>(parts.size() / groups));
    size.parts = std::max(size.parts, parts.size());
    size.row_bytes = std::max(size.row_bytes, parts.front().weight.k * element);
  };
  for (const auto* ops : program.sections()) {
    for (const auto& op : *ops) {
      if (const auto* linear = std::get_if<LinearOp>(&op)) add(linear->parts, 1);
      if (const auto* experts = std::get_if<ExpertsOp>(&op)) {
        add(experts->gate_up, experts->down.size());
        add(experts->down, experts->down.size());
      }
    }
  }
  return size;
}

}  // namespace adaptrt
