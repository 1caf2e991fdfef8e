"""adaptrt inspect: its output for each kind of directory, and its refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from adaptrt._core import cpu_kernels, impossible_cpu_kernels
from adaptrt.builder import cli
from adaptrt.common.progress import format_bytes
from adaptrt.formats.engine.engine_config import EngineConfig, engine_file
from adaptrt.formats.engine.engine_file import EngineFile
from adaptrt.runtime.engine import load_engine
from adaptrt.tools.inspect import by_ranks
from adaptrt.tools.kernel_names import describe_kernels
from support.models import ModelSpec, save_adapter, save_model

SPEC = ModelSpec(family="qwen3", num_hidden_layers=3, tie_word_embeddings=True)
ADAPTER: dict[str, Any] = {"r": 4, "target_modules": ["q_proj", "down_proj"], "layers_to_transform": [0, 2]}

Inspect = Callable[..., str]


@pytest.fixture(scope="module")
def rooms(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes one directory of each kind."""
    root = tmp_path_factory.mktemp("rooms")
    model_dir = save_model(SPEC, root / "hf")
    save_adapter(model_dir, root / "lora", 0, **ADAPTER)
    save_adapter(model_dir, root / "dora", 1, use_dora=True, use_rslora=True, **ADAPTER)
    flags = ["--checkpoint_dir", str(root / "checkpoint"), "--output_dir", str(root / "engine")]
    sizes = ["--max_batch_size", "4", "--max_input_len", "64", "--max_seq_len", "96", "--max_num_tokens", "128"]
    lora = ["--lora_plugin", "float32", "--lora_dir", str(root / "lora"), "--max_lora_rank", "6"]
    targets = ["--lora_target_modules", "attn_q", "mlp_4h_to_h"]
    for command in (
        ["convert-checkpoint", "--model_dir", str(model_dir), "--output_dir", str(root / "checkpoint")],
        ["build", *flags, *sizes, *lora, *targets],
        ["hf-lora-convert", "-i", str(root / "lora"), "-o", str(root / "converted"), "--storage-type", "bfloat16"],
    ):
        assert cli.main(command) == 0
    return root


@pytest.fixture
def inspect(rooms: Path, capsys: pytest.CaptureFixture[str]) -> Inspect:
    def inspect(kind: str, *flags: str, status: int = 0) -> str:
        capsys.readouterr()
        assert cli.main(["inspect", str(rooms / kind), *flags]) == status
        captured = capsys.readouterr()
        return captured.err if status else captured.out

    return inspect


def test_stages_with_different_numbers_of_layers_are_described_by_rank(rooms: Path, inspect: Inspect) -> None:
    """Three layers over two stages: two layers and one."""
    checkpoint, engine = rooms / "staged-checkpoint", rooms / "staged"
    model = ["--model_dir", str(rooms / "hf"), "--output_dir", str(checkpoint), "--pp_size", "2"]
    sizes = ["--max_batch_size", "4", "--max_input_len", "64", "--max_seq_len", "96", "--max_num_tokens", "128"]
    for command in (
        ["convert-checkpoint", *model],
        ["build", "--checkpoint_dir", str(checkpoint), "--output_dir", str(engine), *sizes],
    ):
        assert cli.main(command) == 0
    block = load_engine(rooms / "engine").program.kv_block_bytes() // SPEC.num_hidden_layers
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in inspect("staged", "--context", "1").splitlines()}
    parts = rows["contexts"].split("; ")
    for rank, (part, num_layers) in enumerate(zip(parts, (2, 1), strict=True)):
        assert f"with 1 tokens {num_layers * block / 1024:.1f} KiB (as int8 " in part
        assert part.endswith(f" on rank {rank}")
    config = EngineConfig.load(engine)
    files = [EngineFile(engine / engine_file(rank), checksum) for rank, checksum in enumerate(config.engine_checksums)]
    assert rows["weights"] == "; ".join(
        f"{len(file.tensors)} tensors, {format_bytes(file.num_bytes)} on rank {rank}" for rank, file in enumerate(files)
    )


def test_states_are_described_beside_the_kv_cache(inspect: Inspect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adaptrt.tools.inspect.cpu_engine_info", lambda _: SimpleNamespace(state_bytes=3 << 20))
    assert "KiB), and states of 3.0 MiB for each request\n" in inspect("engine", "--context", "1")


def test_ranks_with_the_same_text_are_named_together() -> None:
    assert by_ranks(["a"]) == "a"
    assert by_ranks(["a", "a"]) == "a on each of 2 ranks"
    assert by_ranks(["a", "b"]) == "a on rank 0; b on rank 1"
    assert by_ranks(["a", "a", "b", "a"]) == "a on ranks 0, 1, 3; b on rank 2"


def test_a_checkpoint(inspect: Inspect) -> None:
    text = inspect("checkpoint")
    assert "checkpoint: checkpoint\n" in text
    for line in (
        "architecture  Qwen3ForCausalLM",
        "dtype         float32",
        "layers        3 of hidden size 36, mlp 37",
        "attention     3 heads of 12, 1 for k and v, q and k normalised",
        "vocabulary    61, tied to lm_head",
        "mapping       tp_size 1, pp_size 1",
        "weights       29 tensors, ",
    ):
        assert line in text
    assert "transformer.layers" not in text


def test_tensors_are_listed_on_request(inspect: Inspect) -> None:
    assert "  transformer.layers.2.attention.qkv.weight  float32 [60, 36]\n" in inspect("checkpoint", "--tensors")
    assert "rank0.engine:\n" in inspect("engine", "--tensors")


def test_an_engine(inspect: Inspect) -> None:
    text = inspect("engine")
    assert "every checksum holds" in text
    assert "max_batch_size 4, max_num_tokens 128, max_input_len 64, max_seq_len 96" in text
    assert "max_lora_rank 6, attn_q, mlp_4h_to_h\n" in text
    assert "adapters      lora\n" in text
    assert f"kernels       {describe_kernels(cpu_kernels()[0])} on this machine; " in text
    for name, reason in impossible_cpu_kernels():
        assert f"; {name}: {reason}" in text


def test_a_damaged_engine(inspect: Inspect, rooms: Path) -> None:
    path = rooms / "engine" / "rank0.engine"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    try:
        assert "rank0.engine" in inspect("engine", status=2)
    finally:
        content[-1] ^= 1
        path.write_bytes(content)


def test_adapters_of_peft(inspect: Inspect) -> None:
    text = inspect("lora")
    assert "kind     LoRA\n" in text
    assert "attn_q       rank 4, scale 2 in layers 0, 2\n" in text
    assert "mlp_4h_to_h  rank 4, scale 2 in layers 0, 2\n" in text
    text = inspect("dora")
    assert "kind        DoRA, rsLoRA scaling\n" in text
    assert "magnitudes  not normalised by a base\n" in text
    assert "attn_q       rank 4, scale 4 with magnitudes in layers 0, 2\n" in text


def test_an_adapter_for_an_engine(inspect: Inspect, rooms: Path) -> None:
    assert f"served by  {rooms / 'engine'}\n" in inspect("lora", "--engine", str(rooms / "engine"))
    text = inspect("dora", "--engine", str(rooms / "engine"), status=2)
    assert (
        f"{rooms / 'dora'}: the adapter has factors (DoRA or IA3), which need an engine with dora_plugin enable" in text
    )


def test_an_adapter_as_json(inspect: Inspect, rooms: Path) -> None:
    described = json.loads(inspect("lora", "--engine", str(rooms / "engine"), "--json"))
    assert described["kind"] == "LoRA"
    assert described["engine_limits"] == {"max_lora_rank": 6, "dora": False}
    assert described["modules"][0] == {
        "module": "attn_q", "layer": 0, "rank": 4, "dora": False, "shift": False,
        "path": "model.layers.0.self_attn.q_proj",
        "scale": 2.0, "in_size": 36, "out_size": 36, "experts": None,
    }  # fmt: skip
    assert json.loads(inspect("converted", "--json"))["modules"][1]["module"] == "mlp_4h_to_h"
    assert "--json: only for adapters" in inspect("engine", "--json", status=2)


def test_a_converted_adapter(inspect: Inspect) -> None:
    text = inspect("converted")
    assert "weights  bfloat16 [1, 4, " in text
    assert "attn_q       rank 4 in layers 0, 2\n" in text


def test_layers_are_written_as_ranges(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [(1, layer, 8, 0) for layer in (0, 1, 2, 5)] + [(1, 3, 8, 1), (6, 7, 16, 0)]
    np.save(tmp_path / "model.lora_config.npy", np.array(rows, np.int32))
    np.save(tmp_path / "model.lora_weights.npy", np.zeros((6, 8), np.float32))
    assert cli.main(["inspect", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[3:] == [
        "  attn_q       rank 8 in layers 0-2, 5",
        "  attn_q       rank 8 with magnitudes in layers 3",
        "  mlp_4h_to_h  rank 16 in layers 7",
    ]


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (np.zeros((2, 2), np.int32), "expected int32 [rows, 3 or 4]"),
        (np.zeros((2, 4), np.float32), "expected int32 [rows, 3 or 4]"),
        (np.full((1, 1, 4), 99, np.int32), "module ids [99] are unknown"),
        (np.array([{"a": 1}], dtype=object), "cannot be read"),
    ],
)
def test_a_converted_adapter_that_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: np.ndarray[Any, Any], complaint: str
) -> None:
    np.save(tmp_path / "model.lora_config.npy", config, allow_pickle=True)
    np.save(tmp_path / "model.lora_weights.npy", np.zeros((1, 2, 8), np.float32))
    assert cli.main(["inspect", str(tmp_path)]) == 2
    assert complaint in capsys.readouterr().err


def test_another_directory_is_answered_with_what_would_do(inspect: Inspect) -> None:
    text = inspect("hf", status=2)
    assert "is not a checkpoint, engine or adapter; expected a directory with adapter_config.json, " in text
    assert "nowhere: is not a checkpoint, engine or adapter, because it is not a directory" in inspect(
        "nowhere", status=2
    )
