"""Exaone4ForCausalLM: OLMo 2's order of norms, a norm per head, and no positions in layers without a window."""

from __future__ import annotations

from ...common.json_fields import JsonFields, describe
from ..checkpoint.config import CheckpointConfig
from ..network.network import Network
from .family import Features, ModelFamily, sliding_window_of_kinds
from .olmo2 import declare_olmo


def _read_features(fields: JsonFields, num_hidden_layers: int) -> Features:
    window = fields.raw("sliding_window")
    pattern = 1
    if window is not None and fields.raw("layer_types") is None:
        pattern = fields.integer("sliding_window_pattern", default=4)
    fields.discard(("sliding_window_pattern",))  # next to layer_types it is a text such as LLLG, with the same meaning
    windows = sliding_window_of_kinds(fields, num_hidden_layers, lambda layer: (layer + 1) % pattern != 0)
    if window is not None and not windows["sliding_window_layers"]:
        fields.problem("sliding_window", f"is {describe(window)}, but no layer has a window")
    return {**windows, "qk_layernorm": True}


def _declare(net: Network, c: CheckpointConfig) -> None:
    rotary = net.rotary()
    without_window = rotary if c.sliding_window is None else net.no_rotation()
    declare_olmo(net, c, {False: without_window, True: rotary}, norm_each_head=True)


EXAONE4 = ModelFamily(
    architecture="Exaone4ForCausalLM",
    read_features=_read_features,
    declare=_declare,
    optional_fields=frozenset({"head_dim"}),
)
