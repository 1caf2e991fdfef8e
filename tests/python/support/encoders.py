"""Small random encoders of each family, the linear layers that PEFT can target in them, and their engines."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import transformers

from adaptrt.builder.build import build
from adaptrt.builder.conversion.checkpoint import Checkpoint
from adaptrt.formats.engine.build_config import BuildConfig, LoraBuildConfig, PluginConfig
from support.pooled import save_random

VOCAB_SIZE = 61
BERT_FIELDS = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 36, "num_hidden_layers": 3, "num_attention_heads": 3,
    "intermediate_size": 38, "max_position_embeddings": 200, "type_vocab_size": 3, "layer_norm_eps": 1e-3,
    "pad_token_id": 0,
}  # fmt: skip
# No token has position 0, because the padding token is 0.
ROBERTA_FIELDS = {**BERT_FIELDS, "type_vocab_size": 1, "max_position_embeddings": 201}
DISTILBERT_FIELDS = {
    "vocab_size": VOCAB_SIZE, "dim": 36, "n_layers": 3, "n_heads": 3, "hidden_dim": 38,
    "max_position_embeddings": 200, "pad_token_id": 0,
}  # fmt: skip
MODERNBERT_FIELDS = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 36, "num_hidden_layers": 5, "num_attention_heads": 3,
    "intermediate_size": 38, "max_position_embeddings": 200, "norm_eps": 1e-3, "local_attention": 17,
    "pad_token_id": 0, "bos_token_id": 2, "cls_token_id": 2, "eos_token_id": 1, "sep_token_id": 1,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 300.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
    },
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Encoder:
    """The configuration of a random model, and the layers and embedding that PEFT can target in it."""

    config_class: type[Any]
    fields: dict[str, Any]
    targets: list[str]
    embedding: str

    def config(self, **fields: Any) -> Any:
        """Returns the config with other fields."""
        return self.config_class(**{**self.fields, **fields})


_BERT_TARGETS = ["query", "key", "value", "intermediate.dense", "output.dense"]
_DISTILBERT_TARGETS = ["q_lin", "k_lin", "v_lin", "out_lin", "lin1", "lin2"]
_MODERNBERT_TARGETS = ["Wqkv", "Wi", "Wo"]
MODELS = {
    "bert": Encoder(transformers.BertConfig, BERT_FIELDS, _BERT_TARGETS, "word_embeddings"),
    "roberta": Encoder(transformers.RobertaConfig, ROBERTA_FIELDS, _BERT_TARGETS, "word_embeddings"),
    "distilbert": Encoder(transformers.DistilBertConfig, DISTILBERT_FIELDS, _DISTILBERT_TARGETS, "word_embeddings"),
    "modernbert": Encoder(transformers.ModernBertConfig, MODERNBERT_FIELDS, _MODERNBERT_TARGETS, "tok_embeddings"),
    "modernbert with biases": Encoder(
        transformers.ModernBertConfig,
        {
            **MODERNBERT_FIELDS,
            "attention_bias": True, "mlp_bias": True, "norm_bias": True, "hidden_activation": "silu",
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            "num_hidden_layers": 4,
        },
        _MODERNBERT_TARGETS,
        "tok_embeddings",
    ),
}  # fmt: skip

BUILD = BuildConfig(
    max_batch_size=8,
    max_num_tokens=256,
    tokens_per_block=16,
    lora_config=LoraBuildConfig(max_lora_rank=16),
    plugin_config=PluginConfig(lora_plugin="auto", dora_plugin="enable"),
)


def save_encoder(kind: Encoder, directory: Path, kind_of_head: Any = transformers.AutoModel, **fields: Any) -> Path:
    """Writes a random model as a Hugging Face directory."""
    model = kind_of_head.from_config(kind.config(**fields), attn_implementation="eager")
    return save_random(model, directory)


def engine_of(model: Path, engine: Path, config: BuildConfig = BUILD, **fields: Any) -> Path:
    """Builds the engine of a Hugging Face directory in one pass."""
    build(Checkpoint.of_model(model, fields.pop("dtype", None)), config, engine, **fields)
    return engine
