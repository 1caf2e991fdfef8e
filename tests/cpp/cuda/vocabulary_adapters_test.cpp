#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <vector>

#include "adaptrt/core/error.h"
#include "adaptrt/cuda/adapted_embedding.h"
#include "adaptrt/cuda/lora_kernel.h"
#include "adaptrt/cuda/new_token_logits.h"
#include "adaptrt/lora/modules.h"
#include "lora_case.h"
#include "print_dtype.h"
#include "rows_case.h"

/// Adapters of lm_head and of the embedding, whose slices of the vocabulary have the places of layers.
namespace adaptrt::cuda::vocabulary_adapters_test {
namespace {

namespace data = boost::unit_test::data;

/// One adapter's update of one slice.
struct Update {
  std::int32_t rank = 0;
  Tensor<std::uint16_t> a{0};
  Tensor<std::uint16_t> b{0};
  std::optional<Tensor<float>> magnitude = {};
  std::optional<Tensor<float>> shift = {};
};

/// The tables of some adapters. Of three adapters, the first has magnitudes, the second shifts, the third
/// both.
class Tables {
 public:
  /// in and out: sizes of A's rows and of B's columns, by slice. ranks: by adapter and slice.
  Tables(DType dtype, LoraModule module, const std::vector<std::int64_t>& in,
         const std::vector<std::int64_t>& out, const std::vector<std::vector<std::int32_t>>& ranks,
         FreshRandom* random)
      : layers(static_cast<std::int64_t>(in.size())), dtype_(dtype) {
    const std::size_t entries = ranks.size() * in.size() * kNumLoraModules;
    ranks_.assign(entries, 0);
    pointers_.assign(3 * entries, 0x10);
    shifts_.assign(entries, 0x10);
    for (std::size_t slot = 0; slot < ranks.size(); ++slot) {
      auto& of_slot = updates.emplace_back();
      for (std::size_t slice = 0; slice < in.size(); ++slice) {
        const std::int32_t rank = ranks[slot][slice];
        auto& update =
            of_slot.emplace_back(Update{.rank = rank,
                                        .a = random_elements(dtype, rank * in[slice], random, 1),
                                        .b = random_elements(dtype, rank * out[slice], random, 1)});
        if (rank == 0) continue;
        if (slot % 3 != 1) update.magnitude = random_floats(out[slice], random, 2);
        if (slot % 3 != 0) update.shift = random_floats(out[slice], random, 2);
        const std::size_t entry =
            (slot * in.size() + slice) * kNumLoraModules + static_cast<std::size_t>(module);
        ranks_[entry] = rank;
        pointers_[3 * entry] = reinterpret_cast<std::int64_t>(update.a.data());
        pointers_[3 * entry + 1] = reinterpret_cast<std::int64_t>(update.b.data());
        pointers_[3 * entry + 2] =
            update.magnitude ? reinterpret_cast<std::int64_t>(update.magnitude->data()) : 0;
        shifts_[entry] = update.shift ? reinterpret_cast<std::int64_t>(update.shift->data()) : 0;
      }
    }
  }

  [[nodiscard]] double value(std::uint16_t bits) const { return element(dtype_, bits); }

  [[nodiscard]] const std::int32_t* ranks() const { return ranks_.data(); }
  [[nodiscard]] const std::int64_t* pointers() const { return pointers_.data(); }
  [[nodiscard]] const std::int64_t* shifts() const { return shifts_.data(); }

  std::int64_t layers;
  std::vector<std::vector<Update>> updates;

 private:
  DType dtype_;
  std::vector<std::int32_t> ranks_;
  std::vector<std::int64_t> pointers_;
  std::vector<std::int64_t> shifts_;
};

/// Logits of some rows, whose adapters are in no order.
struct LogitsCase {
  LogitsCase(DType dtype, std::int64_t in_size, const std::vector<std::int64_t>& out, FreshRandom* random)
      : type(dtype),
        in(in_size),
        sizes(out),
        tables(dtype, LoraModule::kLmHead, {in, in, in}, out, {{8, 3, 20}, {40, 0, 5}, {1, 16, 33}}, random) {
    for (const std::int64_t size : sizes) width += size;
    stride = width + 3;
    for (int row = 0; row < 40; ++row) slots.push_back(row % 7 == 0 ? -1 : row * row % 3);
    x = random_elements(dtype, std::ssize(slots) * in, random, 1);
    base = random_floats(std::ssize(slots) * stride, random);
  }

  /// Returns the logits of rows first .. first + count - 1.
  [[nodiscard]] std::vector<float> run(std::int64_t first, std::int64_t count, bool dora = true,
                                       bool decode = true) const {
    std::vector<std::int32_t> outs(sizes.begin(), sizes.end());
    const LoraKernel kernel({.dtype = type,
                             .module_ids = {26, 26, 26},
                             .out_sizes = outs,
                             .max_rank = 40,
                             .dora = dora,
                             .decode_tokens = decode ? LoraKernel::kDecodeTokens : 0,
                             .entries = {26, kNumLoraModules + 26, 2 * kNumLoraModules + 26},
                             .logits_stride = static_cast<std::int32_t>(stride)});
    Tensor<float> y(count * stride);
    std::copy_n(base.data() + first * stride, count * stride, y.data());
    Tensor<std::uint16_t> workspace(kernel.workspace_bytes(count) / 2);
    std::vector<std::int32_t> offsets;
    for (std::int32_t row = 0; row <= count; ++row) offsets.push_back(row);
    kernel.enqueue({.tokens = count, .in = in, .sequences = count, .layers = tables.layers},
                   {.x = x.data() + first * in,
                    .base = y.data(),
                    .sequence_offsets = offsets.data(),
                    .adapter_slots = slots.data() + first,
                    .ranks = tables.ranks(),
                    .pointers = tables.pointers(),
                    .shifts = tables.shifts()},
                   y.data(), workspace.data(), nullptr);
    BOOST_TEST(y.rest_is_unchanged());
    return y.values(0, count * stride);
  }

  /// Largest error of the logits in units of their bound; infinite for elements that must not change.
  [[nodiscard]] double error(const std::vector<float>& logits, bool dora) const {
    const double rounding = type == DType::kFloat16 ? 0x1p-11 : 0x1p-8;
    double largest = 0;
    for (std::int64_t row = 0; row < std::ssize(slots); ++row) {
      const std::int32_t slot = slots[static_cast<std::size_t>(row)];
      std::int64_t column = 0;
      for (std::size_t slice = 0; slice < sizes.size(); ++slice) {
        const Update* update = slot < 0 ? nullptr : &tables.updates[static_cast<std::size_t>(slot)][slice];
        for (std::int64_t i = 0; i < sizes[slice]; ++i, ++column) {
          const float before = base[row * stride + column];
          const float found = logits[static_cast<std::size_t>(row * stride + column)];
          if (update == nullptr || update->rank == 0) {
            if (found != before) return INFINITY;
            continue;
          }
          double sum = before;
          double bound = 1e-5;
          for (std::int32_t r = 0; r < update->rank; ++r) {
            double shrunk = 0;
            for (std::int64_t k = 0; k < in; ++k) {
              shrunk += tables.value(x[row * in + k]) * tables.value(update->a[r * in + k]);
            }
            const double b = tables.value(update->b[i * update->rank + r]);
            sum += shrunk * b;
            bound += std::abs(shrunk * b) * (rounding + 1e-5) + std::abs(b) * 1e-4;
          }
          const double factor = dora && update->magnitude ? (*update->magnitude)[i] : 1.0;
          const double shift = update->shift ? (*update->shift)[i] : 0.0;
          const double expected = sum * factor + shift;
          bound = bound * std::abs(factor) + std::abs(expected) * 1e-6;
          largest = std::max(largest, std::abs(found - expected) / bound);
        }
      }
      for (; column < stride; ++column) {  // padding
        const std::size_t at = static_cast<std::size_t>(row * stride + column);
        if (logits[at] != base[row * stride + column]) return INFINITY;
      }
    }
    return largest;
  }

  DType type;
  std::int64_t in;
  std::vector<std::int64_t> sizes;
  Tables tables;
  std::int64_t width = 0;
  std::int64_t stride = 0;
  std::vector<std::int32_t> slots;
  Tensor<std::uint16_t> x{0};
  Tensor<float> base{0};
};

BOOST_AUTO_TEST_SUITE(vocabulary_adapters)

BOOST_DATA_TEST_CASE(logits_match_float64, data::make(kRowTypes) * data::make({136, 45}), dtype, in) {
  FreshRandom random;
  BOOST_TEST_CONTEXT("seed " << random.seed()) {
    const LogitsCase logits(dtype, in, {264, 72, 31}, &random);
    const auto rows = std::ssize(logits.slots);
    for (const bool dora : {false, true}) {
      const std::vector<float> found = logits.run(0, rows, dora);
      BOOST_TEST(logits.error(found, dora) <= 1.0);
      BOOST_TEST(logits.run(0, rows, dora, false) == found, boost::test_tools::per_element());
    }
    // A row has the same bits alone.
    const std::vector<float> together = logits.run(0, rows);
    for (const std::int64_t row : {0, 1, 18, 39}) {
      const std::vector<float> alone = logits.run(row, 1);
      BOOST_TEST(std::equal(alone.begin(), alone.end(), together.begin() + row * logits.stride));
    }
  }
}

BOOST_AUTO_TEST_CASE(invalid_logits_are_refused) {
  BOOST_CHECK_EXCEPTION(
      LoraKernel(
          {.module_ids = {26, 26}, .out_sizes = {8, 8}, .max_rank = 1, .entries = {-1}, .logits_stride = 15}),
      ConfigError, [](const ConfigError& error) {
        const std::string text = error.what();
        return text.find("1 entries; expected none, or one for each part") != std::string::npos &&
               text.find("entry -1 is negative") != std::string::npos &&
               text.find("logits_stride 15 is less than the out_sizes' sum 16") != std::string::npos;
      });
  const LoraKernel kernel({.module_ids = {26, 26},
                           .out_sizes = {8, 8},
                           .max_rank = 1,
                           .entries = {0, 4 * kNumLoraModules},
                           .logits_stride = 16});
  float other = 0;
  BOOST_CHECK_EXCEPTION(
      kernel.enqueue({.tokens = 1, .in = 8, .sequences = 1, .layers = 4}, {}, &other, nullptr, nullptr),
      ConfigError, [](const ConfigError& error) {
        const std::string text = error.what();
        return text.find("layers 4 must be within 5") != std::string::npos &&
               text.find("base of logits is not y") != std::string::npos;
      });
}

/// A vocabulary of two slices, the second of 40 tokens. Ids are on both sides of the border.
BOOST_DATA_TEST_CASE(embeddings_match_float64, data::make(kRowTypes) * data::make({false, true}), dtype,
                     has_positions) {
  FreshRandom random;
  BOOST_TEST_CONTEXT("seed " << random.seed()) {
    constexpr std::int64_t kWidth = 24;
    constexpr std::int64_t kVocabulary = kVocabularySlice + 40;
    const std::vector<std::int32_t> ids{0, 5, kVocabularySlice - 1, kVocabularySlice, kVocabulary - 1, 5, 9};
    const std::vector<std::int32_t> slots{0, 1, 2, 2, 1, -1, 1};
    const Tables tables(dtype, LoraModule::kEmbedding, {kVocabularySlice, 40}, {kWidth, kWidth},
                        {{3, 0}, {8, 20}, {1, 16}}, &random);
    const auto table = random_elements(dtype, kVocabulary * kWidth, &random, 1);
    const auto positions = random_elements(dtype, 8 * kWidth, &random, 1);
    const auto tokens = std::ssize(ids);
    const auto position_ids = random_indices(tokens, 8, &random);
    const auto run = [&](std::int64_t first, std::int64_t count, bool dora) {
      Tensor<float> output(count * kWidth);
      const Embedding plain{.dtype = dtype,
                            .tokens = count,
                            .width = kWidth,
                            .vocabulary = kVocabulary,
                            .table = table.data(),
                            .token_ids = ids.data() + first,
                            .scale = 1.5F,
                            .positions = has_positions ? positions.data() : nullptr,
                            .position_ids = position_ids.data() + first,
                            .output = output.data()};
      enqueue(plain, nullptr);
      enqueue(AdaptedEmbedding{.embedding = plain,
                               .layers = tables.layers,
                               .max_rank = 20,
                               .dora = dora,
                               .adapter_slots = slots.data() + first,
                               .ranks = tables.ranks(),
                               .pointers = tables.pointers(),
                               .shifts = tables.shifts()},
              nullptr);
      BOOST_TEST(output.rest_is_unchanged());
      return output.values(0, count * kWidth);
    };
    for (const bool dora : {false, true}) {
      const std::vector<float> found = run(0, tokens, dora);
      std::vector<float> alone;
      for (std::int64_t token = 0; token < tokens; ++token) {
        const auto at = static_cast<std::size_t>(token);
        const std::vector<float> own = run(token, 1, dora);
        alone.insert(alone.end(), own.begin(), own.end());
        const auto slice = static_cast<std::size_t>(ids[at] / kVocabularySlice);
        const Update* update =
            slots[at] < 0 ? nullptr : &tables.updates[static_cast<std::size_t>(slots[at])][slice];
        const std::int64_t of_slice = slice == 0 ? kVocabularySlice : 40;
        for (std::int64_t i = 0; i < kWidth; ++i) {
          double expected = tables.value(table[ids[at] * kWidth + i]);
          if (update != nullptr && update->rank > 0) {
            for (std::int32_t r = 0; r < update->rank; ++r) {
              expected += tables.value(update->a[r * of_slice + ids[at] % kVocabularySlice]) *
                          tables.value(update->b[i * update->rank + r]);
            }
            if (dora && update->magnitude) expected *= (*update->magnitude)[i];
            if (update->shift) expected += (*update->shift)[i];
          }
          expected *= 1.5;
          if (has_positions) expected += tables.value(positions[position_ids[token] * kWidth + i]);
          BOOST_TEST(std::abs(found[static_cast<std::size_t>(token * kWidth + i)] - expected) <= 1e-4);
        }
      }
      BOOST_TEST(alone == found, boost::test_tools::per_element());
    }
  }
}

BOOST_AUTO_TEST_CASE(invalid_embeddings_are_refused) {
  BOOST_CHECK_EXCEPTION(
      enqueue(AdaptedEmbedding{.embedding = {.width = 12, .vocabulary = kVocabularySlice + 1},
                               .layers = 1,
                               .new_tokens_entry = kNumLoraModules},
              nullptr),
      ConfigError, [](const ConfigError& error) {
        const std::string text = error.what();
        return text.find("width is 12") != std::string::npos &&
               text.find("max_rank is 0") != std::string::npos &&
               text.find("the tables have no new_tokens_entry") != std::string::npos &&
               text.find("fewer layers than the vocabulary has slices") != std::string::npos;
      });
}

/// Tables of two adapters that add 2 and 11 tokens, at an entry behind those of a layer's modules.
struct NewTokensCase {
  static constexpr std::int64_t kEntry = kNumLoraModules + 3;
  static constexpr std::int64_t kMost = 13;

  NewTokensCase(DType dtype, std::int64_t width, FreshRandom* random) : type(dtype) {
    ranks.assign(2 * 2 * kNumLoraModules, 0);
    pointers.assign(3 * ranks.size(), 0x10);
    for (const std::int32_t count : {2, 11}) {
      const auto entry = static_cast<std::size_t>(kEntry + 2 * kNumLoraModules * std::ssize(outputs));
      outputs.push_back(random_elements(dtype, count * width, random, 1));
      inputs.push_back(random_elements(dtype, count * width, random, 1));
      ranks[entry] = count;
      pointers[3 * entry] = reinterpret_cast<std::int64_t>(outputs.back().data());
      pointers[3 * entry + 1] = reinterpret_cast<std::int64_t>(inputs.back().data());
    }
  }

  DType type;
  std::vector<Tensor<std::uint16_t>> outputs;  ///< [tokens, width], rows of lm_head
  std::vector<Tensor<std::uint16_t>> inputs;   ///< [width, tokens], columns for the embedding
  std::vector<std::int32_t> ranks;
  std::vector<std::int64_t> pointers;
};

BOOST_DATA_TEST_CASE(new_tokens_have_logits, data::make(kRowTypes) * data::make({8, 264, 1000}), dtype,
                     width) {
  constexpr std::int64_t kVocabulary = 37;
  constexpr std::int64_t kStride = kVocabulary + NewTokensCase::kMost;
  FreshRandom random;
  BOOST_TEST_CONTEXT("seed " << random.seed()) {
    const NewTokensCase made(dtype, width, &random);
    const std::vector<std::int32_t> slots{1, -1, 0, 1};
    const auto x = random_elements(dtype, 4 * width, &random, 1);
    const auto run = [&](std::int64_t first, std::int64_t rows, float softcap) {
      Tensor<float> logits(rows * kStride);
      enqueue(NewTokenLogits{.dtype = dtype,
                             .rows = rows,
                             .width = width,
                             .vocabulary = kVocabulary,
                             .max_tokens = NewTokensCase::kMost,
                             .entry = NewTokensCase::kEntry,
                             .slot_entries = 2 * kNumLoraModules,
                             .x = x.data() + first * width,
                             .adapter_slots = slots.data() + first,
                             .ranks = made.ranks.data(),
                             .pointers = made.pointers.data(),
                             .scale = 0.5F,
                             .softcap = softcap,
                             .logits = logits.data()},
              nullptr);
      BOOST_TEST(logits.rest_is_unchanged());
      return logits;
    };
    for (const float softcap : {0.0F, 3.0F}) {
      const Tensor<float> found = run(0, 4, softcap);
      for (std::int64_t row = 0; row < 4; ++row) {
        const std::int32_t slot = slots[static_cast<std::size_t>(row)];
        const std::int64_t tokens = slot < 0 ? 0 : slot == 0 ? 2 : 11;
        for (std::int64_t column = 0; column < kStride; ++column) {
          const float logit = found[row * kStride + column];
          const std::int64_t token = column - kVocabulary;
          if (token < 0 || token >= tokens) {
            BOOST_TEST(std::isnan(logit));  // not written
            continue;
          }
          double sum = 0;
          for (std::int64_t k = 0; k < width; ++k) {
            sum += static_cast<double>(element(dtype, x[row * width + k])) *
                   element(dtype, made.outputs[static_cast<std::size_t>(slot)][token * width + k]);
          }
          sum *= 0.5;
          if (softcap > 0) sum = softcap * std::tanh(sum / softcap);
          BOOST_TEST(std::abs(logit - sum) <= 1e-4);
        }
        const Tensor<float> alone = run(row, 1, softcap);
        for (std::int64_t token = 0; token < tokens; ++token) {
          BOOST_TEST(alone[kVocabulary + token] == found[row * kStride + kVocabulary + token]);
        }
      }
    }
  }
}

BOOST_DATA_TEST_CASE(new_tokens_have_embeddings, data::make(kRowTypes), dtype) {
  constexpr std::int64_t kWidth = 2056;  // more vectors than a block has threads
  constexpr std::int64_t kVocabulary = 37;
  FreshRandom random;
  BOOST_TEST_CONTEXT("seed " << random.seed()) {
    const NewTokensCase made(dtype, kWidth, &random);
    const auto table = random_elements(dtype, kVocabulary * kWidth, &random, 1);
    const auto positions = random_elements(dtype, 8 * kWidth, &random, 1);
    // The last one has no such token, and stays.
    const std::vector<std::int32_t> ids{kVocabulary, kVocabulary + 10, 4, kVocabulary + 1, kVocabulary + 2};
    const std::vector<std::int32_t> slots{0, 1, 1, 1, 0};
    const std::vector<std::int32_t> places{3, 0, 7, 2, 5};
    Tensor<float> output(5 * kWidth);
    enqueue(AdaptedEmbedding{.embedding = {.dtype = dtype,
                                           .tokens = 5,
                                           .width = kWidth,
                                           .vocabulary = kVocabulary,
                                           .table = table.data(),
                                           .token_ids = ids.data(),
                                           .scale = 1.5F,
                                           .positions = positions.data(),
                                           .position_ids = places.data(),
                                           .output = output.data()},
                             .layers = 2,
                             .new_tokens_entry = NewTokensCase::kEntry,
                             .max_rank = 1,
                             .adapter_slots = slots.data(),
                             .ranks = made.ranks.data(),
                             .pointers = made.pointers.data()},
            nullptr);
    std::int64_t wrong = 0;
    for (std::int64_t i = 0; i < 5 * kWidth; ++i) {
      const auto token = static_cast<std::size_t>(i / kWidth);
      if (token == 2 || token == 4) {  // a token of the table, and none
        wrong += static_cast<std::int64_t>(!std::isnan(output[i]));
        continue;
      }
      const auto slot = static_cast<std::size_t>(slots[token]);
      const std::int64_t at = i % kWidth;
      const std::int64_t count = slot == 0 ? 2 : 11;
      const double expected = 1.5 * element(dtype, made.inputs[slot][at * count + ids[token] - kVocabulary]) +
                              element(dtype, positions[places[token] * kWidth + at]);
      wrong += static_cast<std::int64_t>(!(std::abs(output[i] - expected) <= 1e-5));
    }
    BOOST_TEST(wrong == 0);
    BOOST_TEST(output.rest_is_unchanged());
  }
}

BOOST_AUTO_TEST_CASE(invalid_logits_of_new_tokens_are_refused) {
  BOOST_CHECK_EXCEPTION(enqueue(NewTokenLogits{.width = 12, .entry = 4, .slot_entries = 4}, nullptr),
                        ConfigError, [](const ConfigError& error) {
                          const std::string text = error.what();
                          return text.find("width is 12") != std::string::npos &&
                                 text.find("vocabulary is 0") != std::string::npos &&
                                 text.find("max_tokens is 0") != std::string::npos &&
                                 text.find("a slot has no such entry") != std::string::npos;
                        });
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::cuda::vocabulary_adapters_test
