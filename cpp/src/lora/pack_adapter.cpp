#include "adaptrt/lora/pack_adapter.h"

#include <atomic>
#include <cstring>

#include "adaptrt/core/compressed_matrix.h"
#include "adaptrt/core/convert.h"
#include "adaptrt/core/int8_matrix.h"
#include "adaptrt/core/panels.h"
#include "image_writer.h"

namespace adaptrt {
namespace {

/// Load ids are unique in the process, across caches.
std::uint64_t next_load_id() {
  static std::atomic<std::uint64_t> last{0};
  return last.fetch_add(1, std::memory_order_relaxed) + 1;
}

/// Returns the adapter without its sites.
DeviceAdapter device_adapter(const HostAdapter& adapter, const LoraLayout& layout) {
  DeviceAdapter result;
  result.task_id = adapter.task_id();
  result.load_id = next_load_id();
  result.sites.resize(layout.sites.size());
  result.rotary_factor = adapter.terms().rotary_factor;
  return result;
}

/// Reads rows [first, first + rows) of a matrix with `columns` columns as float32; only the rows `here` are
/// on the device. Int8 matrices are read without their scales.
std::vector<float> read_rows(const LoraLayout& layout, const std::byte* matrix, LoraStorage storage,
                             MatrixRows here, std::int64_t columns, std::int64_t first, std::int64_t rows) {
  std::vector<float> values(static_cast<std::size_t>(rows * columns));
  std::vector<std::byte> expanded;
  if (storage == LoraStorage::kCompressed) {
    expanded = expand_matrix(matrix, here.count, columns);
    matrix = expanded.data();
  }
  const PanelMatrix panels{matrix, layout.dtype, here.count, columns};
  for (std::int64_t i = 0; i < rows; ++i) {
    const std::int64_t row = first + i - here.first;
    if (row < 0 || row >= here.count) continue;
    float* to = values.data() + i * columns;
    if (storage == LoraStorage::kInt8) {
      unpack_int8_row(matrix, here.count, columns, row, to);
    } else if (layout.matrix_layout == MatrixLayout::kPanels) {
      unpack_panel_row(panels, row, to);
    } else {
      convert_elements(reinterpret_cast<std::byte*>(to), DType::kFloat32,
                       matrix + static_cast<std::size_t>(row * columns) * size_of(layout.dtype), layout.dtype,
                       static_cast<std::size_t>(columns));
    }
  }
  return values;
}

/// Multiplies row r of a matrix with `columns` columns by scales[r].
void scale_rows(const float* scales, std::int64_t columns, std::vector<float>* matrix) {
  for (std::size_t i = 0; i < matrix->size(); ++i)
    (*matrix)[i] *= scales[i / static_cast<std::size_t>(columns)];
}

}  // namespace

DeviceAdapter pack_adapter(const HostAdapter& adapter, const LoraLayout& layout, const DevicePlan& plan,
                           std::span<std::byte* const> host_pages, std::span<std::byte* const> addresses) {
  if (adapter.is_packed()) {
    for (std::size_t page = 0; page < plan.used_bytes.size(); ++page) {
      std::memcpy(host_pages[page], adapter.packed_page(page), plan.used_bytes[page]);
    }
  } else {
    const SourceRows source{adapter.rows(), adapter.data(), adapter.dtype()};
    ImageWriter writer(source, layout);
    for (const DevicePlan::Site& entry : plan.sites) {
      const LoraSite& site = layout.sites[static_cast<std::size_t>(entry.site)];
      const std::byte* image = host_pages[static_cast<std::size_t>(entry.place.page)] + entry.place.offset;
      writer.write(site, entry.rows, place_in_image(adapter.rows(), entry.rows, layout, site, image));
    }
  }
  DeviceAdapter result = device_adapter(adapter, layout);
  for (const DevicePlan::Site& site : plan.sites) {
    const auto id = static_cast<std::size_t>(site.site);
    result.sites[id] =
        place_in_image(adapter.rows(), site.rows, layout, layout.sites[id],
                       addresses[static_cast<std::size_t>(site.place.page)] + site.place.offset);
  }
  return result;
}

DeviceAdapter device_adapter_in_place(const HostAdapter& adapter, const LoraLayout& layout) {
  DeviceAdapter result = device_adapter(adapter, layout);
  for (std::size_t i = 0; i < adapter.plan().sites.size(); ++i) {
    result.sites[static_cast<std::size_t>(adapter.plan().sites[i].site)] = adapter.placed_sites()[i];
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
      module.a = read_rows(layout, site.a, site.a_storage, place.rows_of_a(site.total_rank), place.in_size,
                           part.rank_offset, part.rank);
      if (site.rank_scales != nullptr) {
        scale_rows(site.rank_scales + part.rank_offset, place.in_size, &module.a);
      }
      module.b = read_rows(layout, part.b, part.b_storage, place.rows_of_b(out_size), part.rank, 0, out_size);
      if (part.magnitude != nullptr) module.magnitude.assign(part.magnitude, part.magnitude + out_size);
      if (part.shift != nullptr) module.shift.assign(part.shift, part.shift + out_size);
      result.push_back(std::move(module));
    }
  }
  return result;
}

}  // namespace adaptrt
