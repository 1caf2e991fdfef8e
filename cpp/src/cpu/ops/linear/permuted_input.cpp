#include "ops/linear/permuted_input.h"

#include <algorithm>
#include <span>
#include <vector>

#include "op_members.h"
#include "op_sizes.h"

namespace adaptrt {
namespace {

template <class Element>
void permute(const std::byte* from, std::span<const std::int32_t> permutation, std::byte* to) {
  const auto* source = reinterpret_cast<const Element*>(from);
  auto* target = reinterpret_cast<Element*>(to);
  for (const std::int32_t input : permutation) *target++ = source[input];
}

}  // namespace

std::int64_t PermutedInput::find_permutations(const LinearCall& call) const {
  std::vector<std::uint8_t>& permutations = context_.memory.linear.permutation_of_part;
  permutations.assign(spec_.parts.size(), 0);
  std::size_t most = 0;
  for (const RowGroup& group : call.groups) {
    const auto parts = spec_.parts.subspan(group.first_part, spec_.parts_per_group);
    for (std::size_t part = 0; part < parts.size(); ++part) {
      const auto permutation = parts[part].weight.permutation();
      std::size_t same = 0;
      while (same < part && !std::ranges::equal(parts[same].weight.permutation(), permutation)) ++same;
      permutations[group.first_part + part] = static_cast<std::uint8_t>(same);
      most = std::max(most, same);
    }
  }
  return static_cast<std::int64_t>(most) + 1;
}

void PermutedInput::make(const LinearCall& call, RowRange rows) const {
  auto group = std::ranges::upper_bound(call.groups, rows.begin, {},
                                        [](const RowGroup& each) { return each.rows.end; });
  for (; group != call.groups.end() && group->rows.begin < rows.end; ++group) {
    const RowRange shared{std::max(rows.begin, group->rows.begin), std::min(rows.end, group->rows.end)};
    for (std::size_t i = 0; i < spec_.parts_per_group; ++i) {
      const std::size_t part = group->first_part + i;
      if (permutation_of(part) != static_cast<std::int64_t>(i)) continue;  // a permutation of another part
      const auto permutation = spec_.parts[part].weight.permutation();
      const Rows made = this->rows(call, permutation_of(part));
      for (std::int64_t row = shared.begin; row < shared.end; ++row) {
        if (call.input.dtype == DType::kFloat32) {
          permute<std::uint32_t>(call.input.row(row), permutation, made.row(row));
        } else {
          permute<std::uint16_t>(call.input.row(row), permutation, made.row(row));
        }
      }
    }
  }
}

PermutedSize permuted_size(const Program& program) {
  PermutedSize size;
  const auto element = static_cast<std::int64_t>(size_of(activation_dtype(program.dtype)));
  const auto add = [&](const std::vector<LinearPart>& parts, std::size_t groups) {
    if (parts.empty() || !parts.front().weight.quantization.act_order) return;
    size.permutations = std::max(size.permutations, static_cast<std::int64_t>(parts.size() / groups));
    size.parts = std::max(size.parts, parts.size());
    size.row_bytes = std::max(size.row_bytes, parts.front().weight.k * element);
  };
  for_each_member<LinearOp>(program, [&](const LinearOp& op) { add(op.parts, 1); });
  for_each_member<LatentQueriesOp>(program, [&](const LatentQueriesOp& op) { add(op.keys, op.keys.size()); });
  for_each_member<LatentValuesOp>(program,
                                  [&](const LatentValuesOp& op) { add(op.values, op.values.size()); });
  for_each_member<ExpertsOp>(program, [&](const ExpertsOp& op) {
    add(op.gate_up, op.down.size());
    add(op.down, op.down.size());
  });
  return size;
}

}  // namespace adaptrt
