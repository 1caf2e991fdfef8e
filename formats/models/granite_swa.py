"""GraniteSWAForCausalLM and GraniteMoeSWAForCausalLM: Granite with sinks, windows, and a rotary base for each layer."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...common.json_fields import JsonFields
from ..network.network import Network
from .decoder import declare_llama_like
from .family import Features, ModelFamily, sliding_window_of_kinds
from .granite import GRANITE, GraniteConfig, granite_multipliers, read_granite_features
from .granite_moe import GRANITE_MOE, GraniteMoeConfig, granite_moe_mlp, read_granite_moe_features


@dataclass(frozen=True, kw_only=True)
class GraniteSwaConfig(GraniteConfig):
    """Fields of Granite with windows, in addition to Granite's."""

    layer_rotary_bases: tuple[float, ...] = ()
    """Rotary base of each layer, 0 for layers whose attention does not depend on positions; (): rotary_base."""

    def inconsistencies(self) -> list[str]:
        """Lists contradictions between fields that are each acceptable."""
        found = super().inconsistencies()
        if (count := len(self.layer_rotary_bases)) not in (0, self.num_hidden_layers):
            found.append(f"layer_rope_theta has {count} numbers; expected {self.num_hidden_layers}, one per layer")
        return found


@dataclass(frozen=True, kw_only=True)
class GraniteMoeSwaConfig(GraniteSwaConfig, GraniteMoeConfig):
    """Fields of Granite with windows and experts."""


def _read_layers(fields: JsonFields, num_hidden_layers: int) -> Features:
    return {
        **sliding_window_of_kinds(fields, num_hidden_layers, lambda layer: layer % 4 != 0),
        "layer_rotary_bases": fields.numbers("layer_rope_theta"),
    }


def _read_features(fields: JsonFields, num_hidden_layers: int) -> Features:
    return {**read_granite_features(fields, num_hidden_layers), **_read_layers(fields, num_hidden_layers)}


def _read_moe_features(fields: JsonFields, num_hidden_layers: int) -> Features:
    inner = fields.integer("shared_intermediate_size", minimum=0, default=0)
    return {
        **read_granite_moe_features(fields, num_hidden_layers),
        **_read_layers(fields, num_hidden_layers),
        "shared_expert_intermediate_size": inner or None,
    }


def _declare(net: Network, c: GraniteSwaConfig) -> None:
    mlp = granite_moe_mlp(net, c) if isinstance(c, GraniteMoeConfig) else None
    declare_llama_like(net, c, granite_multipliers(c), mlp=mlp, sinks=True, bases=c.layer_rotary_bases)


def _with_windows(family: ModelFamily) -> ModelFamily:
    return replace(family, declare=_declare, fill_in=lambda fields: {"sliding_window": 128}, tied_by_default=True)


GRANITE_SWA = replace(
    _with_windows(GRANITE),
    architecture="GraniteSWAForCausalLM",
    config_class=GraniteSwaConfig,
    read_features=_read_features,
)

GRANITE_MOE_SWA = replace(
    _with_windows(GRANITE_MOE),
    architecture="GraniteMoeSWAForCausalLM",
    config_class=GraniteMoeSwaConfig,
    read_features=_read_moe_features,
    tied_by_default=False,
)
