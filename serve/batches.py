"""Runs the lines of batches, after all other requests, and goes on with them after a restart of the server."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, TypeAlias

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from .._core import AdaptrtError
from .batch_store import ENDED, RESULT_KINDS, Batch, BatchStore
from .chat import chat
from .completions import complete
from .embeddings import embed
from .errors import ApiError
from .http import error_response
from .openai_fields import MAX_PRIORITY
from .options import ServerLimits
from .records import RequestRecord, current_request
from .service import Service

Handler: TypeAlias = Callable[[Service, Request], Awaitable[Response]]
AnswerLine: TypeAlias = Callable[[str, bytes], Awaitable[tuple[int, bytes]]]
"""Answers a line: from its endpoint and body to the status and body of an answer, as clients get them."""

HANDLERS: Final[Mapping[str, Handler]] = {
    "/v1/chat/completions": chat,
    "/v1/completions": complete,
    "/v1/embeddings": embed,
}
"""Routes whose requests a batch may have."""
MAX_ERRORS: Final = 20
"""Maximum number of wrong lines that a batch lists."""
RETRY_SECONDS: Final = 1.0
"""Time until a line that the server had no room for is tried again."""
_BUSY: Final = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
_LOG: Final = logging.getLogger("adaptrt.batches")


@dataclass(frozen=True)
class _Line:
    """A line of a batch's input: its place in the file, in bytes."""

    custom_id: str
    begin: int
    size: int


class Batches:
    """The batches of a server. Call its methods on the loop."""

    def __init__(self, answer_line: AnswerLine, limits: ServerLimits, store: BatchStore) -> None:
        """Called only by open()."""
        self.store: Final = store
        self._answer_line = answer_line
        self._limits = limits
        self._running: dict[str, asyncio.Task[None]] = {}
        self._free_lines = asyncio.Semaphore(limits.batch_lines)

    @classmethod
    async def open(cls, answer_line: AnswerLine, limits: ServerLimits, directory: Path) -> Batches:
        """Continues the batches in a directory that have not ended. Raises ConfigError if it cannot be used."""
        batches = cls(answer_line, limits, await asyncio.to_thread(BatchStore, directory, limits))
        for batch in batches.store.batches():
            if batch.status not in ENDED:
                batches._start(batch)
        return batches

    async def close(self) -> None:
        """Stops all lines. The next server runs those that have no result."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.store.close()

    async def create(self, endpoint: str, input_file_id: str, metadata: dict[str, str] | None) -> Batch:
        """Stores and starts a batch. Raises ApiError as BatchStore.add_batch does."""
        batch = await asyncio.to_thread(self.store.add_batch, endpoint, input_file_id, metadata)
        self._start(batch)
        return batch

    async def cancel(self, batch_id: str) -> Batch:
        """Ends a batch after its running lines. Raises ApiError for one that is unknown or has ended."""
        batch = self.store.batch(batch_id)
        if batch.status in ENDED or batch.outcome:
            raise ApiError(
                f"the batch '{batch_id}' is {batch.status}; expected one that runs",
                status=HTTPStatus.CONFLICT,
                param="batch_id",
            )
        if batch.status != "cancelling":
            batch.enter("cancelling")
            await asyncio.to_thread(self.store.save, batch)
        return batch

    def _start(self, batch: Batch) -> None:
        task = asyncio.create_task(self._run(batch))
        self._running[batch.id] = task
        task.add_done_callback(lambda _: self._running.pop(batch.id))

    async def _run(self, batch: Batch) -> None:
        try:
            await self._run_lines(batch)
        except ApiError as error:  # the quota is used up
            batch.errors = [{"code": "quota_exceeded", "line": None, "message": str(error), "param": None}]
            await asyncio.to_thread(self.store.end, batch, "failed")
        except Exception:
            _LOG.exception("the batch %s failed", batch.id)
            batch.errors = [
                {"code": "server_error", "line": None, "message": "an internal error; the log has it", "param": None}
            ]
            await asyncio.to_thread(self.store.end, batch, "failed")

    async def _run_lines(self, batch: Batch) -> None:
        if batch.outcome:
            await asyncio.to_thread(self.store.end, batch, batch.outcome)
            return
        lines, errors = await asyncio.to_thread(self._read_input, batch)
        if errors:
            batch.errors = errors
            await asyncio.to_thread(self.store.end, batch, "failed")
            return
        done = await asyncio.to_thread(self._read_results, batch)
        batch.total = len(lines)
        if batch.status == "validating":
            batch.enter("in_progress")
        await asyncio.to_thread(self.store.save, batch)
        tasks: set[asyncio.Task[None]] = set()
        try:
            left = [line for line in lines if line.custom_id not in done]
            for number, line in enumerate(left):
                await self._free_lines.acquire()
                if batch.status == "cancelling" or time.time() >= batch.expires_at:
                    self._free_lines.release()
                    left = left[number:]
                    break
                task = asyncio.create_task(self._answer(batch, line))
                tasks.add(task)
                task.add_done_callback(lambda _: self._free_lines.release())
                _raise_failures(tasks)
            else:
                left = []
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        is_cancelled = batch.status == "cancelling"
        if not is_cancelled:
            for line in left:
                await self._expire(batch, line)
            batch.enter("finalizing")
        outcome = "cancelled" if is_cancelled else "expired" if left else "completed"
        await asyncio.to_thread(self.store.end, batch, outcome)

    async def _answer(self, batch: Batch, line: _Line) -> None:
        """Runs a line until the server has room for it, and stores its result."""
        record = RequestRecord(client=f"batch {batch.id}")
        current_request.set(record)
        body = await asyncio.to_thread(self._body_of, batch, line)
        while True:
            status, content = await self._answer_line(batch.endpoint, body)
            if status not in _BUSY:
                break
            if batch.status == "cancelling":
                return
            if time.time() >= batch.expires_at:
                await self._expire(batch, line)
                return
            await asyncio.sleep(RETRY_SECONDS)
        response = {"status_code": status, "request_id": record.id, "body": json.loads(content)}
        await self._store(batch, line, response, None)

    async def _expire(self, batch: Batch, line: _Line) -> None:
        error = {"code": "batch_expired", "message": "the batch's completion window ended before this request ran"}
        await self._store(batch, line, None, error)

    async def _store(
        self, batch: Batch, line: _Line, response: dict[str, Any] | None, error: dict[str, str] | None
    ) -> None:
        is_answer = response is not None and response["status_code"] == HTTPStatus.OK
        content = {
            "id": f"batch_req_{secrets.token_hex(12)}",
            "custom_id": line.custom_id,
            "response": response,
            "error": error,
        }
        text = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
        await asyncio.to_thread(self.store.append, batch, RESULT_KINDS[0 if is_answer else 1], text)
        if is_answer:
            batch.completed += 1
        else:
            batch.failed += 1

    def _read_input(self, batch: Batch) -> tuple[list[_Line], list[dict[str, Any]]]:
        """Returns the lines of a batch's input, and the first problems."""
        lines: list[_Line] = []
        errors: list[dict[str, Any]] = []
        seen: set[str] = set()
        begin = 0
        with self.store.path(batch.input_file_id).open("rb") as file:
            for number, text in enumerate(file, 1):
                if text.strip():
                    problem = _problem(text, batch.endpoint, seen)
                    if problem is None and len(lines) == self._limits.max_batch_lines:
                        most = self._limits.max_batch_lines
                        problem = (
                            "too_many_tasks",
                            f"the file has more than {most} requests (--max-batch-lines)",
                            None,
                        )
                    if problem is not None:
                        code, message, param = problem
                        errors.append({"code": code, "line": number, "message": message, "param": param})
                        if len(errors) == MAX_ERRORS or code == "too_many_tasks":
                            break
                    else:
                        lines.append(_Line(json.loads(text)["custom_id"], begin, len(text)))
                begin += len(text)
        if not lines and not errors:
            errors.append({"code": "empty_file", "line": None, "message": "the file has no requests", "param": None})
        return lines, errors

    def _read_results(self, batch: Batch) -> set[str]:
        """Returns the lines that have results, and counts them."""
        found = {
            kind: [json.loads(line)["custom_id"] for line in self.store.results(batch, kind)] for kind in RESULT_KINDS
        }
        batch.completed, batch.failed = (len(found[kind]) for kind in RESULT_KINDS)
        return {custom_id for ids in found.values() for custom_id in ids}

    def _body_of(self, batch: Batch, line: _Line) -> bytes:
        """Returns a line's body, with the lowest priority."""
        with self.store.path(batch.input_file_id).open("rb") as file:
            file.seek(line.begin)
            body = json.loads(file.read(line.size))["body"]
        return json.dumps({**body, "priority": MAX_PRIORITY}).encode()


def answer_line_of(service: Service) -> AnswerLine:
    """Returns a function that answers lines with this process's service."""

    async def answer_line(endpoint: str, body: bytes) -> tuple[int, bytes]:
        request = Request({"type": "http", "method": "POST", "path": "", "headers": [], "query_string": b""})
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if messages:
                return messages.pop()
            disconnected: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
            return await disconnected  # which never happens

        status, content = 0, bytearray()

        async def send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                content.extend(message["body"])

        request = Request(request.scope, receive)
        try:
            response = await HANDLERS[endpoint](service, request)
        except ApiError as error:
            response = error_response(error)
        except AdaptrtError as error:
            response = error_response(ApiError.of(error))
        await response(request.scope, receive, send)
        return status, bytes(content)

    return answer_line


def _raise_failures(tasks: set[asyncio.Task[None]]) -> None:
    """Forgets tasks that have ended. Raises the error of one that failed."""
    for task in [task for task in tasks if task.done()]:
        tasks.discard(task)
        task.result()


def _problem(text: bytes, endpoint: str, seen: set[str]) -> tuple[str, str, str | None] | None:
    """Returns code, message and field of a line that cannot be used; None: it can. Adds its custom_id to `seen`."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError) as error:
        return "invalid_json_line", f"the line is not JSON: {error}", None
    if not isinstance(line, dict):
        return "invalid_request", "the line is not an object", None
    needed = {"custom_id", "method", "url", "body"}
    if line.keys() != needed:
        return "invalid_request", f"the line has {sorted(line)}; expected {sorted(needed)}", None
    custom_id, body = line["custom_id"], line["body"]
    if not isinstance(custom_id, str) or not custom_id:
        return "invalid_custom_id", "custom_id is not a text; expected one of one character or more", "custom_id"
    if custom_id in seen:
        return "duplicate_custom_id", f"custom_id '{custom_id[:64]}' is given twice", "custom_id"
    seen.add(custom_id)
    if line["method"] != "POST":
        return "invalid_method", "method is not POST", "method"
    if line["url"] != endpoint:
        return "mismatched_endpoint", f"url differs from the batch's endpoint, {endpoint}", "url"
    if not isinstance(body, dict):
        return "invalid_request", "body is not an object", "body"
    if body.get("stream"):
        return "invalid_request", "body.stream is true; expected false in a batch", "body.stream"
    return None
