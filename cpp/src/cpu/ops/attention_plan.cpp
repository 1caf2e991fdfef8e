#include "ops/attention_plan.h"

#include <algorithm>
#include <tuple>
#include <variant>

#include "given_rows.h"

namespace adaptrt {
namespace {

/// Number of rows that share a tile's keys and values, if there are enough queries. A multiple of every
/// kernel's block of rows.
constexpr std::int64_t kTargetRows = 96;
/// Tasks with few queries process several heads, whose keys and values are neighbours in memory. Every thread
/// must still get this number of tasks.
constexpr std::int64_t kTasksPerThread = 4;

std::int64_t positions_per_task(const AttentionShape& shape) {
  return std::max<std::int64_t>(1, kTargetRows * key_heads(shape) / shape.num_attention_heads);
}

/// Key heads of the tasks of a step whose sequences have one token each.
std::int64_t heads_per_task(std::int64_t num_sequences, const AttentionShape& shape, int num_threads) {
  const std::int64_t most = std::min(key_heads(shape), positions_per_task(shape));
  const std::int64_t enough = num_sequences * key_heads(shape) / (kTasksPerThread * num_threads);
  return std::clamp<std::int64_t>(enough, 1, most);
}

bool have_equal_tasks(const AttentionShape& a, const AttentionShape& b) {
  return a.num_attention_heads == b.num_attention_heads && key_heads(a) == key_heads(b);
}

/// A run of neighbours with the same number.
struct Run {
  std::int32_t end = 0;
  float number = -1.0F;  ///< -1: the tokens have no rows, or no number
};

/// Finds the runs of a step's tokens.
class Runs {
 public:
  Runs(const StepInput& input, const RunRule& rule)
      : input_(input),
        column_(rule.window >= 0 ? rule.window : rule.joint),
        chunk_(rule.chunk),
        rows_(input, 0) {}

  /// Returns the run that begins at a token, up to the `end` of its sequence.
  [[nodiscard]] Run at(std::int32_t token, std::int32_t end) {
    if (chunk_ != 0) {
      const std::int32_t place = input_.positions[static_cast<std::size_t>(token)] % chunk_;
      return {.end = std::min(chunk_ - place, end - token) + token};
    }
    if (column_ < 0) return {.end = end};
    const float number = number_of(token);
    while (++token < end && number_of(token) == number) {
    }
    return {.end = token, .number = number};
  }

 private:
  [[nodiscard]] float number_of(std::int32_t token) {
    const float* row = rows_.of(token);
    return row == nullptr ? -1.0F : row[column_];
  }

  const StepInput& input_;
  std::int32_t column_;  ///< -1: there is none
  std::int32_t chunk_;
  GivenRows rows_;
};

/// Position of the first token of a token's chunk.
std::int32_t chunk_start_of(const StepInput& input, std::int32_t token, std::int32_t chunk) {
  const std::int32_t position = input.positions[static_cast<std::size_t>(token)];
  return position - position % chunk;
}

void plan_attention(const StepInput& input, const AttentionShape& shape, const RunRule& rule, int num_threads,
                    std::vector<AttentionTask>* tasks) {
  const std::size_t sequences = input.prompt_lengths.size();
  const auto positions = static_cast<std::int32_t>(positions_per_task(shape));
  const auto kv_heads = static_cast<std::int32_t>(key_heads(shape));
  const auto together =
      static_cast<std::int32_t>(heads_per_task(static_cast<std::int64_t>(sequences), shape, num_threads));
  const bool has_windows = rule.window >= 0;
  Runs runs(input, rule);
  tasks->clear();
  for (std::size_t sequence = 0; sequence < sequences; ++sequence) {
    const std::int32_t begin = input.sequence_offsets[sequence];
    const std::int32_t end = input.sequence_offsets[sequence + 1];
    const std::int32_t heads = end - begin == 1 ? together : 1;
    Run run;
    for (std::int32_t run_begin = begin; run_begin < end; run_begin = run.end) {
      run = runs.at(run_begin, end);
      const bool is_joint = !has_windows && run.number >= 0.0F;
      const std::int32_t first_key = has_windows       ? run_begin - begin
                                     : rule.chunk == 0 ? 0
                                                       : chunk_start_of(input, run_begin, rule.chunk);
      for (std::int32_t first = run_begin; first < run.end; first += positions) {
        for (std::int32_t head = 0; head < kv_heads; head += heads) {
          tasks->push_back({.sequence = static_cast<std::int32_t>(sequence),
                            .first_token = first,
                            .tokens = std::min(positions, run.end - first),
                            .first_head = head,
                            .heads = std::min(heads, kv_heads - head),
                            .first_key = first_key,
                            .end_key = has_windows ? run.end - begin : 0,
                            .end_token = is_joint ? run.end : 0});
        }
      }
    }
  }
  const auto order = [&](const AttentionTask& task) {
    const std::int64_t before = has_windows ? 0 : task.first_key;
    const std::int64_t keys = input.positions[static_cast<std::size_t>(task.first_token)] + 1 - before;
    return std::tuple(-task.tokens * task.heads * keys, task.first_token, task.first_head);
  };
  // std::stable_sort would allocate.
  std::sort(tasks->begin(), tasks->end(),
            [&](const AttentionTask& a, const AttentionTask& b) { return order(a) < order(b); });
}

RunRule rule_of(const Op& op) {
  const auto* attention = std::get_if<AttentionOp>(&op);
  if (attention == nullptr) return {};
  return {.window = attention->window_column, .joint = attention->joint_column, .chunk = attention->chunk};
}

}  // namespace

std::int64_t key_heads(const AttentionShape& shape) {
  if (!shape.values_are_keys) return shape.num_key_value_heads;
  // Fewer rows than this would not keep the kernels busy.
  constexpr std::int64_t kLeastRows = 8;
  std::int64_t heads = std::max<std::int64_t>(1, shape.num_attention_heads / kLeastRows);
  while (shape.num_attention_heads % heads != 0) --heads;
  return heads;
}

std::int64_t rows_per_task(const AttentionShape& shape) {
  return positions_per_task(shape) * (shape.num_attention_heads / key_heads(shape));
}

const AttentionShape* shape_of(const Op& op) {
  if (const auto* attention = std::get_if<AttentionOp>(&op)) return &attention->shape;
  if (const auto* cross = std::get_if<CrossAttentionOp>(&op)) return &cross->shape;
  const auto* keys = std::get_if<CrossKeysOp>(&op);
  return keys == nullptr ? nullptr : &keys->shape;
}

AttentionPlans::AttentionPlans(const std::vector<Op>& ops) {
  for (const Op& op : ops) {
    const AttentionShape* shape = shape_of(op);
    if (shape == nullptr) continue;
    const RunRule rule = rule_of(op);
    const auto same = [&](const Plan& plan) {
      return plan.rule == rule && have_equal_tasks(plan.shape, *shape);
    };
    if (std::ranges::none_of(plans_, same)) {
      plans_.push_back({.shape = *shape, .rule = rule, .tasks = {}});
    }
  }
}

void AttentionPlans::make(const StepInput& input, int num_threads) {
  for (Plan& plan : plans_) plan_attention(input, plan.shape, plan.rule, num_threads, &plan.tasks);
}

const std::vector<AttentionTask>& AttentionPlans::tasks_of(const AttentionShape& shape,
                                                           const RunRule& rule) const {
  const auto has_tasks = [&](const Plan& plan) {
    return plan.rule == rule && have_equal_tasks(plan.shape, shape);
  };
  return std::ranges::find_if(plans_, has_tasks)->tasks;
}

}  // namespace adaptrt
