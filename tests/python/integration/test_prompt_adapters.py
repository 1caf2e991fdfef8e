"""Adapters of prompt tuning and P-tuning by name, against PEFT, in batches with LoRA, DoRA and the base."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import adaptrt
from adaptrt.builder.build import build
from adaptrt.formats.engine.build_config import BuildConfig, LoraBuildConfig, PluginConfig
from adaptrt.runtime import adapter_store
from support.adapters import TENSORS
from support.prompts import BLOCK, LENGTHS, Served, tokens_of, without_nan
from support.serving import Answer, collect, crowd_fields, make_request

# The same tolerance as in test_parity.py.
FLOAT32_TOLERANCE = 1e-4

CASES = [
    (None, tokens_of(0, 30)),
    ("tuned", tokens_of(1, 27)),
    ("lora", tokens_of(2, 17)),
    ("long", tokens_of(3, 9)),
    ("other", tokens_of(1, 27)),
    ("dora", tokens_of(4, 5)),
    ("encoded", tokens_of(5, 12)),
    ("tuned", [7]),
]


@pytest.fixture(scope="module", params=["llama", "gemma2", "gpt2", "olmoe", "granite"])
def served(request, tmp_path_factory) -> Served:
    return Served(request.param, tmp_path_factory.mktemp(request.param))


def test_a_mixed_batch_is_what_peft_computes(served: Served) -> None:
    for (kind, prompt), answer in zip(CASES, served.answers(CASES), strict=True):
        expected = served.expected(kind, prompt + answer.tokens[:-1])
        actual = np.concatenate([answer.context_logits, answer.generation_logits[1:]])
        assert actual.shape == expected.shape
        assert np.abs(actual - expected).max() <= FLOAT32_TOLERANCE * (expected.max() - expected.min()), kind
        num_prompt = LENGTHS.get(kind or "", 0) + len(prompt)
        assert answer.tokens == expected[num_prompt - 1 :].argmax(axis=1).tolist()


def test_a_crowd_in_chunks_changes_no_bit(served: Served) -> None:
    crowds = [
        {"enable_chunked_context": True, "max_num_tokens": 16, "num_threads": 2},
        # Some requests are preempted and computed again.
        crowd_fields("MAX_UTILIZATION", 96, True, max_num_tokens=32),
    ]
    alone = [served.answers([case], 30, num_threads=1)[0] for case in CASES]
    for fields in crowds:
        for case, ours, together in zip(CASES, alone, served.answers(CASES, 30, **fields), strict=True):
            assert together.same_bits(ours), case[0]
        assert (served.num_paused > 0) == ("scheduler_config" in fields)


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Served:
    return Served("llama", tmp_path_factory.mktemp("plain-llama"))


@pytest.fixture
def executor(llama: Served) -> Iterator[adaptrt.Executor]:
    with llama.executor() as made:
        yield made


def test_adapters_are_replaced_and_removed(llama: Served, executor: adaptrt.Executor) -> None:
    prompt = tokens_of(15, 9)

    def named(name: str) -> Answer:
        return without_nan(collect(executor, executor.enqueue_request(make_request(prompt, 4), adapter=name)))

    executor.add_adapter("changing", llama.adapters["tuned"])
    assert named("changing").same_bits(named("tuned"))
    for kind in ("other", "lora", "tuned", "dora"):
        executor.add_adapter("changing", llama.adapters[kind], replace=True)
        executor.load_adapter("changing")
        assert named("changing").same_bits(named(kind)), kind
    executor.remove_adapter("changing")
    with pytest.raises(adaptrt.AdapterError, match="has no adapter named 'changing'"):
        named("changing")
    executor.remove_adapter("tuned")
    executor.add_adapter("tuned", llama.adapters["tuned"])


def test_files_are_read_again_when_others_came_between(
    llama: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_store, "_MAX_PROMPTS", 1)
    changing = Path(shutil.copytree(llama.adapters["tuned"], tmp_path / "changing"))
    with llama.executor() as executor:
        executor.add_adapter("changing", changing)

        def named(name: str) -> Answer:
            return without_nan(collect(executor, executor.enqueue_request(make_request([3, 4], 4), adapter=name)))

        first = {name: named(name) for name in ("changing", "other", "tuned")}
        assert first["changing"].same_bits(first["tuned"])
        assert not first["other"].same_bits(first["tuned"])
        for name in ("other", "changing"):
            assert named(name).same_bits(first[name])
        shutil.copyfile(llama.adapters["other"] / TENSORS, changing / TENSORS)
        assert named("changing").same_bits(first["changing"])
        named("other")
        with pytest.raises(adaptrt.EngineError, match="adapter 'changing' was changed after it was added"):
            named("changing")


def test_engines_without_lora_take_them_and_carry_none(llama: Served, tmp_path: Path) -> None:
    plain = BuildConfig(max_batch_size=4, max_num_tokens=64, max_seq_len=96, tokens_per_block=BLOCK)
    build(llama.model.parent / "checkpoint", plain, tmp_path / "engine")
    with adaptrt.Executor(tmp_path / "engine", adaptrt.ModelType.DECODER_ONLY, adaptrt.ExecutorConfig()) as executor:
        executor.add_adapter("tuned", llama.adapters["tuned"])
        answer = collect(executor, executor.enqueue_request(make_request([3, 4], 4), adapter="tuned"))
        with llama.executor() as other:
            theirs = collect(other, other.enqueue_request(make_request([3, 4], 4), adapter="tuned"))
        assert without_nan(answer).same_bits(without_nan(theirs))
        executor.remove_adapter("tuned")


def test_an_engine_carries_them(llama: Served, tmp_path: Path) -> None:
    lora = LoraBuildConfig(max_lora_rank=16, lora_dir=(llama.adapters["tuned"], llama.adapters["lora"]))
    config = BuildConfig(
        max_batch_size=4, max_num_tokens=64, max_seq_len=96, tokens_per_block=BLOCK,
        lora_config=lora, plugin_config=PluginConfig(lora_plugin="auto"),
    )  # fmt: skip
    build(llama.model.parent / "checkpoint", config, tmp_path / "engine")
    with adaptrt.Executor(tmp_path / "engine", adaptrt.ModelType.DECODER_ONLY, adaptrt.ExecutorConfig()) as executor:
        answer = collect(executor, executor.enqueue_request(make_request([3, 4], 4), adapter="tuned"))
    with llama.executor() as other:
        theirs = collect(other, other.enqueue_request(make_request([3, 4], 4), adapter="tuned"))
    assert without_nan(answer).same_bits(without_nan(theirs))
