#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "adaptrt/mpi/mpi_communicator.h"
#include "adaptrt/sharded/remote_engine.h"
#include "adaptrt/sharded/sharded_engine.h"
#include "adaptrt/socket/socket_communicator.h"
#include "bindings.h"
#include "engine_handle.h"
#include "waiting.h"

namespace py = pybind11;

namespace adaptrt::bindings {
namespace {

/// Rank 0 of an engine of several ranks.
class ShardedEngine : public EngineHandle {
 public:
  ShardedEngine(EngineHandle& local, std::shared_ptr<Communicator> communicator,
                const std::optional<PipelineFacts>& pipeline,
                std::optional<std::shared_ptr<StepProfile>> profile) {
    without_gil([&] {
      Claim claim(local);
      hold(make_sharded_engine(local.engine(), std::move(communicator), pipeline,
                               std::move(profile).value_or(nullptr)));
      claim.keep();
    });
  }
};

/// An engine whose steps other processes run.
class RemoteEngine : public EngineHandle {
 public:
  explicit RemoteEngine(std::shared_ptr<Communicator> communicator) {
    without_gil([&] { hold(make_remote_engine(std::move(communicator))); });
  }
};

std::optional<std::chrono::milliseconds> milliseconds(std::optional<double> seconds) {
  if (!seconds) return std::nullopt;
  return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::duration<double>(*seconds));
}

void bind_remote_engine(py::module_& module) {
  py::class_<SocketCommunicator, Communicator, std::shared_ptr<SocketCommunicator>>(
      module, "SocketCommunicator", "Two processes that talk over a connected stream socket.")
      .def(py::init([](int socket, std::int32_t rank, const std::string& peer,
                       std::optional<double> time_limit, double time_to_explain) {
             return std::make_shared<SocketCommunicator>(socket, rank, peer, milliseconds(time_limit),
                                                         *milliseconds(time_to_explain));
           }),
           py::kw_only(), py::arg("socket"), py::arg("rank"), py::arg("peer"), py::arg("time_limit"),
           py::arg("time_to_explain"),
           "socket: a file descriptor, which this object then owns. rank: 0 or 1. peer: the other process's "
           "name in errors. time_limit: seconds without an answer after which it counts as lost; None: no "
           "limit. time_to_explain: seconds after its end in which another thread may call lose() with the "
           "reason. Raises ConfigError if the descriptor is not a socket.")
      .def(
          "lose",
          [](SocketCommunicator& self, const std::string& reason) {
            without_gil([&] { self.lose(reason); });
          },
          py::arg("reason"),
          "Declares the other process lost for a reason, and ends waits for it. No effect if it is already "
          "lost.");
  py::class_<RemoteEngine, EngineHandle>(
      module, "RemoteEngine",
      "An engine whose steps run in other processes; their leader runs serve_engine().")
      .def(py::init<std::shared_ptr<Communicator>>(), py::arg("communicator"),
           "communicator: one of two processes, on its rank 0. Raises EngineError if the leader is lost.");
  module.def(
      "serve_engine",
      [](EngineHandle& engine, Communicator& communicator) {
        without_gil([&] {
          EngineHandle::Claim(engine).keep();
          serve_engine(*engine.engine(), communicator);
        });
      },
      py::arg("engine"), py::arg("communicator"),
      "Runs an engine for the process on rank 0 of a communicator of two. Returns after the executor there "
      "was shut down. Raises EngineError if a process is lost.");
}

}  // namespace

void bind_ranks(py::module_& module) {
  py::class_<Communicator, std::shared_ptr<Communicator>>(module, "Communicator",
                                                          "Communication between the ranks of an engine.")
      .def_property_readonly("rank", &Communicator::rank)
      .def_property_readonly("size", &Communicator::size)
      .def_property_readonly("is_lost", &Communicator::is_lost,
                             "True if a rank failed, so that no more data can be exchanged.");
  module.def(
      "mpi_communicator",
      [](const std::string& library, std::int32_t handle_bytes, std::uint64_t communicator,
         std::uint64_t byte_type, double time_limit) {
        return make_mpi_communicator({library, handle_bytes, communicator, byte_type},
                                     *milliseconds(time_limit));
      },
      py::kw_only(), py::arg("library"), py::arg("handle_bytes"), py::arg("communicator"),
      py::arg("byte_type"), py::arg("time_limit"),
      "Communication over MPI. library: path of a shared library that is linked to MPI. communicator, "
      "byte_type: MPI's handles as numbers of handle_bytes bytes. time_limit: seconds without an answer "
      "after which a rank counts as lost. Raises ConfigError if MPI's functions are not found.");
  py::class_<PipelineFacts>(
      module, "PipelineFacts",
      "Returns the EngineInfo of an engine of several stages: the last stage's, with the smallest "
      "max_reusable_prompt_len, the sum of num_layers, and the largest bytes of a block and of states.")
      .def(py::init([](std::int64_t hidden_size, bool has_logits, std::int32_t max_reusable_prompt_len,
                       std::int32_t num_layers, std::size_t kv_block_bytes, std::size_t cross_kv_block_bytes,
                       std::size_t state_bytes) {
             return PipelineFacts{hidden_size, has_logits,     max_reusable_prompt_len,
                                  num_layers,  kv_block_bytes, cross_kv_block_bytes,
                                  state_bytes};
           }),
           py::kw_only(), py::arg("hidden_size"), py::arg("has_logits"), py::arg("max_reusable_prompt_len"),
           py::arg("num_layers"), py::arg("kv_block_bytes"), py::arg("cross_kv_block_bytes"),
           py::arg("state_bytes") = 0);
  module.def(
      "stage_layers",
      [](std::int32_t num_layers, std::int32_t num_stages, std::int32_t stage) {
        const StageLayers layers = stage_layers(num_layers, num_stages, stage);
        return py::make_tuple(layers.first, layers.count);
      },
      py::arg("num_layers"), py::arg("num_stages"), py::arg("stage"),
      "Returns (first, count) of the layers of a pipeline stage. If the layers do not divide evenly, each of "
      "the remaining ones goes to another stage, from the second to last stage backwards, as in vLLM.");
  py::class_<ShardedEngine, EngineHandle>(
      module, "ShardedEngine", "Rank 0 of an engine of several ranks; the other ranks run serve_rank().")
      .def(py::init<EngineHandle&, std::shared_ptr<Communicator>, const std::optional<PipelineFacts>&,
                    std::optional<std::shared_ptr<StepProfile>>>(),
           py::arg("local"), py::arg("communicator"), py::arg("pipeline") = py::none(),
           py::arg("profile") = py::none(),
           "profile: the profile of `local`; its records become parts of whole steps.");
  module.def(
      "serve_rank",
      [](EngineHandle& local, Communicator& communicator) {
        without_gil([&] {
          EngineHandle::Claim(local).keep();
          serve_rank(*local.engine(), communicator);
        });
      },
      py::arg("local"), py::arg("communicator"),
      "Runs the engine of a rank other than 0 for rank 0. Returns after the executor there was shut down. "
      "Raises EngineError if a rank is lost.");
  bind_remote_engine(module);
}

}  // namespace adaptrt::bindings
