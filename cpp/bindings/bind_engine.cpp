#include <pybind11/functional.h>
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "adaptrt/core/error.h"
#include "adaptrt/cpu/amx.h"
#include "adaptrt/cpu/cpu_engine.h"
#include "adaptrt/cpu/kernel_choice.h"
#include "adaptrt/cpu/kernel_table.h"
#include "adaptrt/engine/engine_fields.h"
#include "adaptrt/measure/machine_limits.h"
#include "adaptrt/weight_file/mapped_file.h"
#include "bind_struct.h"
#include "bindings.h"
#include "buffers.h"
#include "cpu_engine.h"
#include "engine_handle.h"
#include "gil_safe_object.h"
#include "waiting.h"

namespace py = pybind11;

namespace adaptrt::bindings {
namespace {

using Integers = py::array_t<std::int32_t, py::array::c_style>;

std::span<const std::int32_t> values_of(const Integers& array) {
  return {array.data(), static_cast<std::size_t>(array.size())};
}

/// Runs a step of the base model and returns logits[R, vocab_size].
py::array_t<float> step(EngineHandle& self, const Integers& token_ids, const Integers& positions,
                        const Integers& sequence_offsets, const Integers& prompt_lengths,
                        const Integers& block_tables, const Integers& logit_rows,
                        const std::optional<Integers>& state_slots) {
  if (block_tables.ndim() != 2) throw py::value_error("block_tables must be two-dimensional");
  const std::vector<const DeviceAdapter*> adapters(static_cast<std::size_t>(prompt_lengths.size()), nullptr);
  const StepInput input{
      .token_ids = values_of(token_ids),
      .positions = values_of(positions),
      .sequence_offsets = values_of(sequence_offsets),
      .prompt_lengths = values_of(prompt_lengths),
      .block_tables = values_of(block_tables),
      .max_blocks_per_sequence = static_cast<std::int32_t>(block_tables.shape(1)),
      .adapters = adapters,
      .logit_rows = values_of(logit_rows),
      .state_slots = state_slots ? values_of(*state_slots) : std::span<const std::int32_t>()};
  const std::int64_t vocab = self.engine()->info().vocab_size;
  const std::int64_t width = self.engine()->info().logits_width();
  py::array_t<float> logits({static_cast<py::ssize_t>(logit_rows.size()), static_cast<py::ssize_t>(vocab)});
  float* out = logits.mutable_data();
  const auto sink = [&](std::int64_t first_row, std::int64_t rows, const float* values) {
    for (std::int64_t row = first_row; row < first_row + rows; ++row, values += width) {
      std::copy_n(values, vocab, out + row * vocab);
    }
  };
  without_gil([&] { self.run([&](Engine& engine) { engine.step(input, sink); }); });
  return logits;
}

void bind_engine_info(py::module_& module) {
  bind_read_only<EngineInfo>(module, "EngineInfo", "Description of an engine for an executor.")
      .def("max_seq_len_of", &EngineInfo::max_seq_len_of, py::arg("rotary_factor"),
           "Maximum tokens of a sequence whose adapter divides rotary positions by this factor; 1: other "
           "sequences.");
}

void bind_weight_memory(py::module_& module) {
  py::class_<WeightPlacement>(module, "WeightPlacement",
                              "Placement of an engine's weights that are not mapped.")
      .def_readonly("resident_bytes", &WeightPlacement::resident_bytes,
                    "Bytes of weights that stay in memory.")
      .def_readonly("buffer_bytes", &WeightPlacement::buffer_bytes,
                    "Bytes of memory for the weights that are read on use.")
      .def_readonly("file_bytes", &WeightPlacement::file_bytes,
                    "Bytes in the file of the weights that are read on use.")
      .def_readonly("is_locked", &WeightPlacement::is_locked,
                    "True if the system was told to keep all of the memory resident.")
      .def_readonly("is_direct", &WeightPlacement::is_direct, "True if reads bypass the system's file cache.")
      .def_readonly("bytes_read", &WeightPlacement::bytes_read,
                    "Bytes read so far, including the resident weights.");
  py::class_<WeightUsageCounter, std::shared_ptr<WeightUsageCounter>>(
      module, "WeightUsage",
      "Counts of the neurons and experts that tokens used. An engine may count while Python reads.")
      .def(py::init([](std::int64_t tokens, std::map<std::size_t, std::vector<std::uint32_t>> of_ops) {
             return std::make_shared<WeightUsageCounter>(WeightUsage{tokens, std::move(of_ops)});
           }),
           py::kw_only(), py::arg("tokens") = 0,
           py::arg("of_ops") = std::map<std::size_t, std::vector<std::uint32_t>>{})
      .def_property_readonly(
          "tokens", [](const WeightUsageCounter& self) { return self.read().tokens; },
          "0: nothing was counted.")
      .def_property_readonly(
          "of_ops", [](const WeightUsageCounter& self) { return self.read().of_ops; },
          "For each op of the body: how often each neuron's gate was open, or each expert was chosen.");
  py::class_<WeightMemory>(module, "WeightMemory", "Memory for the weights of a mapped engine file.")
      .def(py::init([](std::string path, const py::buffer& mapping, std::size_t num_bytes,
                       std::optional<const WeightUsageCounter*> usage) {
             const py::buffer_info info = mapping.request();
             return WeightMemory{.path = std::move(path),
                                 .mapping = {data_of(info, "WeightMemory"), bytes_of(info)},
                                 .bytes = num_bytes,
                                 .usage = usage ? (*usage)->read() : WeightUsage{}};
           }),
           py::kw_only(), py::arg("path"), py::arg("mapping"), py::arg("num_bytes"),
           py::arg("usage") = py::none(),
           "mapping: the whole file; the caller keeps it alive, and it is not read. num_bytes: memory for "
           "the resident weights and for the buffers into which others are read. usage: counts that say "
           "which weights a text used most.");
}

void bind_mapped_file(py::module_& module) {
  py::class_<MappedFile, std::shared_ptr<MappedFile>>(
      module, "MappedFile",
      "A mapped file that another process may cut: lost pages read as zero, without SIGBUS.")
      .def(py::init([](const py::buffer& mapping, std::string path, double interval) {
             const py::buffer_info info = mapping.request();
             const auto nanoseconds = std::chrono::nanoseconds(std::llround(interval * 1e9));
             return std::make_shared<MappedFile>(
                 std::span(static_cast<const std::byte*>(data_of(info, "MappedFile")), bytes_of(info)),
                 std::move(path), nanoseconds);
           }),
           py::arg("mapping"), py::arg("path"), py::kw_only(), py::arg("interval") = 1.0,
           py::keep_alive<1, 2>(),
           "mapping: the whole file. interval: seconds between checks of its size and modification time.")
      .def("check", &MappedFile::check,
           "Raises EngineError if the file was cut, or written since this object was made.");
}

void bind_engine_handle(py::module_& module) {
  py::class_<EngineHandle>(module, "Engine", "A compiled network with its KV pool, on any backend.")
      .def_property_readonly("info", [](const EngineHandle& self) { return self.engine()->info(); })
      .def_property_readonly(
          "weight_placement", [](const EngineHandle& self) { return self.engine()->weight_placement(); },
          "None: all weights are mapped, or on a device.")
      .def(
          "allocate_kv_blocks",
          [](EngineHandle& self, std::int32_t num_blocks) {
            without_gil([&] { self.run([&](Engine& engine) { engine.allocate_kv_blocks(num_blocks); }); });
          },
          py::arg("num_blocks"),
          "Allocates the KV pool. Call it once, before the first step. Raises ConfigError if there is too "
          "little memory, and StepError if an executor uses the engine.")
      .def(
          "allocate_states",
          [](EngineHandle& self, std::int32_t num_slots) {
            without_gil([&] { self.run([&](Engine& engine) { engine.allocate_states(num_slots); }); });
          },
          py::arg("num_slots"),
          "Allocates the states of sequences. Call it once, before the first step. Raises ConfigError if "
          "there is too little memory, EngineError if the network keeps no states, and StepError if an "
          "executor uses the engine.")
      .def("step", &step, py::kw_only(), py::arg("token_ids"), py::arg("positions"),
           py::arg("sequence_offsets"), py::arg("prompt_lengths"), py::arg("block_tables"),
           py::arg("logit_rows"), py::arg("state_slots") = py::none(),
           "Runs one step of the base model: T tokens of S consecutive sequences. Takes int32 arrays "
           "token_ids[T], positions[T], sequence_offsets[S + 1], prompt_lengths[S], block_tables[S, blocks], "
           "logit_rows[R], and for networks with states state_slots[S]; returns float32 "
           "logits[R, vocab_size]. Raises StepError for invalid inputs, and if an executor uses the "
           "engine.");
}

}  // namespace

CpuEngine::CpuEngine(Program program, py::object storage, int num_threads, const std::string& kernels,
                     std::optional<std::shared_ptr<StepProfile>> profile, const std::string& identity,
                     std::optional<const CpuEngine*> beside,
                     std::optional<std::shared_ptr<Communicator>> communicator,
                     const std::optional<WeightMemory>& weight_memory,
                     std::optional<std::shared_ptr<WeightUsageCounter>> usage,
                     std::optional<std::shared_ptr<MappedFile>> mapped_file) {
  if (num_threads < 1)
    throw ConfigError("num_threads is " + std::to_string(num_threads) + "; it must be at least 1");
  program.identity = identity;
  program.mapped_file = std::move(mapped_file).value_or(nullptr);
  auto kept = std::make_shared<GilSafeObject>(std::move(storage));
  without_gil([&] {
    std::shared_ptr<ThreadPool> pool = beside ? (*beside)->pool_.lock() : nullptr;
    if (!pool) pool = std::make_shared<ThreadPool>(num_threads);
    pool_ = pool;
    // The engine goes before what it reads.
    struct Parts {
      std::shared_ptr<GilSafeObject> storage;
      std::unique_ptr<Engine> engine;
    };
    auto parts = std::make_shared<Parts>(Parts{
        std::move(kept),
        make_cpu_engine(std::move(program), std::move(pool), kernels, std::move(profile).value_or(nullptr),
                        std::move(communicator).value_or(nullptr), weight_memory ? &*weight_memory : nullptr,
                        std::move(usage).value_or(nullptr))});
    Engine* engine = parts->engine.get();
    hold(std::shared_ptr<Engine>(std::move(parts), engine));
  });
}

void bind_engine(py::module_& module) {
  bind_program(module);
  bind_profile(module);
  bind_engine_info(module);
  bind_weight_memory(module);
  bind_mapped_file(module);
  bind_engine_handle(module);
  bind_ranks(module);
  bind_tensorrt(module);
  py::class_<CpuEngine, EngineHandle>(module, "CpuEngine",
                                      "A native engine: a program, its weights and its KV pool.")
      .def(py::init<Program, py::object, int, const std::string&, std::optional<std::shared_ptr<StepProfile>>,
                    const std::string&, std::optional<const CpuEngine*>,
                    std::optional<std::shared_ptr<Communicator>>, const std::optional<WeightMemory>&,
                    std::optional<std::shared_ptr<WeightUsageCounter>>,
                    std::optional<std::shared_ptr<MappedFile>>>(),
           py::arg("program"), py::arg("storage"), py::arg("num_threads"), py::kw_only(),
           py::arg("kernels") = "", py::arg("profile") = py::none(), py::arg("identity") = "",
           py::arg("beside") = py::none(), py::arg("communicator") = py::none(),
           py::arg("weight_memory") = py::none(), py::arg("usage") = py::none(),
           py::arg("mapped_file") = py::none(),
           "storage: owner of the buffers that `program` refers to; kept alive with the engine. kernels: one "
           "of cpu_kernels(); empty: the first. profile: records every step. identity: stands for everything "
           "that results depend on; empty: not known, and then the KV cache cannot have a second level. "
           "beside: an engine that the same thread runs; the two share threads. communicator: for a program "
           "of several ranks. weight_memory: weights that do not fit are read from the file on use; "
           "`storage` owns its mapping too. usage: counts the weights that each step used. mapped_file: the "
           "file of the weights, which is checked after each step. Raises EngineError with everything that "
           "Program.validate() finds, or if the file cannot be read, and ConfigError for less memory than "
           "the weights need.");
  module.def(
      "cpu_engine_info",
      [](Program program, const std::string& kernels, const std::string& identity) {
        program.identity = identity;
        return cpu_engine_info(program, kernels);
      },
      py::arg("program"), py::kw_only(), py::arg("kernels") = "", py::arg("identity") = "",
      "Facts of the CpuEngine that these arguments would make, without making it. Reads no weights. With "
      "several pipeline stages, sizes are the first stage's. Raises ConfigError for kernels that this CPU "
      "cannot run.");
  module.def(
      "check_weight_memory", &check_weight_memory, py::arg("program"), py::arg("weight_memory"),
      "Raises ConfigError if the program's CpuEngine cannot have this weight memory. Reads no weights.");
  module.def(
      "cpu_kernels",
      [] {
        std::vector<std::string> names;
        for (const auto* table : available_kernels()) names.emplace_back(table->name);
        return names;
      },
      "Names of the kernels that this CPU can run; the default comes first.");
  module.def(
      "impossible_cpu_kernels",
      [] {
        std::vector<std::pair<std::string, std::string>> reasons;
        for (const auto& fit : impossible_kernels()) reasons.emplace_back(fit.name, fit.obstacle);
        return reasons;
      },
      "The other kernels: a dictionary from name to the reason why this CPU cannot run them.");
  module.def(
      "base_of_cpu_kernels", &base_of_kernels, py::arg("name"),
      "The kernels that these ones fall back to where their own instructions bring nothing; empty if all "
      "are their own.");
  module.def("amx_is_permitted", &amx_is_permitted,
             "True if the CPU has AMX for bfloat16 and int8, and Linux lets this process use it.");
  py::class_<MachineLimits>(module, "MachineLimits", "Measured limits of this machine.")
      .def_readonly("read_bandwidth", &MachineLimits::read_bandwidth, "Bytes per second.")
      .def_readonly("int8_ops", &MachineLimits::int8_ops,
                    "Operations per second of int8 products, two for a multiply-add; 0 if the CPU has no "
                    "instruction for them.")
      .def_readonly(
          "bfloat16_flops", &MachineLimits::bfloat16_flops,
          "Operations per second, two for a multiply-add; 0 if the CPU has no instruction for them.")
      .def_readonly("int8_from_l2_ops", &MachineLimits::int8_from_l2_ops,
                    "The same for int8 with AMX tiles loaded from L2; 0 without AMX.")
      .def_readonly("bfloat16_from_l2_flops", &MachineLimits::bfloat16_from_l2_flops,
                    "The same for bfloat16 with AMX tiles loaded from L2; 0 without AMX.")
      .def_readonly("float32_flops", &MachineLimits::float32_flops,
                    "Operations per second, two for a multiply-add.");
  module.def(
      "measure_machine_limits",
      [](int num_threads, int rounds) {
        ThreadPool threads(num_threads);
        return measure_machine_limits(&threads, rounds);
      },
      py::arg("num_threads"), py::arg("rounds") = 7, py::call_guard<py::gil_scoped_release>(),
      "Measures the limits: the best of several rounds of reading 1 GiB and of multiplying in registers.");
}

}  // namespace adaptrt::bindings
