// Memory for ExpertsOps.

#include "ops/experts/expert_memory.h"

#include <algorithm>

#include "adaptrt/cpu/routing.h"
#include "op_sizes.h"
#include "ops/latent_memory.h"
#include "packed_rows.h"

namespace adaptrt {
namespace {

/// Maximum number of rows in a slice, unless one token has more experts. It is large enough that each of many
/// experts has rows to amortise reading its weights, and small enough that the rows are small compared with
/// the weights.
constexpr std::int64_t kMostRows = 8192;

std::int64_t rows_of_slice(const Program& program, const ExpertsOp& op) {
  return tokens_of_slice(program, op) * op.routing.top_k;
}

template <class Visit>
void for_each_experts_op(const Program& program, const Visit& visit) {
  for (const Op& op : program.body) {
    if (const auto* experts = std::get_if<ExpertsOp>(&op)) visit(*experts);
  }
}

/// Inputs of one expert, for as many rows as kernels multiply at once.
std::size_t bytes_packed_by_thread(const KernelTable& kernels, std::int64_t rows, const ExpertsOp& op) {
  const auto row_bytes = op.down.front().weight.n * static_cast<std::int64_t>(size_of(DType::kBFloat16));
  const std::int64_t blocks = PackedSteps::blocks_of(std::min(rows, kernels.block_rows));
  return static_cast<std::size_t>(PackedSteps::steps_of(row_bytes) * odd_step_bytes(blocks));
}

}  // namespace

std::int64_t tokens_of_slice(const Program& program, const ExpertsOp& op) {
  const auto most = std::max<std::int64_t>(1, kMostRows / op.routing.top_k);
  return std::min<std::int64_t>(most, program.max_num_tokens);
}

ExpertMemory::ExpertMemory(const Program& program, const KernelTable& kernels, int num_threads) {
  const std::int64_t step_bytes = packed_rows_size(program, kernels).step_bytes;
  // Rows are packed or consecutive.
  const auto bytes_of = [&](std::size_t rows, std::size_t row_bytes) {
    const std::int64_t steps = PackedSteps::steps_of(static_cast<std::int64_t>(row_bytes));
    return std::max(rows * row_bytes, static_cast<std::size_t>(steps * step_bytes));
  };
  std::size_t rows = 0;
  std::size_t tokens = 0;
  std::size_t experts = 0;
  std::size_t input_bytes = 0;
  std::size_t activated_bytes = 0;
  std::size_t output_bytes = 0;
  std::size_t thread_bytes = 0;
  const std::size_t element = size_of(activation_dtype(program.dtype));
  for_each_experts_op(program, [&](const ExpertsOp& op) {
    const auto of_op = static_cast<std::size_t>(rows_of_slice(program, op));
    const auto outer = static_cast<std::size_t>(op.down.front().weight.n);
    const auto inner = static_cast<std::size_t>(op.down.front().weight.k);
    rows = std::max(rows, of_op);
    tokens = std::max(tokens, static_cast<std::size_t>(tokens_of_slice(program, op)));
    experts = std::max(experts, op.down.size());
    input_bytes = std::max(input_bytes, bytes_of(of_op, outer * element));
    activated_bytes = std::max(activated_bytes, bytes_of(of_op, inner * element));
    // Threads with separate panels have whole ones.
    const auto whole_outer = static_cast<std::size_t>(panel_count(op.down.front().weight.n) * kPanelColumns);
    output_bytes = std::max(output_bytes, of_op * whole_outer * sizeof(float));
    thread_bytes = std::max(thread_bytes, bytes_packed_by_thread(kernels, rows_of_slice(program, op), op));
  });
  chosen.resize(rows);
  here.resize(tokens);
  weights.resize(rows);
  row_of.resize(rows);
  token_of.resize(rows);
  weight_of.resize(rows);
  factor_of.resize(rows);
  first_row.reserve(experts + 1);
  experts_taken.reserve(experts);
  groups.reserve(experts);
  adapters.reserve(rows);
  adapter_expert.reserve(rows);
  taken.rows.reserve(experts);
  taken.adapted.reserve(rows);
  inputs_ = HugeArray(input_bytes);
  activated_ = HugeArray(activated_bytes);
  outputs_ = HugeArray(output_bytes);
  if (step_bytes == 0 || thread_bytes == 0) return;
  for (int thread = 0; thread < num_threads; ++thread) {
    packed_by_thread.push_back({.memory = HugeArray(thread_bytes)});
  }
}

std::int64_t most_linear_rows(const Program& program) {
  const std::int64_t rows = std::max(program.max_num_tokens, program.max_batch_size);
  std::int64_t most = std::max(rows, most_latent_rows(program));
  for_each_experts_op(program,
                      [&](const ExpertsOp& op) { most = std::max(most, rows_of_slice(program, op)); });
  return most;
}

std::size_t expert_scratch_floats(const Program& program) {
  std::int64_t floats = 0;
  for_each_experts_op(program,
                      [&](const ExpertsOp& op) { floats = std::max(floats, routing_scratch_floats(op)); });
  return static_cast<std::size_t>(floats);
}

}  // namespace adaptrt
