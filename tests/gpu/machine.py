"""The machine for the checks: an NVIDIA GPU, or host memory with emulated kernels, to test the checks themselves."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from adaptrt import DType

KERNEL_DTYPES = {torch.float16: DType.FLOAT16, torch.bfloat16: DType.BFLOAT16}
"""Types that the kernels support."""
NAN_BITS = 0xFF
"""Fill byte of memory that must not be read: NaN as float32, float16 and bfloat16, and -1 as an integer."""


@dataclass(frozen=True)
class Machine:
    """A torch device, and the module whose kernels run on its memory."""

    kernels: Any
    device: torch.device

    @classmethod
    def gpu(cls) -> Machine:
        """Returns the first GPU, with adaptrt._cuda."""
        return cls(importlib.import_module("adaptrt._cuda"), torch.device("cuda", 0))

    @classmethod
    def emulated(cls) -> Machine:
        """Returns host memory, with the test module adaptrt_cuda_emulated, which must be on the import path."""
        return cls(importlib.import_module("adaptrt_cuda_emulated"), torch.device("cpu"))

    @property
    def is_gpu(self) -> bool:
        """True if timings are meaningful."""
        return bool(self.device.type == "cuda")

    @property
    def has_hopper_instructions(self) -> bool:
        """True if kernels for compute capability 9.0 run; the emulation has their instructions."""
        return not self.is_gpu or torch.cuda.get_device_capability(self.device) == (9, 0)

    def stream(self) -> int:
        """Returns torch's current stream as the kernels' argument."""
        return int(torch.cuda.current_stream(self.device).cuda_stream) if self.is_gpu else 0

    def synchronize(self) -> None:
        """Waits for all work, and raises its errors."""
        if self.is_gpu:
            torch.cuda.synchronize(self.device)

    def poisoned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Returns a tensor of NaN (or -1)."""
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        tensor.view(torch.uint8).fill_(NAN_BITS)
        return tensor

    def capture(self, work: Callable[[], object]) -> torch.cuda.CUDAGraph:
        """Runs `work` once, and then captures it as a CUDA graph."""
        work()
        self.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return graph

    def seconds(self, work: Callable[[], object], repeats: int) -> float:
        """Returns the seconds per call of `work` in a CUDA graph: the fastest of five runs of `repeats` calls each."""
        graph = self.capture(work)
        graph.replay()
        times = []
        for _ in range(5):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(repeats):
                graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3 / repeats)
        return float(min(times))
