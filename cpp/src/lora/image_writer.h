#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "adapter_checks.h"
#include "adaptrt/lora/device_plan.h"
#include "adaptrt/lora/host_adapter.h"
#include "adaptrt/lora/layout.h"

namespace adaptrt {

/// Rows of an adapter as sent: row i starts rows[i].offset elements after `data`.
struct SourceRows {
  std::span<const AdapterRow> rows;
  const std::byte* data = nullptr;
  DType dtype = DType::kFloat32;

  [[nodiscard]] const std::byte* element(std::size_t row, std::int64_t element) const {
    return data + (rows[row].offset + static_cast<std::size_t>(element)) * size_of(dtype);
  }
};

/// Returns the addresses in a site's image at `image`. `rows_here`: DevicePlan::Site::rows.
[[nodiscard]] DeviceSite place_in_image(std::span<const AdapterRow> rows,
                                        std::span<const std::size_t> rows_here, const LoraLayout& layout,
                                        const LoraSite& site, const std::byte* image);

/// Writes the images of an adapter's sites to host memory.
class ImageWriter {
 public:
  /// `checks` (optional) sees a copy of each element, and the images are written from these copies: the
  /// source may change at any time. The layout has whole layers then.
  ImageWriter(const SourceRows& source, const LoraLayout& layout, ValueChecks* checks = nullptr)
      : source_(source), layout_(layout), checks_(checks) {}

  /// Writes everything that place_in_image() returned an address for.
  void write(const LoraSite& site, std::span<const std::size_t> rows_here, const DeviceSite& image);

 private:
  /// Elements of one row: `rows` rows of `columns` elements, `stride` elements apart, from `first` on.
  struct Elements {
    std::size_t row = 0;
    std::int64_t first = 0;
    std::int64_t rows = 0;
    std::int64_t columns = 0;
    std::int64_t stride = 0;
  };
  void write_a(const LoraSite& site, std::span<const std::size_t> rows_here, const DeviceSite& image);
  void write_b(const LoraSite& site, std::size_t row, const DeviceSite& image);
  void write_vector(const LoraSite& site, std::size_t row, std::int64_t vector,
                    const float* DevicePart::* place, const DeviceSite& image);
  void write_matrix(std::byte* matrix, std::int64_t total_rows, std::int64_t first_row,
                    const Elements& elements);
  /// Returns the elements as `type`, with their stride; valid until the next call.
  struct Values {
    const std::byte* data = nullptr;
    std::int64_t stride = 0;
  };
  Values take(const Elements& elements, DType type, ValueKind kind);

  const SourceRows& source_;
  const LoraLayout& layout_;
  ValueChecks* checks_;
  std::vector<std::byte> copied_;
  std::vector<std::byte> converted_;
};

}  // namespace adaptrt
