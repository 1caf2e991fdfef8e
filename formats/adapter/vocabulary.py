"""Cuts modules of lm_head and the embedding into slices of the vocabulary, one row each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ..network.adapter_sites import vocabulary_slices
from .adapter import ModuleTensors
from .names import EMBEDDING, ModuleKey


def in_slices(key: ModuleKey, tensors: ModuleTensors) -> Iterator[tuple[ModuleKey, ModuleTensors]]:
    """Yields a module as rows have it; lm_head and the embedding are cut into slices (docs/formats.md).

    Ranks of the embedding that are zero in a slice are left out there, so an unchanged token costs nothing.
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
            # An adapter that changes nothing still gets one row.
            used = [rank for rank, row in enumerate(a) if row.any() or (rank == 0 and number == 0)]
            a, b = a[used], b[:, used]
        if len(a):
            yield of_slice, replace(tensors, a=np.ascontiguousarray(a), b=np.ascontiguousarray(b))
