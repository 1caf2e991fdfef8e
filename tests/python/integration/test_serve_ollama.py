"""Ollama's routes, with a model that answers as the test tells it. The real client is in tests/clients."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

import adaptrt
from adaptrt.serve.app import make_app
from adaptrt.serve.options import ServerOptions
from adaptrt.serve.service import Service
from support.models import save_adapter
from support.pooled import save_sentence_transformer
from support.scripted_model import save_scripted_model
from support.serving import build_engine

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% if not loop.last or message.role != 'assistant' %}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<call>' if tools else '<ponder>' if enable_thinking else '<talk>' }}{% endif %}"
    "{# <think> <tool_call> #}"
)
SCRIPT = {
    "<call>": ["Let me", " look.\n", "<tool_call>", '\n{"name": "wea', 'ther", "arguments"', ': {"city": "Paris"}}\n',
               "</tool_call>"],
    "<talk>": ["It is", " sunny."],
    "<ponder>": ["<think>", "Look", " outside.", "</think>", "Sun", "shine."],
}  # fmt: skip
ASKED: Any = {"model": "base:latest", "messages": [{"role": "user", "content": "weather?"}], "options": {"top_k": 1}}
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
TIMES = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


class Served:
    """A server in this process."""

    def __init__(self, loop: asyncio.AbstractEventLoop, app: Any, service: Service) -> None:
        self.service = service
        self._loop = loop
        self._app = app

    def send(self, method: str, path: str, body: Any = None) -> httpx.Response:
        return self._loop.run_until_complete(self._send(method, path, body))

    async def _send(self, method: str, path: str, body: Any) -> httpx.Response:
        transport = httpx.ASGITransport(app=self._app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, json=body)

    def post(self, path: str, status: int = 200, **body: Any) -> Any:
        answer = self.send("POST", path, body)
        assert answer.status_code == status, answer.text
        if answer.headers["content-type"] != "application/x-ndjson":
            return answer.json()
        return [json.loads(line) for line in answer.text.splitlines()]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("ollama")
    model = save_scripted_model(SCRIPT, root / "model")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    save_sentence_transformer(model, "mean_tokens", normalize=False)
    engine = build_engine(model, root, max_seq_len=512, max_input_len=500)
    adapter = save_adapter(model, root / "poet", 0, r=4)
    options = ServerOptions(served_model_name=("base", "other"), lora_modules=(("poet", adapter),))
    config = adaptrt.ExecutorConfig(num_threads=1)
    with (
        contextlib.closing(asyncio.new_event_loop()) as loop,
        adaptrt.Executor(engine, adaptrt.ModelType.DECODER_ONLY, config) as executor,
    ):
        service = loop.run_until_complete(Service.open(executor, options))
        yield Served(loop, make_app(service), service)
        loop.run_until_complete(service.close())
    shutil.rmtree(root)


def joined(objects: list[Any], name: str) -> str:
    return "".join(one["message"].get(name, "") for one in objects)


def test_a_chat_and_its_stream(served: Served) -> None:
    whole = served.post("/api/chat", **ASKED, stream=False)
    assert whole["message"] == {"role": "assistant", "content": "It is sunny."}
    assert (whole["model"], whole["done"], whole["done_reason"], whole["eval_count"]) == (
        "base:latest",
        True,
        "stop",
        2,
    )
    *chunks, last = served.post("/api/chat", **ASKED)
    assert joined(chunks, "content") == "It is sunny."
    assert [chunk["done"] for chunk in chunks] == [False] * len(chunks)
    assert last["message"] == {"role": "assistant", "content": ""}
    for end in (whole, last):
        assert end["prompt_eval_count"] == len("user: weather?") + 1
        assert all(isinstance(end[name], int) for name in TIMES)
        assert end["total_duration"] >= end["load_duration"] + end["prompt_eval_duration"] + end["eval_duration"]
        assert end["prompt_eval_duration"] > 0
        assert end["created_at"].endswith("Z")
    assert served.post("/api/chat", **{**ASKED, "options": {"num_predict": 1}}, stream=False)["done_reason"] == "length"


def test_calls(served: Served) -> None:
    function = {"index": 0, "name": "weather", "arguments": {"city": "Paris"}}
    whole = served.post("/api/chat", **ASKED, tools=TOOLS, stream=False)["message"]
    *chunks, _ = served.post("/api/chat", **ASKED, tools=TOOLS)
    (streamed,) = [call for chunk in chunks for call in chunk["message"].get("tool_calls", ())]
    assert (whole["content"], whole["tool_calls"][0]["function"]) == ("Let me look.", function)
    assert (joined(chunks, "content"), streamed["function"]) == ("Let me look.", function)


def test_thinking_and_log_probs(served: Served) -> None:
    whole = served.post("/api/chat", **ASKED, think=True, stream=False, logprobs=True, top_logprobs=1)
    assert whole["message"] == {"role": "assistant", "content": "Sunshine.", "thinking": "Look outside."}
    assert [entry["token"] for entry in whole["logprobs"]] == SCRIPT["<ponder>"]
    assert whole["logprobs"][0]["top_logprobs"][0]["token"] == "<think>"
    *chunks, _ = served.post("/api/chat", **ASKED, think=True, logprobs=True)
    assert (joined(chunks, "thinking"), joined(chunks, "content")) == ("Look outside.", "Sunshine.")
    assert [entry for chunk in chunks for entry in chunk["logprobs"]] == [
        {**entry, "top_logprobs": []} for entry in whole["logprobs"]
    ]


def test_prompts(served: Served) -> None:
    asked: Any = {"model": "base", "stream": False, "options": {"temperature": 0}}
    made = served.post("/api/generate", **asked, prompt="weather?", system="be brief")
    assert (made["response"], made["prompt_eval_count"]) == (
        "It is sunny.",
        len("system: be briefuser: weather?") + 1,
    )
    assert "message" not in made
    thought = served.post("/api/generate", **asked, prompt="weather?", think=True)
    assert (thought["response"], thought["thinking"]) == ("Sunshine.", "Look outside.")
    raw = served.post("/api/generate", **asked, prompt="<talk>", raw=True)
    assert (raw["response"], raw["prompt_eval_count"]) == ("It is sunny.", 1)
    *chunks, last = served.post("/api/generate", model="base", prompt="<talk>", raw=True)
    assert "".join(chunk["response"] for chunk in chunks) == "It is sunny."
    assert (last["response"], last["done_reason"]) == ("", "stop")
    long = served.post("/api/generate", model="base", prompt="<talk>", raw=True, options={"num_predict": 9999})
    assert long[-1]["done_reason"] == "stop"


def test_loads(served: Served) -> None:
    loaded = served.post("/api/generate", model="poet")
    assert (loaded["response"], loaded["done"], loaded["done_reason"]) == ("", True, "load")
    assert served.post("/api/chat", model="base", messages=[])["message"] == {"role": "assistant", "content": ""}
    assert "stays loaded" in served.post("/api/generate", 400, model="base", keep_alive=0)["error"]


def test_embeddings(served: Served) -> None:
    made = served.post("/api/embed", model="base", input=["a", "bc"])
    (plain,) = [served.post("/api/embeddings", model="base", prompt="bc")["embedding"]]
    row = np.array(plain)
    np.testing.assert_allclose(made["embeddings"][1], row / np.sqrt(np.square(row).sum()), rtol=1e-5)
    assert len(made["embeddings"]) == 2
    assert made["prompt_eval_count"] == 3
    assert served.post("/api/embed", model="base", input="bc")["embeddings"] == made["embeddings"][1:]
    long = "a" * 505
    assert served.post("/api/embed", model="base", input=long)["prompt_eval_count"] == 500
    assert "maximum context length" in served.post("/api/embed", 400, model="base", input=long, truncate=False)["error"]
    assert "dimensions is 2" in served.post("/api/embed", 400, model="base", input="a", dimensions=2)["error"]
    assert served.post("/api/embed", model="base", input="")["embeddings"] == []
    assert served.post("/api/embeddings", model="base")["embedding"] == []


def test_models(served: Served) -> None:
    models = served.send("GET", "/api/tags").json()["models"]
    assert [model["name"] for model in models] == ["base", "other", "poet"]
    base, _, poet = models
    assert base["size"] > 0
    assert len(poet["digest"]) == 64
    assert poet["digest"] != base["digest"]
    assert base["details"]["family"] == "llama"
    assert base["details"]["quantization_level"] == "F32"
    assert poet["details"]["parent_model"] == "base"
    served.post("/api/generate", model="poet", prompt="a")
    running = served.send("GET", "/api/ps").json()["models"]
    assert [(model["name"], model["size_vram"], model["context_length"]) for model in running] == [
        (name, 0, 512) for name in ("base", "other", "poet")
    ]
    shown = served.post("/api/show", model="poet:latest")
    assert shown["template"] == TEMPLATE
    assert f"ADAPTER {served.service.adapters.list()[0].path}" in shown["modelfile"]
    assert shown["model_info"]["llama.context_length"] == 512
    assert shown["capabilities"] == ["completion", "tools", "thinking", "embedding"]
    assert served.post("/api/show", name="base")["details"]["parent_model"] == ""


def test_errors(served: Served) -> None:
    assert served.post("/api/chat", 404, **{**ASKED, "model": "llama3.2"}) == {
        "error": "The model 'llama3.2' does not exist."
    }
    assert (
        "options.num_ctx is 9999" in served.post("/api/chat", 400, **{**ASKED, "options": {"num_ctx": 9999}})["error"]
    )
    assert "POST /api/copies: Not Found" in served.post("/api/copies", 404)["error"]
    assert "/api/pull is not supported" in served.post("/api/pull", 501, model="llama3.2")["error"]
    assert served.send("HEAD", "/").status_code == 200
    assert served.send("GET", "/api/version").json()["adaptrt"] == adaptrt.__version__
    # The page's own route keeps the form that the page reads.
    assert "message" in served.send("GET", "/api/state?first=x").json()["error"]


def test_a_model_without_template_takes_prompts_as_they_are(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.service.prompts, "_base", None)
    assert served.post("/api/generate", model="base", prompt="<talk>", stream=False)["response"] == "It is sunny."
    assert served.post("/api/show", model="base")["capabilities"] == ["completion", "embedding"]
    refused = served.post("/api/generate", 400, model="base", prompt="a", system="s")["error"]
    assert "neither the model nor the adapter has a chat template" in refused
