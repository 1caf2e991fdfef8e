"""Parses tensor names of PEFT adapters: module, layer and role, or the reason why a tensor cannot be used."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cache

from ..._core import LoraModuleInfo, lora_modules
from ..models.registry import FAMILIES, specimen
from ..network.adapter_sites import EXPERT_MODULES, KV_B, AdaptedModule, AdaptedModules

MODULES = {info.name: info for info in lora_modules()}
MODULE_OF_ID = {info.id: info for info in lora_modules()}
_FUSED = {frozenset(info.parts): info for info in lora_modules()}

PEFT_PREFIX = "base_model.model."
EMBEDDING = "embedding"
LM_HEAD = "lm_head"

# Layers that TensorRT-LLM's converter maps, with the modules of their outputs in order. Their models belong to no
# family of formats/models/, so the families cannot tell.
_QKV = ("attn_q", "attn_k", "attn_v")
_OTHER_LAYERS = {"self_attn.query_key_value": _QKV, "self_attn.c_attn": _QKV}


@dataclass(frozen=True)
class _KnownLayers:
    """Facts that hold for all families; they give meaning to paths if the model is not known."""

    modules: Mapping[str, tuple[str, ...]]
    """Modules of the outputs, in order, by path within a decoder layer, such as self_attn.qkv_proj.

    () if the order depends on the model.
    """
    roots: frozenset[str]
    """Prefixes of a layer's number, such as model.layers, or layers for a bare decoder."""
    vocabulary: Mapping[str, str]
    """LM_HEAD or EMBEDDING, by their paths in any family."""
    conv1d_names: frozenset[str]
    """Last names of layers that transformers holds as a Conv1D, whose weight is [in, out].

    PEFT sets fan_in_fan_out to false for all other layer classes.
    """


@cache
def _known_layers() -> _KnownLayers:
    modules: dict[str, tuple[str, ...]] = dict(_OTHER_LAYERS)
    roots, conv1d_names = set(), set()
    vocabulary: dict[str, str] = {}
    for family in FAMILIES.values():
        adapted = AdaptedModules(specimen(family))
        if adapted.has_encoder:  # its layers are numbered after the decoder's, so the model must be known
            continue
        for path, found in adapted.by_any_path.items():
            if found.is_of_vocabulary:
                vocabulary[path] = found.module
                continue
            root, _, within = path.partition(".0.")
            if not within:  # a layer of the whole model; only the model says that it has one
                continue
            roots.add(root)
            # Rows have all experts or heads of a layer, and only the model says how many there are.
            modules[within] = () if found.module in (*EXPERT_MODULES, KV_B) else _parts_in_order(found)
            if found.transposed:
                conv1d_names.add(within.rpartition(".")[2])
    return _KnownLayers(modules, frozenset(roots), vocabulary, frozenset(conv1d_names))


def _parts_in_order(found: AdaptedModule) -> tuple[str, ...]:
    """Parts of a specimen's module in the order of its outputs; () if a part is not contiguous.

    In a specimen, all parts of a module have the same size.
    """
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
    """Role of a LoRA tensor in its module; other kinds have other names."""

    A = "lora_A"
    B = "lora_B"
    MAGNITUDE = "magnitude"
    SHIFT = "lora_B.bias"


@dataclass(frozen=True, order=True)
class ModuleKey:
    """One adapted linear layer, ordered like rows: by layer, then by module id."""

    layer: int
    module_id: int
    # Path in the Hugging Face model, such as "model.layers.0.self_attn.q_proj". PEFT matches patterns on it.
    path: str
    # Index of the expert, for modules of experts.
    expert: int = 0
    # Modules of the Hugging Face layer's outputs, in order.
    source_parts: tuple[str, ...] = field(default=(), compare=False)
    # Ranges of the module's outputs in the Hugging Face layer, if the model is known.
    rows: tuple[range, ...] = field(default=(), compare=False)

    @property
    def row(self) -> tuple[int, int]:
        """Identifies the row in a request's tensors; all experts of a module share one."""
        return self.layer, self.module_id

    @property
    def module(self) -> LoraModuleInfo:
        """The module's entry in the table of modules."""
        return MODULE_OF_ID[self.module_id]

    def rows_of(self, outputs: int) -> tuple[range, ...]:
        """Ranges of the module's outputs among the `outputs` of the Hugging Face layer."""
        if self.rows:
            return self.rows
        if self.is_in_order:
            return (range(outputs),)
        share = outputs // len(self.source_parts)
        places = [self.source_parts.index(part) for part in self.module.parts]
        return tuple(range(place * share, (place + 1) * share) for place in places)

    def in_source_order(self, outputs: int) -> list[range]:
        """Ranges of the module's outputs, in the order in which the Hugging Face layer has them."""
        places = []
        first = 0
        for rows in self.rows_of(outputs):
            places.append((rows.start, range(first, first + len(rows))))
            first += len(rows)
        return [module_rows for _, module_rows in sorted(places, key=lambda place: place[0])]

    @property
    def is_in_order(self) -> bool:
        """True if the Hugging Face layer has the parts in the module's order, as far as is known."""
        return not self.source_parts or self.source_parts == self.module.parts

    @property
    def is_conv1d(self) -> bool:
        """True if Hugging Face models hold this layer as a Conv1D."""
        return self.path.rpartition(".")[2] in _known_layers().conv1d_names


@dataclass(frozen=True)
class TensorName:
    """A parsed tensor name."""

    key: ModuleKey
    # Role in the module: a Role, or the last name that other kinds give it.
    role: str
    # The adapter's name before "weight", such as "default"; "" in files that PEFT saved, which omit it.
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
    """Pattern of names that end with one of `roles`, optionally followed by the adapter's name."""
    return re.compile(rf"(?P<path>.+?)\.(?P<role>{'|'.join(roles)})(?:\.(?P<adapter>[^.]+))?")


def parse_tensor_name(
    name: str, modules: AdaptedModules | None = None, pattern: re.Pattern[str] = LORA_NAMES
) -> TensorName | str:
    """Parses a tensor's name; returns a string with the reason if the tensor cannot be used.

    modules: modules of the model that the adapter is for; None: the model is not known.
    pattern: pattern of the kind's names; LoRA's by default.
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
    """Role of a LoRA tensor whose name has no group `role`."""
    if groups["embedding"]:
        return f"lora_{groups['embedding']}"
    return str((Role.SHIFT if groups["shift"] else Role.MAGNITUDE).value)


def module_at(path: str, modules: AdaptedModules | None = None) -> ModuleKey | None:
    """Returns the module at a path of a Hugging Face model; None if no adapter can change it, as far as is known."""
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
        "whole embeddings and lm_heads are accepted only in PEFT adapters, under the model's own paths",
    ),
    (r"embed|\bwpe\b", "only embeddings of tokens can be adapted"),
    (
        r"experts\.",
        "belongs to experts, whose number only the model states; give the base model, or an engine of it",
    ),
    (
        r"vision|visual|multi_modal_projector",
        "belongs to the vision tower; only the language model is served, for text",
    ),
    (r"encoder|cross_?attn|audio", "only the layers of a decoder can be adapted"),
    (r"\.bias$", "trained biases are accepted for linear layers, and for norms if the model is known"),
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
