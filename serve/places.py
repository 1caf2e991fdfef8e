"""Hosts and ports in the headers Host and Origin and in the flags --allowed-hosts and --allowed-origins."""

from __future__ import annotations

import argparse
import ipaddress
import json
import re
from dataclasses import dataclass
from typing import Any, Final

LOCALHOST: Final = "localhost"
ANY_ORIGIN: Final = "*"
"""Value of --allowed-origins for all web pages."""
DEFAULT_PORTS: Final = {"http": 80, "https": 443}
_SHOWN: Final = 100
"""Maximum number of characters of a value that an error shows."""
_PLACE: Final = re.compile(r"(\[[0-9a-z:.%]+\]|[0-9a-z._-]+)(?::([0-9]{1,5}))?", re.IGNORECASE | re.ASCII)


@dataclass(frozen=True)
class Place:
    """A host's name or address in lower case, and a port if one is given."""

    host: str
    port: int | None

    @classmethod
    def parse(cls, text: str) -> Place | None:
        """Reads NAME, ADDRESS or [ADDRESS], with :PORT or without; None for anything else."""
        found = _PLACE.fullmatch(text)
        if found is None:
            return None
        return cls(found[1].strip("[]").lower().removesuffix("."), None if found[2] is None else int(found[2]))

    @property
    def is_address(self) -> bool:
        """True for an IP address, which no DNS server can point elsewhere."""
        try:
            ipaddress.ip_address(self.host)
        except ValueError:
            return False
        return True

    @property
    def is_loopback(self) -> bool:
        """True for this machine's own name and addresses."""
        return self.host == LOCALHOST or (self.is_address and ipaddress.ip_address(self.host).is_loopback)

    def allows(self, other: Place) -> bool:
        """True if hosts are equal, and ports too if this place has one. Browsers omit a scheme's default port."""
        is_default = other.port is None and self.port in DEFAULT_PORTS.values()
        return self.host == other.host and (self.port in (None, other.port) or is_default)


def allowed_host(text: str) -> Place:
    """Parses a value of the flag --allowed-hosts, for argparse."""
    place = Place.parse(text)
    if place is None:
        raise argparse.ArgumentTypeError(
            f"it is '{text[:_SHOWN]}'; expected NAME or NAME:PORT without a scheme, such as llm.example.com"
        )
    return place


def allowed_origins(text: str) -> list[str]:
    """Parses a value of the flag --allowed-origins: an origin, or vLLM's JSON list of them, for argparse."""
    try:
        origins = json.loads(text) if text.startswith("[") else [text]
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"it is '{text[:_SHOWN]}', which is not JSON: {error}") from error
    return [_origin(origin) for origin in origins]


def _origin(given: Any) -> str:
    scheme, separator, rest = str(given).partition("://")
    scheme = scheme.lower()
    place = Place.parse(rest)
    if given == ANY_ORIGIN:
        return ANY_ORIGIN
    if not separator or scheme not in DEFAULT_PORTS or place is None:
        raise argparse.ArgumentTypeError(
            f"it is '{str(given)[:_SHOWN]}'; expected {ANY_ORIGIN} or SCHEME://HOST[:PORT], such as "
            "https://app.example.com"
        )
    # Browsers omit the scheme's default port.
    is_default = place.port in (None, DEFAULT_PORTS[scheme])
    host = f"[{place.host}]" if ":" in place.host else place.host
    return f"{scheme}://{host}" if is_default else f"{scheme}://{host}:{place.port}"
