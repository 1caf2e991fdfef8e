"""Reads a Hugging Face config.json into a CheckpointConfig.

Every field is used, known not to matter, or refused by name: an unknown field may change the maths.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from ..._core import CheckpointError, ConfigError, DType, dtype_from_name
from ...common.json_fields import JsonFields, describe, load_json_object
from ..checkpoint.activation import HIDDEN_ACTS
from ..checkpoint.config import MAX_LAYERS, CheckpointConfig, ParallelMapping
from ..checkpoint.config_file import ConfigFile
from ..checkpoint.pooling import PROBLEM_TYPES, Classifier, problem_type_of
from ..checkpoint.rotary import read_mrope_sections, read_rotary_scaling
from ..models.family import Features, ModelFamily, VisionTower
from ..models.missing_ops import MISSING_OPS
from ..models.registry import FAMILIES, ModelHead, architectures_of, declare, model_of
from ..network.network import Network
from .published.config import read_published_format
from .published.formats import PublishedFormat
from .sentence_transformers import read_embedding_pooling

GENERATION_CONFIG_FILE: Final = "generation_config.json"

# Training, bookkeeping, and defaults of generate(): none of them changes what the network computes.
_HARMLESS_FIELDS: Final = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _commit_hash _flash_attn_2_enabled _name_or_path
    attention_dropout bad_words_ids begin_suppress_tokens chunk_size_feed_forward decoder_start_token_id
    diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size exponential_decay_length_penalty
    finetuning_task forced_bos_token_id forced_eos_token_id id2label initializer_range is_decoder is_llama_config
    label2id length_penalty max_length max_sequence_length min_length model_type no_repeat_ngram_size num_beam_groups
    num_beams num_labels num_return_sequences output_attentions output_hidden_states output_scores prefix
    pretraining_tp problem_type remove_invalid_values repetition_penalty return_dict return_dict_in_generate
    sep_token_id suppress_tokens task_specific_params temperature tf_legacy_loss tokenizer_class top_k top_p
    torchscript transformers.js_config transformers_version typical_p unsloth_fixed unsloth_version use_bfloat16
    use_cache
    """.split()
)

# Fields of other architectures, with the value at which they change nothing.
_NEUTRAL_FIELDS: Final[dict[str, Any]] = {
    "add_cross_attention": False,
    "embedding_multiplier": 1.0,
    "is_encoder_decoder": False,
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "partial_rotary_factor": 1.0,
    "pruned_heads": {},
    "residual_multiplier": 1.0,
    "rope_interleaved": False,
    "tie_encoder_decoder": False,
}


@dataclass(frozen=True)
class HfConfig:
    """A Hugging Face model's config.json, read and checked."""

    file: ConfigFile
    config: CheckpointConfig
    """Quantised if the layers of the model are quantised and checkpoints can hold their scales."""
    published: PublishedFormat | None
    """Quantisation of the published model; None if it is not quantised."""

    @classmethod
    def read(
        cls, model: Path | ConfigFile, *, dtype: DType | None = None, mapping: ParallelMapping | None = None
    ) -> HfConfig:
        """Checks the config.json of a model; reads it first if `model` is a directory.

        dtype: None takes the dtype that config.json states.
        mapping: None does not cut the model.

        Raises CheckpointError that lists everything in config.json that is missing, unknown or not supported, and
        ConfigError if `mapping` cannot cut this model.
        """
        file = model if isinstance(model, ConfigFile) else ConfigFile.read(model)
        return cls(file, *_checked(file, dtype, mapping or ParallelMapping()))

    @property
    def directory(self) -> Path:
        """The model's directory."""
        return self.file.directory

    @cached_property
    def network(self) -> Network:
        """Network of `config`; declared once."""
        return declare(self.config)


def load_hf_config(model_dir: Path, *, dtype: DType | None, mapping: ParallelMapping) -> CheckpointConfig:
    """Returns the CheckpointConfig of a Hugging Face model directory. Raises as HfConfig.read()."""
    return HfConfig.read(model_dir, dtype=dtype, mapping=mapping).config


def _checked(
    file: ConfigFile, dtype: DType | None, mapping: ParallelMapping
) -> tuple[CheckpointConfig, PublishedFormat | None]:
    path = file.path
    fields = JsonFields(file.data)
    family, head = _model_of(fields, str(path))
    if family.vision is not None:
        fields = _fields_of_text(fields, family.vision)
    if family.fill_in is not None:
        missing = {name: value for name, value in family.fill_in(fields).items() if name not in fields}
        fields.inherit(JsonFields(missing))
    published = _published_format(fields)
    classifier = _read_classifier(fields, head)
    config = replace(
        _read(fields, family, dtype, mapping),
        quantization=None if published is None else published.kept,
        has_lm_head=head is ModelHead.LM,
        classifier=classifier,
        embedding_pooling=read_embedding_pooling(file.directory),
    )
    if not fields.problems:
        fields.problems.extend(config.inconsistencies())
    _refuse_unknown(fields, family)
    fields.finish(str(path), CheckpointError)
    config = _with_generation_end_tokens(config, file.directory / GENERATION_CONFIG_FILE)
    if problems := config.mapping_inconsistencies():
        raise ConfigError(f"{path}: " + "; ".join(problems))
    return config, published


def _with_generation_end_tokens(config: CheckpointConfig, path: Path) -> CheckpointConfig:
    """Replaces the config's end tokens by those of generation_config.json, as transformers does.

    Ignores the other fields of that file. Raises CheckpointError if eos_token_id holds anything but token ids.
    """
    if not path.is_file():
        return config
    fields = JsonFields(load_json_object(path, CheckpointError))
    end_ids = fields.integers("eos_token_id", scalar=True)
    fields.discard(fields.remaining())
    fields.finish(str(path), CheckpointError)
    return replace(config, eos_token_id=end_ids) if end_ids else config


def published_format(file: ConfigFile) -> PublishedFormat | None:
    """Returns the quantisation of a published Hugging Face model; None if it is not quantised.

    Other fields of config.json are not checked. Raises CheckpointError that lists everything in quantization_config
    that cannot be read.
    """
    text = file.data.get("text_config")
    fields = JsonFields(file.data)
    if isinstance(text, dict) and file.data.get("quantization_config") is None:
        fields = JsonFields(text, prefix="text_config.")
    found = _published_format(fields)
    if fields.problems:
        raise CheckpointError(f"{file.path}: " + "; ".join(fields.problems))
    return found


def _published_format(fields: JsonFields) -> PublishedFormat | None:
    stated = fields.raw("quantization_config")
    if stated is None:
        return None
    if not isinstance(stated, dict):
        fields.problem("quantization_config", f"is {describe(stated)}; expected an object")
        return None
    return read_published_format(stated, fields.problems)


def _model_of(fields: JsonFields, subject: str) -> tuple[ModelFamily, ModelHead]:
    architectures = fields.raw("architectures")
    accepted = ", ".join(name for family in FAMILIES.values() for name in architectures_of(family))
    if architectures in [[name] for name in MISSING_OPS]:
        needed = MISSING_OPS[architectures[0]]
        raise CheckpointError(
            f"{subject}: architectures is {describe(architectures)}, which is not supported: it needs {needed}"
        )
    named = architectures[0] if isinstance(architectures, list) and len(architectures) == 1 else None
    found = model_of(named) if isinstance(named, str) else None
    if found is None:
        raise CheckpointError(f"{subject}: architectures is {describe(architectures)}; accepted: one of {accepted}")
    family, head = found
    code = fields.raw("auto_map")
    entries = code.items() if isinstance(code, dict) else [("auto_map", code)]
    foreign = (
        {} if code is None else {name: value for name, value in entries if family.published_code.get(name) != value}
    )
    if foreign:
        raise CheckpointError(f"{subject}: auto_map names custom code, which may compute something else: {foreign}")
    return family, head


def _read_classifier(fields: JsonFields, head: ModelHead) -> Classifier | None:
    """Returns the labels of a classifier; other models may have such fields without effect."""
    if head not in (ModelHead.SEQUENCE_CLASSIFIER, ModelHead.TOKEN_CLASSIFIER):
        return None
    labels = read_labels(fields)
    stated = None
    if fields.raw("problem_type") is not None:
        stated = fields.string("problem_type", choices=PROBLEM_TYPES)
    return Classifier(
        labels=labels,
        problem_type=problem_type_of(stated, len(labels)),
        per_token=head is ModelHead.TOKEN_CLASSIFIER,
    )


def read_labels(fields: JsonFields) -> tuple[str, ...]:
    """Returns id2label in the order of its numbers; transformers omits it for two labels without names."""
    named = fields.raw("id2label")
    if named is None:
        return tuple(f"LABEL_{number}" for number in range(fields.integer("num_labels", default=2)))
    if isinstance(named, dict):
        labels = [named.get(str(number)) for number in range(len(named))]
        if labels and all(isinstance(label, str) for label in labels):
            return tuple(map(str, labels))
    fields.problem("id2label", f"is {describe(named)}; expected an object of the labels' names by number, from 0 on")
    return ("",)


def _fields_of_text(fields: JsonFields, vision: VisionTower) -> JsonFields:
    """Returns the language model's fields: in text_config, or in older files next to vision_config, or in both."""
    fields.discard(vision.fields)
    if "text_config" not in fields:
        return fields
    text = fields.object("text_config")
    if text is None:
        return fields
    text.string("model_type", choices=vision.text_model_types, default=min(vision.text_model_types))
    fields.discard(_HARMLESS_FIELDS)
    text.inherit(fields)
    text.inherit(JsonFields({name: value for name, value in vision.text_defaults.items() if name not in text}))
    return text


def _read(fields: JsonFields, family: ModelFamily, dtype: DType | None, mapping: ParallelMapping) -> CheckpointConfig:
    def name(common: str) -> str:
        return family.field_names.get(common, common)

    first_activation = next(iter(family.activations))
    activation = fields.string(name("hidden_act"), choices=family.activations, default=first_activation)
    hidden_size = fields.integer(name("hidden_size"))
    num_hidden_layers = fields.integer(name("num_hidden_layers"), maximum=MAX_LAYERS)
    num_attention_heads = fields.integer(name("num_attention_heads"))
    head_size = _optional_size(fields, family, "head_dim") or _head_size(fields, hidden_size, num_attention_heads)
    unused = 0 if family.unused_positions is None else family.unused_positions(fields)
    max_position_embeddings = fields.integer(name("max_position_embeddings"), minimum=unused + 1) - unused
    if family.read_rope is not None:
        rope = family.read_rope(fields, max_position_embeddings)
    else:
        rope = _read_rope(fields, family, max_position_embeddings, head_size)
    features = family.read_features(fields, num_hidden_layers)
    stated_dtype = _stated_dtype(fields, needed=dtype is None)
    return family.config_class(
        architecture=family.architecture,
        dtype=stated_dtype if dtype is None else dtype,
        vocab_size=fields.integer("vocab_size"),
        max_position_embeddings=max_position_embeddings,
        hidden_size=hidden_size,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=num_attention_heads,
        num_key_value_heads=_optional_size(fields, family, "num_key_value_heads") or num_attention_heads,
        head_size=head_size,
        intermediate_size=_optional_size(fields, family, "intermediate_size") or 4 * hidden_size,
        norm_epsilon=fields.number(name("rms_norm_eps")),
        hidden_act=family.activations.get(activation, HIDDEN_ACTS[0]),
        position_embedding_type=family.position_embedding_type,
        share_embedding_table=fields.boolean("tie_word_embeddings", default=family.tied_by_default),
        mapping=mapping,
        bos_token_id=_token_id(fields, "bos_token_id"),
        eos_token_id=fields.integers("eos_token_id", scalar=True),
        pad_token_id=_token_id(fields, "pad_token_id"),
        **rope,
        **features,
    )


def _optional_size(fields: JsonFields, family: ModelFamily, common: str) -> int | None:
    name = family.field_names.get(common, common)
    return fields.optional_integer(name) if common in family.optional_fields else fields.integer(name)


def _head_size(fields: JsonFields, hidden_size: int, num_attention_heads: int) -> int:
    if hidden_size % num_attention_heads != 0 and not fields.problems:
        fields.problem(
            "hidden_size",
            f"{hidden_size} is not a multiple of num_attention_heads {num_attention_heads}; state head_dim",
        )
    return max(1, hidden_size // num_attention_heads)


def _stated_dtype(fields: JsonFields, *, needed: bool) -> DType:
    # transformers 5 writes dtype, earlier versions torch_dtype.
    stated = [fields.raw(name) for name in ("dtype", "torch_dtype")]
    names = {str(name).removeprefix("torch.") for name in stated if name is not None}
    if not needed:
        return DType.FLOAT32
    if len(names) != 1:
        found = f"says {' and '.join(sorted(names))}" if names else "is missing"
        fields.problem("dtype", f"{found}; state --dtype float32, float16 or bfloat16")
        return DType.FLOAT32
    try:
        return dtype_from_name(names.pop())
    except ConfigError as error:
        fields.problem("dtype", f"cannot be used: {error}")
        return DType.FLOAT32


def _token_id(fields: JsonFields, name: str) -> int | None:
    # Some early Llama checkpoints use -1 for "none".
    token_id = fields.optional_integer(name, minimum=-1)
    return None if token_id == -1 else token_id


def _read_rope(fields: JsonFields, family: ModelFamily, max_position_embeddings: int, head_size: int) -> Features:
    """Reads rope_theta and the scaling from rope_parameters (transformers 5), or rope_theta and rope_scaling."""
    theta = fields.optional_number(family.field_names.get("rope_theta", "rope_theta"), above=True)
    can_be_partial = family.partial_rotary_factor is not None
    partial = None
    if can_be_partial:
        partial = fields.optional_number(family.field_names.get("partial_rotary_factor", "partial_rotary_factor"))
    spellings = [fields.object(name, optional=True) for name in ("rope_parameters", "rope_scaling")]
    given = [nested for nested in spellings if nested is not None]
    if len(given) > 1:
        fields.problem("rope_scaling", "is given together with rope_parameters; expected one of them")
    scaling = None
    beta = 0.0
    sections: tuple[int, ...] = ()
    for nested in given:
        nested_partial = nested.optional_number("partial_rotary_factor")
        if not can_be_partial and nested_partial not in (None, 1.0):
            nested.problem(
                "partial_rotary_factor", f"is {nested_partial}; only rotation of the whole head is supported"
            )
        partial = nested_partial if partial is None else partial
        nested_theta = nested.optional_number("rope_theta", above=True)
        if None not in (theta, nested_theta) and theta != nested_theta:
            nested.problem("rope_theta", f"is {nested_theta}, but rope_theta is {theta}")
        theta = nested_theta if theta is None else theta
        original = fields.optional_integer("original_max_position_embeddings") if can_be_partial else None
        # transformers has sections of its own for families whose rotation may be partial.
        if family.mrope and ("mrope_section" in nested or not can_be_partial):
            share = family.partial_rotary_factor if partial is None else partial
            sections = read_mrope_sections(nested, head_size if share is None else int(head_size * share))
        if family.query_scaling:
            beta = nested.optional_number("llama_4_scaling_beta") or 0.0
            nested.discard(("max_position_embeddings",))  # transformers does not read it here
        if family.alpha_scaling and nested.raw("alpha"):
            theta = (theta or family.default_rope_theta) * _alpha_factor(nested, head_size)
        else:
            scaling = read_rotary_scaling(nested, max_position_embeddings, original, can_be_mrope=family.mrope)
    rope: Features = {"rotary_base": family.default_rope_theta if theta is None else theta, "rotary_scaling": scaling}
    if can_be_partial:
        rope["rotary_pct"] = family.partial_rotary_factor if partial is None else partial
    if family.query_scaling:
        rope["query_scaling_beta"] = beta
    if hasattr(family.config_class, "mrope_section"):
        rope["mrope_section"] = sections
    return rope


def _alpha_factor(fields: JsonFields, head_size: int) -> float:
    """Reads a scaling with `alpha`: returns the factor of rope_theta. The other parameters have no effect."""
    for name in ("rope_type", "type"):
        if fields.raw(name) is not None:
            fields.string(name, choices=("dynamic",))
    alpha = fields.number("alpha", above=True)
    fields.discard(("beta_fast", "beta_slow", "factor", "mscale", "mscale_all_dim"))
    if head_size <= 2:
        fields.problem("alpha", f"needs a head_dim above 2, which is {head_size}")
        return 1.0
    factor: float = alpha ** (head_size / (head_size - 2))
    return factor


def _refuse_unknown(fields: JsonFields, family: ModelFamily) -> None:
    fields.discard((_HARMLESS_FIELDS | family.harmless_fields) - family.neutral_fields.keys())
    neutral = {**_NEUTRAL_FIELDS, **family.neutral_fields}
    for name, value in fields.remaining().items():
        if value is None or (name in neutral and _same(value, neutral[name])):
            fields.discard((name,))
        elif name in neutral:
            fields.discard((name,))
            fields.problem(name, f"is {describe(value)}; only {describe(neutral[name])} is supported")
        else:
            fields.discard((name,))
            fields.problem(name, f"is {describe(value)}: an unknown field, which may change what the model computes")


def _same(value: object, neutral: object) -> bool:
    # bool is a kind of int in Python, but in a config false is not 0.0.
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral
