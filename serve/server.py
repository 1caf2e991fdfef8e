"""The server's process: opens the service on the loop, listens, and ends in good order."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Final

import uvicorn

from .._core import ConfigError
from ..runtime.executor import Executor
from .app import make_app
from .options import ServerOptions
from .service import Service

KEEP_ALIVE_SECONDS: Final = 75
BACKLOG: Final = 2048


def serve(executor: Executor, options: ServerOptions, *, on_ready: Callable[[str], None] | None = None) -> None:
    """Serves until SIGTERM or SIGINT: what runs is finished within limits.shutdown_seconds, what comes is refused.

    Shuts the executor down. `on_ready` is told the address. Raises ConfigError when it cannot listen there, ApiError
    for an adapter of lora_modules that cannot be served.
    """
    asyncio.run(_serve(executor, options, on_ready))


async def _serve(executor: Executor, options: ServerOptions, on_ready: Callable[[str], None] | None) -> None:
    listening = _listen(options)
    service = await Service.open(executor, options)
    try:
        config = uvicorn.Config(
            make_app(service),
            http="h11",
            lifespan="off",
            access_log=False,  # request_log writes a line that says more
            log_level="info",
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=round(options.limits.shutdown_seconds),
            h11_max_incomplete_event_size=options.limits.max_header_bytes,
        )
        server = uvicorn.Server(config)
        host, port = listening.getsockname()[:2]
        if on_ready is not None:
            on_ready(f"http://{f'[{host}]' if ':' in host else host}:{port}")
        await server.serve(sockets=[listening])
    finally:
        listening.close()
        await service.close()


def _listen(options: ServerOptions) -> socket.socket:
    """Bound before anything else is done, so that a port that is taken is said at once."""
    place = f"{options.host}:{options.port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            listening.listen(BACKLOG)
            listening.setblocking(False)
        except BaseException:
            listening.close()
            raise
    except (OSError, OverflowError, UnicodeError) as error:
        raise ConfigError(f"cannot listen on {place}: {error}") from error
    return listening
