"""Launches the kernels of plugin nodes on arrays, as TensorRT does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from adaptrt._core import DType
from adaptrt.plugins import DORA, LORA, PAGED_ATTENTION, Plugin
from adaptrt.plugins.kernel_node import KernelNode

# Arguments of the kernels' workspace_bytes, in order.
WORKSPACE_SIZES = {LORA.name: ("tokens",), DORA.name: ("tokens",), PAGED_ATTENTION.name: ("tokens", "sequences")}


def workspace_bytes(node: KernelNode, plugin: Plugin, dtype: DType, sizes: Mapping[str, int]) -> int:
    """Returns the workspace size in bytes that the kernel states. Plans reserve the definition's workspace_bytes."""
    return node.kernel(dtype).workspace_bytes(*(sizes[name] for name in WORKSPACE_SIZES[plugin.name]))


def launch(
    node: KernelNode,
    dtype: DType,
    shapes: Sequence[Sequence[int]],
    inputs: Sequence[int],
    outputs: Sequence[int],
    workspace: int,
    stream: int = 0,
) -> None:
    """Calls the node's launch() with the sizes of the inputs' shapes."""
    sizes = [shapes[index][axis] for index, axis in node.size_places]
    node.launch(dtype, sizes, inputs, outputs, workspace, stream)
