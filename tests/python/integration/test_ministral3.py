"""Ministral 3: queries that are scaled by their position, and configs of its text and vision models."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import adaptrt
from adaptrt._core import CheckpointError, ConfigError
from adaptrt.builder.build import build
from adaptrt.builder.compile.cuda_support import problems_of_network
from adaptrt.builder.conversion.convert import convert_checkpoint
from adaptrt.builder.network.onnx_graph import NetworkOptions, onnx_graph
from adaptrt.formats.checkpoint.rotary import YarnScaling
from adaptrt.formats.engine.build_config import TENSORRT, BuildConfig
from adaptrt.formats.models.mistral import Ministral3Config
from adaptrt.formats.models.registry import declare, load_config
from adaptrt.formats.network.operands import QueryScaling
from support.families import RELATIVES, save_family
from support.hf_configs import MINISTRAL3, read_config
from support.models import Reference
from support.serving import collect, make_request

TEXT = MINISTRAL3["text_config"]
LIMIT = 24


@pytest.fixture
def load(tmp_path: Path) -> Any:
    return partial(read_config, tmp_path)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    family = RELATIVES["ministral3"]
    fields = {**family.fields, "rope_parameters": {**family.fields["rope_parameters"]}}
    fields["rope_parameters"]["original_max_position_embeddings"] = LIMIT
    return save_family(dataclasses.replace(family, fields=fields), tmp_path_factory.mktemp("ministral3") / "model")


@pytest.fixture(scope="module")
def checkpoint(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("ministral3") / "checkpoint"
    convert_checkpoint(model, directory)
    return directory


def test_scaled_queries(model: Path, checkpoint: Path, tmp_path: Path) -> None:
    """A prompt whose queries have several factors, in one step and in many: the same bits."""
    build(checkpoint, BuildConfig(max_batch_size=2, max_num_tokens=128, max_seq_len=128), tmp_path / "engine")
    prompt = np.random.default_rng(4).integers(2, 61, 5 * LIMIT - 20).tolist()
    answers = []
    for fields in ({"num_threads": 1}, {"enable_chunked_context": True, "max_num_tokens": 17}):
        config = adaptrt.ExecutorConfig(**fields)
        with adaptrt.Executor(tmp_path / "engine", adaptrt.ModelType.DECODER_ONLY, config) as executor:
            answers.append(collect(executor, executor.enqueue_request(make_request(prompt, 10))))
    expected = Reference(model).logits(prompt, answers[0].tokens).numpy()
    actual = np.concatenate([answers[0].context_logits, answers[0].generation_logits[1:]])
    assert np.abs(actual - expected).max() <= 1e-4 * (expected.max() - expected.min())
    assert answers[0].same_bits(answers[1])


def test_plans_end_where_scaling_begins(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"max_seq_len is 25: .* from 24 on, which needs backend native or cuda; expected up to 24"
    ):
        build(checkpoint, BuildConfig(backend=TENSORRT, max_seq_len=LIMIT + 1), tmp_path / "engine")
    network = declare(load_config(checkpoint))
    assert not [text for text in problems_of_network(network) if "query_scaling" in text]
    with pytest.raises(ConfigError, match=r"cannot be written as ONNX; expected max_seq_len up to 24"):
        onnx_graph(network, {}, NetworkOptions())


def test_a_published_config_is_read(load: Any) -> None:
    config = load(MINISTRAL3)
    assert isinstance(config, Ministral3Config)
    assert (config.max_position_embeddings, config.query_scaling_beta, config.rotary_base) == (262144, 0.1, 1e6)
    assert isinstance(config.rotary_scaling, YarnScaling)
    assert config.rotary_scaling.original_max_position_embeddings == 16384
    text = dataclasses.replace(load({**TEXT, "architectures": ["Ministral3ForCausalLM"]}), architecture="")
    of_text = {field.name: getattr(config, field.name) for field in dataclasses.fields(Ministral3Config)}
    assert text == Ministral3Config(**{**of_text, "architecture": ""})


@pytest.mark.parametrize("model_type", ["mistral", "ministral3"])
def test_rope_parameters_that_are_left_out(load: Any, model_type: str) -> None:
    """Ministral 3 has its own default; Mistral Small 3's text stays as it was."""
    text = {name: value for name, value in TEXT.items() if name != "rope_parameters"}
    config = load(MINISTRAL3, text_config={**text, "model_type": model_type})
    is_new = model_type == "ministral3"
    assert (config.rotary_scaling is not None, config.query_scaling_beta > 0) == (is_new, is_new)
    assert config.max_position_embeddings == 262144


def test_a_factor_of_zero_scales_nothing(load: Any) -> None:
    rope = {**TEXT["rope_parameters"], "llama_4_scaling_beta": 0.0}
    config = load(MINISTRAL3, text_config={**TEXT, "rope_parameters": rope})
    assert config.query_scaling is None
    assert load(MINISTRAL3).query_scaling == QueryScaling(beta=0.1, length=16384)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"llama_4_scaling_beta": "0.1"}, 'llama_4_scaling_beta is "0.1"; expected a finite number'),
        ({"llama_4_scaling_beta": -1.0}, "llama_4_scaling_beta is -1.0; it must be at least 0"),
        ({"original_max_position_embeddings": 0}, "original_max_position_embeddings is 0; it must be at least 1"),
        ({"original_max_position_embeddings": "x"}, 'original_max_position_embeddings is "x"'),
        ({"llama_5_scaling_beta": 0.1}, "llama_5_scaling_beta is unknown"),
    ],
)
def test_fields_that_cannot_be_served_are_named(load: Any, changes: dict[str, Any], complaint: str) -> None:
    rope = {**TEXT["rope_parameters"], **changes}
    with pytest.raises(CheckpointError, match=complaint):
        load(MINISTRAL3, text_config={**TEXT, "rope_parameters": rope})


def test_scaled_queries_without_yarn_are_refused(load: Any) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e6, "llama_4_scaling_beta": 0.1}
    with pytest.raises(CheckpointError, match=r"llama_4_scaling_beta is 0.1, but rope_type is default; expected yarn"):
        load(MINISTRAL3, text_config={**TEXT, "rope_parameters": rope})
