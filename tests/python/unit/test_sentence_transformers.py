"""Pooling of embeddings from sentence-transformers files: reading, and refusals by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from adaptrt import CheckpointError
from adaptrt.common.json_fields import JsonFields
from adaptrt.formats.checkpoint.pooling import DenseLayer, EmbeddingPooling
from adaptrt.formats.hugging_face.sentence_transformers import pooling_files, read_embedding_pooling
from adaptrt.formats.sources.kind import Kind
from adaptrt.formats.sources.needed_files import small_files
from support.pooled import Dense, save_sentence_transformer


@pytest.mark.parametrize(
    ("mode", "pooling_type"), [("cls_token", "cls"), ("mean_tokens", "mean"), ("lasttoken", "last")]
)
@pytest.mark.parametrize("normalize", [False, True])
def test_ways_of_pooling(tmp_path: Path, mode: str, pooling_type: str, normalize: bool) -> None:
    save_sentence_transformer(tmp_path, mode, normalize=normalize)
    expected = EmbeddingPooling(pooling_type=pooling_type, normalize=normalize)
    assert read_embedding_pooling(tmp_path) == expected
    # Newer releases write this.
    name = {"cls_token": "cls", "mean_tokens": "mean"}.get(mode, mode)
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": name}))
    assert read_embedding_pooling(tmp_path) == expected


def test_models_without_the_files_say_nothing(tmp_path: Path) -> None:
    assert read_embedding_pooling(tmp_path) is None


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("1_Pooling/config.json", {"pooling_mode_max_tokens": True}, "pooling_mode_max_tokens is true; accepted: one"),
        (
            "1_Pooling/config.json",
            {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True},
            "pooling_mode_cls_token is true, pooling_mode_mean_tokens is true; accepted: one of",
        ),
        ("1_Pooling/config.json", {}, "no pooling_mode is true"),
        ("1_Pooling/config.json", {"pooling_mode_newer_one": True}, "pooling_mode_newer_one is true"),
        ("1_Pooling/config.json", {"pooling_mode": "max"}, 'pooling_mode is "max"; accepted: cls, mean, lasttoken'),
        ("1_Pooling/config.json", {"pooling_mode": ["cls"]}, r'pooling_mode is \["cls"\]'),
        ("1_Pooling/config.json", {"pooling_mode": "cls", "include_prompt": False}, "include_prompt is false"),
        ("sentence_bert_config.json", {"do_lower_case": True}, "do_lower_case is true"),
        ("modules.json", [{"type": "models.Transformer", "path": ""}], "has no module of type Pooling"),
        ("modules.json", [{"type": "models.Transformer", "path": "0_Transformer"}], "0_Transformer.* is not served"),
        ("modules.json", [{"type": "models.Normalize"}], "Normalize.* is not served"),
        (
            "modules.json",
            [{"type": "models.Pooling", "path": "1_Pooling"}, {"type": "models.CNN", "path": "2_CNN"}],
            "2_CNN.* is not served",
        ),
        ("modules.json", [{"type": "models.Dense", "path": "2_Dense"}], "2_Dense.* is not served"),
        (
            "modules.json",
            [
                {"type": "models.Pooling", "path": "1_Pooling"},
                {"type": "models.Normalize", "path": "2_Normalize"},
                {"type": "models.Dense", "path": "3_Dense"},
            ],
            "3_Dense.* is not served",
        ),
        (
            "modules.json",
            [{"type": "models.Pooling", "path": "1_Pooling"}, {"type": "models.Dense", "path": "a/2_Dense"}],
            "expected a directory's plain name",
        ),
        ("modules.json", [{"type": "models.Pooling", "path": "../elsewhere"}], "is outside of the model's directory"),
        ("modules.json", [{"type": "models.Pooling", "path": "nowhere"}], "cannot be read"),
        ("modules.json", {"type": "models.Pooling"}, "expected a list of objects"),
        ("modules.json", ["models.Pooling"], "expected a list of objects"),
    ],
)
def test_unsupported_modules_are_named(tmp_path: Path, file: str, content: Any, message: str) -> None:
    save_sentence_transformer(tmp_path, "lasttoken", normalize=True)
    (tmp_path / file).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=message):
        read_embedding_pooling(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"in_features": 0}, "in_features is 0; it must be at least 1"),
        ({"out_features": "3"}, 'out_features is "3"; expected an integer'),
        ({"activation_function": "torch.nn.modules.activation.ELU"}, 'ELU"; accepted: torch.nn.modules.linear'),
        ({"module_input_name": "token_embeddings"}, 'module_input_name is "token_embeddings"; accepted: sentence_'),
        ({"scale": 2.0}, "scale is unknown"),
    ],
)
def test_dense_modules_that_are_not_served(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    save_sentence_transformer(tmp_path, "lasttoken", normalize=True, dense=[Dense(36, 40)])
    path = tmp_path / "2_Dense" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(CheckpointError, match=message):
        read_embedding_pooling(tmp_path)


def test_dense_modules(tmp_path: Path) -> None:
    save_sentence_transformer(tmp_path, "mean_tokens", normalize=True, dense=[Dense(36, 40, "activation.Tanh")])
    pooling = read_embedding_pooling(tmp_path)
    assert pooling is not None
    layer = DenseLayer(path="2_Dense", inputs=36, outputs=40, bias=True, activation="tanh")
    assert pooling.dense == (layer,)
    assert pooling.normalize
    assert EmbeddingPooling.from_fields(JsonFields(pooling.to_dict())) == pooling
    assert {path.relative_to(tmp_path).as_posix() for path in pooling_files(tmp_path)} >= {
        "2_Dense/config.json",
        "2_Dense/model.safetensors",
    }
    assert pooling.inconsistencies(36) == []
    assert pooling.inconsistencies(37) == ["2_Dense has 36 inputs, but gets 37"]


def test_weights_of_dense_modules_are_downloaded() -> None:
    module = ["modules.json", "2_Dense/config.json", "2_Dense/model.safetensors"]
    files = [*module, "2_Dense/pytorch_model.bin", "onnx/model.safetensors", "model.safetensors"]
    assert small_files(Kind.MODEL, files) == sorted(module)
    assert small_files(Kind.MODEL, files[1:]) == []


def test_a_file_that_is_not_json(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text("[" * 100000)
    with pytest.raises(CheckpointError, match=r"modules\.json: cannot be read"):
        read_embedding_pooling(tmp_path)
