#pragma once

#include <memory>

#include "adaptrt/device/device.h"
#include "adaptrt/engine/engine.h"
#include "adaptrt/gpu/gpu_model.h"
#include "adaptrt/gpu/gpu_model_description.h"

namespace adaptrt {

struct GpuEngineOptions {
  /// Run decode steps as CUDA graphs. There is one graph for each batch size 1, 2, 4, 8, ... max_batch_size
  /// and each power of two of blocks per sequence; models that skip unused adapters have another one for
  /// steps without adapters. A graph is captured when a step first needs it. Steps are
  /// padded with sequences of one token that have no block.
  bool cuda_graphs = true;
  /// Allow begin_ahead(), if the model finds best tokens.
  bool look_ahead = true;
};

/// Makes the engine that runs `model` on `device`.
///
/// A step makes one copy to the device (and one for each adapter new in the tables), runs the model or its
/// graph once, and copies the wanted logit rows and best tokens to the host. begin_step() enqueues all of
/// this and does not wait for the device. begin_ahead() does the same for the next step; the host memory of
/// arrays and results exists twice for it. Penalties, log probabilities and bit-exact sampling run on the
/// host with the same code as the CPU engine, and a request may want its logits anyway. A step with more
/// logit rows than the model's limit runs once for each slice of rows; each run writes the same values to the
/// KV pool.
///
/// Throws EngineError with all of description.validate()'s problems, ConfigError if the device has no memory
/// left, StepError if the device fails. After a StepError from step(), the engine can run the next step;
/// after an EngineError the device is lost.
[[nodiscard]] std::unique_ptr<Engine> make_gpu_engine(GpuModelDescription description,
                                                      std::unique_ptr<GpuModel> model,
                                                      std::shared_ptr<Device> device,
                                                      GpuEngineOptions options);

}  // namespace adaptrt
