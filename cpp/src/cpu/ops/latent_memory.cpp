#include "ops/latent_memory.h"

#include <algorithm>

#include "op_members.h"

namespace adaptrt {
namespace {

/// Maximum number of rows in a slice, unless one token has more heads.
constexpr std::int64_t kMostHeadRows = 8192;

/// Calls visit(number of heads, width of a head's input, width of its output) for each op.
template <class Visit>
void for_each_latent_op(const Program& program, const Visit& visit) {
  for_each_member<LatentQueriesOp>(program, [&](const LatentQueriesOp& op) {
    visit(op.shape.num_heads, op.shape.plain_dim, op.shape.latent_dim);
  });
  for_each_member<LatentValuesOp>(program, [&](const LatentValuesOp& op) {
    visit(op.shape.num_heads, op.shape.latent_dim, op.shape.value_dim);
  });
}

}  // namespace

std::int64_t tokens_of_heads(const Program& program, std::int64_t num_heads) {
  return std::clamp<std::int64_t>(kMostHeadRows / num_heads, 1, program.max_num_tokens);
}

std::int64_t most_latent_rows(const Program& program) {
  std::int64_t most = 0;
  for_each_latent_op(program, [&](std::int64_t heads, std::int64_t, std::int64_t) {
    most = std::max(most, heads * tokens_of_heads(program, heads));
  });
  return most;
}

LatentMemory::LatentMemory(const Program& program) {
  const std::size_t element = size_of(activation_dtype(program.dtype));
  std::size_t most_heads = 0;
  std::size_t input_bytes = 0;
  std::size_t output_bytes = 0;
  for_each_latent_op(program, [&](std::int64_t heads, std::int64_t in, std::int64_t out) {
    const auto rows = static_cast<std::size_t>(heads * tokens_of_heads(program, heads));
    most_heads = std::max(most_heads, static_cast<std::size_t>(heads));
    input_bytes = std::max(input_bytes, rows * static_cast<std::size_t>(in) * element);
    output_bytes = std::max(output_bytes, rows * static_cast<std::size_t>(out) * sizeof(float));
  });
  groups.reserve(most_heads);
  inputs_ = HugeArray(input_bytes);
  outputs_ = HugeArray(output_bytes);
}

}  // namespace adaptrt
