"""Names of tensors in PEFT adapters: which module, layer and role each has, or why it cannot be used."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cache

from ..._core import LoraModuleInfo, lora_modules
from ..models.registry import FAMILIES, specimen
from ..network.adapter_sites import EXPERT_MODULES, AdaptedModule, AdaptedModules

MODULES = {info.name: info for info in lora_modules()}
MODULE_OF_ID = {info.id: info for info in lora_modules()}
_FUSED = {frozenset(info.parts): info for info in lora_modules()}

PEFT_PREFIX = "base_model.model."
EMBEDDING = "embedding"
LM_HEAD = "lm_head"

# Layers that TensorRT-LLM's converter maps, with the modules that their outputs are, in order. They belong to models
# that are no family of formats/models/, so the families cannot tell.
_QKV = ("attn_q", "attn_k", "attn_v")
_OTHER_LAYERS = {"self_attn.query_key_value": _QKV, "self_attn.c_attn": _QKV}


@dataclass(frozen=True)
class _KnownLayers:
    """What is known of all families together: what paths mean where the model is not known."""

    modules: Mapping[str, tuple[str, ...]]
    """By the path within a decoder layer, such as self_attn.qkv_proj: the modules that its outputs are, in their order;
    () where the order depends on the model."""
    roots: frozenset[str]
    """What may stand before a layer's number, such as model.layers, or layers for a bare decoder."""
    vocabulary: Mapping[str, str]
    """By the path of lm_head and of the embedding, in any family: which of the two."""
    conv1d_names: frozenset[str]
    """Last names of layers that transformers holds as a Conv1D, whose weight is [in, out].

    PEFT takes fan_in_fan_out from the layer's class; for every other one it sets the field to false by itself."""


@cache
def _known_layers() -> _KnownLayers:
    modules: dict[str, tuple[str, ...]] = dict(_OTHER_LAYERS)
    roots, conv1d_names = set(), set()
    vocabulary: dict[str, str] = {}
    for family in FAMILIES.values():
        adapted = AdaptedModules(specimen(family))
        if adapted.has_encoder:  # the model must be known: layers of the encoder come behind the decoder's
            continue
        for path, found in adapted.by_any_path.items():
            if found.is_of_vocabulary:
                vocabulary[path] = found.module
                continue
            root, _, within = path.partition(".0.")
            roots.add(root)
            # A row has all experts of a layer, and how many there are only the model says.
            modules[within] = () if found.module in EXPERT_MODULES else _parts_in_order(found)
            if found.transposed:
                conv1d_names.add(within.rpartition(".")[2])
    return _KnownLayers(modules, frozenset(roots), vocabulary, frozenset(conv1d_names))


def _parts_in_order(found: AdaptedModule) -> tuple[str, ...]:
    """Of a specimen, in which all parts of a module are of one size."""
    parts = MODULES[found.module].parts
    share = found.out_size // len(parts)
    pieces = [row for rows in found.rows for row in rows]
    starts = {part: pieces[at * share] for at, part in enumerate(parts)}
    in_one_piece = all(
        pieces[at * share : (at + 1) * share] == list(range(starts[part], starts[part] + share))
        for at, part in enumerate(parts)
    )
    return tuple(sorted(parts, key=starts.__getitem__)) if in_one_piece else ()


class Role(str, Enum):
    """What a tensor of LoRA is to its module; other kinds call theirs by other names."""

    A = "lora_A"
    B = "lora_B"
    MAGNITUDE = "magnitude"
    SHIFT = "lora_B.bias"


@dataclass(frozen=True, order=True)
class ModuleKey:
    """One adapted linear layer, ordered as rows are: by layer, then by module id."""

    layer: int
    module_id: int
    # In the Hugging Face model, such as "model.layers.0.self_attn.q_proj". PEFT matches patterns on it.
    path: str
    # Whose it is, where the module is one of experts.
    expert: int = 0
    # The modules that its outputs are in the Hugging Face model, in their order.
    source_parts: tuple[str, ...] = field(default=(), compare=False)
    # Where the module's outputs are among those of the Hugging Face layer, if the model is known.
    rows: tuple[range, ...] = field(default=(), compare=False)

    @property
    def row(self) -> tuple[int, int]:
        """What it shares a row of a request's tensors with: experts have one for all of them."""
        return self.layer, self.module_id

    @property
    def module(self) -> LoraModuleInfo:
        """The module's row in the one table of modules."""
        return MODULE_OF_ID[self.module_id]

    def rows_of(self, outputs: int) -> tuple[range, ...]:
        """Where the module's outputs are among the `outputs` of the Hugging Face layer."""
        if self.rows:
            return self.rows
        if self.is_in_order:
            return (range(outputs),)
        share = outputs // len(self.source_parts)
        places = [self.source_parts.index(part) for part in self.module.parts]
        return tuple(range(place * share, (place + 1) * share) for place in places)

    def in_source_order(self, outputs: int) -> list[range]:
        """Outputs of the module, in the order in which the Hugging Face layer has them."""
        places = []
        first = 0
        for rows in self.rows_of(outputs):
            places.append((rows.start, range(first, first + len(rows))))
            first += len(rows)
        return [module_rows for _, module_rows in sorted(places, key=lambda place: place[0])]

    @property
    def is_in_order(self) -> bool:
        """Whether the Hugging Face layer has the parts in the module's order, as far as that is known."""
        return not self.source_parts or self.source_parts == self.module.parts

    @property
    def is_conv1d(self) -> bool:
        """True when Hugging Face models hold this layer as a Conv1D."""
        return self.path.rpartition(".")[2] in _known_layers().conv1d_names


@dataclass(frozen=True)
class TensorName:
    """A tensor's name, taken apart."""

    key: ModuleKey
    # What it is to its module: a Role, or the last name that other kinds give it.
    role: str
    # The adapter's name before "weight", such as "default"; "" in files that PEFT saved, which leaves it out.
    adapter: str


LORA_NAMES = re.compile(
    r"(?P<path>.+?)\.(?:"
    r"(?P<role>lora_[AB])(?:\.(?P<adapter>[^.]+))?\.weight"
    r"|(?P<shift>lora_B)(?:\.(?P<shift_adapter>[^.]+))?\.bias"
    r"|lora_embedding_(?P<embedding>[AB])(?:\.(?P<embedding_adapter>[^.]+))?"
    r"|lora_magnitude_vector(?:\.(?!weight$)(?P<magnitude_adapter>[^.]+))?(?:\.weight)?"
    r"|weight_m_wdecomp(?:\.(?P<decomposed_adapter>[^.]+))?\.weight"
    r")"
)
_LAYER = re.compile(r"(?P<root>.*?)\.(?P<layer>0|[1-9]\d{0,8})\.(?P<module>.+)")


def tensor_pattern(roles: Iterable[str]) -> re.Pattern[str]:
    """Of names that end with one of `roles`, and with the adapter's own name after it where there is one."""
    return re.compile(rf"(?P<path>.+?)\.(?P<role>{'|'.join(roles)})(?:\.(?P<adapter>[^.]+))?")


def parse_tensor_name(
    name: str, modules: AdaptedModules | None = None, pattern: re.Pattern[str] = LORA_NAMES
) -> TensorName | str:
    """Takes a tensor's name apart; a string is the reason why the tensor cannot be used.

    modules: those of the model that the adapter is for, where it is known.
    pattern: of the kind's names; LoRA's unless another is given.
    """
    match = pattern.fullmatch(name)
    if match is None:
        return _reason(name)
    key = module_at(match["path"].removeprefix(PEFT_PREFIX), modules)
    if key is None:
        return _reason(name)
    groups = match.groupdict()
    adapter = next((name for group, name in groups.items() if group.endswith("adapter") and name), "")
    role = groups["role"] or _role_of(groups)
    if key.module.is_norm and role != "bias":
        return _reason(name)
    of_embedding = groups.get("embedding") is not None
    if pattern is LORA_NAMES and role != Role.MAGNITUDE and of_embedding != (key.module.name == EMBEDDING):
        return "embeddings have lora_embedding_A and lora_embedding_B, linear layers have lora_A and lora_B"
    return TensorName(key, role, adapter)


def _role_of(groups: Mapping[str, str | None]) -> str:
    """Of a tensor of LoRA whose name does not say it in one word."""
    if groups["embedding"]:
        return f"lora_{groups['embedding']}"
    return str((Role.SHIFT if groups["shift"] else Role.MAGNITUDE).value)


def module_at(path: str, modules: AdaptedModules | None = None) -> ModuleKey | None:
    """The module at a path of a Hugging Face model; None where none can be adapted, as far as that is known."""
    return _key_in(modules, path) or _known_key(path)


def _key_in(modules: AdaptedModules | None, path: str) -> ModuleKey | None:
    found = modules.find(path) if modules is not None else None
    return (
        None if found is None else ModuleKey(found.layer, MODULES[found.module].id, path, found.expert, rows=found.rows)
    )


def _known_key(path: str) -> ModuleKey | None:
    layer = _LAYER.fullmatch(path)
    known = _known_layers()
    if path in known.vocabulary:
        return ModuleKey(0, MODULES[known.vocabulary[path]].id, path)
    if layer is None or layer["root"] not in known.roots or not known.modules.get(layer["module"]):
        return None
    parts = known.modules[layer["module"]]
    return ModuleKey(int(layer["layer"]), _FUSED[frozenset(parts)].id, path, source_parts=parts)


_REASONS = (
    (
        r"(embed_tokens|lm_head|\bwte|embed_in|embed_out)\.(weight|bias)$",
        "whole embeddings and lm_heads are served of PEFT's adapters, by the paths that the model has",
    ),
    (r"embed|\bwpe\b", "of embeddings, those of tokens alone can be adapted"),
    (
        r"experts\.",
        "belongs to experts, and how many there are only the model says; give the base model, or an engine of it",
    ),
    (
        r"vision|visual|multi_modal_projector",
        "belongs to the vision tower; the language model alone is served, for text",
    ),
    (r"encoder|cross_?attn|audio", "only the layers of a decoder can be adapted"),
    (r"\.bias$", "a trained bias is served of linear layers, and of norms where the model is known"),
    (r"norm|\bln_", "normalisation weights cannot be adapted"),
    (r"lora_diag|lora_velora|monteclora", "this variant of LoRA is not supported"),
)


def _reason(name: str) -> str:
    for pattern, reason in _REASONS:
        if re.search(pattern, name):
            return reason
    known = _known_layers().modules
    unclear = [path for path, parts in known.items() if not parts and f".{path}." in name]
    if unclear:
        return f"the order of the outputs of {unclear[0]} depends on the model; give the base model"
    accepted = ", ".join(sorted({path.rpartition(".")[2] for path in known}))
    return (
        "not a tensor of a known module; accepted: names such as [base_model.model.][model.]layers.N.self_attn.MODULE."
        "{lora_A.weight, lora_B.weight, lora_magnitude_vector, weight_m_wdecomp.weight} with MODULE one of "
        f"{accepted}"
    )
