"""The schema at /openapi.json, the page at /docs, and web pages of other origins."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.testclient import TestClient

from adaptrt.serve.api_schema import BODIES
from adaptrt.serve.app import make_app
from adaptrt.serve.metrics import ServiceMetrics
from adaptrt.serve.ollama_fields import OllamaFields
from adaptrt.serve.ollama_models import OllamaShowRequest
from adaptrt.serve.openai_fields import CompletionRequest, ModelFields
from adaptrt.serve.options import ServerOptions
from adaptrt.serve.ray.affinity import _MODEL_PATHS

WITHOUT_JSON = {
    *("/ping", "/v1/responses/{response_id}/cancel", "/v1/files", "/v1/batches/{batch_id}/cancel"),
    *(
        "/reset_prefix_cache",
        "/api/pull",
        "/api/push",
        "/api/blobs/{digest}",
        "/lora-adapters",
        "/props",
        "/v1/upload_lora_adapter",
    ),
}


def client(**options: Any) -> TestClient:
    service: Any = SimpleNamespace(
        options=ServerOptions(**options), metrics=ServiceMetrics(),
        executor=SimpleNamespace(executor=SimpleNamespace(is_alive=True), work=None),
    )  # fmt: skip
    batches: Any = SimpleNamespace(store=None)
    return TestClient(make_app(service, batches), base_url="http://localhost")


@pytest.fixture(scope="module")
def schema() -> Any:
    answer = client(api_keys=("key",)).get("/openapi.json")  # it needs no key
    assert answer.status_code == 200
    return answer.json()


def test_every_route_with_a_body_shows_its_fields(schema: Any) -> None:
    posts = {path for path, operations in schema["paths"].items() if "post" in operations}
    triton = {path for path in posts if path.startswith("/v2/") and path not in BODIES}
    assert posts - WITHOUT_JSON - triton == BODIES.keys()
    for path, model in BODIES.items():
        body = schema["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert body == {"$ref": f"#/components/schemas/{model.__name__}"}
        shown = schema["components"]["schemas"][model.__name__]
        assert set(shown["properties"]) == {field.alias or name for name, field in model.model_fields.items()}


def test_replicas_know_the_routes_of_requests_that_name_adapters() -> None:
    """Requests with an adapter go to a replica that has it."""
    named = (ModelFields, OllamaFields, OllamaShowRequest)
    assert {path for path, model in BODIES.items() if issubclass(model, named)} == _MODEL_PATHS


def test_fields_have_types_bounds_defaults_and_docstrings(schema: Any) -> None:
    fields = schema["components"]["schemas"]["CompletionRequest"]
    assert fields["required"] == ["prompt"]
    assert fields["additionalProperties"] is False
    assert fields["description"] == CompletionRequest.__doc__
    assert fields["properties"]["top_p"] == {
        "default": 1.0, "exclusiveMinimum": 0, "maximum": 1, "title": "Top P", "type": "number",
    }  # fmt: skip
    assert fields["properties"]["temperature"]["description"] == "0: greedy decoding."
    assert schema["components"]["schemas"]["StreamOptions"]["properties"]["include_usage"]["description"] == (
        "True: the last event has the token counts."
    )


def test_every_reference_leads_somewhere(schema: Any) -> None:
    references = set(re.findall(r"'#/components/schemas/(\w+)'", str(schema)))
    assert "Error" in references
    assert references <= schema["components"]["schemas"].keys()


def test_the_page_has_every_field_and_loads_nothing(schema: Any) -> None:
    answer = client(api_keys=("key",)).get("/docs")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert not re.search(r"<script|<link|<img|@import|url\(|https?://", answer.text)
    for path, operations in schema["paths"].items():
        for method in operations:
            assert f"<code>{method.upper()} {path}</code>" in answer.text
    for model in BODIES.values():
        for name in schema["components"]["schemas"][model.__name__]["properties"]:
            assert f"<tr><td>{name}</td>" in answer.text
    row = re.search(r"<tr><td>max_tokens</td>.*?</tr>", answer.text)
    assert row is not None
    assert row[0].startswith(
        "<tr><td>max_tokens</td><td>integer</td><td>16</td><td>0: no answer, only the prompt&#x27;s"
    )


def test_schema_and_page_can_be_turned_off() -> None:
    off = client(disable_fastapi_docs=True)
    assert [off.get(path).status_code for path in ("/docs", "/openapi.json")] == [404, 404]


def test_pages_of_allowed_origins_may_use_the_server() -> None:
    served = client(allowed_origins=("https://app.example.com",), api_keys=("key",))
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    preflight = served.options("/v1/completions", headers={"Origin": "https://app.example.com", **asked})
    assert (preflight.status_code, preflight.headers["access-control-allow-origin"]) == (200, "https://app.example.com")
    assert preflight.headers["access-control-allow-headers"] == "authorization,content-type"
    assert "access-control-allow-credentials" not in preflight.headers
    other = served.options("/v1/completions", headers={"Origin": "https://other.example.com", **asked})
    assert "access-control-allow-origin" not in other.headers
    # A refused key can be read by the page too.
    refused = served.get("/v1/models", headers={"Origin": "https://app.example.com"})
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "https://app.example.com")
    assert "X-Request-Id" in refused.headers["access-control-expose-headers"]
    # Adapters are changed only by pages of --allowed_hosts.
    load = served.post(
        "/v1/load_lora_adapter", json={}, headers={"Origin": "https://app.example.com", "Authorization": "Bearer key"}
    )
    assert (load.status_code, "accepted where adapters change" in load.text) == (403, True)


def test_without_the_flag_no_page_of_another_origin_may() -> None:
    answer = client().get("/health", headers={"Origin": "https://app.example.com"})
    assert (answer.status_code, "access-control-allow-origin" in answer.headers) == (200, False)
