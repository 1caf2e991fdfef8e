"""A plugin node at run time: its kernel, and how input shapes determine a launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from .._core import DType
from .definition import Plugin
from .dora import DORA
from .lora import LORA
from .paged_attention import PAGED_ATTENTION
from .sizes import places_of


class Kernel(Protocol):
    """A kernel of one node."""

    def enqueue(self, *arguments: Any) -> None:
        """Enqueues a launch. Arguments: sizes, addresses of inputs, outputs and workspace, and the stream."""


class KernelModule(Protocol):
    """adaptrt._cuda, or another module with the same kernels."""

    LoraKernel: Callable[..., Kernel]
    PagedAttentionKernel: Callable[..., Kernel]


@dataclass(frozen=True)
class _Binding:
    """How to create and call a plugin's kernel."""

    make: Callable[[KernelModule, int, Mapping[str, Any]], Kernel]
    sizes: tuple[str, ...]
    """Named dimensions whose sizes enqueue() takes, in this order."""


def _make_lora(kernels: KernelModule, dtype: int, attributes: Mapping[str, Any], *, dora: bool) -> Kernel:
    names = ("layer", "module_ids", "out_sizes", "max_rank")
    return kernels.LoraKernel(dtype, *(attributes[name] for name in names), dora)


def _make_attention(kernels: KernelModule, dtype: int, attributes: Mapping[str, Any]) -> Kernel:
    names = ("num_heads", "num_kv_heads", "head_dim", "scale", "sliding_window", "softcap")
    return kernels.PagedAttentionKernel(dtype, *(attributes[name] for name in names))


_LORA_SIZES: Final = ("tokens", "in", "sequences", "layers")
_BINDINGS: Final = {
    LORA.name: _Binding(lambda *made: _make_lora(*made, dora=False), _LORA_SIZES),
    DORA.name: _Binding(lambda *made: _make_lora(*made, dora=True), _LORA_SIZES),
    PAGED_ATTENTION.name: _Binding(
        _make_attention,
        ("tokens", "sequences", "max_blocks", "tokens_per_block", "half"),
    ),
}


class KernelNode:
    """A node's kernel. It has no state between launches, so execution contexts share it."""

    def __init__(self, plugin: Plugin, attributes: Mapping[str, Any], kernels: KernelModule) -> None:
        """Creates no kernel yet, because its type depends on the tensors."""
        self._attributes = dict(attributes)
        self._module = kernels
        self._binding = _BINDINGS[plugin.name]
        self.size_places = places_of(plugin, self._binding.sizes)
        """(input, axis) of each size that launch() takes."""
        self._kernels: dict[DType, Kernel] = {}

    def kernel(self, dtype: DType) -> Kernel:
        """The kernel for tensors of this type; created once. Raises EngineError for an unsupported type."""
        kernel = self._kernels.get(dtype)
        if kernel is None:
            kernel = self._binding.make(self._module, dtype.value, self._attributes)
            self._kernels[dtype] = kernel
        return kernel

    def launch(
        self,
        dtype: DType,
        sizes: Sequence[int],
        inputs: Sequence[int],
        outputs: Sequence[int],
        workspace: int,
        stream: int,
    ) -> None:
        """Enqueues the kernel on a stream. Addresses are device addresses, in the definition's order.

        Raises StepError if the launch fails.
        """
        self.kernel(dtype).enqueue(*sizes, inputs, outputs, workspace, stream)
