"""The coordinator of adapters: files of a sent adapter cross to each replica once, and changes go without them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

pytest.importorskip("ray", reason="ray is not installed")

from adaptrt.runtime.adapter_versions import VersionLimits
from adaptrt.serve.ray import coordinator as module
from adaptrt.serve.ray.adapter_changes import AdapterChange, Outcome, Refusal
from adaptrt.serve.ray.calls import Answers
from adaptrt.serve.ray.coordinator import AdapterCoordinator

FILES = (("adapter_config.json", b"{}"), ("adapter_model.safetensors", b"abc"))


class Replicas:
    """Two replicas that answer every call."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.refusal: Refusal | None = None
        self.failures: list[Exception] = []

    async def call_all(self, _: Any, method: str, *args: Any, seconds: float) -> Answers:
        assert seconds > 0
        if method == "followed":
            return Answers()
        self.calls.append((method, *args))
        outcomes = [Outcome("r1", self.refusal if method == "check" else None), Outcome("r2")]
        return Answers(outcomes, self.failures if method == "check" else [])


def run(monkeypatch: pytest.MonkeyPatch, body: Callable[[AdapterCoordinator, Replicas], Awaitable[None]]) -> None:
    replicas = Replicas()
    monkeypatch.setattr(module.serve, "get_deployment_handle", lambda _: None)
    monkeypatch.setattr(module, "call_all", replicas.call_all)

    async def main() -> None:
        await body(AdapterCoordinator("Replica", VersionLimits()), replicas)

    asyncio.run(main())


def test_files_cross_once(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = AdapterChange("x", None, digest="d", files=FILES)

    async def body(coordinator: AdapterCoordinator, replicas: Replicas) -> None:
        assert await coordinator.change(wanted) is None
        (checks, checked), (follows, (followed,)) = replicas.calls
        assert (checks, checked.files, follows, followed.files) == ("check", FILES, "follow", ())
        assert (followed.number, followed.digest) == (1, "d")
        (change,) = await coordinator.since(0, 0.01)
        assert change == followed
        # A replica that started later asks for them.
        assert await coordinator.files("d") == FILES
        assert await coordinator.files("e") == ()

    run(monkeypatch, body)


def test_replicas_forget_files_of_a_refused_change(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = AdapterChange("x", None, digest="d", files=FILES)

    async def body(coordinator: AdapterCoordinator, replicas: Replicas) -> None:
        replicas.refusal = Refusal("no room", 507, "BadRequestError", None)
        refusal = await coordinator.change(wanted)
        assert refusal is not None
        assert refusal.status == 507
        assert [method for method, *_ in replicas.calls] == ["check", "forget"]
        assert replicas.calls[-1] == ("forget", "d")
        assert await coordinator.files("d") == ()
        # There is nothing to forget about an adapter in a directory.
        assert await coordinator.change(AdapterChange("x", "/a")) is not None
        assert [method for method, *_ in replicas.calls[2:]] == ["check"]
        # A replica that does not answer forgets before its next check.
        replicas.failures = [ValueError("a defect")]
        refusal = await coordinator.change(wanted)
        assert refusal is not None
        assert refusal.status == 503
        assert [method for method, *_ in replicas.calls[3:]] == ["check"]

    run(monkeypatch, body)


def test_an_adapter_that_nobody_knows_is_not_unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(coordinator: AdapterCoordinator, replicas: Replicas) -> None:
        refusal = await coordinator.change(AdapterChange("x", None))
        assert refusal is not None
        assert refusal.status == 404
        assert [method for method, *_ in replicas.calls] == ["check"]

    run(monkeypatch, body)
