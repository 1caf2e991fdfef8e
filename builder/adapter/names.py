"""Names of tensors in PEFT adapters: which module, layer and role each has, or why it cannot be used."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum

from ..._core import LoraModuleInfo, lora_modules
from ..network.adapter_sites import AdaptedModules

MODULES = {info.name: info for info in lora_modules()}
_MODULE_OF_ID = {info.id: info for info in lora_modules()}
_FUSED = {frozenset(info.parts): info for info in lora_modules()}

# Hugging Face's module path within a decoder layer -> the modules in adaptrt._core.lora_modules() that its outputs are,
# in their order: what paths mean where the model is not known.
# gate_proj goes through the activation and is therefore mlp_h_to_4h; up_proj is mlp_gate.
_QKV = ("attn_q", "attn_k", "attn_v")
MODULES_OF_HF_NAME = {
    "self_attn.q_proj": ("attn_q",),
    "self_attn.k_proj": ("attn_k",),
    "self_attn.v_proj": ("attn_v",),
    "self_attn.qkv_proj": _QKV,
    "self_attn.query_key_value": _QKV,
    "self_attn.c_attn": _QKV,
    "self_attn.o_proj": ("attn_dense",),
    "self_attn.dense": ("attn_dense",),
    "mlp.gate_proj": ("mlp_h_to_4h",),
    "mlp.c_fc": ("mlp_h_to_4h",),
    "mlp.up_proj": ("mlp_gate",),
    "mlp.down_proj": ("mlp_4h_to_h",),
    "mlp.c_proj": ("mlp_4h_to_h",),
    "mlp.gate_up_proj": ("mlp_h_to_4h", "mlp_gate"),
}

# transformers.pytorch_utils.Conv1D, which stores its weight as [in, out], occurs under these names alone.
# PEFT takes fan_in_fan_out from the layer's class; for every other name it sets the field to false by itself.
CONV1D_NAMES = frozenset({"c_attn", "c_fc", "c_proj"})

PEFT_PREFIX = "base_model.model."
# What may stand before "layers.N": nothing for a bare decoder, "model" for a ...ForCausalLM.
DECODER_PREFIXES = ("", "model.")


class Role(Enum):
    """What a tensor is to its module."""

    A = "lora_A"
    B = "lora_B"
    MAGNITUDE = "magnitude"


@dataclass(frozen=True, order=True)
class ModuleKey:
    """One adapted linear layer, ordered as rows are: by layer, then by module id."""

    layer: int
    module_id: int
    # In the Hugging Face model, such as "model.layers.0.self_attn.q_proj". PEFT matches patterns on it.
    path: str
    # The modules that its outputs are in the Hugging Face model, in their order.
    source_parts: tuple[str, ...] = field(default=(), compare=False)
    # Where the module's outputs are among those of the Hugging Face layer, if the model is known.
    rows: tuple[range, ...] = field(default=(), compare=False)

    @property
    def module(self) -> LoraModuleInfo:
        """The module's row in the one table of modules."""
        return _MODULE_OF_ID[self.module_id]

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
        return self.path.rpartition(".")[2] in CONV1D_NAMES


@dataclass(frozen=True)
class TensorName:
    """A tensor's name, taken apart."""

    key: ModuleKey
    role: Role
    # The adapter's name before "weight", such as "default"; "" in files that PEFT saved, which leaves it out.
    adapter: str


_ROLES = re.compile(
    r"(?P<path>.+?)\.(?:"
    r"(?P<matrix>lora_[AB])(?:\.(?P<matrix_adapter>[^.]+))?\.weight"
    r"|lora_magnitude_vector(?:\.(?!weight$)(?P<magnitude_adapter>[^.]+))?(?:\.weight)?"
    r"|weight_m_wdecomp(?:\.(?P<decomposed_adapter>[^.]+))?\.weight"
    r")"
)
_LAYER = re.compile(r"(?P<prefix>.*?)layers\.(?P<layer>0|[1-9]\d{0,8})\.(?P<module>.+)")


def parse_tensor_name(name: str, modules: AdaptedModules | None = None) -> TensorName | str:
    """Takes a tensor's name apart; a string is the reason why the tensor cannot be used.

    `modules` are those of the model that the adapter is for, where it is known.
    """
    match = _ROLES.fullmatch(name)
    if match is None:
        return _reason(name)
    path = match["path"].removeprefix(PEFT_PREFIX)
    key = _key_in(modules, path) or _known_key(path)
    if key is None:
        return _reason(name)
    if match["matrix"]:
        role, adapter = Role(match["matrix"]), match["matrix_adapter"]
    else:
        role, adapter = Role.MAGNITUDE, match["magnitude_adapter"] or match["decomposed_adapter"]
    return TensorName(key, role, adapter or "")


def _key_in(modules: AdaptedModules | None, path: str) -> ModuleKey | None:
    found = modules.find(path) if modules is not None else None
    return None if found is None else ModuleKey(found.layer, MODULES[found.module].id, path, rows=found.rows)


def _known_key(path: str) -> ModuleKey | None:
    layer = _LAYER.fullmatch(path)
    if layer is None or layer["prefix"] not in DECODER_PREFIXES or layer["module"] not in MODULES_OF_HF_NAME:
        return None
    parts = MODULES_OF_HF_NAME[layer["module"]]
    return ModuleKey(int(layer["layer"]), _FUSED[frozenset(parts)].id, path, source_parts=parts)


_REASONS = (
    (r"lora_B(\.[^.]+)?\.bias$", "a bias of lora_B (lora_bias) is not supported"),
    (r"\.bias$", "trained biases are not supported"),
    (r"lora_embedding_|embed_tokens|lm_head|\bwte\b|\bwpe\b", "embeddings and lm_head cannot be adapted"),
    (r"experts|block_sparse_moe|router|\.mlp\.gate\.", "mixture-of-experts layers cannot be adapted"),
    (r"encoder|cross_?attn|vision|visual|audio", "only the layers of a decoder can be adapted"),
    (r"norm", "normalisation weights cannot be adapted"),
    (r"lora_diag|lora_velora|monteclora", "this variant of LoRA is not supported"),
)


def _reason(name: str) -> str:
    for pattern, reason in _REASONS:
        if re.search(pattern, name):
            return reason
    accepted = ", ".join(sorted(path.rpartition(".")[2] for path in MODULES_OF_HF_NAME))
    return (
        "not a tensor of a known module; accepted: [base_model.model.][model.]layers.N.{self_attn, mlp}.MODULE."
        "{lora_A.weight, lora_B.weight, lora_magnitude_vector, weight_m_wdecomp.weight} with MODULE one of "
        f"{accepted}"
    )
