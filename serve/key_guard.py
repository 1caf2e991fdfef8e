"""API keys, checked before anything else of a request is read."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Collection, Sequence
from http import HTTPStatus

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from .errors import UNAUTHORIZED, ApiError
from .records import current_request
from .tenants import key_client


class KeyGuard:
    """ASGI middleware that answers requests without a valid key with 401."""

    def __init__(
        self,
        app: ASGIApp,
        keys: Sequence[str],
        open_paths: Collection[str],
        respond: Callable[[Request, ApiError], Response],
    ) -> None:
        """open_paths: paths that need no key. respond: makes the error responses."""
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._open_paths = frozenset(open_paths)
        self._respond = respond

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers as an ASGI application."""
        if scope["type"] == "http" and scope["path"] not in self._open_paths:
            request = Request(scope)
            key = self._find_key(request)
            if key is None:
                error = ApiError(
                    "a key is needed: send 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
                    status=HTTPStatus.UNAUTHORIZED,
                    kind=UNAUTHORIZED,
                    headers={"WWW-Authenticate": "Bearer"},
                )
                await self._respond(request, error)(scope, receive, send)
                return
            record = current_request.get()
            if record is not None:
                record.client = key_client(key)
        await self._app(scope, receive, send)

    def _find_key(self, request: Request) -> int | None:
        """Returns the index of the request's key; None: it has no valid key."""
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        given = [bearer if scheme.lower() == "bearer" else "", request.headers.get("x-api-key", "")]
        # Starlette decodes headers as Latin-1, so encoding restores their bytes. All keys are compared, each in
        # constant time, so that timing reveals nothing about them.
        matches = [hmac.compare_digest(one.encode("latin-1"), key) for one in given for key in self._keys]
        return matches.index(True) % len(self._keys) if any(matches) else None
