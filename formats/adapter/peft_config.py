"""Reads PEFT's adapter_config.json: what an adapter computes. Every field is accounted for."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..._core import AdapterError
from ...common.json_fields import describe
from .path_pattern import is_plain, matches_end, path_pattern
from .peft_fields import (
    FIELDS,
    MODULE_PATTERN,
    REQUIRED,
    TRAINABLE_TOKENS,
    base_changing_init,
    field_problems,
)

# The regular expressions that PEFT builds from layers_pattern. `re` matches them: peft_fields.py accepts no value there
# that could make it backtrack.
_LAYER_PATTERN = r"(?:^|.*?\.){}\.(?P<layer>\d+)\."
_ANY_LAYER_PATTERN = r".*?\.[^.]*\.(?P<layer>\d+)\."


@dataclass(frozen=True)
class PeftConfig:
    """Fields of adapter_config.json that decide what an adapter computes."""

    peft_type: str
    rank: int
    """Rank r; for AdaLoRA, init_r."""
    alpha: float
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    kept_ranks: Mapping[str, Sequence[bool]]
    """AdaLoRA's rank_pattern: flags of the initial ranks that are left, by lora_E's name."""
    use_rslora: bool
    use_dora: bool
    lora_bias: bool
    """True if B of every module has a bias."""
    trains_biases: bool
    """True if the file may have biases of the base's layers."""
    base_changing_init: str
    """Initialisation that moved a share of the base's weights into A and B; "" for none."""
    projection_seed: int
    """Seed of VeRA's projections, for files without them."""
    feedforward_modules: str | tuple[str, ...]
    """IA3: modules whose inputs are multiplied."""
    fan_in_fan_out: bool
    target_modules: str | tuple[str, ...]
    exclude_modules: str | tuple[str, ...]
    target_parameters: tuple[str, ...]
    saved_modules: tuple[str, ...]
    """modules_to_save: ends of paths."""
    ties_weights: bool
    """True if a tied lm_head shares what was trained of the embedding (ensure_weight_tying)."""
    token_indices: Mapping[str, tuple[int, ...]]
    """Trained tokens, by end of the path of lm_head or the embedding.

    The key "" stands for the embedding, or for all targets of TRAINABLE_TOKENS.
    """
    layers_to_transform: tuple[int, ...]
    layers_pattern: tuple[str, ...]
    invocation_tokens: tuple[int, ...]
    """aLoRA: the tokens from which on the adapter is active; () for other adapters."""
    context_length: int
    """Context length in tokens that it was trained for with divided rotary positions (LongLoRA); 0: not given."""

    def rank_of(self, path: str) -> int:
        """Rank that PEFT gives to the module at `path`."""
        return self.rank_pattern.get(_first_match(self.rank_pattern, path), self.rank)

    def alpha_of(self, path: str) -> float:
        """lora_alpha that PEFT gives to the module at `path`."""
        return self.alpha_pattern.get(_first_match(self.alpha_pattern, path), self.alpha)

    def scale_of(self, path: str) -> float:
        """Factor of B @ A: alpha / r (arXiv:2106.09685), or alpha / sqrt(r) for rsLoRA (arXiv:2312.03732)."""
        rank = self.rank_of(path)
        return self.alpha_of(path) / (math.sqrt(rank) if self.use_rslora else rank)

    def is_feedforward(self, path: str) -> bool:
        """True if IA3 multiplies the inputs of the module at `path`.

        Like PEFT, compares ends of paths, even within a name.
        """
        if isinstance(self.feedforward_modules, str):
            return bool(self.feedforward_modules) and path_pattern(self.feedforward_modules).matches(path)
        return any(path.endswith(end) for end in self.feedforward_modules)

    def targets(self, path: str) -> bool:
        """True if PEFT would put an adapter on the module at `path`."""
        if _names(self.exclude_modules, path):
            return False
        if not _names(self.target_modules, path):
            return False
        return not self.layers_to_transform or path in self.target_modules or self._in_layers(path)

    def saves(self, path: str) -> bool:
        """True if the module at `path` was trained whole. Like PEFT, compares ends of paths, even within a name."""
        return any(path.endswith(name) for name in self.saved_modules)

    def tokens_of(self, path: str, *, is_embedding: bool) -> tuple[int, ...]:
        """Tokens whose rows PEFT trained in the module at `path`."""
        if self.peft_type == TRAINABLE_TOKENS:
            return self.token_indices.get("", ()) if self.targets(path) else ()
        for name, tokens in self.token_indices.items():
            if (not name and is_embedding) or path == name or path.endswith(f".{name}"):
                return tokens
        return ()

    def targets_parameter(self, path: str) -> bool:
        """True if PEFT would put an adapter on the parameter at `path`."""
        return _names(self.target_parameters, path)

    def _in_layers(self, path: str) -> bool:
        # Without a layers_pattern, PEFT takes the first number that follows at least two names.
        patterns = [_LAYER_PATTERN.format(pattern) for pattern in self.layers_pattern] or [_ANY_LAYER_PATTERN]
        for pattern in patterns:
            match = re.match(pattern, path)
            if match:
                return int(match["layer"]) in self.layers_to_transform
        return False


def _first_match(patterns: Iterable[str], path: str) -> str:
    """Returns the first pattern that matches the end of `path`, otherwise `path`: the key of a literal entry."""
    return next((pattern for pattern in patterns if _matches_module(pattern, path)), path)


def _matches_module(pattern: str, path: str) -> bool:
    # Most patterns are names, possibly one per module: compiling them would be slow.
    if is_plain(pattern):
        return matches_end(pattern, path)
    return path_pattern(MODULE_PATTERN.format(pattern)).matches(path)


def _names(modules: str | tuple[str, ...], path: str) -> bool:
    """True if `modules` selects `path` in PEFT: a string is a regular expression of the whole path, a list has ends."""
    if isinstance(modules, str):
        return bool(modules) and path_pattern(modules).matches(path)
    return any(path == module or path.endswith(f".{module}") for module in modules)


def parse_peft_config(fields: Mapping[str, Any], subject: str) -> PeftConfig:
    """Checks the fields of an adapter_config.json whose peft_type is one of FIELDS.

    `subject` begins the text of errors. Raises AdapterError that names every field that cannot be honoured, with its
    value and the reason.
    """
    peft_type = fields["peft_type"]
    problems = field_problems(fields, FIELDS[peft_type], REQUIRED[peft_type])
    if not problems:
        problems = _inconsistencies(fields)
    if problems:
        raise AdapterError(f"{subject}: " + "; ".join(problems))
    layers = fields.get("layers_to_transform")
    init = fields.get("init_lora_weights")
    is_adalora = peft_type == "ADALORA"
    patterns = fields.get("rank_pattern") or {}
    return PeftConfig(
        peft_type=peft_type,
        rank=fields["init_r"] if is_adalora else _given(fields, "r", default=1),
        alpha=_given(fields, "lora_alpha", "alpha", default=1.0),
        rank_pattern={} if is_adalora else patterns,
        alpha_pattern={} if is_adalora else fields.get("alpha_pattern") or {},
        kept_ranks=patterns if is_adalora else {},
        use_rslora=bool(fields.get("use_rslora")),
        use_dora=bool(fields.get("use_dora")),
        lora_bias=bool(fields.get("lora_bias")),
        trains_biases=fields.get("bias") not in ("none", None),
        base_changing_init=str(init) if base_changing_init(init) else "",
        projection_seed=fields.get("projection_prng_key", 0),
        feedforward_modules=_string_or_tuple(fields.get("feedforward_modules")),
        fan_in_fan_out=bool(fields.get("fan_in_fan_out")),
        target_modules=_string_or_tuple(fields["target_modules"]),
        exclude_modules=_string_or_tuple(fields.get("exclude_modules")),
        target_parameters=_tuple(fields.get("target_parameters")),
        saved_modules=_tuple(fields.get("modules_to_save")),
        ties_weights=bool(fields.get("ensure_weight_tying")),
        token_indices=_tokens(_given(fields, "token_indices", "trainable_token_indices")),
        layers_to_transform=(layers,) if isinstance(layers, int) else tuple(layers or ()),
        layers_pattern=_tuple(fields.get("layers_pattern")),
        invocation_tokens=tuple(fields.get("alora_invocation_tokens") or ()),
        context_length=fields.get("context_length") or 0,
    )


def _given(fields: Mapping[str, Any], *names: str, default: Any = None) -> Any:
    """Returns the value of the first of these fields that is neither missing nor null."""
    return next((fields[name] for name in names if fields.get(name) is not None), default)


def _tokens(value: Any) -> dict[str, tuple[int, ...]]:
    by_module = value if isinstance(value, dict) else {"": value or []}
    return {name: tuple(tokens) for name, tokens in by_module.items() if tokens}


def _string_or_tuple(value: Any) -> str | tuple[str, ...]:
    return value if isinstance(value, str) else tuple(value or ())


def _tuple(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) and value else tuple(value or ())


def _inconsistencies(fields: Mapping[str, Any]) -> list[str]:
    """Lists combinations that PEFT's LoraConfig refuses."""
    problems = []
    if fields.get("alora_invocation_tokens") and fields.get("use_dora"):
        problems.append("alora_invocation_tokens and use_dora are both set: PEFT has no aLoRA with magnitudes")
    layers = fields.get("layers_to_transform")
    if not fields["target_modules"] and not fields.get("target_parameters"):
        problems.append(f"target_modules = {describe(fields['target_modules'])}: expected at least one module")
    if isinstance(fields["target_modules"], str):
        problems += [
            f"{name} = {describe(fields[name])}: only goes with target_modules that are a list"
            for name in ("layers_to_transform", "layers_pattern")
            if fields.get(name) is not None
        ]
    elif fields.get("layers_pattern") and layers is None:
        problems.append(f"layers_pattern = {describe(fields['layers_pattern'])}: needs layers_to_transform")
    return problems
