"""The kernels' own API against the definitions: creation, calls, and workspace sizes."""

from __future__ import annotations

from typing import Any

import adaptrt_cuda_emulated
import numpy as np
import pytest

from adaptrt._core import ConfigError, DType
from adaptrt.plugins import DORA, LORA, PAGED_ATTENTION, Plugin
from adaptrt.plugins.adapter_tables import NUM_MODULES
from adaptrt.plugins.kernel_node import KernelNode
from support.kernel_launch import launch, workspace_bytes

RNG = np.random.default_rng(3)


def lora_attributes(max_rank: int, *out_sizes: int) -> dict[str, Any]:
    return {"layer": 0, "module_ids": list(range(1, 1 + len(out_sizes))), "out_sizes": out_sizes, "max_rank": max_rank}


def heads(num_heads: int, num_kv_heads: int, head_dim: int) -> dict[str, Any]:
    counts = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    return {"layer": 0, **counts, "scale": 0.125, "sliding_window": 0, "softcap": 0.0}


@pytest.mark.parametrize(
    ("plugin", "attributes"),
    [
        *(
            (plugin, lora_attributes(*sizes))
            for plugin in (LORA, DORA)
            for sizes in ((1, 5), (8, 64, 16, 16), (250, 7))
        ),
        *(
            (PAGED_ATTENTION, heads(*sizes))
            for sizes in ((1, 1, 64), (32, 8, 128), (14, 2, 80), (3, 3, 12), (64, 1, 256))
        ),
    ],
)
@pytest.mark.parametrize("tokens", [1, 37, 8192])
@pytest.mark.parametrize("sequences", [1, 3, 64, 2048])
def test_a_plan_sets_aside_what_the_kernel_asks_for(
    plugin: Plugin, attributes: dict[str, Any], tokens: int, sequences: int
) -> None:
    sizes = {"tokens": tokens, "sequences": sequences}
    node = KernelNode(plugin, attributes, adaptrt_cuda_emulated)
    reserved = plugin.workspace_bytes(sizes, attributes)
    needed = workspace_bytes(node, plugin, DType.BFLOAT16, sizes)
    assert 0 < needed <= reserved
    if plugin is not PAGED_ATTENTION:
        assert needed == reserved


def test_a_node_runs_its_kernel() -> None:
    """Runs one token of an adapter and one of the base model, with addresses in the definition's order."""
    attributes = lora_attributes(4, 6)
    a, b = RNG.standard_normal((3, 8)).astype(np.float16), RNG.standard_normal((6, 3)).astype(np.float16)
    magnitude = np.full(6, 2, np.float32)
    ranks, pointers = np.zeros((1, 1, NUM_MODULES), np.int32), np.zeros((1, 1, NUM_MODULES, 3), np.int64)
    ranks[0, 0, 1] = 3
    pointers[0, 0, 1] = [a.ctypes.data, b.ctypes.data, magnitude.ctypes.data]
    inputs = [
        RNG.standard_normal((2, 8)).astype(np.float16),
        RNG.standard_normal((2, 6)).astype(np.float16),
        np.asarray([0, 1, 2], np.int32),
        np.asarray([0, -1], np.int32),
        ranks,
        pointers,
    ]
    for plugin in (LORA, DORA):
        node = KernelNode(plugin, attributes, adaptrt_cuda_emulated)
        assert node.kernel(DType.FLOAT16) is node.kernel(DType.FLOAT16)
        y = np.full((2, 6), np.nan, np.float16)
        workspace = np.full(plugin.workspace_bytes({"tokens": 2}, attributes), 0xFF, np.uint8)
        shapes = [array.shape for array in inputs]
        addresses = [array.ctypes.data for array in inputs]
        launch(node, DType.FLOAT16, shapes, addresses, [y.ctypes.data], workspace.ctypes.data)
        (expected,) = plugin.evaluate(inputs, attributes)
        # The tolerance covers float32 sums in different orders, rounded to float16.
        np.testing.assert_allclose(y.astype(np.float32), expected.astype(np.float32), atol=0.02)
        assert y[1].tobytes() == inputs[1][1].tobytes()


def test_a_type_without_kernels_is_refused() -> None:
    with pytest.raises(ConfigError, match="float32"):
        KernelNode(LORA, lora_attributes(4, 6), adaptrt_cuda_emulated).kernel(DType.FLOAT32)
