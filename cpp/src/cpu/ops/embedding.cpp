#include <algorithm>

#include "lowered_op.h"

namespace adaptrt {
namespace {

/// One step of an EmbeddingOp.
class EmbeddingRun {
 public:
  EmbeddingRun(const EmbeddingOp& op, const CpuContext& context, const Rows& output, const Step& step)
      : op_(op),
        context_(context),
        output_(output),
        step_(step),
        width_(op.table.k),
        dtype_(op.table.dtype),
        new_tokens_(new_tokens_site(context.program.lora)) {}

  void run() const {
    const auto body = [&](std::int64_t begin, std::int64_t end, int thread) {
      for (std::int64_t row = begin; row < end; ++row) {
        if (!is_new(token_of(row))) unpack_panel_row(op_.table, token_of(row), out(row));
      }
      adapt(begin, end);
      for (std::int64_t row = begin; row < end; ++row) scale(row);
      take_given(begin, end);
      float* added = context_.scratch(thread);
      for (std::int64_t row = begin; row < end; ++row) {
        add(op_.types, type_of(row), row, added);
        add(op_.positions, step_.input.positions[static_cast<std::size_t>(row)], row, added);
      }
    };
    context_.threads.parallel_for(step_.rows, rows_per_chunk(width_), body);
  }

 private:
  [[nodiscard]] std::int64_t token_of(std::int64_t row) const {
    return step_.input.token_ids[static_cast<std::size_t>(row)];
  }
  /// True if the token is beyond the vocabulary. StepInputChecker has checked that its adapter has its row.
  [[nodiscard]] bool is_new(std::int64_t token) const { return token >= op_.table.n; }
  [[nodiscard]] std::int64_t type_of(std::int64_t row) const {
    return step_.input.token_types.empty() ? 0 : step_.input.token_types[static_cast<std::size_t>(row)];
  }
  [[nodiscard]] float* out(std::int64_t row) const { return output_.float_row(row); }

  /// Applies the adapters of rows [begin, end).
  void adapt(std::int64_t begin, std::int64_t end) const {
    if (op_.lora_site < 0) return;
    for (const AdapterGroup& group : step_.groups) {
      if (group.begin >= end) return;
      const DeviceSite* slices = &group.adapter->sites[static_cast<std::size_t>(op_.lora_site)];
      for (std::int64_t row = std::max(group.begin, begin); row < std::min(group.end, end); ++row) {
        if (is_new(token_of(row))) {
          read_new_token(group.adapter->sites[static_cast<std::size_t>(new_tokens_)], row);
          continue;
        }
        const DeviceSite& site = slices[token_of(row) / kVocabularySlice];
        if (site.total_rank > 0) adapt_row(site, row);
      }
    }
  }

  void read_new_token(const DeviceSite& site, std::int64_t row) const {
    const DevicePart& part = site.parts[0];
    unpack_panel_column({part.b, dtype_, width_, part.rank}, token_of(row) - op_.table.n, out(row));
  }

  void adapt_row(const DeviceSite& site, std::int64_t row) const {
    const DevicePart& part = site.parts[0];
    std::byte* column = column_of(site, row);
    for (std::int64_t panel = 0; panel < panel_count(width_); ++panel) {
      const std::int64_t first = panel * kPanelColumns;
      const std::int64_t width = panel_width(width_, panel);
      context_.kernels.gemm[static_cast<std::size_t>(dtype_)](
          {.call = {.a = column,
                    .a_stride = context_.memory.shrink_stride,
                    .panel = part.b + panel_offset(dtype_, part.rank, panel),
                    .k = part.rank,
                    .width = width,
                    .out = out(row) + first,
                    .out_stride = width_,
                    .rows = 1},
           .accumulate = true});
      if (part.magnitude != nullptr)
        context_.kernels.multiply(part.magnitude + first, width, out(row) + first);
      if (part.shift != nullptr) context_.kernels.add(part.shift + first, width, out(row) + first);
    }
  }

  /// Returns A[:, token] from the panels of A[rank, slice], in the type that the kernels multiply.
  [[nodiscard]] std::byte* column_of(const DeviceSite& site, std::int64_t row) const {
    const DType type = activation_dtype(dtype_);
    std::byte* column = context_.memory.shrink.data() +
                        static_cast<std::size_t>(row * context_.memory.shrink_stride) * size_of(type);
    const std::int64_t token = token_of(row);
    const std::int64_t first_token = token / kVocabularySlice * kVocabularySlice;
    const std::int64_t tokens = std::min(kVocabularySlice, op_.table.n - first_token);
    const PanelMatrix a{site.a, dtype_, site.total_rank, tokens};
    for (std::int64_t r = 0; r < site.total_rank; ++r) {
      store_from_float(column, type, static_cast<std::size_t>(r), panel_element(a, r, token - first_token));
    }
    return column;
  }

  void scale(std::int64_t row) const {
    if (op_.scale == 1.0F) return;
    context_.kernels.scale_and_store(out(row), op_.scale, width_, reinterpret_cast<std::byte*>(out(row)),
                                     DType::kFloat32);
  }

  /// Copies those of rows [begin, end) that the step's input has as embeddings.
  void take_given(std::int64_t begin, std::int64_t end) const {
    const auto rows = step_.input.prompt_embedding_rows;
    for (auto given = std::ranges::lower_bound(rows, begin); given != rows.end() && *given < end; ++given) {
      std::copy_n(step_.input.prompt_embeddings[static_cast<std::size_t>(given - rows.begin())], width_,
                  out(*given));
    }
  }

  /// Adds row `index` of a table, if the table has rows, to the output's `row`; uses float32 [width] of
  /// scratch.
  void add(const PanelMatrix& table, std::int64_t index, std::int64_t row, float* added) const {
    if (table.n == 0) return;
    unpack_panel_row(table, index, added);
    context_.kernels.add(added, width_, out(row));
  }

  const EmbeddingOp& op_;
  const CpuContext& context_;
  const Rows& output_;
  const Step& step_;
  std::int64_t width_;
  DType dtype_;
  std::int32_t new_tokens_;
};

class LoweredEmbedding final : public LoweredOp {
 public:
  LoweredEmbedding(const EmbeddingOp& op, const OpPlace& place)
      : op_(op), context_(place.context), output_(place.context.rows_of(op.output)) {}

  void run(Step& step) override { EmbeddingRun(op_, context_, output_, step).run(); }

 private:
  const EmbeddingOp& op_;
  const CpuContext& context_;
  Rows output_;
};

}  // namespace

LoweredOpPtr lower(const EmbeddingOp& op, const OpPlace& place) {
  return std::make_unique<LoweredEmbedding>(op, place);
}

}  // namespace adaptrt
