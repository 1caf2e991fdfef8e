"""Adapter sites of a network (its linear layers and its embedding), and the meaning of paths in PEFT adapters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final

from ..._core import VOCABULARY_SLICE, LoraModuleInfo, lora_modules
from ..checkpoint.heads_apart import VALUES, head_path
from ..checkpoint.stacked_experts import StackedExperts
from .network import Network
from .ops import (
    Embedding,
    Experts,
    LatentQueries,
    LatentValues,
    LayerNorm,
    Linear,
    Op,
)
from .weights import LinearWeight, Part, Split, name_now, whole

EXPERT_MODULES: Final = ("moe_h_to_4h", "moe_gate", "moe_4h_to_h")
ROUTER: Final = "moe_router"
"""Gate, up and down of each expert."""

KV_B: Final = "attn_kv_b"
"""Layer that makes keys and values of compressed rows, as the Hugging Face model has it; no row has it."""

LATENT_MODULES: Final = ("attn_kv_b_key", "attn_kv_b_value")
"""Its layers of each head, by which queries and attended rows are multiplied. A row has all heads, as a row of experts
has all experts."""

HEAD_MODULES: Final = ("attn_q", "attn_k")
"""Modules whose outputs are heads that are rotated."""

NEW_TOKENS: Final = "new_tokens"
"""Module of an adapter's tokens beyond the vocabulary; it is not a layer."""

NORM: Final = "norm"
"""Module of an adapter's additions to biases of norms."""


def is_target(info: LoraModuleInfo) -> bool:
    """True if adapters may change the module only if lora_target_modules names it; other modules need not be named."""
    return info.name not in (NEW_TOKENS, NORM) and not info.is_setting


_MODULES = {info.name: info for info in lora_modules()}
# Names of fused modules, by their parts.
_FUSED = {tuple(sorted(info.parts)): info.name for info in lora_modules() if len(info.parts) > 1}


@dataclass(frozen=True)
class AdaptedModule:
    """A linear layer of the Hugging Face model, as adapters see it."""

    path: str
    """Path in the Hugging Face model, such as model.layers.0.self_attn.q_proj."""
    layer: int
    module: str
    """Name in adaptrt._core.lora_modules(). For lm_head and the embedding the layer is 0, for a norm its number."""
    in_size: int
    out_size: int
    rows: tuple[range, ...]
    """Ranges of the outputs in the Hugging Face layer, in the module's order."""
    transposed: bool
    """True if the Hugging Face model holds the layer as a Conv1D, [in, out]."""
    has_bias: bool
    expert: int = 0
    """Index of the expert, for modules of experts, or of the head, for LATENT_MODULES."""
    tied_to: str | None = None
    """Path of the embedding whose weight it shares."""
    heads: int = 1
    """Number of heads that the outputs consist of; 1 for layers without heads and for fused ones."""
    joined_rows: int = 1
    """Number of rows that the inputs were joined from (Part.joined_rows)."""

    @property
    def is_of_vocabulary(self) -> bool:
        """True for lm_head and the embedding."""
        return is_of_vocabulary(self.module)


def is_of_vocabulary(module: str) -> bool:
    """True for lm_head and the embedding."""
    return bool(_MODULES[module].is_of_vocabulary)


def is_of_experts(module: str) -> bool:
    """True for linear layers of experts."""
    return module in EXPERT_MODULES


@dataclass(frozen=True)
class ExpertBlock:
    """Experts of a layer; transformers 5 stacks their linear layers in parameters."""

    num_experts: int
    names: Mapping[str, str]
    """Last name of an expert's linear layer, such as gate_proj, by module."""
    alternates: bool
    """True if the outputs of gate and up are interleaved in their parameter; False if gate's come first."""
    swapped: bool
    """True if PEFT takes a parameter's inputs for its outputs: A may be [experts * rank, out], B [in, experts * rank].
    """


@dataclass(frozen=True)
class AdapterSite:
    """Linear layers with a common input, which adapters change together.

    lm_head and the embedding have a site per slice of the vocabulary, of VOCABULARY_SLICE tokens. A norm with a bias is
    a site with one input; adapters add to its bias.
    """

    layer: int
    """Number of the layer, of the slice or of the norm."""
    in_size: int
    weights: tuple[LinearWeight, ...]
    """Weights of the whole layer."""
    expert: int = 0
    """Index of the expert or head, for sites of experts and LATENT_MODULES; those of a layer follow one another."""
    outputs: int | None = None
    """Number of outputs of a slice of lm_head; None: all outputs of the weights."""
    experts_for_each: int = 1
    """Experts and heads: ratio of the layer's to those of this rank."""

    @property
    def parts(self) -> tuple[Part, ...]:
        """Parts of the whole layer's output, in order."""
        return tuple(part for weight in self.weights for part in weight.parts)

    @property
    def is_of_vocabulary(self) -> bool:
        """True for a slice of lm_head or of the embedding."""
        module = self.parts[0].module
        return module is not None and is_of_vocabulary(module)

    @property
    def is_norm(self) -> bool:
        """True for a norm."""
        return self.parts[0].module == NORM

    @property
    def is_of_experts(self) -> bool:
        """True for a layer of an expert."""
        module = self.parts[0].module
        return module is not None and is_of_experts(module)

    def outputs_of(self, part: Part) -> int:
        """Number of outputs that a part has in this site."""
        return part.outputs if self.outputs is None else self.outputs


def adapter_sites(network: Network) -> list[AdapterSite]:
    """Adapter sites of a network, in the order of execution."""
    return [site for op in network.ops for site in sites_of(op)]


def vocabulary_slices(vocab_size: int) -> list[range]:
    """Ranges of the tokens in each slice."""
    return [range(first, min(first + VOCABULARY_SLICE, vocab_size)) for first in range(0, vocab_size, VOCABULARY_SLICE)]


def sites_of(op: Op) -> list[AdapterSite]:
    """Sites of one op. For experts: gate and up of each expert, then down of each expert.

    For latent attention: keys or values of each head.
    """
    if isinstance(op, Embedding):
        if op.as_linear is None:
            return []
        slices = enumerate(vocabulary_slices(op.as_linear.inputs))
        return [AdapterSite(number, len(tokens), (op.as_linear,)) for number, tokens in slices]
    if isinstance(op, LayerNorm):
        return [] if op.number is None else [AdapterSite(op.number, 1, (_as_linear(op),))]
    if isinstance(op, Linear) and op.layer is None:
        if op.weights[0].parts[0].module is None:
            return []
        slices = enumerate(vocabulary_slices(op.output.width))
        return [AdapterSite(number, op.input.width, op.weights, outputs=len(tokens)) for number, tokens in slices]
    if isinstance(op, Linear):
        assert op.layer is not None
        return [AdapterSite(op.layer, op.input.width, op.weights)]
    if isinstance(op, (LatentQueries, LatentValues)):
        heads = op.keys if isinstance(op, LatentQueries) else op.values
        for_each = 1 + op.num_remote_heads // len(heads)
        return [
            AdapterSite(op.layer, weight.inputs, (weight,), head, experts_for_each=for_each)
            for head, weight in enumerate(heads, op.first_head)
        ]
    if not isinstance(op, Experts):
        return []
    layers = [*zip(op.gate, op.up, strict=True)], [(down,) for down in op.down]
    for_each = 1 + op.num_remote_experts // len(op.down)
    return [
        AdapterSite(op.layer, weights[0].inputs, weights, expert, experts_for_each=for_each)
        for of_experts in layers
        for expert, weights in enumerate(of_experts, op.first_expert)
    ]


def _as_linear(norm: LayerNorm) -> LinearWeight:
    """Returns a layer with one input and the norm's bias."""
    assert norm.weight is not None
    assert norm.bias is not None
    source = norm.bias.source.removesuffix(".bias")
    part = whole(source, NORM, norm.output.width)
    return LinearWeight(name=norm.weight.name, parts=(part,), inputs=1, split=Split.NONE, bias=True)


def module_id(part: Part) -> int:
    """TensorRT-LLM's id of a part's module."""
    assert part.module is not None
    return int(_MODULES[part.module].id)


class AdaptedModules:
    """The linear layers of a model that adapters can change."""

    def __init__(self, network: Network) -> None:
        self.num_layers: Final = network.config.num_adapted_layers
        self.hidden_size: Final = network.config.hidden_size
        self.max_positions: Final = network.config.max_position_embeddings
        self.inputs_embeds_scale: Final = next(
            (op.inputs_embeds_scale for op in network.ops if isinstance(op, Embedding)), 1.0
        )
        """Factor by which the Hugging Face model multiplies embeddings that it gets in place of tokens."""
        self.has_encoder: Final = network.encoder_output is not None
        """True if the model has an encoder before the decoder."""
        self.is_encoder_only: Final = network.config.is_encoder_only
        self.is_tower: Final = network.patches is not None
        """True for the vision tower of a model, whose adapters are those of the whole model."""
        pooler = set() if network.pooler is None else {network.pooler.weight.source.removesuffix(".weight")}
        self.pooler_paths: Final = _with_older(pooler, network)
        """Paths of the linear layer before a classifier's last one; empty if there is none."""
        self.ignored: Final = _with_older(network.ignored, network)
        """Paths of linear layers that AdaptRT does not use."""
        self.elsewhere: Final = _with_older(network.elsewhere, network)
        """Paths below which another network uses adapters."""
        self._older_names = network.older_names
        self._older_endings = network.older_endings
        self.fused_layers: Final = network.fused_layers
        """Linear layers of the model's files that hold several layers of the model."""
        found = dict(_adapted_modules(network))
        self.whole_paths: Final = _with_older(found.keys(), network)
        """Paths of linear layers and of norms with biases from the root of the model, in all layouts."""
        norms = {path: module for path, module in found.items() if module.module == NORM}
        self.by_path: Final[Mapping[str, AdaptedModule]] = {
            path: module for path, module in found.items() if path not in norms
        }
        """Modules by path in the Hugging Face model, such as model.layers.0.self_attn.q_proj."""
        self.by_any_path: Final[Mapping[str, AdaptedModule]] = _by_any_path(self.by_path, network)
        """Modules by any accepted path, including those of a bare decoder (layers.0.self_attn.q_proj) and of older
        layouts.
        """
        self._norms: Final = _by_any_path(norms, network)
        self.layer_of_heads: Final = network.config.layer_of_heads
        """Layer of latent attention that is used as two layers for each head; None: there is none."""
        self.stacked_experts: Final = network.stacked_experts
        """Parameters that hold linear layers of all experts in the model's files."""
        self.expert_blocks: Final = _expert_blocks(self.by_any_path, network.stacked_experts)
        """Experts by the path of their container, such as model.layers.0.mlp.experts."""
        self._parts: dict[tuple[int, str], tuple[int, int, int]] = {
            (site.layer, part.module): (number, site.in_size, site.outputs_of(part))
            for number, site in enumerate(adapter_sites(network))
            for part in site.parts
            if part.module is not None and site.expert == 0
        }
        self._parts |= {
            (module.layer, KV_B): (-1, module.in_size, module.out_size)
            for module in found.values()
            if module.module == KV_B
        }
        self._num_experts: dict[tuple[int, str], int] = {}
        for site in adapter_sites(network):
            for part in site.parts:
                if part.module is not None:
                    self._num_experts[site.layer, part.module] = site.expert + 1

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the modules of the model's linear layers, with parts of fused ones, in the order of their ids."""
        found = {module.module for module in self.by_path.values()} | {module for _, module in self._parts}
        return tuple(name for name in _MODULES if name in found and name not in (NORM, KV_B))

    def find(self, path: str) -> AdaptedModule | None:
        """Returns the linear layer at a path of by_any_path, or the norm with a bias; None if there is none."""
        return self.by_any_path.get(path) or self._norms.get(path)

    def tied_with(self, layer: AdaptedModule) -> list[str]:
        """Paths of other layers that share the weight of lm_head or of the embedding."""
        owner = layer.tied_to or layer.path
        return [path for path, other in self.by_path.items() if owner in (path, other.tied_to) and path != layer.path]

    def name_now(self, name: str) -> str:
        """Current name of a tensor of the Hugging Face model, which may have an older layout."""
        return name_now(name, self._older_names, self._older_endings)

    def sizes_of(self, layer: int, module: str) -> tuple[int, int] | None:
        """(in, out) of a module of a layer, also of fused ones; None if the layer does not have it.

        For experts, the sizes of each expert; for lm_head and embedding, those of slice number `layer`.
        """
        parts = [self._parts.get((layer, part)) for part in _MODULES[module].parts]
        found = [part for part in parts if part is not None]
        if len(found) != len(parts) or len({site for site, _, _ in found}) != 1:
            return None
        return found[0][1], sum(outputs for _, _, outputs in found)

    def has(self, module: str) -> bool:
        """True if any layer has the module."""
        return any(self.sizes_of(layer, module) is not None for layer in range(self.num_layers))

    def num_experts(self, layer: int, module: str) -> int:
        """Number of experts that have a module of a layer; 1 if the module does not belong to experts."""
        return self._num_experts.get((layer, module), 1)


def _adapted_modules(network: Network) -> Iterator[tuple[str, AdaptedModule]]:
    for site in adapter_sites(network):
        if site.is_of_vocabulary:
            yield from _whole_vocabulary(site)
            continue
        if site.parts[0].module in LATENT_MODULES:
            yield from _layer_of_heads(site, network)
            continue
        by_source: dict[str, list[Part]] = {}
        for part in site.parts:
            by_source.setdefault(part.source, []).append(part)
        for source, parts in by_source.items():
            named = {part.module: part for part in parts if part.module is not None}
            module = next(iter(named)) if len(named) == 1 else _FUSED[tuple(sorted(named))]
            ordered = [named[name] for name in _MODULES[module].parts]
            yield (
                source,
                AdaptedModule(
                    path=source,
                    layer=site.layer,
                    module=module,
                    in_size=site.in_size,
                    out_size=sum(part.outputs for part in ordered),
                    rows=_joined(ordered),
                    transposed=parts[0].transposed,
                    has_bias=any(weight.bias for weight in site.weights if parts[0] in weight.parts),
                    expert=site.expert,
                    heads=parts[0].units if module in HEAD_MODULES and len(named) == 1 else 1,
                    joined_rows=parts[0].joined_rows,
                ),
            )


def _whole_vocabulary(site: AdapterSite) -> Iterator[tuple[str, AdaptedModule]]:
    """Yields the whole layer for its first slice, and nothing for the others."""
    (weight,) = site.weights
    (part,) = weight.parts
    if site.layer != 0 or part.module is None:
        return
    tied = weight.tied_to
    yield (
        part.source,
        AdaptedModule(
            path=part.source,
            layer=0,
            module=part.module,
            in_size=weight.inputs,
            out_size=part.outputs,
            rows=part.rows,
            transposed=part.transposed,
            has_bias=weight.bias,
            tied_to=None if tied is None else tied.source.removesuffix(".weight"),
        ),
    )


def _layer_of_heads(site: AdapterSite, network: Network) -> Iterator[tuple[str, AdaptedModule]]:
    """Yields the Hugging Face layer of all heads for the first head's values, and nothing for the others."""
    layer = network.config.layer_of_heads
    (part,) = site.parts
    if layer is None or site.expert != 0 or part.module != LATENT_MODULES[1]:
        return
    path = part.source.removesuffix(f".{head_path(layer.name, 0, VALUES)}") + f".{layer.name}"
    yield (
        path,
        AdaptedModule(
            path=path,
            layer=site.layer,
            module=KV_B,
            in_size=site.in_size,
            out_size=layer.outputs,
            rows=(range(layer.outputs),),
            transposed=False,
            has_bias=False,
        ),
    )


def _with_older(paths: AbstractSet[str], network: Network) -> frozenset[str]:
    """Adds the paths of older layouts of the model."""
    older = {
        (old + f"{path}.".removeprefix(now)).removesuffix(".")
        for path in paths
        for old, now in network.older_names.items()
        if f"{path}.".startswith(now)
    }
    return frozenset({*paths, *older})


def _expert_blocks(modules: Mapping[str, AdaptedModule], stacked: StackedExperts | None) -> dict[str, ExpertBlock]:
    alternates = stacked is not None and stacked.alternates
    swapped = stacked is not None and stacked.swapped_by_peft
    names: dict[str, dict[str, str]] = {}
    counts: dict[str, int] = {}
    for path, module in modules.items():
        block, _, name = path.rpartition(f".{module.expert}.")
        if module.module in EXPERT_MODULES:
            names.setdefault(block, {})[module.module] = name
            counts[block] = max(counts.get(block, 0), module.expert + 1)
    return {block: ExpertBlock(counts[block], found, alternates, swapped) for block, found in names.items()}


def _by_any_path(modules: Mapping[str, AdaptedModule], network: Network) -> dict[str, AdaptedModule]:
    """Maps all accepted paths to modules, without paths that encoder and decoder share."""
    found: dict[str, dict[str, AdaptedModule]] = {}
    for path, module in modules.items():
        for name in _paths_of(path, network):
            found.setdefault(name, {})[path] = module
    return {name: next(iter(those.values())) for name, those in found.items() if len(those) == 1}


def _paths_of(path: str, network: Network) -> Iterator[str]:
    yield from _whole_paths_of(path, network.older_names)
    for stored, inner in network.inner_names.items():
        if f".{stored}." in path:
            yield from _whole_paths_of(path.replace(f".{stored}.", f".{inner}."), {})


def _whole_paths_of(path: str, older_names: Mapping[str, str]) -> Iterator[str]:
    """Yields all paths of a layer, including those relative to the models around the list of layers."""
    yield path
    yield from (older + path.removeprefix(now) for older, now in older_names.items() if path.startswith(now))
    inner = path.partition(".")[2]
    while inner and not inner.partition(".")[0].isdigit():  # the list of layers keeps its name
        yield inner
        inner = inner.partition(".")[2]


def _joined(parts: list[Part]) -> tuple[range, ...]:
    joined: list[range] = []
    for rows in (rows for part in parts for rows in part.rows):
        if joined and joined[-1].stop == rows.start:
            joined[-1] = range(joined[-1].start, rows.stop)
        else:
            joined.append(rows)
    return tuple(joined)
