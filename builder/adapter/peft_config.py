"""adapter_config.json: every field of PEFT's LoraConfig is used, harmless by its value, or refused."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..._core import AdapterError
from ..json_fields import MAX_INTEGER, describe, load_json_object
from .path_pattern import path_pattern

CONFIG_FILE = "adapter_config.json"

# Initialisations that leave the base model as it was. They only choose the starting point of A and B.
_HARMLESS_INITS = ("eva", "gaussian", "mica", "orthogonal")
# Initialisations that take A and B out of the base's weights: the adapter belongs to a changed base.
_BASE_CHANGING_INITS = ("corda", "loftq", "lora_ga", "olora", "pissa")

# The regular expressions that PEFT makes of rank_pattern's and alpha_pattern's keys and of layers_pattern. The latter
# is matched by `re`: _layers_pattern() accepts nothing there that could make it backtrack.
_MODULE_PATTERN = r"(.*\.)?({})$"
_LAYER_PATTERN = r"(?:^|.*?\.){}\.(?P<layer>\d+)\."
_ANY_LAYER_PATTERN = r".*?\.[^.]*\.(?P<layer>\d+)\."


@dataclass(frozen=True)
class PeftLoraConfig:
    """The fields of adapter_config.json that decide what an adapter computes."""

    rank: int
    alpha: float
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    use_rslora: bool
    use_dora: bool
    fan_in_fan_out: bool
    target_modules: str | tuple[str, ...]
    exclude_modules: str | tuple[str, ...]
    layers_to_transform: tuple[int, ...]
    layers_pattern: tuple[str, ...]

    def rank_of(self, path: str) -> int:
        """The rank that PEFT gives to the module at `path`."""
        return self.rank_pattern.get(_first_match(self.rank_pattern, path), self.rank)

    def alpha_of(self, path: str) -> float:
        """The lora_alpha that PEFT gives to the module at `path`."""
        return self.alpha_pattern.get(_first_match(self.alpha_pattern, path), self.alpha)

    def scale_of(self, path: str) -> float:
        """B @ A's factor: alpha / r (arXiv:2106.09685), or alpha / sqrt(r) for rsLoRA (arXiv:2312.03732)."""
        rank = self.rank_of(path)
        return self.alpha_of(path) / (math.sqrt(rank) if self.use_rslora else rank)

    def targets(self, path: str) -> bool:
        """Whether PEFT would put an adapter on the module at `path`."""
        if _names(self.exclude_modules, path):
            return False
        if not _names(self.target_modules, path):
            return False
        return not self.layers_to_transform or path in self.target_modules or self._in_layers(path)

    def _in_layers(self, path: str) -> bool:
        # Without a layers_pattern PEFT takes the first number that follows at least two names.
        patterns = [_LAYER_PATTERN.format(pattern) for pattern in self.layers_pattern] or [_ANY_LAYER_PATTERN]
        for pattern in patterns:
            match = re.match(pattern, path)
            if match:
                return int(match["layer"]) in self.layers_to_transform
        return False


def _first_match(patterns: Iterable[str], path: str) -> str:
    """The first pattern that matches the end of `path`, else `path` itself, which is looked up literally."""
    return next((pattern for pattern in patterns if path_pattern(_MODULE_PATTERN.format(pattern)).matches(path)), path)


def _names(modules: str | tuple[str, ...], path: str) -> bool:
    """PEFT's rule: a string is a regular expression of the whole path, a list holds paths or their ends."""
    if isinstance(modules, str):
        return bool(modules) and path_pattern(modules).matches(path)
    return any(path == module or path.endswith(f".{module}") for module in modules)


def read_peft_config(directory: Path) -> PeftLoraConfig:
    """Reads and checks adapter_config.json.

    Raises AdapterError that names every field that cannot be honoured, with its value and the reason.
    """
    path = directory / CONFIG_FILE
    return parse_peft_config(load_json_object(path, AdapterError), str(path))


def dump_without_dora(fields: Mapping[str, Any]) -> bytes:
    """An adapter_config.json that says that the adapter is plain LoRA."""
    return (json.dumps({**fields, "use_dora": False}, indent=2) + "\n").encode()


def parse_peft_config(fields: Mapping[str, Any], subject: str) -> PeftLoraConfig:
    """Checks the fields of an adapter_config.json; `subject` begins the error's text. Raises AdapterError."""
    problems = [f"{name} is missing" for name in _REQUIRED if name not in fields]
    for name, value in fields.items():
        check = _CHECKS.get(name)
        if check is not None:
            reason = check(value)
        elif _is_switched_off(value):
            reason = None  # a newer PEFT's feature
        else:
            reason = "this field is not known, and so is its effect"
        if reason is not None:
            problems.append(f"{name} = {describe(value)}: {reason}")
    if not problems:
        problems = _inconsistencies(fields)
    if problems:
        raise AdapterError(f"{subject}: " + "; ".join(problems))
    layers = fields.get("layers_to_transform")
    return PeftLoraConfig(
        rank=fields["r"],
        alpha=fields["lora_alpha"],
        rank_pattern=fields.get("rank_pattern") or {},
        alpha_pattern=fields.get("alpha_pattern") or {},
        use_rslora=bool(fields.get("use_rslora")),
        use_dora=bool(fields.get("use_dora")),
        fan_in_fan_out=bool(fields.get("fan_in_fan_out")),
        target_modules=_string_or_tuple(fields["target_modules"]),
        exclude_modules=_string_or_tuple(fields.get("exclude_modules")),
        layers_to_transform=(layers,) if isinstance(layers, int) else tuple(layers or ()),
        layers_pattern=_tuple(fields.get("layers_pattern")),
    )


def _string_or_tuple(value: Any) -> str | tuple[str, ...]:
    return value if isinstance(value, str) else tuple(value or ())


def _tuple(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) and value else tuple(value or ())


def _inconsistencies(fields: Mapping[str, Any]) -> list[str]:
    """What PEFT's LoraConfig refuses as a combination."""
    problems = []
    layers = fields.get("layers_to_transform")
    if isinstance(fields["target_modules"], str):
        problems += [
            f"{name} = {describe(fields[name])}: only goes with target_modules that are a list"
            for name in ("layers_to_transform", "layers_pattern")
            if fields.get(name) is not None
        ]
    elif fields.get("layers_pattern") and layers is None:
        problems.append(f"layers_pattern = {describe(fields['layers_pattern'])}: needs layers_to_transform")
    return problems


# What a field may hold. A check returns the reason why a value is refused, or None.
_Check = Callable[[Any], "str | None"]


def _anything(_: Any) -> str | None:
    return None


def _boolean(value: Any) -> str | None:
    return None if value is None or isinstance(value, bool) else "expected true or false"


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _rank(value: Any) -> str | None:
    return None if _is_int(value) and 0 < value <= MAX_INTEGER else f"expected a whole number from 1 to {MAX_INTEGER}"


def _is_switched_off(value: Any) -> bool:
    return value is None or value is False or (isinstance(value, str | list | dict) and not value)


def _number(value: Any) -> str | None:
    number = isinstance(value, float | int) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    return None if number else "expected a finite number"


def _pattern(value: str, wrapped: str = "{}") -> str | None:
    """Whether `value` is a regular expression that can be matched, also within the one that PEFT makes of it."""
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


def _target_modules(value: Any) -> str | None:
    return "expected at least one module" if value in ("", []) else _modules(value)


def _layers(value: Any) -> str | None:
    values = value if isinstance(value, list) else [value]
    return None if all(_is_int(item) and item >= 0 for item in values) else "expected layer indices of 0 and above"


def _layers_pattern(value: Any) -> str | None:
    values = [value] if isinstance(value, str) else value
    accepted = _is_strings(values) and all(re.fullmatch(r"[\w.]*", item) for item in values)
    return None if accepted else "expected the name of a list of layers, such as layers, or a list of such names"


def _patterns_of(check: _Check) -> _Check:
    def check_patterns(value: Any) -> str | None:
        if not isinstance(value, dict):
            return "expected an object of pattern: value"
        for pattern, item in value.items():
            reason = _pattern(pattern, _MODULE_PATTERN) or check(item)
            if reason is not None:
                return f"'{pattern}': {reason}"
        return None

    return check_patterns


def _optional(check: _Check) -> _Check:
    return lambda value: None if value is None else check(value)


def _only(*accepted: Any, reason: str) -> _Check:
    # Equality of JSON values: 0 is not false.
    return lambda value: None if any(value == a and type(value) is type(a) for a in accepted) else reason


def _unused(reason: str) -> _Check:
    return _only(None, False, [], {}, reason=reason)


def _init(value: Any) -> str | None:
    if value is None or isinstance(value, bool) or value in _HARMLESS_INITS:
        return None
    if isinstance(value, str) and value.startswith(_BASE_CHANGING_INITS):
        return (
            "this initialisation changed the base model's weights, so the adapter is not all of the change; "
            "save it with PEFT's path_initial_model_for_weight_conversion to get a plain LoRA adapter"
        )
    return f"not a known initialisation; accepted: true, false, {', '.join(_HARMLESS_INITS)}"


_REQUIRED = ("peft_type", "r", "lora_alpha", "target_modules")

_CHECKS: dict[str, _Check] = {
    # Used.
    "peft_type": _only("LORA", reason="only LORA adapters (with or without DoRA) can be served"),
    "r": _rank,
    "lora_alpha": _number,
    "rank_pattern": _optional(_patterns_of(_rank)),
    "alpha_pattern": _optional(_patterns_of(_number)),
    "use_rslora": _boolean,
    "use_dora": _boolean,
    "fan_in_fan_out": _boolean,
    "target_modules": _target_modules,
    "exclude_modules": _optional(_modules),
    "layers_to_transform": _optional(_layers),
    "layers_pattern": _optional(_layers_pattern),
    # Without effect on what a trained adapter computes.
    "auto_mapping": _anything,
    "base_model_name_or_path": _anything,
    "corda_config": _anything,  # parameters of initialisations; init_lora_weights decides
    "ensure_weight_tying": _anything,  # concerns embeddings and lm_head, whose tensors are refused
    "eva_config": _anything,
    "inference_mode": _anything,
    "init_lora_weights": _init,
    "lora_dropout": _anything,  # only acts in training
    "lora_ga_config": _anything,
    "megatron_core": _anything,  # megatron_config decides
    "peft_version": _anything,
    "qalora_group_size": _anything,  # use_qalora decides
    "revision": _anything,
    "runtime_config": _anything,  # where PEFT computes
    "task_type": _only("CAUSAL_LM", None, reason="only causal language models are served; accepted: CAUSAL_LM"),
    # Features that change the computation in a way that engines do not have.
    "alora_invocation_tokens": _only(None, reason="activated LoRA is not supported"),
    "arrow_config": _unused("Arrow routing is not supported"),
    "bias": _only("none", None, reason="trained biases are not supported; accepted: none"),
    "kasa_config": _unused("KaSA changes the base model's weights and is not supported"),
    "layer_replication": _unused("the base model has other layers than the engine"),
    "loftq_config": _unused("LoftQ changes the base model's weights and is not supported"),
    "lora_bias": _unused("a bias of lora_B is not supported"),
    "megatron_config": _unused("Megatron's layers are not supported"),
    "modules_to_save": _unused("modules that were trained in full cannot be served beside the base model"),
    "monteclora_config": _unused("MonteCLoRA is not supported"),
    "target_parameters": _unused("adapters on parameters (as in mixtures of experts) are not supported"),
    "trainable_token_indices": _unused("trained tokens cannot be served beside the base model's embedding"),
    "use_bdlora": _unused("block-diagonal LoRA is not supported"),
    "use_qalora": _unused("QALoRA pools the input and is not supported"),
    "velora_config": _unused("VeLoRA is not supported"),
}
