"""What a server is started with."""

from __future__ import annotations

import resource
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from .._core import ConfigError
from ..runtime.template_limits import DEFAULT_LIMITS, TemplateLimits
from .places import Place

DEFAULT_PORT: Final = 8000
"""vLLM's, which clients' examples have."""
MOST_CONNECTIONS: Final = 8192
"""Connections at a time, unless a server is told otherwise."""
MAX_JSON_DEPTH: Final = 256
"""Highest limit of JSON's levels: Python's parser recurses, and may be called some hundred frames deep."""
OTHER_FILES: Final = 128
"""Files that a process may need open in addition to its connections: engines, adapters, pipes, its log."""


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """What a client may ask for."""

    max_body_bytes: int = 32 << 20
    max_json_bytes: int = 8 << 20
    """Size of the JSON in a body; tensors behind it may fill the rest of max_body_bytes."""
    max_json_items: int = 300_000
    """Items of all lists and objects in a body's JSON."""
    max_json_depth: int = 64
    """Levels of lists and objects in a body's JSON, the outermost included."""
    max_header_bytes: int = 64 << 10
    """Of a request's line and headers together."""
    max_prompts: int = 1024
    """In one request."""
    max_answers: int = 1024
    """Prompts times n of one request."""
    max_log_probs: int = 1 << 20
    """Log probs that a request asks for: each token's own, and those of the most likely tokens at its place."""
    max_prompt_log_probs: int = 1 << 16
    """The same for one prompt, with echo."""
    max_tokenize_tokens: int = 1 << 18
    """Tokens of a text that POST /tokenize takes; more where the engine's longest prompt has more."""
    max_template_bytes: int = DEFAULT_LIMITS.max_work
    """Bytes that the expressions of a chat template make for one prompt."""
    max_template_seconds: float = DEFAULT_LIMITS.max_seconds
    """Time in which a chat template has to write a prompt."""
    max_request_seconds: float = 600.0
    """A request that takes longer ends with what it has; 0: no limit."""
    shutdown_seconds: float = 30.0
    """How long what runs may go on after SIGTERM."""
    max_connections: int | None = None
    """Connections at a time. None: as many as num_connections() allows."""
    header_seconds: float = 30.0
    """Time for a request's head, from the connection's start or from the head's first byte."""
    body_seconds: float = 300.0
    """Time for a request's body, from the end of its head."""
    keep_alive_seconds: float = 75.0
    """Time that a connection may be idle between two requests."""
    write_seconds: float = 60.0
    """Time in which a client has to read some of the answer that waits for it."""
    adapter_threads: int = 4
    """Threads that read and convert adapters."""
    guide_threads: int = 2
    """Threads that compile guides."""
    text_threads: int = 2
    """Threads that tokenise and detokenise long texts."""
    template_threads: int = 2
    """Threads that render chat templates."""
    file_threads: int = 4
    """Threads that look for adapters and read tokenizers and chat templates."""
    max_waiting_work: int = 1024
    """Calls that may wait for the threads of one kind; others are answered with 429."""

    @property
    def template(self) -> TemplateLimits:
        """Limits of chat templates."""
        return TemplateLimits(max_work=self.max_template_bytes, max_seconds=self.max_template_seconds)


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Flags of `adaptrt serve` that are not the engine's."""

    host: str = "127.0.0.1"
    """Address to listen on; empty: another process listens."""
    port: int = DEFAULT_PORT
    """0: one that is free."""
    served_model_name: tuple[str, ...] = ()
    """Names of the base model; (): that of its directory."""
    api_keys: tuple[str, ...] = ()
    """(): none is asked for."""
    allowed_hosts: tuple[Place, ...] = ()
    """Names that clients may reach the server under, such as a reverse proxy's, where they load adapters."""
    adapter_roots: tuple[Path, ...] = ()
    enable_lora_loading: bool = False
    lora_modules: tuple[tuple[str, Path], ...] = ()
    """Adapters that are added at the start, by name, wherever they lie."""
    tool_call_parser: str | None = None
    log_requests: bool = False
    pooling_type: str | None = None
    """Of embeddings; None: what the model says."""
    normalize_embeddings: bool | None = None
    """None: what the model says."""
    cut_embeddings: bool = False
    """Clients may ask for fewer dimensions: the model was trained so that the first ones are embeddings as well."""
    limits: ServerLimits = field(default_factory=ServerLimits)


def num_connections(limits: ServerLimits) -> int:
    """Connections that a server accepts at a time. Raises ConfigError if the process may not open so many files."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = MOST_CONNECTIONS if files == resource.RLIM_INFINITY else files - OTHER_FILES
    if allowed < 1:
        raise ConfigError(f"the limit of open files is {files}; expected at least {OTHER_FILES + 1} (ulimit -n)")
    if limits.max_connections is None:
        return min(allowed, MOST_CONNECTIONS)
    if files != resource.RLIM_INFINITY and limits.max_connections > allowed:
        raise ConfigError(
            f"max_connections is {limits.max_connections}; expected at most {allowed}: the limit of open files is "
            f"{files} (ulimit -n), and {OTHER_FILES} are for other files"
        )
    return limits.max_connections
