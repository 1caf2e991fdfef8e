"""Prometheus metrics: counted as requests pass, or read from the executor on request."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from fastapi import APIRouter
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from starlette.requests import Request as HttpRequest
from starlette.responses import Response as HttpResponse

from .._core import KvCacheStats, LoraCacheStats, Request, Response, SecondLevelStats, SpeculationStats, StatePoolStats
from .._version import __version__
from .async_executor import AsyncExecutor
from .records import FINISH_REASONS, GenerationRecord, current_request
from .residency import residency_metrics
from .statistics import ExecutorStatistics
from .tenant_metrics import tenant_metrics
from .work import Work, WorkKind

_FIRST_TOKEN_BUCKETS: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0
)  # fmt: skip
_BETWEEN_TOKENS_BUCKETS: Final = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5
)  # fmt: skip
_LOAD_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_WHOLE_BUCKETS: Final = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class ServiceMetrics:
    """Metrics that are counted as events happen. A GenerationObserver; belongs to the loop."""

    def __init__(self) -> None:
        """Starts all metrics at 0."""
        self.registry: Final = CollectorRegistry()
        self._requests = self._counter("requests", "HTTP requests that have ended.", ("surface", "outcome"))
        self._generations = self._counter("generations", "Executor requests that have ended.", ("finish_reason",))
        for reason in FINISH_REASONS:
            self._generations.labels(reason)
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens of queued prompts.")
        self._generated_tokens = self._counter("generated_tokens", "Generated tokens.")
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "Time from the queue to the first token.", _FIRST_TOKEN_BUCKETS
        )
        self._between_tokens = self._histogram(
            "time_between_tokens_seconds", "Time from one token of a generation to the next.", _BETWEEN_TOKENS_BUCKETS
        )
        self._whole = self._histogram(
            "generation_duration_seconds", "Time from the queue to the end of a generation.", _WHOLE_BUCKETS
        )
        self._adapter_loads = Histogram(
            "vllm:lora_adapter_load_seconds",
            "Time to read an adapter, convert it and put it into the host level.",
            buckets=_LOAD_BUCKETS,
            registry=self.registry,
        )
        self._running: dict[int, GenerationRecord] = {}

    @property
    def running(self) -> Iterable[GenerationRecord]:
        """Generations that have not ended, the oldest first."""
        return self._running.values()

    @property
    def num_generated_tokens(self) -> int:
        """Number of tokens of all answers since the start."""
        (family,) = self._generated_tokens.collect()
        return int(family.samples[0].value)

    def count_request(self, surface: str, outcome: str) -> None:
        """Counts an HTTP request that has ended."""
        self._requests.labels(surface, outcome).inc()

    def on_start(self, request_id: int, request: Request, adapter: str | None) -> None:
        """See GenerationObserver."""
        record = GenerationRecord(adapter, len(request.input_token_ids))
        self._running[request_id] = record
        self._prompt_tokens.inc(record.num_prompt_tokens)
        http_request = current_request.get()
        if http_request is not None:
            http_request.generations.append(record)

    def on_response(self, response: Response) -> None:
        """See GenerationObserver."""
        record = self._running[response.request_id]
        if response.has_error():
            self.on_loss(response.request_id)
            return
        result = response.result
        num_tokens = len(result.output_token_ids[0])
        now = time.monotonic()
        if num_tokens > 0:
            self._count_tokens(record, result.sequence_index, num_tokens, now)
        if result.is_final:
            record.end(result.finish_reasons[0], is_pooled=result.pooled_output is not None)
            self._count_end(response.request_id, record, now)

    def on_loss(self, request_id: int) -> None:
        """See GenerationObserver."""
        record = self._running[request_id]
        record.end(None)
        self._count_end(request_id, record, time.monotonic())

    def on_adapter_load(self, seconds: float) -> None:
        """See GenerationObserver. May be called in any thread."""
        self._adapter_loads.observe(seconds)

    def _count_tokens(self, record: GenerationRecord, sequence: int, num_tokens: int, now: float) -> None:
        if record.first_token is None:
            record.first_token = now
            self._first_token.observe(now - record.began)
        newest = record.newest_tokens.get(sequence)
        if newest is not None:
            self._between_tokens.observe((now - newest) / num_tokens)
        record.newest_tokens[sequence] = now
        record.num_generated_tokens += num_tokens
        self._generated_tokens.inc(num_tokens)

    def _count_end(self, request_id: int, record: GenerationRecord, now: float) -> None:
        del self._running[request_id]
        self._generations.labels(record.finish_reason).inc()
        self._whole.observe(now - record.began)

    def _counter(self, name: str, text: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(f"adaptrt_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(f"adaptrt_{name}", text, buckets=buckets, registry=self.registry)


class ExecutorCollector(Collector):
    """Metrics that are read from the executor, on the loop, when metrics are requested."""

    def __init__(
        self,
        executor: AsyncExecutor,
        statistics: ExecutorStatistics,
        metrics: ServiceMetrics,
        model_name: str,
        max_named_adapters: int,
    ) -> None:
        """Reads nothing until metrics are requested. max_named_adapters: see ServerLimits."""
        self._executor = executor
        self._statistics = statistics
        self._metrics = metrics
        self._model_name = model_name
        self._max_named_adapters = max_named_adapters

    def collect(self) -> Iterator[Metric]:
        """Yields all metrics. Raises ExecutorClosedError."""
        yield self._about()
        num_running, num_waiting = self._statistics.num_requests()
        kv_cache = self._statistics.kv_cache()
        used = self._statistics.num_used_blocks()
        kv_usage = used / kv_cache.max_num_blocks if kv_cache and kv_cache.max_num_blocks else 0.0
        yield _gauge("requests_running", "Executor requests that have started.", num_running)
        yield _gauge("requests_waiting", "Executor requests that wait for their start.", num_waiting)
        yield _gauge("kv_cache_usage_ratio", "Share of all KV blocks that running requests use.", kv_usage)
        yield from _work_metrics(self._executor.work)
        if self._executor.gate is not None:
            yield from tenant_metrics(self._executor.gate.queue.uses)
        yield from _speculation_metrics(self._statistics.speculation())
        yield from self._for_gateway(num_running, num_waiting, kv_usage)
        if kv_cache is not None:
            yield from _kv_cache_metrics(kv_cache)
            yield self._cache_config(kv_cache)
        cross = self._statistics.cross_kv_cache()
        if cross is not None:
            yield from _cross_kv_cache_metrics(cross)
        states = self._statistics.states()
        if states is not None:
            yield from _state_metrics(states)
        yield from self._old_versions()
        if self._executor.executor.engine_info.lora.target_modules:
            running, waiting = self._adapters()
            adapters = GaugeMetricFamily(
                "adaptrt_lora_adapters", "Adapters of requests, by the requests' state.", labels=["state"]
            )
            adapters.add_metric(["running"], len(running))
            adapters.add_metric(["waiting"], len(waiting))
            yield adapters
            yield self._lora_requests(running, waiting)
            stats = self._executor.executor.lora_cache_stats()
            yield from _lora_cache_metrics(stats)
            yield from self._residency(stats)

    def _about(self) -> Metric:
        info = self._executor.executor.engine_info
        family = GaugeMetricFamily(
            "adaptrt_build_info", "Always 1.", labels=["version", "model_name", "dtype", "kernels"]
        )
        family.add_metric([__version__, self._model_name, info.dtype.name.lower(), info.kernels], 1)
        return family

    def _adapters(self) -> tuple[list[str], list[str]]:
        """Returns the names of adapters of requests that have their first token, and of requests that have none yet."""
        running: dict[str, None] = {}
        waiting: dict[str, None] = {}
        for record in self._metrics.running:
            if record.adapter is not None:
                (waiting if record.first_token is None else running)[record.adapter] = None
        return list(running), list(waiting)

    def _for_gateway(self, num_running: int, num_waiting: int, kv_usage: float) -> Iterator[Metric]:
        """Yields metrics under vLLM's names, which inference gateways look for."""
        for name, text, value in (
            ("num_requests_running", "Same as adaptrt_requests_running.", num_running),
            ("num_requests_waiting", "Same as adaptrt_requests_waiting.", num_waiting),
            ("kv_cache_usage_perc", "Same as adaptrt_kv_cache_usage_ratio.", kv_usage),
            ("gpu_cache_usage_perc", "Older name of vllm:kv_cache_usage_perc.", kv_usage),
        ):
            family = GaugeMetricFamily(f"vllm:{name}", text, labels=["model_name"])
            family.add_metric([self._model_name], value)
            yield family

    def _cache_config(self, kv_cache: KvCacheStats) -> Metric:
        family = GaugeMetricFamily("vllm:cache_config_info", "Always 1.", labels=["block_size", "num_gpu_blocks"])
        family.add_metric([str(kv_cache.tokens_per_block), str(kv_cache.max_num_blocks)], 1)
        return family

    def _lora_requests(self, running: Sequence[str], waiting: Sequence[str]) -> Metric:
        family = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Adapters of current requests. The value is the time, in seconds since the epoch.",
            labels=["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
        )
        # A batch may have a different adapter for every sequence, so max_lora is the maximum batch size.
        max_lora = str(self._executor.executor.engine_info.max_batch_size)
        family.add_metric([max_lora, self._listed(running), self._listed(waiting)], time.time())
        return family

    def _residency(self, stats: LoraCacheStats) -> Iterator[Metric]:
        executor = self._executor.executor
        named = ((adapter.name, adapter.task_id) for adapter in executor.adapters.list())
        yield from residency_metrics(
            named,
            executor.list_adapters(),
            stats,
            most_named=self._max_named_adapters,
            room=executor.engine_info.max_batch_size,
        )

    def _old_versions(self) -> Iterator[Metric]:
        old = self._executor.executor.adapters.list_old()
        yield _gauge("adapter_old_versions", "Replaced versions of adapters that requests can ask for.", len(old))
        yield _gauge(
            "adapter_old_version_bytes", "Size of the files of these versions.", sum(one.facts.num_bytes for one in old)
        )

    def _listed(self, adapters: Sequence[str]) -> str:
        """Joins the first names, sorted. Skips names with a comma, which the list cannot express."""
        return ",".join(sorted(name for name in adapters if "," not in name)[: self._max_named_adapters])


def routes(registry: CollectorRegistry) -> APIRouter:
    """Makes GET /metrics, in Prometheus's or OpenMetrics's text format."""
    router = APIRouter()

    @router.get("/metrics")
    async def metrics(request: HttpRequest) -> HttpResponse:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return HttpResponse(encode(registry), headers={"Content-Type": content_type})

    return router


def _work_metrics(work: Work) -> Iterator[Metric]:
    running = GaugeMetricFamily("adaptrt_work_running", "Calls of slow work that run.", labels=["kind"])
    waiting = GaugeMetricFamily("adaptrt_work_waiting", "Calls of slow work that wait for a thread.", labels=["kind"])
    refused = CounterMetricFamily(
        "adaptrt_work_refused", "Calls of slow work that were rejected with 429.", labels=["kind"]
    )
    for kind in WorkKind:
        num_waiting, num_running = work.counts(kind)
        running.add_metric([kind.value], num_running)
        waiting.add_metric([kind.value], num_waiting)
        refused.add_metric([kind.value], work.num_refused(kind))
    yield from (running, waiting, refused)


def _kv_cache_metrics(stats: KvCacheStats) -> Iterator[Metric]:
    yield _gauge("kv_cache_blocks", "Number of KV blocks.", stats.max_num_blocks)
    yield _gauge("kv_cache_block_tokens", "Tokens that a KV block holds.", stats.tokens_per_block)
    yield _count(
        "kv_cache_allocated_blocks",
        "KV blocks that requests allocated without a hit in the cache.",
        stats.alloc_new_blocks,
    )
    yield _count("kv_cache_hit_blocks", "Full KV blocks of prompts that were found in the cache.", stats.reused_blocks)
    yield _count(
        "kv_cache_missed_blocks", "Full KV blocks of prompts that were not found in the cache.", stats.missed_blocks
    )
    yield _count(
        "kv_cache_hit_tokens",
        "Tokens whose KV was found in the cache, in full blocks and in partial ones.",
        stats.reused_tokens,
    )
    if stats.second_level is not None:
        yield from _file_metrics(stats.second_level, "kv_file", "blocks", "KV blocks")


def _cross_kv_cache_metrics(stats: KvCacheStats) -> Iterator[Metric]:
    yield _gauge("cross_kv_cache_blocks", "KV blocks for encoder inputs.", stats.max_num_blocks)
    yield _count(
        "cross_kv_cache_allocated_blocks", "KV blocks of encoder inputs that were computed.", stats.alloc_new_blocks
    )
    yield _count(
        "cross_kv_cache_hit_blocks", "KV blocks of encoder inputs that were found in the cache.", stats.reused_blocks
    )
    yield _count(
        "cross_kv_cache_missed_blocks",
        "KV blocks of encoder inputs that were not found in the cache.",
        stats.missed_blocks,
    )
    yield _count(
        "cross_kv_cache_hit_tokens", "Tokens of encoder inputs whose KV was found in the cache.", stats.reused_tokens
    )


def _state_metrics(stats: StatePoolStats) -> Iterator[Metric]:
    yield _gauge("state_slot_bytes", "Bytes of the states of a sequence.", stats.slot_bytes)
    yield _gauge("state_slots", "Maximum number of sequences that keep states.", stats.num_slots)
    yield _gauge("state_snapshots", "States from which later requests can continue.", stats.num_snapshots)
    yield _gauge("state_snapshot_capacity", "Maximum number of such states.", stats.max_snapshots)
    yield _count("state_taken_snapshots", "States that were kept for later requests.", stats.taken_snapshots)
    yield _count("state_reused_snapshots", "Requests that continued from a kept state.", stats.reused_snapshots)
    if stats.second_level is not None:
        yield from _file_metrics(stats.second_level, "state_file", "snapshots", "snapshots of states")


def _file_metrics(stats: SecondLevelStats, file: str, unit: str, what: str) -> Iterator[Metric]:
    """file, unit: parts of the names. what: what the file has, in texts."""
    yield _gauge(f"{file}_{unit}", f"Number of {what} in the file.", stats.used_num_blocks)
    yield _gauge(f"{file}_capacity_{unit}", f"Maximum number of {what} in the file.", stats.max_num_blocks)
    yield _gauge(f"{file}_given_up", "1: the file is no longer used after an error.", float(stats.error != ""))
    yield _count(f"{file}_written_{unit}", f"Number of {what} that were written to the file.", stats.written_blocks)
    yield _count(
        f"{file}_read_{unit}",
        f"Number of {what} that were read from the file instead of being computed.",
        stats.read_blocks,
    )
    yield _count(
        f"{file}_dropped_{unit}",
        f"Number of {what} that were dropped because too many waited to be written.",
        stats.dropped_blocks,
    )
    yield _count(
        f"{file}_failed_{unit}", f"Number of {what} that were damaged or lost to disk errors.", stats.failed_blocks
    )


def _speculation_metrics(stats: SpeculationStats) -> Iterator[Metric]:
    yield _count("draft_tokens", "Draft tokens that were computed.", stats.draft_tokens)
    yield _count("accepted_draft_tokens", "Tokens that were generated thanks to drafts.", stats.accepted_tokens)
    draft = stats.draft_engine
    if draft is None:
        return
    yield _gauge("draft_engine_bytes", "Memory of the draft engine's caches.", draft.mem_usage)
    yield _gauge("draft_engine_kv_blocks", "KV blocks of the draft engine.", draft.max_num_blocks)
    yield _gauge(
        "draft_engine_used_kv_blocks", "KV blocks of the draft engine that sequences use.", draft.used_num_blocks
    )
    yield _gauge(
        "draft_engine_given_up", "1: the draft engine is no longer used after an error.", float(draft.error != "")
    )
    yield _count("draft_engine_tokens", "Tokens that the draft engine has computed.", draft.num_tokens)
    yield _count("draft_engine_seconds", "Time that the draft engine took.", draft.seconds)


def _lora_cache_metrics(stats: LoraCacheStats) -> Iterator[Metric]:
    used, capacity = (pages * stats.page_bytes for pages in (stats.device_pages_used, stats.device_pages_total))
    for name, text, host, device in (
        ("hits", "Lookups that found the adapter.", stats.host_hits, stats.device_hits),
        ("misses", "Lookups that did not find the adapter.", stats.host_misses, stats.device_misses),
        ("evictions", "Adapters that were evicted.", stats.host_evictions, stats.device_evictions),
    ):
        yield _by_level(CounterMetricFamily, name, text, host, device)
    for name, text, host, device in (
        ("adapters", "Cached adapters.", stats.host_adapters, stats.device_adapters),
        ("used_bytes", "Memory in use.", stats.host_bytes_used, used),
        ("capacity_bytes", "Capacity.", stats.host_bytes_total, capacity),
    ):
        yield _by_level(GaugeMetricFamily, name, text, host, device)
    yield _gauge(
        "lora_cache_memory_bytes",
        "Memory of the host level, and of the device level if that has memory of its own.",
        stats.memory_bytes,
    )
    yield _gauge(
        "lora_cache_saved_bytes",
        "Memory that the host level saves with shared and compressed matrices and rows that change nothing.",
        stats.saved_bytes,
    )
    yield _gauge(
        "lora_cache_saved_products",
        "Products of a token that adapters of the host level need not make because A is shared or B is zero.",
        stats.saved_products,
    )
    yield _gauge(
        "lora_cache_pinned_bytes",
        "Pinned memory for the host level's adapters, in use or not; 0 on a CPU.",
        stats.pinned_bytes,
    )
    yield _count(
        "lora_staged_loads",
        "Loads to the device level of adapters that are not in pinned memory.",
        stats.staged_loads,
    )
    yield _count(
        "lora_steps_waiting_for_adapters",
        "Steps with room for requests whose adapters got no room on the device level.",
        stats.steps_waiting_for_adapters,
    )
    yield _count("lora_loads", "Loads to the device level, including those in progress.", stats.device_misses)
    yield _count("lora_load_failures", "Loads to the device level that failed.", stats.failed_loads)
    yield _count("lora_load_seconds", "Time spent on loads to the device level.", stats.load_seconds)
    yield _gauge("lora_loads_in_flight", "Loads to the device level that are in progress.", stats.loads_in_flight)


def _by_level(
    family_type: type[CounterMetricFamily] | type[GaugeMetricFamily], name: str, text: str, host: float, device: float
) -> Metric:
    family = family_type(f"adaptrt_lora_cache_{name}", f"LoRA cache, by level: {text}", labels=["level"])
    family.add_metric(["host"], host)
    family.add_metric(["device"], device)
    return family


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"adaptrt_{name}", text, value=value)


def _count(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"adaptrt_{name}", text, value=value)
