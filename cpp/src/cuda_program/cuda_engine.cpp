#include "adaptrt/cuda_program/cuda_engine.h"

#include <utility>

#include "cuda_model.h"

namespace adaptrt {

std::unique_ptr<Engine> make_cuda_engine(const Program& program, std::shared_ptr<Device> device,
                                         GpuEngineOptions options, std::size_t weight_memory) {
  program.validate().throw_if_any<EngineError>("the engine's program is inconsistent");
  problems_on_cuda(program).throw_if_any<EngineError>("the engine cannot run on a GPU");
  return make_gpu_engine(describe(program), std::make_unique<CudaModel>(program, weight_memory),
                         std::move(device), options);
}

}  // namespace adaptrt
