"""Merges the answers of all replicas into one, for routes where each replica knows only a part of the answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any, Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from starlette.responses import Response

from ..ollama_models import PS_PATH, TAGS_PATH
from ..prefix_cache_routes import RESET_PATH
from .forwarding import WholeAnswer

METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_MODELS: Final = "/v1/models"

Merge = Callable[[Sequence[WholeAnswer]], Response]


def merge_of(method: str, path: str) -> Merge | None:
    """Returns the function that merges the answers to a request; None: any single replica can answer."""
    if method == "GET" and path == "/metrics":
        return merged_metrics
    if method == "GET" and path == _MODELS:
        return _merged_models
    if method == "GET" and path.startswith(f"{_MODELS}/"):
        return _first_found
    if method == "GET" and path in (TAGS_PATH, PS_PATH):
        return _merged_tags
    if method == "POST" and path == "/v2/repository/index":
        return _merged_index
    if method == "POST" and path == RESET_PATH:
        return _all_done
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
