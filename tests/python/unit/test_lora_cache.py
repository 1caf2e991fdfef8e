"""Arrays and tensors of every kind that requests pass to the LoRA cache, and the form in which they return."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from adaptrt import _core
from support.lora_tensors import NUMPY_TYPES, check_device, random_row, small_layout, to_tensors

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def make_rows(dtype: np.dtype) -> list[Any]:
    rng = np.random.default_rng(1)
    return [random_row(rng, "attn_qkv", 0, 3, True, dtype), random_row(rng, "mlp_gate", 1, 2, False, dtype)]


def make_cache(dtype: _core.DType = _core.DType.FLOAT32) -> _core.LoraCache:
    return _core.LoraCache(small_layout(dtype), _core.LoraCacheSizes(1 << 20, 4096, 8))


def check_stored(weights: Any, config: Any, rows: list[Any], engine: _core.DType = _core.DType.FLOAT32) -> None:
    cache = make_cache(engine)
    adapter = cache.admit(_core.LoraConfig(7, weights, config))
    lease = cache.acquire(adapter)
    assert lease is not None
    check_device(cache, lease, rows, NUMPY_TYPES[engine])


@pytest.mark.parametrize("engine", NUMPY_TYPES)
@pytest.mark.parametrize("sent", NUMPY_TYPES.values(), ids=str)
def test_every_type_serves_every_engine(engine: _core.DType, sent: np.dtype) -> None:
    rows = make_rows(sent)
    check_stored(*to_tensors(rows), rows, engine)


@pytest.mark.parametrize("leading_one", [False, True])
@pytest.mark.parametrize("columns", [3, 4])
def test_shapes_of_tensorrt_llm(leading_one: bool, columns: int) -> None:
    rows = make_rows(np.dtype(np.float16))[1:]
    weights, config = to_tensors(rows, padding=5)
    config = config[:, :columns]
    if leading_one:
        weights, config = weights[None], config[None]
    check_stored(weights, config, rows)


def test_bfloat16_as_numpy_loads_it() -> None:
    rows = make_rows(BFLOAT16)
    weights, config = to_tensors(rows)
    as_void = weights.view("V2")
    assert _core.LoraConfig(7, as_void, config).weights.dtype == np.dtype("V2")
    check_stored(as_void, config, rows)


def test_arrays_that_are_not_contiguous_are_copied() -> None:
    rows = make_rows(np.dtype(np.float32))
    weights, config = to_tensors(rows)
    wide = np.zeros((weights.shape[0], 2 * weights.shape[1]), np.float32)
    wide[:, ::2] = weights
    check_stored(wide[:, ::2], np.asfortranarray(config), rows)
    check_stored(weights[::-1][::-1], config, rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_torch_tensors(dtype: torch.dtype) -> None:
    rows = make_rows(np.dtype(np.float32))
    weights, config = to_tensors(rows)
    tensor = torch.from_numpy(weights).to(dtype).requires_grad_()
    numpy_type = {torch.float32: np.float32, torch.float16: np.float16, torch.bfloat16: BFLOAT16}[dtype]
    rounded = [
        type(row)(
            row.module,
            row.layer,
            row.a.astype(numpy_type),
            row.b.astype(numpy_type),
            None if row.magnitude is None else row.magnitude.astype(numpy_type),
            None if row.shift is None else row.shift.astype(numpy_type),
        )
        for row in rows
    ]
    check_stored(tensor, torch.from_numpy(config), rounded)
    check_stored(tensor.T.contiguous().T, torch.from_numpy(config), rounded)


@pytest.mark.parametrize(
    ("weights_type", "config_type", "says"),
    [
        ("float64", "int32", "weights is of type float64; accepted: float32, float16, bfloat16"),
        ("int8", "int32", "weights is of type int8"),
        (">f4", "int32", "weights is of type >f4"),
        ("O", "int32", "weights is of type object"),
        ("float32", "int64", "config is of type int64; accepted: int32"),
        ("float32", "uint32", "config is of type uint32"),
        ("float32", "float32", "config is of type float32"),
    ],
)
def test_other_types_are_refused_by_name(weights_type: str, config_type: str, says: str) -> None:
    weights, config = to_tensors(make_rows(np.dtype(np.float32)))
    cache = make_cache()
    before = cache.stats()
    with pytest.raises(_core.AdapterError, match=says):
        cache.admit(_core.LoraConfig(7, weights.astype(weights_type), config.astype(config_type)))
    assert cache.stats() == before
    assert cache.list() == []


def test_a_row_that_repeats_elements_is_refused_before_it_is_copied() -> None:
    huge = np.broadcast_to(np.float32(0), (1 << 20, 1 << 40))
    with pytest.raises(_core.AdapterError, match="weights is a view that repeats elements"):
        _core.LoraConfig(7, huge, np.zeros((2, 4), np.int32))
    # A broadcast dimension of size one repeats no element.
    rows = make_rows(np.dtype(np.float32))
    weights, config = to_tensors(rows)
    check_stored(np.broadcast_to(weights, (1, *weights.shape)), config, rows)


def test_values_that_are_no_arrays_are_refused() -> None:
    with pytest.raises(TypeError, match="weights must be a NumPy array, a torch tensor or None, not list"):
        _core.LoraConfig(7, [[1.0]], np.zeros((1, 4), np.int32))
    with pytest.raises(_core.AdapterError, match="weights is on device meta; accepted: cpu"):
        _core.LoraConfig(7, torch.empty(1, 1, device="meta"), np.zeros((1, 4), np.int32))
    with pytest.raises(TypeError):
        _core.LoraConfig(-1)


def test_empty_arrays_are_refused() -> None:
    with pytest.raises(_core.AdapterError, match="config has no rows"):
        make_cache().admit(_core.LoraConfig(7, np.zeros((0, 5), np.float32), np.zeros((0, 4), np.int32)))


def test_lora_config_keeps_arrays_without_copying_and_pickles() -> None:
    weights, config = to_tensors(make_rows(np.dtype(np.float16)))
    lora = _core.LoraConfig(task_id=7, weights=weights, config=config, replace=True)
    assert lora.weights is weights
    assert lora.config is config
    for other in (pickle.loads(pickle.dumps(lora)), copy.deepcopy(lora)):
        assert (other.task_id, other.replace) == (7, True)
        np.testing.assert_array_equal(other.weights, weights)
        np.testing.assert_array_equal(other.config, config)
    assert "weights=[2, " in repr(lora)
    assert "float16" in repr(lora)
    assert (_core.LoraConfig(3).weights, _core.LoraConfig(3).config) == (None, None)
    assert _core.LoraConfig(2**64 - 1).task_id == 2**64 - 1


def test_arrays_are_released_when_the_config_goes_and_the_cache_has_its_own_copy() -> None:
    rows = make_rows(np.dtype(np.float32))
    weights, config = to_tensors(rows)
    reference = weakref.ref(weights)
    cache = make_cache()
    lora = _core.LoraConfig(7, weights, config)
    adapter = cache.admit(lora)
    weights[:] = np.nan
    del lora, weights
    gc.collect()
    assert reference() is None
    lease = cache.acquire(adapter)
    assert lease is not None
    check_device(cache, lease, rows, np.dtype(np.float32))


def test_peft_cache_config_has_tensorrt_llms_defaults() -> None:
    config = _core.PeftCacheConfig()
    assert repr(config) == (
        "PeftCacheConfig(num_host_module_layer=0, num_device_module_layer=0, optimal_adapter_size=8, "
        "max_adapter_size=64, num_put_workers=1, num_ensure_workers=1, num_copy_streams=1, "
        "max_pages_per_block_host=24, max_pages_per_block_device=8, device_cache_percent=None, "
        "host_cache_size=None, lora_prefetch_dir=None, lora_storage='exact')"
    )
    assert config.validate() == []
    config.device_cache_percent = 0.25
    assert config != _core.PeftCacheConfig()
    assert pickle.loads(pickle.dumps(config)) == config
    config.num_put_workers = 0
    config.optimal_adapter_size = 0
    assert len(config.validate()) == 2
    with pytest.raises(_core.ConfigError, match=r"optimal_adapter_size is 0.*num_put_workers is 0"):
        _core.resolve_cache_sizes(config, small_layout(), 1 << 30)


def test_resolved_sizes_make_a_cache() -> None:
    layout = small_layout()
    sizes = _core.resolve_cache_sizes(_core.PeftCacheConfig(host_cache_size=1 << 16), layout, 1 << 30)
    stats = _core.LoraCache(layout, sizes).stats()
    assert (stats.host_bytes_total, stats.page_bytes) == (1 << 16, sizes.page_bytes)
    assert stats.device_pages_total == sizes.device_pages
