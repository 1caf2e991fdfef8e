"""A server whose adapter is replaced all the time: each version answers its own number, while streams run."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from safetensors.numpy import save

import adaptrt
from adaptrt import SamplingParams
from adaptrt.common.json_fields import load_json_object
from support.http_server import http_server
from support.models import ModelSpec, save_adapter, save_model
from support.numbered_adapters import Tensors, with_number, without_first_rank
from support.serving import build_engine
from support.tokenizers import byte_level, save_tokenizer

NUMBERS: Final = 5
"""Number of adapters with different answers."""
TOKENS: Final = 24
STREAMS: Final = 4
PROMPTS: Final = ([3, 4, 5], list(range(3, 3 + 40)))
MAX_GROWTH: Final = 24 << 20
"""Bytes by which the server may grow after the first third of the swaps: caches of Python and of the allocator."""
PER_MINUTE: Final = 50
CONFIG: Final = "adapter_config.json"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = save_model(ModelSpec(vocab_size=272), tmp_path_factory.mktemp("swaps") / "model")
    save_tokenizer(byte_level(), made)
    return made


@dataclass
class Swaps:
    """Versions of the adapter "it", in the order in which they were sent."""

    numbers: list[int] = field(default_factory=list)
    """The number that each version answers."""
    ids: list[str] = field(default_factory=list)
    """NAME@DIGEST of the versions that the server has confirmed. A request that is sent now gets the last one, or one
    that is being sent."""

    def allowed_since(self, confirmed: int) -> set[int]:
        """Returns the numbers that a request may answer that was sent when `confirmed` versions were confirmed."""
        return set(self.numbers[confirmed - 1 :])


class Client:
    """Sends versions and streams to the server."""

    def __init__(self, http: httpx.AsyncClient, sources: Sequence[Tensors], config: bytes) -> None:
        self.swaps = Swaps()
        self.num_certain = 0
        """Number of answers for which one version was possible."""
        self._http, self._sources, self._config = http, sources, config

    async def swap(self, number: int) -> None:
        """Sends a new version that answers `number`."""
        tensors = with_number(self._sources[number], len(self.swaps.numbers))
        self.swaps.numbers.append(number)
        files = {CONFIG: self._config, "adapter_model.safetensors": save(tensors)}
        fields = {"lora_name": "it", "load_inplace": "true"}
        answer = await self._http.post(
            "/v1/upload_lora_adapter", data=fields, files={name: (name, value) for name, value in files.items()}
        )
        assert answer.status_code == 200, answer.text
        self.swaps.ids.append(answer.json()["id"])

    async def ask(self, which: int, expected: Sequence[Sequence[tuple[int, ...]]], *, old: bool) -> None:
        """Checks the answer of a stream. old: asks for the version before the last by its digest."""
        swaps = self.swaps
        confirmed = len(swaps.ids)
        name = swaps.ids[confirmed - 2] if old else "it"
        allowed: set[int] | None = {swaps.numbers[confirmed - 2]} if old else None
        tokens: list[int] = []
        async for piece in self._pieces(name, PROMPTS[which]):
            if allowed is None:
                allowed = swaps.allowed_since(confirmed)
            tokens += piece
        assert allowed is not None
        self.num_certain += len(allowed) == 1
        assert tuple(tokens) in {expected[number][which] for number in allowed}

    async def _pieces(self, name: str, prompt: Sequence[int]) -> AsyncIterator[list[int]]:
        body = {"model": name, "prompt": list(prompt), "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True,
                "stream": True, "return_token_ids": True}  # fmt: skip
        async with self._http.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    choices: list[dict[str, Any]] = json.loads(line.removeprefix("data: "))["choices"]
                    yield [id for choice in choices for id in choice["token_ids"]]


def expected_answers(engine: Path, sources: Sequence[Tensors], config: dict[str, Any]) -> list[list[tuple[int, ...]]]:
    greedy = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    with adaptrt.LLM(engine) as llm:
        answers = [llm.generate(list(PROMPTS), greedy, lora=adaptrt.LoraTensors(one, config)) for one in sources]
    return [[tuple(answer.token_ids) for answer in prompts] for prompts in answers]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("num_swaps", "seconds"), [(24, 0.0), pytest.param(500, 60 / PER_MINUTE, marks=pytest.mark.nightly)]
)
def test_no_stream_answers_from_a_wrong_version(model: Path, tmp_path: Path, num_swaps: int, seconds: float) -> None:
    adapters = [save_adapter(model, tmp_path / f"number-{i}", 50 + i, strength=3.0, r=4) for i in range(NUMBERS)]
    sources = [without_first_rank(adapter) for adapter in adapters]
    config = load_json_object(adapters[0] / CONFIG, adaptrt.AdapterError)
    engine = build_engine(model, tmp_path)
    expected = expected_answers(engine, sources, config)
    for which in range(len(PROMPTS)):
        assert len({answers[which] for answers in expected}) == NUMBERS
    drawn = random.Random(num_swaps)
    sizes: list[int] = []
    pids: list[int] = []

    async def soak(address: str) -> None:
        async with httpx.AsyncClient(base_url=address, timeout=120) as http:
            client = Client(http, sources, (adapters[0] / CONFIG).read_bytes())
            for number in range(2):
                await client.swap(number)
            ended = asyncio.Event()
            num_streams = itertools.count()

            async def stream() -> None:
                while not ended.is_set():
                    await client.ask(drawn.randrange(len(PROMPTS)), expected, old=next(num_streams) % 4 == 3)

            streams = [asyncio.create_task(stream()) for _ in range(STREAMS)]
            for swap in range(num_swaps):
                await asyncio.gather(client.swap(drawn.randrange(NUMBERS)), asyncio.sleep(seconds))
                if swap in (num_swaps // 3, num_swaps - 1):
                    sizes.append(resident_bytes(pids[0]))
                for task in streams:
                    if task.done():
                        task.result()
            ended.set()
            await asyncio.gather(*streams)
            assert client.num_certain > num_swaps
            rows = (await http.get("/v1/adapters", params={"name": "it"})).json()["data"]
            assert len(rows) <= 1 + 16  # the default of --max-adapter-versions

    with http_server(engine, "--enable_lora_upload", "--num_threads", 1, pids=pids) as address:
        asyncio.run(soak(address))
    before, after = sizes
    assert after - before < MAX_GROWTH


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
