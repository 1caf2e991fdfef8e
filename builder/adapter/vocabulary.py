"""lm_head and the embedding in adapters: rows, which are slices of the vocabulary, and PEFT's copies of the base."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final

import numpy as np

from ..._core import AdapterError
from ..network.adapter_sites import AdaptedModules, vocabulary_slices
from .adapter import DTYPES, Adapter, Array, ModuleTensors
from .base_weights import BaseWeights
from .names import EMBEDDING, PEFT_PREFIX, ModuleKey, module_at

_COPY: Final = re.compile(r"(?P<path>.+)\.base_layer\.weight")
_ROUNDING: Final = 2.0**-8
"""Of the coarsest type that a copy may have been rounded to, bfloat16."""
_SMALLEST: Final = 2.0**-24
"""Of float16, below which it has no more bits."""


def base_copies(tensors: Mapping[str, Array], modules: AdaptedModules | None) -> dict[ModuleKey, tuple[str, Array]]:
    """The weights of the base's lm_head and embedding that a file has beside what the adapter trained of them."""
    found = {}
    for name, tensor in tensors.items():
        match = _COPY.fullmatch(name)
        key = None if match is None else module_at(match["path"].removeprefix(PEFT_PREFIX), modules)
        if key is not None and key.module.is_of_vocabulary:
            found[key] = name, tensor
    return found


def check_copies(adapter: Adapter, base: BaseWeights | None) -> None:
    """Raises AdapterError for copies that are not the base's weights, which PEFT would put in their place."""
    problems = []
    for key, (name, copy) in adapter.base_copies.items():
        if base is None:
            raise AdapterError(
                f"{adapter.file}: tensor '{name}': a copy of the base's, which PEFT takes for it; give the base model "
                "to compare them"
            )
        shape = base.shape(key)
        expected = shape[::-1] if shape is not None and key.module.name == EMBEDDING else shape
        if copy.shape != expected or copy.dtype not in (*DTYPES, np.dtype(np.float64)):
            problems.append(
                f"tensor '{name}': is {copy.dtype} {list(copy.shape)}, but {base.describe()} has "
                f"{list(expected or ())}; resized embeddings are not served"
            )
        elif not _is_equal(copy.T if key.module.name == EMBEDDING else copy, base, key):
            problems.append(
                f"tensor '{name}': is not the weight of '{key.path}' in {base.describe()}; embeddings and lm_head that "
                "were trained whole are not served"
            )
    if problems:
        raise AdapterError(f"{adapter.file}: " + "; ".join(problems))


def _is_equal(copy: Array, base: BaseWeights, key: ModuleKey) -> bool:
    """But for the rounding of either."""
    first = 0
    for block in base.row_blocks(key):
        rows = copy[first : first + len(block)].astype(np.float32)
        first += len(block)
        if not (np.abs(rows - block) <= np.abs(block) * _ROUNDING + _SMALLEST).all():
            return False
    return True


def in_slices(key: ModuleKey, tensors: ModuleTensors) -> Iterator[tuple[ModuleKey, ModuleTensors]]:
    """A module, of lm_head and of the embedding the slices that rows have of it (docs/formats.md).

    Of the embedding without what is zero: a token that it does not change costs nothing in another slice.
    """
    if not key.module.is_of_vocabulary:
        yield key, tensors
        return
    of_inputs = key.module.name == EMBEDDING
    for number, tokens in enumerate(vocabulary_slices(tensors.a.shape[1] if of_inputs else len(tensors.b))):
        piece = slice(tokens.start, tokens.stop)
        of_slice = replace(key, layer=number, rows=())
        if not of_inputs:
            vectors = (None if vector is None else vector[piece] for vector in (tensors.magnitude, tensors.shift))
            magnitude, shift = vectors
            yield of_slice, replace(tensors, b=tensors.b[piece], magnitude=magnitude, shift=shift)
            continue
        a, b = tensors.a[:, piece], tensors.b
        if tensors.magnitude is None and tensors.shift is None:
            # An adapter that changes nothing has a row as well.
            used = [rank for rank, row in enumerate(a) if row.any() or (rank == 0 and number == 0)]
            a, b = a[used], b[:, used]
        if len(a):
            yield of_slice, replace(tensors, a=np.ascontiguousarray(a), b=np.ascontiguousarray(b))
