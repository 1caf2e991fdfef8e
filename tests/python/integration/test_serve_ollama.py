"""Ollama's routes, with a model that answers as the test tells it. The real client is in tests/clients."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import shutil
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import adaptrt
from adaptrt.serve.app import make_app
from adaptrt.serve.ollama_store import CreatedModels
from adaptrt.serve.options import ServerLimits, ServerOptions
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
ZEROS = f"sha256:{'0' * 64}"
TIMES = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


class Served:
    """A server in this process."""

    def __init__(self, loop: asyncio.AbstractEventLoop, app: Any, service: Service) -> None:
        self.service = service
        self._loop = loop
        self._app = app

    def send(self, method: str, path: str, body: Any = None, content: bytes | None = None) -> httpx.Response:
        return self._loop.run_until_complete(self._send(method, path, body, content))

    async def _send(self, method: str, path: str, body: Any, content: bytes | None) -> httpx.Response:
        transport = httpx.ASGITransport(app=self._app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, json=body, content=content)

    def store(self, content: bytes, digest: str | None = None) -> tuple[int, str]:
        """Sends a file. Returns the status and the digest."""
        digest = digest or f"sha256:{hashlib.sha256(content).hexdigest()}"
        return self.send("POST", f"/api/blobs/{digest}", content=content).status_code, digest

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        self._loop.run_until_complete(work)

    def post(self, path: str, status: int = 200, /, **body: Any) -> Any:
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
    (root / "created").mkdir()
    options = ServerOptions(
        served_model_name=("base", "other"),
        lora_modules=(("poet", adapter),),
        ollama_models=root / "created",
        enable_tokenizer_info_endpoint=True,
    )
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
    assert "num_ctx is 9999" in served.post("/api/chat", 400, **{**ASKED, "options": {"num_ctx": 9999}})["error"]
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


def adapter_files(served: Served) -> dict[str, str]:
    """Stores the files of the served adapter. Returns their digests by name."""
    directory = next(one.path for one in served.service.adapters.list() if one.name == "poet")
    files = {}
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        status, files[name] = served.store((directory / name).read_bytes())
        assert status == 201
    return files


def test_a_model_is_created_copied_and_deleted(served: Served) -> None:
    files = adapter_files(served)
    assert [served.send("HEAD", f"/api/blobs/{digest}").status_code for digest in files.values()] == [200, 200]
    settings = {"system": "be brief", "parameters": {"num_predict": 1, "stop": ["x"]}, "license": "MIT"}
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "r"}]
    progress = served.post("/api/create", model="clerk", **{"from": "base"}, adapters=files, messages=turns, **settings)
    assert progress[-1] == {"status": "success"}
    asked: Any = {**ASKED, "logprobs": True, "stream": False}
    own = served.post("/api/chat", **{**asked, "model": "clerk"})
    given = [{"role": "system", "content": "be brief"}, *turns, *ASKED["messages"]]
    same = {**asked, "model": "poet", "messages": given, "options": {"top_k": 1, "num_predict": 1}}
    poet, base = (served.post("/api/chat", **{**same, "model": model}) for model in ("poet", "base"))
    assert (own["message"], own["logprobs"], own["done_reason"]) == (poet["message"], poet["logprobs"], "length")
    assert own["logprobs"] != base["logprobs"]
    # A request's own options and system message replace the model's.
    longer = {"options": {"top_k": 1, "num_predict": 2}}
    assert (
        served.post("/api/chat", **{**asked, "model": "clerk", **longer})["logprobs"]
        == (served.post("/api/chat", **{**same, **longer})["logprobs"])
    )

    assert served.send("POST", "/api/copy", {"source": "clerk", "destination": "copy:latest"}).status_code == 200
    assert served.post("/api/chat", **{**asked, "model": "copy"})["logprobs"] == own["logprobs"]
    assert [one["name"] for one in served.send("GET", "/api/tags").json()["models"]][-2:] == ["clerk", "copy"]
    shown = served.post("/api/show", model="copy")
    assert (shown["system"], shown["license"], shown["messages"]) == ("be brief", "MIT", turns)
    assert f"num_predict{' ' * 20}1" in shown["parameters"]
    assert 'PARAMETER stop "x"' in shown["modelfile"]

    # A restart finds both models. Then their files end with the last one that has them.
    assert served.service.created_models is not None
    directory = served.service.options.ollama_models
    assert directory is not None
    again = CreatedModels(directory, ServerLimits(), served.service.executor.work, Adapters())  # type: ignore[arg-type]
    served.run(again.open())
    assert again.list() == served.service.created_models.list()
    for name, num_blobs in (("clerk", 2), ("copy:latest", 0)):
        assert served.send("DELETE", "/api/delete", {"model": name}).status_code == 200
        assert len(list((directory / "blobs").iterdir())) == num_blobs
    assert not list((directory / "adapters").iterdir())
    assert served.send("DELETE", "/api/delete", {"model": "poet"}).status_code == 404
    assert "does not exist" in served.post("/api/chat", 404, **{**asked, "model": "clerk"})["error"]


class Adapters:
    """Takes adapters and forgets them."""

    async def add_trusted(self, name: str, path: Path, *, replace: bool) -> None:
        assert path.is_dir()


def test_templates_of_models(served: Served) -> None:
    template = "{{ .System }}{{ .Prompt }}{{ if .Suffix }}<call>{{ .Suffix }}{{ end }}<talk>{{ .Response }}"
    served.post("/api/create", model="mario", **{"from": "other"}, template=template, stream=False)
    made = served.post("/api/generate", model="mario", prompt="weather?", system="s", stream=False)
    assert (made["response"], made["prompt_eval_count"]) == ("It is sunny.", len("sweather?") + 1)
    filled = served.post("/api/generate", model="mario", prompt="weather?", suffix="x", stream=False)
    assert filled["prompt_eval_count"] == len("weather?x") + 2
    assert served.post("/api/show", model="mario")["template"] == template
    # Settings are inherited, and a model of this name is replaced.
    served.post("/api/create", model="luigi", **{"from": "mario"}, system="!", stream=False)
    assert served.post("/api/generate", model="luigi", prompt="weather?", stream=False)["prompt_eval_count"] == 10
    served.post("/api/create", model="luigi", **{"from": "poet"}, stream=False)
    assert served.post("/api/show", model="luigi")["details"]["parent_model"] == "poet"
    refused = served.post("/api/generate", 400, model="base", prompt="a", template=template + "!")["error"]
    assert "--trust-request-chat-template" in refused
    assert (
        "no Go template with .Suffix"
        in served.post("/api/generate", 400, model="base", prompt="a", suffix="b")["error"]
    )
    for name in ("mario", "luigi"):
        assert served.send("DELETE", "/api/delete", {"name": name}).status_code == 200


@pytest.mark.parametrize(
    ("status", "fields", "said"),
    [
        (400, {"model": "base", "from": "base"}, "which is the base model's name"),
        (400, {"model": "poet", "from": "base"}, "which is a served adapter"),
        (404, {"from": "llama3.2"}, "from is 'llama3.2'; expected the base model, 'base', or one of its adapters"),
        (400, {"from": "poet", "adapters": {"a.gguf": ZEROS}}, "which has an adapter; expected the base"),
        (400, {"from": "base", "adapters": {"../a.gguf": ZEROS}}, "expected a name without folders"),
        (400, {"from": "base", "adapters": {"a.gguf": "sha256:../../x"}}, "expected sha256: and 64 hexadecimal digits"),
        (400, {"from": "base", "adapters": {"a.gguf": ZEROS}}, "expected a file sent to /api/blobs before"),
        (400, {"from": "base", "template": "{{ x }}"}, "template, line 1: the function x is not supported"),
        (400, {"from": "base", "parameters": {"mirostat": 1}}, "parameters.mirostat: is 1; accepted: 0"),
        (400, {"from": "base", "parameters": {"num_ctx": 9999}}, "num_ctx is 9999; expected at most 512"),
    ],
)  # fmt: skip
def test_refused_models_leave_nothing(served: Served, status: int, fields: dict[str, Any], said: str) -> None:
    assert said in served.post("/api/create", status, **{"model": "new", **fields})["error"]
    assert served.service.created_models is not None
    assert served.service.created_models.list() == []


def test_files_that_are_not_stored(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    models = served.service.created_models
    assert models is not None
    assert served.store(b"abc", ZEROS)[0] == 400
    assert served.store(b"abc", "sha256:x")[0] == 400
    assert served.send("HEAD", f"/api/blobs/{ZEROS}").status_code == 404
    monkeypatch.setattr(models, "_limits", ServerLimits(max_blob_bytes=3, max_all_blobs_bytes=5))
    assert [served.store(content)[0] for content in (b"abcd", b"abc", b"xyz", b"xy", b"abc")] == [
        413,
        201,
        507,
        201,
        507,
    ]
    directory = served.service.options.ollama_models
    assert directory is not None
    assert sorted(path.read_bytes() for path in (directory / "blobs").iterdir()) == [b"abc", b"xy"]


def test_models_are_not_created_without_a_directory(served: Served) -> None:
    object.__setattr__(served.service, "created_models", None)
    assert "without --ollama-models" in served.post("/api/create", 403, model="a", **{"from": "base"})["error"]
