"""The graphs of encoder-decoders, evaluated by onnx.reference, against transformers + PEFT in float32."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from transformers.models.t5.modeling_t5 import T5Attention

from adaptrt.builder.conversion.checkpoint import Checkpoint
from adaptrt.builder.conversion.convert import convert_checkpoint
from adaptrt.builder.network.onnx_file import dump_onnx
from adaptrt.builder.network.onnx_graph import NetworkOptions
from adaptrt.formats.adapter import convert_adapter
from adaptrt.formats.models.registry import FAMILIES, declare, load_config, specimen
from adaptrt.formats.models.t5 import T5Config, position_buckets
from adaptrt.plugins import PLUGINS, reference_ops
from support.encoder_decoders import (
    MODELS,
    Seq2SeqReference,
    save_adapter_of,
    save_encoder_decoder,
    tokens_of,
)
from support.engines import make_graph
from support.oracle import AdapterTables

# Both sides compute in float32, in different orders.
TOLERANCE = 1e-4
ADAPTERS = {"lora": {"r": 4}, "dora": {"r": 3, "use_dora": True}}
ENCODER_LENGTHS, DECODER_LENGTHS = (31, 1, 12), (5, 30, 1)


def evaluate(
    checkpoint: Path,
    scratch: Path,
    options: NetworkOptions,
    cases: list[tuple[list[int], list[int]]],
    tables: AdapterTables | None = None,
) -> list[np.ndarray]:
    """Returns the logits of each (encoder tokens, decoder tokens) in one step; case i uses adapter i."""
    model = make_graph(Checkpoint.open(checkpoint), options)
    dump_onnx(model, checkpoint, scratch / "network.onnx", lambda num_bytes: None)
    inputs: dict[str, np.ndarray] = {}
    for prefix, sequences in (("encoder_", [case[0] for case in cases]), ("", [case[1] for case in cases])):
        inputs[f"{prefix}input_ids"] = np.concatenate(sequences)
        inputs[f"{prefix}positions"] = np.concatenate([np.arange(len(tokens)) for tokens in sequences])
        inputs[f"{prefix}sequence_offsets"] = np.cumsum([0, *map(len, sequences)])
    inputs["logit_rows"] = np.arange(len(inputs["input_ids"]))
    inputs["adapter_slots"] = np.arange(len(cases))
    inputs = {name: value.astype(np.int32) for name, value in inputs.items()}
    if tables is not None:
        inputs |= {"lora_ranks": tables.ranks, "lora_pointers": tables.pointers}
    evaluator = ReferenceEvaluator(onnx.load(scratch / "network.onnx"), new_ops=reference_ops(PLUGINS))
    (logits,) = evaluator.run(None, {value.name: inputs[value.name] for value in model.graph.input})
    return np.split(logits, inputs["sequence_offsets"][1:-1])


def make_cases() -> list[tuple[list[int], list[int]]]:
    return [(tokens_of(e, 1), tokens_of(d, 2)) for e, d in zip(ENCODER_LENGTHS, DECODER_LENGTHS, strict=True)]


def assert_close(actual: np.ndarray, expected: np.ndarray) -> None:
    assert actual.shape == expected.shape
    assert np.abs(actual - expected).max() <= TOLERANCE * (expected.max() - expected.min())


@pytest.mark.parametrize("name", MODELS)
def test_the_base_model(name: str, tmp_path: Path) -> None:
    model = save_encoder_decoder(MODELS[name], tmp_path / "model")
    convert_checkpoint(model, tmp_path / "checkpoint")
    cases = make_cases()
    answers = evaluate(tmp_path / "checkpoint", tmp_path, NetworkOptions(), cases)
    reference = Seq2SeqReference(model)
    for case, actual in zip(cases, answers, strict=True):
        assert_close(actual, reference.logits(*case))


@pytest.mark.parametrize("name", MODELS)
def test_adapters_on_every_linear_layer(name: str, tmp_path: Path) -> None:
    model = save_encoder_decoder(MODELS[name], tmp_path / "model")
    convert_checkpoint(model, tmp_path / "checkpoint")
    directories = [
        save_adapter_of(MODELS[name], model, tmp_path / adapter, seed, **fields)
        for seed, (adapter, fields) in enumerate(ADAPTERS.items())
    ]
    flattened = [convert_adapter(directory, storage_dtype="float32", base=model) for directory in directories]
    network = declare(load_config(tmp_path / "checkpoint"))
    tables = AdapterTables([(adapter.weights, adapter.config) for adapter in flattened], network)
    cases = make_cases()[: len(directories)]
    answers = evaluate(tmp_path / "checkpoint", tmp_path, NetworkOptions(max_lora_rank=8, dora=True), cases, tables)
    base = Seq2SeqReference(model)
    for case, directory, actual in zip(cases, directories, answers, strict=True):
        expected = Seq2SeqReference(model, directory).logits(*case)
        assert_close(actual, expected)
        assert np.abs(expected - base.logits(*case)).max() > 0.1


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (12, 20), (8, 100)])
def test_buckets_are_those_of_transformers(num_buckets: int, max_distance: int, bidirectional: bool) -> None:
    config = t5_config(num_buckets, max_distance)
    relative = torch.arange(-300, 301)
    expected = T5Attention._relative_position_bucket(relative, bidirectional, num_buckets, max_distance).tolist()
    buckets = position_buckets(config, bidirectional=bidirectional)
    actual = [buckets[int(np.clip(at, -max_distance, max_distance)) + max_distance] for at in relative.tolist()]
    assert actual == expected


def t5_config(num_buckets: int, max_distance: int) -> T5Config:
    config = specimen(FAMILIES["T5ForConditionalGeneration"]).config
    return dataclasses.replace(
        config, relative_attention_num_buckets=num_buckets, relative_attention_max_distance=max_distance
    )
