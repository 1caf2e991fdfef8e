#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>
#include <span>
#include <variant>

#include "adaptrt/cpu/attention_tile.h"
#include "lowered_op.h"
#include "op_sizes.h"
#include "ops/attention_plan.h"
#include "ops/keys_as_values.h"
#include "ops/kv_writer.h"

namespace adaptrt {
namespace {

/// A thread's scratch memory. Rows of one key-value head follow those of another. Within a head they are
/// position-major: row = position index * group + query head within the group.
struct RowMemory {
  RowMemory(float* scratch, std::int64_t rows, std::int64_t head_dim)
      : accumulator(scratch),
        row_sum(accumulator + rows * whole_groups(head_dim)),
        widened(row_sum + rows * kKeyGroup),
        queries(widened + tile_scratch_floats(head_dim)),
        row_max(queries + rows * head_dim) {}

  float* accumulator;  // see AttentionRows
  float* row_sum;      // see AttentionRows
  float* widened;      // AttentionRows::scratch
  float* queries;      // [rows, head_dim] of the activation type
  float* row_max;      // see AttentionRows

  static std::int64_t floats(std::int64_t rows, std::int64_t head_dim) {
    return rows * (whole_groups(head_dim) + kKeyGroup + head_dim + 1) + tile_scratch_floats(head_dim);
  }
};

/// Place of the keys that queries attend to.
enum class KeySource : std::uint8_t { kSequenceBlocks, kOwnRows, kEncoderInput };

/// An attention op with everything resolved.
struct AttentionLayer {
  /// If the keys are those of an encoder input, `attention` has no rotation, and its qkv has only queries.
  AttentionLayer(const AttentionOp& attention, KeySource key_source, const OpPlace& place)
      : op(attention),
        source(key_source),
        context(place.context),
        pool(pool_of(key_source, place.context)),
        layer(key_source == KeySource::kOwnRows ? pool.layer_like(op.shape) : pool.layer(op.kv_layer())),
        tasks(place.rows.attention_plans.tasks_of(
            op.shape, {.window = op.window_column, .joint = op.joint_column, .chunk = op.chunk})),
        qkv(place.context.rows_of(op.qkv)),
        output(place.context.rows_of(op.output)),
        cosine(op.cosine == kNoBuffer ? Rows{} : place.context.rows_of(op.cosine)),
        sine(op.sine == kNoBuffer ? Rows{} : place.context.rows_of(op.sine)),
        bias(place.context.position_biases.of(op.position_bias, 0)),
        bias_stride(place.context.position_biases.stride()),
        attend(place.context.kernels.attend[static_cast<std::size_t>(pool.dtype())]) {}

  /// AttentionRows::bias for heads from `head` on; nullptr: scores have no bias.
  [[nodiscard]] const float* bias_of(std::int64_t head) const {
    return bias == nullptr ? nullptr : bias + head * bias_stride;
  }

  static const KvPool& pool_of(KeySource source, const CpuContext& context) {
    if (source == KeySource::kSequenceBlocks) return context.kv_pool;
    return source == KeySource::kOwnRows ? context.step_local_kv : context.cross_pool;
  }

  AttentionOp op;
  KeySource source;
  const CpuContext& context;
  const KvPool& pool;
  const KvLayer& layer;
  /// Tasks of the current step.
  const std::vector<AttentionTask>& tasks;
  Rows qkv;
  Rows output;
  Rows cosine;
  Rows sine;
  const float* bias;
  std::int64_t bias_stride;
  void (*attend)(const AttentionRows& rows, const KeyTiles& tiles);
};

/// An attention op in one step.
class AttentionRun {
 public:
  AttentionRun(const AttentionLayer& layer, const Step& step)
      : of_(layer),
        op_(layer.op),
        context_(layer.context),
        step_(step),
        pool_(layer.pool),
        layer_(layer.layer),
        tasks_(layer.tasks),
        heads_(op_.shape.num_attention_heads),
        key_heads_(key_heads(op_.shape)),
        stored_heads_(op_.shape.num_key_value_heads),
        head_dim_(op_.shape.head_dim),
        group_(heads_ / key_heads_),
        half_(layer.cosine.width),
        groups_per_block_(pool_.slots() / kKeyGroup) {}

  /// Writes the keys and values of the step's tokens to the place where attention reads them.
  void store() const {
    const auto store = [&](std::int64_t begin, std::int64_t end, int thread) {
      const KvWriter writer(pool_, layer_, context_.kernels, scratch(thread));
      float* spare = scratch(thread) + stored_heads_ * head_dim_;
      for (std::int64_t token = begin; token < end;) token += store_tokens(token, end, writer, spare);
    };
    // Neighbours in a block share cache lines, so one thread writes most of them.
    context_.threads.parallel_for(step_.num_tokens(), kTokensPerChunk, store);
  }

  void attend() const {
    const auto attend = [&](std::int64_t begin, std::int64_t end, int thread) {
      for (std::int64_t i = begin; i < end; ++i) run_task(static_cast<std::size_t>(i), thread);
    };
    context_.threads.parallel_for(static_cast<std::int64_t>(tasks_.size()), 1, attend);
  }

 private:
  static constexpr std::int64_t kTokensPerChunk = 8;
  static constexpr std::int64_t kCacheLine = 64;

  /// True if queries attend only to keys up to their own position: if keys are in the sequence's KV blocks.
  [[nodiscard]] bool is_causal() const { return of_.source == KeySource::kSequenceBlocks; }
  /// Place of a token among the keys of its sequence.
  [[nodiscard]] std::int64_t place_of(std::int64_t token) const {
    const auto at = static_cast<std::size_t>(token);
    if (is_causal()) return step_.input.positions[at];
    const auto sequence = static_cast<std::size_t>(step_.sequence_of_token[at]);
    return token - step_.input.sequence_offsets[sequence];
  }
  [[nodiscard]] std::int32_t block_of(std::int64_t sequence, std::int64_t index) const {
    const StepInput& input = step_.input;
    switch (of_.source) {
      case KeySource::kOwnRows:
        return step_.first_local_blocks[static_cast<std::size_t>(sequence)] +
               static_cast<std::int32_t>(index);
      case KeySource::kEncoderInput:
        return input.cross_block_tables[static_cast<std::size_t>(sequence * input.max_cross_blocks + index)];
      case KeySource::kSequenceBlocks:
        break;
    }
    return input.block_tables[static_cast<std::size_t>(sequence * input.max_blocks_per_sequence + index)];
  }
  [[nodiscard]] float* scratch(int thread) const { return context_.scratch(thread); }

  [[nodiscard]] KvSlot slot_of(std::int64_t token) const {
    const std::int64_t place = place_of(token);
    const auto sequence = step_.sequence_of_token[static_cast<std::size_t>(token)];
    return {.block = block_of(sequence, place / pool_.tokens_per_block()),
            .slot = place % pool_.tokens_per_block()};
  }
  [[nodiscard]] float* keys_of(std::int64_t token) const {
    return of_.qkv.float_row(token) + heads_ * head_dim_;
  }

  /// Returns the normalized values of a token. Call it before its keys change. If values come from keys,
  /// `made` gets them.
  [[nodiscard]] const float* values_of(std::int64_t token, float* made) const {
    float* values = keys_of(token) + stored_heads_ * head_dim_;
    if (op_.values_from_keys) {
      std::copy_n(keys_of(token), stored_heads_ * head_dim_, made);
      values = made;
    }
    for (std::int64_t head = 0; op_.value_norm.size != 0 && head < stored_heads_; ++head) {
      float* x = values + head * head_dim_;
      context_.kernels.rms_norm(x, op_.value_norm.data, op_.norm_epsilon, head_dim_,
                                reinterpret_cast<std::byte*>(x), DType::kFloat32);
    }
    return values;
  }

  /// Writes the keys and values of a token, or of two neighbours before `end`, to the pool; returns how many.
  /// `spare` has room for a head, and for the values of two tokens.
  [[nodiscard]] std::int64_t store_tokens(std::int64_t token, std::int64_t end, const KvWriter& writer,
                                          float* spare) const {
    const KvSlot where = slot_of(token);
    float* made = spare + head_dim_;
    const float* values = values_of(token, made);
    prepare(token, spare);
    const HeadRotation rotation = rotation_of(token, keys_of(token), stored_heads_, op_.key_norm);
    if (op_.shape.values_are_keys) {
      writer.store_keys_as_values(where, rotation);
      return 1;
    }
    writer.store_keys(where, rotation);
    const bool two = token + 1 < end && where.slot % 2 == 0 && where.slot + 1 < pool_.tokens_per_block() &&
                     step_.sequence_of_token[static_cast<std::size_t>(token)] ==
                         step_.sequence_of_token[static_cast<std::size_t>(token + 1)];
    if (!two) {
      writer.store_values(where, values);
      return 1;
    }
    const float* second_values = values_of(token + 1, made + stored_heads_ * head_dim_);
    prepare(token + 1, spare);
    writer.store_keys(slot_of(token + 1),
                      rotation_of(token + 1, keys_of(token + 1), stored_heads_, op_.key_norm));
    writer.store_values_of_two(where, values, second_values);
    return 2;
  }

  /// Applies the operations that cover all heads of a token's q and k together.
  void prepare(std::int64_t token, float* spare) const {
    float* queries = of_.qkv.float_row(token);
    norm_together(op_.query_norm, queries, heads_);
    norm_together(op_.key_norm, keys_of(token), stored_heads_);
    if (!op_.interleaved) return;
    // q and k are neighbours.
    for (std::int64_t head = 0; head < heads_ + stored_heads_; ++head)
      deinterleave(queries + head * head_dim_, spare);
  }

  void norm_together(const VectorView& norm, float* heads, std::int64_t count) const {
    if (norm.size == 0 || norm.size == head_dim_) return;
    context_.kernels.rms_norm(heads, norm.data, op_.norm_epsilon, count * head_dim_,
                              reinterpret_cast<std::byte*>(heads), DType::kFloat32);
  }

  /// Moves the even rotated elements before the odd ones, which is the order of heads that are not
  /// interleaved. Scores do not depend on the order, because queries and keys have the same one.
  void deinterleave(float* head, float* spare) const {
    std::copy_n(head, 2 * half_, spare);
    for (std::int64_t i = 0; i < half_; ++i) {
      head[i] = spare[2 * i];
      head[half_ + i] = spare[2 * i + 1];
    }
  }

  /// Normalizes heads of a token in place, if there is a norm. Returns their rotation. If the norm comes
  /// after the rotation, the heads are rotated in place already, and the returned rotation only copies them.
  [[nodiscard]] HeadRotation rotation_of(std::int64_t token, float* heads, std::int64_t count,
                                         const VectorView& norm) const {
    HeadRotation rotation{.cosine = half_ == 0 ? nullptr : of_.cosine.float_row(token),
                          .sine = half_ == 0 ? nullptr : of_.sine.float_row(token),
                          .half = half_,
                          .x = heads,
                          .heads = count,
                          .head_dim = head_dim_};
    if (op_.norms_after_rotation) {
      rotation.out = reinterpret_cast<std::byte*>(heads);
      context_.kernels.rotate_heads(rotation);
      rotation.half = 0;
    }
    for (std::int64_t head = 0; norm.size == head_dim_ && head < count; ++head) {
      float* x = heads + head * head_dim_;
      context_.kernels.rms_norm(x, norm.data, op_.norm_epsilon, head_dim_, reinterpret_cast<std::byte*>(x),
                                DType::kFloat32);
    }
    return rotation;
  }

  /// Factor of the scores of a token's queries, and of the base 2 of the softmax.
  [[nodiscard]] float score_factor_of(std::int64_t token) const {
    const float factor = op_.scale * std::numbers::log2e_v<float>;
    if (op_.query_scaling_beta == 0.0F) return factor;
    const auto steps =
        static_cast<float>((place_of(token) + op_.query_scaling_offset) / op_.query_scaling_length);
    return factor * (1.0F + op_.query_scaling_beta * std::log(1.0F + steps));
  }

  void run_task(std::size_t index, int thread) const {
    const AttentionTask& task = tasks_[index];
    // The task that this thread will probably process next.
    const std::size_t next = index + static_cast<std::size_t>(context_.threads.num_threads());
    const std::int64_t rows_per_head = task.tokens * group_;
    const std::int64_t rows = task.heads * rows_per_head;
    const RowMemory memory(scratch(thread), rows_per_task(op_.shape), head_dim_);
    load_queries(task, memory);
    std::fill_n(memory.accumulator, rows * whole_groups(head_dim_), 0.0F);
    const auto head_of = [&](std::int64_t row) {
      return (task.first_head + row / rows_per_head) * group_ + row % group_;
    };
    for (std::int64_t row = 0; row < rows; ++row) {
      begin_row(sink_of(head_of(row)), memory.row_max + row, memory.row_sum + row * kKeyGroup);
    }
    const DType out_type = of_.output.dtype;
    const auto token_bytes = static_cast<std::int64_t>(size_of(out_type)) * task.heads * group_ * head_dim_;
    for (std::int64_t token = task.first_token; token < task.first_token + task.tokens; ++token) {
      fetch_to_write(output_of(token, task.first_head * group_), token_bytes);
    }
    take_tiles(task, next < tasks_.size() ? &tasks_[next] : nullptr, memory);
    for (std::int64_t row = 0; row < rows; ++row) {
      context_.kernels.finish_attention(
          memory.accumulator + row * whole_groups(head_dim_), memory.row_sum + row * kKeyGroup, head_dim_,
          output_of(task.first_token + row % rows_per_head / group_, head_of(row)), out_type);
    }
  }

  [[nodiscard]] float sink_of(std::int64_t head) const {
    return op_.sinks.size == 0 ? kNoScore : op_.sinks.data[head] * std::numbers::log2e_v<float>;
  }
  [[nodiscard]] std::byte* output_of(std::int64_t token, std::int64_t head) const {
    const std::size_t size = size_of(of_.output.dtype);
    return of_.output.row(token) + static_cast<std::size_t>(head * head_dim_) * size;
  }
  [[nodiscard]] float* queries_of(std::int64_t token, std::int64_t kv_head) const {
    return of_.qkv.float_row(token) + kv_head * group_ * head_dim_;
  }

  // Cache lines that another core wrote or read, like most lines of a step's rows, have a long latency.
  static void fetch_to_write(const std::byte* at, std::int64_t bytes) {
    for (std::int64_t i = 0; i < bytes; i += kCacheLine) __builtin_prefetch(at + i, 1, 3);
  }
  static void fetch_to_read(const float* at, std::int64_t floats) {
    const auto* bytes = reinterpret_cast<const std::byte*>(at);
    const std::int64_t size = floats * static_cast<std::int64_t>(sizeof(float));
    for (std::int64_t i = 0; i < size; i += kCacheLine) __builtin_prefetch(bytes + i, 0, 2);
  }

  void load_queries(const AttentionTask& task, const RowMemory& memory) const {
    auto* out = reinterpret_cast<std::byte*>(memory.queries);
    for (std::int64_t head = task.first_head; head < task.first_head + task.heads; ++head) {
      for (std::int64_t token = task.first_token; token < task.first_token + task.tokens; ++token) {
        HeadRotation rotation = rotation_of(token, queries_of(token, head), group_, op_.query_norm);
        rotation.factor = score_factor_of(token);
        rotation.out = out;
        rotation.out_type = query_type();
        context_.kernels.rotate_heads(rotation);
        out += static_cast<std::size_t>(group_ * head_dim_) * size_of(query_type());
      }
    }
  }

  [[nodiscard]] DType query_type() const { return activation_dtype(pool_.dtype()); }

  /// Keys of a task's sequence, up to the end of the window; the queries attend to some of them.
  [[nodiscard]] std::int64_t keys_of_task(const AttentionTask& task) const {
    if (is_causal()) {
      const std::int32_t end = task.end_token != 0 ? task.end_token : task.first_token + task.tokens;
      return place_of(end - 1) + 1;
    }
    if (of_.source == KeySource::kEncoderInput) {
      return step_.input.encoder_lengths[static_cast<std::size_t>(task.sequence)];
    }
    if (op_.window_column >= 0) return task.end_key;
    const auto* offsets = step_.input.sequence_offsets.data() + task.sequence;
    return offsets[1] - offsets[0];
  }

  /// Number of a position's group, counted over the blocks of its sequence.
  [[nodiscard]] std::int64_t group_of(std::int64_t position) const {
    return position / pool_.tokens_per_block() * groups_per_block_ +
           position % pool_.tokens_per_block() / kKeyGroup;
  }

  /// Groups [first, first + count) of a sequence that has so many `keys`.
  void find_groups(std::int64_t sequence, std::int64_t head, std::int64_t first, std::int64_t count,
                   std::int64_t keys, KeyGroup* out) const {
    std::int64_t block_index = first / groups_per_block_;
    std::int64_t slot = first % groups_per_block_ * kKeyGroup;
    const auto row_bytes = static_cast<std::size_t>(whole_groups(head_dim_)) * pool_.element_bytes();
    const auto key_bytes = static_cast<std::size_t>(pool_.interleave()) * pool_.element_bytes();
    const KeyGroup* const end = out + count;
    const std::int64_t stored_head = op_.shape.values_are_keys ? 0 : head;
    for (; out < end; ++block_index, slot = 0) {
      const std::int32_t block = block_of(sequence, block_index);
      const KvPart key = pool_.keys(block, layer_, stored_head);
      const KvPart value = pool_.values(block, layer_, stored_head);
      const std::int64_t first_of_block = block_index * pool_.tokens_per_block();
      for (; slot < pool_.slots() && out < end; slot += kKeyGroup, ++out) {
        const std::int64_t position = first_of_block + slot;
        *out = {.keys = key.elements + static_cast<std::size_t>(slot) * key_bytes,
                .values = value.elements + static_cast<std::size_t>(slot) * row_bytes,
                .key_scales = pool_.is_int8() ? key.scales + slot : nullptr,
                .value_scales = pool_.is_int8() ? value.scales + slot : nullptr,
                .first_position = position,
                .count = std::min({kKeyGroup, pool_.tokens_per_block() - slot, keys - position})};
      }
    }
  }

  /// Groups of a sequence that a task's queries attend to, beginning with a whole tile.
  struct SeenGroups {
    std::int64_t begin;
    std::int64_t end;
    std::int64_t keys;  ///< number of the sequence's keys
  };

  [[nodiscard]] SeenGroups groups_seen_by(const AttentionTask& task) const {
    const std::int64_t keys = keys_of_task(task);
    const std::int64_t first = place_of(task.first_token);
    const std::int64_t last = first + task.tokens - 1;
    // Queries attend to the whole encoder input, even if their positions are after its end.
    const std::int64_t first_key =
        op_.sliding_window == 0 ? task.first_key : std::max<std::int64_t>(0, first + 1 - op_.sliding_window);
    return {.begin = group_of(first_key) / kTileGroups * kTileGroups,
            .end = group_of(std::min(last + look_ahead_of(task, keys), keys - 1)) + 1,
            .keys = keys};
  }

  [[nodiscard]] std::int64_t look_ahead_of(const AttentionTask& task, std::int64_t keys) const {
    if (is_causal()) return task.end_token != 0 ? keys : 0;
    return op_.sliding_window == 0 ? keys : op_.sliding_window - 1;
  }

  [[nodiscard]] AttentionRows rows_of(const AttentionTask& task, std::int64_t head,
                                      const RowMemory& memory) const {
    const std::int64_t rows = task.tokens * group_;
    const std::size_t query_bytes = static_cast<std::size_t>(rows * head_dim_) * size_of(query_type());
    return {.queries = reinterpret_cast<const std::byte*>(memory.queries) +
                       static_cast<std::size_t>(head) * query_bytes,
            .rows = rows,
            .rows_per_position = group_,
            .first_position = place_of(task.first_token),
            .sliding_window = op_.sliding_window,
            .first_key = task.first_key,
            .look_ahead = look_ahead_of(task, keys_of_task(task)),
            .softcap = op_.softcap * std::numbers::log2e_v<float>,
            .bias = of_.bias_of((task.first_head + head) * group_),
            .bias_stride = of_.bias_stride,
            .head_dim = head_dim_,
            .slots = pool_.slots(),
            .is_int8 = pool_.is_int8(),
            .scratch = memory.widened,
            .row_max = memory.row_max + head * rows,
            .row_sum = memory.row_sum + head * rows * kKeyGroup,
            .accumulator = memory.accumulator + head * rows * whole_groups(head_dim_)};
  }

  /// Attends a task's queries to their tiles: some tiles for all heads, then the next tiles. At the same time
  /// it prefetches the queries of the `next` task, if there is one.
  void take_tiles(const AttentionTask& task, const AttentionTask* next, const RowMemory& memory) const {
    const SeenGroups seen = groups_seen_by(task);
    // Keys that are also values are rearranged tile by tile.
    const std::int64_t chunk = op_.shape.values_are_keys ? kTileGroups : kChunkGroups;
    const std::int64_t chunks = (seen.end - seen.begin + chunk - 1) / chunk;
    const std::int64_t fetched_tokens = next == nullptr ? 0 : (next->tokens + chunks - 1) / chunks;
    std::int64_t fetch_token = next == nullptr ? 0 : next->first_token;
    const std::int64_t fetch_end = next == nullptr ? 0 : next->first_token + next->tokens;
    std::array<KeyGroup, kChunkGroups + kTileGroups> groups;
    const auto find = [&](std::int64_t head, std::int64_t first, std::int64_t most, std::int64_t to) {
      const std::int64_t count = std::clamp<std::int64_t>(seen.end - first, 0, most);
      find_groups(task.sequence, task.first_head + head, first, count, seen.keys, groups.data() + to);
      return count;
    };
    for (std::int64_t begin = seen.begin; begin < seen.end; begin += chunk) {
      for (std::int64_t i = 0; i < fetched_tokens && fetch_token < fetch_end; ++i, ++fetch_token) {
        fetch_to_read(queries_of(fetch_token, next->first_head), next->heads * group_ * head_dim_);
      }
      for (std::int64_t head = 0; head < task.heads; ++head) {
        const std::int64_t attended = find(head, begin, chunk, 0);
        const bool is_last_head = head + 1 == task.heads;
        const std::int64_t fetched = is_last_head ? find(0, begin + chunk, kTileGroups, attended)
                                                  : find(head + 1, begin, kTileGroups, attended);
        if (op_.shape.values_are_keys) use_keys_as_values(groups, attended, head == 0, memory);
        const KeyTiles tiles{.groups = std::span(groups).first(static_cast<std::size_t>(attended + fetched)),
                             .attended = attended};
        of_.attend(rows_of(task, head, memory), tiles);
      }
    }
  }

  /// Sets the values of the first `attended` groups, which are a tile. All heads have the same ones, so they
  /// are `made` for the first head.
  void use_keys_as_values(std::span<KeyGroup> groups, std::int64_t attended, bool made,
                          const RowMemory& memory) const {
    const auto tile = groups.first(static_cast<std::size_t>(attended));
    if (made) {
      make_values_of_keys(pool_, head_dim_, tile, memory.widened);
      return;
    }
    const std::size_t group_bytes =
        static_cast<std::size_t>(kKeyGroup * whole_groups(head_dim_)) * pool_.element_bytes();
    for (std::size_t i = 0; i < tile.size(); ++i) {
      tile[i].values = reinterpret_cast<const std::byte*>(memory.widened) + i * group_bytes;
    }
  }

  /// Groups of a sequence for one kernel call.
  static constexpr std::int64_t kChunkGroups = 8 * kTileGroups;

  const AttentionLayer& of_;
  const AttentionOp& op_;
  const CpuContext& context_;
  const Step& step_;
  const KvPool& pool_;
  const KvLayer& layer_;
  std::span<const AttentionTask> tasks_;
  std::int64_t heads_;
  std::int64_t key_heads_;     // of tasks
  std::int64_t stored_heads_;  // in the pool
  std::int64_t head_dim_;
  std::int64_t group_;
  std::int64_t half_;  // number of rotated pairs
  std::int64_t groups_per_block_;
};

class LoweredAttention final : public LoweredOp {
 public:
  LoweredAttention(const AttentionOp& op, const OpPlace& place)
      : layer_(op, op.kind == AttentionKind::kCausal ? KeySource::kSequenceBlocks : KeySource::kOwnRows,
               place) {}

  void run(Step& step) override {
    const AttentionRun attention(layer_, step);
    if (layer_.op.shared_layer < 0) attention.store();
    attention.attend();
  }

 private:
  AttentionLayer layer_;
};

class LoweredCrossAttention final : public LoweredOp {
 public:
  LoweredCrossAttention(const CrossAttentionOp& op, const OpPlace& place)
      : layer_(queries_of(op), KeySource::kEncoderInput, place) {}

  void run(Step& step) override { AttentionRun(layer_, step).attend(); }

 private:
  /// Attention of the queries to keys that are stored already.
  static AttentionOp queries_of(const CrossAttentionOp& op) {
    AttentionOp queries;
    queries.layer = op.layer;
    queries.shape = op.shape;
    queries.qkv = op.q;
    queries.output = op.output;
    queries.scale = op.scale;
    return queries;
  }

  AttentionLayer layer_;
};

}  // namespace

std::size_t attention_scratch_floats(const Program& program) {
  std::int64_t most = 0;
  for (const auto* ops : program.sections()) {
    for (const Op& op : *ops) {
      const AttentionShape* shape = shape_of(op);
      if (shape == nullptr) continue;
      const std::int64_t of_task = RowMemory::floats(rows_per_task(*shape), shape->head_dim);
      const std::int64_t to_store = (3 * shape->num_key_value_heads + 1) * shape->head_dim;
      most = std::max({most, of_task, to_store});
    }
  }
  return static_cast<std::size_t>(most);
}

LoweredOpPtr lower(const AttentionOp& op, const OpPlace& place) {
  return std::make_unique<LoweredAttention>(op, place);
}

LoweredOpPtr lower(const CrossAttentionOp& op, const OpPlace& place) {
  return std::make_unique<LoweredCrossAttention>(op, place);
}

}  // namespace adaptrt
