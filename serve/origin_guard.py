"""Rejects requests that another site's web page makes: bodies other than JSON, and changes of adapters.

A browser sends a JSON body to another site only after that site allows it, and this server never does. A page may still
reach the server under a name that its owner controls (DNS rebinding), so Host is checked in addition to Origin.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Final, NoReturn

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from .errors import FORBIDDEN, ApiError
from .places import DEFAULT_PORTS, LOCALHOST, Place

LONGEST_SHOWN: Final = 100
"""Maximum number of characters of a header that an error repeats."""
_BODILESS_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_JSON: Final = re.compile(r"application/(?:[^/]+\+)?json")
BINARY: Final = "application/octet-stream"
_OWN_SITES: Final = frozenset({"same-origin", "none"})
"""Values of Sec-Fetch-Site for this server's own page and for addresses that the user typed."""


class OriginPolicy:
    """Decides who may change adapters: programs, the server's own page, and pages of allowed hosts."""

    def __init__(self, host: str, allowed_hosts: Sequence[Place]) -> None:
        """host: address that the server listens on; empty if another process listens."""
        self._allowed = tuple(allowed_hosts)
        own = Place.parse(f"[{host}]" if ":" in host else host)
        self._own = (Place(LOCALHOST, None), *(() if own is None else (own,)))
        self._is_loopback = own is not None and own.is_loopback

    def check(self, request: Request) -> None:
        """Raises ApiError with status 403 if a page of another site may have made the request."""
        origins, sites = request.headers.getlist("origin"), request.headers.getlist("sec-fetch-site")
        hosts = request.headers.getlist("host")
        # Programs may reach a server under any name of their network, so Host counts only for browsers. On a loopback
        # address it always counts: an old browser that was lured there may send none of these headers.
        if origins or sites or self._is_loopback:
            for host in hosts:
                self._check_host(host)
        for origin in origins:
            self._check_origin(origin, hosts)
        is_allowed = bool(origins) and all(self._allows(_place_of(origin)) for origin in origins)
        for site in sites:
            if site not in _OWN_SITES and not is_allowed:
                _refuse("Sec-Fetch-Site", site, "same-origin, none")

    def _check_host(self, text: str) -> None:
        place = Place.parse(text)
        if place is not None and (
            place.is_address or self._allows(place) or any(own.allows(place) for own in self._own)
        ):
            return
        _refuse("Host", text, f"an address, {', '.join(own.host for own in self._own)}")

    def _check_origin(self, text: str, hosts: Sequence[str]) -> None:
        place = _place_of(text)
        if self._allows(place):
            return
        # The Host header omits the default port of the page's scheme.
        default = DEFAULT_PORTS.get(text.partition("://")[0])
        asked = [Place.parse(host) for host in hosts]
        if place is not None and any(one and place == Place(one.host, one.port or default) for one in asked):
            return
        _refuse("Origin", text, "the server's own page")

    def _allows(self, place: Place | None) -> bool:
        return place is not None and any(allowed.allows(place) for allowed in self._allowed)


class OriginGuard:
    """ASGI middleware that answers requests that another site's page may have sent with 403 or 415."""

    def __init__(
        self,
        app: ASGIApp,
        policy: OriginPolicy,
        is_guarded: Callable[[str], bool],
        other_type: Callable[[str], str | None],
        respond: Callable[[Request, ApiError], Response],
    ) -> None:
        """policy: applies to the paths for which is_guarded() is true. other_type: type that a path accepts in addition
        to JSON; None: none. respond: makes the error responses.
        """
        self._app = app
        self._policy = policy
        self._is_guarded = is_guarded
        self._other_type = other_type
        self._respond = respond

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on or rejects it, as an ASGI application."""
        if scope["type"] == "http" and scope["method"] not in _BODILESS_METHODS:
            try:
                self._check_content_type(scope)
                if self._is_guarded(scope["path"]):
                    self._policy.check(Request(scope))
            except ApiError as error:
                await self._respond(Request(scope), error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check_content_type(self, scope: Scope) -> None:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        if headers.get(b"content-length", b"0") == b"0" and b"transfer-encoding" not in headers:
            return
        given = headers.get(b"content-type", b"").decode("latin-1")
        # Triton's clients send no type. A page can do so too, but then its browser sends Origin or Sec-Fetch-Site.
        if b"content-type" not in headers and b"origin" not in headers and b"sec-fetch-site" not in headers:
            return
        kind = given.partition(";")[0].strip().lower()
        other = self._other_type(scope["path"])
        if _JSON.fullmatch(kind) or (other is not None and kind == other):
            return
        accepted = "application/json" if other is None else f"application/json, {other}"
        raise ApiError(
            f"Content-Type is '{given[:LONGEST_SHOWN]}'; accepted: {accepted}",
            status=HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
        )


def _place_of(origin: str) -> Place | None:
    """Returns the place of an origin with its port; None for 'null' and for anything but a web page's origin."""
    scheme, separator, rest = origin.partition("://")
    place = Place.parse(rest)
    if not separator or place is None or scheme not in DEFAULT_PORTS:
        return None
    return Place(place.host, place.port or DEFAULT_PORTS[scheme])


def _refuse(header: str, value: str, accepted: str) -> NoReturn:
    raise ApiError(
        f"{header} is '{value[:LONGEST_SHOWN]}'; accepted where adapters change: {accepted}, and the hosts of "
        "--allowed-hosts",
        status=HTTPStatus.FORBIDDEN,
        kind=FORBIDDEN,
    )
