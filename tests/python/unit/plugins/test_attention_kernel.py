"""The CUDA kernels of PagedAttention, emulated on the host, against the definition's reference maths."""

from __future__ import annotations

from typing import Any

import adaptrt_cuda_emulated
import ml_dtypes
import numpy as np
import pytest

from adaptrt import ConfigError
from adaptrt._core import DType
from adaptrt.plugins.definition import Array
from adaptrt.plugins.paged_attention import PAGED_ATTENTION

DTYPES = {np.dtype(np.float16): DType.FLOAT16, np.dtype(ml_dtypes.bfloat16): DType.BFLOAT16}

# Unlike the kernels, the reference does not round rotated queries and attention weights to the engine's type.
TOLERANCE = {DType.FLOAT16: 4e-3, DType.BFLOAT16: 3e-2}

KERNEL_ATTRIBUTES = ("num_heads", "num_kv_heads", "head_dim", "scale", "sliding_window", "softcap")
POISON = 0xFF


def random_inputs(rng: np.random.Generator, attributes: dict[str, Any], dtype: np.dtype[Any]) -> list[Array]:
    """Returns a chunk of 20 tokens after 19, a decode step after 70, and a prompt of 5, with blocks of 16 tokens."""
    past, tokens, tokens_per_block = (19, 70, 0), (20, 1, 5), 16
    heads, kv_heads, head_dim = (attributes[name] for name in ("num_heads", "num_kv_heads", "head_dim"))
    positions = np.concatenate([before + np.arange(count) for before, count in zip(past, tokens, strict=True)])
    angles = rng.uniform(-3, 3, (len(positions), head_dim // 2)).astype(np.float32)

    def rows(width: int) -> Array:
        return rng.standard_normal((len(positions), width)).astype(dtype)

    return [
        rows(heads * head_dim),
        rows(kv_heads * head_dim),
        rows(kv_heads * head_dim),
        rng.standard_normal((18, 2, kv_heads, tokens_per_block, head_dim)).astype(dtype),
        rng.permutation(18).astype(np.int32).reshape(3, 6),
        np.concatenate([[0], np.cumsum(tokens)]).astype(np.int32),
        positions.astype(np.int32),
        np.cos(angles),
        np.sin(angles),
    ]


def run_kernel(attributes: dict[str, Any], inputs: list[Array]) -> tuple[Array, Array]:
    """Runs the kernel, which writes to the pool of `inputs`, and returns its results."""
    pool, tables, cosine = inputs[3], inputs[4], inputs[7]
    tokens, sequences = inputs[0].shape[0], len(tables)
    kernel = adaptrt_cuda_emulated.PagedAttentionKernel(
        DTYPES[inputs[0].dtype].value, *(attributes[name] for name in KERNEL_ATTRIBUTES)
    )
    attended = np.full(inputs[0].nbytes, POISON, np.uint8).view(inputs[0].dtype).reshape(inputs[0].shape)
    workspace = np.full(kernel.workspace_bytes(tokens, sequences), POISON, np.uint8)
    kernel.enqueue(
        tokens,
        sequences,
        tables.shape[1],
        pool.shape[3],
        cosine.shape[1],
        [array.ctypes.data for array in inputs],
        [attended.ctypes.data, pool.ctypes.data],
        workspace.ctypes.data,
        0,
    )
    return attended, pool


@pytest.mark.parametrize("head_dim", [12, 64, 128])
@pytest.mark.parametrize("window", [0, 24])
@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernels_equal_the_definition(dtype: np.dtype[Any], softcap: float, window: int, head_dim: int) -> None:
    seed = np.random.SeedSequence().entropy
    print(f"seed {seed}")
    attributes = {
        "layer": 0,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": head_dim,
        "scale": head_dim**-0.5,
        "sliding_window": window,
        "softcap": softcap,
    }
    inputs = random_inputs(np.random.default_rng(seed), attributes, dtype)
    expected, expected_pool = PAGED_ATTENTION.evaluate(inputs, attributes)
    attended, pool = run_kernel(attributes, [array.copy() for array in inputs])
    np.testing.assert_array_equal(pool, expected_pool)
    np.testing.assert_allclose(
        attended.astype(np.float32), expected.astype(np.float32), rtol=0, atol=TOLERANCE[DTYPES[dtype]]
    )


def test_a_prefill_kernel_without_the_head_dim_is_refused() -> None:
    with pytest.raises(ConfigError, match="hopper_prefill is true for head_dim 80; it needs 64, 96 or 128"):
        adaptrt_cuda_emulated.PagedAttentionKernel(DType.FLOAT16.value, 2, 1, 80, 0.125, 0, 0.0, hopper_prefill=True)


def test_wrong_addresses_are_refused() -> None:
    kernel = adaptrt_cuda_emulated.PagedAttentionKernel(DType.FLOAT16.value, 2, 1, 64, 0.125, 0, 0.0)
    with pytest.raises(ConfigError, match="8 addresses; expected 9: q, k, v, kv_pool"):
        kernel.enqueue(1, 1, 1, 16, 32, [256] * 8, [256] * 2, 0, 0)
    with pytest.raises(ConfigError, match="kv_pool_out must be at the address of kv_pool"):
        kernel.enqueue(1, 1, 1, 16, 32, [256] * 9, [256, 512], 0, 0)


def test_a_bad_configuration_is_refused() -> None:
    with pytest.raises(ConfigError, match="dtype is float32; it must be float16 or bfloat16"):
        adaptrt_cuda_emulated.PagedAttentionKernel(DType.FLOAT32.value, 2, 1, 64, 0.125, 0, 0.0)
    with pytest.raises(ConfigError, match="dtype 9 is not a value of DType"):
        adaptrt_cuda_emulated.PagedAttentionKernel(9, 2, 1, 64, 0.125, 0, 0.0)
