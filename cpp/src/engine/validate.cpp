#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "adaptrt/engine/program.h"
#include "live_ranges.h"
#include "matrix_storage.h"
#include "program_sizes.h"

namespace adaptrt {
namespace {

constexpr std::size_t kArenaAlignment = 64;

class Validator {
 public:
  explicit Validator(const Program& program)
      : program_(program), live_(program.buffers.size()), lost_(program.buffers.size(), false) {}

  Problems run() {
    shape_is_sound_ = check_sizes(program_, &problems_);
    check_layout(program_, &problems_);
    check_buffers();
    site_users_.assign(program_.lora.sites.size(), 0);
    layer_users_.assign(static_cast<std::size_t>(std::clamp(program_.num_layers, 0, 1 << 16)), 0);
    check_ops(program_.body, RowKind::kTokens, "body");
    live_.begin_head();
    check_ops(program_.head, RowKind::kLogits, "head");
    check_logits();
    check_users();
    live_.finish();
    check_overlaps();
    return std::move(problems_);
  }

 private:
  void add(std::string problem) { problems_.add(std::move(problem)); }

  void check_buffers() {
    for (std::size_t i = 0; i < program_.buffers.size(); ++i) {
      const auto& buffer = program_.buffers[i];
      const std::string where = "buffer " + std::to_string(i) + " '" + buffer.name + "'";
      if (!known(buffer.dtype)) add(where + ": the dtype is unknown");
      check_range_(where + " width", buffer.width, 1, kSizeLimit - 1);
      if (buffer.offset % kArenaAlignment != 0) add(where + ": the offset is not a multiple of 64");
      const auto bytes = bytes_of(buffer);
      std::size_t end = 0;
      if (!bytes || __builtin_add_overflow(buffer.offset, *bytes, &end) || end > program_.arena_bytes) {
        add(where + " does not lie within arena_bytes " + std::to_string(program_.arena_bytes));
      }
    }
  }

  [[nodiscard]] std::optional<std::size_t> bytes_of(const Buffer& buffer) const {
    const std::int64_t rows =
        buffer.rows == RowKind::kTokens ? program_.max_num_tokens : program_.max_batch_size;
    return product({rows, buffer.width, static_cast<std::int64_t>(size_of(buffer.dtype))});
  }

  /// Checks an operand; the buffer, or nullptr when there is none of that id.
  const Buffer* operand(std::string_view name, BufferId id, DType dtype, RowKind rows) {
    if (id < 0 || static_cast<std::size_t>(id) >= program_.buffers.size()) {
      add(where_ + ": " + std::string(name) + " names buffer " + text(id) + " of " +
          std::to_string(program_.buffers.size()));
      return nullptr;
    }
    const auto& buffer = program_.buffers[static_cast<std::size_t>(id)];
    if (buffer.dtype != dtype) {
      add(where_ + ": " + std::string(name) + " '" + buffer.name + "' is " +
          std::string(name_of(buffer.dtype)) + ", not " + std::string(name_of(dtype)));
    }
    if (buffer.rows != rows) {
      add(where_ + ": " + std::string(name) + " '" + buffer.name + "' has a row a " +
          (rows == RowKind::kTokens ? "row of logits, not a token" : "token, not a row of logits"));
    }
    return &buffer;
  }

  void check_width(std::string_view name, const Buffer* buffer, std::int64_t width) {
    if (buffer != nullptr && buffer->width != width) {
      add(where_ + ": " + std::string(name) + " '" + buffer->name + "' is " + text(buffer->width) +
          " wide; it must be " + text(width));
    }
  }

  void read(BufferId id) {
    if (!live_.holds(id)) return;
    const std::string& name = program_.buffers[static_cast<std::size_t>(id)].name;
    if (!live_.read(id)) add(where_ + ": reads '" + name + "' before it is written");
    if (lost_[static_cast<std::size_t>(id)]) {
      add(where_ + ": reads '" + name + "', whose rows of logits were not kept");
    }
  }

  void write(BufferId id) {
    if (!live_.holds(id)) return;
    live_.write(id);
    lost_[static_cast<std::size_t>(id)] = false;
  }

  void check_vector(std::string_view name, const VectorView& vector, std::int64_t size) {
    if (vector.size != size || (size > 0 && vector.data == nullptr)) {
      add(where_ + ": " + std::string(name) + " has " + text(vector.size) + " elements; it must have " +
          text(size));
    }
  }

  void check_optional_vector(std::string_view name, const VectorView& vector, std::int64_t size) {
    if (vector.size != 0) check_vector(name, vector, size);
  }

  void check_matrix(std::string_view name, const PanelMatrix& matrix, std::int64_t n, std::int64_t k) {
    if (matrix.dtype != program_.dtype) {
      add(where_ + ": " + std::string(name) + " is " + std::string(name_of(matrix.dtype)) + ", the program " +
          std::string(name_of(program_.dtype)));
    }
    if (matrix.n != n || matrix.k != k) {
      add(where_ + ": " + std::string(name) + " is [" + text(matrix.n) + ", " + text(matrix.k) +
          "]; it must be [" + text(n) + ", " + text(k) + "]");
    }
    if (matrix.data == nullptr) add(where_ + ": " + std::string(name) + " has no data");
    for (std::string& problem : problems_of_storage(matrix)) {
      add(where_ + ": " + std::string(name) + " " + std::move(problem));
    }
  }

  void check_finite(std::string_view name, float value, float low) {
    if (!std::isfinite(value) || value < low) {
      add(where_ + ": " + std::string(name) + " is " + std::to_string(value) +
          "; it must be finite and at least " + std::to_string(low));
    }
  }

  void check_ops(const std::vector<Op>& ops, RowKind rows, std::string_view section) {
    static constexpr std::string_view kNames[] = {"embedding", "rope table",      "rms norm",   "attention",
                                                  "linear",    "keep logit rows", "layer norm", "cast"};
    if (ops.empty()) add(std::string(section) + " has no ops");
    rows_ = rows;
    for (std::size_t i = 0; i < ops.size(); ++i) {
      where_ = std::string(section) + " op " + std::to_string(i) + " (" +
               std::string(kNames[ops[i].index()]) + ")";
      live_.next_op();
      std::visit([this](const auto& op) { check(op); }, ops[i]);
    }
  }

  void all_tokens_only() {
    if (rows_ != RowKind::kTokens) add(where_ + ": belongs in the body");
    if (has_logit_rows_) add(where_ + ": belongs before the op that keeps rows of logits alone");
  }

  void check(const EmbeddingOp& op) {
    all_tokens_only();
    check_matrix("the table", op.table, program_.vocab_size, program_.shape.hidden_size);
    if (op.table.quantization.algo != QuantAlgo::kNone || op.table.is_compressed()) {
      add(where_ + ": the table is quantised or compressed, which only linear layers can be");
    }
    check_width("output", operand("output", op.output, DType::kFloat32, RowKind::kTokens),
                program_.shape.hidden_size);
    check_finite("scale", op.scale, 0.0F);
    if (op.positions.n != 0 || op.positions.data != nullptr) {
      check_matrix("the positions' table", op.positions, op.positions.n, program_.shape.hidden_size);
      check_range_(where_ + ": learned positions", op.positions.n, program_.max_seq_len, kSizeLimit - 1);
      if (op.positions.quantization.algo != QuantAlgo::kNone || op.positions.is_compressed()) {
        add(where_ + ": the positions' table is quantised or compressed, which only linear layers can be");
      }
    }
    write(op.output);
  }

  void check(const RopeTableOp& op) {
    all_tokens_only();
    const std::int64_t half = op.inverse_frequencies.size;
    if (op.inverse_frequencies.data == nullptr || half < 1 || half > program_.shape.head_dim / 2) {
      add(where_ + ": there are " + text(half) + " inverse_frequencies; they must be 1 to head_dim / 2");
    }
    check_finite("attention_scaling", op.attention_scaling, 0.0F);
    if (op.kind == RopeKind::kDynamic) {
      check_finite("base", op.base, 1.0F);
      check_finite("factor", op.factor, 1.0F);
      if (half < 2) add(where_ + ": dynamic frequencies need at least two of them");
      check_range_(where_ + ": original_max_position", op.original_max_position, 1, 1 << 30);
    } else if (op.kind == RopeKind::kLong) {
      check_vector("long_inverse_frequencies", op.long_inverse_frequencies, half);
      check_range_(where_ + ": original_max_position", op.original_max_position, 1, 1 << 30);
    } else if (op.kind != RopeKind::kStatic) {
      add(where_ + ": the kind is unknown");
    }
    check_width("cosine", operand("cosine", op.cosine, DType::kFloat32, RowKind::kTokens), half);
    check_width("sine", operand("sine", op.sine, DType::kFloat32, RowKind::kTokens), half);
    if (op.cosine == op.sine) add(where_ + ": cosine and sine are one buffer");
    write(op.cosine);
    write(op.sine);
  }

  void check(const RmsNormOp& op) {
    if (op.gather_logit_rows && rows_ == RowKind::kTokens)
      add(where_ + ": gathers logit rows outside the head");
    const RowKind input_rows = op.gather_logit_rows ? RowKind::kTokens : rows_;
    const auto* input = operand("input", op.input, DType::kFloat32, input_rows);
    const DType output_type = op.add ? DType::kFloat32 : activation_dtype(program_.dtype);
    const auto* output = operand("output", op.output, output_type, rows_);
    if (input != nullptr) {
      check_width("output", output, input->width);
      check_vector("the weight", op.weight, input->width);
    }
    if (op.add && (op.gather_logit_rows || rows_ != RowKind::kTokens))
      add(where_ + ": adds outside the body");
    if (op.add && op.input == op.output) add(where_ + ": input and output are one buffer");
    check_finite("epsilon", op.epsilon, 0.0F);
    read(op.input);
    if (op.add) {
      read(op.output);
    } else {
      write(op.output);
    }
  }

  void check(const AttentionOp& op) {
    all_tokens_only();
    const auto& shape = program_.shape;
    check_range_(where_ + ": layer", op.layer, 0, std::max(1, program_.num_layers) - 1);
    if (op.layer >= 0 && static_cast<std::size_t>(op.layer) < layer_users_.size()) ++layer_users_[op.layer];
    const auto* qkv = operand("qkv", op.qkv, DType::kFloat32, RowKind::kTokens);
    const auto* cosine = operand("cosine", op.cosine, DType::kFloat32, RowKind::kTokens);
    const auto* sine = operand("sine", op.sine, DType::kFloat32, RowKind::kTokens);
    const auto* output = operand("output", op.output, activation_dtype(program_.dtype), RowKind::kTokens);
    if (shape_is_sound_) {
      check_width("qkv", qkv, shape.query_size() + 2 * shape.key_value_size());
      check_width("output", output, shape.query_size());
      const bool of_heads = op.query_norm.size == shape.head_dim || op.key_norm.size == shape.head_dim;
      check_optional_vector("query_norm", op.query_norm, of_heads ? shape.head_dim : shape.query_size());
      check_optional_vector("key_norm", op.key_norm, of_heads ? shape.head_dim : shape.key_value_size());
      if (op.interleaved && of_heads) add(where_ + ": interleaved heads have a norm of their own");
    }
    if (cosine != nullptr) {
      check_width("sine", sine, cosine->width);
      if (cosine->width > shape.head_dim / 2) add(where_ + ": cosine is wider than head_dim / 2");
    }
    check_finite("norm_epsilon", op.norm_epsilon, 0.0F);
    check_finite("scale", op.scale, 0.0F);
    check_range_(where_ + ": sliding_window", op.sliding_window, 0, kSizeLimit - 1);
    check_finite("softcap", op.softcap, 0.0F);
    read(op.qkv);
    read(op.cosine);
    read(op.sine);
    write(op.output);
  }

  void check(const LinearOp& op) {
    const auto* input = operand("input", op.input, activation_dtype(program_.dtype), rows_);
    const bool gated = is_gated(op.epilogue);
    const bool activated = is_activated(op.epilogue);
    if (op.epilogue > LinearEpilogue::kGeluTanh) add(where_ + ": the epilogue is unknown");
    const auto* output =
        operand("output", op.output, activated ? activation_dtype(program_.dtype) : DType::kFloat32, rows_);
    check_finite("scale", op.scale, 0.0F);
    check_finite("softcap", op.softcap, 0.0F);
    check_range_(where_ + ": number of parts", static_cast<std::int64_t>(op.parts.size()), gated ? 2 : 1,
                 gated ? 2 : static_cast<std::int64_t>(kMaxPartsPerSite));
    std::int64_t width = 0;
    for (const auto& part : op.parts) {
      check_range_(where_ + ": outputs of a part", part.weight.n, 1, kSizeLimit - 1);
      check_matrix("a weight", part.weight, part.weight.n, input != nullptr ? input->width : part.weight.k);
      if (!(part.weight.quantization == op.parts[0].weight.quantization)) {
        add(where_ + ": its weights are quantised in different ways");
      }
      check_optional_vector("a bias", part.bias, part.weight.n);
      width += std::clamp<std::int64_t>(part.weight.n, 0, kSizeLimit);
      if (gated && part.weight.n != op.parts[0].weight.n) add(where_ + ": the two parts differ in width");
    }
    check_width("output", output, gated && !op.parts.empty() ? op.parts[0].weight.n : width);
    check_site(op);
    read(op.input);
    if (op.epilogue == LinearEpilogue::kAdd) {
      read(op.output);
    } else {
      write(op.output);
    }
    if (op.input == op.output) add(where_ + ": input and output are one buffer");
  }

  void check(const LayerNormOp& op) {
    if (op.gather_logit_rows && rows_ == RowKind::kTokens) {
      add(where_ + ": gathers logit rows outside the head");
    }
    const RowKind input_rows = op.gather_logit_rows ? RowKind::kTokens : rows_;
    const auto* input = operand("input", op.input, DType::kFloat32, input_rows);
    const auto* output = operand("output", op.output, activation_dtype(program_.dtype), rows_);
    if (input != nullptr) {
      check_width("output", output, input->width);
      check_vector("the weight", op.weight, input->width);
      check_optional_vector("the bias", op.bias, input->width);
    }
    check_finite("epsilon", op.epsilon, 0.0F);
    read(op.input);
    write(op.output);
  }

  void check(const CastOp& op) {
    const auto* input = operand("input", op.input, DType::kFloat32, rows_);
    const auto* output = operand("output", op.output, activation_dtype(program_.dtype), rows_);
    if (input != nullptr) check_width("output", output, input->width);
    if (op.input == op.output) add(where_ + ": input and output are one buffer");
    read(op.input);
    write(op.output);
  }

  void check(const KeepLogitRowsOp& op) {
    all_tokens_only();
    has_logit_rows_ = true;
    lost_.assign(lost_.size(), true);
    for (const BufferId id : op.buffers) {
      if (!live_.holds(id)) {
        add(where_ + ": names buffer " + text(id) + " of " + std::to_string(program_.buffers.size()));
        continue;
      }
      const Buffer& buffer = program_.buffers[static_cast<std::size_t>(id)];
      if (buffer.rows != RowKind::kTokens) add(where_ + ": '" + buffer.name + "' has a row a row of logits");
      if (!lost_[static_cast<std::size_t>(id)]) add(where_ + ": names '" + buffer.name + "' twice");
      lost_[static_cast<std::size_t>(id)] = false;
      read(id);
    }
  }

  void check_site(const LinearOp& op) {
    if (op.lora_site == -1) return;
    const auto& sites = program_.lora.sites;
    if (op.lora_site < 0 || static_cast<std::size_t>(op.lora_site) >= sites.size()) {
      add(where_ + ": lora_site is " + text(op.lora_site) + " of " + std::to_string(sites.size()));
      return;
    }
    if (rows_ != RowKind::kTokens) add(where_ + ": adapters act in the body only");
    ++site_users_[static_cast<std::size_t>(op.lora_site)];
    const auto& site = sites[static_cast<std::size_t>(op.lora_site)];
    if (site.parts.size() != op.parts.size()) {
      add(where_ + ": has " + std::to_string(op.parts.size()) + " parts, its lora_site " +
          std::to_string(site.parts.size()));
      return;
    }
    for (std::size_t i = 0; i < site.parts.size(); ++i) {
      if (site.parts[i].out_size != op.parts[i].weight.n || site.in_size != op.parts[i].weight.k) {
        add(where_ + ": part " + std::to_string(i) + " and its lora_site differ in size");
      }
    }
  }

  void check_logits() {
    where_ = "logits";
    check_width("logits", operand("logits", program_.logits, DType::kFloat32, RowKind::kLogits),
                program_.vocab_size);
    live_.next_op();
    read(program_.logits);
  }

  void check_users() {
    for (std::size_t i = 0; i < site_users_.size(); ++i) {
      if (site_users_[i] != 1) {
        add("lora: site " + std::to_string(i) + " is used by " + std::to_string(site_users_[i]) +
            " ops, not one");
      }
    }
    for (std::size_t i = 0; i < layer_users_.size(); ++i) {
      if (layer_users_[i] != 1) {
        add("layer " + std::to_string(i) + " has " + std::to_string(layer_users_[i]) +
            " attention ops, not one");
      }
    }
  }

  void check_overlaps() {
    for (const auto& [a, b] : live_.simultaneous()) {
      const auto& first = program_.buffers[a];
      const auto& second = program_.buffers[b];
      const auto first_bytes = bytes_of(first);
      const auto second_bytes = bytes_of(second);
      if (!first_bytes || !second_bytes) continue;  // reported with the buffer
      if (first.offset < second.offset ? second.offset - first.offset < *first_bytes
                                       : first.offset - second.offset < *second_bytes) {
        add("buffers '" + first.name + "' and '" + second.name + "' share bytes while both are in use");
      }
    }
  }

  const Program& program_;
  LiveRanges live_;
  /// By buffer: whether what it holds is of tokens that are not rows any more.
  std::vector<bool> lost_;
  bool has_logit_rows_ = false;
  Problems problems_;
  const RangeCheck check_range_{&problems_};
  bool shape_is_sound_ = false;
  RowKind rows_ = RowKind::kTokens;
  std::string where_;
  std::vector<std::int32_t> site_users_;
  std::vector<std::int32_t> layer_users_;
};

}  // namespace

Problems Program::validate() const {
  return Validator(*this).run();
}

}  // namespace adaptrt
