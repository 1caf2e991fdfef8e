"""Encoders split over pipeline stages, alone and before a decoder: the same bits as one process."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors import safe_open

import adaptrt
from adaptrt._core import ConfigError, DType
from adaptrt.builder.build import build
from adaptrt.builder.conversion.convert import convert_checkpoint
from adaptrt.formats.checkpoint.rank_file import rank_file
from support import encoder_decoders, encoders
from support.cut_encoders import (
    DECODER_SIZES,
    ORCHESTRATED,
    CutEncoder,
    answers_of,
    answers_of_ranks,
    cut_of,
    cuts_in,
    executor_of,
    same_bits,
    some_of,
)
from support.pooled import save_word_tokenizer
from support.rank_script import result_of

CLASSES = 3


@pytest.fixture(scope="module")
def cuts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, CutEncoder]:
    return cuts_in(tmp_path_factory.mktemp("cuts"))


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> CutEncoder:
    return cut_of("t5", tmp_path_factory.mktemp("t5"))


def test_two_stages_compute_what_one_process_does(cuts: dict[str, CutEncoder], tmp_path: Path) -> None:
    """Runs a batch whose sequences pass in micro-batches, and each request alone, in leader and orchestrator mode."""
    for name, by_ranks in answers_of_ranks(2, cuts, tmp_path, each_alone=True, tp_size=1, pp_size=2).items():
        cut = cuts[name]
        expected = answers_of(cut, cut.engine(1), cut.batches())
        cut.check(expected[0])
        found = [by_ranks]
        if name in ORCHESTRATED:
            found.append(answers_of(cut, cut.engine(1, pp_size=2), cut.batches()))
        for answers in found:
            for batch, others in zip(answers, expected, strict=True):
                assert all(same_bits(answer, other) for answer, other in zip(batch, others, strict=True)), name


@pytest.mark.nightly
def test_four_stages_in_bfloat16(cuts: dict[str, CutEncoder], tmp_path: Path) -> None:
    """Some models send the encoder's output to the stages in bfloat16."""
    found = answers_of_ranks(4, some_of(cuts), tmp_path, tp_size=1, dtype=DType.BFLOAT16, pp_size=4)
    for name, (answers,) in found.items():
        (expected,) = answers_of(cuts[name], cuts[name].engine(1, DType.BFLOAT16), [cuts[name].cases()])
        assert all(same_bits(answer, other) for answer, other in zip(answers, expected, strict=True)), name


@pytest.mark.nightly
@pytest.mark.parametrize("fully_sharded", [False, True])
def test_stages_of_two_ranks(cuts: dict[str, CutEncoder], fully_sharded: bool, tmp_path: Path) -> None:
    """Two stages of two ranks give the bits of two ranks without stages."""
    without, found = (
        answers_of_ranks(2 * pp_size, some_of(cuts), tmp_path, tp_size=2, pp_size=pp_size, fully_sharded=fully_sharded)
        for pp_size in (1, 2)
    )
    for name, (answers,) in found.items():
        cuts[name].check(answers)
        assert all(same_bits(answer, other) for answer, other in zip(answers, *without[name], strict=True)), name


def test_adapters_of_some_layers_alone(t5: CutEncoder, tmp_path: Path) -> None:
    """Adapters on one encoder layer, on one decoder layer, and on cross attention's keys and values."""
    paths = {
        "encoder": r"encoder\.block\.3\..*\.(q|wo)",
        "decoder": r"decoder\.block\.0\.layer\.0\..*\.v",
        "cross": r"decoder\.block\.\d+\.layer\.1\.EncDecAttention\.[kv]",
    }
    cases = []
    for task, (name, targets) in enumerate(paths.items(), start=1):
        adapter = t5.save_adapter(tmp_path / name, task, {"r": 4, "target_modules": targets})
        cases.append({**t5.cases()[1], "adapter": str(adapter), "task": task})
    (expected,) = answers_of(t5, t5.engine(1), [cases])
    assert not any(same_bits(one, other) for one, other in itertools.pairwise(expected))
    (answers,) = answers_of(t5, t5.engine(1, pp_size=2), [cases])
    assert all(same_bits(answer, other) for answer, other in zip(answers, expected, strict=True))


def test_stages_of_different_numbers_of_layers_give_the_same(t5: CutEncoder) -> None:
    """Three stages hold one, two and one encoder layers, and three, three and two decoder layers."""
    (expected,) = answers_of(t5, t5.engine(1), [t5.cases()])
    (answers,) = answers_of(t5, t5.engine(1, pp_size=3), [t5.cases()])
    assert all(same_bits(answer, other) for answer, other in zip(answers, expected, strict=True))


def test_cross_attention_keeps_its_keys_on_every_stage(t5: CutEncoder) -> None:
    """Beams share the keys, and so do requests with a known input, for which the encoder does not run."""
    prompt, encoder_input = [0], t5.cases()[1]["encoder"]
    found = []
    for engine in (t5.engine(1), t5.engine(1, pp_size=2)):
        with executor_of(t5, engine, max_beam_width=2) as executor:
            searched = adaptrt.Request(
                prompt,
                8,
                encoder_input_token_ids=encoder_input,
                sampling_config=adaptrt.SamplingConfig(beam_width=2),
                output_config=adaptrt.OutputConfig(exclude_input_from_output=True),
            )
            beams = result_of(executor, executor.enqueue_request(searched)).output_token_ids
            greedy = adaptrt.Request(
                prompt,
                8,
                encoder_input_token_ids=encoder_input,
                output_config=adaptrt.OutputConfig(return_generation_logits=True),
            )
            logits = result_of(executor, executor.enqueue_request(greedy)).generation_logits
            found.append((beams, np.asarray(logits).tobytes()))
            statistics = executor.get_latest_iteration_stats()
            assert max(step.cross_kv_cache_stats.reused_blocks for step in statistics) == 6
    assert len(found[0][0]) == 2
    assert found[0] == found[1]


def test_a_classifier_and_an_embedding_read_the_last_stage(tmp_path: Path) -> None:
    """The first stage computes the pooler and the classifier layer, from hidden states that the last stage sends
    back."""
    sizes = {"hidden_size": 40, "num_attention_heads": 4, "intermediate_size": 76, "num_hidden_layers": 4}
    head = transformers.AutoModelForSequenceClassification
    fields = {**sizes, "num_labels": CLASSES}
    model = encoders.save_encoder(encoders.MODELS["bert"], tmp_path / "model", head, **fields)
    save_word_tokenizer(model, encoders.VOCAB_SIZE)
    prompts = [encoder_decoders.tokens_of(length, length) for length in (1, 60, 90)]
    texts = [" ".join(f"t{token}" for token in prompt) for prompt in prompts]
    found = []
    for pp_size in (1, 2):
        checkpoint, engine = (tmp_path / f"{what}{pp_size}" for what in ("checkpoint", "engine"))
        convert_checkpoint(model, checkpoint, pp_size=pp_size)
        build(checkpoint, encoders.BUILD, engine)
        with adaptrt.LLM(engine, tokenizer=model) as llm:
            rows = llm.embed(texts, pooling_type=adaptrt.PoolingType.MEAN, normalize=True)
            found.append([*(result.probs for result in llm.classify(texts)), *rows])
    assert len(found[0]) == 2 * len(texts)
    assert [row.tobytes() for row in found[0]] == [row.tobytes() for row in found[1]]
    reference = head.from_pretrained(model, attn_implementation="eager").eval()
    for prompt, probabilities in zip(prompts, found[0], strict=False):
        with torch.no_grad():
            expected = torch.softmax(reference(torch.tensor([[*prompt, 1]])).logits[0].double(), -1)
        np.testing.assert_allclose(probabilities, expected.numpy(), atol=2e-5)  # the tolerance of test_classifiers.py


def test_tensors_of_each_pipeline_stage(t5: CutEncoder, tmp_path: Path) -> None:
    """Each stage has a run of layers of both stacks, counted from 0, and every table of relative positions."""
    convert_checkpoint(t5.model, tmp_path, pp_size=4)
    tables = {"encoder.relative_attention_bias.weight", "transformer.relative_attention_bias.weight"}
    for stage in range(4):
        with safe_open(tmp_path / rank_file(stage), "numpy") as file:
            names = set(file.keys())
        of_layers = {name for name in names if ".layers." in name}
        assert {".".join(name.split(".")[:3]) for name in of_layers} == {
            "encoder.layers.0",
            "transformer.layers.0",
            "transformer.layers.1",
        }
        ends = {0: {"transformer.vocab_embedding.weight"}, 3: {"lm_head.weight", "transformer.ln_f.weight"}}.get(
            stage, set()
        )
        if stage == 3:
            ends.add("encoder.ln_f.weight")
        assert names - of_layers == tables | ends


@pytest.mark.parametrize(
    ("fields", "pp_size", "message"),
    [
        ({"num_layers": 4, "num_decoder_layers": 6}, 5, "pp_size is 5; expected at most encoder_layers 4"),
        ({"num_layers": 6, "num_decoder_layers": 4}, 5, "pp_size is 5; expected at most num_hidden_layers 4"),
        ({"num_layers": 2, "num_decoder_layers": 4}, 4, "pp_size is 4; expected at most encoder_layers 2"),
    ],
)
def test_more_stages_than_layers_are_refused(
    fields: dict[str, Any], pp_size: int, message: str, tmp_path: Path
) -> None:
    kind = encoder_decoders.MODELS["t5"]
    sizes = {**kind.fields, **DECODER_SIZES["t5"], **fields}
    model = encoder_decoders.save_encoder_decoder(dataclasses.replace(kind, fields=sizes), tmp_path / "t5")
    with pytest.raises(ConfigError, match=message):
        convert_checkpoint(model, tmp_path / "refused", pp_size=pp_size)
    assert not (tmp_path / "refused").exists()


def test_an_encoder_of_fewer_layers_than_stages_is_refused(tmp_path: Path) -> None:
    model = encoders.save_encoder(encoders.MODELS["distilbert"], tmp_path / "model")
    with pytest.raises(ConfigError, match="pp_size is 4; expected at most num_hidden_layers 3"):
        convert_checkpoint(model, tmp_path / "refused", pp_size=4)
