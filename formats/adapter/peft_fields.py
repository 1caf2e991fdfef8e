"""Fields of adapter_config.json by kind of adapter: each is used, harmless with its value, or refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from ...common.json_fields import MAX_INTEGER, describe, is_finite_number, is_integer
from .path_pattern import MAX_PATTERNS, is_plain, path_pattern

KNOWN_PEFT: Final = "0.21"
"""Newest release of PEFT whose fields are all listed below."""

MODULE_PATTERN: Final = r"(.*\.)?({})$"
"""Regular expression that PEFT builds from the keys of rank_pattern and alpha_pattern."""

# Initialisations that leave the base model unchanged. They only choose the starting point of A and B.
_HARMLESS_INITS = ("eva", "gaussian", "mica", "orthogonal")
# Initialisations that move a share of the base's weights into A and B: the adapter belongs to a changed base.
_BASE_CHANGING_INITS = ("corda", "lora_ga", "olora", "pissa")

# Checks a field's value. Returns the reason why the value is refused, or None.
Check = Callable[[Any], "str | None"]


def _anything(_: Any) -> str | None:
    return None


def _boolean(value: Any) -> str | None:
    return None if value is None or isinstance(value, bool) else "expected true or false"


def _rank(value: Any) -> str | None:
    return (
        None if is_integer(value) and 0 < value <= MAX_INTEGER else f"expected a whole number from 1 to {MAX_INTEGER}"
    )


def _seed(value: Any) -> str | None:
    return None if is_integer(value) and 0 <= value < 1 << 63 else "expected a whole number from 0 to 2^63 - 1"


def is_switched_off(value: Any) -> bool:
    """True if an unknown field has no effect: a newer PEFT writes all of its fields."""
    return value is None or value is False or (isinstance(value, str | list | dict) and not value)


def _length(value: Any) -> str | None:
    return None if is_integer(value) and 0 <= value <= MAX_INTEGER else "expected a number of tokens"


def _number(value: Any) -> str | None:
    return None if is_finite_number(value) else "expected a finite number"


def _pattern(value: str, wrapped: str = "{}") -> str | None:
    """Checks that `value` is a regular expression that can be matched, also inside the one that PEFT builds."""
    try:
        path_pattern(value)
        path_pattern(wrapped.format(value))
    except ValueError as error:
        return f"'{value}' cannot be used as a pattern: {error}"
    return None


def _is_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _modules(value: Any) -> str | None:
    if isinstance(value, str):
        if value == "all-linear":
            return "PEFT replaces this by the list of modules when it saves; give that list"
        return _pattern(value)
    return None if _is_strings(value) else "expected a list of module names or a pattern"


def _names_of_modules(value: Any) -> str | None:
    return None if _is_strings(value) and all(value) else "expected a list of names of modules"


def _names_of_parameters(value: Any) -> str | None:
    return None if value is None or _is_strings(value) else "expected a list of names of parameters"


def _layers(value: Any) -> str | None:
    values = value if isinstance(value, list) else [value]
    return None if all(is_integer(item) and item >= 0 for item in values) else "expected layer indices of 0 and above"


def _tokens(value: Any) -> str | None:
    by_module = value if isinstance(value, dict) else {"": value or []}
    for tokens in by_module.values():
        if not isinstance(tokens, list) or not all(is_integer(token) and token >= 0 for token in tokens):
            return "expected a list of tokens, or an object of module: list of tokens"
        if len(set(tokens)) != len(tokens):
            return "names a token twice"
    return None


def _tokens_of_targets(value: Any) -> str | None:
    return _tokens(value) if isinstance(value, list) else "expected a list of tokens"


def _layers_pattern(value: Any) -> str | None:
    values = [value] if isinstance(value, str) else value
    accepted = _is_strings(values) and all(re.fullmatch(r"[\w.]*", item) for item in values)
    return None if accepted else "expected the name of a list of layers, such as layers, or a list of such names"


def _patterns_of(check: Check) -> Check:
    def check_patterns(value: Any) -> str | None:
        if not isinstance(value, dict):
            return "expected an object of pattern: value"
        num_patterns = sum(not is_plain(pattern) for pattern in value)
        if num_patterns > MAX_PATTERNS:
            return f"has {num_patterns} regular expressions; expected at most {MAX_PATTERNS}"
        for pattern, item in value.items():
            reason = None if is_plain(pattern) else _pattern(pattern, MODULE_PATTERN)
            reason = reason or check(item)
            if reason is not None:
                return f"'{pattern}': {reason}"
        return None

    return check_patterns


def _token_ids(value: Any) -> str | None:
    is_list = isinstance(value, list) and all(is_integer(item) and 0 <= item <= MAX_INTEGER for item in value)
    return None if is_list and value else "expected a list of token ids"


def _optional(check: Check) -> Check:
    return lambda value: None if value is None else check(value)


def _only(*accepted: Any, reason: str) -> Check:
    # Compares as JSON does: 0 is not false.
    return lambda value: None if any(value == a and type(value) is type(a) for a in accepted) else reason


def _unused(reason: str) -> Check:
    return _only(None, False, [], {}, reason=reason)


def _init(value: Any) -> str | None:
    if value == "loftq":
        return (
            "LoftQ quantised the base model's weights, which an initial adapter cannot express; build "
            "the engine of those weights, and save the adapter with init_lora_weights = true"
        )
    if value is None or isinstance(value, bool) or value in _HARMLESS_INITS or base_changing_init(value):
        return None
    return f"not a known initialisation; accepted: true, false, {', '.join((*_HARMLESS_INITS, *_BASE_CHANGING_INITS))}"


def base_changing_init(value: Any) -> bool:
    """True if an init_lora_weights moved a share of the base's weights into A and B, and so changed the base."""
    return isinstance(value, str) and value.startswith(_BASE_CHANGING_INITS)


def _flags_of_ranks(value: Any) -> str | None:
    """Checks AdaLoRA's rank_pattern: flags of the initial ranks that a module keeps."""
    flags = isinstance(value, dict) and all(
        isinstance(kept, list) and all(isinstance(flag, bool) for flag in kept) for kept in value.values()
    )
    return None if flags else "expected an object of lora_E's name: list of true and false"


_IS_FOR_PEFT: dict[str, Check] = {
    "peft_type": _anything,  # selects the table
    "task_type": _anything,  # recognise.py refuses other tasks
    "auto_mapping": _anything,  # recognise.py refuses other classes of models
    "base_model_name_or_path": _anything,
    "inference_mode": _anything,
    "peft_version": _anything,
    "revision": _anything,
}
"""Fields of all of PEFT's configurations."""

_IS_FOR_TRAINING: dict[str, Check] = {
    "enable_lora": _only(None, [], reason="merged linear layers of PEFT 0.2 are not supported"),
    "lora_dtype": _anything,  # ms-swift: dtype of the trained weights, which the file also says
    "lorap_emb_lr": _anything,  # ms-swift: learning rates
    "lorap_lr_ratio": _anything,
    "merge_weights": _anything,  # PEFT 0.2: merge for evaluation
    "unsloth_fixed": _anything,
    "unsloth_version": _anything,
}
"""Fields that trainers and old releases of PEFT add; they do not change what a trained adapter computes."""

_TARGETS: dict[str, Check] = {
    "target_modules": _modules,
    "exclude_modules": _optional(_modules),
    "layers_to_transform": _optional(_layers),
    "layers_pattern": _optional(_layers_pattern),
    "modules_to_save": _optional(_names_of_modules),
}

_COMMON = _IS_FOR_PEFT | _IS_FOR_TRAINING | _TARGETS

_LORA: dict[str, Check] = _COMMON | {
    # Used.
    "r": _rank,
    "lora_alpha": _number,
    "rank_pattern": _optional(_patterns_of(_rank)),
    "alpha_pattern": _optional(_patterns_of(_number)),
    "use_rslora": _boolean,
    "use_dora": _boolean,
    "lora_bias": _boolean,
    "fan_in_fan_out": _boolean,
    "init_lora_weights": _init,
    "context_length": _optional(_length),  # vLLM's LongLoRA
    # No effect on what a trained adapter computes.
    "bias": _only("none", "all", "lora_only", None, reason="accepted: none, all, lora_only"),  # the tensors decide
    "corda_config": _anything,  # parameters of initialisations; init_lora_weights decides
    "ensure_weight_tying": _boolean,
    "eva_config": _anything,
    "loftq_config": _anything,
    "lora_dropout": _anything,  # only acts in training
    "lora_ga_config": _anything,
    "megatron_core": _anything,  # megatron_config decides
    "qalora_group_size": _anything,  # use_qalora decides
    "runtime_config": _anything,  # says where PEFT computes
    # Features that change the computation; engines support some values.
    "alora_invocation_tokens": _optional(_token_ids),
    "arrow_config": _unused("Arrow routing is not supported"),
    "kasa_config": _unused("KaSA changes the base model's weights and is not supported"),
    "layer_replication": _unused("the base model has other layers than the engine"),
    "megatron_config": _unused("Megatron's layers are not supported"),
    "monteclora_config": _unused("MonteCLoRA is not supported"),
    "target_parameters": _names_of_parameters,
    "trainable_token_indices": _tokens,
    "use_bdlora": _unused("block-diagonal LoRA is not supported"),
    "use_qalora": _unused("QALoRA pools the input and is not supported"),
    "velora_config": _unused("VeLoRA is not supported"),
}

_ADALORA: dict[str, Check] = _LORA | {
    "init_r": _rank,
    "rank_pattern": _optional(_flags_of_ranks),
    "use_dora": _unused("AdaLoRA has no DoRA"),
    "alora_invocation_tokens": _unused("AdaLoRA has no aLoRA"),
    "lora_bias": _unused("AdaLoRA has no biases of B"),
    # No effect: AdaLoRA's ranks come from init_r and rank_pattern, its scale from lora_alpha and init_r. The other
    # fields are its training schedule.
    **dict.fromkeys(
        ("r", "alpha_pattern", "use_rslora", "target_r", "tinit", "tfinal", "deltaT", "beta1", "beta2"), _anything
    ),
    **dict.fromkeys(("orth_reg_weight", "total_step"), _anything),
}

_VERA: dict[str, Check] = _COMMON | {
    "r": _rank,
    "fan_in_fan_out": _boolean,
    "projection_prng_key": _seed,  # for projections that are not in the file
    "save_projection": _boolean,
    # No effect on what a trained adapter computes.
    "bias": _only("none", "all", "vera_only", None, reason="accepted: none, all, vera_only"),  # the tensors decide
    **dict.fromkeys(("vera_dropout", "d_initial", "init_weights"), _anything),
}

_LYCORIS: dict[str, Check] = _COMMON | {
    "r": _rank,
    "alpha": _number,
    "rank_pattern": _optional(_patterns_of(_rank)),
    "alpha_pattern": _optional(_patterns_of(_number)),
    # No effect on what a trained adapter computes, or on linear layers.
    **dict.fromkeys(("rank_dropout", "module_dropout", "use_effective_conv2d", "init_weights"), _anything),
}
_LOKR: dict[str, Check] = _LYCORIS | dict.fromkeys(
    ("decompose_both", "decompose_factor", "rank_dropout_scale"),
    _anything,  # the tensors' shapes decide
)

_IA3: dict[str, Check] = _COMMON | {
    "feedforward_modules": _optional(_modules),
    "fan_in_fan_out": _boolean,
    "init_ia3_weights": _anything,  # starting point of training
}

TRAINABLE_TOKENS: Final = "TRAINABLE_TOKENS"
_TRAINABLE_TOKENS: dict[str, Check] = _IS_FOR_PEFT | {
    "target_modules": _modules,
    "token_indices": _tokens_of_targets,
    "init_weights": _anything,  # starting point of training
}

FIELDS: Final[Mapping[str, Mapping[str, Check]]] = {
    "LORA": _LORA,
    "ADALORA": _ADALORA,
    "VERA": _VERA,
    "LOHA": _LYCORIS,
    "LOKR": _LOKR,
    "IA3": _IA3,
    TRAINABLE_TOKENS: _TRAINABLE_TOKENS,
}
"""Checks of the served kinds, by peft_type."""

_PROMPT: dict[str, Check] = _IS_FOR_PEFT | {
    # Used.
    "num_virtual_tokens": _rank,
    "token_dim": _rank,
    "num_transformer_submodules": _only(None, 1, reason="prompts of an encoder and a decoder are not supported"),
    "modules_to_save": _unused("layers that were trained together with virtual tokens are not served"),
    # No effect on trained tokens.
    **dict.fromkeys(("num_attention_heads", "num_layers"), _anything),
}

PROMPT_FIELDS: Final[Mapping[str, Mapping[str, Check]]] = {
    "PROMPT_TUNING": _PROMPT
    | dict.fromkeys(  # starting point of training
        ("prompt_tuning_init", "prompt_tuning_init_text", "tokenizer_name_or_path", "tokenizer_kwargs"), _anything
    ),
    "P_TUNING": _PROMPT
    | dict.fromkeys(  # the encoder that made the tokens; PEFT saves its output
        ("encoder_reparameterization_type", "encoder_hidden_size", "encoder_num_layers", "encoder_dropout"), _anything
    ),
}
"""Checks of virtual tokens, by peft_type."""

PROMPT_REQUIRED: Final = ("num_virtual_tokens", "token_dim")

REQUIRED: Final[Mapping[str, tuple[str, ...]]] = {
    "LORA": ("r", "lora_alpha", "target_modules"),
    "ADALORA": ("init_r", "lora_alpha", "target_modules"),
    "VERA": ("r", "target_modules"),
    "LOHA": ("r", "alpha", "target_modules"),
    "LOKR": ("r", "alpha", "target_modules"),
    "IA3": ("target_modules",),
    TRAINABLE_TOKENS: ("target_modules", "token_indices"),
}


def field_problems(fields: Mapping[str, Any], checks: Mapping[str, Check], required: Sequence[str]) -> list[str]:
    """Lists every field of an adapter_config.json that cannot be honoured, with its value and the reason."""
    problems = [f"{name} is missing" for name in required if name not in fields]
    for name, value in fields.items():
        check = checks.get(name)
        if check is not None:
            reason = check(value)
        elif is_switched_off(value):
            reason = None  # feature of a newer PEFT, switched off
        else:
            reason = _unknown(fields.get("peft_version"))
        if reason is not None:
            problems.append(f"{name} = {describe(value)}: {reason}")
    return problems


def _unknown(version: Any) -> str:
    written = f", and the adapter is from PEFT {version}" if isinstance(version, str) else ""
    return f"an unknown field with an unknown effect; known are the fields of PEFT up to {KNOWN_PEFT}{written}"
