"""Two network namespaces with a link of a given delay and rate between them, as two machines have it.

The link is a TUN device in each namespace and a process that passes packets on when they are due, so that it needs no
queueing discipline that a kernel may lack. It needs root and iproute2.
"""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

NAMESPACES = ("adaptrt-a", "adaptrt-b")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
PACKET_BYTES = 60000
"""Larger than Ethernet's, so that a process in Python keeps up with the rate."""
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000


@dataclass(frozen=True)
class Link:
    """What a network does to a message of n bytes: it arrives delay + n / rate later."""

    name: str
    delay: float
    """Seconds, one way."""
    rate: float
    """Bytes a second, in each direction; 0: as fast as packets are passed on."""


@contextmanager
def two_hosts(link: Link) -> Iterator[None]:
    """The namespaces NAMESPACES with ADDRESSES, joined by the link."""
    _remove()
    with subprocess.Popen(
        [sys.executable, __file__, str(link.delay), str(link.rate)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as relay:
        try:
            assert relay.stdout is not None
            if relay.stdout.readline() != b"ready\n":
                raise RuntimeError("the link could not be made: it needs root, iproute2 and TUN devices")
            yield
        finally:
            relay.kill()
            _remove()


def launcher(directory: Path) -> Path:
    """A program that mpirun starts processes of the second host with, as it would with ssh: [-x] HOST COMMAND..."""
    path = directory / "in_namespace"
    path.write_text(
        '#!/bin/sh\nwhile [ "${1#-}" != "$1" ]; do shift; done\nshift\n'
        f'exec ip netns exec {NAMESPACES[1]} sh -c "$*"\n'
    )
    path.chmod(0o755)
    return path


def _remove() -> None:
    for name in NAMESPACES:
        subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL, check=False)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def _open_device(name: str, namespace: str, address: str) -> int:
    """A TUN device of the namespace; it is there as long as what is returned is open."""
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    _ip("netns", "add", namespace)
    _ip("link", "set", name, "netns", namespace)
    for arguments in (
        ["addr", "add", f"{address}/24", "dev", name],
        ["link", "set", name, "mtu", str(PACKET_BYTES), "up"],
        ["link", "set", "lo", "up"],
    ):
        _ip("-n", namespace, *arguments)
    return device


class _Direction:
    """Packets from one device to another, each when it is due."""

    def __init__(self, source: int, target: int, link: Link) -> None:
        self._source, self._target, self._link = source, target, link
        self._due: deque[tuple[float, bytes]] = deque()
        self._arrived = threading.Condition()
        threading.Thread(target=self._take, daemon=True).start()
        threading.Thread(target=self._pass_on, daemon=True).start()

    def _take(self) -> None:
        sent_until = 0.0
        while True:
            packet = os.read(self._source, 1 << 16)
            sent_until = max(sent_until, time.monotonic())
            if self._link.rate:
                sent_until += len(packet) / self._link.rate
            with self._arrived:
                self._due.append((sent_until + self._link.delay, packet))
                self._arrived.notify()

    def _pass_on(self) -> None:
        while True:
            with self._arrived:
                while not self._due:
                    self._arrived.wait()
                due, packet = self._due.popleft()
            if (left := due - time.monotonic()) > 0:
                time.sleep(left)
            os.write(self._target, packet)


def _relay(link: Link) -> None:
    """Until it is ended."""
    first, second = (_open_device(f"adaptrt{at}", NAMESPACES[at], ADDRESSES[at]) for at in range(2))
    directions = [_Direction(first, second, link), _Direction(second, first, link)]
    print("ready", flush=True)
    sys.stdin.read()
    del directions


if __name__ == "__main__":
    _relay(Link("", float(sys.argv[1]), float(sys.argv[2])))
