"""What a server is started with."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

DEFAULT_PORT: Final = 8000
"""vLLM's, which clients' examples have."""


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """What a client may ask for."""

    max_body_bytes: int = 32 << 20
    max_header_bytes: int = 64 << 10
    """Of a request's line and headers together."""
    max_json_depth: int = 64
    max_prompts: int = 1024
    """In one request."""
    max_request_seconds: float = 600.0
    """A request that takes longer ends with what it has; 0: no limit."""
    shutdown_seconds: float = 30.0
    """How long what runs may go on after SIGTERM."""


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Flags of `adaptrt serve` that are not the engine's."""

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    """0: one that is free."""
    served_model_name: tuple[str, ...] = ()
    """Names of the base model; (): that of its directory."""
    api_keys: tuple[str, ...] = ()
    """(): none is asked for."""
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
