#include "adaptrt/lora/pack_adapter.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>

#include "adaptrt/core/convert.h"
#include "adaptrt/core/panels.h"

namespace adaptrt {
namespace {

std::size_t aligned(std::size_t bytes) {
  return (bytes + kImageAlignment - 1) / kImageAlignment * kImageAlignment;
}

std::size_t part_position(const LoraSite& site, LoraModule part) {
  return static_cast<std::size_t>(std::ranges::find(site.parts, part, &LoraPart::module) -
                                  site.parts.begin());
}

/// Orders a module's rows among those of the site: by the first of its parts.
std::size_t module_position(const LoraSite& site, LoraModule module) {
  std::size_t first = site.parts.size();
  for (const LoraModule part : parts_of(module)) first = std::min(first, part_position(site, part));
  return first;
}

std::size_t vector_bytes(std::int64_t size) {
  return static_cast<std::size_t>(size) * sizeof(float);
}

/// Bytes of a matrix [rows, columns] on the device.
std::size_t matrix_bytes(const LoraLayout& layout, std::int64_t rows, std::int64_t columns) {
  return layout.matrix_layout == MatrixLayout::kPanels
             ? panel_bytes(layout.dtype, rows, columns)
             : static_cast<std::size_t>(rows * columns) * size_of(layout.dtype);
}

/// Load ids are unique in the process, across caches.
std::uint64_t next_load_id() {
  static std::atomic<std::uint64_t> last{0};
  return last.fetch_add(1, std::memory_order_relaxed) + 1;
}

/// Writes one site's image, front to back, to host memory: the data at `image` will be at `address` on the
/// device.
class ImageWriter {
 public:
  ImageWriter(const HostAdapter& adapter, const LoraLayout& layout, const LoraSite& site, std::byte* image,
              const std::byte* address)
      : adapter_(adapter), layout_(layout), site_(site), image_(image), address_(address) {}

  DeviceSite write(const std::vector<std::size_t>& rows) {
    DeviceSite result;
    for (const std::size_t i : rows) result.total_rank += adapter_.rows()[i].rank;
    write_a(rows, result);
    std::int32_t rank_offset = 0;
    for (const std::size_t i : rows) {
      write_b(adapter_.rows()[i], rank_offset, result);
      rank_offset += adapter_.rows()[i].rank;
    }
    for (const std::size_t i : rows) {
      const AdapterRow& row = adapter_.rows()[i];
      if (row.vectors.magnitude) write_vector(row, 0, &DevicePart::magnitude, result);
    }
    for (const std::size_t i : rows) {
      const AdapterRow& row = adapter_.rows()[i];
      if (row.vectors.shift && site_.adds_shifts)
        write_vector(row, row.vectors.count() - 1, &DevicePart::shift, result);
    }
    return result;
  }

 private:
  /// Host and device address of a piece of the image.
  struct Piece {
    std::byte* host = nullptr;
    const std::byte* device = nullptr;
  };

  Piece take(std::size_t bytes) {
    const Piece piece{image_ + used_, address_ + used_};
    used_ += aligned(bytes);
    return piece;
  }

  /// Writes rows [first_row, first_row + rows) of a matrix [total_rows, columns]; `values` are those rows,
  /// `stride` elements apart.
  void write_rows(std::byte* matrix, std::int64_t total_rows, std::int64_t columns, std::int64_t first_row,
                  std::int64_t rows, const std::byte* values, std::int64_t stride) const {
    if (layout_.matrix_layout == MatrixLayout::kPanels) {
      pack_panels(matrix, layout_.dtype, total_rows, columns, first_row, rows, values, adapter_.dtype(),
                  stride);
      return;
    }
    for (std::int64_t row = 0; row < rows; ++row) {
      convert_elements(
          matrix + static_cast<std::size_t>((first_row + row) * columns) * size_of(layout_.dtype),
          layout_.dtype, values + static_cast<std::size_t>(row * stride) * size_of(adapter_.dtype()),
          adapter_.dtype(), static_cast<std::size_t>(columns));
    }
  }

  [[nodiscard]] const std::byte* source(const AdapterRow& row, std::int64_t element) const {
    return adapter_.data() + (row.offset + static_cast<std::size_t>(element)) * size_of(adapter_.dtype());
  }
  // Index of the first element of A, B or a vector (counted from 0) for the site's expert, within a row.
  [[nodiscard]] std::int64_t first_of_a(const AdapterRow& row) const {
    return site_.expert * row.rank * row.sizes.in + site_.first_input;
  }
  [[nodiscard]] std::int64_t first_of_b(const AdapterRow& row) const {
    return row.rank * (row.sizes.a_per_rank() + site_.expert * row.sizes.out);
  }
  [[nodiscard]] std::int64_t first_of_vector(const AdapterRow& row, std::int64_t vector) const {
    return row.rank * (row.sizes.a_per_rank() + row.sizes.b_per_rank()) + vector * row.sizes.vector() +
           site_.expert * row.sizes.out;
  }

  void write_a(const std::vector<std::size_t>& rows, DeviceSite& result) {
    const MatrixRows own = site_.rows_of_a(result.total_rank);
    const Piece a = take(matrix_bytes(layout_, site_.rows_of_a(result.total_rank, 0).count, site_.in_size));
    result.a = a.device;
    std::int64_t first = 0;  // the module's first row among those of the site
    for (const std::size_t i : rows) {
      const AdapterRow& row = adapter_.rows()[i];
      const std::int64_t begin = std::max(first, own.first);
      const std::int64_t end = std::min(first + row.rank, own.first + own.count);
      if (begin < end) {
        write_rows(a.host, own.count, site_.in_size, begin - own.first, end - begin,
                   source(row, first_of_a(row) + (begin - first) * row.sizes.in), row.sizes.in);
      }
      first += row.rank;
    }
  }

  void write_b(const AdapterRow& row, std::int32_t rank_offset, DeviceSite& result) {
    std::int64_t first = first_of_b(row);
    for (const LoraModule module : parts_of(row.module)) {
      const std::size_t position = part_position(site_, module);
      const LoraPart& part = site_.parts[position];
      const MatrixRows own = site_.rows_of_b(part.out_size);
      const Piece b = take(matrix_bytes(layout_, site_.rows_of_b(part.out_size, 0).count, row.rank));
      if (own.count > 0) {
        write_rows(b.host, own.count, row.rank, 0, own.count,
                   source(row, first + (part.first_output + own.first) * row.rank), row.rank);
      }
      result.parts[position] = {.rank = row.rank, .rank_offset = rank_offset, .b = b.device};
      first += part.whole_out_size() * row.rank;
    }
  }

  void write_vector(const AdapterRow& row, std::int64_t vector, const float* DevicePart::* place,
                    DeviceSite& result) {
    std::int64_t first = first_of_vector(row, vector);
    for (const LoraModule module : parts_of(row.module)) {
      const std::size_t position = part_position(site_, module);
      const LoraPart& part = site_.parts[position];
      const Piece values = take(vector_bytes(part.out_size));
      convert_elements(values.host, DType::kFloat32, source(row, first + part.first_output), adapter_.dtype(),
                       static_cast<std::size_t>(part.out_size));
      result.parts[position].*place = reinterpret_cast<const float*>(values.device);
      first += part.whole_out_size();
    }
  }

  const HostAdapter& adapter_;
  const LoraLayout& layout_;
  const LoraSite& site_;
  std::byte* image_;
  const std::byte* address_;
  std::size_t used_ = 0;
};

/// Reads rows [first, first + rows) of a matrix with `columns` columns as float32; only the rows `here` are
/// on the device.
std::vector<float> read_rows(const LoraLayout& layout, const std::byte* matrix, MatrixRows here,
                             std::int64_t columns, std::int64_t first, std::int64_t rows) {
  std::vector<float> values(static_cast<std::size_t>(rows * columns));
  const PanelMatrix panels{matrix, layout.dtype, here.count, columns};
  for (std::int64_t i = 0; i < rows; ++i) {
    const std::int64_t row = first + i - here.first;
    if (row < 0 || row >= here.count) continue;
    float* to = values.data() + i * columns;
    if (layout.matrix_layout == MatrixLayout::kPanels) {
      unpack_panel_row(panels, row, to);
    } else {
      convert_elements(reinterpret_cast<std::byte*>(to), DType::kFloat32,
                       matrix + static_cast<std::size_t>(row * columns) * size_of(layout.dtype), layout.dtype,
                       static_cast<std::size_t>(columns));
    }
  }
  return values;
}

}  // namespace

std::size_t image_bytes(const LoraLayout& layout, const LoraSite& site, std::span<const ModuleRank> modules) {
  std::int64_t total_rank = 0;
  std::size_t bytes = 0;
  for (const ModuleRank& module : modules) {
    total_rank += module.rank;
    for (const LoraModule part : parts_of(module.module)) {
      const std::int64_t out_size = site.parts[part_position(site, part)].out_size;
      bytes += aligned(matrix_bytes(layout, site.rows_of_b(out_size, 0).count, module.rank));
      bytes += static_cast<std::size_t>(module.vectors.count()) * aligned(vector_bytes(out_size));
    }
  }
  return bytes + aligned(matrix_bytes(layout, site.rows_of_a(total_rank, 0).count, site.in_size));
}

ImagePlaces place_images(std::span<const std::size_t> sizes, std::size_t page_bytes) {
  ImagePlaces result;
  std::vector<std::size_t> used;
  for (const std::size_t size : sizes) {
    const auto page =
        std::ranges::find_if(used, [&](std::size_t bytes) { return page_bytes - bytes >= size; });
    const auto number = static_cast<std::int64_t>(page - used.begin());
    if (page == used.end()) {
      used.push_back(size);
      result.places.push_back({number, 0});
    } else {
      result.places.push_back({number, *page});
      *page += size;
    }
  }
  result.pages = static_cast<std::int64_t>(used.size());
  return result;
}

DevicePlan plan_device_images(const HostAdapter& adapter, const LoraLayout& layout, const SiteIndex& index,
                              std::size_t page_bytes) {
  std::map<std::int32_t, std::vector<std::size_t>> rows_at;
  for (std::size_t i = 0; i < adapter.rows().size(); ++i) {
    const AdapterRow& row = adapter.rows()[i];
    if (is_setting(row.module)) continue;
    const ModulePlace& place = *index.find(row.layer, row.module);
    for (std::int32_t site = 0; site < place.num_sites; ++site) rows_at[place.first_site + site].push_back(i);
  }
  DevicePlan plan;
  std::vector<std::vector<std::size_t>> sizes(static_cast<std::size_t>(layout.num_stages));
  for (auto& [site_id, rows] : rows_at) {
    const LoraSite& site = layout.sites[static_cast<std::size_t>(site_id)];
    std::ranges::sort(rows, {},
                      [&](std::size_t i) { return module_position(site, adapter.rows()[i].module); });
    std::vector<ModuleRank> modules;
    for (const std::size_t i : rows) {
      modules.push_back({adapter.rows()[i].module, adapter.rows()[i].rank, adapter.rows()[i].vectors});
    }
    const std::int32_t stage = layout.stage_of(site);
    sizes[static_cast<std::size_t>(stage)].push_back(image_bytes(layout, site, modules));
    if (stage == layout.stage) plan.sites.push_back({site_id, std::move(rows), {}});
  }
  for (const auto& of_stage : sizes) {
    plan.pages = std::max(plan.pages, place_images(of_stage, page_bytes).pages);
  }
  const ImagePlaces own = place_images(sizes[static_cast<std::size_t>(layout.stage)], page_bytes);
  for (std::size_t i = 0; i < plan.sites.size(); ++i) plan.sites[i].place = own.places[i];
  return plan;
}

DeviceAdapter pack_adapter(const HostAdapter& adapter, const LoraLayout& layout, const DevicePlan& plan,
                           std::span<std::byte* const> host_pages, std::span<std::byte* const> addresses) {
  DeviceAdapter result;
  result.task_id = adapter.task_id();
  result.load_id = next_load_id();
  result.sites.resize(layout.sites.size());
  result.rotary_factor = adapter.terms().rotary_factor;
  for (const DevicePlan::Site& site : plan.sites) {
    const auto id = static_cast<std::size_t>(site.site);
    const auto page = static_cast<std::size_t>(site.place.page);
    ImageWriter writer(adapter, layout, layout.sites[id], host_pages[page] + site.place.offset,
                       addresses[page] + site.place.offset);
    result.sites[id] = writer.write(site.rows);
  }
  return result;
}

std::vector<UnpackedModule> unpack_adapter(const DeviceAdapter& adapter, const LoraLayout& layout) {
  std::vector<UnpackedModule> result;
  for (std::size_t i = 0; i < adapter.sites.size(); ++i) {
    const LoraSite& place = layout.sites[i];
    const DeviceSite& site = adapter.sites[i];
    for (std::size_t p = 0; p < place.parts.size(); ++p) {
      const DevicePart& part = site.parts[p];
      if (part.rank == 0) continue;
      const std::int64_t out_size = place.parts[p].out_size;
      UnpackedModule module{place.parts[p].module, place.layer, place.expert, part.rank, {}, {}, {}, {}};
      module.a = read_rows(layout, site.a, place.rows_of_a(site.total_rank), place.in_size, part.rank_offset,
                           part.rank);
      module.b = read_rows(layout, part.b, place.rows_of_b(out_size), part.rank, 0, out_size);
      if (part.magnitude != nullptr) module.magnitude.assign(part.magnitude, part.magnitude + out_size);
      if (part.shift != nullptr) module.shift.assign(part.shift, part.shift + out_size);
      result.push_back(std::move(module));
    }
  }
  return result;
}

}  // namespace adaptrt
