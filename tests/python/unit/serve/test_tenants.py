"""The file of tenants: what it gives, and the errors of files that cannot be used."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from adaptrt._core import ConfigError, Request
from adaptrt.serve.adapters import ServedAdapters
from adaptrt.serve.errors import ApiError
from adaptrt.serve.options import ServerOptions
from adaptrt.serve.records import RequestRecord, current_request
from adaptrt.serve.tenant_gate import TenantGate
from adaptrt.serve.tenant_metrics import tenant_metrics
from adaptrt.serve.tenants import OTHERS, Tenant, read_tenants

KEYS = ("sk-one", "sk-two", "sk-three")
FULL = {
    "tenants": {
        "acme": {
            "api_keys": ["sk-two"],
            "adapters": ["acme/*"],
            "weight": 2.5,
            "tokens_per_minute": 60000,
            "max_requests": 4,
            "first_token_seconds": 1.5,
        },
        "lab": {"adapters": ["poet", "acme/lab"]},
    },
    "others": {"max_requests": 1},
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "tenants.json"


def test_the_key_decides_or_else_the_adapter(file: Path) -> None:
    file.write_text(json.dumps(FULL))
    rules = read_tenants(file, KEYS)
    acme, lab = rules.tenants
    assert acme == Tenant("acme", 2.5, 60000, 4, 1.5)
    assert lab == Tenant("lab")
    assert rules.others == Tenant(OTHERS, max_requests=1)
    for client, adapter, expected in (
        ("key 1", None, acme),
        ("key 1", "poet", acme),
        ("key 0", "poet", lab),
        ("address 127.0.0.1", "acme/sql", acme),
        ("address 127.0.0.1", "acme/lab", acme),  # acme/* comes first
        ("", "poet2", rules.others),
        ("", "clerk:0.5+poet:0.1", lab),
        ("key 0", None, rules.others),
    ):
        assert rules.tenant_of(client, adapter) is expected, (client, adapter)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({}, "tenants is missing"),
        ({"tenants": {}, "other": {}}, "other is unknown"),
        ({"tenants": {"a": {"adapters": ["x"], "weight": 0}}}, "tenants.a.weight is 0.0; it must be above 0"),
        (
            {"tenants": {"a": {"adapters": ["x"], "weight": 1e9}}},
            "tenants.a.weight is 1000000000.0; it must be at most",
        ),
        (
            {"tenants": {"a": {"adapters": ["x"], "tokens_per_minute": 0}}},
            "tenants.a.tokens_per_minute is 0; it must be at least 1",
        ),
        (
            {"tenants": {"a": {"adapters": ["x"], "max_requests": "4"}}},
            'tenants.a.max_requests is "4"; expected an integer',
        ),
        ({"tenants": {"a": {"adapters": ["x"], "speed": 3}}}, "tenants.a.speed is unknown (its value is 3)"),
        ({"tenants": {"a": {}}}, "tenants.a has no requests; expected api_keys, adapters, or both"),
        ({"tenants": {"a": 3}}, "tenants.a is 3; expected an object"),
        ({"tenants": {"others": {"adapters": ["x"]}}}, "tenants.others is the name of a tenant; expected one"),
        ({"tenants": {"a": {"adapters": ["*x"]}}}, "tenants.a.adapters[0] is '*x'; expected a name, or the beginning"),
        (
            {"tenants": {"a": {"adapters": ["x"]}, "b": {"adapters": ["y", "x"]}}},
            "tenants.b.adapters[1] is 'x', as in the tenant 'a'",
        ),
        (
            {"tenants": {"a": {"api_keys": ["sk-one"]}, "b": {"api_keys": ["sk-one"]}}},
            "tenants.b.api_keys[0] is also a key of the tenant 'a'",
        ),
        ({"tenants": {"a": {"api_keys": ["sk-secret"]}}}, "tenants.a.api_keys[0] is not a key of this server"),
        (
            {"tenants": {}, "others": {"first_token_seconds": -1}},
            "others.first_token_seconds is -1.0; it must be above",
        ),
    ],
)
def test_errors_name_the_file_and_the_field(file: Path, content: dict[str, Any], expected: str) -> None:
    file.write_text(json.dumps(content))
    with pytest.raises(ConfigError) as caught:
        read_tenants(file, KEYS)
    assert str(caught.value).startswith(f"{file}: ")
    assert expected in str(caught.value)
    assert "secret" not in str(caught.value)


def test_files_that_are_no_json_object(file: Path) -> None:
    for text in ("", "[]", "{", '{"tenants": {"a": {}, "a": {}}}'):
        file.write_text(text)
        with pytest.raises(ConfigError, match=str(file)):
            read_tenants(file, KEYS)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_tenants(file.parent, KEYS)


class Executor:
    """Answers each request at once."""

    def __init__(self) -> None:
        self.gate: TenantGate | None = None
        self.work = None
        self.executor = SimpleNamespace(adapters=None)
        self.submitted: list[Request] = []

    def submit(self, request: Request) -> Any:
        self.submitted.append(request)
        return SimpleNamespace(admitted=None)


async def ask(adapters: ServedAdapters, client: str) -> Any:
    current_request.set(RequestRecord(client=client))
    return await adapters.submit(Request([1, 2], 8), None)


def run(body: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(body())


def samples_of(gate: TenantGate) -> dict[tuple[str, ...], float]:
    return {
        (sample.name.removeprefix("adaptrt_tenant_"), *sample.labels.values()): sample.value
        for family in tenant_metrics(gate.queue.uses)
        for sample in family.samples
    }


def test_a_gate_admits_counts_and_reloads(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    file.write_text(json.dumps(FULL))

    async def body() -> None:
        executor: Any = Executor()
        gate = executor.gate = TenantGate(file, ServerOptions(api_keys=KEYS), room=8)
        adapters = ServedAdapters(executor, (), frozenset())
        running = [await ask(adapters, "key 1") for _ in range(4)]
        assert {request.priority > 0.5 for request in executor.submitted} == {True}  # it has a target
        with pytest.raises(ApiError, match="acme has 4 requests; expected at most 4 at a time") as refused:
            await ask(adapters, "key 1")
        assert refused.value.headers["Retry-After"] == "1"
        result = SimpleNamespace(output_token_ids=[[3] * 5], is_final=True)
        running[0].admitted.note(SimpleNamespace(has_error=lambda: False, result=result))
        running[1].admitted.note(SimpleNamespace(has_error=lambda: True))
        await ask(adapters, "key 1")
        samples = samples_of(gate)
        assert samples["requests_admitted_total", "acme"] == 5
        assert samples["requests_refused_total", "acme", "max_requests"] == 1
        assert samples["requests_running", "acme"] == 3
        assert samples["tokens_total", "acme"] == 2 + 5 + 2
        assert samples["first_tokens_total", "acme", "true"] == 1
        assert samples["requests_waiting", "lab"] == samples["requests_waiting", OTHERS] == 0

        file.write_text('{"tenants": {"acme": {"api_keys": ["sk-two"], "max_requests": -1}}}')
        before = gate.queue.rules
        await gate.reload()
        assert gate.queue.rules is before
        assert "the rules of tenants stay as they are" in caplog.text
        assert "tenants.acme.max_requests is -1" in caplog.text
        file.write_text('{"tenants": {"acme": {"api_keys": ["sk-two"]}}}')
        await gate.reload()
        await ask(adapters, "key 1")

    run(body)


def test_all_versions_of_an_adapter_belong_to_its_tenant(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text(json.dumps({"tenants": {"lab": {"adapters": ["poet"]}}}))

    async def body() -> None:
        executor: Any = Executor()
        executor.gate = TenantGate(file, ServerOptions(), room=8)
        adapters = ServedAdapters(executor, (), frozenset())

        async def submit(request: Request, name: str | None) -> Any:
            return executor.submit(request)

        monkeypatch.setattr(adapters, "_submit", submit)
        for name in ("poet", f"poet@{'0' * 64}", "clerk"):
            await adapters.submit(Request([1, 2], 8), name)
        assert samples_of(executor.gate)["requests_admitted_total", "lab"] == 2

    run(body)


def test_a_request_that_fails_or_leaves_gives_its_place_back(file: Path) -> None:
    file.write_text('{"tenants": {}, "others": {"max_requests": 2}}')

    async def body() -> None:
        executor: Any = Executor()
        executor.gate = TenantGate(file, ServerOptions(), room=1)
        adapters = ServedAdapters(executor, (), frozenset())
        submit = executor.submit
        executor.submit = lambda request: (_ for _ in ()).throw(RuntimeError("no room"))
        for _ in range(3):
            with pytest.raises(RuntimeError, match="no room"):
                await ask(adapters, "a")
        executor.submit = submit
        first = await ask(adapters, "a")
        waiting = asyncio.create_task(ask(adapters, "a"))
        await asyncio.sleep(0)
        assert samples_of(executor.gate)["requests_waiting", OTHERS] == 1
        waiting.cancel()
        await asyncio.wait([waiting])
        second = asyncio.create_task(ask(adapters, "a"))
        await asyncio.sleep(0)
        assert not second.done()
        first.admitted.end()
        await second
        assert len(executor.submitted) == 2

    run(body)
