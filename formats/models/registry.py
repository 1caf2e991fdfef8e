"""Table of the supported model families, and look-ups in it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from pathlib import Path
from typing import Any, Final

from ..._core import CheckpointError, DType
from ...common.json_fields import describe
from ..checkpoint.config import CheckpointConfig
from ..checkpoint.config_file import ConfigFile
from ..network.network import Network
from .apertus import APERTUS
from .bamba import BAMBA
from .bart import BART
from .bert import BERT
from .clip import CLIP_TOWER
from .cohere import COHERE, COHERE2
from .deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from .distilbert import DISTILBERT
from .encoder import EncoderConfig
from .exaone4 import EXAONE4
from .falcon import FALCON
from .family import ModelFamily
from .gemma import GEMMA
from .gemma2 import GEMMA2
from .gemma3 import GEMMA3, GEMMA3_VISION
from .gemma4 import GEMMA4, GEMMA4_VISION
from .glm import GLM, GLM4
from .glm4_moe import GLM4_MOE
from .gpt2 import GPT2
from .gpt_neox import GPT_NEOX
from .gpt_oss import GPT_OSS
from .granite import GRANITE
from .granite_hybrid import GRANITE_HYBRID
from .granite_moe import GRANITE_MOE, GRANITE_MOE_SHARED
from .granite_swa import GRANITE_MOE_SWA, GRANITE_SWA
from .hunyuan import HUNYUAN, HUNYUAN_MOE
from .idefics3 import IDEFICS3, SMOLVLM
from .jina_v3 import JINA_V3
from .lfm2 import LFM2, LFM2_MOE
from .llama import LLAMA
from .llama_relatives import CWM, ERNIE4_5, HELIUM, MINISTRAL, SEED_OSS
from .llava_family import LLAVA
from .mamba import MAMBA2
from .mistral import BAMBOO, MINISTRAL3, MISTRAL, MISTRAL3
from .mixtral import MIXTRAL
from .modernbert import MODERNBERT
from .nemotron_h import NEMOTRON_H
from .olmo2 import OLMO2, OLMO3
from .olmo_hybrid import OLMO_HYBRID
from .olmoe import OLMOE
from .opt import OPT
from .phi import PHI
from .phi3 import PHI3
from .qwen2 import QWEN2
from .qwen2_moe import QWEN2_MOE
from .qwen3 import QWEN3
from .qwen3_5 import QWEN3_5, QWEN3_5_MOE, QWEN3_5_MOE_VISION, QWEN3_5_VISION, QWEN3_NEXT
from .qwen3_moe import QWEN3_MOE, QWEN3_VL_MOE
from .qwen_vl import QWEN2_5_VL, QWEN2_VL, QWEN3_VL
from .roberta import ROBERTA, XLM_ROBERTA
from .siglip import IDEFICS3_TOWER, SMOLVLM_TOWER
from .smollm3 import SMOLLM3
from .squared_relu import ARCEE, JAIS2, NEMOTRON
from .stablelm import STABLELM
from .starcoder2 import STARCODER2
from .t5 import T5

FAMILIES: Final[dict[str, ModelFamily]] = {
    family.architecture: family
    for family in (
        LLAMA,
        MISTRAL,
        QWEN2,
        QWEN3,
        QWEN2_VL,
        QWEN2_5_VL,
        QWEN3_VL,
        QWEN3_VL_MOE,
        QWEN3_5,
        QWEN3_5_VISION,
        QWEN3_5_MOE,
        QWEN3_5_MOE_VISION,
        QWEN3_NEXT,
        MISTRAL3,
        IDEFICS3,
        SMOLVLM,
        LLAVA,
        GRANITE,
        GRANITE_HYBRID,
        GRANITE_SWA,
        OLMO2,
        OLMO3,
        OLMO_HYBRID,
        SMOLLM3,
        PHI3,
        GEMMA,
        GEMMA2,
        GEMMA3,
        GEMMA3_VISION,
        GEMMA4,
        GEMMA4_VISION,
        GPT2,
        GPT_NEOX,
        FALCON,
        OPT,
        BAMBOO,
        COHERE,
        COHERE2,
        STARCODER2,
        ARCEE,
        NEMOTRON,
        JAIS2,
        GLM,
        GLM4,
        PHI,
        SEED_OSS,
        ERNIE4_5,
        HELIUM,
        MINISTRAL,
        MINISTRAL3,
        CWM,
        EXAONE4,
        APERTUS,
        HUNYUAN,
        MAMBA2,
        BAMBA,
        NEMOTRON_H,
        LFM2,
        STABLELM,
        MIXTRAL,
        QWEN2_MOE,
        QWEN3_MOE,
        OLMOE,
        GRANITE_MOE,
        GRANITE_MOE_SHARED,
        GRANITE_MOE_SWA,
        GLM4_MOE,
        HUNYUAN_MOE,
        LFM2_MOE,
        DEEPSEEK_V2,
        DEEPSEEK_V3,
        GPT_OSS,
        T5,
        BART,
        BERT,
        MODERNBERT,
        ROBERTA,
        XLM_ROBERTA,
        JINA_V3,
        DISTILBERT,
    )
}

TOWERS: Final[dict[str, ModelFamily]] = {
    family.architecture: family for family in (IDEFICS3_TOWER, SMOLVLM_TOWER, CLIP_TOWER)
}
"""Vision towers, by the class of their part of a model."""


class ModelHead(Enum):
    """Head of a model."""

    LM = auto()
    """Logits of the next token."""
    NONE = auto()
    SEQUENCE_CLASSIFIER = auto()
    TOKEN_CLASSIFIER = auto()


_OTHER_HEADS: Final = {
    "Model": ModelHead.NONE,
    "ForSequenceClassification": ModelHead.SEQUENCE_CLASSIFIER,
    "ForTokenClassification": ModelHead.TOKEN_CLASSIFIER,
}
"""Heads by end of transformers' class names."""
_CLASSES: Final = ("ForCausalLM", "LMHeadModel", "Model")
"""Ends of the class names that are keys of FAMILIES."""


def family_of(architecture: str) -> ModelFamily:
    """Returns the family of a config's `architecture`, which may be a vision tower's."""
    return TOWERS.get(architecture) or FAMILIES[architecture]


def model_of(architecture: str) -> tuple[ModelFamily, ModelHead] | None:
    """Finds the family and the head of a transformers class; None for unknown classes."""
    if architecture in TOWERS:
        return TOWERS[architecture], ModelHead.NONE
    if architecture in FAMILIES:
        family = FAMILIES[architecture]
        return family, ModelHead.NONE if issubclass(family.config_class, EncoderConfig) else ModelHead.LM
    for family in FAMILIES.values():
        if architecture in family.bare_architectures:
            return family, ModelHead.NONE
    for end, head in _OTHER_HEADS.items():
        if architecture.endswith(end):
            name = architecture.removesuffix(end)
            found = [FAMILIES[name + known] for known in _CLASSES if name + known in FAMILIES]
            found += [family for family in FAMILIES.values() if f"{name}Model" in family.bare_architectures]
            return (found[0], head) if found and found[0].vision is None else None
    return None


def architectures_of(family: ModelFamily) -> list[str]:
    """Names of the transformers classes of a family."""
    return [family.architecture, *sorted(family.bare_architectures)]


def declare(config: CheckpointConfig, known: Network | None = None) -> Network:
    """Returns the network of a config of a supported family.

    known: a network that is declared already. Its ops are used if its config differs only in how weights, keys and
    values are stored.
    """
    stored = None if known is None else known.stored_as(config)
    return _declared(family_of(config.architecture), config) if stored is None else stored


def load_config(directory: Path) -> CheckpointConfig:
    """Reads a checkpoint directory's config.json. Raises CheckpointError that names every wrong field."""
    file = ConfigFile.read(directory)
    return read_config(file.data, subject=str(file.path))


def read_config(data: Mapping[str, Any], *, subject: str) -> CheckpointConfig:
    """Reads the content of a checkpoint's config.json. Raises CheckpointError, which begins with `subject`."""
    architecture = data.get("architecture")
    known = {**FAMILIES, **TOWERS}
    if isinstance(architecture, str) and architecture not in known:
        raise CheckpointError(f"{subject}: architecture is {describe(architecture)}; accepted: {', '.join(FAMILIES)}")
    family = known.get(architecture) if isinstance(architecture, str) else None
    if family is None:
        return CheckpointConfig.from_dict(data, subject=subject)
    config = family.config_class.from_dict(data, subject=subject)
    # Values that the family's network would ignore.
    problems = [
        f"{name} is {value}; {config.architecture} accepts {' or '.join(dict.fromkeys(accepted))}"
        for name, value, accepted in (
            ("hidden_act", config.hidden_act, family.activations.values()),
            ("position_embedding_type", config.position_embedding_type, [family.position_embedding_type]),
        )
        if value not in accepted
    ]
    if problems:
        raise CheckpointError(f"{subject}: " + "; ".join(problems))
    return config


def specimen(family: ModelFamily) -> Network:
    """Returns a network of the family with the smallest sizes and one layer."""
    config = family.config_class(
        architecture=family.architecture,
        dtype=DType.FLOAT32,
        vocab_size=2,
        max_position_embeddings=2,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_size=4,
        intermediate_size=16,
        norm_epsilon=1.0,
        rotary_base=2.0,
    )
    return _declared(family, config)


def _declared(family: ModelFamily, config: CheckpointConfig) -> Network:
    network = Network(
        config,
        family.older_names,
        family.inner_names,
        family.stacked_experts,
        family.older_endings,
        family.fused_layers,
    )
    family.declare(network, config)
    return network
