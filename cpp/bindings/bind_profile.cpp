#include <pybind11/native_enum.h>
#include <pybind11/stl.h>

#include <memory>

#include "adaptrt/engine/step_profile.h"
#include "bindings.h"

namespace py = pybind11;

namespace adaptrt::bindings {

void bind_profile(py::module_& module) {
  py::native_enum<StepSection>(module, "StepSection", "enum.Enum", "Which part of a step an op belongs to.")
      .value("ENCODER", StepSection::kEncoder, "Program.encoder, in steps with encoder inputs.")
      .value("BODY", StepSection::kBody, "Program.body.")
      .value("HEAD", StepSection::kHead, "Program.head, once for each slice of logit rows.")
      .value("SINK", StepSection::kSink, "Whoever takes the logits: in an executor, sampling.")
      .value("RANKS", StepSection::kRanks,
             "What rank 0 of several does beside and between its own ops: the index is a RankWork.")
      .finalize();
  py::native_enum<RankWork>(module, "RankWork", "enum.IntEnum", "Of StepSection.RANKS.")
      .value("COMMANDS", RankWork::kCommands,
             "Sends the step, and adapters that it needs, to the other ranks.")
      .value("RESULTS", RankWork::kResults,
             "Waits for what the last stage of a pipeline makes, and receives it.")
      .value("LOW_RANK_EXCHANGE", RankWork::kLowRankExchange,
             "Exchanges x A^T of fully sharded adapters, in the middle of a linear layer or of experts.")
      .finalize();
  py::class_<OpCost>(module, "OpCost", "What an op must move and multiply at least: every element once.")
      .def_readonly("weight_bytes", &OpCost::weight_bytes, "Of base weights, norms and biases.")
      .def_readonly("adapter_bytes", &OpCost::adapter_bytes, "Of the different adapters of the step.")
      .def_readonly("kv_bytes", &OpCost::kv_bytes, "Of the keys and values that are read and written.")
      .def_readonly("activation_bytes", &OpCost::activation_bytes,
                    "Of the buffers that are read and written.")
      .def_readonly("flops", &OpCost::flops,
                    "Of products with base weights and of attention; a multiply-add is two.")
      .def_readonly("adapter_flops", &OpCost::adapter_flops, "Of products with adapters.");
  py::class_<OpRecord>(
      module, "OpRecord",
      "One op of one step, or a part of it: between its parts is what ranks exchange in the middle. "
      "Times are seconds since the profile was made.")
      .def_readonly("section", &OpRecord::section)
      .def_readonly("index", &OpRecord::index, "Into the section's ops.")
      .def_readonly("begin", &OpRecord::begin)
      .def_readonly("end", &OpRecord::end)
      .def_readonly("is_continued", &OpRecord::is_continued,
                    "Whether another part of the op was recorded before this one.")
      .def_readonly("cost", &OpRecord::cost, "Of the whole op, with the last of its parts.")
      .def_readonly(
          "busy_seconds", &OpRecord::busy_seconds,
          "By thread: the time in which it ran a part of the op. Empty where threads have no part.");
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
           "Keeps max_steps records; older ones make room. Raises ConfigError for 0.")
      .def("take_steps", &StepProfile::take_steps, "The records since the last call, oldest first.");
}

}  // namespace adaptrt::bindings
