"""Scenarios of `adaptrt bench ENGINE`: the user's engine with the load and adapters from the flags."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Final

from ..._core import ConfigError, LoraConfig
from ...formats.sources import find_adapter
from ...runtime.compiled_engine import CompiledEngine
from .scenario_types import NO_ADAPTERS, AdapterMix, Decode, Popularity, Prefill, Scenario, Serve

NAME: Final = "engine"
REQUESTS: Final = 64
CONCURRENCY: Final = 16
LENGTHS: Final = {"input_len": "128", "output_len": "64"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of the load."""
    load = parser.add_argument_group("load")
    load.add_argument("--lora_dir", nargs="+", metavar="ADAPTER", help="PEFT adapters that requests use")
    load.add_argument(
        "--zipf",
        type=float,
        metavar="S",
        help="adapter i is requested 1 / (i + 1)^S as often (default: all equally often)",
    )
    load.add_argument("--requests", type=int, metavar="N", help=f"requests in a sample (default: {REQUESTS})")
    load.add_argument(
        "--concurrency", type=int, metavar="N",
        help="closed loop: number of concurrent requests; the next one starts when one ends (default: "
        f"{CONCURRENCY}, or the engine's maximum)",
    )  # fmt: skip
    load.add_argument(
        "--rate", type=float, metavar="R", help="open loop: R requests per second, independent of earlier requests"
    )
    load.add_argument("--cv", type=float, metavar="CV", help="coefficient of variation of the times between arrivals")
    for name, what in (("input_len", "of a prompt"), ("output_len", "generated")):
        load.add_argument(
            f"--{name}", metavar="N|LOW:HIGH", help=f"tokens {what}: N, or from LOW to HIGH (default: {LENGTHS[name]})"
        )


def engine_rows(args: argparse.Namespace, engine: CompiledEngine) -> tuple[Scenario, ...]:
    """Scenarios: one prompt, a full generating batch, and a stream of requests. Raises ConfigError for invalid
    flags."""
    requests, concurrency = _count(args, "requests"), _count(args, "concurrency")
    inputs, outputs = _lengths(args, "input_len"), _lengths(args, "output_len")
    problems = [
        f"--{name} is {value}; accepted: numbers above 0"
        for name in ("zipf", "rate", "cv")
        if (value := getattr(args, name)) is not None and not 0 < value < float("inf")
    ]
    if args.rate is not None and concurrency is not None:
        problems.append("--concurrency and --rate: expected one of them, for a closed or an open loop")
    if args.cv is not None and args.rate is None:
        problems.append("--cv has no effect without --rate")
    if args.zipf is not None and not args.lora_dir:
        problems.append("--zipf has no effect without --lora_dir")
    if problems:
        raise ConfigError("; ".join(problems))
    batch = min(concurrency or CONCURRENCY, engine.config.build_config.max_batch_size)
    mix = _adapters([find_adapter(name).directory for name in args.lora_dir or []], engine)
    common: dict[str, Any] = {"engine": NAME, "adapters": mix, "unit": "tok/s"}
    longest_input, longest_output = inputs[1] - 1, max(4, outputs[1] - 1)
    return (
        Prefill(name="prefill", title=f"prefill, {longest_input} tokens", input_length=longest_input, **common),
        Decode(
            name="decode", title=f"decode, {batch} requests", requests=batch, input_length=longest_input,
            output_length=longest_output, **common,
        ),
        Serve(
            name="serve",
            title=f"{args.rate:g} requests/s" if args.rate is not None else f"{batch} requests at a time",
            popularity=Popularity(power=1.0) if args.zipf is None else Popularity(zipf=args.zipf),
            base_share=0.0,
            device_adapters=None,
            requests=requests or REQUESTS,
            input_length=inputs,
            output_length=outputs,
            concurrency=None if args.rate is not None else batch,
            rate=args.rate,
            cv=1.0 if args.cv is None else args.cv,
            first_token_target=6.0,
            seed=42,
            sweep=None,
            **common,
        ),
    )  # fmt: skip


def _count(args: argparse.Namespace, name: str) -> int | None:
    value: int | None = getattr(args, name)
    if value is not None and value < 1:
        raise ConfigError(f"--{name} is {value}; accepted: 1 and more")
    return value


def _lengths(args: argparse.Namespace, name: str) -> tuple[int, int]:
    """Parses N or LOW:HIGH as [low, high)."""
    text: str = getattr(args, name) or LENGTHS[name]
    low, colon, high = text.partition(":")
    bounds = (low, high) if colon else (low, low)
    if not all(bound.isdecimal() and bound.isascii() for bound in bounds) or not 1 <= int(bounds[0]) <= int(bounds[1]):
        raise ConfigError(f"--{name} is {text}; accepted: N or LOW:HIGH with 1 <= LOW <= HIGH")
    return int(bounds[0]), int(bounds[1]) + 1


def _adapters(directories: list[Path], engine: CompiledEngine) -> AdapterMix:
    """Raises AdapterError for an adapter that cannot be read, or that the engine cannot serve."""
    if not directories:
        return NO_ADAPTERS
    if not engine.config.build_config.lora_enabled:
        raise ConfigError(f"{engine.directory}: was built without LoRA; --lora_dir needs an engine with LoRA")
    given = [LoraConfig.from_peft(index, path, engine) for index, path in enumerate(directories)]
    ranks = tuple(int(lora.config[..., 2].max()) for lora in given)
    return AdapterMix(len(given), ranks, directories=tuple(map(str, directories)))
