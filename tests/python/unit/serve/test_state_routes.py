"""GET /api/state with a fake executor: levels, counts, search, and an idle executor."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.testclient import TestClient

from adaptrt._core import DType, IterationStats, KvCacheStats, LoraCacheEntry, LoraCacheStats, Request
from adaptrt.serve.adapter_roots import RootNames
from adaptrt.serve.adapters import ServedAdapter
from adaptrt.serve.app import make_app
from adaptrt.serve.metrics import ServiceMetrics
from adaptrt.serve.options import ServerLimits, ServerOptions
from adaptrt.serve.statistics import ExecutorStatistics

NAMED = 1 << 63


class MadeUpServer:
    """The part of a service that the route uses, and a client."""

    def __init__(self, names: list[str], *, takes_images: bool = False, **options: Any) -> None:
        self.steps: list[IterationStats] = []
        self.not_loaded: tuple[str, ...] = ()
        self.all_listed = True
        self.sums: list[tuple[str, int]] = []
        self.cached: list[LoraCacheEntry] = []
        self.num_readings = 0
        core = SimpleNamespace(
            get_latest_iteration_stats=self.take_steps,
            list_adapters=lambda: self.cached,
            lora_cache_stats=lambda: LoraCacheStats(device_pages_used=3, device_pages_total=8, host_evictions=2),
        )
        self.executor = SimpleNamespace(executor=core, num_running=0)
        self.metrics = ServiceMetrics()
        self.engine_info = SimpleNamespace(
            dtype=DType.BFLOAT16, kernels="avx2", max_batch_size=8, max_input_len=640, max_seq_len=704,
            max_num_tokens=1024, tokens_per_block=32, lora=SimpleNamespace(max_rank=16, target_modules=[1, 2]),
        )  # fmt: skip
        rows = [ServedAdapter(name, NAMED + i, Path("/adapters") / name, 0) for i, name in enumerate(names)]
        service = SimpleNamespace(
            options=ServerOptions(**options), model_names=("demo",), executor=self.executor,
            statistics=ExecutorStatistics(self.executor), metrics=self.metrics,
            engine_info=self.engine_info,
            adapters=SimpleNamespace(
                shown_names=lambda: [(row.name, row.task_id) for row in rows],
                shown_sums=lambda: self.sums,
                not_loaded=self.list_roots,
            ),
            prompts=SimpleNamespace(has_template=True), vision=SimpleNamespace(takes_images=takes_images),
        )  # fmt: skip
        self.client = TestClient(make_app(service))  # type: ignore[arg-type]

    async def list_roots(self) -> RootNames:
        return RootNames(self.not_loaded, self.all_listed)

    def take_steps(self) -> list[IterationStats]:
        self.num_readings += 1
        steps, self.steps = self.steps, []
        return steps

    def state(self, **query: Any) -> dict[str, Any]:
        answer = self.client.get("/api/state", params=query)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def names(self, **query: Any) -> list[str]:
        return [row["name"] for row in self.state(**query)["adapters"]["list"]]


def test_each_adapter_is_on_the_level_that_the_cache_says() -> None:
    server = MadeUpServer(["poet", "pirate", "json"])
    server.cached = [
        LoraCacheEntry(task_id=NAMED + 2, on_device=False, pinned=True),
        LoraCacheEntry(task_id=NAMED + 0, on_device=True, users=2),
        LoraCacheEntry(task_id=17, on_device=True),
    ]
    adapters = server.state()["adapters"]
    assert adapters["list"] == [
        {"name": "poet", "task_id": str(NAMED), "level": "device", "pinned": False, "users": 2},
        {"name": "pirate", "task_id": str(NAMED + 1), "level": "disk", "pinned": False, "users": 0},
        {"name": "json", "task_id": str(NAMED + 2), "level": "host", "pinned": True, "users": 0},
        {"name": None, "task_id": "17", "level": "device", "pinned": False, "users": 0},
    ]
    assert adapters["counts"] == {"device": 2, "host": 1, "disk": 1, "unloaded": 0}
    assert server.names(level="device") == ["poet", None]
    assert server.names(level="host") == ["json"]
    assert server.state(search="TASK 1")["adapters"]["list"] == [adapters["list"][3]]


def test_adapters_of_the_roots_are_listed_and_marked() -> None:
    server = MadeUpServer(["poet"], adapter_roots=(Path("/adapters"),))
    server.not_loaded = ("team/clerk", "team/pirate")
    adapters = server.state()["adapters"]
    assert adapters["counts"] == {"device": 0, "host": 0, "disk": 1, "unloaded": 2}
    assert adapters["all_listed"] is True
    assert adapters["list"][1] == {
        "name": "team/clerk", "task_id": None, "level": "unloaded", "pinned": False, "users": 0,
    }  # fmt: skip
    assert server.names(level="unloaded") == ["team/clerk", "team/pirate"]
    assert server.names(search="PIRATE") == ["team/pirate"]
    server.all_listed = False
    assert server.state()["adapters"]["all_listed"] is False


def test_thousands_of_adapters_are_searched_and_cut() -> None:
    server = MadeUpServer([f"Team/{i:04}" for i in range(3000)])
    assert len(server.names()) == 100
    assert len(server.names(limit=1000)) == 1000
    assert server.names(search="team/12", first=98, limit=5) == ["Team/1298", "Team/1299"]
    adapters = server.state(search="team/12", limit=0)["adapters"]
    assert (adapters["matching"], adapters["list"]) == (100, [])
    assert adapters["counts"] == {"device": 0, "host": 0, "disk": 3000, "unloaded": 0}


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("limit=1001", "limit: "),
        ("limit=-1", "limit: "),
        ("limit=ten", "limit: "),
        ("first=-1", "first: "),
        ("level=moon", "level: "),
        ("pages=2", "pages: is not known here"),
        ("search=a&search=b", "search: is given 2 times"),
        (f"search={'x' * 257}", "search: "),
    ],
)
def test_a_query_that_cannot_be_is_refused_by_name(query: str, says: str) -> None:
    answer = MadeUpServer([]).client.get(f"/api/state?{query}")
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(says)


def test_requests_and_blocks_are_those_of_the_newest_step() -> None:
    def step(active: int, completed: int, used: int) -> IterationStats:
        kv_cache = KvCacheStats(used_num_blocks=used, max_num_blocks=64)
        return IterationStats(num_active_requests=active, num_completed_requests=completed, kv_cache_stats=kv_cache)

    server = MadeUpServer([])
    assert server.state()["kv_cache"] is None
    server.executor.num_running = 5
    assert server.state()["requests"] == {"running": 0, "waiting": 5}
    server.steps = [step(4, 0, 1), step(4, 1, 6)]
    for _ in range(2):  # a step is reported once and then remembered
        state = server.state()
        assert state["requests"] == {"running": 3, "waiting": 2}
        assert (state["kv_cache"]["used_blocks"], state["kv_cache"]["total_blocks"]) == (6, 64)
    server.executor.num_running = 0  # the last request has gone since the last step
    state = server.state()
    assert state["requests"] == {"running": 0, "waiting": 0}
    assert (state["kv_cache"]["used_blocks"], state["kv_cache"]["total_blocks"]) == (0, 64)


def test_generated_tokens_are_those_that_metrics_count() -> None:
    server = MadeUpServer([])
    assert server.state()["tokens_generated"] == 0
    server.metrics.on_start(1, Request([1, 2], 7), None)
    for tokens in ([3, 4], [5]):
        result = SimpleNamespace(output_token_ids=[tokens], is_final=False, sequence_index=0)
        response = SimpleNamespace(request_id=1, has_error=lambda: False, result=result)
        server.metrics.on_response(response)  # type: ignore[arg-type]
    assert server.state()["tokens_generated"] == 3


def test_the_engine_and_its_cache() -> None:
    server = MadeUpServer([], adapter_roots=(Path("/adapters"),))
    state = server.state()
    assert (state["models"], state["chats"]) == (["demo"], True)
    assert (state["engine"]["dtype"], state["engine"]["max_lora_rank"], state["engine"]["max_seq_len"]) == (
        "bfloat16",
        16,
        704,
    )
    assert state["lora_cache"]["device_pages_used"] == 3
    assert state["lora_cache"]["host_evictions"] == 2
    assert state["adapters"]["have_roots"] is True
    assert state["images"] is None


def test_the_limits_of_images() -> None:
    limits = ServerLimits(max_images=3, max_image_bytes=500)
    images = MadeUpServer([], takes_images=True, limits=limits).state()["images"]
    assert images == {"max_images": 3, "max_bytes": 500}
    assert MadeUpServer([], takes_images=True, limits=ServerLimits(max_images=0)).state()["images"] is None


def test_an_engine_without_lora_has_no_adapters() -> None:
    server = MadeUpServer([])
    server.engine_info.lora.target_modules = []
    state = server.state()
    assert state["lora_cache"] is None
    assert state["engine"]["max_lora_rank"] is None
    assert state["adapters"]["list"] == []


def test_the_state_needs_the_key_and_the_page_does_not() -> None:
    server = MadeUpServer([], api_keys=("secret",))
    assert server.client.get("/").status_code == 200
    assert server.client.get("/api/state").status_code == 401
    assert server.client.get("/api/state", headers={"Authorization": "Bearer secret"}).status_code == 200


def test_nothing_is_read_while_nobody_asks() -> None:
    server = MadeUpServer([])
    server.client.get("/")
    assert server.num_readings == 0
    server.state()
    assert server.num_readings > 0


def test_weighted_sums_that_are_cached_have_names() -> None:
    server = MadeUpServer(["poet"])
    server.sums = [("poet:0.5", NAMED + 7), ("poet:0.7+clerk:0.3", NAMED + 8)]
    server.cached = [LoraCacheEntry(task_id=NAMED + 8, on_device=True), LoraCacheEntry(task_id=NAMED + 9)]
    assert server.names() == ["poet", "poet:0.7+clerk:0.3", None]
