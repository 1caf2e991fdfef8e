"""Creates two network namespaces, joined by a link with a given delay and rate, to emulate two machines.

The link is a TUN device in each namespace, and one process per direction that forwards packets when they are due. So it
needs no queueing discipline, which some kernels lack. It needs root and iproute2.

The link's load on the CPUs is similar to that of a network card: packets are large, their checksums are neither
computed nor verified, and the forwarding processes have the highest priority, so that packets are on time.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import os
import select
import signal
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

NAMESPACES = ("adaptrt-a", "adaptrt-b")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
PACKET_BYTES = 60000
"""Larger than Ethernet's packets, so that a Python process keeps up with the rate."""
BUFFER_BYTES = 8 << 20
"""Initial socket buffer size per direction. It is larger than rate times round trip of any link, so that TCP's window
is not the limit."""
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x400454CA, 0x0001, 0x1000, 0x4000
_TUNSETOFFLOAD, _TUN_F_CSUM = 0x400454D0, 0x01
_PR_SET_PDEATHSIG = 1
_SETTINGS = {
    "tcp_rmem": f"4096 {BUFFER_BYTES} {2 * BUFFER_BYTES}",
    "tcp_wmem": f"4096 {BUFFER_BYTES} {2 * BUFFER_BYTES}",
    "tcp_slow_start_after_idle": "0",
    "tcp_no_metrics_save": "1",
}
"""Settings of each namespace under net.ipv4."""


@dataclass(frozen=True)
class Link:
    """A network in which a message of n bytes arrives delay + n / rate seconds after it is sent."""

    name: str
    delay: float
    """Seconds in one direction."""
    rate: float
    """Bytes per second in each direction; 0: as fast as packets are forwarded."""


@contextmanager
def two_hosts(link: Link) -> Iterator[None]:
    """Creates the namespaces NAMESPACES with ADDRESSES, joined by the link."""
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
    """Writes a program with which mpirun starts the second host's processes, like ssh: [-x] HOST COMMAND..."""
    path = directory / "in_namespace"
    path.write_text(
        '#!/bin/sh\nwhile [ "${1#-}" != "$1" ]; do shift; done\nshift\n'
        f'exec ip netns exec {NAMESPACES[1]} sh -c "$*"\n'
    )
    path.chmod(0o755)
    return path


def _remove() -> None:
    """Removes the namespaces, and processes of an interrupted run, which would wait for each other indefinitely."""
    for name in NAMESPACES:
        found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
        for process in found.stdout.split():
            with suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)
        subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL, check=False)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def _open_device(name: str, namespace: str, address: str) -> int:
    """Opens a TUN device of the namespace; it exists as long as the returned descriptor is open."""
    device = os.open("/dev/net/tun", os.O_RDWR)
    flags = _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
    # A header before the packet describes its missing checksum; the other device gets the header too.
    fcntl.ioctl(device, _TUNSETOFFLOAD, _TUN_F_CSUM)
    _ip("netns", "add", namespace)
    _ip("link", "set", name, "netns", namespace)
    for arguments in (
        ["addr", "add", f"{address}/24", "dev", name],
        ["link", "set", name, "mtu", str(PACKET_BYTES), "up"],
        ["link", "set", "lo", "up"],
    ):
        _ip("-n", namespace, *arguments)
    for setting, value in _SETTINGS.items():
        _ip("netns", "exec", namespace, "sh", "-c", f"echo '{value}' > /proc/sys/net/ipv4/{setting}")
    return device


def _pass_on(source: int, target: int, link: Link) -> NoReturn:
    """Forwards packets from one device to another, each when it is due, until the process is ended."""
    due: deque[tuple[float, bytes]] = deque()
    sent_until = 0.0
    while True:
        wait = max(0.0, due[0][0] - time.monotonic()) if due else None
        readable, _, _ = select.select([source], [], [], wait)
        now = time.monotonic()
        if readable:
            packet = os.read(source, 1 << 16)
            sent_until = max(sent_until, now)
            if link.rate:
                sent_until += len(packet) / link.rate
            due.append((sent_until + link.delay, packet))
        while due and due[0][0] <= now:
            os.write(target, due.popleft()[1])


def _relay(link: Link) -> None:
    """Forwards in both directions until it is ended."""
    first, second = (_open_device(f"adaptrt{at}", NAMESPACES[at], ADDRESSES[at]) for at in range(2))
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    gc.disable()
    parent = os.getpid()
    other = os.fork()
    if other == 0:
        _end_with(parent)
        _pass_on(second, first, link)
    print("ready", flush=True)
    _pass_on(first, second, link)


def _end_with(parent: int) -> None:
    """Makes the kernel kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    _relay(Link("", float(sys.argv[1]), float(sys.argv[2])))
