"""Damaged adapters are refused by name without a change, or stored unchanged; they never crash the cache."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptrt import _core
from support.lora_tensors import NUMPY_TYPES, check_device, random_row, small_layout, to_tensors

EXTREMES = st.sampled_from([-(2**31), -1, 0, 1, 2, 3, 4, 5, 8, 16, 18, 19, 255, 2**31 - 1])
SHAPES = st.lists(st.sampled_from([0, 1, 2, 3, 4, 60, 2**20, 2**31, 2**62]), max_size=4)


def refused_or_stored(weights: np.ndarray, config: np.ndarray, engine: _core.DType, storage: str = "exact") -> bool:
    """Returns whether the adapter was stored; checks that a refusal leaves the cache unchanged."""
    kept = _core.PeftCacheConfig(lora_storage=storage)
    cache = _core.LoraCache(small_layout(engine), _core.LoraCacheSizes(1 << 16, 2048, 4), config=kept)
    before = cache.stats()
    request = _core.LoraConfig(7, weights, config)
    try:
        adapter = cache.admit(request)
    except _core.AdapterError as error:
        refusal = str(error)
        assert refusal
        assert cache.stats() == before
        assert cache.list() == []
        return False
    assert cache.acquire(adapter) is not None
    assert cache.check_invariants() == []
    return True


@settings(max_examples=300, deadline=None)
@given(
    engine=st.sampled_from(list(NUMPY_TYPES)),
    changes=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), EXTREMES), max_size=3),
    noise=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 200), st.integers(0, 2**16 - 1)), max_size=3),
    sent=st.sampled_from([np.dtype(np.float16), np.dtype("V2")]),
    storage=st.sampled_from(["exact", "int8"]),
)
def test_damaged_fields_and_elements(
    engine: _core.DType,
    changes: list[tuple[int, int, int]],
    noise: list[tuple[int, int, int]],
    sent: np.dtype,
    storage: str,
) -> None:
    rng = np.random.default_rng(0)
    half = np.dtype(np.float16)
    rows = [
        random_row(rng, "attn_q", 0, 2, False, half),
        random_row(rng, "mlp_gate_up", 1, 4, True, half),
        random_row(rng, "attn_dense", 1, 1, True, half),
    ]
    weights, config = to_tensors(rows)
    for row, column, value in changes:
        config[row, column] = value
    bits = weights.view(np.uint16)
    for row, column, value in noise:
        bits[row, column % bits.shape[1]] = value
    stored = refused_or_stored(bits.view(sent), config, engine, storage)
    assert stored or changes or noise


@settings(max_examples=300, deadline=None)
@given(weights_shape=SHAPES, config_shape=SHAPES, engine=st.sampled_from(list(NUMPY_TYPES)))
def test_declared_shapes_of_any_size(weights_shape: list[int], config_shape: list[int], engine: _core.DType) -> None:
    try:
        weights = np.broadcast_to(np.float32(0), weights_shape)
        config = np.broadcast_to(np.int32(1), config_shape)
    except ValueError:  # larger than NumPy's own limit
        return
    try:
        refused_or_stored(weights, config, engine)
    except _core.AdapterError as error:  # from LoraConfig: a view that repeats elements
        repeats = str(error)
        assert "repeats elements" in repeats


def test_an_undamaged_adapter_is_stored() -> None:
    rows = [random_row(np.random.default_rng(0), "mlp_gate_up", 1, 4, True, np.dtype(np.float32))]
    cache = _core.LoraCache(small_layout(), _core.LoraCacheSizes(1 << 16, 2048, 4))
    lease = cache.acquire(cache.admit(_core.LoraConfig(7, *to_tensors(rows))))
    assert lease is not None
    check_device(cache, lease, rows, np.dtype(np.float32))
