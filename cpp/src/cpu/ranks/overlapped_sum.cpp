#include "ranks/overlapped_sum.h"

#include <algorithm>
#include <variant>

namespace adaptrt {
namespace {

/// Minimum number of floats in a message. Transferring such a message takes much longer than beginning
/// another one.
constexpr std::int64_t kLeastFloats = 1 << 16;

BufferId stored_by(const Op& op) {
  if (const auto* linear = std::get_if<LinearOp>(&op)) {
    return linear->epilogue == LinearEpilogue::kStore ? linear->output : kNoBuffer;
  }
  if (const auto* experts = std::get_if<ExpertsOp>(&op)) return experts->stores ? experts->output : kNoBuffer;
  return kNoBuffer;
}

/// Number of columns of a chunk, in whole panels; all columns if the sum is not split.
std::int64_t columns_per_chunk(std::int64_t rows, std::int64_t width, std::int64_t ranks,
                               std::int64_t most_chunks) {
  const std::int64_t floats_of_message = ranks == 2 ? rows * width : rows * width / ranks;
  const std::int64_t panels = panel_count(width);
  const std::int64_t chunks = std::min({most_chunks, panels, floats_of_message / kLeastFloats});
  if (chunks < 2) return width;
  return (panels + chunks - 1) / chunks * kPanelColumns;
}

}  // namespace

std::optional<FusedAllReduce> find_all_reduce(std::span<const Op> ops, std::size_t number) {
  const BufferId stored = stored_by(ops[number]);
  if (stored == kNoBuffer) return std::nullopt;
  for (std::size_t i = number + 1; i < ops.size(); ++i) {
    if (const auto* sum = std::get_if<AllReduceOp>(&ops[i])) {
      if (sum->input != stored) return std::nullopt;
      return FusedAllReduce{.op = sum, .is_later = i > number + 1};
    }
    const auto* between = std::get_if<LinearOp>(&ops[i]);
    if (between == nullptr || between->input == stored || between->output == stored) return std::nullopt;
  }
  return std::nullopt;
}

OverlappedSum* OverlappedSum::begin(const FusedAllReduce& all_reduce, std::int64_t rows) {
  const AllReduceOp& op = *all_reduce.op;
  op_ = nullptr;
  terms_ = context_.rows_of(op.input);
  const std::int32_t ranks = context_.stage_communicator->size();
  columns_per_chunk_ = columns_per_chunk(rows, terms_.width, ranks, std::ssize(chunks_));
  if (columns_per_chunk_ == terms_.width && !all_reduce.is_later) return nullptr;
  op_ = &op;
  rows_ = rows;
  count_ = begun_ = second_begun_ = 0;
  float* room = context_.memory.rank_room();
  for (std::int64_t first = 0; first < terms_.width; first += columns_per_chunk_) {
    Chunk& chunk = chunks_[count_++];
    chunk.first_column = first;
    chunk.width = std::min(columns_per_chunk_, terms_.width - first);
    chunk.made = 0;
    const RankSum sum{.terms = terms_.float_row(0) + rows * first,
                      .rows = rows,
                      .width = chunk.width,
                      .output = context_.rows_of(op.output).float_row(0) + first,
                      .output_stride = terms_.width,
                      .add = op.add,
                      .room = room};
    chunk.exchanges = RankSumExchanges(sum, context_);
    room += rank_sum_room(sum.count(), ranks);
  }
  return this;
}

OverlappedSum::Place OverlappedSum::place_of(std::int64_t column) const {
  const Chunk& chunk = chunks_[static_cast<std::size_t>(column / columns_per_chunk_)];
  auto* data = reinterpret_cast<std::byte*>(terms_.float_row(0) + rows_ * chunk.first_column);
  return {.rows = {data, DType::kFloat32, chunk.width},
          .first_column = chunk.first_column,
          .end_column = chunk.first_column + chunk.width};
}

void OverlappedSum::add_made(std::int64_t column, std::int64_t floats) {
  // A thread that sees the count of the last value also sees all values.
  chunks_[static_cast<std::size_t>(column / columns_per_chunk_)].made.fetch_add(floats,
                                                                                std::memory_order_acq_rel);
}

bool OverlappedSum::is_second_next() const {
  if (!chunks_[0].exchanges.has_second()) return false;
  const std::size_t before = begun_ == count_ ? begun_ : std::max<std::size_t>(begun_, 1) - 1;
  return second_begun_ < before;
}

bool OverlappedSum::begin_next(bool waits) {
  if (is_second_next()) {
    RankSumExchanges& exchanges = chunks_[second_begun_].exchanges;
    if (waits) {
      exchanges.end_first();
    } else if (!exchanges.first_has_ended()) {
      return false;
    }
    exchanges.begin_second(waits);
    latest_ = exchanges.latest();
    ++second_begun_;
    return true;
  }
  if (begun_ == count_) return false;
  Chunk& chunk = chunks_[begun_];
  if (!waits && chunk.made.load(std::memory_order_acquire) < rows_ * chunk.width) return false;
  chunk.exchanges.begin();
  latest_ = chunk.exchanges.latest();
  ++begun_;
  return true;
}

void OverlappedSum::go_on() {
  while (begin_next(false)) {
  }
  if (begun_ > 0) (void)context_.stage_communicator->has_ended(latest_);
}

void OverlappedSum::begin_rest() {
  const auto is_made = [&](const Chunk& chunk) {
    return chunk.made.load(std::memory_order_acquire) == rows_ * chunk.width;
  };
  if (op_ == nullptr || !std::all_of(chunks_.begin(), chunks_.begin() + count_, is_made)) return;
  while (begin_next(true)) {
  }
}

void OverlappedSum::finish() {
  while (begin_next(true)) {
  }
  for (std::size_t i = 0; i < count_; ++i) chunks_[i].exchanges.finish();
  op_ = nullptr;
}

std::int64_t overlapped_sum_room(std::int64_t count, std::int64_t ranks) {
  // The shares of chunks are rounded up.
  const auto chunks = static_cast<std::int64_t>(OverlappedSum::kMostChunks);
  return rank_sum_room(count, ranks) + (ranks == 2 ? 0 : chunks * 2 * ranks);
}

}  // namespace adaptrt
