#include "adaptrt/lora/host_adapter.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <numeric>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "adapter_checks.h"
#include "compress_image.h"
#include "config_rows.h"
#include "for_each_index.h"
#include "image_sizes.h"
#include "image_writer.h"
#include "matrix_sharing.h"
#include "round_image.h"
#include "rows_of_sites.h"
#include "saved_rows.h"
#include "stored_parts.h"

namespace adaptrt {
namespace {

/// Generations are unique in the process, across caches.
std::uint64_t next_generation() {
  static std::atomic<std::uint64_t> last{0};
  return last.fetch_add(1, std::memory_order_relaxed) + 1;
}

bool same_row(const AdapterRow& a, const AdapterRow& b) {
  return a.module == b.module && a.layer == b.layer && a.rank == b.rank && a.vectors == b.vectors &&
         a.shares_a == b.shares_a;
}

bool same_bytes(std::span<const std::byte> a, std::span<const std::byte> b) {
  return a.size() == b.size() && (a.data() == b.data() || std::memcmp(a.data(), b.data(), a.size()) == 0);
}

/// Products of a token with A and B.
constexpr std::size_t kProductsOfRow = 2;

/// An adapter's tensors after the checks of types, shapes and config.
struct SentTensors {
  DType dtype = DType::kFloat32;
  const std::byte* weights = nullptr;
  std::size_t columns = 0;
  std::vector<CheckedRow> rows;

  [[nodiscard]] const std::byte* row(std::size_t index) const {
    return weights + index * columns * size_of(dtype);
  }
};

/// Throws if the problems leave nothing to read; otherwise returns the accepted rows, with offset 0.
SentTensors check_tensors(const LoraConfig& config, const LoraLayout& layout, const SiteIndex& index,
                          std::string_view subject, AdapterProblems& problems) {
  if (layout.target_modules.empty()) {
    problems.add("the engine was built without LoRA (--lora_plugin disable) and accepts no adapters");
  } else if (!config.weights || !config.config) {
    const bool any = config.weights || config.config;
    problems.add(!any             ? "weights and config are missing"
                 : config.weights ? "weights came without config; give both or neither"
                                  : "config came without weights; give both or neither");
  }
  problems.throw_if_any(subject);

  const auto dtype = weights_dtype(*config.weights, problems);
  const auto weights_shape = matrix_shape(*config.weights, "weights", problems);
  const auto config_shape = matrix_shape(*config.config, "config", problems);
  const bool equal_rows = weights_shape && config_shape && weights_shape->rows == config_shape->rows;
  if (weights_shape && config_shape && !equal_rows) {
    problems.add("weights has " + std::to_string(weights_shape->rows) + " rows and config has " +
                 std::to_string(config_shape->rows) + "; they must be equal");
  }
  std::vector<CheckedRow> rows;
  if (config_shape) {
    SentWeights sent;
    if (weights_shape) sent.columns = weights_shape->columns;
    if (dtype && equal_rows) {
      sent.data = config.weights->data;
      sent.dtype = *dtype;
    }
    rows = check_rows(*config.config, *config_shape, sent, layout, index, problems);
  }
  if (!dtype || !equal_rows) problems.throw_if_any(subject);
  return {*dtype, config.weights->data, static_cast<std::size_t>(weights_shape->columns), std::move(rows)};
}

/// Removes the rows that change nothing and returns them.
SentTensors take_idle_rows(SentTensors& sent, const LoraLayout& layout, const SiteIndex& index) {
  SentTensors idle{sent.dtype, sent.weights, sent.columns, {}};
  std::erase_if(sent.rows, [&](const CheckedRow& checked) {
    if (!changes_nothing(checked.row, sent.row(checked.index), sent.dtype, layout, index)) return false;
    idle.rows.push_back(checked);
    return true;
  });
  return idle;
}

/// Adds the problems of the rows' values and padding.
void add_row_problems(const SentTensors& sent, const ValueChecks& checks, AdapterProblems& problems,
                      std::int32_t num_threads = 1) {
  std::vector<std::optional<std::string>> of_padding(sent.rows.size());
  for_each_index(sent.rows.size(), static_cast<std::size_t>(num_threads), [&](std::size_t i, std::size_t) {
    const CheckedRow& checked = sent.rows[i];
    const std::size_t elements = row_elements(checked.row);
    of_padding[i] = padding_problem(checked, sent.row(checked.index) + elements * size_of(sent.dtype),
                                    sent.dtype, sent.columns - elements);
  });
  for (std::size_t i = 0; i < sent.rows.size(); ++i) {
    checks.add_problem(i, sent.rows[i].index, problems);
    if (of_padding[i]) problems.add(*std::move(of_padding[i]));
  }
}

/// Adds the problems of rows that are not kept.
void check_idle_rows(const SentTensors& idle, DType target, AdapterProblems& problems) {
  std::vector<AdapterRow> rows;
  for (const CheckedRow& checked : idle.rows) rows.push_back(checked.row);
  ValueChecks checks(rows, idle.dtype, target);
  for (std::size_t i = 0; i < rows.size(); ++i) checks.check_row(i, idle.row(idle.rows[i].index));
  add_row_problems(idle, checks, problems);
}

std::shared_ptr<PackedMemory> allocate_images(std::size_t bytes, const HostAdapter::AllocatePinned& pinned) {
  std::shared_ptr<std::byte> memory = pinned ? pinned(bytes) : nullptr;
  return memory ? std::make_shared<PackedMemory>(std::move(memory))
                : std::make_shared<PackedMemory>(HugeArray(bytes));
}

}  // namespace

std::shared_ptr<const HostAdapter> HostAdapter::make(const LoraConfig& config, const LoraLayout& layout,
                                                     const SiteIndex& index, LoraStorage storage) {
  const std::string subject = "LoRA task " + std::to_string(config.task_id);
  AdapterProblems problems;
  SentTensors sent = check_tensors(config, layout, index, subject, problems);
  const SentTensors idle = take_idle_rows(sent, layout, index);
  // make_shared cannot reach the private constructor.
  std::shared_ptr<HostAdapter> adapter(new HostAdapter());
  adapter->task_id_ = config.task_id;
  adapter->dtype_ = sent.dtype;
  std::size_t total = 0;
  for (const CheckedRow& checked : sent.rows) {
    adapter->rows_.push_back(checked.row);
    adapter->rows_.back().offset = total;
    total += row_elements(checked.row);
  }
  adapter->keep_as_sent(HugeArray(total * size_of(sent.dtype)));
  adapter->unshared_bytes_ = adapter->bytes_;
  for (const CheckedRow& checked : idle.rows) {
    adapter->unshared_bytes_ += row_elements(checked.row) * size_of(sent.dtype);
    adapter->saved_products_ += kProductsOfRow;
  }
  std::byte* const data = adapter->memory_->data();
  ValueChecks checks(adapter->rows_, sent.dtype, layout.dtype);
  for (std::size_t i = 0; i < sent.rows.size(); ++i) {
    std::byte* copy = data + adapter->rows_[i].offset * size_of(sent.dtype);
    std::memcpy(copy, sent.row(sent.rows[i].index), row_elements(adapter->rows_[i]) * size_of(sent.dtype));
    // Check the copy: the caller's memory may change at any time.
    checks.check_row(i, copy);
  }
  const SourceRows source{adapter->rows_, data, sent.dtype};
  adapter->saved_products_ += static_cast<std::int64_t>(find_shared_a(adapter->rows_, source, layout, index));
  add_row_problems(sent, checks, problems);
  check_idle_rows(idle, layout.dtype, problems);
  const auto a_of = [&](std::size_t i) {
    const AdapterRow& row = adapter->rows_[i];
    return std::span<const std::byte>(
        data + row.offset * size_of(sent.dtype),
        static_cast<std::size_t>(row.rank * row.sizes.in) * size_of(sent.dtype));
  };
  check_lm_head(adapter->rows_, a_of, layout, problems);
  problems.throw_if_any(subject);
  adapter->storage_ = storage;
  adapter->stored_parts_ = find_stored_parts(storage, source, layout, index);
  adapter->terms_ = terms_of_rows(adapter->rows_);
  adapter->generation_ = next_generation();
  return adapter;
}

std::shared_ptr<const HostAdapter> HostAdapter::make_packed(const LoraConfig& config,
                                                            const LoraLayout& layout, const SiteIndex& index,
                                                            std::size_t page_bytes, SharedMatrices* matrices,
                                                            LoraStorage storage, const AllocatePinned& pinned,
                                                            std::int32_t num_threads) {
  const std::string subject = "LoRA task " + std::to_string(config.task_id);
  AdapterProblems problems;
  SentTensors sent = check_tensors(config, layout, index, subject, problems);
  std::vector<AdapterRow> all_rows;
  for (const CheckedRow& checked : sent.rows) all_rows.push_back(checked.row);
  const SentTensors idle = take_idle_rows(sent, layout, index);
  std::shared_ptr<HostAdapter> adapter(new HostAdapter());
  adapter->task_id_ = config.task_id;
  adapter->dtype_ = sent.dtype;
  for (const CheckedRow& checked : sent.rows) {
    adapter->rows_.push_back(checked.row);
    adapter->rows_.back().offset = checked.index * sent.columns;
  }
  const SourceRows source{adapter->rows_, sent.weights, sent.dtype};
  const std::size_t num_sharing = find_shared_a(adapter->rows_, source, layout, index);
  const DevicePlan& plan =
      adapter->plan_.emplace(plan_device_images(adapter->rows_, layout, index, page_bytes));
  adapter->bytes_ = adapter->own_bytes_ = adapter->unshared_bytes_ = plan.bytes();
  if (num_sharing + idle.rows.size() > 0) {
    adapter->unshared_bytes_ = plan_device_images(all_rows, layout, index, page_bytes).bytes();
    adapter->saved_products_ = static_cast<std::int64_t>(num_sharing + kProductsOfRow * idle.rows.size());
  }
  adapter->memory_ = allocate_images(plan.bytes(), matrices == nullptr ? pinned : AllocatePinned{});
  std::optional<MatrixSharing> sharing;
  if (matrices != nullptr) sharing.emplace(*matrices, adapter->memory_);
  ValueChecks checks(adapter->rows_, sent.dtype, layout.dtype);
  const bool keeps_images = !sharing && storage == LoraStorage::kExact;
  if (keeps_images) adapter->write_images(source, layout, num_threads, checks);
  ImageWriter writer(source, layout, &checks);
  ImageCompressor compressor;
  ImageRounder rounder;
  std::vector<std::size_t> image_sizes;
  adapter->storage_ = storage;
  std::map<std::size_t, std::span<const std::byte>> a_of_lm_head;
  for (const DevicePlan::Site& entry : plan.sites) {
    const LoraSite& site = layout.sites[static_cast<std::size_t>(entry.site)];
    const std::byte* image =
        sharing ? sharing->next()
                : adapter->packed_page(static_cast<std::size_t>(entry.place.page)) + entry.place.offset;
    DeviceSite placed = place_in_image(adapter->rows_, entry.rows, layout, site, image);
    if (!keeps_images) writer.write(site, entry.rows, placed);
    if (storage == LoraStorage::kCompressed) placed = compressor.compress(layout, site, placed);
    if (storage == LoraStorage::kInt8) {
      placed = rounder.round(layout, site, modules_of(adapter->rows_, entry.rows), placed);
    }
    if (sharing) placed = sharing->keep(layout, site, placed);
    adapter->placed_sites_.push_back(placed);
    const auto pieces = pieces_of(layout, site, placed);
    adapter->pieces_.insert(adapter->pieces_.end(), pieces.begin(), pieces.end());
    image_sizes.push_back(0);
    for (const auto& piece : pieces) image_sizes.back() += aligned_bytes(piece.size());
    if (site.is_lm_head()) {
      a_of_lm_head[entry.rows.front()] = pieces.front();
    }
  }
  for (std::size_t i = 0; i < adapter->rows_.size(); ++i) {
    const AdapterRow& row = adapter->rows_[i];
    if (!row.shares_a) continue;
    checks.check(i, 0, source.element(i, 0), static_cast<std::size_t>(row.rank * row.sizes.a_per_rank()),
                 ValueKind::kMatrix);
  }
  add_row_problems(sent, checks, problems, num_threads);
  check_idle_rows(idle, layout.dtype, problems);
  const auto a_of = [&](std::size_t row) { return a_of_lm_head.at(row); };
  check_lm_head(adapter->rows_, a_of, layout, problems);
  problems.throw_if_any(subject);
  for (AdapterRow& row : adapter->rows_) row.offset = 0;
  if (sharing) adapter->finish_sharing(*sharing);
  if (storage != LoraStorage::kExact) place_again(image_sizes, page_bytes, *adapter->plan_);
  adapter->terms_ = terms_of_rows(adapter->rows_);
  adapter->generation_ = next_generation();
  return adapter;
}

std::shared_ptr<const HostAdapter> HostAdapter::received(std::uint64_t task_id, DType dtype,
                                                         std::vector<AdapterRow> rows, HugeArray data,
                                                         StoredParts stored_parts) {
  std::shared_ptr<HostAdapter> adapter(new HostAdapter());
  adapter->task_id_ = task_id;
  adapter->generation_ = next_generation();
  adapter->dtype_ = dtype;
  adapter->storage_ = stored_parts.storage;
  adapter->stored_parts_ = std::move(stored_parts);
  adapter->rows_ = std::move(rows);
  adapter->keep_as_sent(std::move(data));
  adapter->unshared_bytes_ = adapter->bytes_;
  adapter->terms_ = terms_of_rows(adapter->rows_);
  return adapter;
}

void HostAdapter::write_images(const SourceRows& source, const LoraLayout& layout, std::int32_t num_threads,
                               ValueChecks& checks) {
  const auto threads = static_cast<std::size_t>(std::max(num_threads, 1));
  std::vector<ValueChecks> checks_of_threads(threads, ValueChecks(rows_, source.dtype, layout.dtype));
  std::vector<ImageWriter> writers;
  for (ValueChecks& own : checks_of_threads) writers.emplace_back(source, layout, &own);
  for_each_index(plan_->sites.size(), threads, [&](std::size_t index, std::size_t thread) {
    const DevicePlan::Site& entry = plan_->sites[index];
    const LoraSite& site = layout.sites[static_cast<std::size_t>(entry.site)];
    const std::byte* image = packed_page(static_cast<std::size_t>(entry.place.page)) + entry.place.offset;
    writers[thread].write(site, entry.rows, place_in_image(rows_, entry.rows, layout, site, image));
  });
  for (const ValueChecks& own : checks_of_threads) checks.merge(own);
}

void HostAdapter::keep_as_sent(HugeArray data) {
  memory_ = std::make_shared<PackedMemory>(std::move(data));
  bytes_ = own_bytes_ = memory_->array.bytes();
  pieces_ = {{memory_->data(), bytes_}};
}

void HostAdapter::place_again(std::span<const std::size_t> sizes, std::size_t page_bytes, DevicePlan& plan) {
  ImagePlaces places = place_images(sizes, page_bytes);
  for (std::size_t i = 0; i < sizes.size(); ++i) plan.sites[i].place = places.places[i];
  plan.used_bytes = std::move(places.used_bytes);
  plan.pages = std::ssize(plan.used_bytes);
}

void HostAdapter::finish_sharing(MatrixSharing& sharing) {
  memory_->array.truncate(sharing.used_bytes());
  matrices_ = sharing.take_matrices();
  bytes_ = own_bytes_ = sharing.own_bytes();
  for (const auto& matrix : matrices_) bytes_ += matrix->memory_bytes();
}

const std::byte* HostAdapter::packed_page(std::size_t page) const {
  const auto begin = plan_->used_bytes.begin();
  return data() + std::accumulate(begin, begin + static_cast<std::ptrdiff_t>(page), std::size_t{0});
}

bool HostAdapter::same_weights(const HostAdapter& other) const {
  return dtype_ == other.dtype_ && storage_ == other.storage_ &&
         std::ranges::equal(rows_, other.rows_, same_row) &&
         std::ranges::equal(pieces_, other.pieces_, same_bytes);
}

const Sha256Digest& HostAdapter::content_digest() const {
  std::call_once(digest_made_, [&] {
    Sha256 hash;
    hash.add_integer(static_cast<std::uint64_t>(dtype_)).add_integer(rows_.size());
    for (const AdapterRow& row : rows_) {
      hash.add_integer(static_cast<std::uint64_t>(row.module));
      hash.add_integer(static_cast<std::uint64_t>(row.layer));
      hash.add_integer(static_cast<std::uint64_t>(row.rank));
      hash.add_integer(static_cast<std::uint64_t>(row.vectors.flags()));
      hash.add_integer(static_cast<std::uint64_t>(row.shares_a));
    }
    if (storage_ != LoraStorage::kExact) hash.add_integer(static_cast<std::uint64_t>(storage_));
    for (const std::span<const std::byte> piece : pieces_) {
      if (storage_ != LoraStorage::kExact) hash.add_integer(piece.size());
      hash.add(piece);
    }
    digest_ = hash.finish();
  });
  return digest_;
}

}  // namespace adaptrt
