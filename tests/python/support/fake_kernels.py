"""A module with the kernels' API that records its calls."""

from __future__ import annotations

from typing import Any


class _Kernel:
    def __init__(self, *arguments: Any) -> None:
        self.made_with = arguments
        self.launches: list[tuple[Any, ...]] = []

    def workspace_bytes(self, *sizes: int) -> int:
        return sum(sizes)

    def enqueue(self, *arguments: Any) -> None:
        self.launches.append(arguments)


class FakeKernels:
    """Stands in for adaptrt._cuda."""

    def __init__(self) -> None:
        self.lora: list[_Kernel] = []
        self.attention: list[_Kernel] = []

    def LoraKernel(self, *arguments: Any) -> _Kernel:
        self.lora.append(_Kernel(*arguments))
        return self.lora[-1]

    def PagedAttentionKernel(self, *arguments: Any) -> _Kernel:
        self.attention.append(_Kernel(*arguments))
        return self.attention[-1]
