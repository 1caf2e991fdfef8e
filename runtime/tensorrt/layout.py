"""Where adapters act in a TensorRT engine: the network that it was compiled from says so."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ..._core import LoraLayout, LoraPart, LoraSite
from ...builder.checkpoint.config import CheckpointConfig
from ...builder.checkpoint.tensor_plan import plan_rank
from ...builder.engine_config import EngineConfig
from ...builder.network.adapted_linears import AdaptedLinear, adapted_linears
from ...builder.network.decoder import build_network
from ...builder.network.graph import ELEMENT_TYPES, StoredTensor
from ...builder.network_options import network_options


def engine_linears(config: EngineConfig) -> tuple[AdaptedLinear, ...]:
    """The linear layers of an engine that adapters act on, in the order of execution."""
    build, checkpoint = config.build_config, config.pretrained_config
    if not build.lora_enabled:
        return ()
    return tuple(adapted_linears(build_network(checkpoint, _shapes_alone(checkpoint), network_options(build))))


def lora_layout(config: EngineConfig, linears: Sequence[AdaptedLinear]) -> LoraLayout:
    """What the engine accepts of adapters.

    Layers that read the same value are one site, since fused modules have one A for all of them.
    """
    build, checkpoint = config.build_config, config.pretrained_config
    if not linears:
        return LoraLayout()
    sites = []
    for _, group in itertools.groupby(linears, key=lambda linear: (linear.layer, linear.input)):
        members = list(group)
        parts = [
            LoraPart(module=module, out_size=out_size)
            for linear in members
            for module, out_size in zip(linear.module_ids, linear.out_sizes, strict=True)
        ]
        sites.append(LoraSite(layer=members[0].layer, in_size=members[0].in_size, parts=parts))
    return LoraLayout(
        dtype=checkpoint.dtype,
        num_layers=checkpoint.num_hidden_layers,
        max_rank=build.lora_config.max_lora_rank,
        dora_enabled=build.dora_enabled,
        shape=checkpoint.model_shape,
        target_modules=build.lora_config.target_module_ids(),
        sites=sites,
    )


def _shapes_alone(checkpoint: CheckpointConfig) -> dict[str, StoredTensor]:
    """The checkpoint's tensors without their bytes."""
    return {
        tensor.name: StoredTensor(ELEMENT_TYPES[checkpoint.dtype], tensor.shape, location="", offset=0, num_bytes=0)
        for tensor in plan_rank(checkpoint, 0)
    }
