"""Runs the server's process: opens the service, listens, and shuts down in order."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any, Final

import uvicorn
import uvloop

from .._core import ConfigError
from ..runtime.executor import Executor
from .app import make_app
from .batches import Batches, answer_line_of
from .connections import ConnectionWatch
from .options import ServerOptions, num_connections
from .protocol import LimitedHttpProtocol
from .service import Service

BACKLOG: Final = 2048


def serve(
    executor: Executor,
    options: ServerOptions,
    *,
    listening: socket.socket | None = None,
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Serves until SIGTERM or SIGINT. Then it rejects new requests; running ones may finish within
    limits.shutdown_seconds.

    Shuts the executor down and closes `listening`, a socket from bind(). on_ready: called with the address. Raises
    ConfigError if it cannot listen there, and for an adapter of lora_modules that cannot be served.
    """
    uvloop.run(_serve(executor, options, bind(options) if listening is None else listening, on_ready))


async def _serve(
    executor: Executor, options: ServerOptions, listening: socket.socket, on_ready: Callable[[str], None] | None
) -> None:
    _listen(listening, options)
    service = await Service.open(executor, options)
    # Objects that live until the end are excluded from garbage collections, which stop the loop.
    gc.collect()
    gc.freeze()

    class Protocol(LimitedHttpProtocol):
        max_head_bytes = options.limits.max_header_bytes
        watch = ConnectionWatch(options.limits, num_connections(options.limits))

    batches: Batches | None = None
    try:
        if options.batch_dir is not None:
            batches = await Batches.open(answer_line_of(service), options.limits, options.batch_dir)
        config = uvicorn.Config(
            make_app(service, batches),
            http=Protocol,
            lifespan="off",
            access_log=False,  # request_log writes a more detailed line
            log_level="info",
            server_header=False,
            date_header=False,  # request_log sets it: uvicorn's own needs the loop that _Server replaces
            timeout_graceful_shutdown=round(options.limits.shutdown_seconds),
        )
        server = _Server(config)
        gate = service.executor.gate
        if gate is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, lambda: server.start_task(gate.reload()))
        host, port = listening.getsockname()[:2]
        if on_ready is not None:
            on_ready(f"http://{f'[{host}]' if ':' in host else host}:{port}")
        await server.serve(sockets=[listening])
    finally:
        listening.close()
        if batches is not None:
            await batches.close()
        await service.close()
        gc.unfreeze()


class _Server(uvicorn.Server):
    """Sleeps until a signal arrives. uvicorn's own loop checks ten times per second."""

    def __init__(self, config: uvicorn.Config) -> None:
        """Must be called on the loop."""
        super().__init__(config)
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def start_task(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs something while the server runs."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def main_loop(self) -> None:
        await self._ended.wait()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        self._loop.call_soon_threadsafe(self._ended.set)


def bind(options: ServerOptions) -> socket.socket:
    """Returns a socket bound to the server's address; serve() listens on it.

    Called before an engine is built, so a port that is in use is found early. Clients cannot connect before serve()
    listens. Raises ConfigError for an address that cannot be bound.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            bound.setblocking(False)
        except BaseException:
            bound.close()
            raise
    except (OSError, OverflowError, UnicodeError) as error:
        raise _no_place(options, error) from error
    return bound


def _listen(bound: socket.socket, options: ServerOptions) -> None:
    """Listens. Raises ConfigError if another process that was bound at the same time listens already."""
    try:
        bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        raise _no_place(options, error) from error


def _no_place(options: ServerOptions, error: Exception) -> ConfigError:
    return ConfigError(f"cannot listen on {options.host}:{options.port}: {error}; expected a free host and port")
