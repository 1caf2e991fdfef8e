#include "adaptrt/exec/prompt_tuning.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <mutex>
#include <utility>

namespace adaptrt {
namespace {

std::string text_of(const std::vector<std::int64_t>& shape) {
  std::string text;
  for (const std::int64_t size : shape) text += (text.empty() ? "" : ", ") + std::to_string(size);
  return "[" + text + "]";
}

/// An element of a table [rows, width], by its index, with its value.
std::string element_of(const std::vector<float>& values, std::int64_t width, std::int64_t index) {
  return "embedding_table[" + std::to_string(index / width) + ", " + std::to_string(index % width) + "] is " +
         std::to_string(values[static_cast<std::size_t>(index)]);
}

/// Checks the last `count` elements of each row.
void check_coordinates(Problems& problems, const std::vector<float>& values, std::int64_t width,
                       std::int64_t count) {
  // A text token after such a row has a later position, which must not exceed kMaxRotaryPosition.
  constexpr auto kLast = static_cast<float>(kMaxRotaryPosition / 2);
  const auto size = static_cast<std::int64_t>(values.size());
  for (std::int64_t end = width; end <= size; end += width) {
    for (std::int64_t index = end - count; index < end; ++index) {
      const float value = values[static_cast<std::size_t>(index)];
      if (value >= -1.0F && value <= kLast && value == std::floor(value)) continue;
      problems.add(element_of(values, width, index) + "; accepted: a coordinate, a whole number from -1 to " +
                   std::to_string(kMaxRotaryPosition / 2));
      return;
    }
  }
}

}  // namespace

struct EmbeddingTable::Content {
  FloatTensor tensor;
  DType dtype = DType::kFloat32;
  mutable std::once_flag digested;
  mutable std::vector<Sha256Digest> digests;
};

EmbeddingTable::EmbeddingTable(FloatTensor tensor, DType dtype) {
  auto content = std::make_shared<Content>();
  content->tensor = std::move(tensor);
  content->dtype = dtype;
  content_ = std::move(content);
}

const FloatTensor& EmbeddingTable::tensor() const {
  static const FloatTensor kNone{.values = std::make_shared<const std::vector<float>>(), .shape = {0, 0}};
  return content_ ? content_->tensor : kNone;
}

DType EmbeddingTable::dtype() const {
  return content_ ? content_->dtype : DType::kFloat32;
}

Problems EmbeddingTable::validate(const EngineInfo& engine) const {
  Problems problems;
  const auto& [values, shape] = tensor();
  if (shape.size() != 2 || shape[0] < 1 || shape[1] != engine.prompt_embedding_size) {
    problems.add("embedding_table is " + text_of(shape) + "; accepted: [virtual tokens, " +
                 std::to_string(engine.prompt_embedding_size) + "], as wide as the model's hidden states");
    return problems;
  }
  if (dtype() != DType::kFloat32 && dtype() != engine.dtype) {
    const std::string of_engine =
        engine.dtype == DType::kFloat32 ? "" : " and " + std::string(name_of(engine.dtype));
    problems.add("embedding_table is of " + std::string(name_of(dtype())) + "; accepted: float32" +
                 of_engine + ", the engine's type");
  }
  const auto unusable = std::ranges::find_if_not(*values, [](float value) { return std::isfinite(value); });
  if (unusable != values->end()) {
    problems.add(element_of(*values, shape[1], unusable - values->begin()) + "; accepted: finite values");
  }
  check_coordinates(problems, *values, shape[1], engine.num_coordinates);
  return problems;
}

const float* EmbeddingTable::row(std::int64_t index) const {
  return tensor().values->data() + index * tensor().shape[1];
}

std::int32_t EmbeddingTable::next_position(std::int64_t index) const {
  return static_cast<std::int32_t>(row(index)[tensor().shape[1] - 1]);
}

std::span<const Sha256Digest> EmbeddingTable::digests() const {
  if (!content_) return {};
  std::call_once(content_->digested, [this] {
    const auto width = static_cast<std::size_t>(tensor().shape[1]);
    content_->digests.reserve(static_cast<std::size_t>(num_rows()));
    for (std::int64_t i = 0; i < num_rows(); ++i) {
      content_->digests.push_back(Sha256().add(std::as_bytes(std::span(row(i), width))).finish());
    }
  });
  return content_->digests;
}

bool EmbeddingTable::operator==(const EmbeddingTable& other) const {
  return content_ == other.content_ ||
         (tensor().shape == other.tensor().shape && *tensor().values == *other.tensor().values);
}

Problems PromptTuningConfig::validate(const EngineInfo& engine, std::int64_t prompt_length) const {
  Problems problems = embedding_table.validate(engine);
  if (input_token_extra_ids && std::cmp_not_equal(input_token_extra_ids->size(), prompt_length)) {
    problems.add("input_token_extra_ids has " + std::to_string(input_token_extra_ids->size()) +
                 " ids; accepted: one for each of the " + std::to_string(prompt_length) +
                 " tokens of input_token_ids, or None");
  }
  return problems;
}

PrefixDigests PromptTuningConfig::digests_of(std::span<const std::int32_t> prompt,
                                             std::int64_t first_id) const {
  const auto rows = embedding_table.digests();
  PrefixDigests digests;
  Sha256Digest before = {};
  for (std::size_t i = 0; i < prompt.size(); ++i) {
    const std::uint64_t extra_id = input_token_extra_ids ? (*input_token_extra_ids)[i] : 0;
    const bool is_virtual = prompt[i] >= first_id;
    if (!is_virtual && extra_id == 0) continue;
    Sha256 digest;
    digest.add(before).add_integer(i).add_integer(extra_id);
    if (is_virtual) digest.add(rows[static_cast<std::size_t>(prompt[i] - first_id)]);
    before = digest.finish();
    digests.push_back({.position = static_cast<std::int32_t>(i), .digest = before});
  }
  return digests;
}

std::vector<JointTokens> PromptTuningConfig::joint_tokens(std::span<const std::int32_t> prompt,
                                                          std::int64_t first_id, std::int32_t column) const {
  const auto number_of = [&](std::size_t position) {
    const std::int64_t row = prompt[position] - first_id;
    return row < 0 ? -1.0F : embedding_table.row(row)[column];
  };
  std::vector<JointTokens> found;
  float before = -1.0F;
  for (std::size_t i = 0; i < prompt.size(); ++i) {
    const float number = number_of(i);
    const auto position = static_cast<std::int32_t>(i);
    if (number >= 0.0F && number == before) {
      found.back().end = position + 1;
    } else if (number >= 0.0F) {
      found.push_back({.begin = position, .end = position + 1});
    }
    before = number;
  }
  return found;
}

}  // namespace adaptrt
