"""Checks of served requests: the executor with this machine's device and kernels, and torch in place of TensorRT."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from machine import Machine
from results import Check
from session_plan import Evaluation, TorchContext

import adaptrt
from adaptrt import ConfigError
from adaptrt.runtime.engine import LoadedEngine
from support.adapter_crowds import (
    ADAPTERS,
    SMALL,
    SMALL_CROWD,
    TOLERANCE,
    Asked,
    Model,
    Served,
    answers_of,
    make_served,
)
from support.models import ModelSpec
from support.serving import Answer
from support.stand_in_engine import StandInEngine, check_answer, difference, stand_in_compiler, stand_in_engine

LARGE = Model.of(
    ModelSpec(
        vocab_size=1000,
        hidden_size=512,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=1024,
        num_hidden_layers=4,
    ),
    max_batch_size=16,
    max_num_tokens=256,
    max_seq_len=640,
    tokens_per_block=32,
)
_LARGE_REQUESTS = 60
# Number of copies of each adapter under other names, so that there are more than fit on the device.
_COPIES = 4
# Minimum share of the tokens that are compared. If two tokens are equally good within the tolerance, answers may differ
# from there on, which happens often in a thousand tokens of a random bfloat16 model.
_COMPARED = 0.5
# Error of every kernel run after the device is lost.
_LOST = "cannot be used any more"


@dataclass(frozen=True)
class Crowds:
    """Requests to a model."""

    model: Model
    mixed: Sequence[Sequence[Asked]]
    """Prompts of one token to several chunks, for the base model and for more adapters than fit on the device."""
    whole: Sequence[Asked]
    """Requests that have the same bits in a batch and in their own steps: all fit in one step, so no prompt is chunked,
    and all are short, so no decode's keys are split."""


def session_checks(machine: Machine, *, subset: bool) -> Iterator[Check]:
    """Runs crowds for each type. A `subset` uses a small model and few requests."""
    yield from _device_checks(machine)
    crowds = _small_crowds() if subset else _large_crowds()
    for dtype in TOLERANCE:
        with tempfile.TemporaryDirectory(prefix="adaptrt-") as name, stand_in_compiler("8.0"):
            served = make_served(crowds.model, dtype, Path(name), "8.0")
            yield from crowd_checks(dtype, crowds, served, partial(_engine, machine, crowds.model, served))


def crowd_checks(
    dtype: str, crowds: Crowds, served: Served, make_engine: Callable[[], LoadedEngine]
) -> Iterator[Check]:
    """Compares answers with the native engine's, and each request's bits in its own steps with those in a crowd."""
    config = crowds.model.executor_config(num_copy_streams=2)
    adapters = served.adapters * _COPIES
    expected, _ = answers_of(served.native(), adapters, config, crowds.mixed)
    engine = make_engine()
    actual, cache = answers_of(engine, adapters, config, crowds.mixed)
    name = f"session {dtype}: logits and tokens of {len(actual)} requests"
    yield agreement(name, actual, expected, TOLERANCE[dtype])
    yield Check(
        f"session {dtype}: adapters are evicted from the device level",
        cache.device_evictions > 0,
        f"{cache.device_evictions} evictions",
    )
    if isinstance(engine, StandInEngine):
        yield _graphs(dtype, engine)
    together, _ = answers_of(engine, adapters, config, [crowds.whole])
    alone, _ = answers_of(engine, adapters, config, [[asked] for asked in crowds.whole])
    pairs = enumerate(zip(alone, together, strict=True))
    different = [number for number, (one, other) in pairs if not one.same_bits(other)]
    name = f"session {dtype}: bits of {len(crowds.whole)} requests alone and together"
    yield Check(name, not different, f"requests {different} differ")


def lost_device_checks(machine: Machine) -> Iterator[Check]:
    """Checks that a kernel that reads an invalid address ends its request and the executor with the reason. Afterwards
    this process cannot use CUDA.
    """
    with tempfile.TemporaryDirectory(prefix="adaptrt-") as name, stand_in_compiler("8.0"):
        served = make_served(SMALL, "float16", Path(name), "8.0")
        engine = _engine(machine, SMALL, served, _LosingContext)
        executor = adaptrt.Executor(engine, adaptrt.ModelType.DECODER_ONLY, SMALL.executor_config())
        request = adaptrt.Request([5, 6, 7], 2)
        response = executor.await_responses(executor.enqueue_request(request))[-1]
        yield Check("device: its loss ends the request", _LOST in (response.error_msg or ""), str(response.error_msg))
        try:
            executor.await_responses(executor.enqueue_request(request))
            yield Check("device: its loss ends the executor", False, "it still accepts requests")
        except adaptrt.ExecutorClosedError as error:
            yield Check("device: its loss ends the executor", _LOST in str(error), str(error))


class _LosingContext(TorchContext):
    """Launches a kernel with invalid addresses."""

    def enqueue(self, stream: int, shapes: Mapping[str, tuple[int, ...]], addresses: Mapping[str, int]) -> None:
        nowhere = 16
        kernel = self.machine.kernels.LoraKernel(adaptrt.DType.FLOAT16.value, 0, [1], [8], 8, False)
        kernel.enqueue(1, 8, 1, 1, [nowhere] * 6, [nowhere], nowhere, stream)


def _engine(
    machine: Machine, model: Model, served: Served, context: type[TorchContext] = TorchContext
) -> StandInEngine:
    evaluation = Evaluation(machine, model.sizes.max_num_tokens)
    return stand_in_engine(
        served.directory / "tensorrt",
        served.checkpoint,
        machine.kernels.CudaDevice(),
        lambda network, profile, _: context(network, profile, evaluation),
    )


def _small_crowds() -> Crowds:
    return Crowds(SMALL, SMALL_CROWD, SMALL.ask((5, 0, 6), (3, None, 4), (6, 2, 5), (1, 4, 3)))


def _large_crowds() -> Crowds:
    """Returns random requests. The last one runs without others, so its decodes have their own steps."""
    names = (None, *range(_COPIES * len(ADAPTERS)))
    lengths = [random.choice((1, 2, random.randint(3, 60), random.randint(60, 500))) for _ in range(_LARGE_REQUESTS)]
    mixed = [(length, random.choice(names), random.randint(1, 12)) for length in lengths]
    whole = [(random.randint(1, 15), random.choice(names), 20) for _ in range(14)]
    seeds = [random.randrange(1 << 30) for _ in range(3)]
    return Crowds(
        LARGE,
        (LARGE.ask(*mixed, seed=seeds[0]), LARGE.ask((90, 1, 30), seed=seeds[1])),
        LARGE.ask(*whole, seed=seeds[2]),
    )


def agreement(name: str, actual: Sequence[Answer], expected: Sequence[Answer], tolerance: float) -> Check:
    """Compares logits, and tokens up to choices within the tolerance."""
    compared, worst = 0, 0.0
    for one, other in zip(actual, expected, strict=True):
        for field in ("context_logits", "generation_logits"):
            # If tokens differ because of the tolerance, the logits of generated tokens cannot be compared.
            same = field == "context_logits" or one.tokens == other.tokens
            worst = max(worst, difference(getattr(one, field), getattr(other, field))) if same else worst
        try:
            compared += check_answer(one, other, tolerance)
        except AssertionError as error:
            return Check(name, False, str(error))
    tokens = sum(len(answer.tokens) for answer in expected)
    detail = f"{compared} of {tokens} tokens compared, logits within {worst:.2g} of their range"
    return Check(name, compared >= _COMPARED * tokens, detail)


def _graphs(dtype: str, engine: StandInEngine) -> Check:
    """Checks that each graph's context ran once directly and was then captured, and that the first decode context never
    ran."""
    prefill, decode = engine.contexts
    enqueues = [context.num_enqueues for context in decode.others]
    passed = prefill.num_enqueues > 0 and decode.num_enqueues == 0 and len(enqueues) > 0 and set(enqueues) == {2}
    detail = f"{prefill.num_enqueues} prefill steps, {len(enqueues)} graphs"
    return Check(f"session {dtype}: decodes by graphs", passed, detail)


def _device_checks(machine: Machine) -> Iterator[Check]:
    """Checks that the device reports errors, and that it works after an error."""
    device = machine.kernels.CudaDevice()
    memory = device.memory()
    if machine.is_gpu:
        properties = torch.cuda.get_device_properties(machine.device)
        found = (device.info.name, *device.info.compute_capability, memory.total_bytes)
        expected = (properties.name, properties.major, properties.minor, properties.total_memory)
        yield Check("device: name, compute capability and memory", found == expected, f"{found}, {expected} by torch")
    for name, refused in (
        ("refuses an allocation that is too large", lambda: device.allocate(2 * memory.total_bytes)),
        ("refuses the number of a missing GPU", lambda: machine.kernels.CudaDevice(99)),
    ):
        try:
            refused()
            yield Check(f"device: {name}", False, "no error")
        except ConfigError as error:
            yield Check(f"device: {name}", True, str(error))
    held = device.allocate(1 << 20)
    yield Check("device: allocates memory after an error", held.num_bytes == 1 << 20)
