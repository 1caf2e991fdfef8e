"""The deployment that receives all requests. It chooses a replica by the request's adapter and forwards the request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, TypeVar

from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from ..._core import ConfigError, ExecutorClosedError
from ..adapter_routes import UPLOAD_PATH
from ..app import OPEN_PATHS, is_admin_path, is_guarded, last_frames, other_type, respond
from ..batch_routes import is_batch_path
from ..batches import Batches
from ..command_options import admin_keys_of, keys_of, limits_of, model_names_of
from ..errors import INTERNAL, NOT_FOUND, OVERLOADED, UNAVAILABLE, ApiError, retry_headers
from ..http import LONG_BODY, STREAM_TYPES, disconnected, end_task, read_body, unless_disconnected
from ..key_guard import KeyGuard
from ..options import ServerLimits
from ..origin_guard import OriginGuard, OriginPolicy
from ..records import RequestRecord, client_of, current_request
from ..uploaded_adapters import upload_limits
from ..work import Work, WorkKind
from .affinity import adapter_named, group_of, home_named
from .batch_lines import batch_app, replicas_answer_lines
from .calls import call_all
from .forwarding import ForwardedRequest, MessageBatch
from .merging import Merge, asked_of_each, merge_of
from .options import parse_flags

Returned = TypeVar("Returned")

HEALTH_PATHS: Final = frozenset({"/health", "/ping", "/v2/health/live", "/v2/health/ready"})
HEALTH_SECONDS: Final = 5.0
"""Time after which a replica counts as not answering."""
MERGE_SECONDS: Final = 30.0
_PAGE_PATHS: Final = frozenset({"/", "/api/state"})
_PAGE_ELSEWHERE: Final = "shows a single server, and there are several; see /metrics and Ray's dashboard"
_STREAM_TYPES: Final = tuple(name.encode() for name in STREAM_TYPES)
_LOG: Final = logging.getLogger("adaptrt.endpoint")


@dataclass(frozen=True)
class EndpointOptions:
    """Options of the server that the endpoint needs."""

    model_names: tuple[str, ...]
    """Names of the base model."""
    limits: ServerLimits
    adapter_affinity: bool
    """True: requests go to a replica that has their adapter."""
    batch_dir: Path | None = None
    """Directory of files and batches, on the endpoint's machine; None: there are no routes for them."""
    key: str | None = None
    """An API key for the lines of batches; None: replicas need none."""
    has_uploads: bool = False
    """True: clients may send adapters."""


class Endpoint:
    """A deployment with an ASGI application."""

    def __init__(self, replicas: DeploymentHandle, flags: Mapping[str, Any], adapter_affinity: bool) -> None:
        """flags: flags of `adaptrt serve`. Calls no replica yet."""
        args = parse_flags(flags)
        keys = keys_of(args)
        options = EndpointOptions(
            model_names_of(args),
            limits_of(args),
            adapter_affinity,
            args.batch_dir,
            next(iter(keys), None),
            args.enable_lora_upload,
        )
        self._app: ASGIApp = EndpointApp(replicas, options)
        # Replicas would reject such requests too, but here their bodies have not been read yet. The host is empty,
        # because Serve's proxies listen.
        self._app = OriginGuard(
            self._app,
            OriginPolicy("", args.allowed_hosts),
            is_guarded,
            other_type,
            respond,
        )
        admin_keys = admin_keys_of(args)
        if keys or admin_keys:
            self._app = KeyGuard(self._app, keys, OPEN_PATHS, respond, admin_keys, is_admin_path)
        self._app = BelowPrefix(Recorded(self._app))

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self._app


class BelowPrefix:
    """Removes the application's route prefix from paths, for an ASGI application that does not know the prefix."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers as an ASGI application."""
        if scope["type"] == "http":
            prefix = scope.get("root_path", "").rstrip("/")
            scope = {**scope, "path": scope["path"].removeprefix(prefix), "root_path": ""}
        await self._app(scope, receive, send)


class Recorded:
    """Makes the record of each request, so that slow work is counted for its client."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers as an ASGI application."""
        token = current_request.set(RequestRecord(client=client_of(scope)))
        try:
            await self._app(scope, receive, send)
        finally:
            current_request.reset(token)


class EndpointApp:
    """An ASGI application that forwards requests to replicas and their answers to clients as they arrive."""

    def __init__(self, replicas: Any, options: EndpointOptions) -> None:
        """replicas: handle of the replicas' deployment."""
        self._replicas = replicas
        self._options = options
        self._work = Work(options.limits)
        self._batches: Batches | None = None
        self._batch_app: ASGIApp | None = None
        self._upload = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers as an ASGI application."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        if scope["type"] != "http":
            raise RuntimeError(f"'{scope['type']}' is not served")
        if self._batch_app is not None and is_batch_path(scope["path"]):
            await self._batch_app(scope, receive, send)
            return
        request = Request(scope, receive)
        try:
            await self._answer(request, send)
        except ApiError as error:
            await respond(request, error)(scope, receive, send)
        except ExecutorClosedError as error:
            await respond(request, _unavailable(str(error)))(scope, receive, send)
        except ClientDisconnect:
            pass

    async def _live(self, receive: Receive, send: Send) -> None:
        """Answers lifespan messages: opens the batches at the start, and ends them and the threads at the end."""
        while True:
            message = await receive()
            is_end = message["type"] == "lifespan.shutdown"
            try:
                await (self._close() if is_end else self._open_batches())
            except ConfigError as error:
                await send({"type": f"{message['type']}.failed", "message": str(error)})
                return
            await send({"type": f"{message['type']}.complete"})
            if is_end:
                return

    async def _open_batches(self) -> None:
        options = self._options
        if options.batch_dir is None:
            return
        answer_line = replicas_answer_lines(
            self._replicas, options.model_names, options.limits, key=options.key, affinity=options.adapter_affinity
        )
        self._batches = await Batches.open(answer_line, options.limits, options.batch_dir)
        self._batch_app = batch_app(self._batches, options.limits, self._work)

    async def _close(self) -> None:
        if self._batches is not None:
            await self._batches.close()
        await self._work.close()

    async def _answer(self, request: Request, send: Send) -> None:
        path = request.url.path
        if path in _PAGE_PATHS:
            raise ApiError(f"{path}: the page {_PAGE_ELSEWHERE}", status=HTTPStatus.NOT_FOUND, kind=NOT_FOUND)
        if self._options.has_uploads and path == UPLOAD_PATH:
            # An upload may be large, and its body is in memory.
            async with self._upload:
                await self._pass_on(request, path, upload_limits(self._options.limits), send)
        else:
            await self._pass_on(request, path, self._options.limits, send)

    async def _pass_on(self, request: Request, path: str, limits: ServerLimits, send: Send) -> None:
        forwarded = ForwardedRequest.of(request.scope, await read_body(request, limits))
        merge = merge_of(forwarded.method, path, forwarded.query_string)
        if merge is not None:
            await self._answer_merged(merge, forwarded, request, send)
            return
        home = await self._parsed(request, forwarded.body, home_named, path, forwarded.body, self._options.limits)
        group = await self._group(forwarded, request)
        forwarding = asyncio.ensure_future(self._forward(replace(forwarded, home=home), group, send))
        watch = asyncio.ensure_future(disconnected(request.receive))
        try:
            await asyncio.wait({forwarding, watch}, return_when=asyncio.FIRST_COMPLETED)
            if not forwarding.done():
                raise ClientDisconnect
            forwarding.result()
        finally:
            await end_task(watch)
            await end_task(forwarding)

    async def _group(self, forwarded: ForwardedRequest, request: Request) -> str:
        """Returns the group of adapters that decides the replica; empty: only queue lengths decide.

        Threads of WorkKind.TEXTS parse long bodies. Raises ApiError if too many wait for them, and ClientDisconnect.
        """
        if not self._options.adapter_affinity:
            return ""
        names: Collection[str] = self._options.model_names
        limits = self._options.limits
        path, body = forwarded.path, forwarded.body
        adapter = await self._parsed(request, body, adapter_named, path, body, names, limits)
        return "" if adapter is None else group_of(adapter)

    async def _parsed(self, request: Request, body: bytes, parse: Callable[..., Returned], *args: Any) -> Returned:
        """Calls a function that parses the body. Raises like _group()."""
        if len(body) <= LONG_BODY:
            return parse(*args)
        return await unless_disconnected(request, self._work.run(WorkKind.TEXTS, parse, *args))

    async def _forward(self, request: ForwardedRequest, group: str, send: Send) -> None:
        handle = self._replicas.options(method_name="answer", stream=True, multiplexed_model_id=group)
        answer = _PassedAnswer(handle.remote(request), send)
        try:
            if request.path in HEALTH_PATHS:
                await asyncio.wait_for(answer.pass_batch(), HEALTH_SECONDS)
            while await answer.pass_batch():
                pass
        except BackPressureError as error:
            status = HTTPStatus.TOO_MANY_REQUESTS
            said = "too many requests wait for a replica; try again later"
            raise ApiError(said, status=status, kind=OVERLOADED, headers=retry_headers(status)) from error
        except (RayActorError, DeploymentUnavailableError) as error:
            _LOG.warning("%s %s: its replica has ended: %s", request.method, request.path, error)
            await answer.fail(_unavailable("the replica of this request has ended; try again"), request.path)
        except (TimeoutError, asyncio.TimeoutError):
            await answer.fail(_unavailable(f"no replica answered within {HEALTH_SECONDS:g} s"), request.path)
        except RayError as error:
            _LOG.error("%s %s failed at its replica: %s", request.method, request.path, error)
            await answer.fail(_internal(), request.path)
        finally:
            answer.cancel()

    async def _answer_merged(self, merge: Merge, forwarded: ForwardedRequest, request: Request, send: Send) -> None:
        try:
            asked = asked_of_each(forwarded)
            answers = await call_all(self._replicas, "whole_answer", asked, seconds=MERGE_SECONDS)
        except (TimeoutError, asyncio.TimeoutError) as error:
            raise _unavailable(f"not all replicas answered within {MERGE_SECONDS:g} s") from error
        if answers.failures:
            _LOG.error("%s %s failed at a replica: %s", forwarded.method, forwarded.path, answers.failures[0])
            raise _internal()
        if not answers.values:
            raise _unavailable("no replica runs")
        await merge(answers.values)(request.scope, request.receive, send)


class _PassedAnswer:
    """A replica's answer that is forwarded to the client."""

    def __init__(self, batches: Any, send: Send) -> None:
        self._batches = batches
        self._send = send
        self._has_begun = False
        self._is_stream = False

    async def pass_batch(self) -> bool:
        """Sends the replica's next messages. Returns False at the end. Raises the errors of a replica that fails."""
        try:
            batch: MessageBatch = await anext(self._batches)
        except StopAsyncIteration:
            return False
        for message in batch:
            if message["type"] == "http.response.start":
                self._has_begun = True
                self._is_stream = any(name.lower() == b"content-type" and value.startswith(_STREAM_TYPES)
                                      for name, value in message["headers"])  # fmt: skip
            await self._send(message)
        return True

    async def fail(self, error: ApiError, path: str) -> None:
        """Ends the answer with an error. Raises the error if nothing has been sent yet."""
        if not self._has_begun:
            raise error
        if not self._is_stream:
            # The connection ends before the length in the head, so clients notice that the answer is incomplete.
            raise RuntimeError(f"{path}: a part of the answer was lost: {error}")
        await self._send({"type": "http.response.body", "body": last_frames(path, error), "more_body": False})

    def cancel(self) -> None:
        """Cancels the replica's answer; does nothing after its end."""
        self._batches.cancel()


def _unavailable(message: str) -> ApiError:
    return ApiError(message, status=HTTPStatus.SERVICE_UNAVAILABLE, kind=UNAVAILABLE)


def _internal() -> ApiError:
    said = "an internal error; the server's log has it"
    return ApiError(said, status=HTTPStatus.INTERNAL_SERVER_ERROR, kind=INTERNAL)
