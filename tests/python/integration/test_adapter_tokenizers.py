"""Tokenizers of adapters that add tokens, in LLM and in the server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import peft
import pytest
from tokenizers import AddedToken, Tokenizer

import adaptrt
from adaptrt.runtime.adapter_tokenizers import Tokenizers, read_tokenizer
from support.http_server import http_server
from support.kinds import save_kind
from support.models import ModelSpec, save_adapter, save_model
from support.serving import build_engine
from support.tokenizers import byte_level, save_tokenizer

VOCABULARY = 268
SPEC = ModelSpec(vocab_size=VOCABULARY)
# The tokens that each adapter adds; their ids start at VOCABULARY.
NEW = {"poet": ["<verse>", "<rhyme>"], "clerk": ["<form>", "<stamp>"]}
TEMPLATE = "{% for message in messages %}<form>{{ message.content }}{% endfor %}"
MODEL = byte_level()


def tokenizer_of(name: str) -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in NEW[name]])
    assert tokenizer.token_to_id(NEW[name][0]) == VOCABULARY
    return tokenizer


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tokenizers")
    model = save_model(SPEC, root / "model")
    save_tokenizer(MODEL, model)
    (model / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    build_engine(model, root, max_extra_tokens=2)
    lora = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], r=4)
    for seed, name in enumerate(NEW):
        save_kind(model, root / name, lora, seed, extra_tokens=2)
        save_tokenizer(tokenizer_of(name), root / name)
    (root / "clerk" / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "<stamp>"}, "chat_template": TEMPLATE})
    )
    plain = save_adapter(model, root / "plain", 3, r=4)
    save_tokenizer(MODEL, plain)
    return root


@pytest.fixture(scope="module")
def llm(root: Path) -> Iterator[adaptrt.LLM]:
    with adaptrt.LLM(root / "engine") as made:
        for name in (*NEW, "plain"):
            made.executor.add_adapter(name, root / name)
        yield made


def answer(executor: adaptrt.Executor, prompt: list[int], name: str, num_tokens: int, **fields: Any) -> list[int]:
    request = adaptrt.Request(
        prompt, num_tokens, output_config=adaptrt.OutputConfig(exclude_input_from_output=True), **fields
    )
    (response,) = executor.await_responses(executor.enqueue_request(request, adapter=name))
    assert not response.has_error(), response.error_msg
    return list(response.result.output_token_ids[0])


@pytest.mark.parametrize("name", list(NEW))
def test_texts_are_those_of_the_adapters_tokenizer(llm: adaptrt.LLM, name: str) -> None:
    text = "hello <verse><form> hello"
    prompt = tokenizer_of(name).encode(text).ids
    assert VOCABULARY in prompt
    expected = answer(llm.executor, prompt, name, 6, end_id=1)
    given = llm.generate(text, lora=name, max_tokens=6)
    assert list(given.token_ids) == expected[: len(given.token_ids)]
    assert given.text == tokenizer_of(name).decode(list(given.token_ids))
    assert llm.generate([text, text], lora=[name, None], max_tokens=6)[0] == given
    assert "".join(llm.stream(text, lora=name, max_tokens=6)) == given.text
    # Requests to the base model never contain these tokens, whatever their text says.
    assert llm.generate(text, max_tokens=3) == llm.generate(text, lora=None, max_tokens=3)


def test_an_adapters_end_token_ends_its_texts(llm: adaptrt.LLM, root: Path) -> None:
    tokenizers = Tokenizers(read_tokenizer(root / "engine" / "tokenizer.json", (1,)), llm.executor.adapters)
    model = tokenizers.of(None)
    assert tokenizers.of("clerk").end_ids == (*model.end_ids, VOCABULARY + 1)
    assert tokenizers.of("poet").end_ids == model.end_ids
    assert tokenizers.of("clerk") is tokenizers.of("clerk")
    # A copy of the model's tokenizer shares the model's object.
    assert tokenizers.of("plain").tokenizer is model.tokenizer
    llm.executor.add_adapter("changing", root / "poet")
    before = tokenizers.of("changing")
    llm.executor.add_adapter("changing", root / "clerk", replace=True)
    assert tokenizers.of("changing").tokenizer.token_to_id("<form>") == VOCABULARY
    assert before.tokenizer.token_to_id("<form>") is None


def test_an_end_token_without_an_id_ends_nothing(llm: adaptrt.LLM, root: Path, tmp_path: Path) -> None:
    """The token's id would follow the vocabulary, where the model has no row."""
    adapter = save_adapter(root / "model", tmp_path / "nowhere", 3, r=4)
    save_tokenizer(MODEL, adapter)
    for config, expected in (({"eos_token": "<nowhere>"}, ()), ({"eos_token": "<|im_end|>"}, (3,))):
        (adapter / "tokenizer_config.json").write_text(json.dumps(config))
        llm.executor.add_adapter("nowhere", adapter, replace=bool(expected))
        tokenizers = Tokenizers(read_tokenizer(root / "engine" / "tokenizer.json", (1,)), llm.executor.adapters)
        assert tokenizers.of("nowhere").end_ids == (1, *expected)
        llm.generate("hello", lora="nowhere", max_tokens=2)


def test_chats_have_template_and_tokenizer_of_one_adapter(llm: adaptrt.LLM) -> None:
    chat = llm.chat([{"role": "user", "content": "hello"}], lora="clerk", max_tokens=4)
    assert chat == llm.generate("<form>hello", lora="clerk", max_tokens=4)


def test_a_tokenizer_that_cannot_be_read_is_named(llm: adaptrt.LLM, root: Path, tmp_path: Path) -> None:
    lora = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], r=4)
    broken = save_kind(root / "model", tmp_path / "broken", lora, 1)
    (broken / "tokenizer.json").write_text("{}")
    llm.executor.add_adapter("broken", broken)
    with pytest.raises(adaptrt.ConfigError, match=r"broken/tokenizer\.json: cannot be read as a tokenizer"):
        llm.generate("hello", lora="broken")
    llm.generate("hello", max_tokens=1)


def test_an_engine_carries_the_tokenizer_along(root: Path, tmp_path: Path) -> None:
    engine = build_engine(root / "model", tmp_path, max_extra_tokens=2, lora_dir=root / "poet")
    with adaptrt.LLM(engine) as llm:
        assert (engine / "lora" / "0" / "tokenizer.json").read_bytes() == (
            root / "poet" / "tokenizer.json"
        ).read_bytes()
        prompt = tokenizer_of("poet").encode("<rhyme>").ids
        assert prompt == [VOCABULARY + 1]
        assert list(llm.generate("<rhyme>", lora="poet", max_tokens=3).token_ids) == answer(
            llm.executor, prompt, "poet", 3, end_id=1
        )


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[str]:
    modules = [f"{name}={root / name}" for name in (*NEW, "plain")]
    with http_server(root / "engine", "--served_model_name", "base", "--lora_modules", *modules) as address:
        yield address


def post(server: str, path: str, **body: Any) -> Any:
    response = httpx.post(f"{server}{path}", json=body, timeout=60)
    return response.json() if response.status_code == 200 else response.text


def test_the_server_cuts_texts_by_the_models_name(server: str, llm: adaptrt.LLM) -> None:
    text = "<verse> hello <stamp>"
    for name, tokenizer in (("base", MODEL), ("plain", MODEL), *((name, tokenizer_of(name)) for name in NEW)):
        ids = tokenizer.encode(text).ids
        told = post(server, "/tokenize", model=name, prompt=text, return_token_strs=True)
        assert told["tokens"] == ids
        assert told["token_strs"] == [tokenizer.id_to_token(token) for token in ids]
        assert post(server, "/detokenize", model=name, tokens=ids)["prompt"] == text
    assert "tokens[0] is 268; the vocabulary is 0 to 267" in post(server, "/detokenize", model="plain", tokens=[268])
    completion = post(server, "/v1/completions", model="poet", prompt=text, max_tokens=4, temperature=0, echo=True)
    assert completion["choices"][0]["text"] == text + llm.generate(text, lora="poet", max_tokens=4).text
    chat = post(
        server, "/v1/chat/completions", model="clerk", messages=[{"role": "user", "content": "hello"}], max_tokens=4,
        temperature=0,
    )  # fmt: skip
    assert chat["choices"][0]["message"]["content"] == llm.generate("<form>hello", lora="clerk", max_tokens=4).text
    triton = post(
        server, "/v2/models/poet/generate", text_input=text, request_output_len=4, exclude_input_in_output=True
    )
    assert triton["text_output"] == llm.generate(text, lora="poet", max_tokens=4).text
    assert "input_token_ids[0] is 268; the vocabulary is 0 to 267, and the request's adapter brings no more" in post(
        server, "/v1/completions", model="base", prompt=[268], max_tokens=1
    )


def test_the_server_biases_and_names_new_tokens(server: str) -> None:
    for name, (first, _) in NEW.items():
        completion = post(
            server, "/v1/completions", model=name, prompt="hello", max_tokens=3, logit_bias={"268": 100}, logprobs=1,
            temperature=0,
        )  # fmt: skip
        choice = completion["choices"][0]
        assert choice["text"] == first * 3
        assert choice["logprobs"]["tokens"] == [first] * 3
    # The clerk's stamp token ends its texts.
    ended = post(
        server, "/v1/chat/completions", model="clerk", messages=[{"role": "user", "content": "hello"}], max_tokens=3,
        logit_bias={"269": 100},
    )  # fmt: skip
    assert ended["choices"][0]["message"]["content"] in ("", None)
    assert ended["choices"][0]["finish_reason"] == "stop"
    refused = post(server, "/v1/completions", model="plain", prompt="hello", max_tokens=1, logit_bias={"268": 1})
    assert "logit_bias has token 268; the vocabulary is 0 to 267" in refused
