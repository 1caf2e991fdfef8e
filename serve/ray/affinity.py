"""Finds the adapter or the stored response of a request, to choose a replica. The replica itself checks the request."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Collection
from typing import Any, Final

from ...runtime.adapter_versions import parse_version
from .. import llama_routes, messages, ollama_models, ollama_routes
from ..adapter_names import is_name
from ..errors import ApiError
from ..http import check_json_size
from ..ollama_fields import plain_name
from ..options import ServerLimits
from ..response_store import home_in

NUM_GROUPS: Final = 4096
"""Number of groups of adapters. Requests are routed by group, not by adapter: Ray keeps state for each id that it ever
routed by, and clients may send any number of names.
"""
_ADAPTER_FIELDS: Final = ("adapter_id", "lora_path", "model")
_MODEL_PATHS: Final = frozenset(
    {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        messages.PATH,
        messages.COUNT_PATH,
        ollama_routes.CHAT_PATH,
        ollama_routes.GENERATE_PATH,
        ollama_routes.EMBED_PATH,
        ollama_routes.EMBEDDINGS_PATH,
        ollama_models.SHOW_PATH,
        "/v1/embeddings",
        "/classify",
        "/pooling",
        "/score",
        "/v1/score",
        "/rerank",
        "/v1/rerank",
        "/v2/rerank",
        "/tokenize",
        "/detokenize",
        *llama_routes.PATHS,
    }
)
"""Paths whose bodies name a model."""
_RESPONSES: Final = "/v1/responses"
_PREVIOUS: Final = "previous_response_id"
_TRITON_PATH: Final = re.compile(r"/v2/models/(.+?)(?:/versions/[^/]+)?/(?:infer|generate|generate_stream)")


def group_of(adapter: str) -> str:
    """Returns the multiplexed model id by which requests with an adapter are routed, the same in every process."""
    return f"adapters-{zlib.crc32(adapter.encode()) % NUM_GROUPS}"


def adapter_named(path: str, body: bytes, model_names: Collection[str], limits: ServerLimits) -> str | None:
    """Returns the adapter of a request; None: the base model, or a request that a replica will reject.

    model_names: names of the base model, which may also precede an adapter's name and a colon.
    """
    named = _TRITON_PATH.fullmatch(path)
    if named is not None:
        return _without_base(named.group(1), model_names)
    if path not in _MODEL_PATHS:
        return None
    try:
        check_json_size(body, limits)
        fields: Any = json.loads(body)
    except (ApiError, ValueError, RecursionError):
        return None
    if not isinstance(fields, dict):
        return None
    lora_request = fields.get("lora_request")
    asked = lora_request.get("lora_name") if isinstance(lora_request, dict) else None
    for name in (asked, *map(fields.get, _ADAPTER_FIELDS)):
        adapter = _without_base(_untagged(path, name), model_names)
        if adapter is not None:
            return adapter
    return None


def _untagged(path: str, name: Any) -> Any:
    is_tagged = isinstance(name, str) and ollama_routes.is_ollama_path(path)
    return plain_name(name) if is_tagged else name


def home_named(path: str, body: bytes, limits: ServerLimits) -> str:
    """Returns the home of the stored response that a request names; "": it names none."""
    if path.startswith(f"{_RESPONSES}/"):
        return home_in(path.removeprefix(f"{_RESPONSES}/").partition("/")[0])
    if path != _RESPONSES or _PREVIOUS.encode() not in body:
        return ""
    try:
        check_json_size(body, limits)
        fields: Any = json.loads(body)
    except (ApiError, ValueError, RecursionError):
        return ""
    named = fields.get(_PREVIOUS) if isinstance(fields, dict) else None
    return home_in(named) if isinstance(named, str) else ""


def _without_base(model: Any, model_names: Collection[str]) -> str | None:
    if not isinstance(model, str) or model in model_names:
        return None
    base, colon, adapter = model.partition(":")
    name = adapter if colon and base in model_names else model
    # All versions of an adapter have one place.
    version = parse_version(name)
    name = name if version is None else version[0]
    return name if is_name(name) else None
