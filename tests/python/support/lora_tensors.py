"""Layouts and adapter tensors for tests that use only the LoRA cache."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from adaptrt import _core

MODULES = {info.name: info for info in _core.lora_modules()}
FUSED = {"attn_qkv": ("attn_q", "attn_k", "attn_v"), "mlp_gate_up": ("mlp_gate", "mlp_h_to_4h")}
SITES = (("attn_q", "attn_k", "attn_v"), ("attn_dense",), ("mlp_h_to_4h", "mlp_gate"), ("mlp_4h_to_h",))
_WIDTHS = {
    "attn_q": (8, 6), "attn_k": (8, 3), "attn_v": (8, 3), "attn_dense": (6, 8),
    "mlp_h_to_4h": (8, 10), "mlp_gate": (8, 10), "mlp_4h_to_h": (10, 8),
}  # fmt: skip
TARGETS = (*FUSED, *_WIDTHS)
NUMPY_TYPES = {
    _core.DType.FLOAT32: np.dtype(np.float32),
    _core.DType.FLOAT16: np.dtype(np.float16),
    _core.DType.BFLOAT16: np.dtype(ml_dtypes.bfloat16),
}


def sizes_of(module: str) -> tuple[int, int]:
    """Returns (in, out) of a module. All layouts here describe the same model."""
    parts = [_WIDTHS[part] for part in parts_of(module)]
    return parts[0][0], sum(out_size for _, out_size in parts)


def parts_of(module: str) -> tuple[str, ...]:
    return FUSED.get(module, (module,))


def small_layout(dtype: _core.DType = _core.DType.FLOAT32, num_layers: int = 2, max_rank: int = 4) -> _core.LoraLayout:
    """Returns a layout of every module of a few layers, with DoRA."""
    sites = [
        _core.LoraSite(
            layer=layer,
            in_size=sizes_of(parts[0])[0],
            parts=[_core.LoraPart(module=MODULES[part].id, out_size=sizes_of(part)[1]) for part in parts],
        )
        for layer in range(num_layers)
        for parts in SITES
    ]
    targets = [MODULES[name].id for name in TARGETS]
    return _core.LoraLayout(
        dtype=dtype,
        num_layers=num_layers,
        max_rank=max_rank,
        dora_enabled=True,
        target_modules=targets,
        sites=sites,
    )


@dataclass(frozen=True)
class Row:
    """One module of one layer: A[rank, in], B[out, rank], magnitude[out] or None, shift[out] or None."""

    module: str
    layer: int
    a: np.ndarray
    b: np.ndarray
    magnitude: np.ndarray | None
    shift: np.ndarray | None = None

    @property
    def vectors(self) -> int:
        """Flags in the config's last column."""
        return (self.magnitude is not None) + 2 * (self.shift is not None)

    @property
    def rank(self) -> int:
        return int(self.a.shape[0])

    def flat(self) -> np.ndarray:
        vectors = [vector for vector in (self.magnitude, self.shift) if vector is not None]
        return np.concatenate([self.a.ravel(), self.b.ravel(), *vectors])

    def parts(self) -> dict[tuple[int, int], tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray | None]]:
        """Returns {(module id, layer): (A, B, magnitude, shift)}; a fused module is split into its parts."""
        result = {}
        first = 0
        for part in parts_of(self.module):
            rows = slice(first, first + sizes_of(part)[1])
            vectors = [None if vector is None else vector[rows] for vector in (self.magnitude, self.shift)]
            result[MODULES[part].id, self.layer] = (self.a, self.b[rows], *vectors)
            first = rows.stop
        return result


def random_row(rng: np.random.Generator, module: str, layer: int, rank: int, is_dora: bool, dtype: np.dtype) -> Row:
    in_size, out_size = sizes_of(module)

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32).astype(dtype)

    magnitude = draw(out_size) if is_dora else None
    shift = draw(out_size) if rng.random() < 0.3 else None
    return Row(module, layer, draw(rank, in_size), draw(out_size, rank), magnitude, shift)


def to_tensors(rows: list[Row], padding: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Returns (weights [rows, width], config [rows, 4]) in a request's format."""
    width = max(row.flat().size for row in rows) + padding
    weights = np.zeros((len(rows), width), rows[0].a.dtype)
    for i, row in enumerate(rows):
        weights[i, : row.flat().size] = row.flat()
    config = [[MODULES[row.module].id, row.layer, row.rank, row.vectors] for row in rows]
    return weights, np.array(config, np.int32)


def check_device(cache: _core.LoraCache, lease: _core.DeviceLease, rows: list[Row], engine: np.dtype) -> None:
    """Checks that the device's pages have the sent values: matrices in the engine's type, vectors in float32."""
    expected = {}
    for row in rows:
        expected.update(row.parts())
    found = {}
    for module, layer, _, *tensors in cache.read_device(lease):
        found[module, layer] = tensors
    assert found.keys() == expected.keys()
    for place, (a, b, *vectors) in expected.items():
        np.testing.assert_array_equal(found[place][0], a.astype(engine).astype(np.float32))
        np.testing.assert_array_equal(found[place][1], b.astype(engine).astype(np.float32))
        for vector, of_device in zip(vectors, found[place][2:], strict=True):
            assert (vector is None) == (of_device is None)
            if vector is not None:
                np.testing.assert_array_equal(of_device, vector.astype(np.float32))
