#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "adaptrt/core/dtype.h"
#include "adaptrt/lora/host_adapter.h"
#include "adaptrt/lora/host_pages.h"
#include "adaptrt/lora/layout.h"
#include "adaptrt/lora/lora_cache.h"

namespace adaptrt::testing {

/// Two decoder layers of odd sizes with every module enabled.
inline LoraLayout small_layout(DType dtype = DType::kFloat32) {
  using enum LoraModule;
  LoraLayout layout;
  layout.dtype = dtype;
  layout.num_layers = 2;
  layout.max_rank = 8;
  layout.dora_enabled = true;
  layout.target_modules = {kAttnQkv,  kAttnQ,    kAttnK,   kAttnV,    kAttnDense,
                           kMlpHTo4H, kMlp4HToH, kMlpGate, kMlpGateUp};
  for (std::int32_t layer = 0; layer < layout.num_layers; ++layer) {
    layout.sites.push_back({layer, 8, {{kAttnQ, 6}, {kAttnK, 3}, {kAttnV, 3}}});
    layout.sites.push_back({layer, 6, {{kAttnDense, 8}}});
    layout.sites.push_back({layer, 8, {{kMlpHTo4H, 70}, {kMlpGate, 70}}});
    layout.sites.push_back({layer, 70, {{kMlp4HToH, 8}}});
  }
  return layout;
}

/// A cache whose device level is in host memory, and whose adapters are loaded by the threads that acquire
/// them.
inline LoraCache make_host_cache(LoraLayout layout, const LoraCacheSizes& sizes) {
  return LoraCache(std::move(layout), std::make_unique<HostPages>(sizes.page_bytes, sizes.device_pages),
                   {.host_bytes = sizes.host_bytes});
}

/// A row of an adapter as sent.
struct SentRow {
  LoraModule module = LoraModule::kAttnQ;
  std::int32_t layer = 0;
  std::int32_t rank = 2;
  bool is_dora = false;
  bool has_shift = false;

  [[nodiscard]] RowVectors vectors() const { return {is_dora, has_shift}; }
};

/// An adapter's tensors; tests may damage them before sending.
struct SentAdapter {
  DType dtype = DType::kFloat32;
  std::size_t rows = 0;
  std::size_t width = 0;
  std::vector<std::byte> weights;
  std::size_t columns = 4;
  std::vector<std::int32_t> config;

  void set(std::size_t row, std::size_t column, float value) {
    store_from_float(weights.data(), dtype, row * width + column, value);
  }
  [[nodiscard]] float get(std::size_t row, std::size_t column) const {
    return load_as_float(weights.data(), dtype, row * width + column);
  }
  std::int32_t& field(std::size_t row, std::size_t column) { return config[row * columns + column]; }
  /// Adds a row without weights.
  void add_row(const std::array<std::int32_t, 4>& row) {
    config.insert(config.end(), row.begin(), row.end());
    weights.resize(weights.size() + width * size_of(dtype));
    ++rows;
  }
  void drop_column_of_vectors() {
    std::vector<std::int32_t> shorter;
    for (std::size_t i = 0; i < config.size(); ++i) {
      if (i % 4 != 3) shorter.push_back(config[i]);
    }
    config = shorter;
    columns = 3;
  }

  /// Returns what a request sends, as views into this object.
  [[nodiscard]] LoraConfig send(std::uint64_t task_id, bool replace = false, bool leading_one = false) const {
    LoraConfig result;
    result.task_id = task_id;
    result.replace = replace;
    const TensorType type = dtype == DType::kFloat32   ? TensorType::kFloat32
                            : dtype == DType::kFloat16 ? TensorType::kFloat16
                                                       : TensorType::kBFloat16;
    const auto shape = [&](std::size_t width_of_row) {
      std::vector<std::int64_t> sizes{static_cast<std::int64_t>(rows),
                                      static_cast<std::int64_t>(width_of_row)};
      if (leading_one) sizes.insert(sizes.begin(), 1);
      return sizes;
    };
    result.weights = TensorView{weights.data(), type, std::string(name_of(dtype)), shape(width), nullptr};
    result.config = TensorView{reinterpret_cast<const std::byte*>(config.data()), TensorType::kInt32, "int32",
                               shape(columns), nullptr};
    return result;
  }
};

/// Returns the sizes in the first layer that has the module.
inline ModuleSizes sizes_of(LoraModule module, const LoraLayout& layout) {
  const SiteIndex index(layout);
  std::int32_t layer = 0;
  while (index.find(layer, module) == nullptr) ++layer;
  return index.find(layer, module)->sizes;
}

inline std::shared_ptr<const HostAdapter> make_host_adapter(const LoraConfig& config,
                                                            const LoraLayout& layout) {
  return HostAdapter::make(config, layout, SiteIndex(layout));
}

inline std::size_t elements_of(const SentRow& row, const LoraLayout& layout) {
  const ModuleSizes sizes = sizes_of(row.module, layout);
  return static_cast<std::size_t>(row.rank * (sizes.a_per_rank() + sizes.b_per_rank()) +
                                  row.vectors().count() * sizes.vector());
}

/// Random weights that are exact in every type, with zeros after each row.
inline SentAdapter make_adapter(const std::vector<SentRow>& rows, const LoraLayout& layout,
                                std::uint32_t seed = 1, DType dtype = DType::kFloat32,
                                std::size_t padding = 3) {
  SentAdapter adapter;
  adapter.dtype = dtype;
  adapter.rows = rows.size();
  for (const SentRow& row : rows) adapter.width = std::max(adapter.width, elements_of(row, layout) + padding);
  adapter.weights.resize(adapter.rows * adapter.width * size_of(dtype));
  std::mt19937 random(seed);
  std::uniform_int_distribution<int> sixteenths(-32, 32);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    for (std::size_t j = 0; j < elements_of(rows[i], layout); ++j) {
      adapter.set(i, j, static_cast<float>(sixteenths(random)) / 16.0F);
    }
    adapter.config.insert(adapter.config.end(), {static_cast<std::int32_t>(rows[i].module), rows[i].layer,
                                                 rows[i].rank, rows[i].vectors().flags()});
  }
  return adapter;
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace adaptrt::testing
