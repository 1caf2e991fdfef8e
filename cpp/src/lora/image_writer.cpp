#include "image_writer.h"

#include <algorithm>
#include <cstring>

#include "adaptrt/core/convert.h"
#include "adaptrt/core/panels.h"
#include "image_sizes.h"

namespace adaptrt {
namespace {

/// Elements are copied, checked, converted and moved in blocks that stay in a core's cache.
constexpr std::int64_t kBlockBytes = 64 << 10;
/// pack_panels() moves this many rows together.
constexpr std::int64_t kRowsTogether = 4;

/// The image belongs to the writer's caller, but DeviceSite has the addresses that kernels read.
std::byte* writable(const void* address) {
  return static_cast<std::byte*>(const_cast<void*>(address));
}

}  // namespace

DeviceSite place_in_image(std::span<const AdapterRow> rows, std::span<const std::size_t> rows_here,
                          const LoraLayout& layout, const LoraSite& site, const std::byte* image) {
  DeviceSite result;
  const auto take = [&](std::size_t bytes) {
    const std::byte* place = image;
    image += aligned_bytes(bytes);
    return place;
  };
  for (const std::size_t i : rows_here) {
    if (!rows[i].shares_a) result.total_rank += rows[i].rank;
  }
  result.a = take(matrix_bytes(layout, site.rows_of_a(result.total_rank, 0).count, site.in_size));
  std::int32_t rank_offset = 0;
  for (const std::size_t i : rows_here) {
    for (const LoraModule module : parts_of(rows[i].module)) {
      const std::size_t position = part_position(site, module);
      const std::int64_t most_rows = site.rows_of_b(site.parts[position].out_size, 0).count;
      result.parts[position] = {.rank = rows[i].rank,
                                .rank_offset = rows[i].shares_a ? 0 : rank_offset,
                                .b = take(matrix_bytes(layout, most_rows, rows[i].rank))};
    }
    if (!rows[i].shares_a) rank_offset += rows[i].rank;
  }
  const auto take_vectors = [&](const AdapterRow& row, const float* DevicePart::* place) {
    for (const LoraModule module : parts_of(row.module)) {
      const std::size_t position = part_position(site, module);
      result.parts[position].*place =
          reinterpret_cast<const float*>(take(vector_bytes(site.parts[position].out_size)));
    }
  };
  for (const std::size_t i : rows_here) {
    if (rows[i].vectors.magnitude) take_vectors(rows[i], &DevicePart::magnitude);
  }
  for (const std::size_t i : rows_here) {
    if (rows[i].vectors.shift && site.adds_shifts) take_vectors(rows[i], &DevicePart::shift);
  }
  return result;
}

void ImageWriter::write(const LoraSite& site, std::span<const std::size_t> rows_here,
                        const DeviceSite& image) {
  write_a(site, rows_here, image);
  for (const std::size_t i : rows_here) {
    const RowVectors vectors = source_.rows[i].vectors;
    write_b(site, i, image);
    if (vectors.magnitude) write_vector(site, i, 0, &DevicePart::magnitude, image);
    if (vectors.shift && site.adds_shifts) {
      write_vector(site, i, vectors.count() - 1, &DevicePart::shift, image);
    }
  }
}

void ImageWriter::write_a(const LoraSite& site, std::span<const std::size_t> rows_here,
                          const DeviceSite& image) {
  const MatrixRows own = site.rows_of_a(image.total_rank);
  std::int64_t first = 0;  // the module's first row among those of the site
  for (const std::size_t i : rows_here) {
    const AdapterRow& row = source_.rows[i];
    if (row.shares_a) continue;
    const std::int64_t begin = std::max(first, own.first);
    const std::int64_t end = std::min(first + row.rank, own.first + own.count);
    if (begin < end) {
      const std::int64_t of_expert = site.expert * row.rank * row.sizes.in;
      write_matrix(writable(image.a), own.count, begin - own.first,
                   {.row = i,
                    .first = of_expert + (begin - first) * row.sizes.in + site.first_input,
                    .rows = end - begin,
                    .columns = site.in_size,
                    .stride = row.sizes.in});
    }
    first += row.rank;
  }
}

void ImageWriter::write_b(const LoraSite& site, std::size_t row_index, const DeviceSite& image) {
  const AdapterRow& row = source_.rows[row_index];
  std::int64_t first = row.rank * (row.sizes.a_per_rank() + site.expert * row.sizes.out);
  for (const LoraModule module : parts_of(row.module)) {
    const std::size_t position = part_position(site, module);
    const LoraPart& part = site.parts[position];
    const MatrixRows own = site.rows_of_b(part.out_size);
    std::int64_t written = 0;
    for (const MatrixRows& range : part.module_rows(own)) {
      if (range.count == 0) continue;
      write_matrix(writable(image.parts[position].b), own.count, written,
                   {.row = row_index,
                    .first = first + range.first * row.rank,
                    .rows = range.count,
                    .columns = row.rank,
                    .stride = row.rank});
      written += range.count;
    }
    first += part.whole_out_size() * row.rank;
  }
}

void ImageWriter::write_vector(const LoraSite& site, std::size_t row_index, std::int64_t vector,
                               const float* DevicePart::* place, const DeviceSite& image) {
  const AdapterRow& row = source_.rows[row_index];
  std::int64_t first = row.rank * (row.sizes.a_per_rank() + row.sizes.b_per_rank()) +
                       vector * row.sizes.vector() + site.expert * row.sizes.out;
  for (const LoraModule module : parts_of(row.module)) {
    const std::size_t position = part_position(site, module);
    const LoraPart& part = site.parts[position];
    std::byte* to = writable(image.parts[position].*place);
    for (const MatrixRows& range : part.module_rows({0, part.out_size})) {
      const Values values = take({.row = row_index,
                                  .first = first + range.first,
                                  .rows = 1,
                                  .columns = range.count,
                                  .stride = range.count},
                                 DType::kFloat32, ValueKind::kVector);
      std::memcpy(to, values.data, vector_bytes(range.count));
      to += vector_bytes(range.count);
    }
    first += part.whole_out_size();
  }
}

void ImageWriter::write_matrix(std::byte* matrix, std::int64_t total_rows, std::int64_t first_row,
                               const Elements& elements) {
  const DType dtype = layout_.dtype;
  const std::int64_t columns = elements.columns;
  const auto row_bytes = columns * static_cast<std::int64_t>(size_of(dtype));
  const std::int64_t block = std::max(kBlockBytes / row_bytes / kRowsTogether * kRowsTogether, kRowsTogether);
  for (std::int64_t done = 0; done < elements.rows; done += block) {
    const std::int64_t rows = std::min(block, elements.rows - done);
    Elements part = elements;
    part.first += done * elements.stride;
    part.rows = rows;
    const Values values = take(part, dtype, ValueKind::kMatrix);
    if (layout_.matrix_layout == MatrixLayout::kPanels) {
      pack_panels(matrix, dtype, total_rows, columns, first_row + done, rows, values.data, dtype,
                  values.stride);
      continue;
    }
    for (std::int64_t row = 0; row < rows; ++row) {
      std::memcpy(matrix + (first_row + done + row) * row_bytes,
                  values.data + static_cast<std::size_t>(row * values.stride) * size_of(dtype),
                  static_cast<std::size_t>(row_bytes));
    }
  }
}

ImageWriter::Values ImageWriter::take(const Elements& elements, DType type, ValueKind kind) {
  const auto count = static_cast<std::size_t>(elements.rows * elements.columns);
  Values values{source_.element(elements.row, elements.first), elements.stride};
  if (checks_ != nullptr) {
    copied_.resize(std::max(copied_.size(), count * size_of(source_.dtype)));
    std::memcpy(copied_.data(), values.data, count * size_of(source_.dtype));
    checks_->check(elements.row, static_cast<std::size_t>(elements.first), copied_.data(), count, kind);
    values.data = copied_.data();
  }
  if (source_.dtype == type) return values;
  converted_.resize(std::max(converted_.size(), count * size_of(type)));
  const bool contiguous = values.stride == elements.columns;
  const std::int64_t rows = contiguous ? 1 : elements.rows;
  const auto columns =
      static_cast<std::size_t>(contiguous ? elements.rows * elements.columns : elements.columns);
  for (std::int64_t row = 0; row < rows; ++row) {
    convert_elements(converted_.data() + static_cast<std::size_t>(row) * columns * size_of(type), type,
                     values.data + static_cast<std::size_t>(row * values.stride) * size_of(source_.dtype),
                     source_.dtype, columns);
  }
  return {converted_.data(), elements.columns};
}

}  // namespace adaptrt
