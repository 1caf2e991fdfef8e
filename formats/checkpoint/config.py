"""config.json of a checkpoint: TensorRT-LLM's keys, and fields that the supported families need in addition."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, Final, TypeVar, get_type_hints

from ..._core import CheckpointError, ConfigError, DType, dtype_from_name, dtype_name
from ..._version import __version__
from ...common.json_fields import JsonFields
from .activation import HIDDEN_ACTS
from .heads_apart import LayerOfHeads
from .pooling import LAST, Classifier, EmbeddingPooling, HeadLayer
from .quantization import QuantConfig, quantization_to_dict, read_int8_kv_cache, read_quantization
from .rotary import LongRopeScaling, RotaryScaling, read_rotary_scaling, rotary_scaling_to_dict
from .tensor_names import LM_HEAD_MODULE

T = TypeVar("T")

CONFIG_FILE = "config.json"
PRODUCER = "adaptrt"
# Far above any model. A larger number means a damaged file, and must not create lists of that length.
MAX_LAYERS = 10_000
ROPE = "rope_gpt_neox"
ROPE_INTERLEAVED = "rope_gptj"
LEARNED_POSITIONS = "learned_absolute"
RELATIVE_POSITIONS = "relative"
"""A bias is added to attention scores by distance, so positions have no maximum."""
POSITION_EMBEDDING_TYPES = (ROPE, ROPE_INTERLEAVED, LEARNED_POSITIONS, RELATIVE_POSITIONS)


_ADDED_LATER: Final = "added later"


def added_later(default: T) -> T:
    """Returns a field of a family's config that older checkpoints of the family lack; they mean `default`."""
    return field(default=default, metadata={_ADDED_LATER: True})


@dataclass(frozen=True, kw_only=True)
class ParallelMapping:
    """Parallel mapping of a checkpoint: rank = pp_rank * tp_size + tp_rank."""

    tp_size: int = 1
    pp_size: int = 1
    moe_ep_size: int = 1
    """Number of groups of a stage's ranks.

    Each group has an equal share of the experts, and cuts them among its ranks.
    """

    @classmethod
    def of(
        cls, tp_size: int, pp_size: int, moe_tp_size: int | None = None, moe_ep_size: int | None = None
    ) -> ParallelMapping:
        """Fills in missing sizes as TensorRT-LLM does: moe_tp_size * moe_ep_size = tp_size; moe_ep_size defaults to 1.

        Raises ConfigError.
        """
        sizes = {"tp_size": tp_size, "pp_size": pp_size, "moe_tp_size": moe_tp_size, "moe_ep_size": moe_ep_size}
        for name, value in sizes.items():
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1")
        if moe_ep_size is None:
            moe_ep_size = 1 if moe_tp_size is None else tp_size // moe_tp_size
        if (moe_tp_size or tp_size // moe_ep_size) * moe_ep_size != tp_size:
            given = [f"{name} {sizes[name]}" for name in ("moe_tp_size", "moe_ep_size") if sizes[name] is not None]
            raise ConfigError(
                f"{' and '.join(given)} do not fit tp_size {tp_size}; expected moe_tp_size * moe_ep_size = tp_size"
            )
        return cls(tp_size=tp_size, pp_size=pp_size, moe_ep_size=moe_ep_size)

    @property
    def world_size(self) -> int:
        """Number of ranks, and of rank{N}.safetensors files."""
        return self.tp_size * self.pp_size

    @property
    def moe_tp_size(self) -> int:
        """Number of ranks that share an expert."""
        return self.tp_size // self.moe_ep_size

    def moe_tp_rank(self, tp_rank: int) -> int:
        """Index of a rank's share of its experts."""
        return tp_rank // self.moe_ep_size

    def experts_of(self, tp_rank: int, num_experts: int) -> range:
        """Indices of a rank's experts."""
        count = num_experts // self.moe_ep_size
        first = tp_rank % self.moe_ep_size * count
        return range(first, first + count)

    def describe(self) -> str:
        """Text for people: tp_size 4, pp_size 1, moe_ep_size 2."""
        experts = f", moe_ep_size {self.moe_ep_size}" if self.moe_ep_size > 1 else ""
        return f"tp_size {self.tp_size}, pp_size {self.pp_size}{experts}"

    def to_dict(self) -> dict[str, int]:
        """Content of config.json's mapping."""
        result = {"world_size": self.world_size, "tp_size": self.tp_size, "pp_size": self.pp_size}
        if self.moe_ep_size > 1:
            result.update(moe_tp_size=self.moe_tp_size, moe_ep_size=self.moe_ep_size)
        return result


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Config of a checkpoint. Sizes are those of the whole model, whatever the mapping."""

    architecture: str
    dtype: DType
    logits_dtype: DType = DType.FLOAT32
    vocab_size: int
    max_position_embeddings: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_size: int
    intermediate_size: int
    norm_epsilon: float
    rotary_base: float
    rotary_scaling: RotaryScaling | None = None
    hidden_act: str = HIDDEN_ACTS[0]
    relu_threshold: float = 0.0
    """For gates with a ReLU: values up to this threshold count as 0. config.json omits it if it is 0."""
    position_embedding_type: str = ROPE
    attn_bias: bool = False
    """True if attention.qkv has a bias."""
    attn_dense_bias: bool = False
    """True if attention.dense has a bias."""
    mlp_bias: bool = False
    """True if mlp.fc, mlp.gate and mlp.proj have biases."""
    qk_layernorm: bool = False
    """RMS norms over each head of q and k before RoPE: attention.q_layernorm and attention.k_layernorm."""
    sliding_window: int | None = None
    """In sliding_window_layers, a token attends to itself and the sliding_window - 1 tokens before it.

    In encoders it also attends to as many tokens after it.
    """
    sliding_window_layers: tuple[int, ...] = ()
    share_embedding_table: bool = False
    """True if lm_head is transformer.vocab_embedding.

    lm_head.weight is stored only if it differs from it: as a slice if world_size is above 1, or quantised.
    """
    mapping: ParallelMapping = ParallelMapping()
    quantization: QuantConfig | None = None
    """Quantisation of the weights; None: not quantised."""
    int8_kv_cache: bool = False
    """True if keys and values are stored as int8; quantization.kv_cache_quant_algo in config.json."""
    bos_token_id: int | None = None
    eos_token_id: tuple[int, ...] = ()
    pad_token_id: int | None = None
    has_lm_head: bool = True
    """False: the model returns hidden states or classes, and generates no tokens."""
    embedding_pooling: EmbeddingPooling | None = None
    """Pooling of embeddings; None if the model does not say."""
    classifier: Classifier | None = None
    """Classes of a model with a classification head; None for other models."""

    def window_of(self, layer: int) -> int | None:
        """Number of tokens that a token of this layer attends to, including itself; None: all earlier tokens."""
        return self.sliding_window if layer in self.sliding_window_layers else None

    @property
    def num_encoder_layers(self) -> int:
        """Number of layers of an encoder before the decoder; 0: no encoder."""
        return 0

    @property
    def num_experts(self) -> int:
        """Number of experts in each layer that has experts; 0: none."""
        return 0

    @property
    def is_encoder_only(self) -> bool:
        """True if tokens also attend to later tokens, and the model generates none."""
        return False

    @property
    def has_states(self) -> bool:
        """True if sequences keep states in addition to keys and values."""
        return False

    @property
    def layer_of_heads(self) -> LayerOfHeads | None:
        """Layer of latent attention that networks use as two layers for each head; None: there is none."""
        return None

    @property
    def num_token_tables(self) -> int:
        """Number of tables with a row for each token: the embedding, and those that adapters cannot extend."""
        return 1

    @property
    def native_only(self) -> str | None:
        """Something in the network that TensorRT does not have, for messages; None: there is nothing."""
        return None

    @property
    def classified_row(self) -> str:
        """Hidden state that classifiers of texts read; one of POOLING_TYPES."""
        return LAST

    def classifiers_need_pooler(self, *, per_token: bool) -> bool:
        """True if classifiers of texts, or of tokens, have a layer before their last one."""
        return False

    @property
    def head_layer(self) -> HeadLayer | None:
        """Layer before the last one in classifiers of texts, if adapters bring both layers; otherwise None."""
        return None

    @property
    def num_adapted_layers(self) -> int:
        """Number of layers as adapters count them: the decoder's, then those of an encoder before it."""
        return self.num_hidden_layers + self.num_encoder_layers

    @property
    def rotary_size(self) -> int:
        """Number of elements of a head that RoPE rotates."""
        return self.head_size

    @property
    def lm_head_is_embedding(self) -> bool:
        """True if the embedding's tensor is also lm_head's."""
        is_quantized = self.quantization is not None and LM_HEAD_MODULE not in self.quantization.exclude_modules
        return self.share_embedding_table and self.mapping.world_size == 1 and not is_quantized

    def describe_depth(self) -> str:
        """Text for people: 28 layers."""
        if self.is_encoder_only:
            return f"{self.num_hidden_layers} encoder layers"
        before = f"{self.num_encoder_layers} encoder and " if self.num_encoder_layers else ""
        return f"{before}{self.num_hidden_layers}{' decoder' if before else ''} layers"

    def describe_layers(self) -> str:
        """Text for people: 28 of hidden size 1024, mlp 4096."""
        return f"{self.num_hidden_layers} of hidden size {self.hidden_size}, mlp {self.intermediate_size}"

    def describe_heads(self) -> str:
        """Text for people: 16 heads of 128, 8 for k and v."""
        return f"{self.num_attention_heads} heads of {self.head_size}, {self.num_key_value_heads} for k and v"

    def describe_weights(self) -> str:
        """Text for people: bfloat16, linear layers W4A16 in groups of 128."""
        quantized = f", linear layers {self.quantization.describe()}" if self.quantization is not None else ""
        return dtype_name(self.dtype) + quantized

    def describe_kv_cache(self, tokens_per_block: int) -> str:
        """Text for people, with dtype and block size of the KV cache: int8, 32 tokens a block."""
        if self.is_encoder_only:
            return "none: it is an encoder"
        return f"{'int8' if self.int8_kv_cache else dtype_name(self.dtype)}, {tokens_per_block} tokens a block"

    def describe_types(self) -> str:
        """Text for people: bfloat16, linear layers W4A16 in groups of 128, int8 KV cache."""
        return self.describe_weights() + (", int8 KV cache" if self.int8_kv_cache else "")

    def to_dict(self) -> dict[str, Any]:
        """Content of config.json."""
        result: dict[str, Any] = {"producer": {"name": PRODUCER, "version": __version__}}
        for each in fields(self):
            if each.name != "int8_kv_cache":
                result[each.name] = getattr(self, each.name)
        result.update(
            dtype=dtype_name(self.dtype),
            logits_dtype=dtype_name(self.logits_dtype),
            rotary_scaling=rotary_scaling_to_dict(self.rotary_scaling),
            sliding_window_layers=list(self.sliding_window_layers),
            eos_token_id=list(self.eos_token_id),
            mapping=self.mapping.to_dict(),
            quantization=quantization_to_dict(self.quantization, int8_kv_cache=self.int8_kv_cache),
            embedding_pooling=None if self.embedding_pooling is None else self.embedding_pooling.to_dict(),
            classifier=None if self.classifier is None else self.classifier.to_dict(),
        )
        if self.relu_threshold == 0.0:
            del result["relu_threshold"]
        return result

    def to_json(self) -> str:
        """Text of config.json."""
        return json.dumps(self.to_dict(), indent=2) + "\n"

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, subject: str) -> CheckpointConfig:
        """Reads what to_dict() returned.

        Raises CheckpointError, which begins with `subject` and lists every missing, unknown and unacceptable field.
        """
        source = JsonFields(data)
        source.discard(("producer",))
        max_position_embeddings = source.integer("max_position_embeddings")
        quantization = source.object("quantization")
        pooling = source.object("embedding_pooling", optional=True)
        classifier = source.object("classifier", optional=True)
        config = cls(
            architecture=source.string("architecture"),
            dtype=_read_dtype(source, "dtype"),
            logits_dtype=_read_dtype(source, "logits_dtype"),
            vocab_size=source.integer("vocab_size"),
            max_position_embeddings=max_position_embeddings,
            hidden_size=source.integer("hidden_size"),
            num_hidden_layers=source.integer("num_hidden_layers", maximum=MAX_LAYERS),
            num_attention_heads=source.integer("num_attention_heads"),
            num_key_value_heads=source.integer("num_key_value_heads"),
            head_size=source.integer("head_size"),
            intermediate_size=source.integer("intermediate_size"),
            norm_epsilon=source.number("norm_epsilon"),
            rotary_base=source.number("rotary_base", above=True),
            rotary_scaling=_read_scaling(source, max_position_embeddings),
            hidden_act=source.string("hidden_act", choices=HIDDEN_ACTS),
            relu_threshold=source.number("relu_threshold", default=0.0),
            position_embedding_type=source.string("position_embedding_type", choices=POSITION_EMBEDDING_TYPES),
            attn_bias=source.boolean("attn_bias"),
            attn_dense_bias=source.boolean("attn_dense_bias"),
            mlp_bias=source.boolean("mlp_bias"),
            qk_layernorm=source.boolean("qk_layernorm"),
            sliding_window=source.optional_integer("sliding_window"),
            sliding_window_layers=source.integers("sliding_window_layers"),
            share_embedding_table=source.boolean("share_embedding_table"),
            mapping=_read_mapping(source),
            quantization=read_quantization(quantization) if quantization is not None else None,
            int8_kv_cache=quantization is not None and read_int8_kv_cache(quantization),
            bos_token_id=source.optional_integer("bos_token_id", minimum=0),
            eos_token_id=source.integers("eos_token_id"),
            pad_token_id=source.optional_integer("pad_token_id", minimum=0),
            has_lm_head=source.boolean("has_lm_head"),
            embedding_pooling=None if pooling is None else EmbeddingPooling.from_fields(pooling),
            classifier=None if classifier is None else Classifier.from_fields(classifier),
            **_read_own(source, cls),
        )
        if not source.problems:
            source.problems.extend(config.inconsistencies() + config.mapping_inconsistencies())
        source.finish(subject, CheckpointError)
        return config

    def inconsistencies(self) -> list[str]:
        """Lists contradictions between fields that are each acceptable."""
        problems = []
        if self.num_attention_heads % self.num_key_value_heads != 0:
            problems.append(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of num_key_value_heads "
                f"{self.num_key_value_heads}"
            )
        if self.head_size % 2 != 0:
            problems.append(f"head_size {self.head_size} is odd; rotary embedding needs an even number")
        scaling = self.rotary_scaling
        if isinstance(scaling, LongRopeScaling):
            for name in ("short_factor", "long_factor"):
                factors = getattr(scaling, name)
                if len(factors) != self.rotary_size // 2:
                    problems.append(f"{name} has {len(factors)} numbers; it must have {self.rotary_size // 2}")
        layers = self.sliding_window_layers
        if list(layers) != sorted(set(layers)) or any(layer >= self.num_hidden_layers for layer in layers):
            problems.append(
                f"sliding_window_layers {list(layers)} must ascend and stay below num_hidden_layers "
                f"{self.num_hidden_layers}"
            )
        if (self.sliding_window is None) != (not layers):
            problems.append("sliding_window and sliding_window_layers must be given together")
        if self.is_encoder_only and self.has_lm_head:
            problems.append(
                f"has_lm_head is true; this {self.architecture} attends to later tokens, so it cannot generate; "
                "expected a model without lm_head"
            )
        if self.is_encoder_only and self.int8_kv_cache:
            problems.append("kv_cache_quant_algo is INT8; an encoder keeps no keys and values")
        if self.quantization is not None and self.quantization.quantized_layers and self.mapping.pp_size > 1:
            problems.append(
                f"quantized_layers is given with pp_size {self.mapping.pp_size}, whose stages number their own layers; "
                "accepted: pp_size 1"
            )
        if self.embedding_pooling is not None:
            problems.extend(self.embedding_pooling.inconsistencies(self.hidden_size))
        if self.classifier is not None and self.has_lm_head:
            problems.append("classifier is given, but has_lm_head is true; accepted: one of them")
        if self.classifier is not None and not self.classifier.labels:
            problems.append("classifier.labels is empty; accepted: one label or more")
        return problems

    @property
    def divided_sizes(self) -> tuple[str, ...]:
        """Fields that tp_size must divide."""
        return ("num_attention_heads", "intermediate_size")

    @property
    def shared_sizes(self) -> tuple[str, ...]:
        """Fields that tp_size must divide or be a multiple of: several ranks can have the same head or group."""
        return ("num_key_value_heads",)

    def mapping_inconsistencies(self) -> list[str]:
        """Lists reasons why this model cannot be cut by its mapping."""
        tp_size, pp_size = self.mapping.tp_size, self.mapping.pp_size
        problems = [
            f"tp_size {tp_size} does not divide {name} {size}"
            for name, size in ((name, getattr(self, name)) for name in self.divided_sizes)
            if size % tp_size != 0
        ]
        problems += [
            f"tp_size {tp_size} neither divides {name} {size} nor is a multiple of it"
            for name, size in ((name, getattr(self, name)) for name in self.shared_sizes)
            if size % tp_size != 0 and tp_size % size != 0
        ]
        if pp_size > self.num_hidden_layers:
            problems.append(f"pp_size is {pp_size}; expected at most num_hidden_layers {self.num_hidden_layers}")
        if self.mapping.moe_ep_size > 1 and self.num_experts == 0:
            problems.append(f"moe_ep_size is {self.mapping.moe_ep_size}, and the model has no experts; accepted: 1")
        return problems


def _read_own(source: JsonFields, config_class: type[CheckpointConfig]) -> dict[str, Any]:
    """Reads the fields that a family's config adds to the common ones."""
    common = {each.name for each in fields(CheckpointConfig)}
    hints = get_type_hints(config_class)
    readers: dict[Any, Callable[[str], Any]] = {
        bool: source.boolean,
        int: source.integer,
        int | None: source.optional_integer,
        float: source.number,
        float | None: source.optional_number,
        str: source.string,
        tuple[int, ...]: source.integers,
        tuple[float, ...]: source.numbers,
    }
    own = [
        each
        for each in fields(config_class)
        if each.name not in common and (each.name in source or not each.metadata.get(_ADDED_LATER))
    ]
    return {
        each.name: source.integer(each.name, minimum=0) if _may_be_zero(each) else readers[hints[each.name]](each.name)
        for each in own
    }


def _may_be_zero(field: Field[Any]) -> bool:
    """True for an integer whose default is 0; other integers are sizes."""
    return type(field.default) is int and field.default == 0


def _read_dtype(source: JsonFields, name: str) -> DType:
    text = source.string(name)
    if not text:
        return DType.FLOAT32  # a placeholder; source has noted the problem
    try:
        return dtype_from_name(text)
    except ConfigError as error:
        source.problem(name, f"cannot be used: {error}")
        return DType.FLOAT32


def _read_scaling(source: JsonFields, max_position_embeddings: int) -> RotaryScaling | None:
    scaling = source.object("rotary_scaling", optional=True)
    return None if scaling is None else read_rotary_scaling(scaling, max_position_embeddings)


def _read_mapping(source: JsonFields) -> ParallelMapping:
    mapping = source.object("mapping")
    if mapping is None:
        return ParallelMapping()
    tp_size, pp_size = mapping.integer("tp_size"), mapping.integer("pp_size")
    moe_tp_size, moe_ep_size = mapping.optional_integer("moe_tp_size"), mapping.optional_integer("moe_ep_size")
    try:
        result = ParallelMapping.of(tp_size, pp_size, moe_tp_size, moe_ep_size)
    except ConfigError as error:
        mapping.problem("moe_ep_size", f"cannot be used: {error}")
        return ParallelMapping()
    if mapping.integer("world_size") != result.world_size:
        mapping.problem("world_size", f"must be tp_size * pp_size = {result.world_size}")
    return result
