"""Batches of a server with replicas: the endpoint has the files, and replicas answer the lines."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any, Final

from fastapi import FastAPI
from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from .. import batch_routes
from ..app import answer_errors
from ..batches import AnswerLine, Batches
from ..errors import INTERNAL, UNAVAILABLE, ApiError
from ..http import error_response
from ..options import ServerLimits
from ..records import current_request
from ..request_log import REQUEST_ID_HEADER
from ..work import Work
from .affinity import adapter_named, group_of
from .forwarding import ForwardedRequest, WholeAnswer

_LOG: Final = logging.getLogger("adaptrt.endpoint")


def batch_app(batches: Batches, limits: ServerLimits, work: Work) -> FastAPI:
    """Makes the application with the routes for files and batches."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    answer_errors(app)
    app.include_router(batch_routes.routes(batches, limits, work))
    return app


def replicas_answer_lines(
    replicas: Any, model_names: Sequence[str], limits: ServerLimits, *, key: str | None, affinity: bool
) -> AnswerLine:
    """Returns a function that has a replica answer a line: one that has the line's adapter, if there is any.

    replicas: handle of the replicas' deployment. key: an API key that replicas accept; None: they need none.
    """
    headers = [(b"content-type", b"application/json")]
    if key is not None:
        headers.append((b"authorization", f"Bearer {key}".encode()))

    async def answer_line(endpoint: str, body: bytes) -> tuple[int, bytes]:
        group = ""
        if affinity:
            adapter = await asyncio.to_thread(adapter_named, endpoint, body, model_names, limits)
            group = "" if adapter is None else group_of(adapter)
        handle = replicas.options(method_name="whole_answer", multiplexed_model_id=group)
        try:
            answer: WholeAnswer = await handle.remote(_request(endpoint, headers, body))
        except (BackPressureError, RayActorError, DeploymentUnavailableError) as error:
            _LOG.info("a line of a batch waits: %s", type(error).__name__)
            return _refused(HTTPStatus.SERVICE_UNAVAILABLE, UNAVAILABLE, "no replica has room for the request")
        except RayError as error:
            _LOG.error("a line of a batch failed at its replica: %s", error)
            return _refused(HTTPStatus.INTERNAL_SERVER_ERROR, INTERNAL, "an internal error; the server's log has it")
        return answer.status, answer.body

    return answer_line


def _request(endpoint: str, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> ForwardedRequest:
    record = current_request.get()
    named = [] if record is None else [(REQUEST_ID_HEADER.encode(), record.id.encode())]
    return ForwardedRequest("POST", endpoint, b"", (*headers, *named), None, body)


def _refused(status: HTTPStatus, kind: str, message: str) -> tuple[int, bytes]:
    return status, bytes(error_response(ApiError(message, status=status, kind=kind)).body)
