"""Mixtures of experts: configs and layers that their families share."""

from __future__ import annotations

from dataclasses import dataclass

from ..._core import RouterScores
from ...common.json_fields import JsonFields
from ..checkpoint.activation import Activation
from ..checkpoint.config import CheckpointConfig
from ..network.network import Network
from ..network.operands import Routing, Value
from ..network.weights import LinearWeight, Split, whole
from .family import Features

# Fields of training, and of other outputs of forward() than logits.
ROUTER_FIELDS = frozenset({"output_router_logits", "router_aux_loss_coef", "router_jitter_noise"})


@dataclass(frozen=True, kw_only=True)
class MixtureConfig(CheckpointConfig):
    """Config of models with experts. `intermediate_size` belongs to layers without experts."""

    moe_num_experts: int = 2
    moe_top_k: int = 1
    moe_intermediate_size: int = 16
    """Intermediate size of each expert."""
    moe_normalised: bool = True
    """True divides the weights of a token's experts by their sum."""
    shared_expert_intermediate_size: int | None = None
    """Intermediate size of an expert that every token uses; None: no such expert."""
    dense_layers: tuple[int, ...] = ()
    """Layers with one MLP and no experts."""

    @property
    def num_experts(self) -> int:
        """Number of experts in each layer that has experts."""
        return self.moe_num_experts

    def describe_layers(self) -> str:
        """Text for people: 12 of hidden size 1024, 8 experts of 3584, 2 a token."""
        dense = f", mlp {self.intermediate_size} in {len(self.dense_layers)} of them" if self.dense_layers else ""
        shared = self.shared_expert_intermediate_size
        return (
            f"{self.num_hidden_layers} of hidden size {self.hidden_size}, {self.moe_num_experts} experts of "
            f"{self.moe_intermediate_size}, {self.moe_top_k} a token"
            + (f", a shared one of {shared}" if shared is not None else "")
            + dense
        )

    def inconsistencies(self) -> list[str]:
        """Lists contradictions between fields that are each acceptable."""
        found = super().inconsistencies()
        if self.moe_top_k > self.moe_num_experts:
            found.append(f"moe_top_k {self.moe_top_k} is more than moe_num_experts {self.moe_num_experts}")
        layers = self.dense_layers
        if list(layers) != sorted(set(layers)) or any(layer >= self.num_hidden_layers for layer in layers):
            found.append(f"dense_layers {list(layers)} must ascend and stay below {self.num_hidden_layers}")
        return found

    def mapping_inconsistencies(self) -> list[str]:
        """Lists reasons why this model cannot be cut by its mapping."""
        mapping = self.mapping
        if self.num_experts == 0:
            return super().mapping_inconsistencies()
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
        """Returns a routing that chooses among all experts by `scores`."""
        return Routing(scores=scores, top_k=self.moe_top_k, norm_topk_prob=self.moe_normalised)


@dataclass(frozen=True, kw_only=True)
class GroupedMixtureConfig(MixtureConfig):
    """Config of mixtures whose experts are chosen from the best groups of experts."""

    moe_num_groups: int = 1
    moe_groups_taken: int = 1
    moe_scale: float = 1.0
    """Factor of the experts' weights."""

    def inconsistencies(self) -> list[str]:
        """Lists contradictions between fields that are each acceptable."""
        found = super().inconsistencies()
        groups, taken = self.moe_num_groups, self.moe_groups_taken
        if self.moe_num_experts % groups != 0 or taken > groups:
            found.append(
                f"moe_groups_taken {taken} of moe_num_groups {groups} is not a choice of equal groups of "
                f"{self.moe_num_experts} experts"
            )
        elif self.moe_num_experts // groups * taken < self.moe_top_k:
            found.append(f"moe_top_k {self.moe_top_k} is more than the experts of {taken} groups")
        return found

    def grouped_routing(
        self, net: Network, scores: RouterScores, bias: str | None, *, rates_groups_by_best: bool = False
    ) -> Routing:
        """Returns the routing of a layer; `bias` is the tensor that is added to scores for the choice."""
        name = "mlp.router.e_score_correction_bias"
        return Routing(
            scores=scores,
            top_k=self.moe_top_k,
            num_groups=self.moe_num_groups,
            topk_groups=self.moe_groups_taken,
            norm_topk_prob=self.moe_normalised,
            rates_groups_by_best=rates_groups_by_best,
            scale=self.moe_scale,
            bias=None if bias is None else net.float32_vector(bias, name, self.moe_num_experts),
        )


@dataclass(frozen=True, kw_only=True)
class ExpertNames:
    """Names of an expert's linear layers and of the router in a Hugging Face model."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    router: str = "gate"


def number_of_experts(fields: JsonFields, old_name: str) -> int:
    """Reads num_local_experts (transformers 5), or the family's own older name."""
    given = [fields.optional_integer(name) for name in ("num_local_experts", old_name)]
    numbers = {number for number in given if number is not None}
    if len(numbers) == 1:
        return numbers.pop()
    found = f"is {given[0]}, but {old_name} is {given[1]}" if numbers else f"is missing, and so is {old_name}"
    fields.problem("num_local_experts", found)
    return 1


def layers_without_experts(fields: JsonFields, num_hidden_layers: int) -> Features:
    """Reads the layers without experts: those of mlp_only_layers, and all but each decoder_sparse_step-th."""
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
    """Declares `x` plus the output of the experts of `block` for `h`.

    bias: True if router and experts have biases.
    """
    names = names or ExpertNames()
    router = [whole(f"{block}.{names.router}", "moe_router", c.moe_num_experts)]
    # Routers are too small to gain from quantisation, and small differences change their choice.
    logits = net.linear(h, "mlp.router", router, split=Split.NONE, bias=bias, quantized=False)
    return routed_experts(net, c, h, logits, x, block, routing, names, bias=bias, activation=activation)


def routed_experts(
    net: Network,
    c: MixtureConfig,
    h: Value,
    logits: Value,
    add_to: Value | None,
    block: str,
    routing: Routing,
    names: ExpertNames | None = None,
    *,
    bias: bool = False,
    activation: Activation = Activation.SILU,
) -> Value:
    """Declares the output of the experts of `block` for `h`, chosen by the router's `logits`, plus `add_to`.

    bias: True if experts have biases.
    """
    names = names or ExpertNames()
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
        down=weights("proj", names.down, "moe_4h_to_h", inner, h.width, Split.ROW),
        routing=routing,
        activation=activation,
        add_to=add_to,
    )


def add_shared_expert(net: Network, h: Value, x: Value, source: str, inner: int, gate: str | None = None) -> Value:
    """Declares `x` plus the output of `source`, an expert that every token uses, for `h`.

    It is multiplied by the sigmoid of the linear layer `gate`, if given.
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
