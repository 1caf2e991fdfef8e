"""Table of the supported model families, and look-ups in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum, auto
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from ..._core import CheckpointError, DType
from ...common.json_fields import describe
from ..checkpoint.config import CheckpointConfig
from ..checkpoint.config_file import ConfigFile
from ..network.network import Network
from .encoder import EncoderConfig
from .family import ModelFamily


class Families(Mapping[str, ModelFamily]):
    """Families by architecture, in a fixed order.

    A family's module is imported when the family is first used: a process needs one or two of them, and importing all
    takes a quarter of the time in which it starts.
    """

    def __init__(self, places: Mapping[str, str]) -> None:
        """places: modules of this package with the name of a family in them, by architecture."""
        self._places = places

    def __getitem__(self, architecture: str) -> ModelFamily:
        module, _, name = self._places[architecture].partition(".")
        family: ModelFamily = getattr(import_module(f".{module}", __package__), name)
        return family

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, architecture: object) -> bool:
        return architecture in self._places


FAMILIES: Final = Families(
    {
        "LlamaForCausalLM": "llama.LLAMA",
        "MistralForCausalLM": "mistral.MISTRAL",
        "Qwen2ForCausalLM": "qwen2.QWEN2",
        "Qwen3ForCausalLM": "qwen3.QWEN3",
        "Qwen2VLForConditionalGeneration": "qwen_vl.QWEN2_VL",
        "Qwen2_5_VLForConditionalGeneration": "qwen_vl.QWEN2_5_VL",
        "Qwen3VLForConditionalGeneration": "qwen_vl.QWEN3_VL",
        "Qwen3VLMoeForConditionalGeneration": "qwen3_moe.QWEN3_VL_MOE",
        "Qwen3_5ForCausalLM": "qwen3_5.QWEN3_5",
        "Qwen3_5ForConditionalGeneration": "qwen3_5.QWEN3_5_VISION",
        "Qwen3_5MoeForCausalLM": "qwen3_5.QWEN3_5_MOE",
        "Qwen3_5MoeForConditionalGeneration": "qwen3_5.QWEN3_5_MOE_VISION",
        "Qwen3NextForCausalLM": "qwen3_5.QWEN3_NEXT",
        "Mistral3ForConditionalGeneration": "mistral.MISTRAL3",
        "Idefics3ForConditionalGeneration": "idefics3.IDEFICS3",
        "SmolVLMForConditionalGeneration": "idefics3.SMOLVLM",
        "LlavaForConditionalGeneration": "llava_family.LLAVA",
        "GraniteForCausalLM": "granite.GRANITE",
        "GraniteMoeHybridForCausalLM": "granite_hybrid.GRANITE_HYBRID",
        "GraniteSWAForCausalLM": "granite_swa.GRANITE_SWA",
        "OlmoForCausalLM": "olmo.OLMO",
        "Olmo2ForCausalLM": "olmo2.OLMO2",
        "Olmo3ForCausalLM": "olmo2.OLMO3",
        "OlmoHybridForCausalLM": "olmo_hybrid.OLMO_HYBRID",
        "SmolLM3ForCausalLM": "smollm3.SMOLLM3",
        "Phi3ForCausalLM": "phi3.PHI3",
        "GemmaForCausalLM": "gemma.GEMMA",
        "Gemma2ForCausalLM": "gemma2.GEMMA2",
        "Gemma3ForCausalLM": "gemma3.GEMMA3",
        "Gemma3ForConditionalGeneration": "gemma3.GEMMA3_VISION",
        "Gemma4ForCausalLM": "gemma4.GEMMA4",
        "Gemma4ForConditionalGeneration": "gemma4.GEMMA4_VISION",
        "Gemma4UnifiedForCausalLM": "gemma4.GEMMA4_UNIFIED",
        "Gemma4UnifiedForConditionalGeneration": "gemma4.GEMMA4_UNIFIED_VISION",
        "GPT2LMHeadModel": "gpt2.GPT2",
        "GPTNeoXForCausalLM": "gpt_neox.GPT_NEOX",
        "FalconForCausalLM": "falcon.FALCON",
        "OPTForCausalLM": "opt.OPT",
        "BambooForCausalLM": "mistral.BAMBOO",
        "CohereForCausalLM": "cohere.COHERE",
        "Cohere2ForCausalLM": "cohere.COHERE2",
        "Starcoder2ForCausalLM": "starcoder2.STARCODER2",
        "ArceeForCausalLM": "squared_relu.ARCEE",
        "NemotronForCausalLM": "squared_relu.NEMOTRON",
        "Jais2ForCausalLM": "squared_relu.JAIS2",
        "GlmForCausalLM": "glm.GLM",
        "Glm4ForCausalLM": "glm.GLM4",
        "PhiForCausalLM": "phi.PHI",
        "SeedOssForCausalLM": "llama_relatives.SEED_OSS",
        "Ernie4_5ForCausalLM": "llama_relatives.ERNIE4_5",
        "HeliumForCausalLM": "llama_relatives.HELIUM",
        "MinistralForCausalLM": "llama_relatives.MINISTRAL",
        "Ministral3ForCausalLM": "mistral.MINISTRAL3",
        "CwmForCausalLM": "llama_relatives.CWM",
        "Exaone4ForCausalLM": "exaone4.EXAONE4",
        "ApertusForCausalLM": "apertus.APERTUS",
        "HunYuanDenseV1ForCausalLM": "hunyuan.HUNYUAN",
        "Mamba2ForCausalLM": "mamba.MAMBA2",
        "BambaForCausalLM": "bamba.BAMBA",
        "FalconH1ForCausalLM": "falcon_h1.FALCON_H1",
        "NemotronHForCausalLM": "nemotron_h.NEMOTRON_H",
        "Lfm2ForCausalLM": "lfm2.LFM2",
        "StableLmForCausalLM": "stablelm.STABLELM",
        "MixtralForCausalLM": "mixtral.MIXTRAL",
        "Llama4ForCausalLM": "llama4.LLAMA4",
        "Llama4ForConditionalGeneration": "llama4.LLAMA4_VISION",
        "Qwen2MoeForCausalLM": "qwen2_moe.QWEN2_MOE",
        "Qwen3MoeForCausalLM": "qwen3_moe.QWEN3_MOE",
        "OlmoeForCausalLM": "olmoe.OLMOE",
        "GraniteMoeForCausalLM": "granite_moe.GRANITE_MOE",
        "GraniteMoeSharedForCausalLM": "granite_moe.GRANITE_MOE_SHARED",
        "GraniteMoeSWAForCausalLM": "granite_swa.GRANITE_MOE_SWA",
        "Glm4MoeForCausalLM": "glm4_moe.GLM4_MOE",
        "HunYuanMoEV1ForCausalLM": "hunyuan.HUNYUAN_MOE",
        "Lfm2MoeForCausalLM": "lfm2.LFM2_MOE",
        "DeepseekV2ForCausalLM": "deepseek.DEEPSEEK_V2",
        "DeepseekV3ForCausalLM": "deepseek.DEEPSEEK_V3",
        "GptOssForCausalLM": "gpt_oss.GPT_OSS",
        "T5ForConditionalGeneration": "t5.T5",
        "BartForConditionalGeneration": "bart.BART",
        "BertModel": "bert.BERT",
        "ModernBertModel": "modernbert.MODERNBERT",
        "RobertaModel": "roberta.ROBERTA",
        "XLMRobertaModel": "roberta.XLM_ROBERTA",
        "JinaEmbeddingsV3Model": "jina_v3.JINA_V3",
        "DistilBertModel": "distilbert.DISTILBERT",
    }
)

TOWERS: Final = Families(
    {
        "Idefics3VisionTransformer": "siglip.IDEFICS3_TOWER",
        "SmolVLMVisionTransformer": "siglip.SMOLVLM_TOWER",
        "CLIPVisionModel": "clip.CLIP_TOWER",
        "SiglipVisionModel": "gemma3_tower.GEMMA3_TOWER",
        "PixtralVisionModel": "pixtral.PIXTRAL_TOWER",
        "Qwen2VisionTransformerPretrainedModel": "qwen_tower.QWEN2_TOWER",
        "Qwen2_5_VisionTransformerPretrainedModel": "qwen_tower.QWEN2_5_TOWER",
        "Qwen3VLVisionModel": "qwen_tower.QWEN3_TOWER",
        "Qwen3_5VisionModel": "qwen_tower.QWEN3_5_TOWER",
    }
)
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
    if not isinstance(architecture, str):
        return CheckpointConfig.from_dict(data, subject=subject)
    if architecture not in FAMILIES and architecture not in TOWERS:
        raise CheckpointError(f"{subject}: architecture is {describe(architecture)}; accepted: {', '.join(FAMILIES)}")
    family = family_of(architecture)
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


def smallest_config(family: ModelFamily) -> CheckpointConfig:
    """Returns a config of the family with the smallest sizes and one layer."""
    return family.config_class(
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


def specimen(family: ModelFamily) -> Network:
    """Returns the network of smallest_config()."""
    return _declared(family, smallest_config(family))


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
