"""Converts each kind of PEFT adapter to rows: A, B and magnitude of each module.

With x the input of a module, PEFT adds to its output:

    LORA      s B A x, and with lora_bias s (B A x + b); DoRA multiplies the sum by m / ||W + s B A||
    ADALORA   s B (E * A) x, with a factor E for each rank
    VERA      b * (B (d * (A x))), A and B random and shared by all modules
    LOHA      s ((w1_a w1_b) * (w2_a w2_b)) x, an elementwise product
    LOKR      s kron(w1, w2) x, each whole or a product of two
    IA3       nothing: it multiplies outputs or inputs (ia3.py)
    TRAINABLE_TOKENS
              nothing: it replaces rows of the embedding and lm_head (token_rows.py)

The sum over i, j of (u_i v_i^T) * (p_j q_j^T) equals that of (u_i * p_j)(v_i * q_j)^T, so LoHa is LoRA whose rank is
the product of the two ranks. And kron(P Q, R S) = kron(P, R) kron(Q, S), so LoKr is LoRA as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from ..network.adapter_sites import AdaptedModules
from .adapter import FloatArray, ModuleTensors
from .ia3 import FACTORS, ia3_modules
from .module_parts import ModuleParts, PartsLayout
from .names import LORA_NAMES, ModuleKey, Role, tensor_pattern
from .peft_config import PeftConfig
from .peft_fields import TRAINABLE_TOKENS
from .vera import VERA_A, VERA_B

_ADALORA_EPSILON: Final = 1e-5
"""PEFT adds it to the rank that divides the scale."""


@dataclass(frozen=True)
class Source:
    """Data that folding the modules of one adapter needs."""

    config: PeftConfig
    shared: Mapping[str, FloatArray]
    """Matrices shared by all modules, by name."""
    modules: AdaptedModules | None
    """Modules of the model; None if it is not known."""
    parameters: Mapping[str, str]
    """Path of the parameter, by path of a module that PEFT adapts as a parameter."""

    def scale_of(self, key: ModuleKey) -> float:
        """Scale from adapter_config.json."""
        return self.config.scale_of(self.parameters.get(key.path, key.path))


@dataclass(frozen=True)
class Folding:
    """Converts one kind of adapter to rows."""

    layout: PartsLayout
    fold: Callable[[Source, Mapping[ModuleKey, ModuleParts]], dict[ModuleKey, ModuleTensors]]
    """Raises AdapterError, whose text begins with the problem."""
    served_rank: Callable[[Mapping[str, int]], int] = lambda sizes: sizes["rank"]
    """Rank of A and B, from the sizes of a module's tensors."""
    expected_rank: Callable[[PeftConfig, str], int] = PeftConfig.rank_of
    """Rank that adapter_config.json gives to the dimensions called rank, by the module's path."""


def _each(
    fold: Callable[[Source, ModuleKey, ModuleParts], ModuleTensors],
) -> Callable[[Source, Mapping[ModuleKey, ModuleParts]], dict[ModuleKey, ModuleTensors]]:
    """Folds each module by its own tensors. Skips modules that AdaLoRA pruned to rank 0."""

    def fold_all(source: Source, found: Mapping[ModuleKey, ModuleParts]) -> dict[ModuleKey, ModuleTensors]:
        return {key: fold(source, key, parts) for key, parts in found.items() if parts.sizes.get("rank") != 0}

    return fold_all


def _ia3(source: Source, found: Mapping[ModuleKey, ModuleParts]) -> dict[ModuleKey, ModuleTensors]:
    return ia3_modules(source.config, found, source.modules)


def _lora(source: Source, key: ModuleKey, parts: ModuleParts) -> ModuleTensors:
    scale = source.scale_of(key)
    return ModuleTensors(
        parts.arrays[Role.A],
        parts.arrays[Role.B],
        parts.arrays.get(Role.MAGNITUDE),
        scale,
        {role: parts.names[role] for role in Role if role in parts.names},
        shift=parts.wide(Role.SHIFT) * np.float32(scale) if Role.SHIFT in parts.arrays else None,
    )


def _adalora(source: Source, key: ModuleKey, parts: ModuleParts) -> ModuleTensors:
    # The ranks left after pruning keep the scale of all initial ranks.
    config = source.config
    alpha = config.alpha if config.alpha > 0 else float(parts.sizes["rank"])
    a = parts.wide("lora_A") * parts.wide("lora_E")[:, np.newaxis]
    scale = alpha / (config.rank + _ADALORA_EPSILON)
    return _product(parts, a, parts.wide("lora_B"), scale, ("lora_A", "lora_E"), ("lora_B",))


def _adalora_rank(config: PeftConfig, path: str) -> int:
    kept = config.kept_ranks.get(f"{path}.lora_E")
    return config.rank if kept is None else sum(kept)


def _loha(source: Source, key: ModuleKey, parts: ModuleParts) -> ModuleTensors:
    first_b, second_b = parts.wide("hada_w1_a"), parts.wide("hada_w2_a")
    first_a, second_a = parts.wide("hada_w1_b"), parts.wide("hada_w2_b")
    b = (first_b[:, :, np.newaxis] * second_b[:, np.newaxis, :]).reshape(len(first_b), -1)
    a = (first_a[:, np.newaxis, :] * second_a[np.newaxis, :, :]).reshape(-1, first_a.shape[1])
    return _product(parts, a, b, source.scale_of(key), ("hada_w1_b", "hada_w2_b"), ("hada_w1_a", "hada_w2_a"))


def _lokr(source: Source, key: ModuleKey, parts: ModuleParts) -> ModuleTensors:
    first_b, first_a = _two_factors(parts, "lokr_w1")
    second_b, second_a = _two_factors(parts, "lokr_w2")
    a, b = np.kron(first_a, second_a), np.kron(first_b, second_b)
    return _product(parts, a, b, source.scale_of(key), tuple(parts.names), tuple(parts.names))


def _two_factors(parts: ModuleParts, role: str) -> tuple[FloatArray, FloatArray]:
    """Returns [rows, rank] and [rank, columns] of a matrix that the file has whole or as two factors."""
    if f"{role}_a" in parts.arrays:
        return parts.wide(f"{role}_a"), parts.wide(f"{role}_b")
    whole = parts.wide(role)
    rows, columns = whole.shape
    return (np.eye(rows, dtype=np.float32), whole) if rows < columns else (whole, np.eye(columns, dtype=np.float32))


def _vera(source: Source, key: ModuleKey, parts: ModuleParts) -> ModuleTensors:
    assert source.modules is not None  # vera_projections() has refused it
    module = source.modules.find(key.path)
    in_size = 0 if module is None else module.in_size
    a = parts.wide("vera_lambda_d")[:, np.newaxis] * source.shared[VERA_A][:, :in_size]
    b = parts.wide("vera_lambda_b")[:, np.newaxis] * source.shared[VERA_B][: parts.sizes["out"]]
    return _product(parts, a, b, 1.0, ("vera_lambda_d",), ("vera_lambda_b",))


def _lokr_rank(sizes: Mapping[str, int]) -> int:
    first = sizes.get("rank_1", min(sizes["rows_1"], sizes["columns_1"]))
    return first * sizes.get("rank", min(sizes["rows_2"], sizes["columns_2"]))


def _product(
    parts: ModuleParts, a: FloatArray, b: FloatArray, scale: float, of_a: Iterable[str], of_b: Iterable[str]
) -> ModuleTensors:
    names = {
        Role.A: " * ".join(parts.names[role] for role in of_a),
        Role.B: " * ".join(parts.names[role] for role in of_b),
    }
    return ModuleTensors(np.ascontiguousarray(a), np.ascontiguousarray(b), None, scale, names)


_LORA_SHAPES: Final = {
    Role.A.value: ("rank", "in"),
    Role.B.value: ("out", "rank"),
    Role.MAGNITUDE.value: ("out",),
    Role.SHIFT.value: ("out",),
}
_ADALORA_SHAPES: Final = {"lora_A": ("rank", "in"), "lora_B": ("out", "rank"), "lora_E": ("rank",)}
_VERA_SHAPES: Final = {"vera_lambda_b": ("out",), "vera_lambda_d": ("rank",)}
_LOHA_SHAPES: Final = {
    "hada_w1_a": ("out", "rank"),
    "hada_w1_b": ("rank", "in"),
    "hada_w2_a": ("out", "rank"),
    "hada_w2_b": ("rank", "in"),
}
_LOKR_SHAPES: Final = {
    "lokr_w1": ("rows_1", "columns_1"),
    "lokr_w1_a": ("rows_1", "rank_1"),
    "lokr_w1_b": ("rank_1", "columns_1"),
    "lokr_w2": ("rows_2", "columns_2"),
    "lokr_w2_a": ("rows_2", "rank"),
    "lokr_w2_b": ("rank", "columns_2"),
}


_NO_NAMES: Final = re.compile(r"(?!)")
"""For kinds that change no layers."""


def _layout(shapes: Mapping[str, tuple[str, ...]], *, may_be_empty: bool = False) -> PartsLayout:
    return PartsLayout(tensor_pattern(shapes), shapes, (frozenset(shapes),), may_be_empty)


_LORA = PartsLayout(
    LORA_NAMES,
    _LORA_SHAPES,
    # PEFT does not combine DoRA with lora_bias.
    tuple(frozenset((Role.A, Role.B, *vector)) for vector in ((), (Role.MAGNITUDE,), (Role.SHIFT,))),
)
_LOKR = PartsLayout(
    tensor_pattern(_LOKR_SHAPES),
    _LOKR_SHAPES,
    tuple(
        frozenset((*first, *second))
        for first in (("lokr_w1",), ("lokr_w1_a", "lokr_w1_b"))
        for second in (("lokr_w2",), ("lokr_w2_a", "lokr_w2_b"))
    ),
)

FOLDINGS: Final[Mapping[str, Folding]] = {
    "LORA": Folding(_LORA, _each(_lora)),
    "ADALORA": Folding(_layout(_ADALORA_SHAPES, may_be_empty=True), _each(_adalora), expected_rank=_adalora_rank),
    "VERA": Folding(_layout(_VERA_SHAPES), _each(_vera)),
    "LOHA": Folding(_layout(_LOHA_SHAPES), _each(_loha), lambda sizes: sizes["rank"] ** 2),
    "LOKR": Folding(_LOKR, _each(_lokr), _lokr_rank),
    "IA3": Folding(_layout({FACTORS: ("rows", "columns")}), _ia3, lambda sizes: 1),
    TRAINABLE_TOKENS: Folding(PartsLayout(_NO_NAMES, {}, ()), lambda source, found: {}),
}
"""Foldings by peft_type."""
