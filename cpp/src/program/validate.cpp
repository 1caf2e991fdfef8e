#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "adaptrt/program/op_buffers.h"
#include "validator.h"

namespace adaptrt {
namespace {

constexpr std::size_t kArenaAlignment = 64;

}  // namespace

Validator::Validator(const Program& program)
    : program_(program),
      live_(program.buffers.size()),
      lost_(program.buffers.size(), false),
      used_up_(program.buffers.size(), false) {}

Problems Validator::run() {
  check_sizes(program_, &problems_);
  check_layout(program_, &problems_);
  check_buffers();
  site_users_.assign(program_.lora.sites.size(), 0);
  const auto layers = static_cast<std::size_t>(std::clamp(program_.num_layers, 0, 1 << 16));
  layer_users_.assign(layers, 0);
  kv_shapes_.resize(layers);
  convolution_users_.assign(layers, 0);
  scan_users_.assign(layers, 0);
  encoder_layer_users_.assign(static_cast<std::size_t>(std::clamp(program_.num_encoder_layers, 0, 1 << 16)),
                              0);
  cross_keys_users_.assign(program_.has_encoder() ? layers : 0, 0);
  cross_attention_users_ = cross_keys_users_;
  cross_shapes_.resize(cross_keys_users_.size());
  if (program_.has_encoder()) {
    check_ops(program_.encoder, RowKind::kEncoderTokens, "encoder");
    if (num_broadcasts_ != (program_.num_stages > 1 ? 1 : 0)) {
      add("encoder has " + text(num_broadcasts_) + " broadcast ops; it must have one where there are stages");
    }
    check_encoder_output();
  }
  check_ops(program_.body, RowKind::kTokens, "body");
  check_kinds_of_attention();
  live_.begin_head();
  if (program_.is_last_stage()) {
    check_ops(program_.head, RowKind::kLogits, "head");
    check_results();
  } else if (!program_.head.empty() || program_.logits != kNoBuffer || program_.hidden != kNoBuffer) {
    add("a stage with others behind it has a head");
  }
  check_users();
  check_kv_block();
  live_.finish();
  check_overlaps();
  return std::move(problems_);
}

void Validator::add(std::string problem) {
  problems_.add(std::move(problem));
}

void Validator::check_buffers() {
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

std::optional<std::size_t> Validator::bytes_of(const Buffer& buffer) const {
  const std::int64_t rows =
      buffer.rows == RowKind::kLogits ? program_.max_batch_size : program_.max_num_tokens;
  return product({rows, buffer.width, static_cast<std::int64_t>(size_of(buffer.dtype))});
}

const Buffer* Validator::operand(std::string_view name, BufferId id, DType dtype, RowKind rows) {
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
    static constexpr std::string_view kRows[] = {"token", "row of logits", "token of encoder inputs"};
    const auto of = [](RowKind kind) { return std::string(kRows[static_cast<std::size_t>(kind)]); };
    add(where_ + ": " + std::string(name) + " '" + buffer.name + "' has a row a " + of(buffer.rows) +
        ", not a " + of(rows));
  }
  return &buffer;
}

void Validator::check_width(std::string_view name, const Buffer* buffer, std::int64_t width) {
  if (buffer != nullptr && buffer->width != width) {
    add(where_ + ": " + std::string(name) + " '" + buffer->name + "' is " + text(buffer->width) +
        " wide; it must be " + text(width));
  }
}

void Validator::check_at_least(std::string_view name, const Buffer* buffer, std::int64_t width) {
  if (buffer != nullptr && buffer->width < width) {
    add(where_ + ": " + std::string(name) + " '" + buffer->name + "' is " + text(buffer->width) +
        " wide; it must be at least " + text(width));
  }
}

void Validator::read(BufferId id) {
  if (!live_.holds(id)) return;
  const std::string& name = program_.buffers[static_cast<std::size_t>(id)].name;
  if (!live_.read(id)) add(where_ + ": reads '" + name + "' before it is written");
  if (lost_[static_cast<std::size_t>(id)]) {
    add(where_ + ": reads '" + name + "', whose rows were not kept");
  }
  if (used_up_[static_cast<std::size_t>(id)]) {
    add(where_ + ": reads '" + name + "', which a sum over ranks has used up");
  }
}

void Validator::write(BufferId id) {
  if (!live_.holds(id)) return;
  live_.write(id);
  lost_[static_cast<std::size_t>(id)] = false;
  used_up_[static_cast<std::size_t>(id)] = false;
}

void Validator::check_ops(const std::vector<Op>& ops, RowKind rows, std::string_view section) {
  if (ops.empty()) add(std::string(section) + " has no ops");
  rows_ = rows;
  for (std::size_t i = 0; i < ops.size(); ++i) {
    where_ = std::string(section) + " op " + std::to_string(i) + " (" + std::string(name_of(ops[i])) + ")";
    live_.next_op();
    std::visit([this](const auto& op) { check(op); }, ops[i]);
    use_buffers(ops[i]);
  }
}

void Validator::use_buffers(const Op& op) {
  const OpBuffers buffers = buffers_of(op, program_);
  for (const BufferId id : buffers.reads) read(id);
  for (const BufferId id : buffers.writes) write(id);
  const auto* sum = std::get_if<AllReduceOp>(&op);
  if (sum != nullptr && live_.holds(sum->input)) used_up_[static_cast<std::size_t>(sum->input)] = true;
}

void Validator::check_kinds_of_attention() {
  if (!sees_behind_) return;
  if (sees_before_) add("body has causal and bidirectional attention; it must have one of them");
  if (program_.has_encoder()) add("body has bidirectional attention, and there is an encoder before it");
  if (program_.int8_kv_cache) add("int8_kv_cache is given, but no keys and values are kept");
}

void Validator::check_encoder_output() {
  where_ = "encoder_output";
  const bool is_stream =
      live_.holds(program_.encoder_output) &&
      program_.buffers[static_cast<std::size_t>(program_.encoder_output)].dtype == DType::kFloat32;
  const DType dtype = is_stream ? DType::kFloat32 : program_.activation_type();
  (void)operand("encoder_output", program_.encoder_output, dtype, RowKind::kEncoderTokens);
  live_.next_op();
  read(program_.encoder_output);
}

void Validator::check_results() {
  live_.next_op();
  if (program_.logits == kNoBuffer && program_.hidden == kNoBuffer) {
    add("there are neither logits nor hidden states");
  }
  if (program_.logits != kNoBuffer) {
    where_ = "logits";
    check_width("logits", operand("logits", program_.logits, DType::kFloat32, RowKind::kLogits),
                program_.logits_width());
    read(program_.logits);
  }
  if (program_.hidden == kNoBuffer) return;
  where_ = "hidden";
  operand("hidden", program_.hidden, program_.activation_type(), RowKind::kLogits);
  if (program_.num_ops_to_hidden() == 0) add("hidden: no norm of the head writes it");
}

void Validator::check_users() {
  for (std::size_t i = 0; i < site_users_.size(); ++i) {
    const bool is_here =
        program_.num_stages == 1 || program_.lora.stage_of(program_.lora.sites[i]) == program_.stage();
    const std::int32_t expected = is_here ? 1 : 0;
    if (site_users_[i] != expected) {
      add("lora: site " + std::to_string(i) + " is used by " + std::to_string(site_users_[i]) + " ops, not " +
          (expected == 1 ? "one" : "none"));
    }
  }
  const auto check_layers = [&](const std::vector<std::int32_t>& users, const char* layer, const char* ops) {
    for (std::size_t i = 0; i < users.size(); ++i) {
      if (users[i] == 1) continue;
      add(layer + std::to_string(i) + " has " + std::to_string(users[i]) + ops);
    }
  };
  const auto check_at_most_one = [&](const std::vector<std::int32_t>& users, const char* ops) {
    for (std::size_t i = 0; i < users.size(); ++i) {
      if (users[i] > 1) add("layer " + std::to_string(i) + " has " + std::to_string(users[i]) + ops);
    }
  };
  // Layers of models with states, and connectors of vision towers, may have no attention.
  if (state_bytes_ == std::size_t{0} && !sees_behind_) {
    check_layers(layer_users_, "layer ", " attention ops, not one");
  } else {
    check_at_most_one(layer_users_, " attention ops, not one");
  }
  check_at_most_one(convolution_users_, " causal convolutions, not one");
  check_at_most_one(scan_users_, " selective scans, not one");
  check_layers(encoder_layer_users_, "encoder layer ", " attention ops, not one");
  check_layers(cross_keys_users_, "layer ", " cross keys ops, not one");
  check_layers(cross_attention_users_, "layer ", " cross attention ops, not one");
}

void Validator::check_kv_block() {
  if (!kv_block_bytes_ ||
      *kv_block_bytes_ > static_cast<std::size_t>(std::numeric_limits<std::int64_t>::max())) {
    add("the bytes of a KV block do not fit in 64 bits");
  }
  if (!state_bytes_ || *state_bytes_ > static_cast<std::size_t>(std::numeric_limits<std::int64_t>::max())) {
    add("the bytes of a sequence's states do not fit in 64 bits");
  }
}

void Validator::check_overlaps() {
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

}  // namespace adaptrt
