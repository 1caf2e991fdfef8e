"""Options of a completion with vLLM's names."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final

from .._core import RequestError, SamplingConfig
from ..common.shown_value import shown
from .sampling_defaults import SamplingDefaults
from .sampling_fields import BOOLEAN, LOGIT_BIASES, MAX_LOG_PROBS, MAX_LOGIT_BIAS, SAMPLING_FIELDS, TOKEN_ID, unaccepted

_SEEDS: Final = 1 << 64
_BOOLEANS: Final = (
    "ignore_eos",
    "include_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "return_perf_metrics",
)
_NO_BEAMS: Final = "for beams, give sampling_config with beam_width"
_LIKELY: Final = f"logprobs and prompt_logprobs give up to {MAX_LOG_PROBS} of the most likely tokens"
_NO_GUIDE: Final = "give guided_decoding_params to the method"
_UNSUPPORTED: Final[Mapping[str, tuple[tuple[Any, ...], str]]] = {
    "best_of": ((None, 1), "all generated completions are returned; give n"),
    "use_beam_search": ((False, None), _NO_BEAMS),
    "length_penalty": ((1.0, None), _NO_BEAMS),
    "early_stopping": ((False, None), _NO_BEAMS),
    "detokenize": ((True, None), "completions are texts; token_ids has their tokens"),
    "spaces_between_special_tokens": ((True, None), "the tokenizer's decoder writes the spaces"),
    "flat_logprobs": ((False, None), "log probs are one object per token"),
    "truncate_prompt_tokens": ((None,), "prompts are used whole"),
    "logits_processors": ((None, []), "the executor's Request takes logits_post_processor"),
    "structured_outputs": ((None,), _NO_GUIDE),
    "guided_decoding": ((None,), _NO_GUIDE),
    "output_kind": ((None, "CUMULATIVE", "FINAL_ONLY"), "stream() gives pieces, generate() whole texts"),
    "stream_interval": ((None, 1), "stream() gives each piece at once"),
    "skip_clone": ((False, None, True), "options are never changed"),
    "output_text_buffer_length": ((0, None), "stop gives it"),
    "watermarking": ((None, False), "texts have no watermarks"),
    "prompt_logprob_token_ids": ((None,), _LIKELY),
    "prompt_logprob_start": ((None, 0), "prompt_logprobs has all tokens of the prompt"),
    "logprob_token_ids": ((None,), _LIKELY),
    "repetition_detection": ((None,), "give repetition_penalty or max_tokens"),
    "routed_experts_prompt_start": ((0, None), "completions have no data about experts"),
    "trace_decode_token_ids": (
        (None,),
        "append the tokens to the prompt and give prompt_logprobs, which scores them",
    ),
    "skip_reading_prefix_cache": ((None, False), "KvCacheConfig.enable_block_reuse turns the prefix cache off"),
    "thinking_token_budget": ((None,), "give max_tokens"),
    "extra_args": ((None, {}), "no extension is known here"),
}
"""vLLM's fields that have one effect here: their accepted values, and the reason."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Options of a completion with vLLM's names. Tokens are drawn whenever the temperature is above 0.

    Fields that are None take the model's recommended value (generation_config.json), or else the value that is named
    here. Raises RequestError for values that cannot be used, with what is accepted.
    """

    n: int | None = None
    """Number of completions per prompt. If it is given, methods return a list per prompt, even of one."""
    max_tokens: int | None = None
    """Maximum number of tokens; None: the method's default, 64 (256 in chats)."""
    min_tokens: int = 0
    """End tokens and stop tokens are forbidden before so many tokens."""
    temperature: float | None = None
    """0: always the most likely token. None: 1."""
    top_p: float | None = None
    """None: 1."""
    top_k: int | None = None
    """-1 and 0: no limit. None: no limit."""
    min_p: float | None = None
    """None: 0."""
    repetition_penalty: float | None = None
    """None: 1."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    """Completion i uses seed + i. None: a random seed."""
    logprobs: int | None = None
    """Number of most likely tokens at each position of Completion.log_probs; None: no log probs."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens, in Completion.prompt_log_probs."""
    stop: Sequence[str] | None = None
    """A text or several. A completion ends before the first of them."""
    stop_token_ids: Sequence[int] | None = None
    """Tokens that end a completion, in addition to the end tokens."""
    bad_words: Sequence[str] | None = None
    """Words that are not generated, neither at the beginning of a text nor after a space."""
    allowed_token_ids: Sequence[int] | None = None
    """The only tokens that may be generated. End tokens must be among them to end a completion."""
    logit_bias: Mapping[int, float] | None = None
    """Numbers from -100 to 100 that are added to the logits of tokens."""
    ignore_eos: bool = False
    """True: end tokens do not end the completion."""
    include_eos: bool = False
    """True: token_ids, and log_probs, also have the end token or stop token that ended the completion. Not in vLLM."""
    include_stop_str_in_output: bool = False
    """True: the text also has the stop text or stop token that ended the completion."""
    skip_special_tokens: bool = True
    """True: the text leaves special tokens out."""
    return_perf_metrics: bool = False
    """True: completions have request_perf_metrics. TensorRT-LLM's field."""
    best_of: int | None = None
    """Accepts only one effect; the same holds for the fields below."""
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | None = None
    detokenize: bool | None = None
    spaces_between_special_tokens: bool | None = None
    flat_logprobs: bool | None = None
    truncate_prompt_tokens: int | None = None
    logits_processors: Any = None
    structured_outputs: Any = None
    guided_decoding: Any = None
    output_kind: Any = None
    skip_reading_prefix_cache: bool | None = None
    thinking_token_budget: int | None = None
    extra_args: Mapping[str, Any] | None = None
    stream_interval: int | None = None
    skip_clone: bool | None = None
    output_text_buffer_length: int | None = None
    watermarking: bool | None = None
    prompt_logprob_token_ids: Any = None
    prompt_logprob_start: int | None = None
    logprob_token_ids: Sequence[int] | None = None
    repetition_detection: Any = None
    routed_experts_prompt_start: int | None = None
    trace_decode_token_ids: Sequence[int] | None = None

    def __post_init__(self) -> None:
        """Raises RequestError with all problems."""
        problems: list[str] = []
        for name, accepted in SAMPLING_FIELDS.items():
            value = getattr(self, name)
            if value is None and name not in ("min_tokens", "presence_penalty", "frequency_penalty"):
                continue
            problems += _listed(unaccepted(name, value, accepted))
        for name in _BOOLEANS:
            problems += _listed(unaccepted(name, getattr(self, name), BOOLEAN))
        for name, (values, reason) in _UNSUPPORTED.items():
            value = getattr(self, name)
            if not any(_is_same(value, one) for one in values) and not (name == "best_of" and value == self.n):
                said = " or ".join(map(repr, values))
                problems.append(f"{name} is {shown(value)}; expected {said}: {reason}")
        for name in ("stop", "bad_words"):
            self._set(name, _texts(name, getattr(self, name), problems))
        for name in ("stop_token_ids", "allowed_token_ids"):
            self._set(name, _token_ids(name, getattr(self, name), problems))
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            problems.append("allowed_token_ids is empty; expected one token id or more, or None")
        self._set("logit_bias", _biases(self.logit_bias, problems))
        if self.min_tokens and self.stop:
            problems.append("min_tokens and stop are given; expected one of them: stop ends short texts as well")
        if problems:
            raise RequestError("SamplingParams: " + "; ".join(problems))

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def with_arguments(self, *, max_tokens: int | None, stop: str | Sequence[str], n: int | None) -> SamplingParams:
        """Returns the options with a method's arguments added. Raises RequestError for one that is given twice."""
        given: dict[str, Any] = {"max_tokens": max_tokens, "stop": stop if stop or stop == "" else None, "n": n}
        given = {name: value for name, value in given.items() if value is not None}
        for name, value in given.items():
            if getattr(self, name) is not None:
                raise RequestError(
                    f"{name} is {shown(value)}, and sampling_params has {shown(getattr(self, name))}; expected one of "
                    "them"
                )
        return replace(self, **given) if given else self

    def sampling_config(self, recommended: SamplingDefaults) -> SamplingConfig:
        """Returns how tokens are drawn. recommended: for fields that are None."""
        chosen = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
        chosen |= recommended.given()
        chosen |= {name: getattr(self, name) for name in chosen if getattr(self, name) is not None}
        return drawing_config(
            temperature=chosen["temperature"],
            top_p=chosen["top_p"],
            top_k=int(chosen["top_k"]),
            min_p=chosen["min_p"],
            seed=self.seed,
            min_tokens=self.min_tokens,
            repetition_penalty=chosen["repetition_penalty"],
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
        )


def drawing_config(
    *,
    temperature: float,
    top_p: float,
    top_k: int,
    min_p: float,
    seed: int | None,
    min_tokens: int,
    repetition_penalty: float,
    presence_penalty: float,
    frequency_penalty: float,
) -> SamplingConfig:
    """Returns a configuration that draws tokens whenever `temperature` is above 0.

    top_k: -1 and 0: no limit. seed: None: a random one.
    """
    # top_p is always set: without top_p and top_k, the executor decodes greedily.
    return SamplingConfig(
        top_k=max(top_k, 0),
        top_p=top_p,
        min_p=min_p,
        temperature=temperature,
        seed=random.getrandbits(64) if seed is None else seed % _SEEDS,
        min_tokens=min_tokens,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
    )


def _listed(problem: str | None) -> list[str]:
    return [] if problem is None else [problem]


def _is_same(value: Any, accepted: Any) -> bool:
    """True for equal values; True and 1 differ, 1 and 1.0 do not. Members of an enum equal their names."""
    value = value.name if isinstance(value, Enum) else value
    return isinstance(value, bool) == isinstance(accepted, bool) and bool(value == accepted)


def _items(name: str, value: Any, expected: str, problems: list[str]) -> list[Any] | None:
    if isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping):
        return list(value)
    problems.append(f"{name} is {shown(value)}; expected {expected}")
    return None


def _texts(name: str, value: Any, problems: list[str]) -> tuple[str, ...] | None:
    if value is None:
        return None
    items = [value] if isinstance(value, str) else _items(name, value, "a text or a list of texts", problems)
    for i, item in enumerate(items or ()):
        if not isinstance(item, str) or not item:
            problems.append(f"{name}[{i}] is {shown(item)}; expected a text of one character or more")
            return None
    return tuple(items) if items else None


def _token_ids(name: str, value: Any, problems: list[str]) -> tuple[int, ...] | None:
    if value is None:
        return None
    items = _items(name, value, "a list of token ids", problems) or []
    for i, item in enumerate(items):
        if (problem := unaccepted(f"{name}[{i}]", item, TOKEN_ID)) is not None:
            problems.append(problem)
            return None
    return tuple(items)


def _biases(value: Any, problems: list[str]) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        problems.append(f"logit_bias is {shown(value)}; expected a dictionary from token ids to numbers")
        return None
    for token, bias in value.items():
        if (problem := unaccepted("a key of logit_bias", token, TOKEN_ID)) is not None:
            problems.append(problem)
            return None
        is_number = isinstance(bias, int | float) and not isinstance(bias, bool)
        if not is_number or not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS:
            problems.append(f"logit_bias[{token}] is {shown(bias)}; expected {LOGIT_BIASES}")
            return None
    return {token: float(bias) for token, bias in value.items()} or None
