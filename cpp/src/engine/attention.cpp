#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "step.h"

namespace adaptrt {
namespace {

/// Keys are taken in tiles of this many, which begin at multiples of it: a query's sums then depend on its
/// position alone, not on which other queries are computed with it.
constexpr std::int64_t kTileKeys = kPanelColumns;
/// Rows (positions times the query heads that share a key-value head) that share a tile's keys and values.
constexpr std::int64_t kTargetRows = 48;

/// Query positions that are computed together.
std::int64_t positions_per_block(std::int64_t group) {
  return std::max<std::int64_t>(1, kTargetRows / group);
}

/// A thread's scratch, cut up. Rows are position-major: row = position index * group + query head within the
/// group.
struct Tiles {
  Tiles(float* scratch, std::int64_t rows, std::int64_t head_dim)
      : queries(scratch),
        scores(queries + rows * head_dim),
        sums(scores + rows * kTileKeys),
        products(sums + rows * head_dim),
        keys(products + rows * head_dim),
        values(keys + kTileKeys * head_dim) {}

  float* queries;   // [rows, head_dim], multiplied by the scale
  float* scores;    // [rows, kTileKeys]
  float* sums;      // [rows, head_dim], of exp(score - greatest) * value
  float* products;  // [rows, head_dim], those of one tile
  float* keys;      // the panel of a matrix [kTileKeys, head_dim]
  float* values;    // the panels of a matrix [head_dim, kTileKeys]
};

std::int64_t block_rows(std::int64_t group) {
  return positions_per_block(group) * group;
}

/// One attention op in one step.
class Attention {
 public:
  Attention(const AttentionOp& op, const Step& step)
      : op_(op),
        step_(step),
        pool_(step.kv_pool),
        heads_(step.program.shape.num_attention_heads),
        kv_heads_(step.program.shape.num_key_value_heads),
        head_dim_(step.program.shape.head_dim),
        group_(heads_ / kv_heads_),
        half_(step.buffer(op.cosine).width) {}

  void run() {
    const auto store = [&](std::int64_t begin, std::int64_t end, int thread) {
      for (std::int64_t token = begin; token < end; ++token) prepare_token(token, thread);
    };
    // Neighbours in a block, whose keys share cache lines, are mostly written by one thread.
    step_.threads.parallel_for(step_.num_tokens(), kTokensPerChunk, store);
    plan();
    const auto attend = [&](std::int64_t begin, std::int64_t end, int thread) {
      for (std::int64_t i = begin; i < end; ++i) run_task(tasks_[static_cast<std::size_t>(i)], thread);
    };
    step_.threads.parallel_for(static_cast<std::int64_t>(tasks_.size()), 1, attend);
  }

 private:
  static constexpr std::int64_t kTokensPerChunk = 8;

  struct Task {
    std::int64_t sequence;
    std::int64_t first_token;  // of the step
    std::int64_t tokens;
    std::int64_t kv_head;
  };
  /// Keys of a tile, or those of a tile that a query sees: [begin, end), from the tile's first key.
  struct KeyRange {
    std::int64_t begin;
    std::int64_t end;
  };

  [[nodiscard]] std::int64_t position_of(std::int64_t token) const {
    return step_.input.positions[static_cast<std::size_t>(token)];
  }
  [[nodiscard]] const std::int32_t* block_table(std::int64_t sequence) const {
    return step_.input.block_tables.data() + sequence * step_.input.max_blocks_per_sequence;
  }

  /// Norms and rotates a token's query and key heads in place, and writes its keys and values to the pool.
  void prepare_token(std::int64_t token, int thread) {
    float* query = step_.float_row(op_.qkv, token);
    float* key = query + heads_ * head_dim_;
    const float* value = key + kv_heads_ * head_dim_;
    for (std::int64_t head = 0; head < heads_; ++head)
      prepare_head(query + head * head_dim_, op_.query_norm, token);
    const std::int64_t position = position_of(token);
    const auto sequence = step_.sequence_of_token[static_cast<std::size_t>(token)];
    const std::int32_t block = block_table(sequence)[position / pool_.tokens_per_block()];
    const std::int64_t slot = position % pool_.tokens_per_block();
    for (std::int64_t head = 0; head < kv_heads_; ++head) {
      prepare_head(key + head * head_dim_, op_.key_norm, token);
      store_key(key + head * head_dim_, pool_.keys(block, op_.layer, head), slot, thread);
      std::byte* values = pool_.values(block, op_.layer, head);
      step_.kernels.scale_and_store(
          value + head * head_dim_, 1.0F, head_dim_,
          values + static_cast<std::size_t>(slot * head_dim_) * size_of(pool_.dtype()), pool_.dtype());
    }
  }

  void prepare_head(float* head, const VectorView& norm, std::int64_t token) const {
    if (norm.size > 0) {
      step_.kernels.rms_norm(head, norm.data, op_.norm_epsilon, head_dim_, reinterpret_cast<std::byte*>(head),
                             DType::kFloat32);
    }
    step_.kernels.rotate(step_.float_row(op_.cosine, token), step_.float_row(op_.sine, token), half_, head);
  }

  /// Writes a key to its column of [head_dim][tokens_per_block].
  void store_key(const float* key, std::byte* keys, std::int64_t slot, int thread) const {
    const std::size_t size = size_of(pool_.dtype());
    auto* rounded = reinterpret_cast<std::byte*>(step_.scratch[static_cast<std::size_t>(thread)].data());
    step_.kernels.scale_and_store(key, 1.0F, head_dim_, rounded, pool_.dtype());
    const auto stride = static_cast<std::size_t>(pool_.tokens_per_block()) * size;
    std::byte* to = keys + static_cast<std::size_t>(slot) * size;
    if (size == sizeof(std::uint16_t)) {
      copy_column<sizeof(std::uint16_t)>(rounded, to, stride);
    } else {
      copy_column<sizeof(float)>(rounded, to, stride);
    }
  }

  template <std::size_t kSize>
  void copy_column(const std::byte* from, std::byte* to, std::size_t stride) const {
    for (std::int64_t d = 0; d < head_dim_; ++d, from += kSize, to += stride) std::memcpy(to, from, kSize);
  }

  /// Cuts the step's queries into tasks, the long ones first so that they do not end last.
  void plan() {
    const std::int64_t block = positions_per_block(group_);
    for (std::int64_t sequence = 0; sequence < step_.num_sequences(); ++sequence) {
      const std::int64_t begin = step_.input.sequence_offsets[static_cast<std::size_t>(sequence)];
      const std::int64_t end = step_.input.sequence_offsets[static_cast<std::size_t>(sequence) + 1];
      for (std::int64_t first = begin; first < end; first += block) {
        for (std::int64_t head = 0; head < kv_heads_; ++head) {
          tasks_.push_back({sequence, first, std::min(block, end - first), head});
        }
      }
    }
    std::stable_sort(tasks_.begin(), tasks_.end(), [this](const Task& a, const Task& b) {
      return a.tokens * (position_of(a.first_token) + 1) > b.tokens * (position_of(b.first_token) + 1);
    });
  }

  void run_task(const Task& task, int thread) {
    const Tiles tiles(step_.scratch[static_cast<std::size_t>(thread)].data(), block_rows(group_), head_dim_);
    const std::int64_t rows = task.tokens * group_;
    std::vector<SoftmaxState> states(static_cast<std::size_t>(rows),
                                     {.greatest = -std::numeric_limits<float>::infinity()});
    load_queries(task, tiles);
    std::fill_n(tiles.sums, rows * head_dim_, 0.0F);
    const std::int64_t last = position_of(task.first_token + task.tokens - 1);
    const std::int64_t first_key = first_visible(position_of(task.first_token));
    for (std::int64_t tile = first_key / kTileKeys; tile <= last / kTileKeys; ++tile) {
      const std::int64_t keys = std::min(kTileKeys, last + 1 - tile * kTileKeys);
      load_keys(task, tile * kTileKeys, keys, tiles.keys);
      load_values(task, tile * kTileKeys, keys, tiles.values);
      take_tile(task, tile, tiles, states.data());
    }
    for (std::int64_t row = 0; row < rows; ++row) {
      const std::int64_t head = task.kv_head * group_ + row % group_;
      std::byte* out = step_.row(op_.output, task.first_token + row / group_);
      const DType out_type = step_.buffer(op_.output).dtype;
      step_.kernels.scale_and_store(
          tiles.sums + row * head_dim_, 1.0F / states[static_cast<std::size_t>(row)].sum, head_dim_,
          out + static_cast<std::size_t>(head * head_dim_) * size_of(out_type), out_type);
    }
  }

  [[nodiscard]] std::int64_t first_visible(std::int64_t position) const {
    return op_.sliding_window == 0 ? 0 : std::max<std::int64_t>(0, position + 1 - op_.sliding_window);
  }

  /// The keys of a tile that a position sees; empty when begin >= end.
  [[nodiscard]] KeyRange visible(std::int64_t position, std::int64_t tile) const {
    return {std::max<std::int64_t>(0, first_visible(position) - tile * kTileKeys),
            std::min(kTileKeys, position + 1 - tile * kTileKeys)};
  }

  void load_queries(const Task& task, const Tiles& tiles) const {
    float* out = tiles.queries;
    for (std::int64_t token = task.first_token; token < task.first_token + task.tokens; ++token) {
      const float* heads = step_.float_row(op_.qkv, token) + task.kv_head * group_ * head_dim_;
      step_.kernels.scale_and_store(heads, op_.scale, group_ * head_dim_, reinterpret_cast<std::byte*>(out),
                                    DType::kFloat32);
      out += group_ * head_dim_;
    }
  }

  /// Keys of a tile that lie in one block: `keys` of them from `slot` on; the first is the tile's key `at`.
  struct Run {
    std::int32_t block;
    std::int64_t slot;
    std::int64_t at;
    std::int64_t keys;
    /// Where the key that is a tile further lies; the same place when the task does not see that far.
    std::int32_t next_block;
    std::int64_t next_slot;
  };

  /// Calls body(run) for the runs of a tile that begins at first_key and of which `keys` are there.
  template <class Body>
  void for_each_run(const Task& task, std::int64_t first_key, std::int64_t keys, const Body& body) const {
    const std::int32_t* blocks = block_table(task.sequence);
    const std::int64_t last = position_of(task.first_token + task.tokens - 1);
    for (std::int64_t done = 0; done < keys;) {
      const std::int64_t key = first_key + done;
      const std::int64_t next = key + kTileKeys <= last ? key + kTileKeys : key;
      const std::int64_t slot = key % pool_.tokens_per_block();
      const std::int64_t run = std::min(keys - done, pool_.tokens_per_block() - slot);
      body(Run{.block = blocks[key / pool_.tokens_per_block()],
               .slot = slot,
               .at = done,
               .keys = run,
               .next_block = blocks[next / pool_.tokens_per_block()],
               .next_slot = next % pool_.tokens_per_block()});
      done += run;
    }
  }

  void load_keys(const Task& task, std::int64_t first_key, std::int64_t keys, float* out) const {
    const auto at = [&](std::int32_t block, std::int64_t slot) {
      return pool_.keys(block, op_.layer, task.kv_head) +
             static_cast<std::size_t>(slot) * size_of(pool_.dtype());
    };
    for_each_run(task, first_key, keys, [&](const Run& run) {
      step_.kernels.load_rows({.x = at(run.block, run.slot),
                               .type = pool_.dtype(),
                               .x_stride = pool_.tokens_per_block(),
                               .rows = head_dim_,
                               .n = run.keys,
                               .out = out + run.at,
                               .out_stride = kTileKeys,
                               .next = at(run.next_block, run.next_slot)});
    });
  }

  void load_values(const Task& task, std::int64_t first_key, std::int64_t keys, float* out) const {
    const auto at = [&](std::int32_t block, std::int64_t slot, std::int64_t column) {
      return pool_.values(block, op_.layer, task.kv_head) +
             static_cast<std::size_t>(slot * head_dim_ + column) * size_of(pool_.dtype());
    };
    for_each_run(task, first_key, keys, [&](const Run& run) {
      for (std::int64_t panel = 0; panel < panel_count(head_dim_); ++panel) {
        const std::int64_t width = panel_width(head_dim_, panel);
        const std::int64_t column = panel * kPanelColumns;
        step_.kernels.load_rows({.x = at(run.block, run.slot, column),
                                 .type = pool_.dtype(),
                                 .x_stride = head_dim_,
                                 .rows = run.keys,
                                 .n = width,
                                 .out = out + column * kTileKeys + run.at * width,
                                 .out_stride = width,
                                 .next = at(run.next_block, run.next_slot, column)});
      }
    });
  }

  /// Takes a tile of keys and values into the sums of those queries that see any of it.
  void take_tile(const Task& task, std::int64_t tile, const Tiles& tiles, SoftmaxState* states) const {
    std::int64_t begin = 0;
    std::int64_t end = task.tokens;
    const auto sees = [&](std::int64_t i) {
      const KeyRange range = visible(position_of(task.first_token + i), tile);
      return range.begin < range.end;
    };
    while (begin < end && !sees(begin)) ++begin;
    while (begin < end && !sees(end - 1)) --end;
    if (begin == end) return;
    step_.kernels.gemm[static_cast<std::size_t>(DType::kFloat32)](
        {.a = tiles.queries + begin * group_ * head_dim_,
         .a_stride = head_dim_,
         .panel = reinterpret_cast<const std::byte*>(tiles.keys),
         .k = head_dim_,
         .width = kTileKeys,
         .out = tiles.scores + begin * group_ * kTileKeys,
         .out_stride = kTileKeys,
         .rows = (end - begin) * group_});
    for (std::int64_t i = begin; i < end; ++i) {
      const KeyRange range = visible(position_of(task.first_token + i), tile);
      for (std::int64_t row = i * group_; row < (i + 1) * group_; ++row) {
        step_.kernels.softmax_tile(tiles.scores + row * kTileKeys + range.begin, range.end - range.begin,
                                   states + row);
      }
    }
    // Positions that see the whole tile go together; the others one by one over just the keys that they see.
    for (std::int64_t i = begin; i < end;) {
      const KeyRange range = visible(position_of(task.first_token + i), tile);
      std::int64_t next = i + 1;
      if (range.begin == 0 && range.end == kTileKeys) {
        while (next < end && visible(position_of(task.first_token + next), tile).begin == 0) ++next;
      }
      weigh_values(tiles, range, i * group_, next * group_, states);
      i = next;
    }
  }

  /// sums[rows] = sums * rescale + scores * values over a range of keys.
  void weigh_values(const Tiles& tiles, KeyRange range, std::int64_t begin, std::int64_t end,
                    const SoftmaxState* states) const {
    for (std::int64_t panel = 0; panel < panel_count(head_dim_); ++panel) {
      const std::int64_t width = panel_width(head_dim_, panel);
      const float* values = tiles.values + panel * kPanelColumns * kTileKeys + range.begin * width;
      step_.kernels.gemm[static_cast<std::size_t>(DType::kFloat32)](
          {.a = tiles.scores + begin * kTileKeys + range.begin,
           .a_stride = kTileKeys,
           .panel = reinterpret_cast<const std::byte*>(values),
           .k = range.end - range.begin,
           .width = width,
           .out = tiles.products + begin * head_dim_ + panel * kPanelColumns,
           .out_stride = head_dim_,
           .rows = end - begin});
    }
    for (std::int64_t row = begin; row < end; ++row) {
      step_.kernels.scale_and_add(states[row].rescale, tiles.products + row * head_dim_, head_dim_,
                                  tiles.sums + row * head_dim_);
    }
  }

  const AttentionOp& op_;
  const Step& step_;
  const KvPool& pool_;
  std::int64_t heads_;
  std::int64_t kv_heads_;
  std::int64_t head_dim_;
  std::int64_t group_;
  std::int64_t half_;  // pairs that are rotated
  std::vector<Task> tasks_;
};

}  // namespace

std::size_t attention_scratch_floats(const ModelShape& shape) {
  const std::int64_t rows = block_rows(shape.num_attention_heads / shape.num_key_value_heads);
  return static_cast<std::size_t>(rows * (3 * shape.head_dim + kTileKeys) + 2 * kTileKeys * shape.head_dim);
}

void run_op(const AttentionOp& op, const Step& step) {
  Attention(op, step).run();
}

}  // namespace adaptrt
