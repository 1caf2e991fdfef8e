"""Changes of an adapter to a model's pooler: the linear layer that some classifiers have before their last layer.

The pooler runs on the host, on one row per text, so it needs no row in an adapter's tensors: each adapter has a pooler
of its own. Embeddings do not use it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..._core import AdapterError
from ..checkpoint.casting import to_float32
from .adapter import Array, FloatArray
from .biases import is_trained_bias
from .names import LORA_NAMES, PEFT_PREFIX, Role
from .peft_config import PeftConfig


@dataclass(frozen=True, eq=False)
class AdaptedPooler:
    """Replaces the pooler's weight W by V = W + `scale` B A; with a magnitude m, by m / ||V|| * V."""

    a: FloatArray | None
    """[rank, in]; None if only the bias was trained."""
    b: FloatArray | None
    """[out, rank]"""
    scale: float
    magnitude: FloatArray | None
    """[out], for DoRA; the norms are those of rows."""
    bias: FloatArray | None
    """[out], replaces the model's bias; None: keeps it."""
    file: Path

    def bias_over(self, base: FloatArray | None) -> FloatArray | None:
        """Returns the bias [out] to use in place of the model's; None: no bias.

        Raises AdapterError for another size.
        """
        if self.bias is None:
            return base
        if base is None or self.bias.shape != base.shape:
            has = 0 if base is None else base.size
            raise AdapterError(f"{self.file}: the pooler's bias has {self.bias.size} elements; expected {has}")
        return self.bias

    def weight_over(self, base: FloatArray) -> FloatArray:
        """Returns the weight [out, in] to use in place of the model's.

        Raises AdapterError for sizes that do not fit, and for norms of zero.
        """
        if self.a is None or self.b is None:
            return base
        if (len(self.b), self.a.shape[1]) != base.shape:
            raise AdapterError(
                f"{self.file}: the pooler's lora_A is {list(self.a.shape)} and lora_B {list(self.b.shape)}; its "
                f"weight is {list(base.shape)}"
            )
        made = base + np.float32(self.scale) * (self.b @ self.a)
        if self.magnitude is not None:
            norms = np.sqrt(np.einsum("ij,ij->i", made, made, dtype=np.float64))
            with np.errstate(divide="ignore", invalid="ignore"):
                made = ((self.magnitude / norms)[:, np.newaxis] * made).astype(np.float32)
        if not np.isfinite(made).all():
            raise AdapterError(f"{self.file}: the adapted weight of the pooler is not finite")
        return np.ascontiguousarray(made, np.float32)


def tensors_of(paths: Iterable[str], tensors: Mapping[str, Array]) -> dict[str, Array]:
    """Selects the tensors that change one of the linear layers `paths`."""
    starts = tuple(start + path + "." for path in paths for start in (PEFT_PREFIX, ""))
    return {name: tensor for name, tensor in tensors.items() if starts and name.startswith(starts)}


def adapted_pooler(tensors: Mapping[str, Array], config: PeftConfig, file: Path) -> AdaptedPooler | None:
    """Makes an AdaptedPooler from the tensors that tensors_of() selected; None if there are none.

    Raises AdapterError for a tensor that is not LoRA or DoRA, nor a bias that `config` marks as trained.
    """
    if not tensors:
        return None
    found: dict[str, FloatArray] = {}
    path, bias = "", None
    for name, tensor in tensors.items():
        if config.trains_biases and is_trained_bias(name):
            bias = _float32(file, name, tensor)
            continue
        match = LORA_NAMES.fullmatch(name)
        if match is None or config.peft_type != "LORA" or match["shift"] or match["embedding"]:
            raise AdapterError(
                f"{file}: tensor '{name}' changes the pooler; accepted: LoRA and DoRA of it, and its bias"
            )
        path = match["path"].removeprefix(PEFT_PREFIX)
        found[match["role"] or Role.MAGNITUDE.value] = _float32(file, name, tensor)
    if not found:
        return AdaptedPooler(None, None, 1.0, None, bias, file)
    a, b, magnitude = (found.get(role.value) for role in (Role.A, Role.B, Role.MAGNITUDE))
    rank = config.rank_of(path)
    if a is None or b is None or a.ndim != 2 or b.ndim != 2 or (len(a), b.shape[1]) != (rank, rank):
        raise AdapterError(f"{file}: the pooler needs lora_A [{rank}, in] and lora_B [out, {rank}]")
    if (magnitude is None) == config.use_dora or (magnitude is not None and magnitude.size != len(b)):
        raise AdapterError(f"{file}: the pooler needs a magnitude [{len(b)}] with use_dora, and none without")
    return AdaptedPooler(a, b, config.scale_of(path), None if magnitude is None else magnitude.reshape(-1), bias, file)


def _float32(file: Path, name: str, tensor: Array) -> FloatArray:
    if tensor.dtype.kind not in "fV" and tensor.dtype.name != "bfloat16":
        raise AdapterError(f"{file}: tensor '{name}' is {tensor.dtype.name}; expected floating-point numbers")
    with np.errstate(over="ignore"):
        wide = np.ascontiguousarray(to_float32(tensor))
    if not np.isfinite(wide).all():
        raise AdapterError(f"{file}: tensor '{name}' has NaN, or values beyond float32")
    return wide
