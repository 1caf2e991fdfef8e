"""OpenAI routes of a server process, called with the openai package: every answer equals the executor's."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

import adaptrt
from support.http_server import http_server
from support.models import ModelSpec, save_adapter, save_model
from support.serving import build_engine
from support.tokenizers import byte_level, save_tokenizer

SPEC = ModelSpec(vocab_size=270)
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{{ more }}"
)
OWN_TEMPLATE = "{% for message in messages %}{{ message.content }}.{% endfor %}"
TOKENIZER = byte_level()
PROMPT = "Say hello €"
MODELS = ["base", "first", "second"]
MAX_SEQ_LEN = 704
RAW = {"return_token_ids": True}


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text).ids


@dataclasses.dataclass
class Served:
    """A server, and an executor over the same engine and adapters."""

    address: str
    client: openai.OpenAI
    executor: adaptrt.Executor

    def run(self, prompt: str | list[int], model: str, max_tokens: int, **fields: Any) -> adaptrt.Result:
        """Returns the executor's result, without streaming."""
        output = {name: fields.pop(name) for name in list(fields) if "log_probs" in name}
        request = adaptrt.Request(
            ids(prompt) if isinstance(prompt, str) else prompt,
            max_tokens,
            sampling_config=adaptrt.SamplingConfig(**{"top_p": 1.0, **fields}),
            output_config=adaptrt.OutputConfig(exclude_input_from_output=True, **output),
            end_id=1,
        )
        request_id = self.executor.enqueue_request(request, adapter=None if model == "base" else model)
        (response,) = self.executor.await_responses(request_id)
        assert not response.has_error(), response.error_msg
        return response.result

    def post(self, path: str, body: Any) -> httpx.Response:
        return httpx.post(f"{self.address}{path}", json=body, timeout=60)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("openai")
    model = save_model(SPEC, root / "model")
    save_tokenizer(TOKENIZER, model)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    engine = build_engine(model, root, max_seq_len=MAX_SEQ_LEN)
    adapters = {name: save_adapter(model, root / name, seed, r=4) for seed, name in enumerate(MODELS[1:])}
    (adapters["second"] / "chat_template.jinja").write_text(OWN_TEMPLATE)
    modules = [f"{name}={path}" for name, path in adapters.items()]
    with (
        adaptrt.Executor(engine) as executor,
        http_server(engine, "--served_model_name", "base", "--lora_modules", *modules) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client,
    ):
        for name, path in adapters.items():
            executor.add_adapter(name, path)
        yield Served(address, client, executor)


def counts(usage: openai.types.CompletionUsage) -> tuple[int, int, int]:
    """The counts that do not depend on earlier requests."""
    return usage.prompt_tokens, usage.completion_tokens, usage.total_tokens


def test_models(served: Served) -> None:
    cards = {card.id: card for card in served.client.models.list()}
    assert list(cards) == MODELS
    assert cards["base"].max_model_len == MAX_SEQ_LEN
    assert cards["base"].parent is None
    assert {(cards[name].parent, Path(cards[name].root).name) for name in MODELS[1:]} == {
        ("base", n) for n in MODELS[1:]
    }
    retrieved = served.client.models.retrieve("first")
    assert retrieved.model_dump(exclude={"permission"}) == cards["first"].model_dump(exclude={"permission"})
    with pytest.raises(openai.NotFoundError, match=r"The model 'a/b' does not exist\."):
        served.client.models.retrieve("a/b")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.0}, {"seed": 7}, {"seed": -3, "temperature": 0.7, "top_p": 0.8}]
)
def test_completions_are_the_executors(served: Served, model: str, sampling: dict[str, Any]) -> None:
    expected = served.run(PROMPT, model, 20, **{**sampling, "seed": sampling.get("seed", 0) % 2**64})
    answer = served.client.completions.create(model=model, prompt=PROMPT, max_tokens=20, extra_body=RAW, **sampling)
    (choice,) = answer.choices
    assert choice.token_ids == expected.output_token_ids[0]
    assert choice.text == TOKENIZER.decode(choice.token_ids)
    assert choice.prompt_token_ids == ids(PROMPT)
    assert answer.model == model
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids(PROMPT)), len(choice.token_ids))

    stream = served.client.completions.create(
        model=model, prompt=PROMPT, max_tokens=20, stream=True, stream_options={"include_usage": True},
        extra_body=RAW, **sampling,
    )  # fmt: skip
    *chunks, last = list(stream)
    assert [token for chunk in chunks for token in chunk.choices[0].token_ids] == choice.token_ids
    assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + [choice.finish_reason]
    assert last.choices == []
    assert counts(last.usage) == counts(answer.usage)


def test_answers_without_a_seed_differ(served: Served) -> None:
    def ask() -> str:
        return served.client.completions.create(model="base", prompt=PROMPT, max_tokens=20).choices[0].text

    assert ask() != ask()


@pytest.mark.parametrize(
    "prompt",
    [PROMPT, [PROMPT, "a"], ids(PROMPT), [ids(PROMPT), ids("abc"), ids("d")]],
    ids=["text", "texts", "ids", "lists"],
)
@pytest.mark.parametrize("stream", [False, True])
def test_forms_of_prompts(served: Served, prompt: Any, stream: bool) -> None:
    prompts = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
    answer = served.client.completions.create(
        model="first", prompt=prompt, max_tokens=9, temperature=0, stream=stream, extra_body=RAW
    )
    tokens: list[list[int]] = [[] for _ in prompts]
    for chunk in answer if stream else [answer]:
        for choice in chunk.choices:
            tokens[choice.index] += choice.token_ids
    assert tokens == [served.run(prompt, "first", 9, temperature=0.0).output_token_ids[0] for prompt in prompts]


@pytest.mark.parametrize("stream", [False, True])
def test_several_answers_to_each_prompt(served: Served, stream: bool) -> None:
    """Choices are ordered by prompt, each comes from its own seed, and a prompt counts once."""
    prompts = [PROMPT, "abc"]
    seeds = [11, 12, 13]
    expected = [served.run(prompt, "first", 9, seed=seed) for prompt in prompts for seed in seeds]
    asked: dict[str, Any] = {"stream_options": {"include_usage": True}} if stream else {}
    answer = served.client.completions.create(
        model="first", prompt=prompts, max_tokens=9, n=3, seed=11, stream=stream, logprobs=0, echo=True,
        extra_body=RAW, **asked,
    )  # fmt: skip
    chunks = list(answer) if stream else [answer]
    tokens: list[list[int]] = [[] for _ in expected]
    texts = [""] * len(expected)
    scored = [0] * len(expected)
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        tokens[choice.index] += choice.token_ids
        texts[choice.index] += choice.text
        scored[choice.index] += sum(log_prob is not None for log_prob in choice.logprobs.token_logprobs)
    assert tokens == [result.output_token_ids[0] for result in expected]
    for place, result in enumerate(expected):
        prompt = prompts[place // 3]
        assert texts[place] == prompt + TOKENIZER.decode(result.output_token_ids[0])
        assert scored[place] == len(ids(prompt)) - 1 + len(result.output_token_ids[0])
    usage = chunks[-1].usage
    assert usage.prompt_tokens == sum(len(ids(prompt)) for prompt in prompts)
    assert usage.completion_tokens == sum(len(of_choice) for of_choice in tokens)


def test_usage_has_the_cached_tokens_of_the_prompt(served: Served) -> None:
    """The second of two prompts with the same beginning reuses its blocks, in each API's counts."""
    size = served.executor.engine_info.tokens_per_block
    asked: dict[str, Any] = {"model": "base", "max_tokens": 1, "temperature": 0}

    def cached(prompts: list[list[int]], **more: Any) -> int:
        answer = served.client.completions.create(**asked, prompt=prompts, **more)
        usage = (list(answer)[-1] if more else answer).usage
        return usage.prompt_tokens_details.cached_tokens

    def prompts_from(first: int) -> list[list[int]]:
        return [[first + i, *range(4, 4 + 2 * size), 4] for i in range(2)]

    assert cached(prompts_from(10)) == 0
    assert cached(prompts_from(10)) == 2 * (2 * size)
    stream: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    assert cached(prompts_from(10), n=2, **stream, seed=1) == 2 * (2 * size)
    # A reset forgets them.
    assert served.post("/reset_prefix_cache?reset_external=true", None).status_code == 400
    assert served.post("/reset_prefix_cache", None).status_code == 200
    assert cached(prompts_from(10), **stream) == 0

    messages = [{"role": "user", "content": "z" * 3 * size}]
    chat = {**asked, "messages": messages}
    whole = [served.client.chat.completions.create(**chat) for _ in range(2)]
    *_, last = served.client.chat.completions.create(**chat, **stream)
    response = served.client.responses.create(
        model="base", input=messages[0]["content"], max_output_tokens=1, temperature=0
    )
    with anthropic.Anthropic(base_url=served.address, api_key="none", max_retries=0) as client:
        to_anthropic: dict[str, Any] = {"model": "base", "max_tokens": 1, "messages": messages}
        message = client.messages.create(**to_anthropic)
        with client.messages.stream(**to_anthropic) as events:
            streamed = events.get_final_message()
    length = whole[0].usage.prompt_tokens
    expected = min(length // size * size, length - 1)  # only full blocks can be reused
    assert whole[0].usage.prompt_tokens_details.cached_tokens < expected
    found = [
        whole[1].usage.prompt_tokens_details.cached_tokens,
        last.usage.prompt_tokens_details.cached_tokens,
        response.usage.input_tokens_details.cached_tokens,
        message.usage.cache_read_input_tokens,
        streamed.usage.cache_read_input_tokens,
    ]
    assert found == [expected] * 5
    assert message.usage.input_tokens == streamed.usage.input_tokens == length - expected


def test_several_answers_to_a_chat(served: Served) -> None:
    expected = [served.run(chat_ids("hi"), "base", 8, seed=seed).output_token_ids[0] for seed in (4, 5)]
    asked = {
        "model": "base", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "seed": 4, "n": 2,
        "extra_body": RAW,
    }  # fmt: skip
    answer = served.client.chat.completions.create(**asked)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert [choice.token_ids for choice in answer.choices] == expected
    assert [choice.message.content for choice in answer.choices] == [TOKENIZER.decode(tokens) for tokens in expected]
    assert answer.usage.prompt_tokens == len(chat_ids("hi"))
    *chunks, last = served.client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    roles = [chunk.choices[0].index for chunk in chunks if chunk.choices[0].delta.role]
    assert sorted(roles) == [0, 1]
    for index, choice in enumerate(answer.choices):
        own = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert "".join(part.delta.content or "" for part in own) == choice.message.content
        assert [part.finish_reason for part in own if part.finish_reason] == [choice.finish_reason]
    assert counts(last.usage) == counts(answer.usage)


def test_an_answer_that_a_stop_text_ends_leaves_the_others(served: Served) -> None:
    only = {str(token): -100 for token in range(SPEC.vocab_size) if TOKENIZER.decode([token]) not in ("a", "b")}
    asked: dict[str, Any] = {
        "model": "base", "prompt": "a", "max_tokens": 60, "seed": 3, "logit_bias": only, "extra_body": RAW,
    }  # fmt: skip
    whole = [served.client.completions.create(**{**asked, "seed": seed}).choices[0] for seed in (3, 4)]
    stop = whole[1].text[8:20]
    assert stop not in whole[0].text
    for stream in (False, True):
        answer = served.client.completions.create(**asked, n=2, stop=stop, stream=stream)
        choices = [choice for chunk in (answer if stream else [answer]) for choice in chunk.choices]
        assert "".join(choice.text for choice in choices if choice.index == 0) == whole[0].text
        ended = [choice for choice in choices if choice.index == 1]
        assert "".join(choice.text for choice in ended) == whole[1].text[: whole[1].text.index(stop)]
        assert (ended[-1].finish_reason, ended[-1].stop_reason) == ("stop", stop)


def test_64_clients_at_once(served: Served) -> None:
    """Streamed and whole answers, from the base and adapters, each with its own seed."""

    async def ask(client: openai.AsyncOpenAI, number: int) -> list[int]:
        answer = await client.completions.create(
            model=MODELS[number % 3], prompt=PROMPT * (1 + number % 5), max_tokens=12, seed=number,
            stream=number % 2 == 0, extra_body=RAW,
        )  # fmt: skip
        if number % 2:
            return answer.choices[0].token_ids
        return [token async for chunk in answer for token in chunk.choices[0].token_ids]

    async def ask_all() -> list[list[int]]:
        async with openai.AsyncOpenAI(base_url=f"{served.address}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(64)))

    assert asyncio.run(ask_all()) == [
        served.run(PROMPT * (1 + number % 5), MODELS[number % 3], 12, seed=number).output_token_ids[0]
        for number in range(64)
    ]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("stream", [False, True])
def test_log_probs_of_a_completion(served: Served, model: str, stream: bool) -> None:
    expected = served.run(
        PROMPT, model, 8, seed=5, return_log_probs=True, top_log_probs=2, return_prompt_log_probs=True
    )
    answer = served.client.completions.create(
        model=model, prompt=PROMPT, max_tokens=8, seed=5, logprobs=2, echo=True, stream=stream, extra_body=RAW
    )
    choices = [choice for chunk in (answer if stream else [answer]) for choice in chunk.choices]
    listed = {
        name: [entry for choice in choices for entry in getattr(choice.logprobs, name)]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    }
    tokens = ids(PROMPT) + expected.output_token_ids[0]
    assert listed["token_logprobs"] == [None, *expected.prompt_log_probs, *expected.log_probs[0]]
    tops = [*expected.prompt_top_log_probs, *expected.top_log_probs[0]]
    for name, log_prob, top, likeliest in zip(
        listed["tokens"][1:], listed["token_logprobs"][1:], listed["top_logprobs"][1:], tops, strict=True
    ):
        assert top[name] == log_prob or "\ufffd" in name
        assert max(top.values()) == likeliest[0][1]
        assert set(top.values()) <= {log_prob, *(other for _, other in likeliest)}
    assert listed["top_logprobs"][0] is None
    text = "".join(choice.text for choice in choices)
    assert text == PROMPT + TOKENIZER.decode(expected.output_token_ids[0])
    assert len(listed["text_offset"]) == len(tokens)
    for token, name, offset in zip(tokens, listed["tokens"], listed["text_offset"], strict=True):
        # Parts of a letter have the letter's offset, and the text leaves out special tokens of the answer.
        if "\ufffd" not in name and token >= 4:
            assert text[offset:].startswith(name)


@pytest.mark.parametrize("prompt", ["a</s>bc", "</s>", "<|im_start|>hello<tool_call> €"])
@pytest.mark.parametrize("skip_special_tokens", [False, True])
def test_tokens_of_an_echoed_prompt_point_into_it(served: Served, prompt: str, skip_special_tokens: bool) -> None:
    fields = {"max_tokens": 0, "echo": True, "logprobs": 0, "skip_special_tokens": skip_special_tokens}
    (choice,) = served.post("/v1/completions", {"prompt": prompt, **fields}).json()["choices"]
    assert choice["text"] == prompt
    listed = choice["logprobs"]
    ends = [*listed["text_offset"][1:], len(prompt)]
    for name, begin, end in zip(listed["tokens"], listed["text_offset"], ends, strict=True):
        assert "\ufffd" in name or prompt[begin:end] == name
    # For a prompt of token ids, the echoed text is the decoded text.
    (choice,) = served.post("/v1/completions", {"prompt": ids(prompt), **fields}).json()["choices"]
    assert choice["text"] == TOKENIZER.decode(ids(prompt), skip_special_tokens=skip_special_tokens)
    if not skip_special_tokens:
        assert choice["logprobs"]["text_offset"] == listed["text_offset"]


def test_a_stop_text_may_be_a_special_token(served: Served) -> None:
    letter, special = TOKENIZER.token_to_id("a"), TOKENIZER.token_to_id("<|im_end|>")
    others = {str(token): -100 for token in range(SPEC.vocab_size) if token not in (letter, special)}
    # A higher bias makes the letter more likely and delays the special token.
    for bias in range(20):
        asked = {"prompt": "a", "max_tokens": 60, "seed": 3, "logit_bias": {**others, str(letter): bias}, **RAW}
        (whole,) = served.post("/v1/completions", asked).json()["choices"]
        num_before = whole["token_ids"].index(special)
        if num_before > 0:
            break
    assert num_before > 0
    for stop in ("<|im_end|>", "a<|im_end|>"):
        (choice,) = served.post("/v1/completions", {**asked, "stop": stop}).json()["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
        assert choice["token_ids"] == whole["token_ids"][: num_before + 1]
        assert choice["text"] == "a" * (num_before - (stop[0] == "a"))


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_alone_is_scored(served: Served, stream: bool) -> None:
    expected = served.run(PROMPT, "first", 1, return_log_probs=True, return_prompt_log_probs=True)
    answer = served.client.completions.create(
        model="first", prompt=PROMPT, max_tokens=0, logprobs=0, echo=True, stream=stream
    )
    (choice,) = [choice for chunk in (answer if stream else [answer]) for choice in chunk.choices]
    assert choice.text == PROMPT
    assert choice.finish_reason == "length"
    assert choice.logprobs.token_logprobs == [None, *expected.prompt_log_probs]
    assert [len(top) for top in choice.logprobs.top_logprobs[1:]] == [1] * len(expected.prompt_log_probs)


def test_stop_and_bias(served: Served) -> None:
    only = {str(token): -100 for token in range(SPEC.vocab_size) if TOKENIZER.decode([token]) not in ("a", "b")}
    asked = {"model": "base", "prompt": "a", "max_tokens": 200, "seed": 3, "logit_bias": only, "extra_body": RAW}
    whole = served.client.completions.create(**asked).choices[0]
    assert set(whole.text) == {"a", "b"}
    assert whole.finish_reason == "length"
    stop = whole.text[20:30]
    end = whole.text.index(stop)
    for stream in (False, True):
        answer = served.client.completions.create(**asked, stop=["x", stop], stream=stream, logprobs=0)
        choices = [choice for chunk in (answer if stream else [answer]) for choice in chunk.choices]
        assert "".join(choice.text for choice in choices) == whole.text[:end]
        assert (choices[-1].finish_reason, choices[-1].stop_reason) == ("stop", stop)
        # The answer holds the tokens up to the one that ends the stop text, even if several arrived at once.
        assert sum(len(choice.token_ids) for choice in choices) == end + len(stop)
        assert sum(len(choice.logprobs.tokens) for choice in choices) == end + len(stop)
    token = TOKENIZER.token_to_id("b")
    by_token = served.client.completions.create(**{**asked, "extra_body": {**RAW, "stop_token_ids": [token]}}).choices[
        0
    ]
    assert (by_token.text, by_token.finish_reason) == (whole.text[: whole.text.index("b")], "stop")
    assert by_token.stop_reason == token


def test_the_end_token_ends_unless_it_is_ignored(served: Served) -> None:
    asked = {"model": "base", "prompt": "a", "max_tokens": 5, "logit_bias": {"1": 100}}
    ended = served.client.completions.create(**asked).choices[0]
    assert (ended.text, ended.finish_reason, ended.stop_reason) == ("", "stop", None)
    ignored = served.client.completions.create(**asked, extra_body={**RAW, "ignore_eos": True}).choices[0]
    assert (ignored.text, ignored.finish_reason, ignored.token_ids) == ("", "length", [1] * 5)
    shown = served.client.completions.create(**asked, extra_body={"ignore_eos": True, "skip_special_tokens": False})
    assert shown.choices[0].text == "</s>" * 5
    least = served.client.completions.create(**asked, extra_body={**RAW, "min_tokens": 3}).choices[0]
    assert len(least.token_ids) == 3


def chat_ids(content: str) -> list[int]:
    return ids(f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("model", "prompt"),
    [("base", chat_ids("hi €")), ("first", chat_ids("hi €")), ("second", ids("hi €."))],
    ids=["base", "the base's template", "its own template"],
)
def test_chats(served: Served, model: str, prompt: list[int]) -> None:
    expected = served.run(prompt, model, 10, seed=4, return_log_probs=True, top_log_probs=3)
    asked = {
        "model": model, "messages": [{"role": "user", "content": "hi €"}], "max_completion_tokens": 10, "seed": 4,
        "logprobs": True, "top_logprobs": 3, "extra_body": RAW,
    }  # fmt: skip
    answer = served.client.chat.completions.create(**asked)
    (choice,) = answer.choices
    assert answer.prompt_token_ids == prompt
    assert choice.token_ids == expected.output_token_ids[0]
    assert (choice.message.role, choice.message.content) == ("assistant", TOKENIZER.decode(choice.token_ids))
    entries = choice.logprobs.content
    assert [entry.logprob for entry in entries] == expected.log_probs[0]
    assert [[top.logprob for top in entry.top_logprobs] for entry in entries] == [
        [log_prob for _, log_prob in top] for top in expected.top_log_probs[0]
    ]
    for entry, token in zip(entries, choice.token_ids, strict=True):
        if token >= 4:
            assert bytes(entry.bytes).decode(errors="replace") == entry.token == TOKENIZER.decode([token])
    # Together they form the text, even for letters that take several tokens.
    of_text = b"".join(bytes(entry.bytes) for entry, token in zip(entries, choice.token_ids, strict=True) if token >= 4)
    assert of_text.decode(errors="replace") == choice.message.content

    *chunks, last = served.client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    assert (chunks[0].choices[0].delta.role, chunks[0].choices[0].delta.content) == ("assistant", "")
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == choice.message.content
    streamed = [entry for chunk in chunks if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content]
    assert streamed == entries
    assert chunks[-1].choices[0].finish_reason == choice.finish_reason == "length"
    assert (last.choices, counts(last.usage)) == ([], counts(answer.usage))

    # Other APIs write the same answer of the same adapter in other forms.
    sampling = {"seed": 4}
    response = served.client.responses.create(
        model=model, input="hi €", max_output_tokens=10, extra_body=sampling, include=["message.output_text.logprobs"],
        top_logprobs=3,
    )  # fmt: skip
    (part,) = response.output[0].content
    assert (response.model, response.output_text, response.status) == (model, choice.message.content, "incomplete")
    assert [entry.to_dict() for entry in part.logprobs] == [entry.to_dict() for entry in entries]
    with anthropic.Anthropic(base_url=served.address, api_key="none", max_retries=0) as client:
        message = client.messages.create(
            model=model, max_tokens=10, messages=[{"role": "user", "content": "hi €"}], extra_body=sampling
        )
    assert (message.model, message.content[0].text, message.stop_reason) == (
        model,
        choice.message.content,
        "max_tokens",
    )
    assert response.usage.input_tokens == len(prompt)
    assert message.usage.input_tokens + message.usage.cache_read_input_tokens == len(prompt)


def test_kinds_of_messages_in_a_conversation(served: Served) -> None:
    answer = served.post(
        "/v1/chat/completions",
        {
            "model": "base:first",
            "messages": [
                {"role": "developer", "content": "a"},
                {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]},
                {"role": "assistant", "content": " d "},
            ],
            "chat_template_kwargs": {"more": "e"},
            "max_tokens": 3,
            "return_token_ids": True,
        },
    ).json()
    text = "<|im_start|>system\na<|im_end|>\n<|im_start|>user\nb\nc<|im_end|>\n<|im_start|>assistant\n d <|im_end|>\n"
    assert answer["prompt_token_ids"] == ids(f"{text}<|im_start|>assistant\ne")
    assert answer["model"] == "first"
    continued = served.post(
        "/tokenize",
        {
            "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": " d "}],
            "continue_final_message": True,
            "add_generation_prompt": False,
        },
    ).json()
    assert continued["tokens"] == ids("<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n d ")


def test_a_chat_takes_what_is_left_of_the_context(served: Served) -> None:
    asked = {"model": "base", "messages": [{"role": "user", "content": "x" * 600}], "temperature": 0}
    asked["extra_body"] = {**RAW, "ignore_eos": True}
    answer = served.client.chat.completions.create(**asked)
    assert answer.usage.total_tokens == MAX_SEQ_LEN
    assert answer.choices[0].finish_reason == "length"


def test_a_small_kv_cache_is_the_context(served: Served) -> None:
    blocks = 4
    tokens = blocks * served.executor.engine_info.tokens_per_block
    assert tokens < MAX_SEQ_LEN
    with (
        http_server(served.executor.engine.directory, "--kv_cache_tokens", tokens) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client,
    ):
        (card,) = client.models.list()
        assert card.max_model_len == tokens
        asked = {"model": card.id, "messages": [{"role": "user", "content": "x"}], "temperature": 0}
        answer = client.chat.completions.create(**asked, extra_body={**RAW, "ignore_eos": True})
        assert answer.usage.total_tokens == tokens
        with pytest.raises(openai.BadRequestError, match=f"maximum context length is {tokens} tokens"):
            client.chat.completions.create(**asked, max_tokens=tokens)


def test_tokenize_and_detokenize(served: Served) -> None:
    answer = served.post("/tokenize", {"model": "base", "prompt": PROMPT, "return_token_strs": True}).json()
    assert answer == {
        "count": len(ids(PROMPT)),
        "max_model_len": MAX_SEQ_LEN,
        "tokens": ids(PROMPT),
        "token_strs": TOKENIZER.encode(PROMPT).tokens,
    }
    # Texts of this length are not tokenised on the event loop.
    assert served.post("/tokenize", {"prompt": "a€" * 40_000}).json()["tokens"] == ids("a€" * 40_000)
    assert served.post("/tokenize", {"messages": [{"role": "user", "content": "a"}]}).json()["tokens"] == chat_ids("a")
    for body, param in (
        ({"prompt": "a" * 8_000_000}, "prompt"),
        ({"prompt": "€" * 100_000}, "prompt"),
        ({"messages": [{"role": "user", "content": "a" * 8_000_000}]}, "messages"),
    ):
        refused = served.post("/tokenize", body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        assert "262144" in refused.json()["error"]["message"]
    assert served.post("/detokenize", {"tokens": [0, *ids(PROMPT)]}).json() == {
        "prompt": f"<s>{PROMPT}",
        "content": f"<s>{PROMPT}",
    }
    unknown = served.post("/detokenize", {"tokens": [1, SPEC.vocab_size]})
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (400, "tokens")


def test_adapters_by_other_servers_names(served: Served) -> None:
    expected = served.run(PROMPT, "second", 6, temperature=0.0).output_token_ids[0]
    for fields in (
        {"model": "base", "adapter_id": "second"},
        {"lora_path": "second"},
        {"model": "second", "adapter_id": "second"},
        {"model": "base:second"},
        {"model": "base", "lora_request": {"lora_name": "second", "lora_int_id": 7, "lora_ckpt_source": "hf"}},
    ):
        body = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, **RAW, **fields}
        answer = served.post("/v1/completions", body).json()
        assert answer["choices"][0]["token_ids"] == expected
        assert answer["model"] == "second"


LONG = [2] * 650
# A prompt may have 640 tokens, each as long as <|im_start|>.
MAX_CHARACTERS = 640 * 12 * 4
REFUSED = {
    "an unknown model": ("/v1/completions", {"model": "none", "prompt": "a"}, 404, "The model 'none' does not exist."),
    "an unknown adapter": (
        "/v1/completions",
        {"prompt": "a", "adapter_id": "none"},
        404,
        "adapter 'none' does not exist",
    ),
    "two adapters": (
        "/v1/completions",
        {"model": "first", "prompt": "a", "lora_path": "second"},
        400,
        "different adapters",
    ),
    "an unknown field": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "a"}], "x": 1},
        400,
        "x: is not",
    ),
    "a long prompt": (
        "/v1/completions",
        {"prompt": LONG},
        400,
        "maximum context length is 704 tokens; a prompt may",
    ),
    "a long answer": (
        "/v1/completions",
        {"prompt": LONG[:600], "max_tokens": 105},
        400,
        "maximum context length is 704 tokens; the prompt has 600 and the answer up to 105, together 705",
    ),
    "a token outside the vocabulary": (
        "/v1/completions",
        {"prompt": [[2], [2, 270]]},
        400,
        "input_token_ids[1] is 270",
    ),
    "an empty prompt": ("/v1/completions", {"prompt": ["a", ""]}, 400, "input_token_ids is empty"),
    "a bias outside the vocabulary": (
        "/v1/completions",
        {"prompt": "a", "logit_bias": {"270": 1}},
        400,
        "has token 270",
    ),
    "more answers than run at once": (
        "/v1/completions",
        {"prompt": "a", "n": 9},
        400,
        "n is 9; the engine generates at most 8 answers at once",
    ),
    "too many prompts": ("/v1/completions", {"prompt": ["a"] * 1025}, 400, "prompt has 1025 prompts; at most 1024"),
    "a text of more characters than prompts have": (
        "/v1/completions",
        {"prompt": ["a", "a" * (MAX_CHARACTERS + 1)]},
        400,
        f"prompt has {MAX_CHARACTERS + 1} characters; expected at most {MAX_CHARACTERS}",
    ),
    "a conversation of more characters than prompts have": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "a" * MAX_CHARACTERS}]},
        400,
        f"characters; expected at most {MAX_CHARACTERS}",
    ),
    "tools without a parser": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function", "function": {"name": "f"}}]},
        400,
        "--tool-call-parser",
    ),
    "a message that the template cannot render": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"messages": []}},
        400,
        "messages cannot be given as a variable",
    ),
}


@pytest.mark.parametrize(("path", "body", "status", "said"), REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("stream", [False, True])
def test_invalid_requests_are_refused(
    served: Served, path: str, body: Any, status: int, said: str, stream: bool
) -> None:
    if stream:
        body = {**body, "stream": True}
    answer = served.post(path, body)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert said in error["message"]
    assert error["code"] == status
    assert set(error) == {"message", "type", "param", "code"}
