"""Mixed traffic of any length: no request is lost, no token changes, and memory stays constant.

CI sends a few thousand requests; `--soak-requests 200000` sends more.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import adaptrt
from support.guides import json_schema, regex
from support.memory import CAN_MEASURE, held
from support.models import ModelSpec, save_adapter, save_model
from support.serving import build_engine
from support.tokenizers import byte_level, save_tokenizer

SPEC = ModelSpec(hidden_size=72, head_dim=24, num_attention_heads=4, num_key_value_heads=2, vocab_size=270)
TOKENIZER = byte_level()
ADAPTERS = [{"r": 4}, {"r": 7, "use_dora": True}, {"r": 2}, {"r": 3, "use_dora": True}, {"r": 1}, {"r": 8}]
PROMPTS = [TOKENIZER.encode(text).ids for text in ("a", "Say hello", "long " * 12, "long " * 12 + "longer")]
SEEDS = 3
NUM_CASES = 150
MOST_SEQUENCES = 3
MOST_TOKENS = 16
MOST_AT_ONCE = 48
# Room for buffers that still grow and for statistics strings; a leak of a few bytes per request exceeds it.
HEAP_SLACK = 256 << 10
OBJECT_SLACK = 1000

REFUSED = [
    {"input_token_ids": []},
    {"input_token_ids": [SPEC.vocab_size]},
    {"max_tokens": 0},
    {"num_return_sequences": 99},
    {"lora_config": adaptrt.LoraConfig(999)},
    {"stop_words": [[]]},
]
FAILING = [
    {"guided_decoding_params": regex("[a-")},
    {"embedding_bias": np.zeros(3, np.float32)},
    {"logits_post_processor_name": "fails"},
]
RULES: list[dict[str, Any]] = [
    {},
    {"stop_words": [[5, 6]], "end_id": 9},
    {"guided_decoding_params": json_schema({"type": "array", "items": {"type": "integer"}})},
    {"guided_decoding_params": regex("([0-9]{2} )*[a-f]")},
    {"bad_words": [[7], [5, 8]], "logits_post_processor_name": "shifted"},
]


def shifted(_id: int, logits: Any, tokens: list[list[int]], _stream: int, _client_id: int | None) -> None:
    logits[0, 0, (len(tokens[0]) * 7) % SPEC.vocab_size] += 5.0


def fails(*_: Any) -> None:
    raise ValueError("this one always does")


@dataclass(frozen=True)
class Case:
    """The fields of a request that determine its answer."""

    prompt: int
    adapter: int | None
    rule: int
    seed: int
    """0 means greedy."""
    num_beams: int = 1

    def of_sequence(self, index: int) -> Case:
        """Returns the case that gives that sequence alone."""
        return replace(self, seed=self.seed + index) if self.seed else self

    def request(self, num_sequences: int, lora: adaptrt.LoraConfig | None, **fields: Any) -> adaptrt.Request:
        sampling: dict[str, Any] = {"temperature": 1.3, "top_p": 0.9, "seed": self.seed} if self.seed else {}
        if self.num_beams > 1:
            sampling = {"beam_width": self.num_beams, "length_penalty": 0.7}
        return adaptrt.Request(
            PROMPTS[self.prompt],
            MOST_TOKENS,
            sampling_config=adaptrt.SamplingConfig(num_return_sequences=num_sequences, **sampling),
            lora_config=lora,
            **RULES[self.rule],
            **fields,
        )


@dataclass
class Asked:
    """A request in progress, and its results so far."""

    case: Case
    may_be_cut: bool
    tokens: dict[int, list[int]] = field(default_factory=dict)
    reasons: dict[int, adaptrt.FinishReason] = field(default_factory=dict)


class Traffic:
    """Sends requests from its own thread, and compares each answer with the one that the case gives alone."""

    def __init__(self, engine: Path, adapters: list[adaptrt.LoraConfig], executor: adaptrt.Executor) -> None:
        self._engine, self._adapters, self._executor = engine, adapters, executor
        self._random = random.Random(1)
        self._asked: dict[int, Asked] = {}
        self._failing: set[int] = set()
        self._free = threading.Semaphore(MOST_AT_ONCE)
        self._lock = threading.Lock()
        self._cases = [self._draw_case() for _ in range(NUM_CASES)]
        self._expected = self._answers_alone()
        self.num_cut = self.num_failed = self.num_refused = 0

    def _draw_case(self) -> Case:
        choice = self._random
        prompt, adapter = choice.randrange(len(PROMPTS)), choice.choice([None, *range(len(ADAPTERS))])
        if choice.random() < 0.15:
            return Case(
                prompt, adapter, rule=choice.choice([0, 1]), seed=0, num_beams=choice.choice([2, MOST_SEQUENCES])
            )
        return Case(prompt, adapter, choice.randrange(len(RULES)), choice.randrange(SEEDS + 1))

    def _answers_alone(self) -> dict[Case, list[list[int]]]:
        """Returns the answers of all possible sequences, run one at a time; a beam search gives all its beams."""
        cases = {case.of_sequence(index) for case in self._cases for index in range(MOST_SEQUENCES)}
        config = adaptrt.KvCacheConfig(max_tokens=1024, enable_block_reuse=False)
        output = adaptrt.OutputConfig(exclude_input_from_output=True)
        answers = {}
        with made(self._engine, kv_cache_config=config) as executor:
            for case in cases:
                lora = None if case.adapter is None else self._adapters[case.adapter]
                request_id = executor.enqueue_request(case.request(1, lora, output_config=output))
                result = executor.await_responses(request_id, 60.0)[0].result
                answers[case] = [list(tokens) for tokens in result.output_token_ids]
        return answers

    def run(self, count: int) -> None:
        """Sends `count` requests and waits for all of them."""
        sender = threading.Thread(target=self._send_all, args=(count,))
        sender.start()
        num_over = 0
        while num_over < count:
            for response in self._executor.await_responses():
                num_over += self._take(response)
        sender.join()
        assert not self._asked
        assert not self._failing
        assert self._executor.get_num_responses_ready() == 0

    def _send_all(self, count: int) -> None:
        for _ in range(count):
            self._free.acquire()
            if self._random.random() < 0.05:
                self._send_refused()
            with self._lock:  # an answer may be there before its request is known
                if self._random.random() < 0.05:
                    self._failing.add(self._enqueue(adaptrt.Request(**self._wrong(FAILING))))
                else:
                    self._send_good()

    def _wrong(self, kinds: list[dict[str, Any]]) -> dict[str, Any]:
        return {"input_token_ids": PROMPTS[0], "max_tokens": 4, **self._random.choice(kinds)}

    def _send_refused(self) -> None:
        with pytest.raises(adaptrt.AdaptrtError):
            self._executor.enqueue_request(adaptrt.Request(**self._wrong(REFUSED)))
        self.num_refused += 1

    def _send_good(self) -> None:
        choice = self._random
        case = choice.choice(self._cases)
        fields: dict[str, Any] = {
            # A streamed beam search sends whole beams instead of new tokens, so searches do not stream here.
            "streaming": case.num_beams == 1 and choice.random() < 0.5,
            "priority": choice.choice([0.5, 0.5, 0.9]),
            "output_config": adaptrt.OutputConfig(
                exclude_input_from_output=True, return_log_probs=True, top_log_probs=choice.choice([0, 2])
            ),
        }  # fmt: skip
        ending = choice.random()
        if ending < 0.1:
            fields["allotted_time_ms"] = choice.choice([1, 5])
        lora = None if case.adapter is None else adaptrt.LoraConfig(case.adapter)
        num_sequences = 1 if case.num_beams > 1 else choice.choice([1, 1, 2, MOST_SEQUENCES])
        try:
            request_id = self._enqueue(case.request(num_sequences, lora, **fields))
        except adaptrt.PeftTaskNotCachedError:
            assert case.adapter is not None
            request_id = self._enqueue(case.request(num_sequences, self._adapters[case.adapter], **fields))
        self._asked[request_id] = Asked(case, ending < 0.2)
        if 0.1 <= ending < 0.2:
            self._executor.cancel_request(request_id)

    def _enqueue(self, request: adaptrt.Request) -> int:
        while True:
            try:
                return self._executor.enqueue_request(request)
            except adaptrt.LoraCacheFullError:
                threading.Event().wait(0.001)

    def _take(self, response: adaptrt.Response) -> bool:
        """Takes a response; returns True for a request's last one."""
        with self._lock:
            request_id = response.request_id
            if request_id in self._failing:
                self._failing.remove(request_id)
                assert response.has_error()
                self.num_failed += 1
                self._free.release()
                return True
            asked = self._asked[request_id]
            assert not response.has_error(), response.error_msg
            result = response.result
            for beam, tokens in enumerate(result.output_token_ids):
                index = result.sequence_index + beam
                assert index not in asked.reasons
                asked.tokens.setdefault(index, []).extend(tokens)
                if result.is_sequence_final:
                    asked.reasons[index] = result.finish_reasons[beam]
            if not result.is_final:
                return False
            del self._asked[request_id]
        self._compare(asked)
        self._free.release()
        return True

    def _compare(self, asked: Asked) -> None:
        assert sorted(asked.reasons) == sorted(asked.tokens) == list(range(len(asked.reasons)))
        for index, reason in asked.reasons.items():
            if asked.case.num_beams > 1:
                expected = self._expected[asked.case][index]
            else:
                (expected,) = self._expected[asked.case.of_sequence(index)]
            tokens = asked.tokens[index]
            if asked.may_be_cut and reason in (adaptrt.FinishReason.CANCELLED, adaptrt.FinishReason.TIMED_OUT):
                self.num_cut += 1
                # The best beams so far may differ from the final best beams.
                assert asked.case.num_beams > 1 or tokens == expected[: len(tokens)]
            else:
                assert tokens == expected


def made(engine: Path, **fields: Any) -> adaptrt.Executor:
    processors = adaptrt.LogitsPostProcessorConfig({"shifted": shifted, "fails": fails}, None)
    config = adaptrt.ExecutorConfig(MOST_SEQUENCES, logits_post_processor_config=processors, num_threads=1, **fields)
    return adaptrt.Executor(engine, executor_config=config)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[adaptrt.LoraConfig]]:
    directory = tmp_path_factory.mktemp("soak")
    model = save_model(SPEC, directory / "model")
    save_tokenizer(TOKENIZER, model)
    engine = build_engine(model, directory, tokens_per_block=16, max_beam_width=MOST_SEQUENCES)
    adapters = [save_adapter(model, directory / f"adapter-{i}", i, **lora) for i, lora in enumerate(ADAPTERS)]
    return engine, [adaptrt.LoraConfig.from_peft(i, path, engine) for i, path in enumerate(adapters)]


@pytest.fixture
def executor(service: tuple[Path, list[adaptrt.LoraConfig]], tmp_path: Path) -> Iterator[adaptrt.Executor]:
    """Too small for the traffic: blocks run out, sequences are preempted, adapters are evicted. Any request may have
    drafts."""
    largest = max(config.weights.nbytes for config in service[1])
    with made(
        service[0],
        enable_chunked_context=True,
        max_num_tokens=48,
        max_batch_size=8,
        scheduler_config=adaptrt.SchedulerConfig(adaptrt.CapacitySchedulerPolicy.MAX_UTILIZATION),
        kv_cache_config=adaptrt.KvCacheConfig(
            max_tokens=512, event_buffer_max_size=64, host_cache_size=1 << 20, host_cache_dir=str(tmp_path)
        ),
        decoding_config=adaptrt.DecodingConfig(
            adaptrt.DecodingMode.Lookahead(), adaptrt.LookaheadDecodingConfig(4, 3, 4)
        ),
        peft_cache_config=adaptrt.PeftCacheConfig(
            host_cache_size=2 * largest, num_device_module_layer=300, max_adapter_size=8
        ),
    ) as executor:
        yield executor


@pytest.mark.skipif(not CAN_MEASURE, reason="needs glibc 2.33")
def test_nothing_is_lost_and_nothing_grows(
    service: tuple[Path, list[adaptrt.LoraConfig]], executor: adaptrt.Executor, request: pytest.FixtureRequest
) -> None:
    count = request.config.getoption("--soak-requests")
    traffic = Traffic(*service, executor)
    # Run until all buffers have their final size.
    traffic.run(count // 2)
    before = held()
    traffic.run(count - count // 2)
    grown = held() - before
    assert grown.heap < HEAP_SLACK
    assert grown.blocks < OBJECT_SLACK
    assert grown.objects < OBJECT_SLACK
    assert min(traffic.num_cut, traffic.num_failed, traffic.num_refused) > count // 100
    iterations = executor.get_latest_iteration_stats()
    drafted = [iteration.spec_decoding_stats for iteration in iterations if iteration.spec_decoding_stats]
    assert any(stats.num_accepted_tokens for stats in drafted)
    assert iterations[-1].kv_cache_stats.second_level.read_blocks > 0
    stats = executor.lora_cache_stats()
    assert min(stats.host_evictions, stats.device_evictions) > count // 100
    assert all(entry.users == 0 for entry in executor.list_adapters())
