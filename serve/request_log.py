"""ASGI middleware that counts HTTP requests, gives each answer an id and a date, and can log a line per request."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from email.utils import formatdate
from http import HTTPStatus
from typing import Any, Final

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..common.shown_value import shown
from .adapter_routes import ADAPTER_PATHS
from .errors import ApiError
from .messages import is_messages_path
from .metrics import ServiceMetrics
from .ollama_routes import is_ollama_path
from .records import REQUEST_IDS, RequestRecord, client_of, current_request, is_request_id

REQUEST_ID_HEADER: Final = "x-request-id"
_LOG: Final = logging.getLogger("adaptrt.requests")
SURFACES: Final = ("openai", "anthropic", "ollama", "triton", "adapters", "other")


class RequestRecorder:
    """Records requests. The outermost ASGI middleware."""

    def __init__(
        self,
        app: ASGIApp,
        metrics: ServiceMetrics,
        log_requests: bool,
        respond: Callable[[Request, ApiError], Response],
    ) -> None:
        """respond: makes the error responses."""
        self._app = app
        self._respond = respond
        self._metrics = metrics
        self._log_requests = log_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers as an ASGI application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = RequestRecord(client=client_of(scope))
        given = Headers(scope=scope).get(REQUEST_ID_HEADER)
        is_refused = given is not None and not is_request_id(given)
        record.name(None if is_refused else given)

        async def send_recorded(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                added = ((REQUEST_ID_HEADER.encode(), record.id.encode()), (b"date", formatdate(usegmt=True).encode()))
                message = {**message, "headers": [*message["headers"], *added]}
            elif not message.get("more_body", False):
                record.is_complete = True
            await send(message)

        token = current_request.set(record)
        try:
            if is_refused:
                error = ApiError(f"X-Request-Id is {shown(given)}; expected {REQUEST_IDS}", param=REQUEST_ID_HEADER)
                await self._respond(Request(scope), error)(scope, receive, send_recorded)
            else:
                await self._app(scope, receive, send_recorded)
        except Exception:
            # An outer layer answers it.
            record.status = HTTPStatus.INTERNAL_SERVER_ERROR
            raise
        finally:
            current_request.reset(token)
            self._metrics.count_request(surface_of(scope["path"]), record.outcome)
            if self._log_requests:
                _LOG.info("%s", _line(scope, record))


def surface_of(path: str) -> str:
    """Returns the surface of a path, one of SURFACES."""
    if path in ADAPTER_PATHS:
        return "adapters"
    if path == "/v2" or path.startswith("/v2/"):
        return "triton"
    if is_messages_path(path):
        return "anthropic"
    if is_ollama_path(path):
        return "ollama"
    return "openai" if path.startswith("/v1/") else "other"


def _line(scope: Scope, record: RequestRecord) -> str:
    """Returns key=value pairs. Texts from the client: its id, and, quoted, names of adapters and of a refused field."""
    route = getattr(scope.get("route"), "path", "(no such route)")
    fields: dict[str, Any] = {
        "id": record.id,
        "route": f'"{scope["method"]} {route}"',
        "status": record.status,
        "outcome": record.outcome,
        "total_ms": f"{(time.monotonic() - record.began) * 1000:.1f}",
    }
    if record.refused_field is not None:
        fields["field"] = shown(record.refused_field)
    made = record.generations
    if made:
        names = list(dict.fromkeys(generation.adapter for generation in made))
        fields["adapter"] = ",".join("-" if name is None else repr(name) for name in names)
        fields["prompt_tokens"] = sum(generation.num_prompt_tokens for generation in made)
        fields["generated_tokens"] = sum(generation.num_generated_tokens for generation in made)
        fields["finish_reason"] = ",".join(dict.fromkeys(generation.finish_reason or "running" for generation in made))
        first_tokens = [generation.first_token for generation in made if generation.first_token is not None]
        if first_tokens:
            fields["first_token_ms"] = f"{(min(first_tokens) - record.began) * 1000:.1f}"
    return " ".join(f"{key}={value}" for key, value in fields.items())
