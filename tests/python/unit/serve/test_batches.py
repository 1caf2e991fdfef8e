"""Files and batches: quotas, results, cancelling, and a server that goes on after it was killed."""

from __future__ import annotations

import asyncio
import io
import json
from http import HTTPStatus
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.testclient import TestClient
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Message

from adaptrt import ConfigError
from adaptrt.serve import batches as batches_module
from adaptrt.serve.app import make_app
from adaptrt.serve.batch_routes import BatchRequest, _upload
from adaptrt.serve.batch_store import BATCH_SECONDS, Batch, BatchStore
from adaptrt.serve.batches import HANDLERS, Batches, answer_line_of
from adaptrt.serve.errors import ApiError
from adaptrt.serve.metrics import ServiceMetrics
from adaptrt.serve.options import ServerLimits, ServerOptions

URL = "/v1/completions"


def line(custom_id: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": URL, "body": {"prompt": custom_id, **body}}


def jsonl(*lines: Any) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in lines)


class Model:
    """Answers the lines of batches."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.is_open = asyncio.Event()
        self.is_open.set()
        self.num_busy = 0
        self.num_begun = 0

    async def __call__(self, service: Any, request: Request) -> Response:
        body = await request.json()
        self.num_begun += 1
        await self.is_open.wait()
        if self.num_busy:
            self.num_busy -= 1
            raise ApiError.overloaded("busy")
        self.bodies.append(body)
        if body["prompt"] == "bad":
            raise ApiError("no", param="prompt")
        return JSONResponse({"text": body["prompt"].upper()})


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Model:
    made = Model()
    monkeypatch.setattr(batches_module, "HANDLERS", {**HANDLERS, URL: made})
    monkeypatch.setattr(batches_module, "RETRY_SECONDS", 0.001)
    return made


def service(**limits: Any) -> Any:
    options = ServerOptions(limits=ServerLimits(**limits))
    return SimpleNamespace(options=options, metrics=ServiceMetrics(), executor=SimpleNamespace(work=None))


async def opened(service: Any, directory: Path) -> Batches:
    return await Batches.open(answer_line_of(service), service.options.limits, directory)


def stored(store: BatchStore, content: bytes, purpose: str = "batch") -> str:
    return store.add_file("in.jsonl", purpose, io.BytesIO(content), len(content)).id


async def ended(batches: Batches, batch: Batch) -> Batch:
    while batches._running:
        await asyncio.gather(*batches._running.values())
    return batches.store.batch(batch.id)


def results(store: BatchStore, file_id: str | None) -> dict[str, Any]:
    assert file_id is not None
    lines = [json.loads(text) for text in store.path(file_id).read_bytes().splitlines()]
    assert len({one["custom_id"] for one in lines}) == len(lines)
    return {one["custom_id"]: one for one in lines}


def test_a_batch_answers_every_line_once(tmp_path: Path, model: Model) -> None:
    async def main() -> None:
        batches = await opened(service(batch_lines=2), tmp_path)
        model.num_busy = 3  # the server has no room for some lines at first
        content = jsonl(line("a", priority=-5), line("bad"), line("c"), line("d")) + b"\n"
        batch = await batches.create(URL, stored(batches.store, content), {"of": "me"})
        assert batch.status == "validating"
        shown = (await ended(batches, batch)).content()
        assert (shown["status"], shown["metadata"], shown["errors"]) == ("completed", {"of": "me"}, None)
        assert shown["request_counts"] == {"total": 4, "completed": 3, "failed": 1}
        assert shown["expires_at"] == shown["created_at"] + BATCH_SECONDS
        assert None not in (shown["in_progress_at"], shown["finalizing_at"], shown["completed_at"])
        answers = results(batches.store, shown["output_file_id"])
        assert {name: one["response"]["body"]["text"] for name, one in answers.items()} == {
            "a": "A",
            "c": "C",
            "d": "D",
        }
        assert {one["response"]["status_code"] for one in answers.values()} == {200}
        (refused,) = results(batches.store, shown["error_file_id"]).values()
        assert (refused["custom_id"], refused["response"]["status_code"]) == ("bad", 400)
        assert refused["response"]["body"]["error"]["param"] == "prompt"
        assert [body["priority"] for body in model.bodies] == [100] * 4
        assert [info.purpose for info in batches.store.files()] == ["batch", "batch_output", "batch_output"]
        await batches.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_server_goes_on_with_the_lines_that_have_no_result(tmp_path: Path, model: Model) -> None:
    async def killed() -> str:
        batches = await opened(service(batch_lines=1), tmp_path)
        batch = await batches.create(URL, stored(batches.store, jsonl(*map(line, "abcd"))), None)
        while batch.completed < 2:
            await asyncio.sleep(0)
        model.is_open.clear()
        await batches.close()
        assert batches.store.batch(batch.id).status == "in_progress"
        return batch.id

    async def main() -> None:
        batch_id = await killed()
        output = tmp_path / "batches" / f"{batch_id}.output"
        done = [json.loads(text)["custom_id"] for text in output.read_bytes().splitlines()]
        with output.open("ab") as file:
            file.write(b'{"custom_id": "x", "resp')  # a killed server may leave part of a line
        model.bodies.clear()
        model.is_open.set()
        batches = await opened(service(), tmp_path)
        batch = await ended(batches, batches.store.batch(batch_id))
        assert (batch.status, batch.completed, batch.failed) == ("completed", 4, 0)
        assert results(batches.store, batch.output_file_id).keys() == set("abcd")
        assert {body["prompt"] for body in model.bodies} == set("abcd") - {*done}
        used = sum(info.bytes for info in batches.store.files())
        assert batches.store._num_bytes == used
        await batches.close()
        again = await opened(service(), tmp_path)
        assert again.store.batch(batch_id).content() == batch.content()
        assert [info.id for info in again.store.files()] == [info.id for info in batches.store.files()]
        await again.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_results_become_files_even_if_the_server_is_killed_meanwhile(tmp_path: Path, model: Model) -> None:
    async def main() -> None:
        store = BatchStore(tmp_path, ServerLimits())
        batch = store.add_batch(URL, stored(store, jsonl(line("a"))), None)
        store.append(batch, "output", jsonl({"custom_id": "a"}))
        batch.outcome, batch.output_file_id = "completed", "file-" + "0" * 32
        store.save(batch)
        (tmp_path / "files" / "file-leftover").write_text("no description")
        store.close()
        batches = await opened(service(), tmp_path)
        done = await ended(batches, batch)
        assert done.status == "completed"
        assert results(batches.store, done.output_file_id).keys() == {"a"}
        assert not (tmp_path / "files" / "file-leftover").exists()
        assert model.bodies == []
        await batches.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_batch_is_cancelled_after_its_running_lines(tmp_path: Path, model: Model) -> None:
    async def main() -> None:
        batches = await opened(service(batch_lines=1), tmp_path)
        batch = await batches.create(URL, stored(batches.store, jsonl(*map(line, "abc"))), None)
        model.is_open.clear()
        while not model.num_begun:
            await asyncio.sleep(0)
        with pytest.raises(ApiError, match="is in_progress; expected one that has ended") as refused:
            batches.store.delete_batch(batch.id)
        assert refused.value.status == HTTPStatus.CONFLICT
        with pytest.raises(ApiError, match="is the input of"):
            batches.store.delete_file(batch.input_file_id)
        assert (await batches.cancel(batch.id)).status == "cancelling"
        model.is_open.set()
        done = await ended(batches, batch)
        assert (done.status, done.completed, done.total) == ("cancelled", 1, 3)
        with pytest.raises(ApiError, match="is cancelled; expected one that runs"):
            await batches.cancel(batch.id)
        batches.store.delete_batch(batch.id)
        batches.store.delete_file(batch.input_file_id)
        assert batches.store.batches() == []
        await batches.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_lines_that_did_not_run_in_time_are_errors(tmp_path: Path, model: Model) -> None:
    async def main() -> None:
        batches = await opened(service(), tmp_path)
        store = batches.store
        batch = store.add_batch(URL, stored(store, jsonl(line("a"), line("b"))), None)
        batch.expires_at = 0
        batches._start(batch)
        done = await ended(batches, batch)
        assert (done.status, done.failed, model.bodies) == ("expired", 2, [])
        errors = results(store, done.error_file_id)
        assert {one["error"]["code"] for one in errors.values()} == {"batch_expired"}
        await batches.close()

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize(
    ("content", "code", "number"),
    [
        (b"", "empty_file", None),
        (b"{\n", "invalid_json_line", 1),
        (jsonl([1]), "invalid_request", 1),
        (jsonl({"custom_id": "a"}), "invalid_request", 1),
        (jsonl(line("a"), line("a")), "duplicate_custom_id", 2),
        (jsonl({**line("a"), "custom_id": 1}), "invalid_custom_id", 1),
        (jsonl({**line("a"), "method": "GET"}), "invalid_method", 1),
        (jsonl({**line("a"), "url": "/v1/embeddings"}), "mismatched_endpoint", 1),
        (jsonl({**line("a"), "body": []}), "invalid_request", 1),
        (jsonl(line("a", stream=True)), "invalid_request", 1),
        (jsonl(*map(line, "abcd")), "too_many_tasks", 4),
    ],
)
def test_a_batch_with_a_wrong_line_runs_none(
    tmp_path: Path, model: Model, content: bytes, code: str, number: int | None
) -> None:
    async def main() -> None:
        batches = await opened(service(max_batch_lines=3), tmp_path)
        done = await ended(batches, await batches.create(URL, stored(batches.store, content), None))
        assert (done.status, done.output_file_id, model.bodies) == ("failed", None, [])
        (error,) = done.errors
        assert (error["code"], error["line"]) == (code, number)
        await batches.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_results_that_exceed_the_quota_fail_the_batch(tmp_path: Path, model: Model) -> None:
    async def main() -> None:
        content = jsonl(*map(line, "abc"))
        batches = await opened(service(max_batch_bytes=len(content) + 300, batch_lines=1), tmp_path)
        done = await ended(batches, await batches.create(URL, stored(batches.store, content), None))
        assert (done.status, done.errors[0]["code"], done.completed) == ("failed", "quota_exceeded", 1)
        assert len(results(batches.store, done.output_file_id)) == 1
        await batches.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_one_server_uses_a_directory(tmp_path: Path) -> None:
    store = BatchStore(tmp_path, ServerLimits())
    with pytest.raises(ConfigError, match="which another server uses"):
        BatchStore(tmp_path, ServerLimits())
    store.close()
    (tmp_path / "files" / "x.json").write_text(
        json.dumps({"id": "../x", "bytes": 1, "created_at": 1, "filename": "", "purpose": "batch"})
    )
    with pytest.raises(ConfigError, match=r"has an entry with id '\.\./x'"):
        BatchStore(tmp_path, ServerLimits())
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="which cannot be used"):
        BatchStore(tmp_path / "file", ServerLimits())


def test_routes(tmp_path: Path) -> None:
    limits = ServerLimits(max_batch_files=2, max_batch_file_bytes=100_000, max_batches=1)
    made = service(max_batch_files=2, max_batch_file_bytes=100_000, max_batches=1)
    store = BatchStore(tmp_path, limits)

    class Stopped(Batches):
        def _start(self, batch: Batch) -> None:
            """Runs nothing."""

    app = make_app(made, Stopped(answer_line_of(made), limits, store))
    client = TestClient(app, base_url="http://localhost")

    def upload(content: bytes = b"{}\n", **fields: Any) -> Any:
        return client.post("/v1/files", files={"file": ("a.jsonl", content)}, data={"purpose": "batch", **fields})

    info = upload().json()
    assert {name: info[name] for name in ("object", "bytes", "filename", "purpose", "status")} == {
        "object": "file", "bytes": 3, "filename": "a.jsonl", "purpose": "batch", "status": "processed",
    }  # fmt: skip
    assert client.get(f"/v1/files/{info['id']}").json() == info
    assert client.get(f"/v1/files/{info['id']}/content").content == b"{}\n"
    second = upload().json()
    assert [one["id"] for one in client.get("/v1/files").json()["data"]] == [second["id"], info["id"]]
    page = client.get("/v1/files", params={"limit": 1, "purpose": "batch"}).json()
    assert (page["has_more"], page["last_id"]) == (True, second["id"])
    rest = client.get("/v1/files", params={"limit": 1, "after": second["id"]}).json()
    assert ([one["id"] for one in rest["data"]], rest["has_more"]) == ([info["id"]], False)
    assert client.get("/v1/files", params={"purpose": "batch_output"}).json()["data"] == []

    refusals: list[tuple[Any, int, str]] = [
        (upload(), 507, "2 files are stored (the server's --max-batch-files)"),
        (upload(b"x" * 100_001), 413, "--max-batch-file-bytes"),
        (upload(b"x" * 400_000), 413, "--max-batch-file-bytes"),
        (upload(purpose="assistants"), 400, "purpose is 'assistants'; expected 'batch'"),
        (upload(more="x"), 400, "more: is not known here"),
        (client.post("/v1/files", data={"purpose": "batch"}, files={"other": b""}), 400, "other: is not known here"),
        (client.post("/v1/files", json={}), 415, "Content-Type is 'application/json'; expected multipart/form-data"),
        (client.get("/v1/files", params={"after": "file-x"}), 400, "after is 'file-x'"),
        (client.get("/v1/files/file-x"), 404, "The file 'file-x' does not exist"),
        (client.get("/v1/files/..%2f..%2fsecret/content"), 404, ""),
        (client.get("/v1/batches/batch_x"), 404, "The batch 'batch_x' does not exist"),
    ]
    for answer, status, said in refusals:
        assert (answer.status_code, said in answer.text) == (status, True), answer.text
    # A page of another site could send a form without being asked.
    form = {"files": {"file": b"{}"}, "data": {"purpose": "batch"}}
    assert client.post("/v1/files", headers={"Origin": "https://x.example.com"}, **form).status_code == 403
    assert client.post(URL, headers={"Origin": "https://x.example.com"}, **form).status_code == 415

    body = {"input_file_id": info["id"], "endpoint": URL, "completion_window": "24h"}
    batch = client.post("/v1/batches", json=body).json()
    assert (batch["status"], batch["object"], batch["input_file_id"]) == ("validating", "batch", info["id"])
    assert client.get(f"/v1/batches/{batch['id']}").json() == batch
    assert client.get("/v1/batches").json()["data"] == [batch]
    for changed, status, said in (
        ({}, 507, "--max-batches"),
        ({"input_file_id": "file-x"}, 404, "does not exist"),
        ({"endpoint": "/v1/responses"}, 400, "endpoint"),
        ({"completion_window": "1h"}, 400, "completion_window"),
    ):
        answer = client.post("/v1/batches", json={**body, **changed})
        assert (answer.status_code, said in answer.text) == (status, True), answer.text
    assert client.delete(f"/v1/files/{info['id']}").status_code == 409
    assert client.post(f"/v1/batches/{batch['id']}/cancel").json()["status"] == "cancelling"
    store.end(store.batch(batch["id"]), "cancelled")
    assert client.delete(f"/v1/batches/{batch['id']}").json()["deleted"] is True
    assert client.delete(f"/v1/files/{info['id']}").json() == {"id": info["id"], "object": "file", "deleted": True}
    assert not (tmp_path / "files" / info["id"]).exists()
    store.close()


def test_an_upload_that_is_too_large_is_not_read_to_its_end(tmp_path: Path) -> None:
    """Its size may not be stated, and it would fill the disk."""
    num_read = 0
    begin = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'

    async def receive() -> Message:
        nonlocal num_read
        num_read += 1
        assert num_read < 10
        return {"type": "http.request", "body": begin if num_read == 1 else b"x" * 50_000, "more_body": True}

    async def main() -> None:
        headers = [(b"content-type", b"multipart/form-data; boundary=x")]
        request = Request({"type": "http", "method": "POST", "path": "/v1/files", "headers": headers}, receive)
        store = BatchStore(tmp_path, ServerLimits())
        with pytest.raises(ApiError, match="the file has more than 100000 bytes") as refused:
            await _upload(request, Batches(answer_line_of(service()), ServerLimits(), store), 100_000)
        assert refused.value.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE
        assert list((tmp_path / "files").iterdir()) == []
        store.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_batch_may_ask_the_routes_that_there_are() -> None:
    schema = BatchRequest.model_json_schema()["properties"]["endpoint"]
    assert set(schema["enum"]) == HANDLERS.keys()


def test_without_the_flag_there_are_no_such_routes() -> None:
    client = TestClient(make_app(service()), base_url="http://localhost")
    assert client.get("/v1/files").status_code == client.get("/v1/batches").status_code == 404
