"""Captures the requests that an API hands to the executor, as flat names and values."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from fastapi.testclient import TestClient

import adaptrt
from adaptrt.serve.app import make_app
from adaptrt.serve.options import ServerOptions
from adaptrt.serve.service import Service

CAPTURED = "captured by the test"
_PARTS = (
    adaptrt.SamplingConfig,
    adaptrt.OutputConfig,
    adaptrt.GuidedDecodingParams,
    adaptrt.LoraConfig,
    adaptrt.PoolingParams,
)
_ALIASES = {"max_new_tokens", "min_length", "random_seed"}
"""Alternative names of the same fields."""


class CapturingExecutor(adaptrt.Executor):
    """Keeps each request and rejects it, so nothing is computed."""

    def __init__(self, engine: Path) -> None:
        super().__init__(engine, adaptrt.ModelType.DECODER_ONLY, adaptrt.ExecutorConfig(num_threads=1))
        self.requests: list[adaptrt.Request] = []

    def enqueue_resolved_request(self, request: adaptrt.Request) -> int:
        """Raises RequestError."""
        self.requests.append(request)
        raise adaptrt.RequestError(CAPTURED)


class Served:
    """A server's application, and a client in this process."""

    def __init__(self, executor: CapturingExecutor, client: TestClient) -> None:
        self._executor = executor
        self._client = client

    def request(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Returns the fields of the request that is made of a body, without those that are None."""
        self._executor.requests.clear()
        answer = self._client.post(path, json=body)
        assert CAPTURED in answer.text, f"{body}: {answer.text}"
        (request,) = self._executor.requests
        return flat(request)

    def refusal(self, path: str, body: dict[str, Any]) -> str:
        """Returns the answer to a body that is rejected before a request is made of it."""
        self._executor.requests.clear()
        answer = self._client.post(path, json=body)
        assert (answer.status_code, self._executor.requests) == (400, []), answer.text
        return answer.text


@contextlib.contextmanager
def captured(engine: Path, options: ServerOptions) -> Iterator[Served]:
    """Makes the application for an engine."""
    application = _Application(engine, options)
    with TestClient(application) as client:
        yield Served(application.executor, client)


class _Application:
    """An ASGI application that is opened and closed on the loop that uses it."""

    def __init__(self, engine: Path, options: ServerOptions) -> None:
        self.executor = CapturingExecutor(engine)
        self._options = options
        self._app: Any = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "lifespan":
            await self._app(scope, receive, send)
            return
        await receive()
        service = await Service.open(self.executor, self._options)
        self._app = make_app(service)
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await service.close()
        await send({"type": "lifespan.shutdown.complete"})


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Returns all fields of a request and its parts by dotted names, without those that are None.

    Layers are represented by their number.
    """
    fields: dict[str, Any] = {}
    for name in dir(value):
        if name.startswith("_") or name != name.lower() or name in _ALIASES or callable(getattr(value, name)):
            continue
        field = getattr(value, name)
        if isinstance(field, _PARTS):
            fields |= flat(field, f"{prefix}{name}.")
        elif isinstance(field, np.ndarray):
            fields[prefix + name] = field.tolist()
        elif isinstance(field, enum.Enum):
            fields[prefix + name] = field.name
        elif name == "layers":
            fields[prefix + name] = len(field)
        elif field is not None:
            fields[prefix + name] = field
    return fields


def differences(base: dict[str, Any], changed: dict[str, Any]) -> dict[str, Any]:
    """Returns fields with other values than in `base`; None for a missing field."""
    return {name: changed.get(name) for name in base.keys() | changed.keys() if base.get(name) != changed.get(name)}
