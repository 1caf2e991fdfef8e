"""AdaptRT's figures of images: python adaptrt_worker.py ROOT THREADS; prints JSON, seconds by row."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from adaptrt import LLM, ExecutorConfig, SamplingParams

ONE = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)


def seconds(call: Callable[[], Any]) -> float:
    """Seconds that a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def question(image: Path, text: str) -> list[dict[str, Any]]:
    """A conversation with one image after a text, so that equal images share no prefix."""
    return [{"role": "user", "content": [{"type": "text", "text": text}, {"type": "image", "image": str(image)}]}]


def together(llm: LLM, images: Sequence[Path], adapters: Sequence[str | None], text: str) -> float:
    """Seconds of requests at once, with one image each."""
    return seconds(lambda: llm.chat([question(image, text) for image in images], ONE, lora=list(adapters)))


def main() -> None:
    """Measures each row once, after a warm-up."""
    root, threads = Path(sys.argv[1]), int(sys.argv[2])
    adapters = sorted((root / "adapters").iterdir())
    small = [root / "images" / f"small{number}.png" for number in range(len(adapters))]
    large = root / "images" / "large.png"
    config = ExecutorConfig()
    config.num_threads = threads
    with LLM(root / "adaptrt-bf16", executor_config=config) as llm:
        for adapter in adapters:
            llm.load_lora(adapter.name, adapter)
        names = [adapter.name for adapter in adapters]
        warm = large.with_name("warm.png")
        together(llm, [warm] * len(names), names, "warm")
        llm.chat(question(warm, "warm"), ONE)
        before = llm._vision.stats().seconds
        found = {"answer": seconds(lambda: llm.chat(question(large, "a"), ONE))}
        found["encode"] = llm._vision.stats().seconds - before
        # The rows are kept, but the prompt differs.
        found["prefill"] = seconds(lambda: llm.chat(question(large, "b"), ONE))
        found["images-8"] = together(llm, small, [None] * len(names), "d")
        found["images-8-adapters"] = together(llm, small, names, "e")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
