"""API keys, checked before anything else of a request is read."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Collection, Sequence
from http import HTTPStatus

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from .errors import FORBIDDEN, UNAUTHORIZED, ApiError
from .records import current_request
from .tenants import key_client


class KeyGuard:
    """ASGI middleware that answers requests without a valid key with 401, and those that need another key with 403."""

    def __init__(
        self,
        app: ASGIApp,
        keys: Sequence[str],
        open_paths: Collection[str],
        respond: Callable[[Request, ApiError], Response],
        admin_keys: Sequence[str] = (),
        is_admin_path: Callable[[str], bool] = lambda path: False,
    ) -> None:
        """keys: (): only admin paths need a key. open_paths: paths that need no key. respond: makes the error
        responses. admin_keys: keys that all paths accept, and the only ones that admin paths accept; (): admin paths
        are like others.
        """
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._admin_keys = [key.encode() for key in admin_keys]
        self._open_paths = frozenset(open_paths)
        self._is_admin_path = is_admin_path
        self._respond = respond

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers as an ASGI application."""
        if scope["type"] == "http" and scope["path"] not in self._open_paths:
            request = Request(scope)
            key, admin_key = self._find_key(request, self._keys), self._find_key(request, self._admin_keys)
            refusal = self._refusal(scope["path"], has_key=key is not None, is_admin=admin_key is not None)
            if refusal is not None:
                await self._respond(request, refusal)(scope, receive, send)
                return
            record = current_request.get()
            if record is not None:
                record.may_change_adapters = not self._admin_keys or admin_key is not None
                if admin_key is not None:
                    record.client = f"admin key {admin_key}"
                elif key is not None:
                    record.client = key_client(key)
        await self._app(scope, receive, send)

    def _refusal(self, path: str, *, has_key: bool, is_admin: bool) -> ApiError | None:
        """Returns the error for a request whose keys do not suffice; None: they do."""
        needs_admin = bool(self._admin_keys) and self._is_admin_path(path)
        if is_admin or not (needs_admin or self._keys) or (has_key and not needs_admin):
            return None
        if has_key:
            return ApiError(
                f"{path} changes adapters; expected an admin key (--admin-api-key)",
                status=HTTPStatus.FORBIDDEN,
                kind=FORBIDDEN,
            )
        kind = "an admin key" if needs_admin else "a key"
        return ApiError(
            f"{kind} is needed: send 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
            status=HTTPStatus.UNAUTHORIZED,
            kind=UNAUTHORIZED,
            headers={"WWW-Authenticate": "Bearer"},
        )

    def _find_key(self, request: Request, keys: Sequence[bytes]) -> int | None:
        """Returns the index of the request's key in `keys`; None: it has none of them."""
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        given = [bearer if scheme.lower() == "bearer" else "", request.headers.get("x-api-key", "")]
        # Starlette decodes headers as Latin-1, so encoding restores their bytes. All keys are compared, each in
        # constant time, so that timing reveals nothing about them.
        matches = [hmac.compare_digest(one.encode("latin-1"), key) for one in given for key in keys]
        return matches.index(True) % len(keys) if any(matches) else None
