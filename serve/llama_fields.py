"""Bodies of llama.cpp's routes, and their translation to completions."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Annotated, Any, Final

from pydantic import Field, PlainValidator, model_validator

from ..common.shown_value import shown
from ..runtime.sampling_fields import INT32_MAX, LOGIT_BIASES, MAX_LOG_PROBS, MAX_LOGIT_BIAS
from .llama_sampling import LlamaSampling
from .openai_fields import CompletionRequest, Fields, LoraScale, ModelFields, never, only

MEDIA_MARKER: Final = "<__media__>"
"""Place of an image in a prompt's text."""
_FIXED_STEPS = "penalties, temperature, top_k, top_p and min_p are always applied in this order"
_NO_TIMES = "the last event has the timings"


@dataclass(frozen=True)
class MarkedPrompt:
    """A text with images, which are at its markers."""

    text: str
    images: tuple[str, ...]
    """Files in base64, one for each MEDIA_MARKER of the text."""


def _marked(value: dict[str, Any]) -> MarkedPrompt:
    text, data = value.get("prompt_string"), value.get("multimodal_data", [])
    is_known = set(value) <= {"prompt_string", "multimodal_data"} and isinstance(data, list)
    if not isinstance(text, str) or not is_known or not all(isinstance(one, str) for one in data):
        raise ValueError(f'is {shown(value)}; expected {{"prompt_string": TEXT, "multimodal_data": [BASE64, ...]}}')
    if (count := text.count(MEDIA_MARKER)) != len(data):
        raise ValueError(f"has {count} times {MEDIA_MARKER} for {len(data)} images; expected it once for each image")
    return MarkedPrompt(text, tuple(data))


def _prompt(value: Any) -> Any:
    if isinstance(value, dict):
        return _marked(value)
    is_tokens = isinstance(value, list) and value and all(type(token) is int for token in value)
    if isinstance(value, str) or is_tokens:
        return value
    raise ValueError(f"is {shown(value)}; expected a text or its token ids; /v1/completions takes several prompts")


def _logit_bias(value: Any) -> dict[str, Any]:
    """Returns the biases by token id. llama.cpp's form is a list of pairs."""
    pairs = list(value.items()) if isinstance(value, dict) else value
    if not isinstance(pairs, list) or not all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in pairs):
        raise ValueError(f"is {shown(value)}; expected a list of [token id, number]")
    biases = {}
    for token, bias in pairs:
        is_id = type(token) is int or (isinstance(token, str) and token.isascii() and token.isdigit())
        if not is_id or type(bias) not in (int, float) or not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS:
            raise ValueError(f"has {shown([token, bias])}; expected [token id, {LOGIT_BIASES}]")
        biases[str(token)] = bias
    return biases


Number = Annotated[int, Field(ge=-1, le=INT32_MAX)]


class LlamaCompletionRequest(ModelFields, LlamaSampling):
    """Body of POST /completion and /completions."""

    prompt: Annotated[str | list[int] | MarkedPrompt, PlainValidator(_prompt)]
    n_predict: Number | None = None
    """Maximum number of tokens of the answer, cut to the context; -1: the rest of the context."""
    stream: bool = False
    ignore_eos: bool = False
    logit_bias: Annotated[dict[str, Any], PlainValidator(_logit_bias)] = Field(default_factory=dict)
    n_probs: Annotated[int, Field(ge=0, le=MAX_LOG_PROBS)] = 0
    """Number of most likely tokens at each position of the answer; 0: no log probs."""
    grammar: str = ""
    """A grammar (GBNF or Lark) that the answer must match."""
    json_schema: dict[str, Any] | bool | None = None
    return_tokens: bool = False
    """True: the answer also has its token ids. Events of streams have them anyway."""
    cache_prompt: bool = True
    """False: no KV of earlier requests is reused. The answer is the same."""
    dynatemp_range: Annotated[float, only(0.0, "the temperature is fixed")] = 0.0
    dynatemp_exponent: float | None = None
    """No effect: the temperature is fixed."""
    xtc_probability: Annotated[float, only(0.0, "XTC is not supported")] = 0.0
    xtc_threshold: float | None = None
    """No effect: XTC is off."""
    top_n_sigma: Annotated[float, only(-1.0, "tokens are chosen by top_k, top_p and min_p")] = -1.0
    dry_multiplier: Annotated[float, only(0.0, "give repeat_penalty")] = 0.0
    dry_base: float | None = None
    """No effect: DRY is off. The same holds for the next three fields."""
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: list[str] | None = None
    samplers: Annotated[list[str] | None, never(_FIXED_STEPS)] = None
    n_cmpl: Annotated[int, only(1, "/v1/completions takes n")] = 1
    n_indent: Annotated[int, only(0, "a grammar can ask for indentation")] = 0
    min_keep: Annotated[int, only(0, "tokens are chosen by top_k, top_p and min_p")] = 0
    t_max_predict_ms: Annotated[int, only(0, "the server's --max-request-seconds limits the time")] = 0
    post_sampling_probs: Annotated[bool, only(False, "log probs are those before sampling")] = False
    timings_per_token: Annotated[bool, only(False, _NO_TIMES)] = False
    return_progress: Annotated[bool, only(False, _NO_TIMES)] = False
    response_fields: Annotated[list[str] | None, never("answers have all fields")] = None
    id_slot: Annotated[int, only(-1, "requests share one batch, without slots")] = -1
    n_keep: Number | None = None
    """No effect: no token of a prompt is dropped. The same holds for the next two fields."""
    n_discard: Number | None = None
    n_cache_reuse: Number | None = None

    @model_validator(mode="after")
    def _asks_for_tokens(self) -> LlamaCompletionRequest:
        if self.n_predict == 0:
            raise ValueError("n_predict is 0; expected 1 or more, or -1 for the rest of the context")
        return self

    @property
    def answer_tokens(self) -> int | None:
        """Maximum number of tokens of the answer; None: the rest of the context."""
        return None if self.n_predict == -1 else self.n_predict


class LoraScales(Fields):
    """Body of POST /lora-adapters, which is the list alone."""

    adapters: list[LoraScale]


def completion_of(fields: LlamaCompletionRequest) -> CompletionRequest:
    """Translates a request. Raises pydantic's ValidationError."""
    content: dict[str, Any] = {
        **{name: getattr(fields, name) for name in ModelFields.model_fields},
        **fields.sampling(),
        "prompt": fields.prompt.text if isinstance(fields.prompt, MarkedPrompt) else fields.prompt,
        "stream": fields.stream,
        "ignore_eos": fields.ignore_eos,
        "logit_bias": fields.logit_bias,
        "guided_grammar": fields.grammar or None,
        "guided_json": fields.json_schema,
        "logprobs": fields.n_probs or None,
        "cache_salt": None if fields.cache_prompt else secrets.token_hex(16),
    }
    return CompletionRequest.model_validate(content)
