#include "adaptrt/lora/host_adapter.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <span>
#include <utility>

#include "adapter_checks.h"
#include "config_rows.h"

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

}  // namespace

std::shared_ptr<const HostAdapter> HostAdapter::make(const LoraConfig& config, const LoraLayout& layout,
                                                     const SiteIndex& index) {
  const std::string subject = "LoRA task " + std::to_string(config.task_id);
  AdapterProblems problems;
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

  // make_shared cannot reach the private constructor.
  std::shared_ptr<HostAdapter> adapter(new HostAdapter());
  adapter->task_id_ = config.task_id;
  adapter->dtype_ = *dtype;
  std::size_t total = 0;
  for (const CheckedRow& checked : rows) total += row_elements(checked.row);
  adapter->data_ = HugeArray(total * size_of(*dtype));
  const auto row_width = static_cast<std::size_t>(weights_shape->columns);
  std::size_t start = 0;
  for (CheckedRow& checked : rows) {
    const std::byte* source = config.weights->data + checked.index * row_width * size_of(*dtype);
    const std::size_t elements = row_elements(checked.row);
    std::memcpy(adapter->data_.data() + start, source, elements * size_of(*dtype));
    // Check the copy: the caller's memory may change at any time.
    check_values(checked, adapter->data_.data() + start, *dtype, layout.dtype, problems);
    check_padding(checked, source + elements * size_of(*dtype), *dtype, row_width - elements, problems);
    checked.row.offset = start / size_of(*dtype);
    start += elements * size_of(*dtype);
    adapter->rows_.push_back(checked.row);
  }
  check_lm_head(adapter->rows_, adapter->data_.data(), *dtype, layout, problems);
  problems.throw_if_any(subject);
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
