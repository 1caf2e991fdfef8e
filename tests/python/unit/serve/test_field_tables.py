"""Tables of all fields of requests: each arrives in the executor's request or in the answer, or has no effect.

The tables of /v1/responses, /v1/messages and Ollama's routes are next to their translation: test_responses_fields.py,
test_messages_fields.py and test_ollama_fields.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import httpx
import numpy as np
import pytest
from tokenizers import Tokenizer, processors

import adaptrt
from adaptrt.runtime.adapter_versions import without_versions
from adaptrt.serve import classification
from adaptrt.serve.adapters import ServedAdapters
from adaptrt.serve.app import make_app
from adaptrt.serve.generation import TextGeneration, TextGenerator, TextRequest
from adaptrt.serve.llama_fields import LlamaCompletionRequest
from adaptrt.serve.openai_chat_fields import ChatRequest, TokenizeRequest
from adaptrt.serve.openai_fields import (
    ClassificationRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    Fields,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from adaptrt.serve.options import ServerOptions
from adaptrt.serve.service import Service
from support.models import ModelSpec, save_adapter, save_model
from support.pooled import save_sentence_transformer
from support.serving import build_engine
from support.tokenizers import byte_level, save_tokenizer

ADAPTER = "poet"
TYPES = adaptrt.GuidedDecodingParams.GuideType
TEMPLATE = (
    "{# <think> </think> <tool_call> #}{% if tools %}T{{ tools | length }}{% endif %}"
    "{% for document in documents or [] %}D{{ document.title }}{% endfor %}{{ reasoning_effort }}"
    "{% for message in messages %}{{ message.content }};{% endfor %}{% if add_generation_prompt %}A{% endif %}{{ end }}"
)
PROMPT = "ab"
MESSAGES = [{"role": "user", "content": PROMPT}]
SAID = [*MESSAGES, {"role": "assistant", "content": "cd"}]


def function(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}, **more}}


@dataclass
class Seen:
    """The result of a request."""

    answer: Any
    """JSON, or the list of a stream's events."""
    status: int = 200
    request_id: str = ""
    texts: list[TextRequest] = field(default_factory=list)
    pooled: list[adaptrt.Request] = field(default_factory=list)
    adapters: list[str | None] = field(default_factory=list)
    """Adapters of the pooled requests."""
    pairs: list[tuple[str, str]] = field(default_factory=list)
    """Pairs of texts that are scored."""

    @property
    def text(self) -> TextRequest:
        return self.texts[0]

    @property
    def prompt(self) -> str:
        return text_of(self.text.prompt)

    @property
    def choice(self) -> Any:
        return self.answer["choices"][0]

    @property
    def guide(self) -> str:
        """Type and text of the guide."""
        guide = self.text.guided_decoding_params
        return "" if guide is None else f"{guide.guide_type.name} {guide.guide}"

    @property
    def tokens(self) -> str:
        """Text of the tokens of a request that is not for text."""
        return text_of(self.pooled[0].input_token_ids if self.pooled else self.answer["tokens"])


def biases(seen: Seen) -> Any:
    bias = seen.text.embedding_bias
    return np.zeros(16) if bias is None else bias


def text_of(tokens: Sequence[int]) -> str:
    return str(TOKENIZER.decode(list(tokens), skip_special_tokens=False))


def tokenizer() -> Tokenizer:
    made = byte_level()
    made.add_tokens(["<think>", "</think>"])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return made


TOKENIZER = tokenizer()


@dataclass(frozen=True)
class Row:
    """Fields of a body, and a condition that holds only with the row's own field. None: the field has no effect."""

    fields: dict[str, Any]
    arrives: Callable[[Seen], object] | None = None


Table: TypeAlias = dict[str, Row]


def rows(**given: tuple[Any, Callable[[Seen], object]]) -> Table:
    """Returns rows of fields that are given alone."""
    return {name: Row({name: value}, arrives) for name, (value, arrives) in given.items()}


def without_effect(**given: Any) -> Table:
    return {name: Row({name: value}) for name, value in given.items()}


def sampling(name: str, value: Any) -> dict[str, Row]:
    return {name: Row({name: value}, lambda seen: getattr(seen.text.sampling, name) == pytest.approx(value))}


MODELS = rows(
    model=(ADAPTER, lambda seen: without_versions(seen.text.adapter or "") == ADAPTER),
    adapter_id=(ADAPTER, lambda seen: without_versions(seen.text.adapter or "") == ADAPTER),
    lora_path=(ADAPTER, lambda seen: without_versions(seen.text.adapter or "") == ADAPTER),
    lora_request=({"lora_name": ADAPTER}, lambda seen: without_versions(seen.text.adapter or "") == ADAPTER),
    lora=([{"id": 0, "scale": 1.0}], lambda seen: without_versions(seen.text.adapter or "") == ADAPTER),
)
JSON_GUIDE = {"guided_json": {"type": "integer"}}
BEAMS = {"use_beam_search": True, "n": 2}
GENERATION: Table = {
    **MODELS,
    **sampling("temperature", 0.5),
    **sampling("top_p", 0.5),
    **sampling("top_k", 3),
    **sampling("min_p", 0.25),
    **sampling("presence_penalty", 1.0),
    **sampling("frequency_penalty", 1.0),
    **sampling("repetition_penalty", 1.5),
    **sampling("seed", 7),
    **sampling("min_tokens", 2),
    **rows(
        stop=(["x"], lambda seen: seen.text.stop == ("x",)),
        stop_token_ids=([9], lambda seen: seen.text.stop_token_ids == (9,)),
        ignore_eos=(True, lambda seen: seen.text.ignore_eos),
        include_eos=(True, lambda seen: seen.text.include_end),
        include_stop_str_in_output=(True, lambda seen: seen.text.include_stop),
        skip_special_tokens=(False, lambda seen: not seen.text.skip_special_tokens),
        logit_bias=({"9": 1.5}, lambda seen: biases(seen)[9] == 1.5),
        allowed_token_ids=([9], lambda seen: biases(seen)[9] == 0 and biases(seen)[8] == -np.inf),
        bad_words=(["c"], lambda seen: any(text_of(word) == "c" for word in seen.text.bad_words)),
        priority=(100, lambda seen: seen.text.priority == 0.0),
        cache_salt=("s", lambda seen: seen.text.cache_salt_id is not None),
        stream=(True, lambda seen: isinstance(seen.answer, list)),
        return_receipt=(True, lambda seen: "receipt" in seen.answer),
        return_token_ids=(True, lambda seen: seen.choice.get("token_ids")),
        prompt_logprobs=(2, lambda seen: seen.text.prompt_log_probs == 2),
        truncate_prompt_tokens=(2, lambda seen: len(seen.text.prompt) == 2),
        request_id=("r-1", lambda seen: str(seen.answer["id"]).endswith("r-1")),
        response_format=({"type": "json_object"}, lambda seen: seen.guide),
        structured_outputs=({"regex": "c+"}, lambda seen: "c+" in seen.guide),
        guided_json=({"type": "integer"}, lambda seen: "integer" in seen.guide),
        guided_regex=("c+", lambda seen: "c+" in seen.guide),
        guided_choice=(["cd", "ef"], lambda seen: "(cd)|(ef)" in seen.guide),
        guided_grammar=('start: "cd"', lambda seen: '"cd"' in seen.guide),
        n=(2, lambda seen: seen.text.num_answers == 2),
    ),
    "use_beam_search": Row(BEAMS, lambda seen: seen.text.has_beams),
    "length_penalty": Row({**BEAMS, "length_penalty": 2.0}, lambda seen: seen.text.sampling.length_penalty == 2.0),
    "early_stopping": Row({**BEAMS, "early_stopping": True}, lambda seen: seen.text.sampling.early_stopping == 1),
    "truncation_side": Row({"truncate_prompt_tokens": 2, "truncation_side": "right"}, lambda seen: "a" in seen.prompt),
    "return_receipt_prompt": Row(
        {"return_receipt": True, "return_receipt_prompt": True},
        lambda seen: "token_ids" in seen.answer["receipt"]["requests"][0]["prompt"],
    ),
    "stream_options": Row(
        {"stream": True, "stream_options": {"include_usage": True}}, lambda seen: seen.answer[-1].get("usage")
    ),
    "guided_whitespace_pattern": Row(
        {**JSON_GUIDE, "guided_whitespace_pattern": "_"}, lambda seen: '"_"' in seen.guide
    ),
    **without_effect(
        guided_decoding_backend="guidance",
        user="u",
        metadata={"a": "b"},
        service_tier="default",
        prompt_cache_key="k",
        prompt_cache_retention="in_memory",
        safety_identifier="s",
        store=False,
        detokenize=True,
        spaces_between_special_tokens=True,
        vllm_xargs={},
        best_of=1,
    ),
}
COMPLETIONS: Table = {
    **GENERATION,
    **rows(
        prompt=("xy", lambda seen: seen.prompt == "<s>xy"),
        max_tokens=(4, lambda seen: seen.text.max_tokens == 4),
        echo=(True, lambda seen: seen.choice["text"].startswith(PROMPT)),
        logprobs=(2, lambda seen: seen.text.top_log_probs == 2),
        add_special_tokens=(False, lambda seen: seen.prompt == PROMPT),
    ),
    "return_tokens_as_token_ids": Row(
        {"logprobs": 0, "return_tokens_as_token_ids": True},
        lambda seen: seen.choice["logprobs"]["tokens"][0].startswith("token_id:"),
    ),
    **without_effect(suffix=""),
}
TOOLS = [function("f"), function("g")]
CHATS: Table = {
    **GENERATION,
    "messages": Row({"messages": SAID}, lambda seen: seen.prompt.endswith("ab;cd;A")),
    **rows(
        tools=(TOOLS, lambda seen: "T2" in seen.prompt),
        chat_template_kwargs=({"end": "E"}, lambda seen: seen.prompt.endswith("AE")),
        add_generation_prompt=(False, lambda seen: not seen.prompt.endswith("A")),
        add_special_tokens=(True, lambda seen: seen.prompt.startswith("<s>")),
        documents=([{"title": "d"}], lambda seen: "Dd" in seen.prompt),
        chat_template=("other", lambda seen: seen.prompt == "other"),
        max_tokens=(4, lambda seen: seen.text.max_tokens == 4),
        max_completion_tokens=(4, lambda seen: seen.text.max_tokens == 4),
        logprobs=(True, lambda seen: seen.text.top_log_probs == 0),
        reasoning_effort=("low", lambda seen: "low" in seen.prompt),
        thinking_token_budget=(1, lambda seen: "{0,1}" in seen.guide),
    ),
    "continue_final_message": Row(
        {"messages": SAID, "add_generation_prompt": False, "continue_final_message": True},
        lambda seen: seen.prompt.endswith("cd"),
    ),
    "top_logprobs": Row({"logprobs": True, "top_logprobs": 2}, lambda seen: seen.text.top_log_probs == 2),
    "return_tokens_as_token_ids": Row(
        {"logprobs": True, "return_tokens_as_token_ids": True},
        lambda seen: seen.choice["logprobs"]["content"][0]["token"].startswith("token_id:"),
    ),
    "tool_choice": Row({"tools": TOOLS, "tool_choice": "none"}, lambda seen: "T2" not in seen.prompt),
    "parallel_tool_calls": Row(
        {"tools": TOOLS, "parallel_tool_calls": False}, lambda seen: "<tool_call>" in seen.guide
    ),
    "echo": Row({"messages": SAID, "echo": True}, lambda seen: seen.choice["message"]["content"].startswith("cd")),
    "include_reasoning": Row(
        {"chat_template_kwargs": {"end": "<think>"}, "include_reasoning": False, "ignore_eos": True},
        lambda seen: "reasoning_content" not in seen.choice["message"],
    ),
    **without_effect(modalities=["text"], verbosity="medium", mm_processor_kwargs={}),
}


def row_of(seen: Seen) -> Any:
    """Returns the numbers of the first text."""
    data = seen.answer["data"][0]
    return data["embedding"] if "embedding" in data else data["data"]


def as_tokens(row: Row) -> Callable[[Seen], object]:
    """Returns a condition on a prompt for the tokens of /tokenize."""
    arrives = row.arrives
    assert arrives is not None
    return lambda seen: arrives(replace(seen, texts=[TextRequest(seen.answer["tokens"], None, 1)]))


POOLED: Table = {
    **rows(
        model=(ADAPTER, lambda seen: seen.adapters == [ADAPTER]),
        adapter_id=(ADAPTER, lambda seen: seen.adapters == [ADAPTER]),
        lora_path=(ADAPTER, lambda seen: seen.adapters == [ADAPTER]),
        lora_request=({"lora_name": ADAPTER}, lambda seen: seen.adapters == [ADAPTER]),
        lora=([{"id": 0, "scale": 1.0}], lambda seen: seen.adapters == [ADAPTER]),
        truncate_prompt_tokens=(2, lambda seen: seen.tokens == "<s>a"),
        add_special_tokens=(False, lambda seen: seen.tokens == PROMPT),
        priority=(100, lambda seen: seen.pooled[0].priority == 0.0),
        cache_salt=("s", lambda seen: seen.pooled[0].cache_salt_id is not None),
        request_id=("r-1", lambda seen: seen.request_id == "r-1"),
    ),
    "truncation_side": Row(
        {"truncate_prompt_tokens": 2, "truncation_side": "left"}, lambda seen: seen.tokens == "<s>b"
    ),
    **without_effect(user="u"),
}
EMBEDDINGS: Table = {
    **POOLED,
    **rows(
        input=("xy", lambda seen: seen.tokens == "<s>xy"),
        encoding_format=("base64", lambda seen: isinstance(row_of(seen), str)),
        dimensions=(4, lambda seen: len(row_of(seen)) == 4),
    ),
}
POOLING: Table = {**EMBEDDINGS, **rows(task=("token_embed", lambda seen: len(row_of(seen)) == 3))}
SCORES: Table = {
    **rows(
        text_1=("x", lambda seen: seen.pairs == [("x", "b"), ("x", "c")]),
        text_2=(["y", "z"], lambda seen: seen.pairs == [("a", "y"), ("a", "z")]),
    ),
}
RANKS: Table = {
    **rows(
        query=("x", lambda seen: seen.pairs == [("x", "b"), ("x", "c")]),
        documents=(["y", {"text": "z"}], lambda seen: seen.pairs == [("a", "y"), ("a", "z")]),
        top_n=(1, lambda seen: len(seen.answer["results"]) == 1),
        return_documents=(False, lambda seen: "document" not in seen.answer["results"][0]),
    ),
}
UNKNOWN = rows(
    model=("other", lambda seen: seen.status == 404),
    adapter_id=("other", lambda seen: seen.status == 404),
    lora_path=("other", lambda seen: seen.status == 404),
    lora_request=({"lora_name": "other"}, lambda seen: seen.status == 404),
    lora=([{"id": 1, "scale": 1.0}], lambda seen: seen.status == 400),
)
"""Adapters matter only for their tokenizers here."""
OF_TEMPLATE = {
    "messages", "tools", "chat_template_kwargs", "add_generation_prompt", "documents", "chat_template",
}  # fmt: skip
TOKENS: Table = {
    **UNKNOWN,
    **{name: Row(row.fields, as_tokens(row)) for name, row in CHATS.items() if name in OF_TEMPLATE},
    "continue_final_message": Row(
        {"messages": SAID, "add_generation_prompt": False, "continue_final_message": True},
        lambda seen: seen.tokens.endswith("cd"),
    ),
    **rows(add_special_tokens=(True, lambda seen: seen.tokens.startswith("<s>"))),
    "return_token_strs": Row({"return_token_strs": True}, lambda seen: seen.answer["token_strs"]),
}
TEXTS: Table = {
    **{name: Row(row.fields, row.arrives) for name, row in UNKNOWN.items()},
    **rows(tokens=([1], lambda seen: seen.answer["prompt"] == "</s>")),
}

LLAMA: Table = {
    **MODELS,
    **{
        name: row
        for name, row in GENERATION.items()
        if name in ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "seed", "stop")
    },
    **rows(
        prompt=("xy", lambda seen: seen.prompt == "<s>xy"),
        repeat_penalty=(1.5, lambda seen: seen.text.sampling.repetition_penalty == pytest.approx(1.5)),
        ignore_eos=(True, lambda seen: seen.text.ignore_eos),
        logit_bias=([[9, 1.5]], lambda seen: biases(seen)[9] == 1.5),
        stream=(True, lambda seen: isinstance(seen.answer, list)),
        n_predict=(4, lambda seen: seen.text.max_tokens == 4),
        n_probs=(2, lambda seen: seen.text.top_log_probs == 2),
        grammar=('start: "cd"', lambda seen: '"cd"' in seen.guide),
        json_schema=({"type": "integer"}, lambda seen: "integer" in seen.guide),
        return_tokens=(True, lambda seen: seen.answer["tokens"]),
        cache_prompt=(False, lambda seen: seen.text.cache_salt_id is not None),
    ),
    **without_effect(
        repeat_last_n=64,
        typical_p=1.0,
        mirostat=0,
        mirostat_tau=5.0,
        mirostat_eta=0.1,
        dynatemp_range=0.0,
        dynatemp_exponent=1.0,
        xtc_probability=0.0,
        xtc_threshold=0.1,
        top_n_sigma=-1.0,
        dry_multiplier=0.0,
        dry_base=1.75,
        dry_allowed_length=2,
        dry_penalty_last_n=-1,
        dry_sequence_breakers=["*"],
        samplers=None,
        n_cmpl=1,
        n_indent=0,
        min_keep=0,
        t_max_predict_ms=0,
        post_sampling_probs=False,
        timings_per_token=False,
        return_progress=False,
        response_fields=None,
        id_slot=-1,
        n_keep=-1,
        n_discard=0,
        n_cache_reuse=0,
    ),
}

# By class: the route, a body, and the table.
BODIES: dict[type[Fields], tuple[str, dict[str, Any], Table]] = {
    CompletionRequest: ("/v1/completions", {"prompt": PROMPT, "max_tokens": 3, "seed": 1}, COMPLETIONS),
    ChatRequest: ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 3, "seed": 1}, CHATS),
    LlamaCompletionRequest: ("/completion", {"prompt": PROMPT, "n_predict": 3, "seed": 1}, LLAMA),
    EmbeddingRequest: ("/v1/embeddings", {"input": PROMPT}, EMBEDDINGS),
    PoolingRequest: ("/pooling", {"input": PROMPT}, POOLING),
    ScoreRequest: ("/score", {"text_1": "a", "text_2": ["b", "c"]}, SCORES),
    RerankRequest: ("/rerank", {"query": "a", "documents": ["b", "c"]}, RANKS),
    TokenizeRequest: ("/tokenize", {"messages": MESSAGES}, TOKENS),
    DetokenizeRequest: ("/detokenize", {"tokens": [0]}, TEXTS),
}
ELSEWHERE: dict[type[Fields], set[str]] = {
    # They share the code that reads these fields with embeddings.
    ScoreRequest: set(POOLED),
    RerankRequest: set(POOLED),
    # A text is tokenised instead of messages.
    TokenizeRequest: {"prompt", "content", "add_special", "parse_special", "with_pieces"},
}
REPLACED = {"max_completion_tokens": "max_tokens"}
"""Fields of which a body has only one."""


class Server:
    """A service in this process, and what it is asked for."""

    def __init__(self, loop: asyncio.AbstractEventLoop, app: Any) -> None:
        self.seen = Seen(None)
        self._loop = loop
        self._app = app

    def post(self, path: str, body: dict[str, Any]) -> Seen:
        self.seen = Seen(None)
        self._loop.run_until_complete(self._post(path, body))
        return self.seen

    async def _post(self, path: str, body: dict[str, Any]) -> None:
        transport = httpx.ASGITransport(app=self._app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            answer = await client.post(path, json=body)
        self.seen.status = answer.status_code
        self.seen.request_id = answer.headers.get("x-request-id", "")
        if "event-stream" in answer.headers["content-type"]:
            lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
            self.seen.answer = [json.loads(line) for line in lines if line != "[DONE]"]
        else:
            self.seen.answer = answer.json()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("field_tables")
    model = save_model(ModelSpec(vocab_size=TOKENIZER.get_vocab_size()), root / "model")
    save_tokenizer(TOKENIZER, model)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    save_sentence_transformer(model, "mean_tokens", normalize=True)
    engine = build_engine(model, root, max_beam_width=4)
    options = ServerOptions(
        served_model_name=("base",),
        lora_modules=((ADAPTER, save_adapter(model, root / ADAPTER, 0, r=4)),),
        trust_request_chat_template=True,
        cut_embeddings=True,
    )
    config = adaptrt.ExecutorConfig(num_threads=1, max_beam_width=4)
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.closing(asyncio.new_event_loop()) as loop,
        adaptrt.Executor(engine, adaptrt.ModelType.DECODER_ONLY, config) as executor,
    ):
        service = loop.run_until_complete(Service.open(executor, options))
        made = Server(loop, make_app(service))
        watch(patch, made)
        yield made
        loop.run_until_complete(service.close())


def watch(patch: pytest.MonkeyPatch, server: Server) -> None:
    """Notes the requests that the service makes."""
    start, submit = TextGenerator.start, ServedAdapters.submit

    def started(self: TextGenerator, request: TextRequest) -> Awaitable[TextGeneration]:
        server.seen.texts.append(request)
        return start(self, request)

    def submitted(self: ServedAdapters, request: adaptrt.Request, name: str | None) -> Any:
        server.seen.pooled.append(request)
        server.seen.adapters.append(None if name is None else without_versions(name))
        return submit(self, request, name)

    async def scored(_service: Any, _fields: Any, pairs: list[tuple[str, str]], _param: str) -> Any:
        server.seen.pairs = pairs
        return None, [0.25] * len(pairs), 7

    patch.setattr(TextGenerator, "start", started)
    patch.setattr(ServedAdapters, "submit", submitted)
    patch.setattr(classification, "_scores", scored)


@pytest.mark.parametrize("cls", BODIES)
def test_every_field_has_a_row(cls: type[Fields]) -> None:
    table = BODIES[cls][2]
    assert table.keys() | ELSEWHERE.get(cls, set()) == cls.model_fields.keys()
    assert ClassificationRequest.model_fields.keys() == POOLED.keys() | {"input"}


@pytest.mark.parametrize("cls", BODIES)
def test_each_field_arrives_or_has_no_effect(server: Server, cls: type[Fields]) -> None:
    path, whole, table = BODIES[cls]
    for name, row in table.items():
        others = {key: value for key, value in row.fields.items() if key != name}
        body = {key: value for key, value in whole.items() if key != REPLACED.get(name)}
        usual, changed = server.post(path, {**body, **others}), server.post(path, {**body, **row.fields})
        if row.arrives is not None:
            assert row.arrives(changed), name
            assert not row.arrives(usual), name
        else:
            assert changed.status == 200, name
            assert effects(changed) == effects(usual), name


def effects(seen: Seen) -> list[Any]:
    """Returns what a request asks the executor for."""
    usual = adaptrt.SamplingConfig()
    texts = [(replace(text, sampling=usual), repr(text.sampling)) for text in seen.texts]
    pooled = [(list(request.input_token_ids), request.priority, request.cache_salt_id) for request in seen.pooled]
    return [*texts, *pooled]


def test_every_body_has_a_table() -> None:
    """Tables of these classes are in the tests of their own modules."""
    elsewhere = {"BatchRequest", "CountRequest", "LoraRequest", "MessagesRequest", "ResponseRequest"}
    bodies = {cls.__name__ for cls in subclasses(Fields) if cls.__name__.endswith("Request")}
    tables: list[type[Fields]] = [*BODIES, ClassificationRequest]
    elsewhere |= {f"Ollama{name}Request" for name in ("Chat", "Generate", "Embed", "Embeddings", "Show")}
    elsewhere |= {f"Ollama{name}Request" for name in ("Create", "Copy", "Delete")}
    assert bodies == elsewhere | {cls.__name__ for cls in tables}


def subclasses(cls: type[Fields]) -> Iterator[type[Fields]]:
    for found in cls.__subclasses__():
        yield found
        yield from subclasses(found)
