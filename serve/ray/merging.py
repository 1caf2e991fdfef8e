"""Merges the answers of all replicas into one, for routes where each replica knows only a part of the answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import parse_qsl, urlencode

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from pydantic import ValidationError
from starlette.responses import Response

from ..adapter_list import LIST_PATH, MAX_ROWS, AdaptersQuery
from ..errors import ApiError
from ..http import error_response
from ..ollama_models import PS_PATH, TAGS_PATH
from ..prefix_cache_routes import RESET_PATH
from ..residency import Level
from .forwarding import ForwardedRequest, WholeAnswer

METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_MODELS: Final = "/v1/models"
_LEVELS: Final = [Level.DEVICE, Level.HOST, Level.DISK]
"""Levels of the list of adapters, the best one first."""

Merge = Callable[[Sequence[WholeAnswer]], Response]


def merge_of(method: str, path: str, query_string: bytes = b"") -> Merge | None:
    """Returns the function that merges the answers to asked_of_each(); None: any single replica can answer."""
    if method == "GET" and path == "/metrics":
        return merged_metrics
    if method == "GET" and path == _MODELS:
        return _merged_models
    if method == "GET" and path == LIST_PATH:
        query = _adapters_query(query_string)
        return partial(_merged_adapters, query or AdaptersQuery.model_validate({}))
    if method == "GET" and path.startswith(f"{_MODELS}/"):
        return _first_found
    if method == "GET" and path in (TAGS_PATH, PS_PATH):
        return _merged_tags
    if method == "POST" and path == "/v2/repository/index":
        return _merged_index
    if method == "POST" and path == RESET_PATH:
        return _all_done
    return None


def asked_of_each(request: ForwardedRequest) -> ForwardedRequest:
    """Returns the request that each replica gets. Rows of the list of adapters are chosen after merging."""
    query = _adapters_query(request.query_string) if request.path == LIST_PATH else None
    if query is None:
        return request
    asked = {"limit": str(MAX_ROWS)} | ({} if query.name is None else {"name": query.name})
    return replace(request, query_string=urlencode(asked).encode())


def _adapters_query(query_string: bytes) -> AdaptersQuery | None:
    """Returns the query of the list of adapters; None: replicas refuse it."""
    fields = parse_qsl(query_string.decode("latin-1"), keep_blank_values=True)
    try:
        return AdaptersQuery.model_validate(dict(fields)) if len(dict(fields)) == len(fields) else None
    except ValidationError:
        return None


def merged_metrics(answers: Sequence[WholeAnswer]) -> Response:
    """Merges all replicas' samples; a label `replica` tells them apart."""
    refusal = _refusal(answers)
    if refusal is not None:
        return refusal
    families: dict[str, Metric] = {}
    for answer in sorted(answers, key=lambda one: one.replica):
        for family in text_string_to_metric_families(answer.body.decode()):
            merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            merged.samples += [
                sample._replace(labels={"replica": answer.replica, **sample.labels}) for sample in family.samples
            ]
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(list(families.values())))
    return Response(generate_latest(registry), headers={"Content-Type": METRICS_TYPE})


class _Families(Collector):
    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Sequence[Metric]:
        return self._families


def _merged_models(answers: Sequence[WholeAnswer]) -> Response:
    return _merged_json(answers, lambda content: content["data"], "id", lambda rows: {"object": "list", "data": rows})


def _merged_tags(answers: Sequence[WholeAnswer]) -> Response:
    return _merged_json(answers, lambda content: content["models"], "name", lambda rows: {"models": rows})


def _merged_index(answers: Sequence[WholeAnswer]) -> Response:
    return _merged_json(answers, lambda content: content, "name", lambda rows: rows)


def _merged_json(
    answers: Sequence[WholeAnswer],
    rows_of: Callable[[Any], Sequence[dict[str, Any]]],
    key: str,
    content_of: Callable[[list[dict[str, Any]]], Any],
) -> Response:
    refusal = _refusal(answers)
    if refusal is not None:
        return refusal
    rows: dict[str, dict[str, Any]] = {}
    for answer in answers:
        for row in rows_of(json.loads(answer.body)):
            rows.setdefault(row[key], row)
    return Response(json.dumps(content_of(list(rows.values())), ensure_ascii=False), media_type="application/json")


def _merged_adapters(query: AdaptersQuery, answers: Sequence[WholeAnswer]) -> Response:
    """Merges lists of adapters. A version that several replicas have is one row, with all of its users and bytes in
    memory, and its best level.
    """
    refusal = _refusal(answers)
    if refusal is not None:
        return refusal
    lists = [json.loads(answer.body) for answer in sorted(answers, key=lambda one: one.replica)]
    total = max(content["total"] for content in lists)
    if total > MAX_ROWS < query.first + query.limit:
        said = f"first + limit is {query.first + query.limit}; expected at most {MAX_ROWS} on replicas"
        return error_response(ApiError(said, param="limit"))
    merged: dict[str, dict[str, Any]] = {}
    current = {
        row["name"]: row["id"] for content in lists for row in content["data"] if row["current"] and row["digest"]
    }
    for content in lists:
        for row in content["data"]:
            # A replica that has not read the digest yet has the version that others have.
            key = row["id"] if row["digest"] else current.get(row["name"], row["id"])
            merged[key] = _merged_row(merged[key], row) if key in merged else {**row, "replicas": 1}
    rows = [*merged.values()]
    shown = rows[query.first : query.first + query.limit]
    body = {"object": "list", "data": shown, "total": max(total, len(rows))}
    return Response(json.dumps(body, ensure_ascii=False), media_type="application/json")


def _merged_row(row: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    whole, part = (row, other) if row["digest"] else (other, row)
    merged = {name: part[name] if value is None else value for name, value in whole.items() if name in part}
    return {
        **merged,
        "current": row["current"] or other["current"],
        "host_bytes": _sum(row["host_bytes"], other["host_bytes"]),
        "device_pages": _sum(row["device_pages"], other["device_pages"]),
        "level": min(row["level"], other["level"], key=_LEVELS.index),
        "pinned": row["pinned"] or other["pinned"],
        "users": row["users"] + other["users"],
        "created": min(row["created"], other["created"]),
        "last_used": max((row["last_used"], other["last_used"]), key=lambda used: used or 0),
        "replicas": row["replicas"] + 1,
    }


def _sum(one: int | None, other: int | None) -> int | None:
    return other if one is None else one + (other or 0)


def _all_done(answers: Sequence[WholeAnswer]) -> Response:
    return _refusal(answers) or _same(answers[0])


def _first_found(answers: Sequence[WholeAnswer]) -> Response:
    return _same(next((answer for answer in answers if answer.status == HTTPStatus.OK), answers[0]))


def _refusal(answers: Sequence[WholeAnswer]) -> Response | None:
    """Returns the first refusal. All replicas refuse the same requests, for example those without a key."""
    return next((_same(answer) for answer in answers if answer.status != HTTPStatus.OK), None)


def _same(answer: WholeAnswer) -> Response:
    response = Response(answer.body, status_code=answer.status)
    response.raw_headers = list(answer.headers)
    return response
