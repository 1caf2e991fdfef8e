#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "adaptrt/core/dtype.h"
#include "adaptrt/core/huge_array.h"
#include "adaptrt/core/sha256.h"
#include "adaptrt/lora/device_plan.h"
#include "adaptrt/lora/layout.h"
#include "adaptrt/lora/shared_matrices.h"
#include "adaptrt/lora/site_index.h"

namespace adaptrt {

/// Element type of a tensor that a caller handed in, before it is checked.
enum class TensorType : std::uint8_t { kFloat32, kFloat16, kBFloat16, kInt32, kOther };

/// View of a C-contiguous tensor. `owner` keeps its memory alive.
struct TensorView {
  const std::byte* data = nullptr;
  TensorType type = TensorType::kOther;
  /// Name of the type as the caller gave it, for messages ("float64").
  std::string type_name;
  std::vector<std::int64_t> shape;
  std::shared_ptr<const void> owner;
};

/// An adapter in a request, in TensorRT-LLM's format. Weights: [rows, width] or [1, rows, width]. Config:
/// int32 [rows, 3 | 4] or [1, rows, 3 | 4], with the columns module_id, layer, rank and optionally the flags
/// of RowVectors. The first request of a task has both; later ones have neither.
struct LoraConfig {
  std::uint64_t task_id = 0;
  std::optional<TensorView> weights;
  std::optional<TensorView> config;
  /// True if different weights may replace those cached under task_id; if false, they are refused.
  bool replace = false;
  /// Position in the prompt from which the adapter is active; the base model computes the tokens before it.
  std::int32_t active_from = 0;
};

/// Settings of an adapter for the requests that use it, in addition to its changes of the model's layers.
struct AdapterTerms {
  /// Number of tokens that their vocabulary has beyond the engine's; negative if it has fewer.
  std::int32_t vocabulary_change = 0;
  /// Divisor of their rotary positions.
  std::int32_t rotary_factor = 1;

  friend bool operator==(const AdapterTerms&, const AdapterTerms&) = default;
};

/// One row of a checked adapter.
struct AdapterRow {
  LoraModule module = LoraModule::kAttnQ;
  std::int32_t layer = 0;
  std::int32_t rank = 0;
  RowVectors vectors;
  ModuleSizes sizes;
  /// Offset, in elements as sent, of A[rank, in], B[out, rank] (scaled) and the vectors in `vectors`
  /// (magnitude[out], shift[out]), in this order. For experts, each of these has a leading dimension of
  /// experts.
  std::size_t offset = 0;
  /// True if A equals that of the adapter's first row at the same site. A packed adapter keeps it once for
  /// both.
  bool shares_a = false;
};

/// How the ranks of an engine store their parts of an adapter, which depends on the values of all parts. Rank
/// 0 finds it, so that all ranks place an adapter in the same pages and round its values to the same
/// integers.
struct StoredParts {
  LoraStorage storage = LoraStorage::kExact;
  /// Bytes that are enough for the image of any rank at each site that the adapter changes, in the order of
  /// the sites; empty for kExact.
  std::vector<std::uint64_t> image_bytes = {};
  /// For kInt8 (otherwise empty): the scales of A's rows [experts, rank] and of B's columns [experts, rank]
  /// of each row that is no setting.
  std::vector<float> scales = {};
};

class MatrixSharing;
class ValueChecks;
struct SourceRows;

/// An adapter on the host level. It is kept packed as the device level needs it, or as sent: the submitted
/// rows in the submitted type, without padding, for engines whose other processes get it too.
///
/// Rows of linear layers whose A and B are their only tensors, and whose B is zero, change nothing and are
/// dropped.
class HostAdapter {
 public:
  /// Checks every rule of docs/formats.md against the engine's layout, and keeps the adapter as sent. Throws
  /// AdapterError that lists all problems. `storage` is that of the ranks' pages; other than kExact only for
  /// panels, and kCompressed only for bfloat16.
  static std::shared_ptr<const HostAdapter> make(const LoraConfig& config, const LoraLayout& layout,
                                                 const SiteIndex& index,
                                                 LoraStorage storage = LoraStorage::kExact);
  /// The same, and packs the adapter. The layout must be whole (is_whole()), with images of up to
  /// `page_bytes` bytes. If `matrices` is not nullptr, matrices that are there already are not kept again;
  /// the adapter can then be read only in place. Only then may `storage` be other than kExact, for
  /// panels; kCompressed is for bfloat16. Without `matrices`, the images are in memory that `pinned` returns
  /// for their number of bytes, unless it returns nullptr. Exact images without `matrices` are checked and
  /// written by `num_threads` threads, the calling one included.
  using AllocatePinned = std::function<std::shared_ptr<std::byte>(std::size_t bytes)>;
  static std::shared_ptr<const HostAdapter> make_packed(const LoraConfig& config, const LoraLayout& layout,
                                                        const SiteIndex& index, std::size_t page_bytes,
                                                        SharedMatrices* matrices = nullptr,
                                                        LoraStorage storage = LoraStorage::kExact,
                                                        const AllocatePinned& pinned = {},
                                                        std::int32_t num_threads = 1);

  /// Makes an adapter, as sent, that another process has checked against a layout with the same modules.
  static std::shared_ptr<const HostAdapter> received(std::uint64_t task_id, DType dtype,
                                                     std::vector<AdapterRow> rows, HugeArray data,
                                                     StoredParts stored_parts = {});

  [[nodiscard]] std::uint64_t task_id() const { return task_id_; }
  /// Unique among all adapters of this process; part of the key of the prefix cache.
  [[nodiscard]] std::uint64_t generation() const { return generation_; }
  /// Type in which the adapter was sent.
  [[nodiscard]] DType dtype() const { return dtype_; }
  /// The offsets of a packed adapter's rows are 0.
  [[nodiscard]] const std::vector<AdapterRow>& rows() const { return rows_; }
  /// The rows of an adapter as sent, or the images of a packed one.
  [[nodiscard]] const std::byte* data() const { return memory_->data(); }
  /// Bytes of the adapter, matrices that it shares with others included.
  [[nodiscard]] std::size_t bytes() const { return bytes_; }
  /// Bytes that the adapter would have if it shared nothing, no row was dropped and its storage were kExact.
  [[nodiscard]] std::size_t unshared_bytes() const { return unshared_bytes_; }
  /// Products with an A or a B that a token need not make, because B is zero or A is another module's too.
  [[nodiscard]] std::int64_t saved_products() const { return saved_products_; }
  /// Different matrices and vectors that other adapters may share, if it was made with SharedMatrices.
  [[nodiscard]] std::span<const std::shared_ptr<SharedMatrix>> matrices() const { return matrices_; }
  /// Bytes that are in no matrix of matrices().
  [[nodiscard]] std::size_t own_bytes() const { return own_bytes_; }
  /// For an adapter as sent.
  [[nodiscard]] const StoredParts& stored_parts() const { return stored_parts_; }
  [[nodiscard]] bool is_packed() const { return plan_.has_value(); }
  /// True if the images are in pinned memory.
  [[nodiscard]] bool is_pinned() const { return memory_->pinned != nullptr; }
  /// Positions of a packed adapter's parts on a device with memory of its own.
  [[nodiscard]] const DevicePlan& plan() const { return *plan_; }
  /// Addresses of a packed adapter's parts on the host, for each of plan().sites.
  [[nodiscard]] std::span<const DeviceSite> placed_sites() const { return placed_sites_; }
  /// Address of the images in one page of the plan, if the adapter was made without SharedMatrices. The
  /// pages' used bytes follow each other.
  [[nodiscard]] const std::byte* packed_page(std::size_t page) const;
  [[nodiscard]] const AdapterTerms& terms() const { return terms_; }
  /// True if rows, types and bytes are equal. Bytes of packed adapters are those in the engine's type, so
  /// differences that its rounding removes do not count. Both adapters are of one layout, and both are packed
  /// or both as sent.
  [[nodiscard]] bool same_weights(const HostAdapter& other) const;
  /// Digest of rows, types and bytes. It is the same in every process with the same layout, and equal only
  /// for adapters with same_weights(). The first call computes it; thread-safe.
  const Sha256Digest& content_digest() const;
  /// Returns content_digest() if it was called before; otherwise zeros.
  [[nodiscard]] const Sha256Digest& known_content_digest() const { return digest_; }

 private:
  HostAdapter() = default;
  void keep_as_sent(HugeArray data);
  void finish_sharing(MatrixSharing& sharing);
  /// Writes the images of the plan, and checks their values.
  void write_images(const SourceRows& source, const LoraLayout& layout, std::int32_t num_threads,
                    ValueChecks& checks);
  /// Places images with these sizes, in the order of the plan's sites.
  static void place_again(std::span<const std::size_t> sizes, std::size_t page_bytes, DevicePlan& plan);

  std::uint64_t task_id_ = 0;
  std::uint64_t generation_ = 0;
  DType dtype_ = DType::kFloat32;
  LoraStorage storage_ = LoraStorage::kExact;
  StoredParts stored_parts_;
  std::vector<AdapterRow> rows_;
  std::shared_ptr<PackedMemory> memory_;
  /// All bytes, in an order that depends only on the rows.
  std::vector<std::span<const std::byte>> pieces_;
  std::size_t bytes_ = 0;
  std::size_t unshared_bytes_ = 0;
  std::size_t own_bytes_ = 0;
  std::int64_t saved_products_ = 0;
  std::vector<std::shared_ptr<SharedMatrix>> matrices_;
  std::optional<DevicePlan> plan_;
  std::vector<DeviceSite> placed_sites_;
  AdapterTerms terms_;
  mutable std::once_flag digest_made_;
  mutable Sha256Digest digest_{};
};

}  // namespace adaptrt
