"""What the network that a TensorRT engine was compiled from says of it: where adapters act, the heads of layers."""

from __future__ import annotations

from collections.abc import Sequence

from ..._core import AttentionShape, LoraLayout, LoraPart, LoraSite
from ...formats.engine.engine_config import EngineConfig
from ...formats.models.registry import declare
from ...formats.network.adapter_sites import AdapterSite, adapter_sites, module_id


def engine_sites(config: EngineConfig) -> tuple[AdapterSite, ...]:
    """The linear layers of an engine that adapters act on, in the order of execution; () without LoRA.

    Those of decoder layers: plugins act on neither lm_head nor the embedding.
    """
    if not config.build_config.lora_enabled:
        return ()
    sites = adapter_sites(declare(config.pretrained_config))
    return tuple(site for site in sites if not site.is_of_vocabulary and not site.is_norm)


def attention_shapes(config: EngineConfig) -> list[AttentionShape]:
    """The heads of each layer."""
    return [
        AttentionShape(
            num_attention_heads=op.shape.num_attention_heads,
            num_key_value_heads=op.shape.num_key_value_heads,
            head_dim=op.shape.head_dim,
        )
        for op in declare(config.pretrained_config).attentions
    ]


def lora_layout(config: EngineConfig, sites: Sequence[AdapterSite]) -> LoraLayout:
    """What the engine accepts of adapters."""
    build, checkpoint = config.build_config, config.pretrained_config
    if not sites:
        return LoraLayout()
    return LoraLayout(
        dtype=checkpoint.dtype,
        num_layers=checkpoint.num_hidden_layers,
        max_rank=build.lora_config.max_lora_rank,
        dora_enabled=build.dora_enabled,
        target_modules=build.lora_config.target_module_ids(),
        sites=[
            LoraSite(
                layer=site.layer,
                in_size=site.in_size,
                parts=[LoraPart(module=module_id(part), out_size=part.outputs) for part in site.parts],
                expert=site.expert,
            )
            for site in sites
        ],
    )
