#include "stored_parts.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "adaptrt/core/compressed_bound.h"
#include "adaptrt/core/convert.h"
#include "adaptrt/core/int8_matrix.h"
#include "adaptrt/core/panels.h"
#include "image_sizes.h"
#include "rows_of_sites.h"

namespace adaptrt {
namespace {

/// Elements are converted in blocks that stay in a core's cache.
constexpr std::size_t kBlockElements = 16 << 10;

bool has_scales(LoraModule module) {
  return !is_setting(module) && !is_norm(module) && !is_of_tokens(module);
}

/// Finds StoredParts of one adapter, site by site. Sites of different experts have one size.
class PartFinder {
 public:
  PartFinder(LoraStorage storage, const SourceRows& source, const LoraLayout& layout, const SiteIndex& index)
      : source_(source), layout_(layout), index_(index), places_(source.rows) {
    stored_.storage = storage;
    if (storage == LoraStorage::kInt8) stored_.scales.resize(places_.count());
  }

  StoredParts find() {
    for (const auto& [site_id, rows_here] : rows_of_sites(source_.rows, layout_, index_)) {
      const AdapterRow& row = source_.rows[rows_here.front()];
      const bool is_first = site_id == index_.find(row.layer, row.module)->first_site;
      stored_.image_bytes.push_back(is_first ? bytes_at(site_id, rows_here) : stored_.image_bytes.back());
    }
    return std::move(stored_);
  }

 private:
  std::size_t bytes_at(std::int32_t site_id, std::span<const std::size_t> rows_here) {
    const LoraSite& site = layout_.sites[static_cast<std::size_t>(site_id)];
    const std::vector<ModuleRank> modules = modules_of(source_.rows, rows_here);
    const std::size_t exact = image_bytes(layout_, site, modules);
    if (stored_.storage == LoraStorage::kCompressed) {
      if (!site.is_of_layer() && !site.is_lm_head()) return exact;
      return compressed_bytes(site, rows_here, modules);
    }
    const auto rounded = int8_image_bytes(layout_, site, modules);
    return rounded && find_scales(rows_here) ? *rounded : exact;
  }

  std::size_t compressed_bytes(const LoraSite& site, std::span<const std::size_t> rows_here,
                               std::span<const ModuleRank> modules) {
    const auto of_a = [&](std::int64_t total_rank, std::int64_t n, std::int64_t k) {
      return aligned_bytes(
          most_bytes(rows_here.front(), n, k, [&](std::int64_t expert, CompressedBound& bound) {
            add_a(rows_here, expert, bound);
            bound.add_zeros(total_rank * (padded_k(DType::kBFloat16, k) - k));
          }));
    };
    const auto of_b = [&](std::size_t module, std::size_t part, std::int64_t n, std::int64_t k) {
      const std::size_t row = rows_here[module];
      return aligned_bytes(most_bytes(row, n, k, [&](std::int64_t expert, CompressedBound& bound) {
        const std::int64_t outputs = add_b(site, row, part, expert, bound);
        bound.add_zeros(outputs * (padded_k(DType::kBFloat16, k) - k));
      }));
    };
    return image_bytes(site, modules, of_a, of_b);
  }

  /// The most bytes of W[n, k] of any expert, whose whole matrix add(expert, bound) adds.
  template <class Add>
  std::size_t most_bytes(std::size_t row, std::int64_t n, std::int64_t k, const Add& add) {
    std::size_t most = 0;
    for (std::int64_t expert = 0; expert < source_.rows[row].sizes.experts; ++expert) {
      CompressedBound bound;
      add(expert, bound);
      most = std::max(most, bound.bytes(n, k));
    }
    return most;
  }

  /// Adds A[total_rank, in] of an expert.
  void add_a(std::span<const std::size_t> rows_here, std::int64_t expert, CompressedBound& bound) {
    for (const std::size_t i : rows_here) {
      const AdapterRow& row = source_.rows[i];
      const std::int64_t elements = row.rank * row.sizes.in;
      if (!row.shares_a) add(i, expert * elements, elements, bound);
    }
  }

  /// Adds a part's B[out, rank] of an expert. Returns its number of outputs.
  std::int64_t add_b(const LoraSite& site, std::size_t row_index, std::size_t part, std::int64_t expert,
                     CompressedBound& bound) {
    const AdapterRow& row = source_.rows[row_index];
    const auto parts = parts_of(row.module);
    const auto outputs = [&](std::size_t of) {
      return site.parts[part_position(site, parts[of])].whole_out_size();
    };
    std::int64_t before = 0;
    for (std::size_t of = 0; of < part; ++of) before += outputs(of);
    const std::int64_t first = row.rank * (row.sizes.a_per_rank() + expert * row.sizes.out + before);
    add(row_index, first, row.rank * outputs(part), bound);
    return outputs(part);
  }

  void add(std::size_t row, std::int64_t first, std::int64_t count, CompressedBound& bound) {
    for_each_block(
        row, first, count, DType::kBFloat16, kBlockElements,
        [&](const std::byte* values, std::size_t of) { bound.add(values, static_cast<std::int64_t>(of)); });
  }

  /// Finds the scales of the rows at one site, for all experts. Returns false if some products are not
  /// finite.
  bool find_scales(std::span<const std::size_t> rows_here) {
    const std::span<float> scales = stored_.scales;
    for (const std::size_t i : rows_here) {
      const AdapterRow& row = source_.rows[i];
      const auto rank = static_cast<std::size_t>(row.rank);
      // A module that shares the first one's A has one scale with it for columns of B.
      const std::size_t of_columns = row.shares_a ? rows_here.front() : i;
      for (std::int64_t expert = 0; expert < row.sizes.experts; ++expert) {
        const std::span<float> a = scales.subspan(places_.of_a(i, expert), rank);
        const std::span<float> b = scales.subspan(places_.of_b(of_columns, expert), rank);
        for (std::size_t of_rank = 0; of_rank < rank && !row.shares_a; ++of_rank) {
          const std::int64_t before = expert * row.rank + static_cast<std::int64_t>(of_rank);
          raise(i, before * row.sizes.in, row.sizes.in, a.subspan(of_rank, 1));
        }
        raise(i, row.rank * (row.sizes.a_per_rank() + expert * row.sizes.out), row.rank * row.sizes.out, b);
      }
    }
    for (const std::size_t i : rows_here) {
      const AdapterRow& row = source_.rows[i];
      const auto count = static_cast<std::size_t>(2 * row.sizes.experts * row.rank);
      const std::span<float> of_row = scales.subspan(places_.of_a(i, 0), count);
      std::ranges::transform(of_row, of_row.begin(), int8_scale);
    }
    const std::int64_t experts = source_.rows[rows_here.front()].sizes.experts;
    bool all_finite = true;
    for (std::int64_t expert = 0; expert < experts; ++expert) {
      all_finite = all_finite && are_finite(places_.of_image(scales, rows_here, expert).products());
    }
    return all_finite;
  }

  /// Raises each maximum to the largest |element| of a column, as the engine's type has it. The elements are
  /// a matrix whose rows are as long as `maxima`.
  void raise(std::size_t row, std::int64_t first, std::int64_t count, std::span<float> maxima) {
    const std::size_t block = std::max<std::size_t>(kBlockElements / maxima.size(), 1) * maxima.size();
    for_each_block(row, first, count, layout_.dtype, block, [&](const std::byte* values, std::size_t of) {
      floats_.resize(of);
      convert_elements(reinterpret_cast<std::byte*>(floats_.data()), DType::kFloat32, values, layout_.dtype,
                       of);
      const auto larger = [](float most, float value) { return std::max(most, std::abs(value)); };
      if (maxima.size() == 1) {
        maxima[0] = std::accumulate(floats_.begin(), floats_.end(), maxima[0], larger);
        return;
      }
      for (auto from = floats_.begin(); from != floats_.end(); from += std::ssize(maxima)) {
        std::transform(maxima.begin(), maxima.end(), from, maxima.begin(), larger);
      }
    });
  }

  /// Calls visit(elements as `type`, their number) for blocks of a row's elements.
  template <class Visit>
  void for_each_block(std::size_t row, std::int64_t first, std::int64_t count, DType type, std::size_t most,
                      const Visit& visit) {
    const auto total = static_cast<std::size_t>(count);
    for (std::size_t begin = 0; begin < total; begin += most) {
      const std::size_t block = std::min(most, total - begin);
      const std::byte* values = source_.element(row, first + static_cast<std::int64_t>(begin));
      if (source_.dtype != type) {
        converted_.resize(block * size_of(type));
        convert_elements(converted_.data(), type, values, source_.dtype, block);
        values = converted_.data();
      }
      visit(values, block);
    }
  }

  const SourceRows& source_;
  const LoraLayout& layout_;
  const SiteIndex& index_;
  ScalePlaces places_;
  StoredParts stored_;
  std::vector<std::byte> converted_;
  std::vector<float> floats_;
};

}  // namespace

StoredParts find_stored_parts(LoraStorage storage, const SourceRows& source, const LoraLayout& layout,
                              const SiteIndex& index) {
  if (storage == LoraStorage::kExact) return {};
  return PartFinder(storage, source, layout, index).find();
}

ScalePlaces::ScalePlaces(std::span<const AdapterRow> rows) : rows_(rows) {
  for (const AdapterRow& row : rows) {
    firsts_.push_back(count_);
    if (has_scales(row.module)) count_ += static_cast<std::size_t>(2 * row.sizes.experts * row.rank);
  }
}

std::size_t ScalePlaces::of_a(std::size_t row, std::int64_t expert) const {
  return firsts_[row] + static_cast<std::size_t>(expert * rows_[row].rank);
}

std::size_t ScalePlaces::of_b(std::size_t row, std::int64_t expert) const {
  return of_a(row, rows_[row].sizes.experts + expert);
}

ImageScales ScalePlaces::of_image(std::span<const float> scales, std::span<const std::size_t> rows_here,
                                  std::int64_t expert) const {
  ImageScales result;
  for (const std::size_t i : rows_here) {
    if (rows_[i].shares_a) continue;
    const auto rank = static_cast<std::size_t>(rows_[i].rank);
    const std::span<const float> a = scales.subspan(of_a(i, expert), rank);
    const std::span<const float> b = scales.subspan(of_b(i, expert), rank);
    result.a.insert(result.a.end(), a.begin(), a.end());
    result.b.insert(result.b.end(), b.begin(), b.end());
  }
  return result;
}

}  // namespace adaptrt
