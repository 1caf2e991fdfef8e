#include "output_rows.h"

#include <algorithm>
#include <iterator>

namespace adaptrt {

void OutputRows::set(std::span<const std::int32_t> logit_rows, std::span<const std::int32_t> hidden_rows) {
  logit_rows_ = logit_rows;
  hidden_rows_ = hidden_rows;
  all_ = hidden_rows.empty() ? logit_rows : hidden_rows;
  if (logit_rows.empty() || hidden_rows.empty()) return;
  merged_.clear();
  std::ranges::set_union(logit_rows, hidden_rows, std::back_inserter(merged_));
  all_ = merged_;
}

std::span<const std::int32_t> OutputRows::logit_rows(std::span<const std::int32_t> rows_of_body) {
  return place(logit_rows_, rows_of_body);
}

std::span<const std::int32_t> OutputRows::hidden_rows(std::span<const std::int32_t> rows_of_body) {
  return place(hidden_rows_, rows_of_body);
}

std::span<const std::int32_t> OutputRows::place(std::span<const std::int32_t> rows,
                                                std::span<const std::int32_t> rows_of_body) {
  if (rows.size() == all_.size()) return rows_of_body;
  placed_.clear();
  std::size_t at = 0;
  for (const std::int32_t row : rows) {
    while (all_[at] != row) ++at;
    placed_.push_back(rows_of_body[at]);
  }
  return placed_;
}

}  // namespace adaptrt
