"""Times of the whole engine: random models of published shapes, served by the executor.

A step's time is the median of the differences between the ends of consecutive steps, as the executor reports them.
"""

from __future__ import annotations

import gc
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cold_adapters import first_token_rows
from device_trace import Event, activity_of, device_events
from engine_models import LLAMA_1B, LLAMA_8B, TINY, TINY_TIED, RandomAdapter, Shape, Weights, start_engine
from machine import Machine
from rates import limit_microseconds
from results import KernelTime, Row

from adaptrt import (
    ExecutorConfig,
    KvCacheConfig,
    LoraConfig,
    OutputConfig,
    PeftCacheConfig,
    Request,
    _core,
)
from adaptrt.runtime.memory import available_memory

RANK = 16
_COPIED_BYTES = 1 << 28
_WAIT_SECONDS = 60
_STATISTICS_KEPT = 100000


@dataclass(frozen=True)
class Scale:
    """Numbers of the timings."""

    large: Shape
    small: Shape
    requests: int = 64
    """Requests of the batches whose time is compared with the roofline."""
    context: int = 512
    few_adapters: int = 8
    alone_tokens: int = 128
    batch_tokens: int = 72
    prompt: int = 2048
    prompt_repeats: int = 6
    profiled_tokens: int = 400
    profiled_tokens_alone: int = 2000
    profiled_seconds: float = 0.25
    peer_requests: int = 16
    peer_prompt: int = 128
    peer_tokens: int = 24
    adapters: int = 1000
    """Adapters of the row that loads them while requests run."""
    room: int = 64
    at_once: int = 32
    cache_requests: int = 640
    cache_prompt: int = 64
    cache_tokens: int = 64
    max_num_tokens: int = 8192
    cold_adapters: int = 9
    """Adapters of the rows for first tokens with adapters that are not on the device."""
    cold_prompt: int = 512


FULL = Scale(LLAMA_8B, LLAMA_1B)
EMULATED = Scale(
    TINY, TINY_TIED, requests=3, context=20, few_adapters=2, alone_tokens=4, batch_tokens=6, prompt=24,
    prompt_repeats=2, peer_requests=2, peer_prompt=6, peer_tokens=3, adapters=6, room=2, at_once=2, cache_requests=6,
    cache_prompt=5, cache_tokens=2, max_num_tokens=64, cold_adapters=2, cold_prompt=9,
)  # fmt: skip


@dataclass(frozen=True)
class Steps:
    """Times of comparable steps, in microseconds."""

    count: int
    period: float
    """From the end of a step to the end of the next one."""
    latency: float
    """Planning, the engine's step, sampling and responses."""
    engine: float
    """The engine's part of the latency."""
    cpu: float
    """Time of this process's threads for each step of the whole run, its prompts included."""

    def describe(self) -> str:
        """Returns the details for a row."""
        host = self.latency - self.engine
        return f"{self.count} steps, engine {self.engine:.0f} us, host {host:.0f} us, CPU {self.cpu:.0f} us"


class Server:
    """An executor of a random model, and its adapters."""

    def __init__(
        self,
        machine: Machine,
        weights: Weights,
        scale: Scale,
        *,
        max_batch_size: int,
        room: int = 0,
        adapters: int = 0,
        seq_len: int = 4096,
        kv_tokens: int | None = None,
        look_ahead: bool = True,
    ) -> None:
        """room: adapters that the device holds. adapters: those that the host holds. 0: the engine has no LoRA."""
        self.shape = weights.shape
        self._machine = machine
        self._random = random.Random(3)
        program = weights.program(
            max_rank=RANK if room else 0,
            max_batch_size=max_batch_size,
            max_num_tokens=scale.max_num_tokens,
            max_seq_len=seq_len,
            tokens_per_block=64,
        )
        begin = time.monotonic()
        engine = start_engine(machine, program, look_ahead=look_ahead)
        self.load_seconds = time.monotonic() - begin
        config = ExecutorConfig(
            enable_chunked_context=True,
            kv_cache_config=KvCacheConfig(
                enable_block_reuse=False, max_tokens=kv_tokens or max_batch_size * (scale.context + 512)
            ),
            iter_stats_max_iterations=_STATISTICS_KEPT,
        )
        if room:
            config.peft_cache_config = _cache_config(program.lora, self.shape, room, max(room, adapters))
            self.adapter = RandomAdapter(machine, program.lora, RANK)
        self.executor = _core.Executor(engine, config, available_memory())

    def close(self) -> None:
        """Ends the executor and frees its memory on the device."""
        self.executor.shutdown()
        del self.executor
        gc.collect()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def put(self, tasks: Iterable[int]) -> float:
        """Stores adapters on the host level. Returns the seconds."""
        begin = time.monotonic()
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda task: self.executor.put_adapter(self.adapter.named(task)), tasks))
        return time.monotonic() - begin

    def prompt(self, length: int) -> list[int]:
        """Returns a random prompt."""
        return self._random.choices(range(2, self.shape.vocab_size), k=length)

    def ask(self, length: int, tokens: int, adapter: int | None = None) -> Request:
        """Returns a greedy request without an end token. adapter: a number given to put(), or None."""
        lora = None if adapter is None else LoraConfig(adapter)
        output = OutputConfig(exclude_input_from_output=True)
        return Request(self.prompt(length), tokens, output_config=output, lora_config=lora)

    def run(self, requests: Sequence[Request]) -> tuple[list[Any], float, float]:
        """Runs requests to their end. Returns (statistics of the steps, seconds, seconds of CPU time)."""
        self.executor.get_latest_iteration_stats()
        begin, cpu = time.monotonic(), time.process_time()
        for request_id in self.executor.enqueue_requests(requests):
            self.wait(request_id)
        seconds, cpu = time.monotonic() - begin, time.process_time() - cpu
        return self.executor.get_latest_iteration_stats(), seconds, cpu

    def wait(self, request_id: int) -> None:
        """Waits for the end of a request. Raises RuntimeError if it failed."""
        for response in self.executor.await_responses(request_id):
            if response.has_error():
                raise RuntimeError(response.error_msg)

    def decode(self, count: int, context: int, tokens: int, adapters: Sequence[int | None] = (None,)) -> Steps:
        """Times decodes of `count` requests, whose contexts have about `context` tokens half way."""
        prompt = max(1, context - tokens // 2)
        requests = [self.ask(prompt, tokens, adapters[i % len(adapters)]) for i in range(count)]
        stats, _, cpu = self.run(requests)

        def counts(step: Any) -> bool:
            batch = step.inflight_batching_stats
            return bool(batch.num_gen_requests == count and batch.num_ctx_tokens == 0)

        return _steps(stats, counts, cpu)

    def prefill(self, length: int, repeats: int, adapter: int | None = None) -> Steps:
        """Times steps that compute a whole prompt, one request after the other."""
        found, total = [], 0.0
        for _ in range(repeats):
            stats, _, cpu = self.run([self.ask(length, 1, adapter)])
            steps = [step for step in stats if step.inflight_batching_stats.num_ctx_tokens > 0]
            found.append((sum(step.iter_latency_ms for step in steps), sum(step.engine_latency_ms for step in steps)))
            total += cpu
        latency = statistics.median(one for one, _ in found) * 1e3
        engine = statistics.median(other for _, other in found) * 1e3
        return Steps(repeats, latency, latency, engine, total / repeats * 1e6)


def engine_timings(machine: Machine, rates: dict[str, float], part: str) -> Iterator[Row | KernelTime]:
    """Measures the rows of a part, one of PARTS, and the kernels of its steps."""
    begin = time.monotonic()
    yield from PARTS[part](machine, FULL if machine.is_gpu else EMULATED, rates)
    yield Row(f"part {part}", time.monotonic() - begin, "s")
    gc.collect()


def _large(machine: Machine, scale: Scale, rates: dict[str, float]) -> Iterator[Row | KernelTime]:
    """The large model: decodes and prompts, with and without adapters, and the kernels of a step."""
    begin = time.monotonic()
    weights = Weights(machine, scale.large)
    name = scale.large.name
    many = list(range(1, scale.requests + 1))
    server = Server(machine, weights, scale, max_batch_size=scale.requests)
    yield Row(f"{name}: engine loaded", server.load_seconds, "s", note=f"{time.monotonic() - begin:.0f} s with weights")
    with server:
        yield from _decode_alone(server, scale, rates)
        server.decode(scale.requests, scale.context, scale.batch_tokens // 2)  # captures graphs
        base = server.decode(scale.requests, scale.context, scale.batch_tokens)
        yield _batch_row(server, scale, rates, base, "without LoRA", 0, 0.80)
        server.prefill(scale.prompt, 2)
        prompt = server.prefill(scale.prompt, scale.prompt_repeats)
        yield _prompt_row(server.shape, scale, rates, prompt)
        if machine.is_gpu:
            yield from _kernels(server, scale, base)
            yield from _prompt_kernels(server, scale, prompt)
    with Server(machine, weights, scale, max_batch_size=scale.requests, room=scale.requests) as server:
        yield Row(f"{name}: put {scale.requests} adapters on the host level", server.put(many), "s")
        yield _load_row(server, many, _pinned_rate(machine))
        server.decode(scale.requests, scale.context, scale.batch_tokens // 2)
        unused = server.decode(scale.requests, scale.context, scale.batch_tokens)
        yield _batch_row(server, scale, rates, unused, "LoRA unused", 0, 0.80)
        share = base.period / unused.period
        yield Row(f"{name}: LoRA unused / without", unused.period, "us", base.period, share, 0.995)
        server.decode(scale.requests, scale.context, scale.batch_tokens // 2, many)
        with_many = server.decode(scale.requests, scale.context, scale.batch_tokens, many)
        yield _batch_row(server, scale, rates, with_many, f"{scale.requests} adapters", scale.requests, 0.85)
        few = many[: scale.few_adapters]
        with_few = server.decode(scale.requests, scale.context, scale.batch_tokens, few)
        yield _batch_row(server, scale, rates, with_few, f"{len(few)} adapters", len(few), 0.85)
        server.prefill(scale.prompt, 2, 1)
        adapted = server.prefill(scale.prompt, scale.prompt_repeats, 1)
        again = server.prefill(scale.prompt, scale.prompt_repeats)
        yield Row(
            f"{name}: prompt of {scale.prompt} with an adapter / without", adapted.engine, "us", again.engine,
            again.engine / adapted.engine, 0.95, adapted.describe(),
        )  # fmt: skip
        if machine.is_gpu:
            yield from _kernels(server, scale, with_many, many)
            yield from _prompt_kernels(server, scale, adapted, 1)
        yield from _cold_rows(server, weights, scale)


def _small(machine: Machine, scale: Scale, rates: dict[str, float]) -> Iterator[Row | KernelTime]:
    """The small model: decodes of one request, and of many with and without look-ahead."""
    weights = Weights(machine, scale.small)
    with Server(machine, weights, scale, max_batch_size=scale.requests, look_ahead=False) as server:
        waiting = [_decode_twice(server, count, scale) for count in (1, scale.requests)]
    server = Server(machine, weights, scale, max_batch_size=scale.requests)
    with server:
        yield from _decode_alone(server, scale, rates)
        for count, (steps, tokens) in zip((1, scale.requests), waiting, strict=True):
            ahead, same_tokens = _decode_twice(server, count, scale)
            if same_tokens != tokens:
                raise RuntimeError(f"tokens of {count} requests differ with and without look-ahead")
            yield Row(
                f"{scale.small.name}: decode of {count} requests, look-ahead / without", ahead.period, "us",
                steps.period, steps.period / ahead.period, 1.0,
                f"{ahead.describe()}; without: {steps.describe()}; same tokens",
            )  # fmt: skip
        if machine.is_gpu:
            alone = server.decode(1, scale.context, scale.alone_tokens)
            yield from _kernels(server, scale, alone, count=1)


def _peft(machine: Machine, scale: Scale, rates: dict[str, float]) -> Iterator[Row | KernelTime]:
    """The small model with as many adapters as requests, compared with transformers + PEFT."""
    count = scale.peer_requests
    with Server(machine, Weights(machine, scale.small), scale, max_batch_size=count, room=count) as server:
        adapters = list(range(1, count + 1))
        server.put(adapters)
        context = scale.peer_prompt + scale.peer_tokens
        server.decode(count, context, 2 * scale.peer_tokens, adapters)
        ours = server.decode(count, context, 2 * scale.peer_tokens, adapters)
    torch.manual_seed(5)
    theirs = _peft_step_seconds(machine, scale) * 1e6
    yield Row(
        f"{scale.small.name}: decode of {count} requests of {count} adapters", count / ours.period * 1e6, "tokens/s",
        count / theirs * 1e6, theirs / ours.period, 10.0,
        f"share: times the rate of transformers + PEFT; {ours.describe()}",
    )  # fmt: skip


def _cache(machine: Machine, scale: Scale, rates: dict[str, float]) -> Iterator[Row | KernelTime]:
    """Loads of adapters, and requests for more adapters than the device holds, compared with room for all."""
    weights = Weights(machine, scale.small)
    tasks = range(1, scale.adapters + 1)
    popularity = np.array(tasks, np.float64) ** -0.9
    drawn = np.random.default_rng(9).choice(tasks, size=scale.cache_requests, p=popularity / popularity.sum())
    rates_of: list[float] = []
    for room in (scale.room, scale.adapters):
        with Server(
            machine, weights, scale, max_batch_size=scale.at_once, room=room, adapters=scale.adapters
        ) as server:
            if room == scale.room:
                seconds = server.put(tasks)
                rate = scale.adapters * server.shape.adapter_bytes(RANK) / seconds / 1e9
                yield Row(f"put {scale.adapters} adapters on the host level", seconds, "s", note=f"{rate:.1f} GB/s")
                yield _load_row(server, tasks[: scale.room], _pinned_rate(machine))
            else:
                # Adapters that no request names would only take time.
                used = sorted(set(drawn.tolist()))
                server.put(used)
                for task in used:
                    server.executor.pin_adapter(task)
            requests = [server.ask(scale.cache_prompt, scale.cache_tokens, int(task)) for task in drawn]
            _in_flight(server, requests[: 2 * scale.at_once], scale.at_once)  # captures graphs
            before = server.executor.lora_cache_stats()
            rates_of.append(scale.cache_tokens * len(requests) / _in_flight(server, requests, scale.at_once))
            loads = server.executor.lora_cache_stats().device_misses - before.device_misses
            note = f"{len(requests)} requests of {len(set(drawn.tolist()))} adapters, {loads} loads"
            yield Row(f"{scale.adapters} adapters, room for {room}", rates_of[-1], "tokens/s", note=note)
    some, every = rates_of
    yield Row(
        f"{scale.adapters} adapters, room for {scale.room} / for all", some, "tokens/s", every, some / every, 0.90
    )


PARTS: dict[str, Callable[[Machine, Scale, dict[str, float]], Iterator[Row | KernelTime]]] = {
    "large": _large,
    "small": _small,
    "peft": _peft,
    "cache": _cache,
}
"""The parts of these timings, by name."""


def step_limit(
    shape: Shape, rates: dict[str, float], tokens: int, contexts: Sequence[int], *, adapters: int, logits: int
) -> float:
    """Returns the minimum microseconds of a step: the sum over its products, attention and adapters of the longer of
    the times for bytes and for operations.

    contexts: the keys that each sequence's tokens see, on average, times its tokens. adapters: how many are used; all
    tokens have one if this is not 0.
    """
    products = [*shape.linears] * shape.num_hidden_layers
    total = 0.0
    for inputs, outputs in products:
        num_bytes = 2.0 * (inputs * outputs + tokens * (inputs + outputs))
        total += limit_microseconds(rates, num_bytes, 2.0 * tokens * inputs * outputs)
    vocabulary = shape.hidden_size * shape.vocab_size
    total += limit_microseconds(rates, 2.0 * vocabulary + 4.0 * logits * shape.vocab_size, 2.0 * logits * vocabulary)
    width = shape.num_attention_heads * shape.head_dim
    keys = sum(contexts)
    decodes = tokens == len(contexts)
    # A prompt's keys and values are written once; a decode reads those of its context.
    key_bytes = float(shape.key_value_bytes) * (keys if decodes else tokens)
    total += shape.num_hidden_layers * limit_microseconds(rates, key_bytes, 4.0 * width * keys)
    if adapters:
        flops = 1.0 * tokens * shape.adapter_bytes(RANK)  # Two operations for each element of two bytes.
        total += limit_microseconds(rates, float(adapters) * shape.adapter_bytes(RANK), flops)
    return total


def _decode_twice(server: Server, count: int, scale: Scale) -> tuple[Steps, list[list[int]]]:
    """Times decodes of `count` requests, after a run that captures graphs. Returns the times, and the tokens of other
    requests, which are the same for each server."""
    tokens = scale.batch_tokens if count > 1 else scale.alone_tokens
    server.decode(count, scale.context, tokens)
    steps = server.decode(count, scale.context, tokens)
    requests = [
        Request(list(range(2, 4 + i % 20)), tokens, output_config=OutputConfig(exclude_input_from_output=True))
        for i in range(count)
    ]
    answers = []
    for request_id in server.executor.enqueue_requests(requests):
        responses = server.executor.await_responses(request_id)
        if responses[-1].has_error():
            raise RuntimeError(responses[-1].error_msg)
        answers.append(responses[-1].result.output_token_ids[0])
    return steps, answers


def _decode_alone(server: Server, scale: Scale, rates: dict[str, float]) -> Iterator[Row]:
    server.decode(1, scale.context, scale.alone_tokens)  # captures graphs
    steps = server.decode(1, scale.context, scale.alone_tokens)
    shape = server.shape
    num_bytes = shape.product_bytes + scale.context * shape.num_hidden_layers * shape.key_value_bytes
    limit = 1e6 * num_bytes / rates["bytes_per_second"]
    target = 0.85 if shape.product_bytes > 8e9 else 0.70
    name = f"{shape.name}: decode of 1 request"
    yield Row(name, steps.period, "us", limit, limit / steps.period, target, steps.describe())
    yield Row(f"{name}, rate", 1e6 / steps.period, "tokens/s", 1e6 / limit)


def _batch_row(
    server: Server, scale: Scale, rates: dict[str, float], steps: Steps, what: str, adapters: int, target: float
) -> Row:
    count = scale.requests
    limit = step_limit(server.shape, rates, count, [scale.context] * count, adapters=adapters, logits=count)
    name = f"{server.shape.name}: decode of {count} requests at {scale.context}, {what}"
    return Row(name, steps.period, "us", limit, limit / steps.period, target, steps.describe())


def _prompt_row(shape: Shape, scale: Scale, rates: dict[str, float], steps: Steps) -> Row:
    tokens = scale.prompt
    of_layer = sum(inputs * outputs for inputs, outputs in shape.linears)
    flops = 2.0 * tokens * shape.num_hidden_layers * of_layer + 2.0 * shape.hidden_size * shape.vocab_size
    width = shape.num_attention_heads * shape.head_dim
    flops += 4.0 * width * shape.num_hidden_layers * tokens * (tokens + 1) / 2
    limit = 1e6 * flops / rates["flops_per_second"]
    note = f"{flops / steps.engine / 1e6:.0f} TFLOP/s; {steps.describe()}"
    return Row(f"{shape.name}: prompt of {tokens}", steps.engine, "us", limit, limit / steps.engine, 0.75, note)


def _load_row(server: Server, tasks: Sequence[int], link: float) -> Row:
    """Times copies of adapters to the device, one after the other. link: bytes per second from pinned memory."""
    times = []
    for task in tasks:
        begin = time.monotonic()
        server.executor.pin_adapter(task)
        times.append(time.monotonic() - begin)
        server.executor.unpin_adapter(task)
    stats = server.executor.lora_cache_stats()
    size = server.shape.adapter_bytes(RANK)
    rate = size / statistics.median(times)
    note = f"{size / 1e6:.1f} MB each"
    if stats.load_seconds > 0:
        note += f"; copies without waits {stats.device_misses * size / stats.load_seconds / 1e9:.1f} GB/s"
    name = f"{server.shape.name}: adapter from host to device"
    return Row(name, rate / 1e9, "GB/s", link / 1e9, rate / link, 0.80, note)


def _cold_rows(server: Server, weights: Weights, scale: Scale) -> Iterator[Row]:
    """Times first tokens of adapters that the device does not hold. The numbers after those in use are new."""
    first = scale.requests + 1
    cold = range(first, first + scale.cold_adapters)
    server.put(cold)
    for task in range(1, first):  # evicts those that are to be cold
        server.executor.pin_adapter(task)
        server.executor.unpin_adapter(task)
    yield from first_token_rows(
        server.shape.name, server.executor, server.adapter, weights.modules, server.prompt(scale.cold_prompt),
        scale.requests, cold, range(cold.stop, cold.stop + scale.cold_adapters),
    )  # fmt: skip


def _in_flight(server: Server, requests: Sequence[Request], at_once: int) -> float:
    """Keeps `at_once` requests running. Returns the seconds for all of them."""
    begin = time.monotonic()
    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(lambda request: server.wait(server.executor.enqueue_request(request)), requests))
    return time.monotonic() - begin


def _kernels(
    server: Server, scale: Scale, unprofiled: Steps, adapters: Sequence[int | None] = (None,), count: int | None = None
) -> Iterator[Row | KernelTime]:
    """Profiles decodes: the time for which the device is idle, and the kernels of a step."""
    count = count or scale.requests
    what = f"{server.shape.name}: decode of {count} requests" + (", adapters" if adapters[0] is not None else "")
    _traced(lambda: None)  # The first use of the profiler takes longer.
    tokens = scale.profiled_tokens if count > 1 else scale.profiled_tokens_alone
    requests = [server.ask(scale.context // 2, tokens, adapters[i % len(adapters)]) for i in range(count)]
    server.executor.get_latest_iteration_stats()
    ids = server.executor.enqueue_requests(requests)
    try:
        deadline = time.monotonic() + _WAIT_SECONDS
        while not _decodes_only(server, count):
            if time.monotonic() > deadline:
                raise RuntimeError(f"{what}: the requests did not all decode at the same time")
            time.sleep(0.002)
        events = _traced(lambda: time.sleep(scale.profiled_seconds))
    finally:
        for request_id in ids:
            server.executor.cancel_request(request_id)
        for request_id in ids:
            server.wait(request_id)
    yield from _activity_rows(what, events, unprofiled.period, target=0.97)


def _prompt_kernels(
    server: Server, scale: Scale, unprofiled: Steps, adapter: int | None = None
) -> Iterator[Row | KernelTime]:
    """Profiles whole prompts, one request after the other."""
    what = f"{server.shape.name}: prompt of {scale.prompt}" + (", adapter" if adapter is not None else "")
    events = _traced(lambda: server.prefill(scale.prompt, scale.prompt_repeats, adapter))
    yield from _activity_rows(what, events, unprofiled.engine, target=0.0)


def _activity_rows(what: str, events: Sequence[Event], period: float, *, target: float) -> Iterator[Row | KernelTime]:
    """period: microseconds of a step without the profiler."""
    found = activity_of(events)
    if found is None:
        yield Row(f"{what}: device busy", 0.0, "us", note=f"the profiler saw {len(events)} events and no whole step")
        return
    note = f"{found.steps} steps of {found.period:.0f} us when profiled, {found.launches:.0f} launches"
    yield Row(f"{what}: device busy", found.busy, "us", period, found.busy / period, target, note)
    yield Row(f"{what}: longest pause of a step", found.pause, "us", period, 1 - found.pause / period, target)
    for name, kernel in found.kernels.items():
        mean = kernel.microseconds / kernel.count
        yield KernelTime(what, name, kernel.count / found.steps, mean, kernel.microseconds / found.microseconds)


def _decodes_only(server: Server, count: int) -> bool:
    stats = server.executor.get_latest_iteration_stats()
    return any(
        step.inflight_batching_stats.num_gen_requests == count and step.inflight_batching_stats.num_ctx_tokens == 0
        for step in stats
    )


def _traced(work: Callable[[], object]) -> list[Event]:
    """Returns the device's kernels and copies while `work` runs."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        work()
    with tempfile.TemporaryDirectory(prefix="adaptrt-") as name:
        path = Path(name) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return device_events(json.loads(path.read_text()))


def _steps(stats: Sequence[Any], counts: Callable[[Any], bool], cpu: float) -> Steps:
    """Returns the times of the steps that count, from the second of consecutive ones on."""
    periods, found = [], []
    for before, step in pairwise(stats):
        if counts(before) and counts(step):
            periods.append((_end(step) - _end(before)) * 1e6)
            found.append(step)
    if not found:
        raise RuntimeError(f"none of {len(stats)} steps had the whole batch")
    return Steps(
        len(found),
        statistics.median(periods),
        statistics.median(step.iter_latency_ms for step in found) * 1e3,
        statistics.median(step.engine_latency_ms for step in found) * 1e3,
        cpu / len(stats) * 1e6,
    )


def _end(step: Any) -> float:
    return datetime.strptime(step.timestamp, "%m-%d-%Y %H:%M:%S.%f").timestamp()


def _cache_config(layout: _core.LoraLayout, shape: Shape, room: int, adapters: int) -> PeftCacheConfig:
    """Returns levels for `room` and `adapters` adapters of RANK."""

    def config(modules: int) -> PeftCacheConfig:
        return PeftCacheConfig(
            num_device_module_layer=modules,
            optimal_adapter_size=RANK,
            max_adapter_size=RANK,
            host_cache_size=int((adapters + 4) * shape.adapter_bytes(RANK) * 1.5),
            num_copy_streams=2,
        )

    widest = 2 * max(inputs + outputs for inputs, outputs in shape.adapted)
    sizes = _core.resolve_cache_sizes(config(shape.num_hidden_layers * RANK * 8), layout, 1 << 50)
    return config(-(-(room + 1) * sizes.page_bytes // widest))


def _pinned_rate(machine: Machine) -> float:
    """Returns the bytes per second of a copy from pinned memory."""
    if not machine.is_gpu:
        return 1e9
    host = torch.empty(_COPIED_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(host, device=machine.device)
    times = []
    for _ in range(5):
        machine.synchronize()
        begin = time.monotonic()
        target.copy_(host, non_blocking=True)
        machine.synchronize()
        times.append(time.monotonic() - begin)
    return _COPIED_BYTES / min(times)


def _peft_step_seconds(machine: Machine, scale: Scale) -> float:
    """Returns the seconds of a decode step of transformers + PEFT, with one adapter for each request."""
    import peft
    import transformers

    names = {"architectures", "model_type", "torch_dtype"}
    fields = {name: value for name, value in scale.small.config().items() if name not in names}
    config = transformers.LlamaConfig(**fields, attn_implementation="sdpa")
    with torch.device(machine.device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        lora = peft.LoraConfig(r=RANK, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM")
        adapted: Any = peft.get_peft_model(model, lora, adapter_name="1", autocast_adapter_dtype=False)
        for number in range(2, scale.peer_requests + 1):
            adapted.add_adapter(str(number), lora, autocast_adapter_dtype=False)
    adapted = adapted.to(device=machine.device, dtype=torch.bfloat16).eval()
    adapters = [str(number) for number in range(1, scale.peer_requests + 1)]
    shape = (scale.peer_requests, scale.peer_prompt)
    tokens = torch.randint(2, scale.small.vocab_size, shape, device=machine.device)
    cache, times = transformers.DynamicCache(config=config), []
    with torch.inference_mode():
        for _ in range(scale.peer_tokens):
            machine.synchronize()
            begin = time.monotonic()
            output = adapted(
                input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1, adapter_names=adapters
            )
            tokens = output.logits[:, -1].argmax(-1, keepdim=True)
            machine.synchronize()
            times.append(time.monotonic() - begin)
    return statistics.median(times[1:])
