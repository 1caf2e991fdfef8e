"""Encoders, and encoders before decoders, whose layers are cut over ranks: the results of one process."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

import adaptrt
from adaptrt._core import ConfigError
from adaptrt.builder.conversion.convert import convert_checkpoint
from support import encoder_decoders, encoders
from support.cut_encoders import DECODER_SIZES, NAMES, CutEncoder, answers_of, close, cut_of, same_bits
from support.encoder_rank_script import answers_of_ranks
from support.pooled import pooled, save_word_tokenizer


@pytest.fixture(scope="module", params=NAMES)
def cut(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CutEncoder:
    return cut_of(request.param, tmp_path_factory.mktemp("cut"))


@pytest.mark.parametrize("fully_sharded", [False, True])
def test_two_ranks_compute_what_one_does(cut: CutEncoder, fully_sharded: bool, tmp_path: Path) -> None:
    """Every kind of adapter in one batch and each request alone, in leader mode and in orchestrator mode."""
    engine, cases = cut.engine(2, fully_sharded=fully_sharded), cut.cases()
    batches = [cases, *([case] for case in reversed(cases))]
    crowd, *alone = answers_of_ranks(2, engine, cut.model_type, batches, tmp_path, num_threads=1)
    cut.check(crowd)
    assert all(same_bits(answer, by_itself) for answer, (by_itself,) in zip(crowd, reversed(alone), strict=True))
    (of_workers,) = answers_of(cut, engine, [cases])
    assert all(same_bits(answer, other) for answer, other in zip(crowd, of_workers, strict=True))


def test_four_ranks(cut: CutEncoder, tmp_path: Path) -> None:
    (answers,) = answers_of_ranks(4, cut.engine(4), cut.model_type, [cut.cases()], tmp_path, num_threads=1)
    cut.check(answers)


def test_llm_starts_the_workers_of_an_encoder(tmp_path: Path) -> None:
    cut = cut_of("bert", tmp_path)
    save_word_tokenizer(cut.model, encoders.VOCAB_SIZE)
    text, prompt = "t5 t6 t7", [5, 6, 7, 1]
    with adaptrt.LLM(cut.engine(2), tokenizer=cut.model) as llm:
        llm.executor.add_adapter("dora", cut.adapters["dora"])
        (row,) = llm.embed([text], lora="dora", pooling_type=adaptrt.PoolingType.MEAN, normalize=True)
    expected = pooled(cut.states(cut.adapters["dora"], prompt, None), adaptrt.PoolingType.MEAN, normalize=True)
    close(row, expected)


def test_both_widths_of_an_mlp_must_be_cut(tmp_path: Path) -> None:
    kind = encoder_decoders.MODELS["bart"]
    fields = {**kind.fields, **DECODER_SIZES["bart"], "encoder_ffn_dim": 77}
    model = encoder_decoders.save_encoder_decoder(dataclasses.replace(kind, fields=fields), tmp_path / "bart")
    with pytest.raises(ConfigError, match="tp_size 2 does not divide encoder_intermediate_size 77"):
        convert_checkpoint(model, tmp_path / "refused", tp_size=2)
