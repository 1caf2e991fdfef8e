"""POST /reset_prefix_cache with a fake executor."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.testclient import TestClient

from adaptrt._core import ExecutorClosedError
from adaptrt.serve.app import make_app
from adaptrt.serve.metrics import ServiceMetrics
from adaptrt.serve.options import ServerOptions


class MadeUpServer:
    """The part of a service that the route uses, and a client."""

    def __init__(self, **options: Any) -> None:
        self.num_resets = 0
        self.is_alive = True
        service: Any = SimpleNamespace(
            options=ServerOptions(**options), metrics=ServiceMetrics(),
            executor=SimpleNamespace(executor=SimpleNamespace(reset_prefix_cache=self._reset)),
        )  # fmt: skip
        self.client = TestClient(make_app(service), base_url="http://localhost")

    def _reset(self) -> None:
        if not self.is_alive:
            raise ExecutorClosedError("the executor was shut down")
        self.num_resets += 1


def test_it_resets_the_prefix_cache() -> None:
    server = MadeUpServer()
    for query in ("", "?reset_running_requests=false&reset_external=false"):
        answer = server.client.post(f"/reset_prefix_cache{query}")
        assert (answer.status_code, answer.content) == (200, b"")
    assert server.num_resets == 2


@pytest.mark.parametrize("name", ["reset_running_requests", "reset_external", "other"])
def test_what_it_cannot_do_is_refused(name: str) -> None:
    server = MadeUpServer()
    answer = server.client.post(f"/reset_prefix_cache?{name}=true")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
    assert server.num_resets == 0


def test_it_needs_the_key_and_no_other_sites_page_may_call_it() -> None:
    server = MadeUpServer(api_keys=("secret",))
    assert server.client.post("/reset_prefix_cache").status_code == 401
    headers = {"Authorization": "Bearer secret"}
    page = {**headers, "Origin": "https://elsewhere.example"}
    assert server.client.post("/reset_prefix_cache", headers=page).status_code == 403
    assert server.num_resets == 0
    assert server.client.post("/reset_prefix_cache", headers=headers).status_code == 200


def test_without_an_executor_it_is_unavailable() -> None:
    server = MadeUpServer()
    server.is_alive = False
    assert server.client.post("/reset_prefix_cache").status_code == 503
