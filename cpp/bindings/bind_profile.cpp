#include <pybind11/native_enum.h>
#include <pybind11/stl.h>

#include <memory>

#include "adaptrt/engine/step_profile.h"
#include "bindings.h"

namespace py = pybind11;

namespace adaptrt::bindings {

void bind_profile(py::module_& module) {
  py::native_enum<StepSection>(module, "StepSection", "enum.Enum", "Part of a step to which an op belongs.")
      .value("ENCODER", StepSection::kEncoder, "Program.encoder, in steps with encoder inputs.")
      .value("BODY", StepSection::kBody, "Program.body.")
      .value("HEAD", StepSection::kHead, "Program.head, once for each slice of logit rows.")
      .value("SINK", StepSection::kSink, "Use of the logits: sampling, in an executor.")
      .value("RANKS", StepSection::kRanks,
             "Work of rank 0 for several ranks, in addition to its own ops; the index is a RankWork.")
      .finalize();
  py::native_enum<RankWork>(module, "RankWork", "enum.IntEnum", "Kinds of work in StepSection.RANKS.")
      .value("COMMANDS", RankWork::kCommands,
             "Sends the step and the adapters that it needs to the other ranks.")
      .value("RESULTS", RankWork::kResults,
             "Waits for the results of the pipeline's last stage and receives them.")
      .value("LOW_RANK_EXCHANGE", RankWork::kLowRankExchange,
             "Exchanges x A^T of fully sharded adapters within a linear layer or experts.")
      .finalize();
  py::class_<OpCost>(module, "OpCost",
                     "Bytes and operations that an op needs at least: it reads and writes each element once.")
      .def_readonly("weight_bytes", &OpCost::weight_bytes, "Bytes of base weights, norms and biases.")
      .def_readonly("adapter_bytes", &OpCost::adapter_bytes, "Bytes of the step's different adapters.")
      .def_readonly("kv_bytes", &OpCost::kv_bytes, "Bytes of the keys and values that are read and written.")
      .def_readonly("activation_bytes", &OpCost::activation_bytes,
                    "Bytes of the buffers that are read and written.")
      .def_readonly(
          "flops", &OpCost::flops,
          "Operations of products with base weights and of attention; a multiply-add counts as two.")
      .def_readonly("adapter_flops", &OpCost::adapter_flops, "Operations of products with adapters.");
  py::class_<OpRecord>(module, "OpRecord",
                       "One op of a step, or a part of it: an op has parts if ranks exchange data within it. "
                       "Times are seconds since the profile was created.")
      .def_readonly("section", &OpRecord::section)
      .def_readonly("index", &OpRecord::index, "Index of the op in its section.")
      .def_readonly("begin", &OpRecord::begin)
      .def_readonly("end", &OpRecord::end)
      .def_readonly("is_continued", &OpRecord::is_continued,
                    "True if an earlier part of the op was recorded.")
      .def_readonly("cost", &OpRecord::cost, "Cost of the whole op; recorded with its last part.")
      .def_readonly(
          "busy_seconds", &OpRecord::busy_seconds,
          "For each thread, the time in which it ran a part of the op; empty if threads take no part.");
  py::class_<StepRecord>(module, "StepRecord", "One step: its ops one after another, within [begin, end].")
      .def_readonly("begin", &StepRecord::begin)
      .def_readonly("end", &StepRecord::end)
      .def_readonly("num_tokens", &StepRecord::num_tokens)
      .def_readonly("num_sequences", &StepRecord::num_sequences)
      .def_readonly("num_adapters", &StepRecord::num_adapters, "Different ones.")
      .def_readonly("num_logit_rows", &StepRecord::num_logit_rows)
      .def_readonly("ops", &StepRecord::ops);
  py::class_<StepProfile, std::shared_ptr<StepProfile>>(module, "StepProfile",
                                                        "Records of an engine's newest steps.")
      .def(py::init<std::size_t>(), py::arg("max_steps"),
           "Keeps the newest max_steps records. Raises ConfigError for 0.")
      .def("take_steps", &StepProfile::take_steps, "Returns the records since the last call, oldest first.");
}

}  // namespace adaptrt::bindings
