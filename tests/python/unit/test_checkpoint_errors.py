"""Models that cannot be converted: errors name the problem, and nothing is written."""

from __future__ import annotations

import json
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from threading import Event
from time import sleep
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from adaptrt import _core
from adaptrt.builder.conversion import convert as convert_module
from adaptrt.builder.conversion import model_tensors
from adaptrt.builder.conversion.convert import convert_checkpoint
from support.models import ModelSpec, save_model

State = dict[str, torch.Tensor]
GATE = "model.layers.0.mlp.gate_proj.weight"


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return save_model(ModelSpec(), tmp_path / "hf")


def refused(model_dir: Path, error: type[Exception], complaint: str, **options: Any) -> str:
    """Converts, expects the error, and expects no leftovers."""
    output_dir = model_dir.parent / "out"
    before = sorted(model_dir.parent.iterdir())
    with pytest.raises(error, match=complaint) as caught:
        convert_checkpoint(model_dir, output_dir, **options)
    assert sorted(model_dir.parent.iterdir()) == before
    return str(caught.value)


def change_state(model_dir: Path, change: Callable[[State], object]) -> None:
    state = load_file(model_dir / "model.safetensors")
    change(state)
    save_file(state, model_dir / "model.safetensors")


def change_config(model_dir: Path, **changes: Any) -> None:
    path = model_dir / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


# ---- tensors


def test_all_missing_and_unused_tensors_are_listed(model_dir: Path) -> None:
    def change(state: State) -> None:
        del state[GATE], state["model.norm.weight"]
        state["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(36)
        state["visual.stem"] = torch.zeros(1)

    change_state(model_dir, change)
    message = refused(model_dir, _core.CheckpointError, "missing tensors: .*; unexpected tensors: ")
    for name in (GATE, "model.norm.weight", "model.layers.0.self_attn.q_proj.bias", "visual.stem"):
        assert name in message


def test_an_untied_model_needs_its_lm_head(model_dir: Path) -> None:
    change_state(model_dir, lambda state: state.pop("lm_head.weight"))
    refused(model_dir, _core.CheckpointError, "missing tensors: lm_head.weight")


def test_layers_beyond_num_hidden_layers_are_unused(model_dir: Path) -> None:
    change_config(model_dir, num_hidden_layers=1)
    message = refused(model_dir, _core.CheckpointError, "unexpected tensors")
    assert message.count("model.layers.1.") == 9


def test_all_wrong_shapes_and_types_are_listed(model_dir: Path) -> None:
    def change(state: State) -> None:
        state[GATE] = state[GATE].T.contiguous()
        state["model.norm.weight"] = state["model.norm.weight"].double()
        state["model.embed_tokens.weight"] = torch.tensor(0.0)

    change_state(model_dir, change)
    message = refused(model_dir, _core.CheckpointError, r"'model.embed_tokens.weight' is \[\], but config.json makes")
    assert f"'{GATE}' is [36, 37], but config.json makes it [37, 36]" in message
    assert "'model.norm.weight' is of float64; accepted: float32, float16, bfloat16" in message


def test_a_tied_lm_head_that_differs(tmp_path: Path) -> None:
    model_dir = save_model(ModelSpec(tie_word_embeddings=True), tmp_path / "hf")

    def change(state: State) -> None:
        state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
        state["lm_head.weight"][60, 35] += 1

    change_state(model_dir, change)
    refused(model_dir, _core.CheckpointError, "'lm_head.weight' differs from model.embed_tokens.weight, although tie")


# ---- values


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("target", list(_core.DType), ids=_core.dtype_name)
def test_values_that_are_not_finite(tmp_path: Path, value: float, source: torch.dtype, target: _core.DType) -> None:
    model_dir = save_model(ModelSpec(), tmp_path / "hf", dtype=source)
    change_state(model_dir, lambda state: state[GATE].__setitem__((36, 35), value))
    refused(
        model_dir, _core.CheckpointError, rf"model.safetensors: tensor '{GATE}': holds {value}; weights", dtype=target
    )


@pytest.mark.parametrize(
    ("source", "target", "value"),
    [
        (torch.float32, _core.DType.FLOAT16, -65520.0),
        (torch.bfloat16, _core.DType.FLOAT16, 65536.0),
        (torch.float32, _core.DType.BFLOAT16, 3.4e38),
    ],
)
def test_overflow_names_the_tensor_and_the_value(
    tmp_path: Path, source: torch.dtype, target: _core.DType, value: float
) -> None:
    model_dir = save_model(ModelSpec(), tmp_path / "hf", dtype=source)
    change_state(model_dir, lambda state: state[GATE].__setitem__((36, 35), value))
    name = _core.dtype_name(target)
    refused(
        model_dir, _core.CheckpointError, re.escape(f"'{GATE}': holds {value:g}, which overflows {name}"), dtype=target
    )


def test_the_largest_float16_does_not_overflow(model_dir: Path) -> None:
    change_state(model_dir, lambda state: state[GATE].__setitem__((36, 35), 65519.0))
    convert_checkpoint(model_dir, model_dir.parent / "out", dtype=_core.DType.FLOAT16)
    converted = load_file(model_dir.parent / "out" / "rank0.safetensors")
    assert converted["transformer.layers.0.mlp.fc.weight"][36, 35] == 65504


# ---- files


def shard(model_dir: Path, change: Callable[[dict[str, str]], object] = lambda weight_map: None) -> None:
    """Cuts model.safetensors in two, with an index that `change` may damage."""
    state = load_file(model_dir / "model.safetensors")
    (model_dir / "model.safetensors").unlink()
    weight_map = {name: f"model-{index % 2}.safetensors" for index, name in enumerate(state)}
    for file in sorted(set(weight_map.values())):
        save_file({name: state[name] for name in state if weight_map[name] == file}, model_dir / file)
    change(weight_map)
    (model_dir / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_a_missing_shard_is_named(model_dir: Path) -> None:
    shard(model_dir)
    (model_dir / "model-1.safetensors").unlink()
    refused(model_dir, _core.CheckpointError, r"model.safetensors.index.json: shard model-1.safetensors is missing")


def test_tensors_in_other_shards_than_the_index_says(model_dir: Path) -> None:
    def change(weight_map: dict[str, str]) -> None:
        other = {"model-0.safetensors": "model-1.safetensors", "model-1.safetensors": "model-0.safetensors"}
        weight_map[GATE] = other[weight_map[GATE]]
        weight_map["ghost"] = "model-0.safetensors"
        del weight_map["model.norm.weight"]

    shard(model_dir, change)
    message = refused(model_dir, _core.CheckpointError, rf"'{GATE}' is said to be in model-\d\S+, but is in model-\d")
    assert "tensor 'ghost' is said to be in model-0.safetensors, but is in no shard" in message
    assert "tensor 'model.norm.weight' is in model-" in message


@pytest.mark.parametrize("file", ["../hf/model-0.safetensors", "/etc/passwd", "a\\b", "..", "", "\0", 3, None])
def test_an_index_cannot_leave_the_directory(model_dir: Path, file: object) -> None:
    shard(model_dir, lambda weight_map: weight_map.update({GATE: file}))  # type: ignore[dict-item]
    refused(model_dir, _core.CheckpointError, rf"'{GATE}' is said to be in .*; expected the plain name of a file here")


@pytest.mark.parametrize("index", ["{}", "[]", '{"weight_map": {}}', '{"weight_map": []}', "{"])
def test_an_index_without_a_map(model_dir: Path, index: str) -> None:
    (model_dir / "model.safetensors").rename(model_dir / "model-1.safetensors")
    (model_dir / "model.safetensors.index.json").write_text(index)
    refused(model_dir, _core.CheckpointError, r"model\.safetensors\.index\.json: ")


def test_a_whole_file_beside_an_index_is_ambiguous(model_dir: Path) -> None:
    (model_dir / "model.safetensors.index.json").write_text("{}")
    refused(model_dir, _core.CheckpointError, "holds both model.safetensors and model.safetensors.index.json")


def test_a_truncated_file(model_dir: Path) -> None:
    path = model_dir / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    refused(model_dir, _core.CheckpointError, r"model\.safetensors: damaged header: the tensors take \d+ bytes, but")


def test_a_directory_without_weights_or_config(tmp_path: Path, model_dir: Path) -> None:
    refused(tmp_path / "nowhere", _core.CheckpointError, "nowhere: is not a directory")
    (model_dir / "model.safetensors").unlink()
    refused(model_dir, _core.CheckpointError, "holds no weights; expected one of model.safetensors, ")
    (model_dir / "config.json").unlink()
    refused(model_dir, _core.CheckpointError, "config.json: cannot be read")


class Exploit:
    """Code that a pickle may contain."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, ("touch exploited",)


@pytest.mark.parametrize(
    ("write", "complaint"),
    [
        (lambda path: path.write_bytes(b"nonsense"), "cannot be read"),
        (lambda path: path.write_bytes(pickle.dumps(Exploit())), "cannot be read"),
        (lambda path: torch.save({GATE: Exploit()}, path), "cannot be read"),
        (lambda path: torch.save({GATE: torch.zeros(1)}, path, _use_new_zipfile_serialization=False), "cannot be read"),
        (lambda path: torch.save([torch.zeros(1)], path), "expected a dictionary of tensors, found list"),
        (lambda path: torch.save({"step": 3}, path), "expected tensors only, found others under step"),
    ],
)
def test_pickles_that_are_not_tensors(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path], None], complaint: str
) -> None:
    monkeypatch.chdir(model_dir)
    (model_dir / "model.safetensors").unlink()
    write(model_dir / "pytorch_model.bin")
    refused(model_dir, _core.CheckpointError, rf"pytorch_model\.bin: {complaint}")
    assert not (model_dir / "exploited").exists()


def test_pickles_without_torch(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (model_dir / "model.safetensors").rename(model_dir / "pytorch_model.bin")
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    refused(model_dir, _core.CheckpointError, r"pip install 'adaptrt\[torch\]'")


# ---- sizes and the output directory


@pytest.mark.parametrize("name", ["tp_size", "pp_size", "workers"])
def test_sizes_below_one(model_dir: Path, name: str) -> None:
    refused(model_dir, _core.ConfigError, f"{name} is 0; it must be at least 1", **{name: 0})


def test_a_model_that_cannot_be_cut(model_dir: Path) -> None:
    refused(model_dir, _core.ConfigError, "tp_size 2 does not divide num_attention_heads 3", tp_size=2)


@pytest.mark.parametrize("producer", [None, {"producer": {"name": "modelopt"}}, {"producer": {"name": "adaptrt"}}])
def test_a_directory_with_other_files_is_not_touched(model_dir: Path, producer: object) -> None:
    output_dir = model_dir.parent / "out"
    output_dir.mkdir()
    (output_dir / "precious.txt").write_text("keep")
    if producer is not None:
        (output_dir / "config.json").write_text(json.dumps(producer))
    refused(model_dir, _core.CheckpointError, "out: is neither empty nor a checkpoint of AdaptRT; nothing was written")
    assert (output_dir / "precious.txt").read_text() == "keep"


def test_an_output_that_is_a_file(model_dir: Path) -> None:
    (model_dir.parent / "out").write_text("keep")
    refused(model_dir, _core.CheckpointError, "out: exists and is not a directory")


def test_the_model_itself_is_never_the_output(model_dir: Path) -> None:
    with pytest.raises(_core.CheckpointError, match="is neither empty nor a checkpoint of AdaptRT"):
        convert_checkpoint(model_dir, model_dir)
    assert (model_dir / "model.safetensors").exists()


def test_a_checkpoint_of_ours_is_replaced_as_a_whole(model_dir: Path) -> None:
    output_dir = model_dir.parent / "out"
    convert_checkpoint(model_dir, output_dir, pp_size=2)
    convert_checkpoint(model_dir, output_dir, dtype=_core.DType.FLOAT16)
    assert sorted(path.name for path in output_dir.glob("rank*")) == ["rank0.safetensors"]
    assert sorted(path.name for path in model_dir.parent.iterdir()) == ["hf", "out"]


def test_a_failed_conversion_leaves_the_old_checkpoint(model_dir: Path) -> None:
    output_dir = model_dir.parent / "out"
    convert_checkpoint(model_dir, output_dir)
    before = {path.name: path.read_bytes() for path in output_dir.iterdir()}
    change_state(model_dir, lambda state: state[GATE].fill_(float("nan")))
    refused(model_dir, _core.CheckpointError, "holds nan")
    assert {path.name: path.read_bytes() for path in output_dir.iterdir()} == before


@pytest.mark.parametrize("workers", [1, 4])
def test_one_rank_that_fails_ends_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    spec = ModelSpec(num_hidden_layers=4)
    model_dir = save_model(spec, tmp_path / "hf")
    change_state(model_dir, lambda state: state["model.layers.0.input_layernorm.weight"].fill_(float("inf")))
    refused(model_dir, _core.CheckpointError, "model.layers.0.input_layernorm", pp_size=4, workers=workers)


def test_the_last_rank_that_fails_stops_the_first(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Path] = []
    failed = Event()

    def write(path: Path, *arguments: Any) -> None:
        advance = arguments[-1]
        if path.name == "rank1.safetensors":
            failed.set()
            raise _core.CheckpointError("the last rank fails")
        assert failed.wait(60)
        for _ in range(600):  # until stopped
            advance(1)
            sleep(0.1)
        written.append(path)

    monkeypatch.setattr(convert_module, "write_rank", write)
    refused(model_dir, _core.CheckpointError, "the last rank fails", pp_size=2, workers=2)
    assert not written


def test_an_interrupt_leaves_nothing(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(model_tensors, "cast", interrupted)
    refused(model_dir, KeyboardInterrupt, "^$")
