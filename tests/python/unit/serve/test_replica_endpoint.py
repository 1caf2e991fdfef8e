"""The endpoint with replicas that refuse, die and answer, as Ray reports it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
import threading
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp, Message

pytest.importorskip("ray", reason="ray is not installed")

from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from adaptrt._core import ConfigError
from adaptrt.serve import batches as batches_module
from adaptrt.serve.batch_store import BatchStore
from adaptrt.serve.http import LONG_BODY
from adaptrt.serve.options import ServerLimits
from adaptrt.serve.ray import build_app, coordinator, endpoint
from adaptrt.serve.ray.adapter_changes import Refusal
from adaptrt.serve.ray.affinity import group_of
from adaptrt.serve.ray.batch_lines import replicas_answer_lines
from adaptrt.serve.ray.calls import Answers
from adaptrt.serve.ray.endpoint import BelowPrefix, EndpointApp, EndpointOptions
from adaptrt.serve.ray.forwarding import ForwardedRequest, WholeAnswer

OPTIONS = EndpointOptions(("base",), ServerLimits(max_body_bytes=1000), adapter_affinity=True)
START: Message = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
PIECE: Message = {"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True}
END: Message = {"type": "http.response.body", "body": b"", "more_body": False}


class Handle:
    """Handle of a deployment whose replicas answer with these batches and then with an error."""

    def __init__(self, *batches: list[Message], error: Exception | None = None, forever: bool = False) -> None:
        self._batches, self._error, self._forever = batches, error, forever
        self.groups: list[str] = []
        self.paths: list[str] = []
        self.num_cancelled = 0

    def options(self, *, method_name: str, stream: bool, multiplexed_model_id: str) -> Handle:
        assert (method_name, stream) == ("answer", True)
        self.groups.append(multiplexed_model_id)
        return self

    def remote(self, request: Any) -> Handle:
        self.paths.append(request.path)
        self._answer = self._messages()
        return self

    async def _messages(self) -> AsyncIterator[list[Message]]:
        for batch in self._batches:
            yield batch
        if self._forever:
            await asyncio.Event().wait()
        if self._error is not None:
            raise self._error

    async def __anext__(self) -> list[Message]:
        return await self._answer.__anext__()

    def cancel(self) -> None:
        self.num_cancelled += 1


def ask(
    handle: Handle | BroadcastHandle,
    path: str = "/v1/completions",
    body: bytes = b'{"model": "x"}',
    leaves: bool = False,
    app: ASGIApp | None = None,
    headers: Mapping[str, str] | None = None,
    method: str = "POST",
) -> Any:
    """Returns (status, body)."""
    sent: list[Message] = []
    scope = {
        "type": "http", "method": method, "path": f"/prefix{path}", "root_path": "/prefix",
        "headers": [(name.encode(), value.encode()) for name, value in (headers or {}).items()],
        "query_string": b"", "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2), "scheme": "http",
    }  # fmt: skip

    async def main() -> None:
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if messages:
                return messages.pop()
            if not leaves:
                await asyncio.Event().wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            sent.append(message)

        await (app or BelowPrefix(EndpointApp(handle, OPTIONS)))(scope, receive, send)

    asyncio.run(main())
    if not sent:
        return None, b""
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


def died() -> Exception:
    return ActorDiedError()


def test_answers_pass_as_they_come() -> None:
    handle = Handle([START], [PIECE, PIECE], [END])
    assert ask(handle) == (200, PIECE["body"] * 2)
    assert handle.groups == [group_of("x")]
    assert handle.paths == ["/v1/completions"]
    ask(handle, body=b'{"model": "base"}')
    assert handle.groups[-1] == ""


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (BackPressureError(num_queued_requests=3, max_queued_requests=2), 429, "RateLimitError"),
        (ActorDiedError(), 503, "ServiceUnavailableError"),
        (DeploymentUnavailableError("d"), 503, "ServiceUnavailableError"),
        (RayTaskError("answer", "traceback", ValueError("a defect")), 500, "InternalServerError"),
    ],
)
def test_errors_of_replicas_are_answered_in_openais_form(error: Exception, status: int, kind: str) -> None:
    handle = Handle(error=error)
    answered, body = ask(handle)
    content = json.loads(body)["error"]
    assert (answered, content["code"], content["type"]) == (status, status, kind)
    assert handle.num_cancelled == 1


def test_a_stream_that_is_lost_ends_with_an_error_event() -> None:
    status, body = ask(Handle([START, PIECE], error=died()))
    _, error, end, rest = body.split(b"\n\n")
    assert (status, end, rest) == (200, b"data: [DONE]", b"")
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == 503
    _, body = ask(Handle([START, PIECE], error=died()), path="/v2/models/x/generate_stream", body=b"{}")
    assert json.loads(body.split(b"\n\n")[1].removeprefix(b"data: ")).keys() == {"error"}


def test_half_of_a_plain_answer_is_not_ended() -> None:
    with pytest.raises(RuntimeError, match="a part of the answer was lost"):
        ask(Handle([{**START, "headers": []}, PIECE], error=died()))


def test_a_client_that_leaves_cancels_its_request() -> None:
    handle = Handle([START, PIECE], forever=True)
    assert ask(handle, leaves=True)[0] in (200, None)
    assert handle.num_cancelled == 1


def test_health_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "HEALTH_SECONDS", 0.01)
    assert ask(Handle(forever=True), path="/health", body=b"")[0] == 503


def test_bodies_are_limited_before_a_replica_is_asked() -> None:
    handle = Handle()
    status, body = ask(handle, body=b" " * 1001)
    assert (status, json.loads(body)["error"]["type"]) == (413, "RequestTooLargeError")
    assert handle.paths == []
    status, body = ask(handle, path="/v2/models/x/infer", body=b" " * 1001)
    assert (status, json.loads(body).keys()) == (413, {"error"})


def test_long_bodies_wait_for_the_threads_for_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, end, clients = threading.Event(), threading.Event(), []

    def parse(path: str, *_: Any) -> None:
        begun.set()
        assert end.wait(30)
        clients.append(path)

    monkeypatch.setattr(endpoint, "adapter_named", parse)
    limits = ServerLimits(text_threads=1, max_waiting_work=1)
    app = endpoint.Recorded(EndpointApp(Handle([START], [END]), EndpointOptions(("base",), limits, True)))
    statuses: dict[str, int] = {}

    async def post(path: str, leave: asyncio.Event | None = None) -> None:
        messages: list[Message] = [{"type": "http.request", "body": b" " * (LONG_BODY + 1), "more_body": False}]

        async def receive() -> Message:
            if messages:
                return messages.pop()
            await (leave or asyncio.Event()).wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            statuses.setdefault(path, message.get("status", 0))

        scope = {
            "type": "http", "method": "POST", "path": path, "root_path": "", "headers": [], "query_string": b"",
            "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2), "scheme": "http",
        }  # fmt: skip
        await app(scope, receive, send)

    async def main() -> None:
        running = asyncio.create_task(post("/running"))
        assert await asyncio.to_thread(begun.wait, 30)
        leave = asyncio.Event()
        waiting = asyncio.create_task(post("/leaves", leave))
        await asyncio.sleep(0.05)
        await post("/refused")
        leave.set()
        await waiting
        end.set()
        await running
        await post("/later")

    asyncio.run(main())
    assert statuses == {"/refused": 429, "/running": 200, "/later": 200}
    assert clients == ["/running", "/later"]


class LineHandle:
    """Handle of replicas that answer whole requests with their body, after these errors."""

    def __init__(self, *errors: Exception) -> None:
        self._errors = list(errors)
        self.groups: list[str] = []
        self.requests: list[ForwardedRequest] = []

    def options(self, *, method_name: str, multiplexed_model_id: str) -> LineHandle:
        assert method_name == "whole_answer"
        self.groups.append(multiplexed_model_id)
        return self

    async def remote(self, request: ForwardedRequest) -> WholeAnswer:
        self.requests.append(request)
        if self._errors:
            raise self._errors.pop(0)
        return WholeAnswer("r", 200, (), request.body)


async def lifespan(app: ASGIApp, until_end: asyncio.Event, ready: asyncio.Event) -> list[str]:
    """Runs an application's lifespan; returns the types of its messages."""
    sent: list[str] = []
    messages = ["lifespan.startup", "lifespan.shutdown"]

    async def receive() -> Message:
        if len(messages) == 1:
            await until_end.wait()
        return {"type": messages.pop(0)}

    async def send(message: Message) -> None:
        sent.append(message["type"])
        ready.set()

    await app({"type": "lifespan"}, receive, send)
    return sent


def test_lines_of_batches_go_to_replicas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches_module, "RETRY_SECONDS", 0.001)
    handle = LineHandle(
        DeploymentUnavailableError("d"), BackPressureError(num_queued_requests=3, max_queued_requests=2)
    )
    app = EndpointApp(handle, dataclasses.replace(OPTIONS, batch_dir=tmp_path, key="secret"))
    lines = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": {"model": model, "prompt": "a"}}
        for number, model in enumerate(("base", "x"))
    ]

    async def main() -> tuple[list[str], dict[str, Any]]:
        until_end, ready = asyncio.Event(), asyncio.Event()
        living = asyncio.create_task(lifespan(app, until_end, ready))
        await ready.wait()
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://e") as client:
            content = "".join(json.dumps(line) + "\n" for line in lines).encode()
            file = await client.post("/v1/files", files={"file": ("a", content)}, data={"purpose": "batch"})
            wanted = {"input_file_id": file.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
            batch = (await client.post("/v1/batches", json=wanted)).json()
            while batch["status"] != "completed":
                await asyncio.sleep(0.001)
                batch = (await client.get(f"/v1/batches/{batch['id']}")).json()
            text = (await client.get(f"/v1/files/{batch['output_file_id']}/content")).text
        until_end.set()
        return await living, {one["custom_id"]: one for one in map(json.loads, text.splitlines())}

    messages, results = asyncio.run(main())
    assert messages == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    assert {id: one["response"]["body"]["model"] for id, one in results.items()} == {"0": "base", "1": "x"}
    assert set(handle.groups) == {"", group_of("x")}
    assert len(handle.requests) == 4  # two are tried again
    for request in handle.requests:
        headers = dict(request.headers)
        assert (request.path, headers[b"authorization"]) == ("/v1/completions", b"Bearer secret")
        assert headers[b"x-request-id"].decode() in {one["response"]["request_id"] for one in results.values()}


def test_a_line_that_fails_at_its_replica_is_an_error_of_the_line() -> None:
    handle = LineHandle(RayTaskError("whole_answer", "traceback", ValueError("a defect")))
    answer_line = replicas_answer_lines(handle, ("base",), OPTIONS.limits, key=None, affinity=False)
    status, content = asyncio.run(answer_line("/v1/completions", b"{}"))
    assert (status, json.loads(content)["error"]["type"]) == (500, "InternalServerError")
    assert handle.groups == [""]


def test_an_endpoint_does_not_start_with_a_directory_that_is_in_use(tmp_path: Path) -> None:
    store = BatchStore(tmp_path, OPTIONS.limits)
    app = EndpointApp(LineHandle(), dataclasses.replace(OPTIONS, batch_dir=tmp_path))
    assert asyncio.run(lifespan(app, asyncio.Event(), asyncio.Event())) == ["lifespan.startup.failed"]
    store.close()


def test_a_closed_endpoint_answers_that_it_shuts_down() -> None:
    app = EndpointApp(Handle(), EndpointOptions(("base",), ServerLimits(), True))
    said: list[Message] = []

    async def receive() -> Message:
        return {"type": "lifespan.shutdown"}

    async def send(message: Message) -> None:
        said.append(message)

    async def end() -> None:
        await app({"type": "lifespan"}, receive, send)

    asyncio.run(end())
    assert said == [{"type": "lifespan.shutdown.complete"}]
    status, body = ask(Handle(), body=b" " * (LONG_BODY + 1), app=BelowPrefix(app))
    assert (status, json.loads(body)["error"]["message"]) == (503, "the server is shutting down")


def test_web_pages_of_other_sites_are_refused_before_a_replica_is_asked() -> None:
    handle = Handle([START], [END])
    flags = {"model": "m", "num_threads": 1, "allowed_hosts": "llm.example.com"}
    app = endpoint.Endpoint(handle, flags, True).__serve_build_asgi_app__()
    for headers, status in (
        ({"content-type": "text/plain"}, 415),
        ({"origin": "http://evil.example", "host": "127.0.0.1"}, 403),
        ({"origin": "https://llm.example.com", "host": "127.0.0.1"}, 200),
        ({"host": "ray-head:8000"}, 200),
    ):
        given = {"content-type": "application/json", "content-length": "2", **headers}
        assert ask(handle, "/v1/load_lora_adapter", b"{}", app=app, headers=given)[0] == status
    assert handle.paths == ["/v1/load_lora_adapter"] * 2


class BroadcastHandle:
    """Handle of a deployment whose replicas each answer a call with one of these values, or whose call raises."""

    def __init__(self, *answers: WholeAnswer | Exception, error: Exception | None = None) -> None:
        self._answers, self._error = answers, error

    def broadcast(self, method: str, request: Any) -> BroadcastHandle:
        assert (method, request.path) == ("whole_answer", "/v1/models")
        return self

    async def results_async(self, *, timeout_s: float, return_exceptions: bool) -> list[Any]:
        assert return_exceptions, "one replica that dies would hide the answers of the others"
        if self._error is not None:
            raise self._error
        return list(self._answers)


@pytest.mark.parametrize(("size", "expected"), [(70_000, 200), (1 << 17, 413)])
def test_uploads_may_be_larger_than_other_bodies(size: int, expected: int) -> None:
    limits = ServerLimits(max_body_bytes=1000, max_adapter_upload_bytes=5_000)
    options = EndpointOptions(("base",), limits, adapter_affinity=True, has_uploads=True)
    handle = Handle([START], [END])
    app = BelowPrefix(EndpointApp(handle, options))
    assert ask(handle, "/v1/upload_lora_adapter", b"x" * size, app=app)[0] == expected
    assert ask(handle, "/v1/completions", b"x" * 1001, app=app)[0] == 413
    closed = BelowPrefix(EndpointApp(handle, dataclasses.replace(options, has_uploads=False)))
    assert ask(handle, "/v1/upload_lora_adapter", b"x" * 1001, app=closed)[0] == 413
    assert handle.paths == ["/v1/upload_lora_adapter"] * (expected == 200)


def models(replica: str, *names: str) -> WholeAnswer:
    body = json.dumps({"object": "list", "data": [{"id": name} for name in names]}).encode()
    return WholeAnswer(replica, 200, ((b"content-type", b"application/json"),), body)


@pytest.mark.parametrize(
    "dead",
    [ActorDiedError(), ActorUnavailableError("u", bytes(16)), DeploymentUnavailableError("d")],
    ids=lambda error: type(error).__name__,
)
def test_a_replica_that_dies_has_no_say_in_a_list(dead: Exception) -> None:
    handle = BroadcastHandle(models("r1", "base", "x"), dead, models("r2", "base", "y"))
    status, body = ask(handle, "/v1/models", b"", method="GET")
    assert (status, [card["id"] for card in json.loads(body)["data"]]) == (200, ["base", "x", "y"])


@pytest.mark.parametrize(
    ("handle", "status"),
    [
        (BroadcastHandle(ActorDiedError()), 503),
        (BroadcastHandle(), 503),
        (BroadcastHandle(error=DeploymentUnavailableError("d")), 503),
        (BroadcastHandle(error=TimeoutError()), 503),
        (BroadcastHandle(models("r1", "base"), RayTaskError("answer", "traceback", ValueError("a defect"))), 500),
    ],
)
def test_a_list_without_all_that_live_is_refused(handle: BroadcastHandle, status: int) -> None:
    answered, body = ask(handle, "/v1/models", b"", method="GET")
    assert (answered, json.loads(body)["error"]["code"]) == (status, status)


def test_serve_takes_the_application() -> None:
    fields: dict[str, Any] = {"model": "m", "num_threads": 2}
    assert build_app(fields | {"num_replicas": 2}) is not None
    assert build_app(fields | {"min_replicas": 0, "max_replicas": 3, "target_ongoing_requests": 4}) is not None


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "adaptrt.serve.ray.application", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"^adaptrt\.serve\.ray needs ray: pip install 'adaptrt\[ray\]'$"):
        build_app({"model": "m", "num_threads": 2})


def test_the_coordinator_logs_why_a_replica_failed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def call_all(*_: Any, **__: Any) -> Answers:
        return Answers(failures=[ValueError("a defect")])

    monkeypatch.setattr(coordinator, "call_all", call_all)
    made: Any = SimpleNamespace(_replicas=None)
    refusal = asyncio.run(coordinator.AdapterCoordinator._at_all(made, "follow", ()))
    assert isinstance(refusal, Refusal)
    assert "follow at a replica failed: a defect" in caplog.text
