"""Metrics of a fake executor: idle, loaded, and with very many adapters."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from adaptrt._core import (
    DraftEngineStats,
    DType,
    FinishReason,
    IterationStats,
    KvCacheStats,
    LoraCacheEntry,
    LoraCacheStats,
    SecondLevelStats,
    SpeculationStats,
    StatePoolStats,
)
from adaptrt.runtime.images.vision import VisionStats
from adaptrt.serve.admission import AdmissionQueue
from adaptrt.serve.image_metrics import ImageCollector
from adaptrt.serve.metrics import ExecutorCollector, ServiceMetrics
from adaptrt.serve.statistics import ExecutorStatistics
from adaptrt.serve.tenants import TenantRules
from adaptrt.serve.work import WorkKind

MAX_NAMED_ADAPTERS = 64
DASHBOARD = Path(__file__).parents[4] / "docs" / "grafana" / "adaptrt.json"

WORK = {WorkKind.GUIDES: (5, 2), WorkKind.FILES: (0, 1)}
"""Numbers of waiting and running calls."""


class MadeUp:
    """Metrics of an executor whose statistics a test sets."""

    def __init__(self) -> None:
        self.steps: list[IterationStats] = []
        self.named: list[str] = []
        """Names of adapters; their task_ids are their indices."""
        self.cached: list[LoraCacheEntry] = []
        self.old: list[SimpleNamespace] = []
        """Old versions of adapters."""
        self.metrics = ServiceMetrics()
        core = SimpleNamespace(
            get_latest_iteration_stats=self.take_steps,
            lora_cache_stats=lambda: LoraCacheStats(
                host_hits=1, host_misses=2, host_evictions=3, device_hits=4, device_misses=5, device_evictions=6,
                host_adapters=7, device_adapters=8, host_bytes_used=9, host_bytes_total=10, page_bytes=64,
                device_pages_used=3, device_pages_total=5, loads_in_flight=2, failed_loads=1, load_seconds=0.5,
                memory_bytes=6, steps_waiting_for_adapters=4, saved_bytes=11, saved_products=12,
                pinned_bytes=13, staged_loads=14,
            ),
            engine_info=SimpleNamespace(
                dtype=DType.FLOAT32, kernels="avx2", max_batch_size=8, lora=SimpleNamespace(target_modules=[1])
            ),
            adapters=SimpleNamespace(list=self.list_named, list_old=lambda: self.old),
            list_adapters=lambda: self.cached,
        )  # fmt: skip
        self.work = SimpleNamespace(
            counts=lambda kind: WORK.get(kind, (0, 0)), num_refused=lambda kind: len(kind.value)
        )
        self.executor: Any = SimpleNamespace(executor=core, num_running=0, work=self.work, gate=None)
        self.metrics.registry.register(
            ExecutorCollector(
                self.executor, ExecutorStatistics(self.executor), self.metrics, "demo", MAX_NAMED_ADAPTERS
            )
        )

    def list_named(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(name=name, task_id=i) for i, name in enumerate(self.named)]

    def take_steps(self) -> list[IterationStats]:
        steps, self.steps = self.steps, []
        return steps

    def start(self, request_id: int, adapter: str | None = None, num_tokens: int = 3) -> None:
        self.metrics.on_start(request_id, SimpleNamespace(input_token_ids=[0] * num_tokens), adapter)  # type: ignore[arg-type]
        self.executor.num_running += 1

    def answer(self, request_id: int, num_tokens: int, finish: FinishReason | None = None, sequence: int = 0) -> None:
        result = SimpleNamespace(
            output_token_ids=[[0] * num_tokens],
            is_final=finish is not None,
            finish_reasons=[finish],
            sequence_index=sequence,
            pooled_output=None,
        )
        response: Any = SimpleNamespace(request_id=request_id, has_error=lambda: False, result=result)
        self.metrics.on_response(response)
        self.executor.num_running -= finish is not None

    def samples(self) -> dict[str, float]:
        """Returns each sample as Prometheus reads it."""
        text = generate_latest(self.metrics.registry).decode()
        found = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
                found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
        return found


def step(active: int, completed: int, queued: int) -> IterationStats:
    kv_cache = KvCacheStats(
        max_num_blocks=20, free_num_blocks=15, used_num_blocks=5, tokens_per_block=16, alloc_new_blocks=11,
        reused_blocks=7, missed_blocks=3, reused_tokens=119,
    )  # fmt: skip
    return IterationStats(
        num_active_requests=active,
        num_completed_requests=completed,
        num_queued_requests=queued,
        kv_cache_stats=kv_cache,
    )


def test_a_server_that_was_never_asked() -> None:
    samples = MadeUp().samples()
    assert samples["adaptrt_requests_running"] == samples["adaptrt_requests_waiting"] == 0
    assert samples['vllm:kv_cache_usage_perc{model_name="demo"}'] == 0
    assert samples['adaptrt_generations_total{finish_reason="error"}'] == 0


def test_requests_and_blocks_of_the_newest_step() -> None:
    made = MadeUp()
    for request_id in range(6):
        made.start(request_id)
    made.steps = [step(9, 0, 0), step(active=4, completed=1, queued=2)]
    samples = made.samples()
    assert (samples["adaptrt_requests_running"], samples["adaptrt_requests_waiting"]) == (3, 3)
    assert samples['vllm:num_requests_waiting{model_name="demo"}'] == 3
    assert samples["adaptrt_kv_cache_usage_ratio"] == 0.25
    assert samples['vllm:cache_config_info{block_size="16",num_gpu_blocks="20"}'] == 1
    assert samples["adaptrt_kv_cache_hit_blocks_total"] == 7
    assert samples["adaptrt_kv_cache_hit_tokens_total"] == 119
    assert made.samples()["adaptrt_requests_running"] == 3  # there is no newer step
    for request_id in range(6):
        made.answer(request_id, 1, FinishReason.CANCELLED)
    samples = made.samples()
    assert samples["adaptrt_requests_running"] == samples["adaptrt_requests_waiting"] == 0
    assert samples["adaptrt_kv_cache_usage_ratio"] == 0
    assert samples["adaptrt_kv_cache_hit_blocks_total"] == 7


def test_tokens_and_times_of_a_generation() -> None:
    made = MadeUp()
    made.start(1, num_tokens=5)
    for num_tokens in (1, 1, 2):
        made.answer(1, num_tokens)
    made.answer(1, 0, FinishReason.END_ID)
    made.start(2, num_tokens=2)
    made.metrics.on_loss(2)
    samples = made.samples()
    assert samples["adaptrt_prompt_tokens_total"] == 7
    assert samples["adaptrt_generated_tokens_total"] == 4
    assert samples["adaptrt_time_to_first_token_seconds_count"] == 1
    assert samples["adaptrt_time_between_tokens_seconds_count"] == 2
    assert samples["adaptrt_generation_duration_seconds_count"] == 2
    assert samples['adaptrt_generations_total{finish_reason="stop"}'] == 1
    assert samples['adaptrt_generations_total{finish_reason="error"}'] == 1


def test_times_between_tokens_are_a_sequences_own() -> None:
    made = MadeUp()
    made.start(1)
    for sequence in (0, 1, 2):
        made.answer(1, 1, sequence=sequence)
    samples = made.samples()
    assert samples["adaptrt_time_to_first_token_seconds_count"] == 1
    assert samples["adaptrt_time_between_tokens_seconds_count"] == 0
    for sequence in (0, 1, 2):
        made.answer(1, 1, FinishReason.LENGTH if sequence == 2 else None, sequence=sequence)
    samples = made.samples()
    assert samples["adaptrt_time_between_tokens_seconds_count"] == 3
    assert samples["adaptrt_generated_tokens_total"] == 6
    assert samples['adaptrt_generations_total{finish_reason="length"}'] == 1


def test_the_lora_cache_by_level() -> None:
    samples = MadeUp().samples()
    for name, host, device in (
        ("hits_total", 1, 4),
        ("misses_total", 2, 5),
        ("evictions_total", 3, 6),
        ("adapters", 7, 8),
        ("used_bytes", 9, 192),
        ("capacity_bytes", 10, 320),
    ):
        assert samples[f'adaptrt_lora_cache_{name}{{level="host"}}'] == host
        assert samples[f'adaptrt_lora_cache_{name}{{level="device"}}'] == device
    assert samples["adaptrt_lora_cache_memory_bytes"] == 6
    assert samples["adaptrt_lora_cache_saved_bytes"] == 11
    assert samples["adaptrt_lora_cache_saved_products"] == 12
    assert samples["adaptrt_lora_cache_pinned_bytes"] == 13
    assert samples["adaptrt_lora_staged_loads_total"] == 14
    assert samples["adaptrt_lora_steps_waiting_for_adapters_total"] == 4
    assert samples["adaptrt_lora_loads_total"] == 5
    assert samples["adaptrt_lora_load_failures_total"] == 1
    assert samples["adaptrt_lora_load_seconds_total"] == 0.5
    assert samples["adaptrt_lora_loads_in_flight"] == 2


def test_old_versions() -> None:
    made = MadeUp()
    assert made.samples()["adaptrt_adapter_old_versions"] == 0
    made.old = [SimpleNamespace(facts=SimpleNamespace(num_bytes=size)) for size in (5, 7)]
    samples = made.samples()
    assert (samples["adaptrt_adapter_old_versions"], samples["adaptrt_adapter_old_version_bytes"]) == (2, 12)


def test_the_file_behind_the_kv_cache() -> None:
    made = MadeUp()
    without = step(0, 0, 0)
    made.steps = [without]
    assert not [name for name in made.samples() if "kv_file" in name]
    file = SecondLevelStats(
        max_num_blocks=9, used_num_blocks=8, written_blocks=7, read_blocks=6, dropped_blocks=5, failed_blocks=4
    )
    made.steps = [IterationStats(kv_cache_stats=KvCacheStats(max_num_blocks=8, second_level=file))]
    samples = made.samples()
    assert samples["adaptrt_kv_file_capacity_blocks"] == 9
    assert samples["adaptrt_kv_file_blocks"] == 8
    assert samples["adaptrt_kv_file_written_blocks_total"] == 7
    assert samples["adaptrt_kv_file_read_blocks_total"] == 6
    assert samples["adaptrt_kv_file_dropped_blocks_total"] == 5
    assert samples["adaptrt_kv_file_failed_blocks_total"] == 4
    assert samples["adaptrt_kv_file_given_up"] == 0
    file.error = "the disk"
    made.steps = [IterationStats(kv_cache_stats=KvCacheStats(max_num_blocks=8, second_level=file))]
    assert made.samples()["adaptrt_kv_file_given_up"] == 1


def test_blocks_of_encoder_inputs() -> None:
    made = MadeUp()
    made.steps = [step(0, 0, 0)]
    assert not [name for name in made.samples() if "cross_kv" in name]
    cross = KvCacheStats(max_num_blocks=9, alloc_new_blocks=4, reused_blocks=3, missed_blocks=2, reused_tokens=40)
    made.steps = [IterationStats(cross_kv_cache_stats=cross)]
    samples = made.samples()
    assert samples["adaptrt_cross_kv_cache_blocks"] == 9
    assert samples["adaptrt_cross_kv_cache_allocated_blocks_total"] == 4
    assert samples["adaptrt_cross_kv_cache_hit_blocks_total"] == 3
    assert samples["adaptrt_cross_kv_cache_missed_blocks_total"] == 2
    assert samples["adaptrt_cross_kv_cache_hit_tokens_total"] == 40


def test_states_of_sequences() -> None:
    made = MadeUp()
    made.steps = [step(0, 0, 0)]
    assert not [name for name in made.samples() if "state_s" in name]
    made.steps = [
        IterationStats(
            state_stats=StatePoolStats(
                slot_bytes=100, num_slots=8, max_snapshots=16, num_snapshots=5, taken_snapshots=7, reused_snapshots=3
            )
        )
    ]
    samples = made.samples()
    assert samples["adaptrt_state_slot_bytes"] == 100
    assert samples["adaptrt_state_slots"] == 8
    assert samples["adaptrt_state_snapshots"] == 5
    assert samples["adaptrt_state_snapshot_capacity"] == 16
    assert samples["adaptrt_state_taken_snapshots_total"] == 7
    assert samples["adaptrt_state_reused_snapshots_total"] == 3
    assert not [name for name in samples if "state_file" in name]
    file = SecondLevelStats(max_num_blocks=9, used_num_blocks=8, written_blocks=7, read_blocks=6, error="broken")
    made.steps = [IterationStats(state_stats=StatePoolStats(num_slots=8, second_level=file))]
    samples = made.samples()
    assert samples["adaptrt_state_file_snapshots"] == 8
    assert samples["adaptrt_state_file_capacity_snapshots"] == 9
    assert samples["adaptrt_state_file_written_snapshots_total"] == 7
    assert samples["adaptrt_state_file_read_snapshots_total"] == 6
    assert samples["adaptrt_state_file_given_up"] == 1
    assert not [name for name in samples if "kv_file" in name]


def gateway(made: MadeUp) -> tuple[list[str], list[str]]:
    """Returns (running, waiting) as the inference gateway reads them."""
    (name,) = (name for name in made.samples() if name.startswith("vllm:lora_requests_info"))
    found = re.fullmatch(
        r'vllm:lora_requests_info\{max_lora="8",running_lora_adapters="(.*)",waiting_lora_adapters="(.*)"\}', name
    )
    assert found
    return tuple([part for part in group.split(",") if part] for group in found.groups())  # type: ignore[return-value]


def test_the_gateway_sees_which_adapters_run_and_wait() -> None:
    made = MadeUp()
    assert gateway(made) == ([], [])
    for request_id, adapter in enumerate(["sql", "fr", "sql", None, "with,comma"]):
        made.start(request_id, adapter)
    assert gateway(made) == ([], ["fr", "sql"])
    made.answer(0, 1)
    made.answer(3, 1)
    assert gateway(made) == (["sql"], ["fr", "sql"])
    assert made.samples()['adaptrt_lora_adapters{state="waiting"}'] == 3
    for request_id in range(5):
        made.answer(request_id, 0, FinishReason.LENGTH)
    assert gateway(made) == ([], [])


def loaded(made: MadeUp) -> dict[str, tuple[str, str]]:
    """Returns level and pinned of each adapter, as a router reads them."""
    found = {}
    for name, value in made.samples().items():
        labels = re.fullmatch(
            r'vllm:lora_adapter_loaded\{adapter_name="(.*)",level="(.*)",pinned="(.*)",rank="0"\}', name
        )
        if labels:
            assert value == 1
            found[labels[1]] = (labels[2], labels[3])
    return found


def test_a_router_sees_which_adapters_are_cached_on_which_level() -> None:
    made = MadeUp()
    assert loaded(made) == {}
    samples = made.samples()
    assert samples["vllm:num_gpu_loaded_lora_adapters"] == 8
    assert samples["vllm:num_cpu_loaded_lora_adapters"] == 7
    made.named = ["idle", "warm", "on disk", "pinned"]
    made.cached = [
        LoraCacheEntry(task_id=0, on_device=True, device_pages=1),
        LoraCacheEntry(task_id=1, device_pages=1),
        LoraCacheEntry(task_id=3, on_device=True, pinned=True, device_pages=2),
        LoraCacheEntry(task_id=99, on_device=True, device_pages=0),  # known by its number only
    ]
    assert loaded(made) == {"idle": ("gpu", "false"), "warm": ("cpu", "false"), "pinned": ("gpu", "true")}
    # 2 of 5 pages are free, and the mean adapter takes one page.
    assert made.samples()["vllm:max_gpu_lora_adapters"] == 8 + 2
    made.metrics.on_adapter_load(0.02)
    assert made.samples()['vllm:lora_adapter_load_seconds_bucket{le="0.025"}'] == 1


def test_few_adapters_have_a_series_and_those_on_the_device_come_first() -> None:
    made = MadeUp()
    made.named = [f"adapter-{i:04}" for i in range(1000)]
    made.cached = [LoraCacheEntry(task_id=i, on_device=i >= 990, pinned=i == 500, users=i == 7) for i in range(1000)]
    found = loaded(made)
    assert len(found) == MAX_NAMED_ADAPTERS
    assert {f"adapter-{i:04}" for i in (*range(990, 1000), 500, 7, 0, 1)} <= set(found)


def test_labels_are_bounded_however_many_adapters_there_are() -> None:
    made = MadeUp()
    few = len(made.samples())
    for request_id in range(2000):
        made.start(request_id, f"adapter-{request_id:05}")
        if request_id % 2:
            made.answer(request_id, 1)
    running, waiting = gateway(made)
    assert len(running) == len(waiting) == MAX_NAMED_ADAPTERS
    assert len(made.samples()) == few
    assert made.samples()['adaptrt_lora_adapters{state="running"}'] == 1000


def test_the_dashboard_asks_for_metrics_that_there_are() -> None:
    made = MadeUp()
    newest = step(0, 0, 0)
    assert newest.kv_cache_stats is not None
    kv_cache = newest.kv_cache_stats
    kv_cache.second_level = SecondLevelStats(used_num_blocks=3)
    newest.kv_cache_stats = kv_cache
    newest.speculation_stats = SpeculationStats(9, 4, DraftEngineStats(mem_usage=77, error="failed"))
    made.steps = [newest]
    queue = AdmissionQueue(TenantRules(), room=1, max_waiting=1, now=0.0)
    made.executor.gate = SimpleNamespace(queue=queue)
    made.named, made.cached = ["sql"], [LoraCacheEntry(task_id=0)]
    made.metrics.count_request("openai", "ok")
    vision: Any = SimpleNamespace(takes_images=True, stats=lambda: VisionStats(1, 2, 3.5, 4, 5, 6))
    made.metrics.registry.register(ImageCollector(vision))
    there = {re.sub(r"\{.*", "", name) for name in made.samples()}
    dashboard = json.loads(DASHBOARD.read_text())
    asked = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"\b(?:adaptrt|vllm)[_:]\w+", target["expr"])
    }
    assert len(asked) > 20
    assert asked <= there
    samples = made.samples()
    assert (samples["adaptrt_draft_tokens_total"], samples["adaptrt_accepted_draft_tokens_total"]) == (9, 4)
    assert (samples["adaptrt_draft_engine_bytes"], samples["adaptrt_draft_engine_given_up"]) == (77, 1)
    assert (samples["adaptrt_kv_file_blocks"], samples["adaptrt_kv_file_given_up"]) == (3, 0)
    names = ("images_total", "image_pixels_total", "image_encoder_seconds_total")
    names += ("image_cache_hits_total", "image_cache_misses_total", "image_cache_bytes")
    assert [samples[f"adaptrt_{name}"] for name in names] == [1, 2, 3.5, 4, 5, 6]
    vision.takes_images = False
    assert "adaptrt_images_total" not in made.samples()


def test_each_kind_of_slow_work_has_its_queue() -> None:
    samples = MadeUp().samples()
    for kind in WorkKind:
        waiting, running = WORK.get(kind, (0, 0))
        assert samples[f'adaptrt_work_waiting{{kind="{kind.value}"}}'] == waiting
        assert samples[f'adaptrt_work_running{{kind="{kind.value}"}}'] == running
        assert samples[f'adaptrt_work_refused_total{{kind="{kind.value}"}}'] == len(kind.value)
