"""A weighted sum of LoRA adapters as one adapter: y = W x + sum over i of w_i s_i B_i A_i x.

This is LoRA whose A stacks the rows of all A_i, and whose B concatenates the columns of all w_i s_i B_i.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np

from ..._core import AdapterError, DType, all_finite, dtype_name, scale_elements
from ...common.safetensors_stream import read_header
from ..network.adapter_sites import AdaptedModules
from .adapter import NUMPY_DTYPES, FloatArray
from .convert import MAGNITUDE, SHIFT, ConvertedAdapter
from .names import MODULE_OF_ID, MODULES, Role, TensorName, parse_tensor_name
from .problems import join_problems
from .recognise import SAFETENSORS_FILE
from .terms import AdapterTerms

_TERMS_SHOWN: Final = 4
"""Maximum number of terms that an error names for a module."""

_Key: TypeAlias = tuple[int, int]  # layer and module id, in the order of rows


@dataclass(frozen=True)
class Term:
    """One adapter of a sum."""

    name: str
    """Name in errors."""
    adapter: ConvertedAdapter
    """Converted to float32."""
    weight: float


@dataclass(frozen=True)
class _Row:
    """A row of one term, or of several concatenated terms."""

    a: FloatArray  # [experts, rank, in]; one expert if the module has no experts
    b: FloatArray  # [experts, out, rank], multiplied by scale and weight
    path: str

    @property
    def rank(self) -> int:
        """A's second dimension."""
        return int(self.a.shape[1])


def check_ranks(terms: Sequence[tuple[str, Path]], modules: AdaptedModules, max_rank: int) -> None:
    """Refuses a sum whose ranks are too large; reads only the headers of its files, before any conversion.

    terms: name in errors, and directory, of each adapter.
    modules: modules of the model that will serve the sum.

    Skips files that have no LoRA tensors or cannot be read; conversion reports them. Raises AdapterError if ranks add
    up to more than max_rank.
    """
    found = {directory: _stored_ranks(directory, modules) for directory in {directory for _, directory in terms}}
    problems = []
    for row in sorted({row for ranks in found.values() for row in ranks}):
        of_terms = [(name, *found[directory][row]) for name, directory in terms if row in found[directory]]
        ranks = [(name, rank) for name, rank, _ in of_terms]
        if sum(rank for _, rank in ranks) > max_rank:
            problems.append(_too_large(of_terms[0][2], ranks, max_rank))
    if problems:
        raise AdapterError(join_problems(problems))


def _stored_ranks(directory: Path, modules: AdaptedModules) -> dict[_Key, tuple[int, str]]:
    """Rank and path of each module with LoRA of PEFT, by layer and module id."""
    path = directory / SAFETENSORS_FILE
    if not path.is_file():
        return {}
    found: dict[_Key, tuple[int, str]] = {}
    for name, spec in read_header(path, AdapterError).specs.items():
        parsed = parse_tensor_name(name, modules)
        if isinstance(parsed, TensorName) and parsed.role == Role.A and spec.shape:
            key = parsed.key
            # Experts of a layer share a row, which has the largest of their ranks.
            found[key.row] = max(found.get(key.row, (0, "")), (spec.shape[0], key.path))
    return found


def _too_large(path: str, ranks: Sequence[tuple[str, int]], max_rank: int) -> str:
    each = " + ".join(f"{rank} of '{name}'" for name, rank in ranks[:_TERMS_SHOWN])
    if len(ranks) > _TERMS_SHOWN:
        each += f" and so on, {sum(rank for _, rank in ranks)} in all"
    return f"module '{path}': the ranks are {each}, above max_lora_rank {max_rank}"


def weighted_sum(terms: Sequence[Term], modules: AdaptedModules, dtype: DType, max_rank: int) -> ConvertedAdapter:
    """Computes the rows of the sum, and rounds them to `dtype` once.

    modules: modules of the model, which give the sizes of the rows.

    Raises AdapterError for terms that are not plain LoRA (DoRA's factor, for example, also multiplies the base's
    output), and if ranks add up to more than max_rank.
    """
    for term in terms:
        if term.adapter.invocation_tokens:
            raise AdapterError(
                f"'{term.name}' is an aLoRA adapter, which acts on a part of a prompt; weighted sums accept plain LoRA"
            )
        vectors = term.adapter.config[0, :, 3]
        if term.adapter.replaces_base:
            raise AdapterError(
                f"'{term.name}' has trained tokens or whole weights, which replace the base's; weighted sums accept "
                "plain LoRA"
            )
        if term.adapter.terms != AdapterTerms():
            raise AdapterError(
                f"'{term.name}' has a vocabulary of its own or divides rotary positions; weighted sums accept plain "
                "LoRA"
            )
        if (vectors & SHIFT).any():
            raise AdapterError(
                f"'{term.name}' has biases (lora_bias, trained biases or IA3's), which PEFT's weighted sums leave out; "
                "weighted sums accept plain LoRA"
            )
        if (vectors & MAGNITUDE).any():
            raise AdapterError(
                f"'{term.name}' has factors (DoRA or IA3), which multiply the base's output as well; "
                "weighted sums accept plain LoRA"
            )
    rows = [dict(_rows(term, modules)) for term in terms]
    to_split = _fused_to_split(rows)
    rows = [dict(_parts(of_term, to_split, modules)) for of_term in rows]
    summed: dict[_Key, _Row] = {}
    problems = []
    for key in sorted({key for of_term in rows for key in of_term}):
        found = [(term.name, of_term[key]) for term, of_term in zip(terms, rows, strict=True) if key in of_term]
        ranks = [row.rank for _, row in found]
        if sum(ranks) > max_rank:
            of_terms = [(name, row.rank) for name, row in found]
            problems.append(_too_large(found[0][1].path, of_terms, max_rank))
        elif not problems:
            a = np.concatenate([row.a for _, row in found], axis=1)
            b = np.concatenate([row.b for _, row in found], axis=2)
            summed[key] = _Row(a, b, found[0][1].path)
    if problems:
        raise AdapterError(join_problems(problems))
    return _flatten(summed, dtype)


def _rows(term: Term, modules: AdaptedModules) -> Iterator[tuple[_Key, _Row]]:
    converted = term.adapter
    for row, (module_id, layer, rank, _), path in zip(
        converted.weights[0], converted.config[0].tolist(), converted.paths, strict=True
    ):
        sizes = modules.sizes_of(layer, MODULE_OF_ID[module_id].name)
        assert sizes is not None  # conversion has compared it with the model
        in_size, out_size = sizes
        experts = modules.num_experts(layer, MODULE_OF_ID[module_id].name)
        a, b, _ = np.split(row, np.cumsum([experts * rank * in_size, experts * out_size * rank]))
        a, b = a.reshape(experts, rank, in_size), b.reshape(experts, out_size, rank)
        yield (layer, module_id), _Row(a, b * np.float32(term.weight), path)


def _fused_to_split(rows: Sequence[Mapping[_Key, _Row]]) -> set[_Key]:
    """Fused modules of which another term adapts a part: no two rows may change the same outputs."""
    keys = {key for of_term in rows for key in of_term}
    return {
        (layer, module_id)
        for layer, module_id in keys
        if any((layer, MODULES[part].id) in keys - {(layer, module_id)} for part in MODULE_OF_ID[module_id].parts)
    }


def _parts(
    rows: Mapping[_Key, _Row], to_split: Collection[_Key], modules: AdaptedModules
) -> Iterator[tuple[_Key, _Row]]:
    """Yields the rows of a term; splits fused modules in `to_split` into their parts, which share A."""
    for (layer, module_id), row in rows.items():
        if (layer, module_id) not in to_split:
            yield (layer, module_id), row
            continue
        first = 0
        for part in MODULE_OF_ID[module_id].parts:
            sizes = modules.sizes_of(layer, part)
            assert sizes is not None  # the model has the fused module
            yield (layer, MODULES[part].id), _Row(row.a, row.b[:, first : first + sizes[1]], row.path)
            first += sizes[1]


def _flatten(rows: Mapping[_Key, _Row], dtype: DType) -> ConvertedAdapter:
    width = max(row.a.size + row.b.size for row in rows.values())
    weights = np.zeros((1, len(rows), width), NUMPY_DTYPES[dtype])
    for place, row in zip(weights[0], rows.values(), strict=True):
        values = np.concatenate([row.a.reshape(-1), row.b.reshape(-1)])
        scale_elements(place[: values.size], dtype, values, DType.FLOAT32, 1.0)
        if not all_finite(place, dtype):
            raise AdapterError(f"module '{row.path}': the sum goes beyond {dtype_name(dtype)}")
    config = [(module_id, layer, row.rank, 0) for (layer, module_id), row in rows.items()]
    return ConvertedAdapter(weights, np.array([config], np.int32), tuple(row.path for row in rows.values()))
