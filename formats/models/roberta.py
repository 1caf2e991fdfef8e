"""RobertaModel and XLMRobertaModel: BERT with one token type, later positions, and another classifier head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ..._core import PoolingActivation
from ...common.json_fields import JsonFields
from ..checkpoint.config import LEARNED_POSITIONS
from ..checkpoint.pooling import CLS, HeadLayer
from ..network.network import Network
from .bert_layers import declare_bert
from .encoder import EncoderConfig
from .family import GELUS, Features, ModelFamily, no_rope

ROBERTA_MODEL: Final = "roberta"
"""Path of the encoder in a model with a head."""
_HEAD_LAYER: Final = HeadLayer("classifier.dense", PoolingActivation.TANH)


@dataclass(frozen=True, kw_only=True)
class RobertaHeadConfig(EncoderConfig):
    """Fields of models with RoBERTa's heads, in addition to those of other encoders."""

    type_vocab_size: int = 1
    """Number of token types: usually one, also for two texts."""

    @property
    def classified_row(self) -> str:
        """The first hidden state."""
        return CLS

    def classifiers_need_pooler(self, *, per_token: bool) -> bool:
        """True for classifiers of texts: it is the first layer of their head."""
        return not per_token

    @property
    def head_layer(self) -> HeadLayer | None:
        """The first of the head's two layers."""
        return _HEAD_LAYER


@dataclass(frozen=True, kw_only=True)
class RobertaConfig(RobertaHeadConfig):
    """Fields of RoBERTa."""

    unused_positions: int = 2
    """Rows of the position table before that of the first token."""


def _fill_in(fields: JsonFields) -> Mapping[str, Any]:
    return {"pad_token_id": 1}


def _unused_positions(fields: JsonFields) -> int:
    """Positions start after the padding token's id."""
    return fields.integer("pad_token_id", minimum=0) + 1


def roberta_type_vocab_size(fields: JsonFields) -> int:
    """Reads the number of token types."""
    return fields.integer("type_vocab_size", default=1)


def _read_features(fields: JsonFields, num_hidden_layers: int) -> Features:
    return {
        "attn_bias": True,
        "attn_dense_bias": True,
        "mlp_bias": True,
        "type_vocab_size": roberta_type_vocab_size(fields),
        "unused_positions": _unused_positions(fields),
    }


def _declare(net: Network, c: RobertaConfig) -> None:
    declare_bert(net, c, ROBERTA_MODEL, c.type_vocab_size, c.unused_positions)
    declare_roberta_head(net, c)


def declare_roberta_head(net: Network, c: RobertaHeadConfig) -> None:
    """Declares the layers of a classifier after the encoder, if the model is one."""
    # Embedding models have a pooler, but no classifier reads it.
    net.leave_aside(f"{ROBERTA_MODEL}.pooler.dense")
    if c.classifier is None:
        return
    if c.classifier.per_token:
        net.classifier("classifier", c.hidden_size, bias=True)
    else:
        net.pool(_HEAD_LAYER.path, activation=_HEAD_LAYER.activation)
        net.classifier("classifier.out_proj", c.hidden_size, bias=True)


def _family(name: str) -> ModelFamily:
    return ModelFamily(
        architecture=f"{name}Model",
        bare_architectures=frozenset({f"{name}ForMaskedLM"}),
        config_class=RobertaConfig,
        read_features=_read_features,
        read_rope=no_rope,
        declare=_declare,
        fill_in=_fill_in,
        unused_positions=_unused_positions,
        # Names in models that were saved without a head.
        older_names={f"{part}.": f"{ROBERTA_MODEL}.{part}." for part in ("embeddings", "encoder", "pooler")},
        position_embedding_type=LEARNED_POSITIONS,
        activations={**GELUS, "relu": "relu"},
        field_names={"rms_norm_eps": "layer_norm_eps"},
        optional_fields=frozenset({"num_key_value_heads", "head_dim"}),
        tied_by_default=True,
        neutral_fields={"is_decoder": False, "position_embedding_type": "absolute"},
        harmless_fields=frozenset(
            {
                "attention_probs_dropout_prob",
                "classifier_dropout",
                "gradient_checkpointing",
                "hidden_dropout_prob",
                "output_past",
            }
        ),
        # Head of bare_architectures, the unused pooler, and positions that were saved as a buffer.
        ignored_tensors=(r"lm_head\..*", r"roberta\.pooler\..*", r"roberta\.embeddings\.position_ids"),
    )


ROBERTA = _family("Roberta")
XLM_ROBERTA = _family("XLMRoberta")
