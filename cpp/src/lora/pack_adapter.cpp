#include "adaptrt/lora/pack_adapter.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "adaptrt/core/compressed_matrix.h"
#include "adaptrt/core/convert.h"
#include "adaptrt/core/huge_array.h"
#include "adaptrt/core/int8_matrix.h"
#include "adaptrt/core/panels.h"
#include "compress_image.h"
#include "image_sizes.h"
#include "image_writer.h"
#include "matrix_sharing.h"
#include "round_image.h"
#include "rows_of_sites.h"
#include "stored_parts.h"

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

/// Returns the image of a site in a page, which is at `page` on the host, with its addresses on the device.
DeviceSite on_device(const DeviceSite& placed, const std::byte* page, const std::byte* address) {
  return with_addresses(placed, [&](const std::byte* place) { return address + (place - page); });
}

}  // namespace

/// Writes this rank's part of an adapter as sent, site by site.
class AdapterPacker::PartPacker {
 public:
  PartPacker(const HostAdapter& adapter, const LoraLayout& layout)
      : rows_(adapter.rows()),
        stored_(adapter.stored_parts()),
        layout_(layout),
        source_{rows_, adapter.data(), adapter.dtype()},
        writer_(source_, layout),
        scale_places_(rows_) {}

  /// Writes the image of one site to `image`. Returns it with its addresses there.
  DeviceSite pack(const LoraSite& site, std::span<const std::size_t> rows_here, std::byte* image) {
    if (stored_.storage == LoraStorage::kExact) {
      const DeviceSite placed = place_in_image(rows_, rows_here, layout_, site, image);
      writer_.write(site, rows_here, placed);
      return placed;
    }
    const std::vector<ModuleRank> modules = modules_of(rows_, rows_here);
    const std::size_t bytes = image_bytes(layout_, site, modules);
    if (exact_.bytes() < bytes) exact_ = HugeArray(bytes);
    const DeviceSite placed = place_in_image(rows_, rows_here, layout_, site, exact_.data());
    writer_.write(site, rows_here, placed);
    if (stored_.storage == LoraStorage::kCompressed) {
      return move(site, compressor_.compress(layout_, site, placed), image);
    }
    const ImageScales scales =
        site.is_of_layer() ? scale_places_.of_image(stored_.scales, rows_here, site.expert) : ImageScales{};
    return move(site, rounder_.round(layout_, site, modules, scales, placed), image);
  }

 private:
  /// Copies the matrices and vectors of an image to `to`, one after the other.
  DeviceSite move(const LoraSite& site, const DeviceSite& from, std::byte* to) {
    std::vector<std::pair<const std::byte*, const std::byte*>> places;
    for (const std::span<const std::byte> piece : pieces_of(layout_, site, from)) {
      std::memcpy(to, piece.data(), piece.size());
      places.emplace_back(piece.data(), to);
      to += aligned_bytes(piece.size());
    }
    return with_addresses(from, [&](const std::byte* address) {
      return std::ranges::find(places, address, &decltype(places)::value_type::first)->second;
    });
  }

  std::span<const AdapterRow> rows_;
  const StoredParts& stored_;
  const LoraLayout& layout_;
  SourceRows source_;
  ImageWriter writer_;
  ScalePlaces scale_places_;
  ImageCompressor compressor_;
  ImageRounder rounder_;
  HugeArray exact_;
};

class AdapterPacker::Impl {
 public:
  Impl(const HostAdapter& adapter, const LoraLayout& layout, const DevicePlan& plan,
       std::span<std::byte* const> addresses)
      : adapter_(adapter),
        layout_(layout),
        plan_(plan),
        addresses_(addresses),
        packer_(adapter, layout),
        result_(device_adapter(adapter, layout)) {}

  std::size_t write_page(std::size_t page, std::byte* to) {
    if (page >= plan_.used_bytes.size()) return 0;
    if (adapter_.is_packed()) std::memcpy(to, adapter_.packed_page(page), plan_.used_bytes[page]);
    for (const DevicePlan::Site& entry : plan_.sites) {
      if (entry.place.page != static_cast<std::int64_t>(page)) continue;
      const auto id = static_cast<std::size_t>(entry.site);
      std::byte* const image = to + entry.place.offset;
      const DeviceSite placed = adapter_.is_packed() ? place_in_image(adapter_.rows(), entry.rows, layout_,
                                                                      layout_.sites[id], image)
                                                     : packer_.pack(layout_.sites[id], entry.rows, image);
      result_.sites[id] = on_device(placed, to, addresses_[page]);
    }
    return plan_.used_bytes[page];
  }

  DeviceAdapter take() { return std::move(result_); }

 private:
  const HostAdapter& adapter_;
  const LoraLayout& layout_;
  const DevicePlan& plan_;
  std::span<std::byte* const> addresses_;
  PartPacker packer_;
  DeviceAdapter result_;
};

AdapterPacker::AdapterPacker(const HostAdapter& adapter, const LoraLayout& layout, const DevicePlan& plan,
                             std::span<std::byte* const> addresses)
    : impl_(std::make_unique<Impl>(adapter, layout, plan, addresses)) {}
AdapterPacker::~AdapterPacker() = default;
std::size_t AdapterPacker::write_page(std::size_t page, std::byte* to) {
  return impl_->write_page(page, to);
}
DeviceAdapter AdapterPacker::take() {
  return impl_->take();
}

DeviceAdapter device_adapter_on_pages(const HostAdapter& adapter, const LoraLayout& layout,
                                      std::span<std::byte* const> addresses) {
  DeviceAdapter result = device_adapter(adapter, layout);
  const std::vector<DevicePlan::Site>& sites = adapter.plan().sites;
  for (std::size_t i = 0; i < sites.size(); ++i) {
    const auto page = static_cast<std::size_t>(sites[i].place.page);
    result.sites[static_cast<std::size_t>(sites[i].site)] =
        on_device(adapter.placed_sites()[i], adapter.packed_page(page), addresses[page]);
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
