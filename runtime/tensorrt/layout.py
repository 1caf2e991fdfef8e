"""Facts about a TensorRT engine that follow from its network: where adapters act, and the heads of each layer."""

from __future__ import annotations

from collections.abc import Sequence

from ..._core import AttentionShape, LoraLayout, LoraPart, LoraSite
from ...formats.engine.engine_config import EngineConfig
from ...formats.network.adapter_sites import AdapterSite, adapter_sites, module_id


def engine_sites(config: EngineConfig) -> tuple[AdapterSite, ...]:
    """Returns the linear layers that adapters act on, in the order of execution; () without LoRA.

    Only layers of decoder layers: plugins do not act on lm_head or the embedding.
    """
    if not config.build_config.lora_enabled:
        return ()
    sites = adapter_sites(config.network)
    return tuple(site for site in sites if not site.is_of_vocabulary and not site.is_norm)


def attention_shapes(config: EngineConfig) -> list[AttentionShape]:
    """Returns the attention heads of each layer."""
    return [
        AttentionShape(
            num_attention_heads=op.shape.num_attention_heads,
            num_key_value_heads=op.shape.num_key_value_heads,
            head_dim=op.shape.head_dim,
        )
        for op in config.network.attentions
    ]


def lora_layout(config: EngineConfig, sites: Sequence[AdapterSite]) -> LoraLayout:
    """Returns the adapters that the engine accepts."""
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
