"""Text in and out: characters of several tokens, several end tokens, and refused inputs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import adaptrt
from adaptrt.runtime import text_requests
from support.models import ModelSpec, save_adapter, save_model
from support.serving import build_engine

SPEC = ModelSpec()
# The bytes of "€" and of an emoji as byte-level tokenizers write them, then letters. Token 1 ends a text.
PIECES = ["<s>", "</s>", *"âĤ¬ðŁĺĢ", *"abcdefghijklmnopqrstuvwxyz", *"ABCDEFGHIJKLMNOPQRSTUVWXYZ"]
EURO = [2, 3, 4]


END_IDS = [1, 30, 31]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[adaptrt.LLM]:
    root = tmp_path_factory.mktemp("text")
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(PIECES)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(root / "tokenizer.json"))
    model = save_model(SPEC, root / "model")
    # transformers saves the end tokens twice, and uses those of generation_config.json.
    for name in ("config.json", "generation_config.json"):
        config = json.loads((model / name).read_text())
        (model / name).write_text(json.dumps({**config, "eos_token_id": END_IDS}))
    adapters = [save_adapter(model, root / name, seed, r=4) for seed, name in enumerate(["first", "second"])]
    engine = build_engine(model, root, lora_dir=adapters[0], max_beam_width=3)
    with adaptrt.LLM(engine, adaptrt.ExecutorConfig(max_beam_width=3), tokenizer=root) as made:
        yield made


def generate_only(tokens: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes LLM's requests generate only these tokens."""
    bias = np.full(SPEC.vocab_size, -np.inf, np.float32)
    bias[tokens] = 0.0

    def biased(*args: Any, **fields: Any) -> adaptrt.Request:
        return adaptrt.Request(*args, **{**fields, "embedding_bias": bias})

    monkeypatch.setattr(text_requests, "Request", biased)


@pytest.mark.parametrize("end_id", END_IDS)
def test_each_token_that_ends_a_text_does(llm: adaptrt.LLM, end_id: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generate_only([end_id], monkeypatch)
    completion = llm.generate("abc", max_tokens=5)
    assert (completion.text, completion.token_ids) == ("", ())
    assert completion.finish_reason != adaptrt.FinishReason.LENGTH
    assert list(llm.stream("abc", max_tokens=5)) == []


def test_completions_are_64_tokens_long_unless_asked_for_more(
    llm: adaptrt.LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    letter = PIECES.index("a")
    generate_only([letter], monkeypatch)
    assert llm.generate("abc").text == "a" * 64
    assert "".join(llm.stream("abc")) == "a" * 64


def test_a_weighted_sum_by_name(llm: adaptrt.LLM) -> None:
    one, whole, half = (llm.generate("abcab", lora=lora) for lora in ("first", "first:1", "first:0.5+first:0.5"))
    assert one.token_ids == whole.token_ids == half.token_ids
    assert "".join(llm.stream("abcab", lora="first:1")) == one.text
    with pytest.raises(adaptrt.AdapterError, match="no adapter named 'second'"):
        llm.generate("abcab", lora="first:0.5+second:0.5")


def test_speculation_is_an_option_that_changes_nothing(llm: adaptrt.LLM) -> None:
    engine, tokenizer = llm.executor.engine.directory, llm._template_directory
    expected = [llm.generate("abcabcab", lora=name).token_ids for name in (None, "first")]
    lookahead = adaptrt.LookaheadDecodingConfig(4, 3, 4)
    config = adaptrt.ExecutorConfig(num_threads=1)
    with adaptrt.LLM(engine, config, tokenizer=tokenizer, speculative_config=lookahead) as speculative:
        assert [speculative.generate("abcabcab", lora=name).token_ids for name in (None, "first")] == expected
        steps = speculative.executor.get_latest_iteration_stats()
    assert any(step.spec_decoding_stats is not None for step in steps)
    assert config == adaptrt.ExecutorConfig(num_threads=1)
    config.decoding_config = adaptrt.DecodingConfig()
    with pytest.raises(adaptrt.ConfigError, match="speculative_config is given, and executor_config has a decoding_co"):
        adaptrt.LLM(engine, config, tokenizer=tokenizer, speculative_config=lookahead)


def test_a_draft_model_is_an_option_that_changes_nothing(llm: adaptrt.LLM) -> None:
    engine, tokenizer = llm.executor.engine.directory, llm._template_directory
    expected = [llm.generate("abcabcab", lora=name).token_ids for name in (None, "first")]
    config = adaptrt.ExecutorConfig(num_threads=1)
    draft = adaptrt.DraftTargetDecodingConfig(4, str(engine))
    with adaptrt.LLM(engine, config, tokenizer=tokenizer, speculative_config=draft) as speculative:
        assert [speculative.generate("abcabcab", lora=name).token_ids for name in (None, "first")] == expected
        stats = speculative.executor.get_latest_iteration_stats()[-1].speculation_stats
        assert speculative.executor.draft_engine is not None
    # The draft engine is the engine itself, with the same adapter, so all drafts before the texts' ends are right.
    assert 0 < stats.draft_tokens - 2 * 3 <= stats.accepted_tokens
    assert config == adaptrt.ExecutorConfig(num_threads=1)
    config.draft_target_decoding_config = draft
    with pytest.raises(adaptrt.ConfigError, match="executor_config has a draft_target_decoding_config"):
        adaptrt.LLM(engine, config, tokenizer=tokenizer, speculative_config=draft)


def test_streams_do_not_break_characters(llm: adaptrt.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    generate_only(EURO, monkeypatch)
    num_euros = 0
    for seed in range(10):
        sampling = adaptrt.SamplingConfig(top_k=3, temperature=50.0, seed=seed)
        whole = llm.generate("abc", max_tokens=60, sampling_config=sampling).text
        pieces = list(llm.stream("abc", max_tokens=60, sampling_config=sampling))
        assert "".join(pieces) == whole
        assert all(pieces)
        num_euros += whole.count("€")
    assert num_euros > 5


def test_several_completions_are_those_of_their_seeds(llm: adaptrt.LLM) -> None:
    def sampling(seed: int) -> adaptrt.SamplingConfig:
        return adaptrt.SamplingConfig(top_k=40, temperature=3.0, seed=seed)

    prompts = ["abc", "xy"]
    for stop in ((), ("e", "Q")):
        expected = [
            [llm.generate(prompt, max_tokens=20, sampling_config=sampling(seed), stop=stop) for seed in (5, 6, 7)]
            for prompt in prompts
        ]
        assert len({completion.text for completion in expected[0]}) == 3
        assert llm.generate(prompts, max_tokens=20, sampling_config=sampling(5), stop=stop, n=3) == expected
        assert llm.generate("abc", max_tokens=20, sampling_config=sampling(5), stop=stop, n=3) == expected[0]
    assert llm.generate("abc", max_tokens=20, sampling_config=sampling(5), n=1) == [
        llm.generate("abc", max_tokens=20, sampling_config=sampling(5))
    ]
    assert llm.executor.get_num_responses_ready() == 0


def test_numbers_of_completions_that_cannot_be_are_refused(llm: adaptrt.LLM) -> None:
    with pytest.raises(adaptrt.RequestError, match="n is 0; expected 1 or more"):
        llm.generate("abc", n=0)
    with pytest.raises(adaptrt.RequestError, match="a request of 9 sequences; accepted: 1 to max_batch_size = 8"):
        llm.generate("abc", n=9, sampling_config=adaptrt.SamplingConfig(top_p=1.0))
    several = adaptrt.SamplingConfig(num_return_sequences=2)
    for ask in (
        lambda: llm.generate("abc", sampling_config=several),
        lambda: llm.generate("abc", sampling_config=several, n=3),
        lambda: next(llm.stream("abc", sampling_config=several)),
    ):
        with pytest.raises(adaptrt.RequestError, match=r"sampling_config\.num_return_sequences is 2; accepted: None"):
            ask()


def test_beams_are_completions_the_best_first(llm: adaptrt.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    search = adaptrt.SamplingConfig(3, length_penalty=1.0, early_stopping=0)
    (name,) = llm.executor.adapters.names
    for lora in (None, name):
        best = llm.generate("abc", max_tokens=12, sampling_config=search, lora=lora)
        three = llm.generate("abc", max_tokens=12, sampling_config=search, lora=lora, n=3)
        assert three[0] == best
        assert len({completion.token_ids for completion in three}) == 3
        assert "".join(llm.stream("abc", max_tokens=12, sampling_config=search, lora=lora)) == best.text
    assert search.num_return_sequences is None
    for fields, message in (
        ({"n": 4}, "num_return_sequences is 4 with beam_width 3; accepted: 1 to beam_width"),
        ({"stop": ["a"]}, "stop is given with sampling_config.beam_width 3; accepted: none"),
    ):
        with pytest.raises(adaptrt.RequestError, match=message):
            llm.generate("abc", sampling_config=search, **fields)
    # The search finds only one sequence.
    generate_only([PIECES.index("a")], monkeypatch)
    (only,) = llm.generate("abc", max_tokens=5, sampling_config=search, n=3)
    assert only.text == "aaaaa"
    assert llm.executor.get_num_responses_ready() == 0


def test_an_unknown_adapter_is_refused_with_the_names_there_are(llm: adaptrt.LLM) -> None:
    (name,) = llm.executor.adapters.names
    for ask in (
        lambda: llm.generate("a", lora="none"),
        lambda: llm.generate(["a", "b"], lora=[name, "none"]),
        lambda: next(llm.stream("a", lora="none")),
    ):
        with pytest.raises(adaptrt.AdapterError, match=f"has no adapter named 'none'; it has: '{name}'"):
            ask()
    assert llm.executor.get_num_responses_ready() == 0


def test_an_empty_prompt_is_refused_and_none_gives_none(llm: adaptrt.LLM) -> None:
    with pytest.raises(adaptrt.RequestError, match="input_token_ids is empty"):
        llm.generate("")
    assert llm.generate([]) == []


def test_a_tokenizer_that_cannot_be_read(llm: adaptrt.LLM, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(adaptrt.ConfigError, match=r"tokenizer\.json: cannot be read as a tokenizer"):
        adaptrt.LLM(llm.executor.engine.directory, tokenizer=tmp_path)
