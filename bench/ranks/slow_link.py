"""Two network namespaces with a link of a given delay and rate between them, as two machines have it.

The link is a TUN device in each namespace and two processes, one a direction, that pass packets on when they are due,
so that it needs no queueing discipline that a kernel may lack. It needs root and iproute2.

What the link costs the machine's CPUs is what a network card would do: packets are large, their checksums are neither
made nor looked at, and the processes are scheduled before all others, so that a packet is passed on when it is due.
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
"""Larger than Ethernet's, so that a process in Python keeps up with the rate."""
BUFFER_BYTES = 8 << 20
"""Of a socket in either direction, from its first byte on: more than any of the links holds, its rate times a round
trip, so that TCP's window is not what is measured."""
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x400454CA, 0x0001, 0x1000, 0x4000
_TUNSETOFFLOAD, _TUN_F_CSUM = 0x400454D0, 0x01
_PR_SET_PDEATHSIG = 1
_SETTINGS = {
    "tcp_rmem": f"4096 {BUFFER_BYTES} {2 * BUFFER_BYTES}",
    "tcp_wmem": f"4096 {BUFFER_BYTES} {2 * BUFFER_BYTES}",
    "tcp_slow_start_after_idle": "0",
    "tcp_no_metrics_save": "1",
}
"""Of each namespace, below net.ipv4."""


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
    """The namespaces, and processes of a run that was cut off, which would wait for each other without end."""
    for name in NAMESPACES:
        found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
        for process in found.stdout.split():
            with suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)
        subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL, check=False)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def _open_device(name: str, namespace: str, address: str) -> int:
    """A TUN device of the namespace; it is there as long as what is returned is open."""
    device = os.open("/dev/net/tun", os.O_RDWR)
    flags = _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
    # What a packet lacks of its checksum stands in a header before it, which the other device is given as well.
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
    """Packets from one device to another, each when it is due, until the process is ended."""
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
    """Until it is ended."""
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
    """Has the kernel kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    _relay(Link("", float(sys.argv[1]), float(sys.argv[2])))
