"""Derives a network's options from a build config, for building the network or reading it again."""

from __future__ import annotations

from ..formats.engine.build_config import BuildConfig
from .network.onnx_graph import NetworkOptions


def network_options(config: BuildConfig) -> NetworkOptions:
    """The options of the network that the build config determines."""
    return NetworkOptions(
        tokens_per_block=config.tokens_per_block,
        max_lora_rank=config.lora_config.max_lora_rank if config.lora_enabled else None,
        dora=config.dora_enabled,
    )
