// Measures how fast the LoRA cache admits adapters on one thread: check, convert, pack, and touch new memory.
// The adapter has all linear layers of Llama 3.1 8B. Rates are bytes as sent per second of the thread's CPU
// time.
//   admission_bench [rank] [rounds] [layers]

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "adaptrt/core/convert.h"
#include "adaptrt/lora/host_pages.h"
#include "adaptrt/lora/lora_cache.h"
#include "adaptrt/lora/modules.h"

namespace adaptrt {
namespace {

constexpr std::int64_t kHidden = 4096;
constexpr std::int64_t kKeys = 1024;
constexpr std::int64_t kNeurons = 14336;

LoraLayout llama_layout(DType dtype, std::int32_t layers, std::int32_t rank) {
  using enum LoraModule;
  LoraLayout layout;
  layout.dtype = dtype;
  layout.num_layers = layers;
  layout.max_rank = rank;
  layout.target_modules = {kAttnQ, kAttnK, kAttnV, kAttnDense, kMlpHTo4H, kMlp4HToH, kMlpGate};
  for (std::int32_t layer = 0; layer < layers; ++layer) {
    layout.sites.push_back({layer, kHidden, {{kAttnQ, kHidden}, {kAttnK, kKeys}, {kAttnV, kKeys}}});
    layout.sites.push_back({layer, kHidden, {{kAttnDense, kHidden}}});
    layout.sites.push_back({layer, kHidden, {{kMlpHTo4H, kNeurons}, {kMlpGate, kNeurons}}});
    layout.sites.push_back({layer, kNeurons, {{kMlp4HToH, kHidden}}});
  }
  return layout;
}

/// An adapter of every module, as a request sends it: rows of equal width.
struct Sent {
  Sent(const LoraLayout& layout, DType type, std::int32_t rank)
      : dtype(type), width(rank * (kHidden + kNeurons)) {
    for (const LoraSite& site : layout.sites) {
      for (const LoraPart& part : site.parts) {
        config.insert(config.end(), {static_cast<std::int32_t>(part.module), site.layer, rank, 0});
        used.push_back(static_cast<std::size_t>(rank * (site.in_size + part.out_size)));
        in_a.push_back(static_cast<std::size_t>(rank * site.in_size));
      }
    }
    weights.resize(used.size() * static_cast<std::size_t>(width) * size_of(dtype));
    std::vector<float> values(1 << 16);
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 997) / 997.0F - 0.5F;
    for (std::size_t row = 0; row < used.size(); ++row) {
      std::byte* begin = weights.data() + row * static_cast<std::size_t>(width) * size_of(dtype);
      for (std::size_t done = 0; done < used[row]; done += values.size()) {
        convert_elements(begin + done * size_of(dtype), dtype,
                         reinterpret_cast<const std::byte*>(values.data()), DType::kFloat32,
                         std::min(values.size(), used[row] - done));
      }
      bytes += used[row] * size_of(dtype);
      // The cache keeps equal matrices once, so A and B of each row begin with its number.
      const std::array number{static_cast<float>(row % 128) / 128.0F, static_cast<float>(row / 128) / 128.0F};
      for (const std::size_t first : {std::size_t{0}, in_a[row]}) {
        convert_elements(begin + first * size_of(dtype), dtype,
                         reinterpret_cast<const std::byte*>(number.data()), DType::kFloat32, number.size());
      }
    }
  }
  [[nodiscard]] LoraConfig send(std::uint64_t task_id) const {
    const TensorType type = dtype == DType::kFloat32   ? TensorType::kFloat32
                            : dtype == DType::kFloat16 ? TensorType::kFloat16
                                                       : TensorType::kBFloat16;
    const auto rows = static_cast<std::int64_t>(used.size());
    LoraConfig result;
    result.task_id = task_id;
    result.weights = TensorView{weights.data(), type, std::string(name_of(dtype)), {rows, width}, nullptr};
    result.config = TensorView{
        reinterpret_cast<const std::byte*>(config.data()), TensorType::kInt32, "int32", {rows, 4}, nullptr};
    return result;
  }

  DType dtype;
  std::int64_t width;
  std::vector<std::size_t> used;
  std::vector<std::size_t> in_a;
  std::vector<std::byte> weights;
  std::vector<std::int32_t> config;
  std::size_t bytes = 0;
};

std::string cpu_name() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  }
  return "unknown CPU";
}

/// Time that this thread has computed, so that other work on the machine counts little.
double thread_seconds() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

/// Pages whose adapters are kept in memory that is already mapped, as pinned memory is.
class PinnedPages final : public AdapterPages {
 public:
  explicit PinnedPages(std::shared_ptr<std::byte> pinned)
      : pages_(std::size_t{64} << 20, 8), pinned_(std::move(pinned)) {}
  [[nodiscard]] std::size_t page_bytes() const override { return pages_.page_bytes(); }
  [[nodiscard]] std::int64_t num_pages() const override { return pages_.num_pages(); }
  [[nodiscard]] std::byte* address(std::int64_t page) const override { return pages_.address(page); }
  void load(std::span<const std::int64_t> /*pages*/, const Write& /*write*/) override { std::abort(); }
  [[nodiscard]] std::shared_ptr<std::byte> allocate_pinned(std::size_t /*bytes*/,
                                                           std::size_t /*max_bytes*/) override {
    return pinned_;
  }

 private:
  HostPages pages_;
  std::shared_ptr<std::byte> pinned_;
};

double wall_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

void measure(DType engine, DType sent_type, LoraStorage storage, std::int32_t rank, int rounds,
             std::int32_t layers) {
  const LoraLayout layout = llama_layout(engine, layers, rank);
  const Sent sent(layout, sent_type, rank);
  std::vector<double> admissions;
  std::vector<double> returns;
  std::size_t memory = 0;
  for (int round = 0; round < rounds + 1; ++round) {
    LoraCache cache(layout, std::make_unique<HostPages>(std::size_t{64} << 20, 8),
                    {.host_bytes = 4 * sent.bytes, .storage = storage});
    double start = thread_seconds();
    const auto adapter = cache.admit(sent.send(1));
    if (round > 0) admissions.push_back(thread_seconds() - start);
    start = thread_seconds();
    if (!cache.acquire(adapter)) std::abort();
    if (round > 0) returns.push_back(thread_seconds() - start);
    memory = cache.stats().memory_bytes;
  }
  const auto megabytes = [](std::size_t bytes) { return static_cast<double>(bytes) / 1e6; };
  std::printf(
      "%-9s to %-9s %-10s %8.1f MB sent, %8.1f MB in memory: admit %7.1f ms, %5.2f GB/s; load %8.4f ms\n",
      std::string(name_of(sent_type)).c_str(), std::string(name_of(engine)).c_str(),
      std::string(name_of(storage)).c_str(), megabytes(sent.bytes), megabytes(memory),
      1e3 * median(admissions), static_cast<double>(sent.bytes) / median(admissions) / 1e9,
      1e3 * median(returns));
}

/// Admissions as an engine on a GPU makes them, to pinned memory or, if there is none, to new memory. Rates
/// are of wall time.
void measure_rows(bool is_pinned, std::int32_t num_threads, std::int32_t rank, int rounds,
                  std::int32_t layers) {
  LoraLayout layout = llama_layout(DType::kBFloat16, layers, rank);
  layout.matrix_layout = MatrixLayout::kRows;
  const Sent sent(layout, DType::kBFloat16, rank);
  const std::size_t bytes = sent.bytes + (std::size_t{1} << 20);
  const std::shared_ptr<std::byte> pinned(new std::byte[bytes],
                                          [](const std::byte* memory) { delete[] memory; });
  std::fill_n(pinned.get(), bytes, std::byte{1});
  std::vector<double> admissions;
  for (int round = 0; round < rounds + 1; ++round) {
    LoraCache cache(layout, std::make_unique<PinnedPages>(is_pinned ? pinned : nullptr),
                    {.host_bytes = 4 * sent.bytes, .num_admit_threads = num_threads});
    const double start = wall_seconds();
    const auto adapter = cache.admit(sent.send(1));
    if (round > 0) admissions.push_back(wall_seconds() - start);
    if (adapter->is_pinned() != is_pinned) std::abort();
  }
  std::printf("bfloat16 to rows in %s memory, %d threads: %8.1f MB sent: admit %7.1f ms, %5.2f GB/s\n",
              is_pinned ? "pinned" : "new", num_threads, static_cast<double>(sent.bytes) / 1e6,
              1e3 * median(admissions), static_cast<double>(sent.bytes) / median(admissions) / 1e9);
}

}  // namespace
}  // namespace adaptrt

int main(int argc, char** argv) {
  using enum adaptrt::DType;
  const auto argument = [&](int index, int otherwise) {
    return argc > index ? std::max(1, std::atoi(argv[index])) : otherwise;
  };
  const int rank = argument(1, 16);
  const int rounds = argument(2, 9);
  const int layers = argument(3, 32);
  std::printf("%s, one thread, rank %d, %d layers, medians of %d rounds\n", adaptrt::cpu_name().c_str(), rank,
              layers, rounds);
  for (const auto& [engine, sent] : std::array{
           std::pair{kBFloat16, kBFloat16}, std::pair{kBFloat16, kFloat32}, std::pair{kBFloat16, kFloat16},
           std::pair{kFloat32, kFloat32}, std::pair{kFloat16, kFloat16}}) {
    adaptrt::measure(engine, sent, adaptrt::LoraStorage::kExact, rank, rounds, layers);
  }
  for (const adaptrt::LoraStorage storage :
       {adaptrt::LoraStorage::kCompressed, adaptrt::LoraStorage::kInt8}) {
    adaptrt::measure(kBFloat16, kBFloat16, storage, rank, rounds, layers);
  }
  adaptrt::measure_rows(false, 1, rank, rounds, layers);
  for (const std::int32_t num_threads : {1, 2, 4, 8}) {
    adaptrt::measure_rows(true, num_threads, rank, rounds, layers);
  }
}
