#include "cuda_stream.h"

#include "cuda_status.h"

namespace adaptrt::cuda {
namespace {

class CudaGraph final : public CapturedGraph {
 public:
  explicit CudaGraph(cudaGraph_t graph) {
    check("cudaGraphInstantiate", cudaGraphInstantiate(&graph_, graph, 0));
  }
  ~CudaGraph() override { static_cast<void>(cudaGraphExecDestroy(graph_)); }
  CudaGraph(const CudaGraph&) = delete;
  CudaGraph& operator=(const CudaGraph&) = delete;
  [[nodiscard]] cudaGraphExec_t handle() const { return graph_; }

 private:
  cudaGraphExec_t graph_ = nullptr;
};

struct DestroyGraph {
  void operator()(cudaGraph_t graph) const { static_cast<void>(cudaGraphDestroy(graph)); }
};
using CapturedWork = std::unique_ptr<std::remove_pointer_t<cudaGraph_t>, DestroyGraph>;

/// Captures the work put into the stream between construction and end().
class Capture {
 public:
  explicit Capture(cudaStream_t stream) : stream_(stream) {
    // Other threads, such as an adapter loader, may continue; their work is not captured.
    check("cudaStreamBeginCapture", cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
  }
  ~Capture() {
    if (is_open_) static_cast<void>(end());
  }
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;

  struct Result {
    cudaError_t status;
    CapturedWork work;
  };
  [[nodiscard]] Result end() {
    is_open_ = false;
    cudaGraph_t graph = nullptr;
    const cudaError_t status = cudaStreamEndCapture(stream_, &graph);
    return {status, CapturedWork(graph)};
  }

 private:
  cudaStream_t stream_;
  bool is_open_ = true;
};

}  // namespace

CudaEvent::CudaEvent(int device) : device_(device) {
  activate(device_);
  check("cudaEventCreateWithFlags",
        cudaEventCreateWithFlags(&event_, cudaEventBlockingSync | cudaEventDisableTiming));
}

CudaEvent::~CudaEvent() {
  static_cast<void>(cudaEventDestroy(event_));
}

void CudaEvent::synchronize() {
  activate(device_);
  check("cudaEventSynchronize", cudaEventSynchronize(event_));
}

CudaStream::CudaStream(int device) : device_(device) {
  activate(device_);
  check("cudaStreamCreateWithFlags", cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
}

CudaStream::~CudaStream() {
  // Work that is still running reads memory that may be freed next.
  static_cast<void>(cudaStreamSynchronize(stream_));
  static_cast<void>(cudaStreamDestroy(stream_));
}

void CudaStream::copy_to_device(std::byte* device, const std::byte* host, std::size_t bytes) {
  if (bytes == 0) return;
  activate(device_);
  check("cudaMemcpyAsync to the GPU", cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, stream_));
}

void CudaStream::copy_to_host(std::byte* host, const std::byte* device, std::size_t bytes) {
  if (bytes == 0) return;
  activate(device_);
  check("cudaMemcpyAsync from the GPU",
        cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, stream_));
}

void CudaStream::copy_on_device(std::byte* to, const std::byte* from, std::size_t bytes) {
  if (bytes == 0) return;
  activate(device_);
  check("cudaMemcpyAsync on the GPU", cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream_));
}

void CudaStream::fill_zero(std::byte* device, std::size_t bytes) {
  if (bytes == 0) return;
  activate(device_);
  check("cudaMemsetAsync", cudaMemsetAsync(device, 0, bytes, stream_));
}

void CudaStream::record(Event& event) {
  activate(device_);
  check("cudaEventRecord", cudaEventRecord(static_cast<CudaEvent&>(event).handle(), stream_));
}

void CudaStream::wait(Event& event) {
  activate(device_);
  check("cudaStreamWaitEvent", cudaStreamWaitEvent(stream_, static_cast<CudaEvent&>(event).handle(), 0));
}

void CudaStream::synchronize() {
  activate(device_);
  check("cudaStreamSynchronize", cudaStreamSynchronize(stream_));
}

std::unique_ptr<CapturedGraph> CudaStream::capture(const std::function<void()>& work) {
  activate(device_);
  Capture capture(stream_);
  work();
  const Capture::Result result = capture.end();
  check("cudaStreamEndCapture", result.status);
  return std::make_unique<CudaGraph>(result.work.get());
}

void CudaStream::launch(CapturedGraph& graph) {
  activate(device_);
  check("cudaGraphLaunch", cudaGraphLaunch(static_cast<CudaGraph&>(graph).handle(), stream_));
}

}  // namespace adaptrt::cuda
