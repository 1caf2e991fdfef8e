"""Mixtures of experts: what their families' configs and layers have in common."""

from __future__ import annotations

from dataclasses import dataclass

from ..._core import RouterScores
from ...common.json_fields import JsonFields
from ..checkpoint.config import CheckpointConfig
from ..network.network import Network
from ..network.operands import Activation, Routing, Value
from ..network.weights import LinearWeight, Split, whole
from .family import Features

# Of training, and of what forward() returns beside logits.
ROUTER_FIELDS = frozenset({"output_router_logits", "router_aux_loss_coef", "router_jitter_noise"})


@dataclass(frozen=True, kw_only=True)
class MixtureConfig(CheckpointConfig):
    """Of models whose layers have experts. `intermediate_size` is that of the layers that have none."""

    moe_num_experts: int = 2
    moe_top_k: int = 1
    moe_intermediate_size: int = 16
    """Of each expert."""
    moe_normalised: bool = True
    """The weights of a token's experts are divided by their sum."""
    shared_expert_intermediate_size: int | None = None
    """Of an expert that every token takes; None: there is none."""
    dense_layers: tuple[int, ...] = ()
    """Layers with one MLP and no experts."""

    @property
    def num_experts(self) -> int:
        """Of the layers that have some."""
        return self.moe_num_experts

    def describe_layers(self) -> str:
        """What people read: 12 of hidden size 1024, 8 experts of 3584, 2 a token."""
        dense = f", mlp {self.intermediate_size} in {len(self.dense_layers)} of them" if self.dense_layers else ""
        shared = self.shared_expert_intermediate_size
        return (
            f"{self.num_hidden_layers} of hidden size {self.hidden_size}, {self.moe_num_experts} experts of "
            f"{self.moe_intermediate_size}, {self.moe_top_k} a token"
            + (f", a shared one of {shared}" if shared is not None else "")
            + dense
        )

    def inconsistencies(self) -> list[str]:
        """What is wrong between fields that are each acceptable alone."""
        found = super().inconsistencies()
        if self.moe_top_k > self.moe_num_experts:
            found.append(f"moe_top_k {self.moe_top_k} is more than moe_num_experts {self.moe_num_experts}")
        layers = self.dense_layers
        if list(layers) != sorted(set(layers)) or any(layer >= self.num_hidden_layers for layer in layers):
            found.append(f"dense_layers {list(layers)} must ascend and stay below {self.num_hidden_layers}")
        return found

    def mapping_inconsistencies(self) -> list[str]:
        """Why this model cannot be cut by its mapping."""
        mapping = self.mapping
        cut = (
            ("moe_tp_size" if mapping.moe_ep_size > 1 else "tp_size", mapping.moe_tp_size, "moe_intermediate_size"),
            ("tp_size", mapping.tp_size, "shared_expert_intermediate_size"),
            ("moe_ep_size", mapping.moe_ep_size, "moe_num_experts"),
        )
        return super().mapping_inconsistencies() + [
            f"{by} {parts} does not divide {name} {size}"
            for by, parts, name in cut
            if (size := getattr(self, name) or 0) % parts != 0
        ]

    def routing(self, scores: RouterScores = RouterScores.SOFTMAX) -> Routing:
        """Experts chosen by `scores` among all."""
        return Routing(scores=scores, top_k=self.moe_top_k, normalised=self.moe_normalised)


@dataclass(frozen=True, kw_only=True)
class ExpertNames:
    """What a Hugging Face model calls the linear layers of an expert, and the router."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    router: str = "gate"


def number_of_experts(fields: JsonFields, old_name: str) -> int:
    """transformers 5 has num_local_experts, versions before it the family's own name."""
    given = [fields.optional_integer(name) for name in ("num_local_experts", old_name)]
    numbers = {number for number in given if number is not None}
    if len(numbers) == 1:
        return numbers.pop()
    found = f"is {given[0]}, but {old_name} is {given[1]}" if numbers else f"is missing, and so is {old_name}"
    fields.problem("num_local_experts", found)
    return 1


def layers_without_experts(fields: JsonFields, num_hidden_layers: int) -> Features:
    """Those that mlp_only_layers names, and those between each decoder_sparse_step-th one."""
    step = fields.integer("decoder_sparse_step", default=1)
    named = fields.integers("mlp_only_layers")
    dense = (layer for layer in range(num_hidden_layers) if layer in named or (layer + 1) % step != 0)
    return {"dense_layers": tuple(dense)}


def add_experts(
    net: Network,
    c: MixtureConfig,
    h: Value,
    x: Value,
    block: str,
    routing: Routing,
    names: ExpertNames | None = None,
    *,
    bias: bool = False,
    activation: Activation = Activation.SILU,
) -> Value:
    """`x` plus what the experts of `block` make of `h`. `bias`: router and experts have some."""
    names = names or ExpertNames()
    router = [whole(f"{block}.{names.router}", "moe_router", c.moe_num_experts)]
    # Routers are too small for it to be worth anything, and choose by small differences.
    logits = net.linear(h, "mlp.router", router, split=Split.NONE, bias=bias, quantized=False)
    inner = c.moe_intermediate_size

    def weights(name: str, source: str, module: str, inputs: int, outputs: int, split: Split) -> list[LinearWeight]:
        return [
            net.weight(
                inputs,
                f"mlp.experts.{expert}.{name}",
                [whole(f"{block}.experts.{expert}.{source}", module, outputs)],
                split=split,
                bias=bias,
                expert=expert,
            )
            for expert in range(c.moe_num_experts)
        ]

    return net.experts(
        h,
        logits,
        gate=weights("fc", names.gate, "moe_h_to_4h", h.width, inner, Split.COLUMN),
        up=weights("gate", names.up, "moe_gate", h.width, inner, Split.COLUMN),
        down=weights("proj", names.down, "moe_4h_to_h", inner, x.width, Split.ROW),
        routing=routing,
        activation=activation,
        add_to=x,
    )


def add_shared_expert(net: Network, h: Value, x: Value, source: str, inner: int, gate: str | None = None) -> Value:
    """`x` plus what the expert `source`, which every token takes, makes of `h`.

    It is multiplied by the sigmoid of the linear layer `gate`, where there is one.
    """
    fc, up = (
        net.weight(h, f"mlp.shared_expert.{name}", [whole(f"{source}.{layer}", module, inner)])
        for name, layer, module in (
            ("fc", "gate_proj", "shared_expert_h_to_4h"),
            ("gate", "up_proj", "shared_expert_gate"),
        )
    )
    made = net.gated(h, fc, up, Activation.SILU)
    down = [whole(f"{source}.down_proj", "shared_expert_4h_to_h", x.width)]
    if gate is None:
        return net.linear(made, "mlp.shared_expert.proj", down, split=Split.ROW, add_to=x)
    share = net.linear(h, "mlp.shared_expert_gate", [whole(gate, "mlp_router", 1)], split=Split.NONE, quantized=False)
    return net.gated_add(net.linear(made, "mlp.shared_expert.proj", down, split=Split.ROW), share, add_to=x)
