#include <cstdint>

#include "adaptrt/cuda/adapted_embedding.h"
#include "adaptrt/lora/modules.h"
#include "cuda/kernels/element_type.h"
#include "cuda/kernels/launch.h"
#include "cuda/kernels/lora/step.h"
#include "cuda/kernels/lora/vectors.h"
#include "cuda/kernels/rows/checks.h"
#include "cuda/kernels/rows/elements.h"

namespace adaptrt::cuda {
namespace {

/// One block per token. The token's column of A is in shared memory; a thread computes 8 adjacent elements.
template <typename T>
class AdaptedEmbeddingRows {
 public:
  using Parameters = AdaptedEmbedding;
  static constexpr int kThreads = 256;
  static constexpr int kBlocksPerMultiprocessor = 3;

  __device__ static void run(const AdaptedEmbedding& work) {
    allow_next_kernel();
    wait_for_previous_kernel();
    const auto token = static_cast<std::int64_t>(blockIdx.x);
    const Embedding& base = work.embedding;
    const std::int64_t id = base.token_ids[token];
    if (id >= base.vocabulary) {
      write_new_token(work, token, static_cast<int>(id - base.vocabulary));
      return;
    }
    const std::int64_t slice = id / kVocabularySlice;
    const auto entry = slice * lora::kNumModules + static_cast<int>(LoraModule::kEmbedding);
    const lora::Update update = update_of(work, work.adapter_slots[token], entry);
    if (update.rank == 0) return;
    auto* column = reinterpret_cast<float*>(shared_memory());
    load_column(work, update, id - slice * kVocabularySlice, slice, column);
    __syncthreads();
    const std::int64_t vectors = base.width / rows::kVector;
    for (std::int64_t i = threadIdx.x; i < vectors; i += kThreads) {
      const auto first = static_cast<int>(i) * rows::kVector;
      const lora::RowVectors own(work.dora ? update.magnitude : nullptr, update.shift, first,
                                 static_cast<int>(base.width));
      rows::Elements row = rows::load_constant<T>(base.table, id * vectors + i);
      row.for_each(
          [&](float value, int at) { return own.apply(value + product(update, first + at, column), at); });
      store(base, token, i, row);
    }
  }

 private:
  __device__ static lora::Update update_of(const AdaptedEmbedding& work, int slot, std::int64_t entry) {
    lora::Step step{};
    step.ranks = work.ranks;
    step.pointers = work.pointers;
    step.shifts = work.shifts;
    step.slot_entries = static_cast<int>(work.layers) * lora::kNumModules;
    step.parts[0].entry = static_cast<int>(entry);
    return lora::update_of(step, {.first = 0, .count = 1, .slot = slot, .expert = 0}, 0);
  }

  /// Writes the row of a token that the adapter adds, its `number`-th one.
  __device__ static void write_new_token(const AdaptedEmbedding& work, std::int64_t token, int number) {
    if (work.new_tokens_entry == AdaptedEmbedding::kNoNewTokens) return;
    const lora::Update update = update_of(work, work.adapter_slots[token], work.new_tokens_entry);
    if (number >= update.rank) return;
    const auto* column = static_cast<const T*>(update.b) + number;
    const Embedding& base = work.embedding;
    for (std::int64_t i = threadIdx.x; i < base.width / rows::kVector; i += kThreads) {
      rows::Elements row{};
      row.for_each([&](float, int at) { return to_float(column[(i * rows::kVector + at) * update.rank]); });
      store(base, token, i, row);
    }
  }

  /// Stores vector `i` of a token's row, scaled and with its position.
  __device__ static void store(const Embedding& base, std::int64_t token, std::int64_t i,
                               rows::Elements row) {
    const std::int64_t vectors = base.width / rows::kVector;
    row.for_each([&](float value, int) { return value * base.scale; });
    if (base.positions != nullptr) {
      const rows::Elements added =
          rows::load_constant<T>(base.positions, base.position_ids[token] * vectors + i);
      row.for_each([&](float value, int at) { return value + added.values[at]; });
    }
    rows::store<float>(base.output, token * vectors + i, row);
  }

  /// Loads A[:, token].
  __device__ static void load_column(const AdaptedEmbedding& work, const lora::Update& update,
                                     std::int64_t token, std::int64_t slice, float* column) {
    const std::int64_t rest = work.embedding.vocabulary - slice * kVocabularySlice;
    const std::int64_t tokens = rest < kVocabularySlice ? rest : kVocabularySlice;
    for (int r = static_cast<int>(threadIdx.x); r < update.rank; r += kThreads) {
      column[r] = to_float(static_cast<const T*>(update.a)[r * tokens + token]);
    }
  }

  /// Returns B[element] times the column.
  __device__ static float product(const lora::Update& update, int element, const float* column) {
    const T* row = static_cast<const T*>(update.b) + static_cast<std::int64_t>(element) * update.rank;
    float sum = 0.0F;
    for (int r = 0; r < update.rank; ++r) sum = fmaf(column[r], to_float(row[r]), sum);
    return sum;
  }
};

}  // namespace

void enqueue(const AdaptedEmbedding& work, void* stream) {
  const Embedding& base = work.embedding;
  rows::Checks()
      .type(base.dtype)
      .count("tokens", base.tokens)
      .vectors("width", base.width, 8)
      .positive("max_rank", work.max_rank)
      .positive("vocabulary", base.vocabulary)
      .condition((base.vocabulary - 1) / kVocabularySlice < work.layers,
                 "the tables have fewer layers than the vocabulary has slices")
      .condition(work.new_tokens_entry < work.layers * lora::kNumModules,
                 "the tables have no new_tokens_entry")
      .done("AdaptedEmbedding");
  with_element_type(base.dtype, [&]<typename T>(TypeTag<T>) {
    launch<AdaptedEmbeddingRows<T>>({.x = static_cast<std::uint32_t>(base.tokens),
                                     .shared_bytes = static_cast<std::size_t>(work.max_rank) * sizeof(float),
                                     .overlaps_previous = true},
                                    work, stream);
  });
}

}  // namespace adaptrt::cuda
