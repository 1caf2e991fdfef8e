"""Layers split over pipeline stages, alone and with tensor parallelism, in real MPI processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import adaptrt
from adaptrt._core import ConfigError, DType
from adaptrt.builder.build import build
from adaptrt.builder.conversion.convert import convert_checkpoint
from support.cut_models import CONFIG, Cut, prompt_of
from support.models import save_adapter
from support.pooled import save_random, save_word_tokenizer
from support.ranks import answers_of_engines, answers_of_ranks, mpirun

LAYERS = 4
CROWD = 6
FIELDS = {
    "gpt2": {"n_layer": LAYERS},
    "gemma2": {"num_hidden_layers": LAYERS, "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2)},
}


@pytest.fixture(scope="module")
def granite(tmp_path_factory) -> Cut:
    return _of("granite", tmp_path_factory.mktemp("granite"))


def _of(name: str, directory: Path) -> Cut:
    return Cut(name, directory, **FIELDS.get(name, {"num_hidden_layers": LAYERS}))


def test_two_stages_compute_what_one_process_does(tmp_path: Path) -> None:
    """The bits are the same, because no sum changes its order: in one batch, and each request alone."""
    cuts = {name: _of(name, tmp_path / name) for name in ("granite", "gemma2", "gpt2", "phi3", "qwen2-moe")}
    one = answers_of_engines(1, [(cut.engine(1), [cut.cases()]) for cut in cuts.values()], tmp_path)
    engines = [(cut.engine(1, pp_size=2), [cut.cases(), *([case] for case in cut.cases())]) for cut in cuts.values()]
    two = answers_of_engines(2, engines, tmp_path)
    for (name, cut), (expected,), (crowd, *alone) in zip(cuts.items(), one, two, strict=True):
        cut.check(expected)
        for answer, in_crowd, (by_itself,) in zip(expected, crowd, alone, strict=True):
            assert in_crowd.same_bits(answer), name
            assert by_itself.same_bits(answer), name


def test_stages_of_different_numbers_of_layers_give_the_same(granite: Cut, tmp_path: Path) -> None:
    """Four layers over three stages: one, two and one layer, each stage with its share of adapters."""
    only = {"target_modules": ["q_proj"], "layers_to_transform": [LAYERS - 2]}
    middle = save_adapter(granite.model, tmp_path / "middle", 7, **only)
    cases = [*granite.cases(), {"adapter": str(middle), "task": 99, "prompt": prompt_of(20, 1), "tokens": 4}]
    (expected,) = answers_of_ranks(1, granite.engine(1), [cases], tmp_path)
    crowd, *alone = answers_of_ranks(
        3, granite.engine(1, pp_size=3), [cases, *([case] for case in cases)], tmp_path, enable_chunked_context=True
    )
    granite.check(crowd[: len(granite.cases())])
    for answer, in_crowd, (by_itself,) in zip(expected, crowd, alone, strict=True):
        assert in_crowd.same_bits(answer)
        assert by_itself.same_bits(answer)


@pytest.mark.parametrize(
    ("tp_size", "pp_size"),
    [(1, 2), pytest.param(1, 4, marks=pytest.mark.nightly), pytest.param(2, 2, marks=pytest.mark.nightly)],
)
def test_steps_in_pieces_give_the_same(granite: Cut, tp_size: int, pp_size: int, tmp_path: Path) -> None:
    """A step of 128 tokens with few logit rows passes in two micro-batches, whose border lies within sequences."""
    cases: list[dict[str, Any]] = [
        {**granite.cases()[at % 4], "prompt": prompt_of(30 + 17 * at, at), "tokens_alone": True} for at in range(CROWD)
    ]
    config = {"enable_chunked_context": True}
    (expected,) = answers_of_ranks(1, granite.engine(1), [cases], tmp_path, **config)
    engine = granite.engine(tp_size, pp_size=pp_size)
    (answers,) = answers_of_ranks(tp_size * pp_size, engine, [cases], tmp_path, **config)
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected]


def test_stages_of_several_ranks(granite: Cut, tmp_path: Path) -> None:
    """Two stages of two ranks give the bits of two ranks without stages."""
    cases = granite.cases()
    (expected,) = answers_of_ranks(2, granite.engine(2), [cases], tmp_path)
    (answers,) = answers_of_ranks(4, granite.engine(2, pp_size=2), [cases], tmp_path)
    granite.check(answers)
    assert all(answer.same_bits(other) for answer, other in zip(answers, expected, strict=True))


@pytest.mark.nightly
def test_four_stages_in_bfloat16(granite: Cut, tmp_path: Path) -> None:
    cases = granite.cases()
    (expected,) = answers_of_ranks(1, granite.engine(1, DType.BFLOAT16), [cases], tmp_path)
    (answers,) = answers_of_ranks(4, granite.engine(1, DType.BFLOAT16, pp_size=4), [cases], tmp_path)
    assert all(answer.same_bits(other) for answer, other in zip(answers, expected, strict=True))


def test_adapters_of_some_layers_alone(granite: Cut, tmp_path: Path) -> None:
    """An adapter on only the last stage, one on lm_head and the embedding, and enough adapters to evict each other."""
    only = {"target_modules": ["q_proj"], "layers_to_transform": [LAYERS - 1]}
    last = save_adapter(granite.model, tmp_path / "last", 7, **only)
    words = save_adapter(granite.model, tmp_path / "words", 8, target_modules=["lm_head", "embed_tokens", "o_proj"])
    cases = [
        {"adapter": str(adapter), "task": task, "prompt": prompt_of(20, task), "tokens": 4}
        for task, adapter in enumerate((last, words, *granite.adapters.values()), start=1)
        if adapter is not None
    ]
    (expected,) = answers_of_ranks(1, granite.engine(1), [cases], tmp_path)
    crowd, *alone = answers_of_ranks(
        2, granite.engine(1, pp_size=2), [cases, *([case] for case in cases), cases], tmp_path
    )
    again = alone.pop()
    for answer, by_itself, (same,), late in zip(expected, crowd, alone, again, strict=True):
        assert by_itself.same_bits(answer)
        assert same.same_bits(answer)
        assert late.same_bits(answer)


def test_hidden_states_come_from_the_last_stage(granite: Cut, tmp_path: Path) -> None:
    script = tmp_path / "embed.py"
    script.write_text(
        """
import sys
import numpy as np
import adaptrt
with adaptrt.Executor(sys.argv[1], adaptrt.ModelType.DECODER_ONLY, adaptrt.ExecutorConfig()) as executor:
    if executor.can_enqueue_requests():
        pooling = adaptrt.PoolingParams()
        requests = [adaptrt.Request(list(range(2, 2 + n)), 0, pooling_params=pooling) for n in (3, 40, 59)]
        ids = executor.enqueue_requests(requests)
        np.savez(sys.argv[2], *[executor.await_responses(one)[-1].result.pooled_output for one in ids])
"""
    )
    made = []
    for ranks, engine in ((1, granite.engine(1)), (2, granite.engine(1, pp_size=2))):
        output = tmp_path / f"{ranks}.npz"
        mpirun(ranks, script, engine, output)
        made.append(np.load(output))
    assert made[0].files
    for name in made[0].files:
        assert made[0][name].size > 0
        assert made[0][name].tobytes() == made[1][name].tobytes()


def test_invalid_pipelines_are_refused_by_name(granite: Cut, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="pp_size is 5; expected at most num_hidden_layers 4"):
        convert_checkpoint(granite.model, tmp_path / "fifths", pp_size=5)


def test_a_classifier_reads_hidden_states_of_the_last_stage(tmp_path: Path) -> None:
    """All splits give the bits of one process."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=64, num_labels=3, pad_token_id=0, **sizes)
    model = transformers.LlamaForSequenceClassification(config).eval()
    directory = save_random(model, tmp_path / "model")
    save_word_tokenizer(directory, config.vocab_size, end=False)
    prompts = [prompt_of(length, length) for length in (1, 40, 128)]
    found = []
    for tp_size, pp_size in ((1, 1), (1, 2), (2, 2)):
        checkpoint, engine = (tmp_path / f"{what}{tp_size}x{pp_size}" for what in ("checkpoint", "engine"))
        convert_checkpoint(directory, checkpoint, tp_size=tp_size, pp_size=pp_size)
        build(checkpoint, CONFIG, engine)
        with adaptrt.LLM(engine) as llm:
            texts = [" ".join(f"t{token}" for token in prompt) for prompt in prompts]
            found.append([result.probs for result in llm.classify(texts)])
    for at, prompt in enumerate(prompts):
        with torch.no_grad():
            expected = torch.softmax(model(torch.tensor([prompt])).logits[0].double(), -1).numpy()
        one, two_stages, cut_stages = (probs[at] for probs in found)
        np.testing.assert_allclose(one, expected, atol=2e-5)  # the tolerance of test_classifiers.py
        assert two_stages.tobytes() == one.tobytes()
        np.testing.assert_allclose(cut_stages, expected, atol=2e-5)
