"""Encoders, alone and before decoders, whose layers are split over ranks: the results of one process."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

import adaptrt
from adaptrt._core import ConfigError
from adaptrt.builder.conversion.convert import convert_checkpoint
from support import encoder_decoders, encoders
from support.cut_encoders import (
    DECODER_SIZES,
    ORCHESTRATED,
    CutEncoder,
    answers_of,
    answers_of_ranks,
    close,
    cut_of,
    cuts_in,
    same_bits,
    some_of,
)
from support.pooled import pooled, save_word_tokenizer


@pytest.fixture(scope="module")
def cuts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, CutEncoder]:
    return cuts_in(tmp_path_factory.mktemp("cuts"))


@pytest.mark.parametrize("fully_sharded", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_two_ranks_compute_what_one_does(cuts: dict[str, CutEncoder], fully_sharded: bool, tmp_path: Path) -> None:
    """Every kind of adapter in one batch and each request alone; orchestrator mode gives the same bits."""
    cuts = some_of(cuts) if fully_sharded else cuts
    found = answers_of_ranks(2, cuts, tmp_path, each_alone=True, tp_size=2, fully_sharded=fully_sharded)
    for name, (crowd, *alone) in found.items():
        cuts[name].check(crowd)
        by_themselves = [answer for (answer,) in reversed(alone)]
        assert all(same_bits(answer, other) for answer, other in zip(crowd, by_themselves, strict=True)), name
        if name in ORCHESTRATED:
            engine = cuts[name].engine(2, fully_sharded=fully_sharded)
            (of_workers,) = answers_of(cuts[name], engine, [cuts[name].cases()])
            assert all(same_bits(answer, other) for answer, other in zip(crowd, of_workers, strict=True)), name


@pytest.mark.nightly
def test_four_ranks(cuts: dict[str, CutEncoder], tmp_path: Path) -> None:
    for name, (answers,) in answers_of_ranks(4, cuts, tmp_path, tp_size=4).items():
        cuts[name].check(answers)


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
