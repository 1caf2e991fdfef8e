"""BertModel: learned positions and token types, biases, and a layer norm after each sublayer."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace
from typing import Final

from ..._core import PoolingActivation
from ...common.json_fields import JsonFields
from ..checkpoint.config import LEARNED_POSITIONS
from ..checkpoint.pooling import CLS
from ..network.network import Network
from .bert_layers import declare_bert
from .encoder import EncoderConfig
from .family import GELUS, Features, ModelFamily, no_rope

_MODEL: Final = "bert"
_POOLER: Final = f"{_MODEL}.pooler.dense"


@dataclass(frozen=True, kw_only=True)
class BertConfig(EncoderConfig):
    """Fields of BERT, in addition to those of other encoders."""

    type_vocab_size: int = 2
    """Number of token types: 0 for a text, 1 for the second of two texts."""
    has_pooler: bool = True
    """True if the model has a linear layer over the first hidden state; classifiers of texts read it."""

    @property
    def classified_row(self) -> str:
        """The first hidden state."""
        return CLS

    def classifiers_need_pooler(self, *, per_token: bool) -> bool:
        """True for classifiers of texts."""
        return not per_token


def _read_features(fields: JsonFields, num_hidden_layers: int) -> Features:
    return {
        "attn_bias": True,
        "attn_dense_bias": True,
        "mlp_bias": True,
        "type_vocab_size": fields.integer("type_vocab_size", default=2),
    }


def _fitting(c: BertConfig, tensors: Container[str]) -> BertConfig:
    """Finds out if the model has a pooler: embedding models and classifiers of tokens may lack it."""
    needed = c.classifier is not None and c.classifiers_need_pooler(per_token=c.classifier.per_token)
    return replace(c, has_pooler=needed or f"{_POOLER}.weight" in tensors)


def _declare(net: Network, c: BertConfig) -> None:
    declare_bert(net, c, _MODEL, c.type_vocab_size)
    if c.has_pooler:
        net.pool(_POOLER, activation=PoolingActivation.TANH)
    if c.classifier is not None:
        net.classifier("classifier", c.hidden_size, bias=True)


BERT = ModelFamily(
    architecture="BertModel",
    bare_architectures=frozenset({"BertForMaskedLM", "BertForPreTraining"}),
    config_class=BertConfig,
    read_features=_read_features,
    read_rope=no_rope,
    declare=_declare,
    fitting=_fitting,
    # Names in models that were saved without a head.
    older_names={f"{name}.": f"{_MODEL}.{name}." for name in ("embeddings", "encoder", "pooler")},
    # TensorFlow's names of the norms' weights and biases.
    older_endings={".LayerNorm.gamma": ".LayerNorm.weight", ".LayerNorm.beta": ".LayerNorm.bias"},
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
            "directionality",
            "gradient_checkpointing",
            "hidden_dropout_prob",
        }
    ),
    # Heads of bare_architectures, and positions that were saved as a buffer.
    ignored_tensors=(r"cls\..*", r"bert\.embeddings\.position_ids"),
)
