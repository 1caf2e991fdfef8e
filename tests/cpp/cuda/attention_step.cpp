#include "attention_step.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <stdexcept>

#include "emulation/grid.h"

namespace adaptrt::cuda {
namespace {

constexpr std::uint16_t kNaN = 0xffff;  // as float16 and as bfloat16

/// Bytes after the workspace that must not change.
constexpr std::size_t kCanaryBytes = 64;

/// Columns after q, k and v in a fused buffer.
constexpr std::size_t kExtraColumns = 8;

/// Maximum error of a result, as a multiple of the maximum rounding error of the weights and the result in T.
/// It also covers queries rounded the other way, and float32 sums.
constexpr double kTolerance = 2.0;

std::unique_ptr<emulation::BlockOrder> next_block_order() {
  thread_local std::uint32_t turn = 0;
  switch (turn++ % 3) {
    case 0:
      return nullptr;
    case 1:
      return std::make_unique<emulation::BlockOrder>([](auto blocks) { std::ranges::reverse(blocks); });
    default:
      return std::make_unique<emulation::BlockOrder>(
          [random = std::mt19937(turn)](auto blocks) mutable { std::ranges::shuffle(blocks, random); });
  }
}

}  // namespace

RandomAttentionStep::RandomAttentionStep(const PagedAttentionConfig& config, const StepSizes& sizes,
                                         const std::vector<SequenceOfStep>& sequences, std::mt19937& random)
    : config_(config), sizes_(sizes), sequence_offsets_{0} {
  if (sizes_.rotary_half < 0) sizes_.rotary_half = config.head_dim / 2;
  for (const SequenceOfStep& sequence : sequences) {
    for (std::int32_t i = 0; i < sequence.tokens; ++i) positions_.push_back(sequence.past + i);
    sequence_offsets_.push_back(tokens());
  }
  const auto rows = positions_.size();
  const auto query_width =
      static_cast<std::size_t>(config.num_heads) * static_cast<std::size_t>(config.head_dim);
  const auto key_width =
      static_cast<std::size_t>(config.num_kv_heads) * static_cast<std::size_t>(config.head_dim);
  q_ = random_elements(rows * query_width, sizes.magnitude, random);
  k_ = random_elements(rows * key_width, sizes.magnitude, random);
  v_ = random_elements(rows * key_width, 1.0F, random);
  std::uniform_real_distribution<float> angle(-3.0F, 3.0F);
  for (std::size_t i = 0; i < rows * static_cast<std::size_t>(sizes_.rotary_half); ++i) {
    const float value = angle(random);
    cosine_.push_back(std::cos(value));
    sine_.push_back(std::sin(value));
  }
  if (sizes_.sinks) {
    // From far below the scores to far above them.
    std::normal_distribution<float> sink(0.0F, 4.0F);
    for (std::int32_t head = 0; head < config.num_heads; ++head) sinks_.push_back(sink(random));
  }
  fill_tables(sequences, random);
  fill_past(sequences, random);
}

void RandomAttentionStep::fill_tables(const std::vector<SequenceOfStep>& sequences, std::mt19937& random) {
  const auto blocks_of = [&](const SequenceOfStep& sequence) {
    const std::int32_t used =
        (sequence.past + sequence.tokens + sizes_.tokens_per_block - 1) / sizes_.tokens_per_block;
    return sequence.padding ? 0 : used;
  };
  constexpr std::int32_t kUnused = 3;
  num_blocks_ = kUnused;
  for (const SequenceOfStep& sequence : sequences) num_blocks_ += blocks_of(sequence);
  std::vector<std::int32_t> blocks(static_cast<std::size_t>(num_blocks_));
  std::iota(blocks.begin(), blocks.end(), 0);
  std::shuffle(blocks.begin(), blocks.end(), random);
  for (const SequenceOfStep& sequence : sequences) {
    for (std::int32_t i = 0; i < sizes_.max_blocks; ++i) {
      const bool used = i < blocks_of(sequence);
      block_tables_.push_back(used ? blocks.back() : -1);
      if (used) blocks.pop_back();
    }
  }
}

void RandomAttentionStep::fill_past(const std::vector<SequenceOfStep>& sequences, std::mt19937& random) {
  pool_.assign(pool_row(num_blocks_, 0, 0, 0), kNaN);
  for (std::size_t s = 0; s < sequences.size(); ++s) {
    for (std::int32_t position = 0; position < sequences[s].past; ++position) {
      const std::int32_t block = block_of(s, position);
      if (block < 0) continue;
      for (std::int32_t kv_head = 0; kv_head < config_.num_kv_heads; ++kv_head) {
        for (const int part : {0, 1}) {
          const auto row = random_elements(static_cast<std::size_t>(config_.head_dim),
                                           part == 0 ? sizes_.magnitude : 1.0F, random);
          std::copy(row.begin(), row.end(),
                    pool_.begin() + static_cast<std::ptrdiff_t>(
                                        pool_row(block, part, kv_head, position % sizes_.tokens_per_block)));
        }
      }
    }
  }
  if (config_.int8_pool) quantize_past();
  pool_before_ = pool_;
}

void RandomAttentionStep::quantize_past() {
  const auto dim = static_cast<std::size_t>(config_.head_dim);
  // All ones: NaN as scales.
  int8_pool_.assign(static_cast<std::size_t>(num_blocks_) * block_bytes(), -1);
  for (std::size_t row = 0; row < pool_.size(); row += dim) {
    if (pool_[row] == kNaN) continue;
    float largest = 0.0F;
    for (std::size_t i = 0; i < dim; ++i) largest = std::max(largest, std::abs(widen(pool_[row + i])));
    const float scale = largest / 127.0F;
    std::memcpy(&int8_pool_[scale_of_row(row)], &scale, sizeof(scale));
    for (std::size_t i = 0; i < dim; ++i) {
      const auto integer = static_cast<std::int8_t>(std::lround(widen(pool_[row + i]) / scale));
      int8_pool_[element_of_row(row) + i] = integer;
      pool_[row + i] = round(static_cast<float>(integer) * scale);
    }
  }
}

std::size_t RandomAttentionStep::element_of_row(std::size_t row) const {
  const auto elements = static_cast<std::size_t>(2 * config_.num_kv_heads * sizes_.tokens_per_block) *
                        static_cast<std::size_t>(config_.head_dim);
  return row / elements * block_bytes() + row % elements;
}

std::size_t RandomAttentionStep::scale_of_row(std::size_t row) const {
  const auto dim = static_cast<std::size_t>(config_.head_dim);
  const auto elements = static_cast<std::size_t>(2 * config_.num_kv_heads * sizes_.tokens_per_block) * dim;
  return row / elements * block_bytes() + elements + row % elements / dim * sizeof(float);
}

std::size_t RandomAttentionStep::block_bytes() const {
  return static_cast<std::size_t>(
      int8_block_bytes(config_.num_kv_heads, sizes_.tokens_per_block, config_.head_dim));
}

std::string RandomAttentionStep::check_int8_pool() {
  std::vector<std::int8_t> expected = int8_pool_before_;
  const auto dim = static_cast<std::size_t>(config_.head_dim);
  for (std::size_t s = 0; s + 1 < sequence_offsets_.size(); ++s) {
    for (std::int32_t token = sequence_offsets_[s]; token < sequence_offsets_[s + 1]; ++token) {
      const std::int32_t position = positions_[static_cast<std::size_t>(token)];
      const std::int32_t block = block_of(s, position);
      if (block < 0) continue;
      for (std::int32_t kv_head = 0; kv_head < config_.num_kv_heads; ++kv_head) {
        for (const int part : {0, 1}) {
          const std::size_t from = static_cast<std::size_t>(token * config_.num_kv_heads + kv_head) * dim;
          std::vector<float> values(dim);
          std::transform(&v_[from], &v_[from] + dim, values.begin(),
                         [this](auto bits) { return widen(bits); });
          if (part == 0) values = turn(&k_[from], token);
          const std::size_t row = pool_row(block, part, kv_head, position % sizes_.tokens_per_block);
          float scale = 0.0F;
          std::memcpy(&scale, &int8_pool_[scale_of_row(row)], sizeof(scale));
          std::memcpy(&expected[scale_of_row(row)], &scale, sizeof(scale));
          const auto magnitude = [](float a, float b) { return std::abs(a) < std::abs(b); };
          const float largest = std::abs(*std::max_element(values.begin(), values.end(), magnitude));
          if (!(std::abs(scale * 127.0F - largest) <= 1e-6F * largest)) {
            return "the scale of token " + std::to_string(token) + " is " + std::to_string(scale);
          }
          for (std::size_t i = 0; i < dim; ++i) {
            const std::int8_t integer = int8_pool_[element_of_row(row) + i];
            expected[element_of_row(row) + i] = integer;
            // Half of a step; and a little more, since products are rounded.
            if (!(std::abs(static_cast<float>(integer) * scale - values[i]) <= 0.50001F * scale)) {
              return "element " + std::to_string(i) + " of token " + std::to_string(token) + " is " +
                     std::to_string(integer) + " times " + std::to_string(scale) + ", not " +
                     std::to_string(values[i]);
            }
            pool_[row + i] = round(static_cast<float>(integer) * scale);
          }
        }
      }
    }
  }
  return int8_pool_ == expected ? "" : "the int8 pool has changed where no token is";
}

std::vector<std::uint16_t> RandomAttentionStep::random_elements(std::size_t count, float magnitude,
                                                                std::mt19937& random) const {
  std::normal_distribution<float> normal(0.0F, magnitude);
  std::vector<std::uint16_t> elements(count);
  for (std::uint16_t& element : elements) element = round(normal(random));
  return elements;
}

void RandomAttentionStep::run(bool has_keys) {
  const PagedAttentionKernel kernel(config_);
  const auto sequences = static_cast<std::int32_t>(sequence_offsets_.size()) - 1;
  pool_before_ = pool_;
  int8_pool_before_ = int8_pool_;
  attended_.assign(q_.size(), kNaN);
  const auto query_width = static_cast<std::size_t>(config_.num_heads * config_.head_dim);
  const auto kv_width = static_cast<std::size_t>(config_.num_kv_heads * config_.head_dim);
  const std::size_t fused_width = query_width + 2 * kv_width + kExtraColumns;
  std::vector<std::uint16_t> fused;
  if (sizes_.fused) {
    fused.assign(positions_.size() * fused_width, kNaN);
    for (std::size_t row = 0; row < positions_.size(); ++row) {
      const auto to = fused.begin() + static_cast<std::ptrdiff_t>(row * fused_width);
      std::copy_n(&q_[row * query_width], query_width, to);
      std::copy_n(&k_[row * kv_width], kv_width, to + static_cast<std::ptrdiff_t>(query_width));
      std::copy_n(&v_[row * kv_width], kv_width, to + static_cast<std::ptrdiff_t>(query_width + kv_width));
    }
  }
  const std::size_t bytes = kernel.workspace_bytes(tokens(), sequences);
  std::vector<std::uint8_t> workspace(bytes + kCanaryBytes, 0xff);
  std::vector<std::uint32_t> counters(kernel.counter_bytes(sequences) / sizeof(std::uint32_t));
  const auto order = next_block_order();
  const auto of_keys = [has_keys](const std::uint16_t* address) { return has_keys ? address : nullptr; };
  kernel.enqueue({.tokens = tokens(),
                  .sequences = sequences,
                  .max_blocks = sizes_.max_blocks,
                  .tokens_per_block = sizes_.tokens_per_block,
                  .rotary_half = sizes_.rotary_half,
                  .q_stride = static_cast<std::int32_t>(sizes_.fused ? fused_width : query_width),
                  .kv_stride = static_cast<std::int32_t>(sizes_.fused ? fused_width : kv_width)},
                 {.q = sizes_.fused ? fused.data() : q_.data(),
                  .k = of_keys(sizes_.fused ? fused.data() + query_width : k_.data()),
                  .v = of_keys(sizes_.fused ? fused.data() + query_width + kv_width : v_.data()),
                  .kv_pool = config_.int8_pool ? static_cast<void*>(int8_pool_.data()) : pool_.data(),
                  .block_tables = block_tables_.data(),
                  .sequence_offsets = sequence_offsets_.data(),
                  .positions = positions_.data(),
                  .cosine = cosine_.data(),
                  .sine = sine_.data(),
                  .sinks = sizes_.sinks ? sinks_.data() : nullptr,
                  .counters = sizes_.counters ? counters.data() : nullptr,
                  .attended = attended_.data()},
                 workspace.data(), nullptr);
  if (std::ranges::count(counters, 0U) != std::ssize(counters)) {
    throw std::runtime_error("the kernels left counters that are not zero");
  }
  const auto untouched = [](std::uint8_t byte) { return byte == 0xff; };
  if (!std::all_of(workspace.end() - static_cast<std::ptrdiff_t>(kCanaryBytes), workspace.end(), untouched)) {
    throw std::runtime_error("the kernels wrote behind their workspace");
  }
  if (config_.int8_pool) int8_problems_ = check_int8_pool();
}

std::string RandomAttentionStep::problems() const {
  if (!int8_problems_.empty()) return int8_problems_;
  if (!config_.int8_pool && pool_ != expected_pool()) return "the pool is not as it should be";
  for (std::size_t s = 0; s + 1 < sequence_offsets_.size(); ++s) {
    for (std::int32_t token = sequence_offsets_[s]; token < sequence_offsets_[s + 1]; ++token) {
      for (std::int32_t head = 0; head < config_.num_heads; ++head) {
        std::string problem = compare_head(s, token, head);
        if (!problem.empty()) return problem;
      }
    }
  }
  return {};
}

std::vector<std::uint16_t> RandomAttentionStep::expected_pool() const {
  std::vector<std::uint16_t> pool = pool_before_;
  for (std::size_t s = 0; s + 1 < sequence_offsets_.size(); ++s) {
    for (std::int32_t token = sequence_offsets_[s]; token < sequence_offsets_[s + 1]; ++token) {
      const std::int32_t position = positions_[static_cast<std::size_t>(token)];
      const std::int32_t block = block_of(s, position);
      if (block < 0) continue;
      for (std::int32_t kv_head = 0; kv_head < config_.num_kv_heads; ++kv_head) {
        const std::size_t from = static_cast<std::size_t>(token * config_.num_kv_heads + kv_head) *
                                 static_cast<std::size_t>(config_.head_dim);
        const std::int32_t slot = position % sizes_.tokens_per_block;
        const auto key = rotate(&k_[from], token);
        std::copy(key.begin(), key.end(), &pool[pool_row(block, 0, kv_head, slot)]);
        std::copy_n(&v_[from], config_.head_dim, &pool[pool_row(block, 1, kv_head, slot)]);
      }
    }
  }
  return pool;
}

std::vector<std::uint16_t> RandomAttentionStep::rotate(const std::uint16_t* head, std::int32_t token,
                                                       double factor) const {
  const std::vector<float> turned = turn(head, token);
  std::vector<std::uint16_t> rounded;
  for (const float value : turned) rounded.push_back(round(static_cast<float>(value * factor)));
  return rounded;
}

double RandomAttentionStep::query_factor(std::int32_t position) const {
  const std::int32_t steps = (position + config_.query_scaling_offset) / config_.query_scaling_length;
  return 1.0 + double{config_.query_scaling_beta} * std::log(1.0 + steps);
}

std::int32_t RandomAttentionStep::first_visible(std::int32_t position) const {
  if (config_.chunk > 0) return position / config_.chunk * config_.chunk;
  return config_.sliding_window == 0 ? 0 : std::max(0, position + 1 - config_.sliding_window);
}

std::vector<float> RandomAttentionStep::turn(const std::uint16_t* head, std::int32_t token) const {
  std::vector<float> turned;
  for (std::int32_t i = 0; i < config_.head_dim; ++i) turned.push_back(widen(head[i]));
  const auto half = static_cast<std::size_t>(sizes_.rotary_half);
  for (std::size_t i = 0; i < half; ++i) {
    const float cosine = cosine_[static_cast<std::size_t>(token) * half + i];
    const float sine = sine_[static_cast<std::size_t>(token) * half + i];
    const std::size_t low = config_.interleaved ? 2 * i : i;
    const std::size_t high = config_.interleaved ? low + 1 : half + i;
    const float first = widen(head[low]);
    const float second = widen(head[high]);
    turned[low] = first * cosine - second * sine;
    turned[high] = second * cosine + first * sine;
  }
  return turned;
}

std::string RandomAttentionStep::compare_head(std::size_t sequence, std::int32_t token,
                                              std::int32_t head) const {
  const auto head_dim = static_cast<std::size_t>(config_.head_dim);
  const std::size_t row = static_cast<std::size_t>(token * config_.num_heads + head) * head_dim;
  const std::int32_t position = positions_[static_cast<std::size_t>(token)];
  std::vector<double> expected(head_dim, 0.0);
  std::vector<double> absolute(head_dim, 0.0);
  if (block_of(sequence, position) >= 0) {
    const auto query = rotate(&q_[row], token, query_factor(position));
    const std::int32_t kv_head = head / (config_.num_heads / config_.num_kv_heads);
    const std::int32_t first = first_visible(position);
    std::vector<double> scores;
    for (std::int32_t key = first; key <= position; ++key) {
      const std::size_t at = pool_row(block_of(sequence, key), 0, kv_head, key % sizes_.tokens_per_block);
      double score = 0.0;
      for (std::size_t d = 0; d < head_dim; ++d)
        score += double{widen(query[d])} * double{widen(pool_[at + d])};
      score *= double{config_.scale};
      const double cap = double{config_.softcap};
      scores.push_back(cap == 0.0 ? score : cap * std::tanh(score / cap));
    }
    double greatest = *std::max_element(scores.begin(), scores.end());
    double total = 0.0;
    if (sizes_.sinks) {
      const double sink = double{sinks_[static_cast<std::size_t>(head)]};
      greatest = std::max(greatest, sink);
      total = std::exp(sink - greatest);
    }
    for (double& score : scores) total += score = std::exp(score - greatest);
    for (std::int32_t key = first; key <= position; ++key) {
      const std::size_t at = pool_row(block_of(sequence, key), 1, kv_head, key % sizes_.tokens_per_block);
      const double weight = scores[static_cast<std::size_t>(key - first)] / total;
      for (std::size_t d = 0; d < head_dim; ++d) {
        expected[d] += weight * double{widen(pool_[at + d])};
        absolute[d] += weight * std::abs(double{widen(pool_[at + d])});
      }
    }
  }
  const bool is_half = config_.dtype == DType::kFloat16;
  const double rounding = is_half ? 0x1p-11 : 0x1p-8;
  // Near 0, float16 numbers are 2^-24 apart: for the result and for the weights.
  const double near_zero = is_half ? (position + 2) * 0x1p-24 : 0.0;
  for (std::size_t d = 0; d < head_dim; ++d) {
    const double got = double{widen(attended_[row + d])};
    const double allowed = kTolerance * rounding * (absolute[d] + std::abs(expected[d])) + near_zero;
    if (std::abs(got - expected[d]) <= allowed) continue;
    return "token " + std::to_string(token) + " of sequence " + std::to_string(sequence) + " at position " +
           std::to_string(position) + ", head " + std::to_string(head) + ", dimension " + std::to_string(d) +
           ": " + std::to_string(got) + ", not " + std::to_string(expected[d]) + " +- " +
           std::to_string(allowed);
  }
  return {};
}

RandomAttentionStep RandomAttentionStep::part(std::int32_t begin, std::int32_t end) const {
  RandomAttentionStep step = *this;
  const auto cut = [&](auto& rows) {
    const std::size_t width = rows.size() / positions_.size();
    rows.erase(rows.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(end) * width), rows.end());
    rows.erase(rows.begin(),
               rows.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(begin) * width));
  };
  cut(step.q_);
  cut(step.k_);
  cut(step.v_);
  cut(step.cosine_);
  cut(step.sine_);
  cut(step.positions_);
  step.sequence_offsets_ = {0, end - begin};
  const auto sequence = std::upper_bound(sequence_offsets_.begin(), sequence_offsets_.end(), begin) -
                        sequence_offsets_.begin() - 1;
  const auto table = block_tables_.begin() + sequence * sizes_.max_blocks;
  step.block_tables_.assign(table, table + sizes_.max_blocks);
  return step;
}

void RandomAttentionStep::append(const std::vector<SequenceOfStep>& padding) {
  const auto before = positions_.size();
  for (const SequenceOfStep& sequence : padding) {
    for (std::int32_t i = 0; i < sequence.tokens; ++i) positions_.push_back(sequence.past + i);
    sequence_offsets_.push_back(tokens());
    block_tables_.insert(block_tables_.end(), static_cast<std::size_t>(sizes_.max_blocks), -1);
  }
  const auto grow = [&](auto& rows, auto value) {
    rows.resize(rows.size() / before * positions_.size(), value);
  };
  grow(q_, kNaN);
  grow(k_, kNaN);
  grow(v_, kNaN);
  grow(cosine_, 1.0F);
  grow(sine_, 1.0F);
}

std::vector<std::uint16_t> RandomAttentionStep::attended(std::int32_t begin, std::int32_t end) const {
  const auto width = static_cast<std::ptrdiff_t>(config_.num_heads) * config_.head_dim;
  return {attended_.begin() + begin * width, attended_.begin() + end * width};
}

void RandomAttentionStep::forget_unseen_keys() {
  std::int32_t unused = 0;
  while (std::ranges::find(block_tables_, unused) != block_tables_.end()) ++unused;
  for (std::size_t s = 0; s + 1 < sequence_offsets_.size(); ++s) {
    const std::int32_t first_position = positions_[static_cast<std::size_t>(sequence_offsets_[s])];
    const std::int32_t first_seen = std::max(0, first_position + 1 - config_.sliding_window);
    for (std::int32_t position = 0; position < first_seen; ++position) {
      const std::int32_t block = block_of(s, position);
      if (block < 0 || block == unused) continue;
      for (std::int32_t kv_head = 0; kv_head < config_.num_kv_heads; ++kv_head) {
        for (const int part : {0, 1}) {
          const std::size_t row = pool_row(block, part, kv_head, position % sizes_.tokens_per_block);
          std::fill_n(pool_.begin() + static_cast<std::ptrdiff_t>(row), config_.head_dim, kNaN);
        }
      }
    }
    for (std::int32_t i = 0; i < first_seen / sizes_.tokens_per_block; ++i) {
      block_tables_[s * static_cast<std::size_t>(sizes_.max_blocks) + static_cast<std::size_t>(i)] =
          i % 2 == 0 ? -1 : unused;
    }
  }
}

void RandomAttentionStep::set_key(std::int32_t token, std::int32_t element, float value) {
  k_[static_cast<std::size_t>(token * config_.num_kv_heads * config_.head_dim + element)] = round(value);
}

std::uint16_t RandomAttentionStep::round(float value) const {
  return config_.dtype == DType::kFloat16 ? float_to_float16(value) : float_to_bfloat16(value);
}

float RandomAttentionStep::widen(std::uint16_t bits) const {
  return config_.dtype == DType::kFloat16 ? float16_to_float(bits) : bfloat16_to_float(bits);
}

std::int32_t RandomAttentionStep::block_of(std::size_t sequence, std::int32_t position) const {
  return block_tables_[sequence * static_cast<std::size_t>(sizes_.max_blocks) +
                       static_cast<std::size_t>(position / sizes_.tokens_per_block)];
}

std::size_t RandomAttentionStep::pool_row(std::int32_t block, int part, std::int32_t kv_head,
                                          std::int32_t slot) const {
  const auto head = (static_cast<std::size_t>(block) * 2 + static_cast<std::size_t>(part)) *
                        static_cast<std::size_t>(config_.num_kv_heads) +
                    static_cast<std::size_t>(kv_head);
  return (head * static_cast<std::size_t>(sizes_.tokens_per_block) + static_cast<std::size_t>(slot)) *
         static_cast<std::size_t>(config_.head_dim);
}

}  // namespace adaptrt::cuda
