"""Bodies of OpenAI's routes, with the additional fields of vLLM, SGLang and LoRAX.

Fields that are not declared here are rejected by name. A null field counts as absent.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, model_validator

from ..common.shown_value import shown
from ..runtime.sampling_fields import INT32_MAX, LOGIT_BIASES, MAX_LOG_PROBS, MAX_LOGIT_BIAS
from .records import REQUEST_IDS, is_request_id
from .vllm_fields import COMPLETION_FIELDS, GENERATION_FIELDS, POOLED_FIELDS, VllmFields

MAX_STOPS: Final = 64
MAX_STOP_CHARACTERS: Final = 1024
MAX_PRIORITY: Final = 100
DEFAULT_MAX_TOKENS: Final = 16
"""Default length of a completion, as in OpenAI's API. A chat's answer may fill the rest of the context."""
MAX_METADATA: Final = 16
"""Maximum number of metadata entries, as in OpenAI's API."""
MAX_METADATA_CHARACTERS: Final = 512
_NOT_STORED: Final = "answers are not stored"


class Fields(VllmFields, BaseModel):
    """Base of all bodies. Strict: a text for a number is an error, and so is an unknown field."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, content: Any) -> Any:
        if not isinstance(content, dict):
            return content
        return cls.without_neutral({name: value for name, value in content.items() if value is not None})


def only(accepted: Any, reason: str) -> PlainValidator:
    """Validates a field that clients send and that has only one accepted value."""

    def check(value: Any) -> Any:
        is_same_type = type(value) is type(accepted) or (type(value) is int and type(accepted) is float)
        if not is_same_type or value != accepted:
            raise ValueError(f"is {shown(value)}; accepted: {shown(accepted)} ({reason})")
        return value

    return PlainValidator(check)


def never(reason: str) -> PlainValidator:
    """Validates a field that clients send and that has no accepted value. A null field counts as absent."""

    def check(value: Any) -> None:
        if value is not None:
            raise ValueError(f"is {shown(value)}; expected no such field ({reason})")

    return PlainValidator(check)


def type_of(part: Any) -> Any:
    """Returns the field `type` of a part of a message, of a tool and the like; None: there is none."""
    return part.get("type") if isinstance(part, dict) else None


def check_types(
    parts: list[Any], accepted: Sequence[str], type_of: Callable[[Any], Any] = type_of, reason: str = ""
) -> None:
    """Raises ValueError that names the first part of another type. Pydantic would name it once for each type."""
    for i, part in enumerate(parts):
        if type_of(part) not in accepted:
            names = ", ".join(map(repr, accepted))
            raise ValueError(f"[{i}] is of type {shown(type_of(part))}; accepted: {names}{reason}")


def parts_of(value: Any, accepted: Sequence[str], text_type: str, parts: str = "parts") -> list[Any]:
    """Returns the parts of a content; a text becomes one part of type `text_type`. Declared types check the rest.

    parts: the API's word for them. Raises ValueError that names the first part whose type is not in `accepted`.
    """
    if isinstance(value, str):
        return [{"type": text_type, "text": value}]
    if not isinstance(value, list):
        raise ValueError(f"is {shown(value)}; accepted: a text, or a list of {parts}")
    check_types(value, accepted)
    return value


def _finite(value: Any) -> Any:
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        raise ValueError("has a number that is out of range; expected numbers of 64-bit floating point") from None
    return value


FiniteObject = Annotated[dict[str, Any], AfterValidator(_finite)]
"""A JSON object that can be written as JSON again. Python reads 1e999 as infinity, which JSON does not have."""


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _prompts(value: Any) -> list[str | list[int]]:
    """Returns one entry per prompt: a text or its token ids."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise ValueError(f"is {shown(value)}; accepted: a text, a list of texts, token ids, a list of lists of those")
    if not value:
        raise ValueError("is an empty list; accepted: one prompt or more")
    if type(value[0]) is int:
        return [_token_ids(value, "")]
    return [prompt if isinstance(prompt, str) else _token_ids(prompt, f"[{i}]") for i, prompt in enumerate(value)]


def _token_ids(value: Any, place: str) -> list[int]:
    if not isinstance(value, list):
        raise ValueError(f"{place} is {shown(value)}; accepted: a text, or a list of token ids")
    for i, token in enumerate(value):
        if type(token) is not int or not 0 <= token <= INT32_MAX:
            raise ValueError(f"{place}[{i}] is {shown(token)}; accepted: a token id, 0 to {INT32_MAX}")
    return value


def _logit_bias(value: Any) -> dict[int, float]:
    """Returns the biases by token id. Keys in JSON are texts."""
    if not isinstance(value, dict):
        raise ValueError(f"is {shown(value)}; accepted: an object from token ids to numbers")
    biases = {}
    for token, bias in value.items():
        if not (token.isascii() and token.isdigit() and len(token) <= len(str(INT32_MAX))):
            raise ValueError(f"has {shown(token)}; accepted: token ids")
        if type(bias) not in (int, float) or not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS:
            raise ValueError(f"has {shown(bias)} for token {token}; accepted: {LOGIT_BIASES}")
        biases[int(token)] = float(bias)
    return biases


def _request_id(value: str) -> str:
    if not is_request_id(value):
        raise ValueError(f"is {shown(value)}; expected {REQUEST_IDS}")
    return value


Temperature = Annotated[float, Field(ge=0)]
TopP = Annotated[float, Field(gt=0, le=1)]
TopK = Annotated[int, Field(ge=-1, le=INT32_MAX)]
MinP = Annotated[float, Field(ge=0, le=1)]
RepetitionPenalty = Annotated[float, Field(gt=0)]
TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]
Prompts = Annotated[list[str | list[int]], PlainValidator(_prompts)]
Stops = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]],
    BeforeValidator(_as_list),
    Field(max_length=MAX_STOPS),
]
Metadata = Annotated[
    dict[str, Annotated[str, Field(max_length=MAX_METADATA_CHARACTERS)]], Field(max_length=MAX_METADATA)
]
RequestId = Annotated[str, AfterValidator(_request_id)]
TruncatedLength = Annotated[int, Field(ge=-1, le=INT32_MAX)]
LogitBias = Annotated[dict[int, float], PlainValidator(_logit_bias)]


class StreamOptions(Fields):
    """Options of a stream."""

    include_usage: bool = False
    """True: the last event has the token counts."""
    continuous_usage_stats: bool = False
    """True: every event has the token counts so far. Needs include_usage."""
    include_obfuscation: Annotated[bool, only(False, "events are not padded")] = False


class LoraRequest(Fields):
    """An adapter in the format of TensorRT-LLM's server."""

    lora_name: Annotated[str, Field(min_length=1)]
    lora_int_id: int = 0
    """No effect: the server numbers adapters itself."""
    lora_path: str = ""
    """Directory of the adapter. It is loaded if the name is not known yet."""
    lora_ckpt_source: Annotated[str, only("hf", "adapters are read in PEFT's format")] = "hf"


class LoraScale(Fields):
    """An adapter and its weight in the format of llama.cpp."""

    id: Annotated[int, Field(ge=0, le=INT32_MAX)]
    """Number of the adapter in GET /lora-adapters."""
    scale: float


class ModelFields(Fields):
    """Names of the model or adapter, in the formats of several servers."""

    model: str | None = None
    """An adapter's name, the base model's name, or SGLang's "base:adapter". Without it: the base model."""
    adapter_id: str | None = None
    """LoRAX's field for an adapter's name."""
    lora_path: str | None = None
    """SGLang's field for an adapter's name."""
    lora_request: LoraRequest | None = None
    """TensorRT-LLM's field for an adapter."""
    lora: list[LoraScale] | None = None
    """llama.cpp's field for a weighted sum of adapters; []: the base model."""


class JsonSchema(Fields):
    """OpenAI's format: a schema and its name."""

    name: str
    schema_: Annotated[dict[str, Any] | bool, Field(alias="schema")]
    description: str | None = None
    """No effect; the same holds for the name."""
    strict: bool = True
    """Both values have the same effect: answers always match the schema."""


class ResponseFormat(Fields):
    """The format that an answer must have."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None

    @model_validator(mode="after")
    def _one_form(self) -> ResponseFormat:
        wanted = {"json_schema": {"json_schema"}, "structural_tag": {"structures", "triggers"}}.get(self.type, set())
        given = self.model_fields_set - {"type"}
        if given != wanted:
            raise ValueError(f"type '{self.type}' has {sorted(given)}; accepted: {sorted(wanted)}")
        return self


class StructuredOutputs(Fields):
    """vLLM's guides: exactly one of the first six fields."""

    json_: Annotated[dict[str, Any] | bool | str | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1)] | None = None
    grammar: str | None = None
    json_object: Annotated[bool, only(True, "leave it out to accept any answer")] | None = None
    structural_tag: str | None = None
    disable_any_whitespace: bool = True
    """False: JSON may have any whitespace between its parts. True: it is on one line."""
    disable_additional_properties: Annotated[bool, only(False, "the schema says additionalProperties")] = False
    whitespace_pattern: str = ""
    """Regular expression of the whitespace between the parts of JSON."""

    @model_validator(mode="after")
    def _one_of_them(self) -> StructuredOutputs:
        guides = {"json": self.json_, "json_object": self.json_object} | {
            name: getattr(self, name) for name in ("regex", "choice", "grammar", "structural_tag")
        }
        given = [name for name, value in guides.items() if value is not None]
        if len(given) != 1:
            raise ValueError(f"has {given}; expected one of {', '.join(guides)}")
        options = {"whitespace_pattern", "disable_any_whitespace"} & self.model_fields_set
        if options and given[0] not in ("json", "json_object"):
            raise ValueError(f"has {sorted(options)} with {given[0]}; expected json or json_object")
        if len(options) == 2:
            raise ValueError("has whitespace_pattern and disable_any_whitespace; expected one of them")
        return self


class NamedRequestFields(Fields):
    """The id that a client gives to its request."""

    request_id: RequestId | None = None
    """Id of the request in the answer, its headers and the log. The header X-Request-Id takes precedence."""


class TruncationFields(Fields):
    """How long prompts are cut."""

    truncate_prompt_tokens: TruncatedLength | None = None
    """Maximum number of tokens of a prompt; a longer one is cut. -1: the longest that the model takes. None: no cut."""
    truncation_side: Literal["left", "right"] | None = None
    """Side on which tokens are left out. None: left for prompts of answers, right for embeddings and classes."""

    @model_validator(mode="after")
    def _keeps_tokens(self) -> TruncationFields:
        if self.truncate_prompt_tokens == 0:
            raise ValueError("truncate_prompt_tokens is 0; expected 1 or more, or -1 for the longest prompt")
        if self.truncation_side is not None and self.truncate_prompt_tokens is None:
            raise ValueError("truncation_side is given without truncate_prompt_tokens; expected both, or neither")
        return self


class SamplingFields(ModelFields):
    """Shared fields of all requests that generate. SamplingDefaults take precedence over the defaults here."""

    temperature: Temperature = 1.0
    """0: greedy decoding."""
    top_p: TopP = 1.0
    top_k: TopK = 0
    """-1 and 0: no limit."""
    min_p: MinP = 0.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)] | None = None
    """None: a random seed per request."""
    min_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] = 0
    stop: Stops = Field(default_factory=list)
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOPS)] = Field(default_factory=list)
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logit_bias: LogitBias = Field(default_factory=dict)
    stream: bool = False
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    """vLLM's priority: lower starts first."""
    cache_salt: Annotated[str, Field(min_length=1)] | None = None
    """Only requests with the same salt share KV."""


class ReceiptFields(Fields):
    """Fields of requests whose answers can have a receipt."""

    return_receipt: bool = False
    """True: the answer has a receipt, with which `adaptrt replay` makes it again."""
    return_receipt_prompt: bool = False
    """True: the receipt has the prompts' tokens, not only their digests."""

    @model_validator(mode="after")
    def _receipt_of_prompt(self) -> ReceiptFields:
        if self.return_receipt_prompt and not self.return_receipt:
            raise ValueError("return_receipt_prompt is true without return_receipt; expected both")
        return self


class GenerationFields(SamplingFields, TruncationFields, NamedRequestFields, ReceiptFields):
    """Shared fields of completions and chats."""

    vllm_fields = GENERATION_FIELDS

    include_eos: bool | None = None
    """True: token_ids, log probs and usage also have the token that ended the answer. Not in vLLM. None: the server's
    --include-eos.
    """
    include_stop_str_in_output: bool = False
    """True: the answer also has the stop text or the token of stop_token_ids that ended it."""
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1)] | None = None
    """The only tokens that may be generated. End tokens must be among them to end an answer."""
    bad_words: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]], Field(max_length=MAX_STOPS)
    ] = Field(default_factory=list)
    """Words that are not generated, neither at the beginning of a text nor after a space."""
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOG_PROBS)] | None = None
    """Number of most likely tokens at each position of the prompt; None: no log probs of the prompt."""
    return_tokens_as_token_ids: bool = False
    """True: log probs name tokens "token_id:NUMBER"."""
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    """True: answers have token_ids and prompt_token_ids."""
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | bool | str | None = None
    """vLLM's older names, here and below."""
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(min_length=1)] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str = ""
    """Regular expression of the whitespace between the parts of JSON; empty: JSON is on one line."""
    guided_decoding_backend: Literal["guidance", "auto"] = "auto"
    """No effect: llguidance compiles all guides."""
    user: str | None = None
    """No effect; the same holds for the fields from here to vllm_xargs."""
    metadata: Metadata | None = None
    service_tier: Literal["auto", "default"] = "auto"
    prompt_cache_key: str | None = None
    prompt_cache_retention: Annotated[str, only("in_memory", "prompts are kept in memory")] = "in_memory"
    safety_identifier: str | None = None
    store: Annotated[bool, only(False, _NOT_STORED)] = False
    detokenize: Annotated[bool, only(True, "answers are texts")] = True
    spaces_between_special_tokens: Annotated[bool, only(True, "the tokenizer's decoder writes the spaces")] = True
    vllm_xargs: Annotated[dict[str, Any], only({}, "no extension is known here")] = Field(default_factory=dict)
    n: Annotated[int, Field(ge=1, le=INT32_MAX)] = 1
    """Number of answers per prompt. Answer i equals the only answer of a request with seed + i."""
    best_of: Annotated[int, only(1, "no answers are generated but those that are returned; give n")] = 1
    use_beam_search: bool = False
    """True: the answers are the `n` best beams of a search with `n` beams."""
    length_penalty: float = 1.0
    """A beam's log prob is divided by its length to this power."""
    early_stopping: bool = False
    """True: the search ends when `n` beams have ended. False: when no other beam can become better."""

    @model_validator(mode="after")
    def _consistent(self) -> GenerationFields:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is given, but stream is false")
        if self.min_tokens and self.stop:
            raise ValueError("min_tokens does not keep stop from ending an answer; give one of them")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs is given, but stream is true; expected one of them")
        return self

    @model_validator(mode="after")
    def _beams(self) -> GenerationFields:
        if not self.use_beam_search:
            if self.length_penalty != 1.0:
                raise ValueError(
                    f"length_penalty is {self.length_penalty} without use_beam_search; expected 1, or both"
                )
            if self.early_stopping:
                raise ValueError("early_stopping is true without use_beam_search; expected false, or both")
            return self
        needed: dict[str, Any] = {"stream": False, "stop": [], "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        for name, neutral in needed.items():
            value = getattr(self, name)
            if value != neutral and not (name == "top_k" and value == -1):
                raise ValueError(
                    f"{name} is {shown(value)} with use_beam_search; expected {shown(neutral)}: beams end together, "
                    "end with tokens, and are not drawn"
                )
        return self


def sampling_values(fields: SamplingFields) -> dict[str, Any]:
    """Returns the shared fields that the client set, in the form of a body."""
    given = {name: getattr(fields, name) for name in SamplingFields.model_fields if name in fields.model_fields_set}
    if "logit_bias" in given:
        given["logit_bias"] = {str(token): bias for token, bias in fields.logit_bias.items()}
    return given


class CompletionRequest(GenerationFields):
    """Body of POST /v1/completions."""

    vllm_fields = COMPLETION_FIELDS

    prompt: Prompts
    max_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] = DEFAULT_MAX_TOKENS
    """0: no answer, only the prompt's log probs. Needs echo."""
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOG_PROBS)] | None = None
    add_special_tokens: bool = True
    """True: adds the tokenizer's special tokens to a text."""
    suffix: Annotated[str, only("", "text is not inserted between a prompt and a suffix")] = ""

    @model_validator(mode="after")
    def _generates(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens is 0; accepted: 1 or more, and 0 with echo")
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens is {self.min_tokens}; expected at most max_tokens, {self.max_tokens}")
        return self


class PooledFields(ModelFields, TruncationFields, NamedRequestFields):
    """Shared fields of requests that end in rows (embeddings, classes)."""

    vllm_fields = POOLED_FIELDS

    add_special_tokens: bool = True
    """True: adds the tokenizer's special tokens to a text."""
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    """vLLM's priority: lower starts first."""
    cache_salt: Annotated[str, Field(min_length=1)] | None = None
    """Only requests with the same salt share KV."""
    user: str | None = None
    """No effect."""


class PooledTextFields(PooledFields):
    """Shared fields of requests about single texts."""

    input: Prompts
    """A text, its token ids, or a list of either."""


class EmbeddingRequest(PooledTextFields):
    """Body of POST /v1/embeddings."""

    encoding_format: Literal["float", "base64"] = "float"
    """base64: encoded little-endian float32."""
    dimensions: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    """Number of first dimensions to return. Needs --cut-embeddings on the server."""


class ClassificationRequest(PooledTextFields):
    """Body of POST /classify."""


class PoolingRequest(EmbeddingRequest):
    """Body of POST /pooling."""

    task: Literal["embed", "classify", "token_embed", "token_classify"] | None = None
    """None: what the model is for: classes of texts or tokens if it is a classifier, else embeddings."""

    @model_validator(mode="after")
    def _dimensions_of_embeddings(self) -> PoolingRequest:
        if self.dimensions is not None and self.task not in (None, "embed"):
            raise ValueError(f"dimensions is given with task {shown(self.task)}; expected task 'embed'")
        return self


class ScoreRequest(PooledFields):
    """Body of POST /score and /v1/score."""

    text_1: Annotated[list[str], BeforeValidator(_as_list), Field(min_length=1)]
    """One text, or as many texts as text_2."""
    text_2: Annotated[list[str], BeforeValidator(_as_list), Field(min_length=1)]

    @model_validator(mode="after")
    def _pairs(self) -> ScoreRequest:
        if len(self.text_1) not in (1, len(self.text_2)):
            raise ValueError(
                f"text_1 has {len(self.text_1)} texts and text_2 {len(self.text_2)}; accepted: 1, or one each"
            )
        return self

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Pairs each text of text_2 with its text of text_1."""
        firsts = self.text_1 * len(self.text_2) if len(self.text_1) == 1 else self.text_1
        return list(zip(firsts, self.text_2, strict=True))


class Document(Fields):
    """A document as an object."""

    text: str


class RerankRequest(PooledFields):
    """Body of POST /rerank."""

    query: str
    documents: Annotated[list[str | Document], Field(min_length=1)]
    top_n: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    """Maximum number of documents in the answer; None: all."""
    return_documents: bool = True
    """True: the answer has their texts."""

    @property
    def texts(self) -> list[str]:
        """Texts of the documents."""
        return [document if isinstance(document, str) else document.text for document in self.documents]


class DetokenizeRequest(ModelFields):
    """Body of POST /detokenize."""

    tokens: list[TokenId]
