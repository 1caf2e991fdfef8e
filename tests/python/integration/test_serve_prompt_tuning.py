"""Adapters of virtual tokens by name, in LLM and the server: reported prompts contain only the user's tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import peft
import pytest
import torch

import adaptrt
from support.http_server import http_server
from support.models import ModelSpec, load_model, save_adapter, save_model
from support.prompts import save_virtual_tokens
from support.serving import build_engine
from support.tokenizers import byte_level, save_tokenizer

SPEC = ModelSpec(vocab_size=268)
TOKENIZER = byte_level()
COUNT = 11
MAX_SEQ_LEN = 64
TEXT = "hello world"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("prompts")
    model = save_model(SPEC, root / "model")
    save_tokenizer(TOKENIZER, model)
    (model / "tokenizer_config.json").write_text(
        json.dumps(
            {"eos_token": "</s>", "chat_template": "{% for message in messages %}{{ message.content }}{% endfor %}"}
        )
    )
    save_virtual_tokens(model, root / "tuned", COUNT, 1)
    save_virtual_tokens(model, root / "other", COUNT, 2)
    save_adapter(model, root / "lora", 3, r=4)
    build_engine(model, root, max_seq_len=MAX_SEQ_LEN, max_input_len=48, max_num_tokens=128)
    return root


@pytest.fixture(scope="module")
def llm(root: Path) -> Iterator[adaptrt.LLM]:
    with adaptrt.LLM(root / "engine") as made:
        for name in ("tuned", "other", "lora"):
            made.executor.add_adapter(name, root / name)
        yield made


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[str]:
    modules = [f"{name}={root / name}" for name in ("tuned", "other", "lora")]
    flags = ("--served_model_name", "base", "--lora_modules", *modules, "--adapter_root", root, "--enable-lora-loading")
    with http_server(root / "engine", *flags) as address:
        yield address


def post(server: str, path: str, **body: Any) -> Any:
    response = httpx.post(f"{server}{path}", json=body, timeout=60)
    return response.json() if response.status_code == 200 else response.text


def expected(root: Path, kind: str, tokens: list[int]) -> torch.Tensor:
    """Returns PEFT's log probs after each of the tokens."""
    model = peft.PeftModel.from_pretrained(load_model(root / "model"), root / kind)
    with torch.no_grad():
        return model.eval()(torch.tensor([tokens])).logits[0, COUNT:].log_softmax(-1)


def test_texts_go_on_as_peft_says(llm: adaptrt.LLM, root: Path) -> None:
    ids = TOKENIZER.encode(TEXT).ids
    for kind in ("tuned", "other"):
        completion = llm.generate(TEXT, lora=kind, max_tokens=5)
        rows = expected(root, kind, [*ids, *completion.token_ids])
        assert list(completion.token_ids) == rows[len(ids) - 1 :].argmax(-1).tolist()[: len(completion.token_ids)]
        assert "".join(llm.stream(TEXT, lora=kind, max_tokens=5)) == completion.text
        assert llm.generate([TEXT, TEXT], lora=[kind, None], max_tokens=5)[0] == completion
        assert llm.chat([{"role": "user", "content": TEXT}], lora=kind, max_tokens=5).token_ids
    with pytest.raises(adaptrt.RequestError, match="adapter 'tuned' has virtual tokens, which are only for generation"):
        llm.embed(TEXT, lora="tuned", pooling_type=adaptrt.PoolingType.LAST, normalize=False)


def test_usage_echo_and_log_probs_are_of_the_users_tokens(server: str, llm: adaptrt.LLM, root: Path) -> None:
    ids = TOKENIZER.encode(TEXT).ids
    completion = post(
        server, "/v1/completions", model="tuned", prompt=TEXT, max_tokens=4, temperature=0, echo=True, logprobs=2
    )
    (choice,) = completion["choices"]
    answer = llm.generate(TEXT, lora="tuned", max_tokens=4)
    assert choice["text"] == TEXT + answer.text
    assert completion["usage"]["prompt_tokens"] == len(ids)
    log_probs = choice["logprobs"]["token_logprobs"]
    assert log_probs[0] is None
    rows = expected(root, "tuned", [*ids, *answer.token_ids])
    tokens = [*ids, *answer.token_ids][1 : len(log_probs)]
    assert log_probs[1:] == pytest.approx([float(rows[at, token]) for at, token in enumerate(tokens)], abs=1e-3)
    tops = choice["logprobs"]["top_logprobs"][1 : len(ids)]
    for row, top in zip(rows, tops, strict=False):
        assert max(top.values()) == pytest.approx(float(row.max()), abs=1e-3)
    whole = post(server, "/v1/completions", model="tuned", prompt=TEXT, max_tokens=4, temperature=0)
    assert whole["choices"][0]["text"] == answer.text
    chat = post(
        server, "/v1/chat/completions", model="tuned", messages=[{"role": "user", "content": TEXT}], max_tokens=4,
        temperature=0,
    )  # fmt: skip
    assert chat["choices"][0]["message"]["content"] == answer.text
    assert chat["usage"]["prompt_tokens"] == len(ids)


def test_virtual_tokens_take_room(server: str) -> None:
    prompt = [3] * 30
    room = MAX_SEQ_LEN - COUNT - len(prompt)
    whole = post(server, "/v1/completions", model="tuned", prompt=prompt, max_tokens=room, ignore_eos=True)
    assert whole["usage"]["completion_tokens"] == room
    refused = post(server, "/v1/completions", model="tuned", prompt=prompt, max_tokens=room + 1)
    assert f"maximum context length is {MAX_SEQ_LEN - COUNT} tokens in addition to {COUNT} virtual tokens" in refused
    refused = post(server, "/v1/completions", model="tuned", prompt=[3] * 38, max_tokens=1)
    assert f"a prompt may have up to {48 - COUNT}, and this one has 38" in refused
    assert "usage" in post(server, "/v1/completions", model="base", prompt=[3] * 38, max_tokens=1)
    assert "input_token_ids has 268; the vocabulary is 0 to 267" in post(
        server, "/v1/completions", model="tuned", prompt=[3, 268], max_tokens=1
    )


def test_triton_has_the_users_tokens_too(server: str, llm: adaptrt.LLM) -> None:
    told = post(server, "/v2/models/tuned/generate", text_input=TEXT, request_output_len=4)
    assert told["text_output"] == TEXT + llm.generate(TEXT, lora="tuned", max_tokens=4).text
    ids = TOKENIZER.encode(TEXT).ids
    body = {
        "inputs": [
            {"name": "input_ids", "shape": [1, len(ids)], "datatype": "INT32", "data": [ids]},
            {"name": "input_lengths", "shape": [1, 1], "datatype": "INT32", "data": [[len(ids)]]},
            {"name": "request_output_len", "shape": [1, 1], "datatype": "INT32", "data": [[2]]},
            {"name": "return_context_logits", "shape": [1, 1], "datatype": "BOOL", "data": [[True]]},
        ],
        "outputs": [{"name": "output_ids"}, {"name": "context_logits"}],
    }
    inferred = post(server, "/v2/models/tuned/infer", **body)
    outputs = {output["name"]: output for output in inferred["outputs"]}
    assert outputs["output_ids"]["data"][: len(ids)] == ids
    assert outputs["context_logits"]["shape"] == [1, len(ids), SPEC.vocab_size]
    last = outputs["context_logits"]["data"][-SPEC.vocab_size :]
    assert last.index(max(last)) == outputs["output_ids"]["data"][len(ids)]


def test_a_server_without_lora_serves_them(root: Path, llm: adaptrt.LLM, tmp_path: Path) -> None:
    sizes = {"max_seq_len": MAX_SEQ_LEN, "max_input_len": 48, "max_num_tokens": 128}
    engine = build_engine(root / "model", tmp_path, lora_plugin="disable", dora_plugin="disable", **sizes)
    with http_server(engine, "--lora_modules", f"tuned={root / 'tuned'}") as address:
        told = post(address, "/v1/completions", model="tuned", prompt=TEXT, max_tokens=4, temperature=0)
        assert told["choices"][0]["text"] == llm.generate(TEXT, lora="tuned", max_tokens=4).text
        (listed,) = httpx.get(f"{address}/api/state").json()["adapters"]["list"]
        assert (listed["name"], listed["level"]) == ("tuned", "disk")


def test_they_are_loaded_replaced_and_unloaded(server: str, root: Path) -> None:
    def text(name: str) -> Any:
        return post(server, "/v1/completions", model=name, prompt=TEXT, max_tokens=4, temperature=0)["choices"][0][
            "text"
        ]

    def load(path: str, **fields: Any) -> httpx.Response:
        body = {"lora_name": "new", "lora_path": str(root / path), **fields}
        return httpx.post(f"{server}/v1/load_lora_adapter", json=body, timeout=60)

    assert load("tuned").status_code == 200
    assert text("new") == text("tuned")
    for kind in ("lora", "other"):
        assert load(kind, load_inplace=True).status_code == 200
        assert text("new") == text(kind)
    assert httpx.post(f"{server}/v1/unload_lora_adapter", json={"lora_name": "new"}).status_code == 200
    assert "does not exist" in post(server, "/v1/completions", model="new", prompt=TEXT, max_tokens=1)
