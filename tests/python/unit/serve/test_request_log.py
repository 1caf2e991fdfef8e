"""One record per request: its surface, outcome, id, and log line."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from adaptrt.serve.app import respond
from adaptrt.serve.errors import ApiError
from adaptrt.serve.metrics import ServiceMetrics
from adaptrt.serve.records import GenerationRecord, current_request
from adaptrt.serve.request_log import RequestRecorder, surface_of


@pytest.fixture
def metrics() -> ServiceMetrics:
    return ServiceMetrics()


@pytest.fixture
def client(metrics: ServiceMetrics) -> TestClient:
    app = FastAPI()

    @app.get("/v1/answer/{status}")
    async def answer(status: int) -> Response:
        return Response(status_code=status)

    @app.get("/v2/stream/{reason}")
    async def stream(reason: str) -> Response:
        record = current_request.get()
        assert record is not None
        generation = GenerationRecord("line\nbreak", 5)
        record.generations.append(generation)

        async def parts() -> AsyncIterator[bytes]:
            generation.first_token = generation.began + 0.25
            yield b"a"
            generation.num_generated_tokens = 2
            generation.finish_reason = reason

        return StreamingResponse(parts())

    @app.get("/defect")
    async def defect() -> Response:
        raise ZeroDivisionError

    @app.post("/v1/refuse")
    async def refuse(request: Request) -> Response:
        record = current_request.get()
        assert record is not None
        record.name("of-field")
        return respond(request, ApiError("x", param="a\nb"))

    app.add_middleware(RequestRecorder, metrics=metrics, log_requests=True, respond=respond)
    return TestClient(app, raise_server_exceptions=False)


def counted(metrics: ServiceMetrics, surface: str, outcome: str) -> float | None:
    return metrics.registry.get_sample_value("adaptrt_requests_total", {"surface": surface, "outcome": outcome})


@pytest.mark.parametrize(
    ("path", "surface", "outcome"),
    [
        ("/v1/answer/200", "openai", "ok"),
        ("/v1/answer/404", "openai", "refused"),
        ("/v1/answer/429", "openai", "overloaded"),
        ("/v1/answer/499", "openai", "cancelled"),
        ("/v1/answer/503", "openai", "failed"),
        ("/v2/stream/length", "triton", "ok"),
        ("/v2/stream/error", "triton", "failed"),
        ("/defect", "other", "failed"),
        ("/nowhere", "other", "refused"),
    ],
)
def test_each_request_is_counted_once(
    client: TestClient, metrics: ServiceMetrics, path: str, surface: str, outcome: str
) -> None:
    client.get(path)
    assert counted(metrics, surface, outcome) == 1
    (family,) = (family for family in metrics.registry.collect() if family.name == "adaptrt_requests")
    assert sum(sample.value for sample in family.samples if sample.name == "adaptrt_requests_total") == 1


def test_a_line_says_what_became_of_it(client: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "adaptrt.requests")
    answer = client.get("/v2/stream/length?secret=1")
    (line,) = (record.getMessage() for record in caplog.records if record.name == "adaptrt.requests")
    assert line.startswith(
        f'id={answer.headers["x-request-id"]} route="GET /v2/stream/{{reason}}" status=200 outcome=ok '
    )
    for part in (
        r"adapter='line\nbreak'",
        "prompt_tokens=5",
        "generated_tokens=2",
        "finish_reason=length",
        "first_token_ms=25",
    ):
        assert part in line
    assert "\n" not in line
    assert "secret" not in line


def line_of(caplog: pytest.LogCaptureFixture) -> str:
    (line,) = (record.getMessage() for record in caplog.records if record.name == "adaptrt.requests")
    return line


def test_a_line_names_the_refused_field(client: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "adaptrt.requests")
    client.post("/v1/refuse")
    assert r" status=400 outcome=refused " in line_of(caplog)
    assert r" field='a\nb'" in line_of(caplog)


def test_a_client_may_name_its_request(client: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "adaptrt.requests")
    assert client.post("/v1/refuse").headers["x-request-id"] == "of-field"
    assert line_of(caplog).startswith("id=of-field ")
    for name in ("a", "~" * 128):
        assert client.post("/v1/refuse", headers={"X-Request-Id": name}).headers["x-request-id"] == name
    for name in ("", "a b", "~" * 129, "\x7f", "\xe4"):
        answer = client.get("/v1/answer/200", headers={"X-Request-Id": name.encode("latin-1")})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-request-id"), name
        assert answer.headers["x-request-id"] not in ("", name)


@pytest.mark.parametrize(
    ("path", "surface"),
    [
        ("/v1/chat/completions", "openai"),
        ("/v1/load_lora_adapter", "adapters"),
        ("/unload_lora_adapter", "adapters"),
        ("/api/chat", "ollama"),
        ("/api/state", "other"),
        ("/v2", "triton"),
        ("/v2x", "other"),
        ("/metrics", "other"),
    ],
)
def test_surfaces(path: str, surface: str) -> None:
    assert surface_of(path) == surface
