"""From a build's config to the options of its network, for whoever builds the network or reads it again."""

from __future__ import annotations

from ..formats.engine.build_config import BuildConfig
from .network.onnx_graph import NetworkOptions


def network_options(config: BuildConfig) -> NetworkOptions:
    """What of the config the network depends on."""
    return NetworkOptions(
        tokens_per_block=config.tokens_per_block,
        max_lora_rank=config.lora_config.max_lora_rank if config.lora_enabled else None,
        dora=config.dora_enabled,
    )
