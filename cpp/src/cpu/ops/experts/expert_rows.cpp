#include "ops/experts/expert_rows.h"

#include <algorithm>
#include <span>

#include "adaptrt/cpu/routing.h"
#include "ops/experts/expert_memory.h"

namespace adaptrt {
namespace {

/// Rows of one ExpertsOp in one step.
class ExpertRows {
 public:
  ExpertRows(const ExpertsOp& op, const CpuContext& context, const Step& step)
      : op_(op),
        context_(context),
        step_(step),
        memory_(context.memory.experts),
        router_logits_(context.rows_of(op.router_logits)),
        top_k_(op.routing.top_k) {}

  /// Visits the tokens [first, first + count).
  void take(std::int64_t first, std::int64_t count) const {
    route(first, count);
    choose_here(count);
    sort_rows(count);
    group_adapters(first, count);
  }

 private:
  void route(std::int64_t first, std::int64_t count) const {
    const auto body = [&](std::int64_t begin, std::int64_t end, int thread) {
      float* scratch = context_.scratch(thread);
      for (std::int64_t token = begin; token < end; ++token) {
        route_token(op_, context_.kernels, router_logits_.float_row(first + token), scratch,
                    memory_.chosen.data() + token * top_k_, memory_.weights.data() + token * top_k_);
      }
    };
    context_.threads.parallel_for(count, rows_per_chunk(op_.num_experts() * top_k_), body);
  }

  /// Finds the local experts of a token. They are neighbours, because a token's experts ascend.
  void choose_here(std::int64_t count) const {
    const auto end_here = op_.first_expert + static_cast<std::int32_t>(op_.num_experts_here());
    for (std::int64_t token = 0; token < count; ++token) {
      const auto chosen = experts_of(token);
      const auto begin = std::ranges::lower_bound(chosen, op_.first_expert);
      const auto end = std::lower_bound(begin, chosen.end(), end_here);
      memory_.here[static_cast<std::size_t>(token)] = {begin - chosen.begin(), end - chosen.begin()};
    }
  }

  [[nodiscard]] std::span<const std::int32_t> experts_of(std::int64_t token) const {
    return std::span(memory_.chosen)
        .subspan(static_cast<std::size_t>(token * top_k_), static_cast<std::size_t>(top_k_));
  }

  /// Calls visit(token, place in memory_.chosen, local expert).
  template <class Visit>
  void for_each_here(std::int64_t count, const Visit& visit) const {
    for (std::int64_t token = 0; token < count; ++token) {
      const RowRange here = memory_.here[static_cast<std::size_t>(token)];
      for (std::int64_t i = here.begin; i < here.end; ++i) {
        const auto place = static_cast<std::size_t>(token * top_k_ + i);
        visit(token, place, static_cast<std::size_t>(memory_.chosen[place] - op_.first_expert));
      }
    }
  }

  /// Sorted by expert, then by token.
  void sort_rows(std::int64_t count) const {
    const auto experts = static_cast<std::size_t>(op_.num_experts_here());
    memory_.first_row.assign(experts + 1, 0);
    for_each_here(count,
                  [&](std::int64_t, std::size_t, std::size_t expert) { ++memory_.first_row[expert + 1]; });
    memory_.experts_taken.clear();
    for (std::size_t expert = 0; expert < experts; ++expert) {
      const std::int64_t begin = memory_.first_row[expert];
      const std::int64_t rows = memory_.first_row[expert + 1];
      memory_.first_row[expert + 1] += begin;
      memory_.taken.rows[expert] += rows;
      if (rows > 0) memory_.experts_taken.push_back({{begin, begin + rows}, expert});
    }
    // first_row[e] moves through the rows of e, up to the first row of e + 1.
    for_each_here(count, [&](std::int64_t token, std::size_t place, std::size_t expert) {
      const std::int64_t row = memory_.first_row[expert]++;
      memory_.row_of[place] = static_cast<std::int32_t>(row);
      memory_.token_of[static_cast<std::size_t>(row)] = static_cast<std::int32_t>(token);
      if (op_.routing.scales_inputs) {
        memory_.factor_of[static_cast<std::size_t>(row)] = memory_.weights[place];
        memory_.weights[place] = 1.0F;
      }
      memory_.weight_of[static_cast<std::size_t>(row)] = memory_.weights[place];
    });
  }

  /// An expert's rows are in the order of their tokens, as the step's groups are.
  void group_adapters(std::int64_t first, std::int64_t count) const {
    memory_.adapters.clear();
    memory_.adapter_expert.clear();
    if (op_.gate_up_site < 0) return;
    for (const RowGroup& group : memory_.experts_taken) {
      std::int64_t row = group.rows.begin;
      for (const AdapterGroup& adapted : step_.groups) {
        if (adapted.end <= first || adapted.begin >= first + count) continue;
        while (row < group.rows.end && first + token_of(row) < adapted.begin) ++row;
        const std::int64_t begin = row;
        while (row < group.rows.end && first + token_of(row) < adapted.end) ++row;
        if (begin == row) continue;
        memory_.adapters.push_back({begin, row, adapted.adapter});
        memory_.adapter_expert.push_back(group.first_part);
        memory_.taken.adapted.push_back({group.first_part, adapted.adapter, row - begin});
      }
    }
  }

  [[nodiscard]] std::int64_t token_of(std::int64_t row) const {
    return memory_.token_of[static_cast<std::size_t>(row)];
  }

  const ExpertsOp& op_;
  const CpuContext& context_;
  const Step& step_;
  ExpertMemory& memory_;
  Rows router_logits_;
  std::int64_t top_k_;
};

}  // namespace

void take_experts(const ExpertsOp& op, const CpuContext& context, const Step& step, std::int64_t first,
                  std::int64_t count) {
  ExpertRows(op, context, step).take(first, count);
}

}  // namespace adaptrt
