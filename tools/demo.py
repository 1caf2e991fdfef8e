"""Serves a batch in which every request has a different adapter, starting from a small model's Hugging Face files.

Compiles the model, normalises and converts the adapters, and asks all of them one question in one in-flight batch. Then
it asks again with a cache too small for all adapters, and shows the LoRA cache's counters. At last it asks another
model about pictures. The exit status is nonzero if anything is wrong.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from tokenizers import Tokenizer

import adaptrt

from ..builder.cli import run_command
from ..common.json_fields import load_json_object
from ..formats.adapter import Adapter, ConvertedAdapter, convert_adapter, read_adapter
from ..formats.engine.build_config import DEFAULT_TARGET_MODULES
from . import demo_corpus as corpus
from .demo_display import AnswerTable, Row, values_table
from .demo_seeing import show_images
from .demo_steps import BASE, DTYPE, DemoFailure, build_engine, run_adaptrt

_SUMMARY = "Serve one batch in which every request has another adapter, on a small model"
_MAX_RANK = 16
_MAX_TOKENS = 48
_LIMITS = {
    "max_lora_rank": _MAX_RANK, "max_batch_size": 8, "max_input_len": 128, "max_seq_len": 256, "max_num_tokens": 512,
}  # fmt: skip


@dataclass(frozen=True)
class DemoAdapter:
    """An adapter that is ready for requests."""

    task_id: int
    name: str
    kind: str
    tensors: ConvertedAdapter

    def config(self, *, with_tensors: bool) -> adaptrt.LoraConfig:
        """The LoraConfig of a request: with weights for the first request, only the task_id afterwards."""
        if not with_tensors:
            return adaptrt.LoraConfig(self.task_id)
        return adaptrt.LoraConfig(self.task_id, self.tensors.weights, self.tensors.config)


class Crowd:
    """One question to the base model and to every adapter, in one batch."""

    def __init__(self, console: Console, model: Path, question: str, adapters: Sequence[DemoAdapter]) -> None:
        """`model` is the Hugging Face directory, for its tokenizer and its end token."""
        self._console = console
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._end_id = load_json_object(model / "config.json", adaptrt.CheckpointError)["eos_token_id"]
        self._question = question
        self._adapters: tuple[DemoAdapter | None, ...] = (None, *adapters)

    def ask(self, executor: adaptrt.Executor, title: str | None, *, with_tensors: bool) -> list[list[int]]:
        """The tokens of every answer. With a title, the answers are shown in a table while they are generated."""
        rows = [
            Row(adapter.name, adapter.kind) if adapter else Row(BASE, "the base model") for adapter in self._adapters
        ]
        tokens: list[list[int]] = [[] for _ in rows]
        requests = [self._request(adapter, with_tensors) for adapter in self._adapters]
        table = AnswerTable(self._console, title or "", rows)
        with table.shown() if title else nullcontext():
            indices = {request_id: i for i, request_id in enumerate(executor.enqueue_requests(requests))}
            while not all(row.done for row in rows):
                for response in executor.await_responses():
                    if response.has_error():
                        raise DemoFailure(f"request {response.request_id}: {response.error_msg}")
                    index = indices[response.request_id]
                    tokens[index] += response.result.output_token_ids[0]
                    rows[index].text = self._tokenizer.decode(tokens[index]).strip()
                    rows[index].tokens = len(tokens[index])
                    rows[index].done = response.result.is_final
                table.refresh()
        return tokens

    def _request(self, adapter: DemoAdapter | None, with_tensors: bool) -> adaptrt.Request:
        return adaptrt.Request(
            self._tokenizer.encode(corpus.prompt(self._question)).ids,
            _MAX_TOKENS,
            streaming=True,
            end_id=self._end_id,
            lora_config=adapter.config(with_tensors=with_tensors) if adapter else None,
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags."""
    parser.add_argument("--model", type=Path, default=Path("examples/demo/model"), help="Hugging Face directory")
    parser.add_argument("--adapters", type=Path, default=Path("examples/demo/adapters"), help="PEFT directories")
    parser.add_argument(
        "--seeing", type=Path, default=Path("examples/demo/seeing"), help="a vision-language model, and its adapters"
    )
    parser.add_argument("--work_dir", type=Path, help="keep the engine here (default: a temporary directory)")
    parser.add_argument("--question", default="What is the weather in Paris?", help="question for all adapters")


def run(args: argparse.Namespace) -> int:
    """Runs the demo in args.work_dir or a temporary directory."""
    for directory in (args.model, args.adapters, args.seeing):
        if not directory.is_dir():
            raise adaptrt.ConfigError(
                f"{directory}: is not a directory; run from the checkout or give --model, --adapters and --seeing"
            )
    if args.work_dir is not None:
        return _run_in(args.work_dir, args)
    with tempfile.TemporaryDirectory(prefix="adaptrt-demo-") as directory:
        return _run_in(Path(directory), args)


def _run_in(directory: Path, args: argparse.Namespace) -> int:
    console = Console(highlight=False)
    begin = time.perf_counter()
    engine = build_engine(console, args.model, directory / "engine", **_LIMITS)
    adapters = _load_adapters(console, args.adapters, args.model, directory / "normalized")
    console.print(f"Ready after {time.perf_counter() - begin:.1f} s.\n")
    crowd = Crowd(console, args.model, args.question, adapters)
    with _executor(engine, adaptrt.PeftCacheConfig()) as executor:
        title = f"{args.question} (one batch, each row has another adapter)"
        answers = crowd.ask(executor, title, with_tensors=True)
        roomy = executor.lora_cache_stats()
    console.print()
    with _executor(engine, _small_cache(args.model)) as executor:
        crowd.ask(executor, None, with_tensors=True)
        title = "Again with only the task_id, and a cache too small for all adapters: evicted ones are packed again"
        again = crowd.ask(executor, title, with_tensors=False)
        small = executor.lora_cache_stats()
    console.print()
    counters = {"room for all": _counters(roomy), "small": _counters(small)}
    console.print(values_table("The LoRA cache", counters, first="counter"))
    _check(answers, again, small)
    console.print(f"All {len(answers)} answers were the same both times, token by token.\n")
    show_images(console, args.seeing, directory)
    return 0


def _load_adapters(console: Console, directory: Path, model: Path, normalized: Path) -> list[DemoAdapter]:
    """All adapters in `directory`; the magnitudes of DoRA adapters are normalised first."""
    adapters = []
    for task_id, source in enumerate(sorted(path for path in directory.iterdir() if path.is_dir()), start=1):
        adapter = read_adapter(source)
        if adapter.is_dora:
            run_adaptrt(console, "normalize-dora", "-i", source, "-o", normalized / source.name, "-b", model)
            source = normalized / source.name
        tensors = convert_adapter(source, storage_dtype=DTYPE, base=model)
        adapters.append(DemoAdapter(task_id, source.name, _kind_of(adapter), tensors))
    return adapters


def _kind_of(adapter: Adapter) -> str:
    """Text such as "LoRA, r8, attention"."""
    ranks = sorted({tensors.rank for tensors in adapter.modules.values()})
    layers = {key.layer for key in adapter.modules}
    where = "attention" if all(".self_attn." in key.path for key in adapter.modules) else "all linear"
    part = f", layers {min(layers)}-{max(layers)}" if min(layers) > 0 else ""
    return f"{adapter.kind}, r{'/'.join(map(str, ranks))}, {where}{part}"


def _executor(engine: Path, cache: adaptrt.PeftCacheConfig) -> adaptrt.Executor:
    config = adaptrt.ExecutorConfig(peft_cache_config=cache)
    return adaptrt.Executor(engine, adaptrt.ModelType.DECODER_ONLY, config)


def _small_cache(model: Path) -> adaptrt.PeftCacheConfig:
    """A cache whose device level has little more room than one adapter of the maximum rank on every module."""
    layers = load_json_object(model / "config.json", adaptrt.CheckpointError)["num_hidden_layers"]
    return adaptrt.PeftCacheConfig(
        num_device_module_layer=_MAX_RANK * layers * len(DEFAULT_TARGET_MODULES),
        max_adapter_size=_MAX_RANK,
        optimal_adapter_size=_MAX_RANK // 4,
    )


def _counters(stats: Any) -> dict[str, str]:
    return {
        "adapters on the host level": str(stats.host_adapters),
        "adapters on the device level": str(stats.device_adapters),
        "host hits / misses": f"{stats.host_hits} / {stats.host_misses}",
        "device hits / misses": f"{stats.device_hits} / {stats.device_misses}",
        "device evictions": str(stats.device_evictions),
        "host KiB used": f"{stats.host_bytes_used / 1024:.0f}",
        "device pages used / all": f"{stats.device_pages_used} / {stats.device_pages_total}",
        "device page KiB": f"{stats.page_bytes / 1024:.0f}",
        "time spent packing": f"{1000 * stats.load_seconds:.2f} ms",
    }


def _check(answers: list[list[int]], again: list[list[int]], small: Any) -> None:
    problems = []
    if len({tuple(tokens) for tokens in answers}) != len(answers):
        problems.append("two adapters gave the same answer")
    if answers != again:
        problems.append("an adapter that was evicted and packed again gave other tokens")
    if small.device_evictions == 0:
        problems.append("the small cache evicted nothing")
    if problems:
        raise DemoFailure("; ".join(problems))


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the flags and runs the demo; returns the exit status."""
    arguments = sys.argv[1:] if argv is None else argv
    return run_command(sys.modules[__name__], arguments, prog="python -m adaptrt.tools.demo", description=_SUMMARY)


if __name__ == "__main__":
    sys.exit(main())
