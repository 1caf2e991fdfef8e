"""Splits LoRA of a parameter that holds all experts of a layer (PEFT's target_parameters) by expert.

transformers 5 keeps gate and up of all experts in gate_up_proj [experts, 2 * inner, hidden], and down in down_proj.
PEFT adapts such a parameter with A [experts * rank, in], grouped by expert, and B [out, rank * experts], grouped by
rank: expert e changes by the sum over r of B[:, r * experts + e] A[e * rank + r]. GPT-OSS has
    [experts, hidden, 2 * inner] with interleaved outputs of gate and up; its A and B have the same shapes. Llama 4 has
    [experts, hidden, 2 * inner] too, but PEFT takes hidden for the outputs: A is [experts * rank, 2 * inner] and B
    [hidden, rank * experts].

If two parameters of one module are adapted, PEFT wraps one in the other, and one has "base_layer" in its names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from ..network.adapter_sites import AdaptedModules, ExpertBlock
from .adapter import Array
from .names import PEFT_PREFIX, Role

_GATE: Final = "moe_h_to_4h"
_UP: Final = "moe_gate"
_DOWN: Final = "moe_4h_to_h"
_NAME: Final = re.compile(
    rf"(?P<prefix>{re.escape(PEFT_PREFIX)})?(?P<block>.+?)(?P<depth>(?:\.base_layer)*)\.(?P<role>lora_[AB])"
    r"(?P<end>(?:\.[^.]+)?\.weight)"
)


@dataclass(frozen=True)
class SplitTensors:
    """An adapter's tensors after experts' parameters were split."""

    tensors: Mapping[str, Array]
    """Tensors by a name that parse_tensor_name() accepts."""
    parameters: Mapping[str, str]
    """Path of the parameter that an expert's layer was split from, by path of the layer."""
    problems: tuple[str, ...] = ()


def split_expert_parameters(tensors: Mapping[str, Array], modules: AdaptedModules | None) -> SplitTensors:
    """Splits the tensors of experts' parameters. Without `modules` no such parameters are known."""
    if modules is None or not modules.expert_blocks:
        return SplitTensors(tensors, {})
    split: dict[str, Array] = {}
    found: dict[tuple[str, ...], dict[str, str]] = {}
    for name in tensors:
        match = _NAME.fullmatch(name)
        if match is None or match["block"] not in modules.expert_blocks:
            split[name] = tensors[name]
        else:
            place = (match["prefix"] or "", match["block"], match["depth"], match["end"])
            found.setdefault(place, {})[match["role"]] = name
    parameters: dict[str, str] = {}
    problems: list[str] = []
    for (prefix, block, _, end), names in found.items():
        if names.keys() != {Role.A.value, Role.B.value}:
            problems.append(f"tensor '{next(iter(names.values()))}': {block} needs both lora_A and lora_B")
            continue
        a, b = (tensors[names[role.value]] for role in (Role.A, Role.B))
        found_layers = _layers_of(a, b, block, modules)
        if isinstance(found_layers, str):
            problems.append(f"tensors '{names[Role.A.value]}' and '{names[Role.B.value]}': {found_layers}")
            continue
        parameter = f"{block}.{'down_proj' if _DOWN in found_layers.rows else 'gate_up_proj'}"
        for path, matrices in _of_experts(a, b, block, modules.expert_blocks[block], found_layers).items():
            parameters[path] = parameter
            for role, matrix in zip((Role.A, Role.B), matrices, strict=True):
                split[f"{prefix}{path}.{role.value}{end}"] = matrix
    return SplitTensors(split, parameters, tuple(problems))


@dataclass(frozen=True)
class _Layers:
    rows: Mapping[str, range]
    """Outputs of each module in the parameter's."""
    is_swapped: bool
    """True if A has the outputs, and B the inputs."""


def _layers_of(a: Array, b: Array, block: str, modules: AdaptedModules) -> _Layers | str:
    """Returns the layers of a parameter by the shapes of its matrices; or a text that says what is wrong with them."""
    found = modules.expert_blocks[block]
    example = modules.find(f"{block}.0.{found.names[_GATE]}")
    assert example is not None
    hidden, inner, experts = example.in_size, example.out_size, found.num_experts
    if a.ndim == 2 and b.ndim == 2 and a.shape[0] == b.shape[1] and a.shape[0] % experts == 0:
        # If both orders fit, it is the one that PEFT makes now.
        for is_swapped in (True, False) if found.swapped else (False,):
            inputs, outputs = (b.shape[0], a.shape[1]) if is_swapped else (a.shape[1], b.shape[0])
            if (inputs, outputs) == (hidden, 2 * inner):
                gate, up = range(inner), range(inner, 2 * inner)
                if found.alternates:
                    gate, up = range(0, 2 * inner, 2), range(1, 2 * inner, 2)
                return _Layers({_GATE: gate, _UP: up}, is_swapped)
            if (inputs, outputs) == (inner, hidden):
                return _Layers({_DOWN: range(hidden)}, is_swapped)
    return (
        f"have the shapes {list(a.shape)} and {list(b.shape)}; those of {experts} experts' gate_up_proj are "
        f"{_shapes(found, hidden, 2 * inner)}, of down_proj {_shapes(found, inner, hidden)}"
    )


def _shapes(found: ExpertBlock, inputs: int, outputs: int) -> str:
    """Text of the shapes of a parameter's A and B."""
    of_a, of_b = (outputs, inputs) if found.swapped else (inputs, outputs)
    return f"[{found.num_experts} rank, {of_a}] and [{of_b}, {found.num_experts} rank]"


def _of_experts(a: Array, b: Array, block: str, found: ExpertBlock, layers: _Layers) -> dict[str, tuple[Array, Array]]:
    """Returns A [rank, in] and B [out, rank] by path of an expert's layer."""
    a_of = a.reshape(found.num_experts, -1, a.shape[1])
    b_of = b.reshape(b.shape[0], -1, found.num_experts)

    def matrices(expert: int, rows: range) -> tuple[Array, Array]:
        taken = slice(rows.start, rows.stop, rows.step)
        if layers.is_swapped:
            return np.ascontiguousarray(b_of[:, :, expert].T), np.ascontiguousarray(a_of[expert, :, taken].T)
        return a_of[expert], b_of[taken, :, expert]

    return {
        f"{block}.{expert}.{found.names[module]}": matrices(expert, rows)
        for expert in range(found.num_experts)
        for module, rows in layers.rows.items()
    }
