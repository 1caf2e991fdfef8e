"""The routes that load and unload adapters refuse requests without a name or a path."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.testclient import TestClient

from adaptrt.serve.app import make_app
from adaptrt.serve.metrics import ServiceMetrics
from adaptrt.serve.options import ServerOptions

BOTH = "Both 'lora_name' and 'lora_path' must be provided."
NEEDED = "'lora_name' needs to be provided to unload a LoRA adapter."
FIELD, SHORT = "Field required", "at least 1 character"


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/v1/load_lora_adapter", {}, BOTH),
        ("/v1/load_lora_adapter", {"lora_name": "a"}, BOTH),
        ("/v1/load_lora_adapter", {"lora_path": "/a"}, BOTH),
        ("/v1/load_lora_adapter", {"lora_name": "", "lora_path": "/a"}, BOTH),
        ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": ""}, BOTH),
        (
            "/v1/load_lora_adapter",
            {"lora_name": "a", "lora_path": "/a", "base_model_name": "other"},
            "base_model_name is 'other'; expected base",
        ),
        ("/v1/unload_lora_adapter", {}, NEEDED),
        ("/v1/unload_lora_adapter", {"lora_name": ""}, NEEDED),
        ("/load_lora_adapter", {"lora_name": "a"}, FIELD),
        ("/load_lora_adapter", {"lora_path": "/a"}, FIELD),
        ("/load_lora_adapter", {"lora_name": "", "lora_path": "/a"}, SHORT),
        ("/load_lora_adapter", {"lora_name": "a", "lora_path": ""}, SHORT),
        ("/unload_lora_adapter", {}, FIELD),
        ("/unload_lora_adapter", {"lora_name": ""}, SHORT),
    ],
)
def test_a_missing_name_or_path_is_refused_before_anything_is_done(path: str, body: dict[str, str], said: str) -> None:
    service: Any = SimpleNamespace(
        options=ServerOptions(enable_lora_loading=True), executor=SimpleNamespace(work=None), metrics=ServiceMetrics(),
        adapters=None, model_names=("base",),
    )  # fmt: skip
    answer = TestClient(make_app(service), base_url="http://localhost").post(path, json=body)
    assert answer.status_code == 400, answer.text
    assert said in answer.text
