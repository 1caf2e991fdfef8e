#include "ops/linear/low_rank_exchange.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <vector>

#include "op_sizes.h"
#include "ranks/overlapped_sum.h"
#include "ranks/rank_sums.h"

namespace adaptrt {
namespace {

std::int64_t room_of(const LoraSite& site, const Program& program) {
  if (site.num_shares == 1) return 0;
  const std::int64_t rows = most_linear_rows(program);
  const std::int64_t widest = std::int64_t{program.lora.max_rank} * std::ssize(site.parts);
  if (site.shares_a()) return rows * (widest + site.num_shares);  // each rank's share may be rounded up
  return rows * widest + rank_sum_room(rows * widest, site.num_shares);
}

}  // namespace

LowRankExchange::LowRankExchange(const LinearCall& call, const LoraSite& site, const CpuContext& context)
    : call_(call),
      site_(site),
      context_(context),
      rank_(site.share),
      ranks_(site.num_shares),
      type_(site.shares_a() ? call.input.dtype : DType::kFloat32) {
  std::vector<std::int64_t>& begins = context.memory.linear.packed_begins;
  begins.clear();
  std::int64_t elements = 0;
  for (const AdaptedRows& adapted : call.adapted) {
    begins.push_back(elements);
    elements += (adapted.end - adapted.begin) * width_on(rank_, adapted);
  }
}

std::int32_t LowRankExchange::number_of(std::int32_t share) const {
  return context_.stage_communicator->rank() + (share - rank_) * site_.experts_for_each;
}

std::int64_t LowRankExchange::width_on(std::int32_t rank, const AdaptedRows& adapted) const {
  return site_.rows_of_a(adapted.site->total_rank, rank).count;
}

std::int64_t LowRankExchange::elements_on(std::int32_t rank) const {
  std::int64_t elements = 0;
  for (const AdaptedRows& adapted : call_.adapted) {
    elements += (adapted.end - adapted.begin) * width_on(rank, adapted);
  }
  return elements;
}

void LowRankExchange::store(const AdaptedRows& adapted, std::int64_t panel, RowRange rows,
                            float* tile) const {
  const auto at = static_cast<std::size_t>(&adapted - call_.adapted.data());
  const std::int64_t width = width_on(rank_, adapted);
  const std::int64_t begin = context_.memory.linear.packed_begins[at] + panel * kPanelColumns;
  auto* packed = reinterpret_cast<std::byte*>(context_.memory.low_rank_room());
  const float* scales = adapted.site->rank_scales;
  if (scales != nullptr) scales += site_.rows_of_a(adapted.site->total_rank).first + panel * kPanelColumns;
  for (std::int64_t row = rows.begin; row < rows.end; ++row, tile += kPanelColumns) {
    if (scales != nullptr) context_.kernels.multiply(scales, panel_width(width, panel), tile);
    const std::int64_t element = begin + (row - adapted.begin) * width;
    context_.kernels.scale_and_store(tile, 1.0F, panel_width(width, panel),
                                     packed + static_cast<std::size_t>(element) * size_of(type_), type_);
  }
}

void LowRankExchange::finish() const {
  context_.overlapped_sum.begin_rest();
  if (site_.shares_a()) {
    gather();
  } else {
    add_up();
  }
}

std::byte* LowRankExchange::shrunk(std::int64_t row, std::int64_t column) const {
  return context_.memory.shrink.data() +
         static_cast<std::size_t>(row * context_.memory.shrink_stride + column) * size_of(call_.input.dtype);
}

void LowRankExchange::gather() const {
  RankMessages& messages = context_.rank_messages;
  messages.clear();
  auto* packed = reinterpret_cast<std::byte*>(context_.memory.low_rank_room());
  const std::span own(packed, static_cast<std::size_t>(elements_on(rank_)) * size_of(type_));
  std::size_t used = own.size();
  for (std::int32_t rank = 0; rank < ranks_; ++rank) {
    if (rank == rank_) continue;
    const std::span theirs(packed + used, static_cast<std::size_t>(elements_on(rank)) * size_of(type_));
    used += theirs.size();
    if (!own.empty()) messages.sent.push_back({number_of(rank), own});
    if (!theirs.empty()) messages.received.push_back({number_of(rank), theirs});
  }
  context_.stage_communicator->exchange(messages.sent, messages.received);
  const std::byte* from = packed;
  place(rank_, from);
  from += own.size();
  for (std::int32_t rank = 0; rank < ranks_; ++rank) {
    if (rank == rank_) continue;
    place(rank, from);
    from += static_cast<std::size_t>(elements_on(rank)) * size_of(type_);
  }
}

void LowRankExchange::place(std::int32_t rank, const std::byte* packed) const {
  for (const AdaptedRows& adapted : call_.adapted) {
    const MatrixRows columns = site_.rows_of_a(adapted.site->total_rank, rank);
    const std::size_t bytes = static_cast<std::size_t>(columns.count) * size_of(type_);
    for (std::int64_t row = adapted.begin; row < adapted.end; ++row, packed += bytes) {
      std::memcpy(shrunk(row, columns.first), packed, bytes);
    }
  }
}

void LowRankExchange::add_up() const {
  const std::int64_t elements = elements_on(rank_);
  float* packed = context_.memory.low_rank_room();
  sum_over_ranks({.terms = packed,
                  .width = elements,
                  .output = packed,
                  .output_stride = elements,
                  .rank_stride = site_.experts_for_each,
                  .room = packed + elements},
                 context_);
  for (const AdaptedRows& adapted : call_.adapted) {
    const std::int64_t width = adapted.site->total_rank;
    for (std::int64_t row = adapted.begin; row < adapted.end; ++row, packed += width) {
      context_.kernels.scale_and_store(packed, 1.0F, width, shrunk(row, 0), call_.input.dtype);
    }
  }
}

std::size_t low_rank_room_floats(const Program& program) {
  std::int64_t floats = 0;
  for (const LoraSite& site : program.lora.sites) {
    floats = std::max(floats, room_of(site, program));
  }
  return static_cast<std::size_t>(floats);
}

}  // namespace adaptrt
