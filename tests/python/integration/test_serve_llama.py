"""llama.cpp's routes: completions, scales of adapters, texts as tokens, and properties."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

import adaptrt
from adaptrt.serve.app import make_app
from adaptrt.serve.options import ServerOptions
from adaptrt.serve.service import Service
from support.models import ModelSpec, save_adapter, save_model
from support.serving import build_engine
from support.tokenizers import byte_level, save_tokenizer

GREEDY: Any = {"temperature": 0, "n_predict": 4}
NUM_ADAPTERS = 2


class Served:
    """A server in this process."""

    def __init__(self, loop: asyncio.AbstractEventLoop, app: Any) -> None:
        self._loop = loop
        self._app = app

    def send(self, method: str, path: str, body: Any = None) -> httpx.Response:
        return self._loop.run_until_complete(self._send(method, path, body))

    async def _send(self, method: str, path: str, body: Any) -> httpx.Response:
        transport = httpx.ASGITransport(app=self._app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, json=body)

    def post(self, path: str, body: Any, status: int = 200) -> Any:
        answer = self.send("POST", path, body)
        assert answer.status_code == status, answer.text
        return answer.json()

    def complete(self, **fields: Any) -> Any:
        """Returns the token ids of a greedy completion, and their log probs."""
        made = self.post("/completion", {"prompt": "ab", "n_probs": 1, "return_tokens": True, **GREEDY, **fields})
        return made["tokens"], [entry["logprob"] for entry in made["completion_probabilities"]]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("llama")
    model = save_model(ModelSpec(vocab_size=byte_level().get_vocab_size()), root / "model")
    save_tokenizer(byte_level(), model)
    engine = build_engine(model, root)
    adapters = tuple((f"a{i}", save_adapter(model, root / f"a{i}", i, r=4)) for i in range(NUM_ADAPTERS))
    options = ServerOptions(served_model_name=("base",), lora_modules=adapters)
    config = adaptrt.ExecutorConfig(num_threads=1)
    with (
        contextlib.closing(asyncio.new_event_loop()) as loop,
        adaptrt.Executor(engine, adaptrt.ModelType.DECODER_ONLY, config) as executor,
    ):
        service = loop.run_until_complete(Service.open(executor, options))
        yield Served(loop, make_app(service))
        loop.run_until_complete(service.close())


def test_a_completion_and_its_stream(served: Served) -> None:
    asked = {"prompt": "ab", **GREEDY, "n_probs": 2}
    whole = served.post("/completion", {**asked, "return_tokens": True})
    same = {"model": "base", "prompt": "ab", "max_tokens": 4, "temperature": 0, "logprobs": 2, "return_token_ids": True}
    choice = served.post("/v1/completions", same)["choices"][0]
    assert (whole["content"], whole["tokens"]) == (choice["text"], choice["token_ids"])
    entries = whole["completion_probabilities"]
    assert [entry["logprob"] for entry in entries] == choice["logprobs"]["token_logprobs"]
    assert [entry["id"] for entry in entries] == whole["tokens"]
    assert [len(entry["top_logprobs"]) for entry in entries] == [2] * 4
    assert entries[0]["top_logprobs"][0]["id"] == entries[0]["id"]
    assert (whole["stop"], whole["stop_type"], whole["tokens_predicted"], whole["model"]) == (True, "limit", 4, "base")
    assert whole["timings"]["predicted_ms"] >= 0

    lines = [line for line in served.send("POST", "/completions", {**asked, "stream": True}).text.splitlines() if line]
    *events, last = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert "".join(event["content"] for event in events) == whole["content"]
    assert [token for event in events for token in event["tokens"]] == whole["tokens"]
    assert not any(event["stop"] for event in events)
    assert (last["content"], last["stop"], last["tokens_evaluated"]) == ("", True, whole["tokens_evaluated"])
    stopped = served.post("/completion", {**asked, "stop": [whole["content"][1]]})
    assert (stopped["stop_type"], stopped["stopping_word"]) == ("word", whole["content"][1])
    ids = served.post("/tokenize", {"content": "ab", "add_special": True})["tokens"]
    assert served.complete(prompt=ids) == served.complete()
    assert served.complete(cache_prompt=False) == served.complete()


def test_scales_of_adapters(served: Served) -> None:
    listed = served.send("GET", "/lora-adapters").json()
    assert [(one["id"], one["name"], one["scale"]) for one in listed] == [(0, "a0", 0.0), (1, "a1", 0.0)]
    base = served.complete()
    one, both = [{"id": 1, "scale": 1}], [{"id": 0, "scale": 0.5}, {"id": 1, "scale": -0.25}]
    assert served.complete(lora=one) == served.complete(model="a1") != base
    assert served.complete(lora=both) == served.complete(model="a0:0.5+a1:-0.25") != base
    assert served.complete(lora=[{"id": 0, "scale": 1e-9}]) == served.complete(model="a0:1e-09")
    assert served.complete(lora=[]) == served.complete(lora=[{"id": 0, "scale": 0}]) == base
    asked = {"prompt": "ab", "max_tokens": 4, "temperature": 0, "return_token_ids": True, "lora": one}
    assert served.post("/v1/completions", asked)["choices"][0]["token_ids"] == served.complete(lora=one)[0]

    # Scales for later completions that name no model.
    assert served.post("/lora-adapters", both) == {"success": True}
    assert [one["scale"] for one in served.send("GET", "/lora-adapters").json()] == [0.5, -0.25]
    assert served.complete() == served.complete(lora=both)
    assert served.complete(model="base") == served.complete(lora=[]) == base
    assert served.post("/lora-adapters", []) == {"success": True}
    assert served.complete() == base


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/completion", {"lora": [{"id": 2, "scale": 1}]}, "lora[0].id is 2; expected 0 to 1, as in GET"),
        ("/completion", {"lora": [{"id": 0, "scale": 1}] * 2}, "lora[1].id is 0, as in an earlier item"),
        ("/completion", {"lora": [{"id": 0, "scale": 1}], "model": "a1"}, "are different adapters"),
        ("/completion", {"mirostat": 2}, "mirostat: is 2; accepted: 0"),
        ("/completion", {"samplers": ["top_k"]}, "samplers: is ['top_k']; expected no such field"),
        ("/completion", {"prompt": ["a", "b"]}, "expected a text or its token ids"),
        ("/completion", {"prompt": {"prompt_string": 5}}, "expected {\"prompt_string\": TEXT, \"multimodal_data\""),
        ("/completion", {"prompt": {"prompt_string": "a", "multimodal_data": ["x"]}}, "has 0 times <__media__> for 1"),
        ("/completion", {"prompt": {"prompt_string": "<__media__>", "multimodal_data": ["x"]}}, "takes no images"),
        ("/completion", {"logit_bias": [["a", 1]]}, "logit_bias: has ['a', 1]; expected [token id,"),
        ("/completion", {"n_predict": 0}, "n_predict is 0; expected 1 or more"),
        ("/completion", {"repeat_penalty": 1.1, "repeat_last_n": 64}, "repeat_last_n is 64 with repeat_penalty"),
        ("/completion", {"other": 1}, "other: is not known here"),
        ("/lora-adapters", [{"id": 0}], "adapters.0.scale: Field required"),
        ("/lora-adapters", {"id": 0}, "adapters: Input should be a valid list"),
        ("/tokenize", {"content": "a", "prompt": "b"}, "prompt and content given"),
        ("/tokenize", {"prompt": "b", "with_pieces": True}, "with_pieces is given without content"),
        ("/tokenize", {"content": "a", "return_token_strs": True}, "return_token_strs is given with content"),
        ("/tokenize", {"content": "a", "parse_special": False}, "parse_special: is False; accepted: True"),
    ],
)  # fmt: skip
def test_refusals(served: Served, path: str, body: Any, said: str) -> None:
    whole = {"prompt": "ab", **body} if path == "/completion" else body
    assert said in served.post(path, whole, 400)["error"]["message"]


def test_texts_and_properties(served: Served) -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("a€", add_special_tokens=False).ids
    assert served.post("/tokenize", {"content": "a€"}) == {"tokens": ids}
    assert served.post("/tokenize", {"content": "a€", "add_special": True}) == {"tokens": tokenizer.encode("a€").ids}
    pieces = served.post("/tokenize", {"content": "a€", "with_pieces": True})["tokens"]
    assert [piece["id"] for piece in pieces] == ids
    assert [piece["piece"] for piece in pieces] == ["a", [0xE2], [0x82], [0xAC]]
    assert served.post("/detokenize", {"tokens": ids}) == {"prompt": "a€", "content": "a€"}
    props = served.send("GET", "/props").json()
    assert (props["default_generation_settings"]["n_ctx"], props["total_slots"], props["chat_template"]) == (704, 8, "")
    assert "are not changed at run time" in served.post("/props", {}, 501)["error"]["message"]
