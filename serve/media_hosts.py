"""Hosts from which the server may download images for requests, and the addresses that it connects to."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from .._core import ConfigError

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network

_NAME: Final = re.compile(
    r"(?=.{1,253}\Z)(?:[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?\.)*[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
)
_TRANSLATED: Final = tuple(map(ipaddress.ip_network, ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32")))
"""IPv6 networks that lead to IPv4 addresses, which may be private."""
_USUAL_PORTS: Final = (80, 443)
_EXPECTED: Final = (
    "a name (images.example.com) or an address (10.0.0.5), either of them optionally with :PORT, or a network "
    "(10.0.0.0/8)"
)


@dataclass(frozen=True)
class MediaHosts:
    """The hosts of --allowed-media-domains."""

    hosts: frozenset[tuple[str, int | None]] = frozenset()
    """Names and addresses with their port; None: the usual ports of http and https."""
    networks: tuple[Network, ...] = ()
    """Networks whose addresses may be asked, although they may be private. A single address is a network too."""

    @classmethod
    def of_entries(cls, entries: Sequence[str]) -> MediaHosts:
        """Reads the values of the flag. Raises ConfigError."""
        hosts: set[tuple[str, int | None]] = set()
        networks: list[Network] = []
        for entry in entries:
            host, port = _split(entry.strip().lower().rstrip("."))
            network = _network(host.strip("[]"))
            is_known = network is not None or (_NAME.fullmatch(host) and not host.rpartition(".")[2].isdigit())
            if not is_known or (port is not None and not 1 <= port <= 65535):
                raise ConfigError(f"allowed_media_domains has '{entry}'; expected {_EXPECTED}")
            if network is None:
                hosts.add((host, port))
                continue
            networks.append(network)
            if network.num_addresses == 1:
                hosts.add((str(network.network_address), port))
        return cls(frozenset(hosts), tuple(networks))

    def __bool__(self) -> bool:
        """True if there is a host that may be asked."""
        return bool(self.hosts or self.networks)

    def accepts(self, host: str, port: int) -> bool:
        """True if requests may name this host (in lower case) and port in a URL."""
        address = _address(host)
        host = host.rstrip(".") if address is None else str(address)
        if (host, port) in self.hosts:
            return True
        if port not in _USUAL_PORTS:
            return False
        wide = [network for network in self.networks if network.num_addresses > 1]
        return (host, None) in self.hosts or (address is not None and any(address in network for network in wide))

    def resolve(self, host: str, port: int) -> list[str]:
        """Returns the addresses of a host that the server may connect to. Raises OSError if there are none.

        A name's address must be public, unless the flag lists it or its network: the owner of a name decides where it
        leads. Waits for the system's resolver.
        """
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = dict.fromkeys(str(place[0]) for *_, place in found)
        allowed = [text for text in addresses if self._may_connect(ipaddress.ip_address(text.partition("%")[0]))]
        if not allowed:
            raise OSError(f"'{host}' has no address that allowed_media_domains allows")
        return allowed

    def _may_connect(self, address: Address) -> bool:
        return self._is_listed(address) or is_public(address)

    def _is_listed(self, address: Address) -> bool:
        return any(address in network for network in self.networks)


def is_public(address: Address) -> bool:
    """True for addresses of the internet; False for private, loopback, link-local, multicast and reserved ones."""
    if any(address in network for network in _TRANSLATED):
        return False
    return address.is_global and not address.is_multicast


def _split(entry: str) -> tuple[str, int | None]:
    """Returns host and port of an entry. An IPv6 address with a port is in brackets."""
    host, colon, port = entry.rpartition(":")
    if colon and (":" not in host or host.endswith("]")) and port.isascii() and port.isdigit() and len(port) <= 5:
        return host, int(port)
    return entry, None


def _network(text: str) -> Network | None:
    try:
        return ipaddress.ip_network(text)
    except ValueError:
        return None


def _address(text: str) -> Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None
