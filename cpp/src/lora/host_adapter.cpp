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
#include "config_rows.h"
#include "image_sizes.h"
#include "image_writer.h"

namespace adaptrt {
namespace {

/// Generations are unique in the process, across caches.
std::uint64_t next_generation() {
  static std::atomic<std::uint64_t> last{0};
  return last.fetch_add(1, std::memory_order_relaxed) + 1;
}

bool same_row(const AdapterRow& a, const AdapterRow& b) {
  return a.module == b.module && a.layer == b.layer && a.rank == b.rank && a.vectors == b.vectors;
}

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

/// Adds the problems of the rows' values and padding.
void add_row_problems(const SentTensors& sent, const ValueChecks& checks, AdapterProblems& problems) {
  for (std::size_t i = 0; i < sent.rows.size(); ++i) {
    const CheckedRow& checked = sent.rows[i];
    checks.add_problem(i, checked.index, problems);
    const std::size_t elements = row_elements(checked.row);
    check_padding(checked, sent.row(checked.index) + elements * size_of(sent.dtype), sent.dtype,
                  sent.columns - elements, problems);
  }
}

}  // namespace

std::shared_ptr<const HostAdapter> HostAdapter::make(const LoraConfig& config, const LoraLayout& layout,
                                                     const SiteIndex& index) {
  const std::string subject = "LoRA task " + std::to_string(config.task_id);
  AdapterProblems problems;
  const SentTensors sent = check_tensors(config, layout, index, subject, problems);
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
  adapter->data_ = HugeArray(total * size_of(sent.dtype));
  ValueChecks checks(adapter->rows_, sent.dtype, layout.dtype);
  for (std::size_t i = 0; i < sent.rows.size(); ++i) {
    std::byte* copy = adapter->data_.data() + adapter->rows_[i].offset * size_of(sent.dtype);
    std::memcpy(copy, sent.row(sent.rows[i].index), row_elements(adapter->rows_[i]) * size_of(sent.dtype));
    // Check the copy: the caller's memory may change at any time.
    checks.check_row(i, copy);
  }
  add_row_problems(sent, checks, problems);
  const auto a_of = [&](std::size_t i) {
    const AdapterRow& row = adapter->rows_[i];
    return std::span<const std::byte>(
        adapter->data_.data() + row.offset * size_of(sent.dtype),
        static_cast<std::size_t>(row.rank * row.sizes.in) * size_of(sent.dtype));
  };
  check_lm_head(adapter->rows_, a_of, layout, problems);
  problems.throw_if_any(subject);
  adapter->terms_ = terms_of_rows(adapter->rows_);
  adapter->generation_ = next_generation();
  return adapter;
}

std::shared_ptr<const HostAdapter> HostAdapter::make_packed(const LoraConfig& config,
                                                            const LoraLayout& layout, const SiteIndex& index,
                                                            std::size_t page_bytes) {
  const std::string subject = "LoRA task " + std::to_string(config.task_id);
  AdapterProblems problems;
  const SentTensors sent = check_tensors(config, layout, index, subject, problems);
  std::shared_ptr<HostAdapter> adapter(new HostAdapter());
  adapter->task_id_ = config.task_id;
  adapter->dtype_ = sent.dtype;
  for (const CheckedRow& checked : sent.rows) {
    adapter->rows_.push_back(checked.row);
    adapter->rows_.back().offset = checked.index * sent.columns;
  }
  const DevicePlan& plan =
      adapter->plan_.emplace(plan_device_images(adapter->rows_, layout, index, page_bytes));
  adapter->data_ = HugeArray(plan.bytes());
  const SourceRows source{adapter->rows_, sent.weights, sent.dtype};
  ValueChecks checks(adapter->rows_, sent.dtype, layout.dtype);
  ImageWriter writer(source, layout, &checks);
  std::map<std::size_t, std::span<const std::byte>> a_of_lm_head;
  for (const DevicePlan::Site& entry : plan.sites) {
    const LoraSite& site = layout.sites[static_cast<std::size_t>(entry.site)];
    const std::byte* image =
        adapter->packed_page(static_cast<std::size_t>(entry.place.page)) + entry.place.offset;
    const DeviceSite placed = place_in_image(adapter->rows_, entry.rows, layout, site, image);
    writer.write(site, entry.rows, placed);
    if (site.is_lm_head()) {
      a_of_lm_head[entry.rows.front()] = {placed.a, matrix_bytes(layout, placed.total_rank, site.in_size)};
    }
  }
  add_row_problems(sent, checks, problems);
  const auto a_of = [&](std::size_t row) { return a_of_lm_head.at(row); };
  check_lm_head(adapter->rows_, a_of, layout, problems);
  problems.throw_if_any(subject);
  for (AdapterRow& row : adapter->rows_) row.offset = 0;
  adapter->terms_ = terms_of_rows(adapter->rows_);
  adapter->generation_ = next_generation();
  return adapter;
}

std::shared_ptr<const HostAdapter> HostAdapter::received(std::uint64_t task_id, DType dtype,
                                                         std::vector<AdapterRow> rows, HugeArray data) {
  std::shared_ptr<HostAdapter> adapter(new HostAdapter());
  adapter->task_id_ = task_id;
  adapter->generation_ = next_generation();
  adapter->dtype_ = dtype;
  adapter->rows_ = std::move(rows);
  adapter->data_ = std::move(data);
  adapter->terms_ = terms_of_rows(adapter->rows_);
  return adapter;
}

const std::byte* HostAdapter::packed_page(std::size_t page) const {
  const auto begin = plan_->used_bytes.begin();
  return data() + std::accumulate(begin, begin + static_cast<std::ptrdiff_t>(page), std::size_t{0});
}

bool HostAdapter::same_weights(const HostAdapter& other) const {
  return dtype_ == other.dtype_ && std::ranges::equal(rows_, other.rows_, same_row) &&
         bytes() == other.bytes() && std::memcmp(data(), other.data(), bytes()) == 0;
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
    }
    hash.add(std::span(data_.data(), data_.bytes()));
    digest_ = hash.finish();
  });
  return digest_;
}

}  // namespace adaptrt
