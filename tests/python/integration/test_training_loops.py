"""Needs of training loops: log probs that a later scoring repeats, and adapters that are replaced all the time."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

import adaptrt
from adaptrt import LoraTensors, SamplingParams
from adaptrt.common.json_fields import load_json_object
from support.models import ModelSpec, save_adapter, save_model
from support.numbered_adapters import with_number, without_first_rank
from support.serving import build_engine
from support.tokenizers import byte_level, save_tokenizer

NUMBERS: Final = 7
"""Number of adapters with different answers."""
TOKENS: Final = 6
ALIVE: Final = 40
"""Number of requests that run at a time."""
MAX_GROWTH: Final = 24 << 20
"""Bytes by which the process may grow after the first third of the swaps: caches of Python and of the allocator."""
GREEDY: Final = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = save_model(ModelSpec(vocab_size=272), tmp_path_factory.mktemp("training") / "model")
    save_tokenizer(byte_level(), made)
    return made


@pytest.fixture(scope="module")
def adapters(model: Path) -> list[Path]:
    return [save_adapter(model, model.parent / f"number-{i}", 50 + i, r=4) for i in range(NUMBERS)]


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[adaptrt.LLM]:
    with adaptrt.LLM(build_engine(model, model.parent)) as made:
        yield made


def bits(log_probs: Any) -> list[bytes]:
    return [np.float64(entry.log_prob).tobytes() for entry in log_probs]


def test_log_probs_of_sampled_tokens_equal_those_of_a_later_scoring(llm: adaptrt.LLM, adapters: list[Path]) -> None:
    prompts = [list(range(5, 5 + length)) for length in (3, 17, 40, 65)]
    names = [None, str(adapters[0]), str(adapters[1]), str(adapters[0])]
    sampled = SamplingParams(temperature=1.0, seed=7, max_tokens=23, ignore_eos=True, logprobs=0)
    scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    rollouts = llm.generate(prompts, sampled, lora=names)
    texts = [prompt + list(rollout.token_ids) for prompt, rollout in zip(prompts, rollouts, strict=True)]
    # The scoring runs alone and in another batch, so that neither the crowd nor the cache decides.
    together = llm.generate(texts, scored, lora=names)
    for i, (prompt, rollout) in enumerate(zip(prompts, rollouts, strict=True)):
        alone = llm.generate(texts[i], scored, lora=names[i])
        for scoring in (alone, together[i]):
            tail = scoring.prompt_log_probs[len(prompt) - 1 :]
            assert [entry.token_id for entry in tail] == list(rollout.token_ids)
            assert bits(tail) == bits(rollout.log_probs)


def resident_bytes() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("num_swaps", [40, pytest.param(3000, marks=pytest.mark.nightly)])
def test_no_answer_comes_from_a_wrong_version(llm: adaptrt.LLM, adapters: list[Path], num_swaps: int) -> None:
    sources = [
        (without_first_rank(adapter), load_json_object(adapter / "adapter_config.json", adaptrt.AdapterError))
        for adapter in adapters
    ]
    prompts = [[3, 4, 5], list(range(3, 3 + 33))]
    expected = []
    for tensors, config in sources:
        answers = llm.generate(prompts, GREEDY, lora=LoraTensors(with_number(tensors, 0), config))
        expected.append([answer.token_ids for answer in answers])
    assert len({answers[0] for answers in expected}) == NUMBERS
    drawn = random.Random(num_swaps)
    memory = llm._memory._root

    async def soak() -> list[int]:
        running: set[asyncio.Task[None]] = set()
        sizes: list[int] = []

        async def ask(number: int, which: int) -> None:
            # The request is made here, before the next swap.
            answer = llm.generate_async(prompts[which], GREEDY, lora="it")
            assert (await answer).token_ids == expected[number][which]

        for swap in range(num_swaps):
            number = drawn.randrange(NUMBERS)
            tensors, config = sources[number]
            llm.load_lora("it", LoraTensors(with_number(tensors, swap), config), replace=swap > 0)
            for _ in range(drawn.randrange(1, 4)):
                task = asyncio.create_task(ask(number, drawn.randrange(2)))
                running.add(task)
                await asyncio.sleep(0)  # makes the request
            if len(running) >= ALIVE:
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            if swap in (num_swaps // 3, num_swaps - 1):
                await asyncio.gather(*running)
                running = set()
                sizes.append(resident_bytes())
        return sizes

    before, after = asyncio.run(soak())
    assert after - before < MAX_GROWTH
    assert memory is not None
    assert sum(1 for _ in memory.iterdir()) < 40  # the current version, old ones, and adapters without a name
    llm.unload_lora("it")
