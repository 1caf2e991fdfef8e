#include <algorithm>

#include "step.h"

namespace adaptrt {
namespace {

/// One EmbeddingOp in one step.
class Embedding {
 public:
  Embedding(const EmbeddingOp& op, const Step& step)
      : op_(op), step_(step), width_(op.table.k), dtype_(op.table.dtype) {}

  void run() const {
    const auto body = [&](std::int64_t begin, std::int64_t end, int thread) {
      for (std::int64_t row = begin; row < end; ++row) unpack_panel_row(op_.table, token_of(row), out(row));
      adapt(begin, end);
      float* position = step_.scratch[static_cast<std::size_t>(thread)].data();
      for (std::int64_t row = begin; row < end; ++row) finish(row, position);
    };
    step_.threads.parallel_for(step_.rows, rows_per_chunk(width_), body);
  }

 private:
  [[nodiscard]] std::int64_t token_of(std::int64_t row) const {
    return step_.input.token_ids[static_cast<std::size_t>(row)];
  }
  [[nodiscard]] float* out(std::int64_t row) const { return step_.float_row(op_.output, row); }

  /// What the adapters of rows [begin, end) make of them.
  void adapt(std::int64_t begin, std::int64_t end) const {
    if (op_.lora_site < 0) return;
    for (const AdapterGroup& group : step_.groups) {
      if (group.begin >= end) return;
      const DeviceSite* slices = &group.adapter->sites[static_cast<std::size_t>(op_.lora_site)];
      for (std::int64_t row = std::max(group.begin, begin); row < std::min(group.end, end); ++row) {
        const DeviceSite& site = slices[token_of(row) / kVocabularySlice];
        if (site.total_rank > 0) adapt_row(site, row);
      }
    }
  }

  void adapt_row(const DeviceSite& site, std::int64_t row) const {
    const DevicePart& part = site.parts[0];
    std::byte* column = column_of(site, row);
    for (std::int64_t panel = 0; panel < panel_count(width_); ++panel) {
      const std::int64_t first = panel * kPanelColumns;
      const std::int64_t width = panel_width(width_, panel);
      step_.kernels.gemm[static_cast<std::size_t>(dtype_)](
          {.a = column,
           .a_stride = step_.shrink_stride,
           .panel = part.b + panel_offset(dtype_, part.rank, panel),
           .k = part.rank,
           .width = width,
           .out = out(row) + first,
           .out_stride = width_,
           .rows = 1,
           .accumulate = true});
      if (part.magnitude != nullptr) step_.kernels.multiply(part.magnitude + first, width, out(row) + first);
      if (part.shift != nullptr) step_.kernels.add(part.shift + first, width, out(row) + first);
    }
  }

  /// A[:, token], out of the panels of A[rank, slice], in the type that the kernels multiply.
  [[nodiscard]] std::byte* column_of(const DeviceSite& site, std::int64_t row) const {
    const DType type = activation_dtype(dtype_);
    std::byte* column = step_.shrink + static_cast<std::size_t>(row * step_.shrink_stride) * size_of(type);
    const std::int64_t token = token_of(row);
    const std::int64_t first_token = token / kVocabularySlice * kVocabularySlice;
    const std::int64_t tokens = std::min(kVocabularySlice, op_.table.n - first_token);
    const std::int64_t ki = k_interleave(dtype_);
    const std::int64_t k = token - first_token;
    for (std::int64_t r = 0; r < site.total_rank; ++r) {
      const std::int64_t panel = r / kPanelColumns;
      const std::int64_t width = panel_width(site.total_rank, panel);
      const std::int64_t element = ((k / ki) * width + r % kPanelColumns) * ki + k % ki;
      const float value = load_as_float(site.a + panel_offset(dtype_, tokens, panel), dtype_,
                                        static_cast<std::size_t>(element));
      store_from_float(column, type, static_cast<std::size_t>(r), value);
    }
    return column;
  }

  void finish(std::int64_t row, float* position) const {
    if (op_.scale != 1.0F) {
      step_.kernels.scale_and_store(out(row), op_.scale, width_, reinterpret_cast<std::byte*>(out(row)),
                                    DType::kFloat32);
    }
    if (op_.positions.n == 0) return;
    unpack_panel_row(op_.positions, step_.input.positions[static_cast<std::size_t>(row)], position);
    step_.kernels.add(position, width_, out(row));
  }

  const EmbeddingOp& op_;
  const Step& step_;
  std::int64_t width_;
  DType dtype_;
};

}  // namespace

void run_op(const EmbeddingOp& op, const Step& step) {
  Embedding(op, step).run();
}

}  // namespace adaptrt
