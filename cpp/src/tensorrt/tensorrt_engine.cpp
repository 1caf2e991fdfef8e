#include "adaptrt/tensorrt/tensorrt_engine.h"

#include <utility>

#include "tensorrt_model.h"

namespace adaptrt {

std::unique_ptr<Engine> make_tensorrt_engine(TensorRtProgram program, std::shared_ptr<Device> device,
                                             TensorRtContexts contexts, GpuEngineOptions options) {
  auto model = std::make_unique<TensorRtModel>(std::move(program.weights), std::move(contexts));
  return make_gpu_engine(std::move(program.model), std::move(model), std::move(device), options);
}

}  // namespace adaptrt
