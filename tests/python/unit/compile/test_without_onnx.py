"""Native engines are built and run without the package onnx; what needs it says how to get it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.engines import make_checkpoint
from support.models import ModelSpec

WITHOUT_ONNX = """
import sys
from importlib.machinery import PathFinder

class WithoutOnnx(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] == "onnx" else PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutOnnx
from types import SimpleNamespace
from unittest import mock
from adaptrt import EngineError, Executor, Request
from adaptrt.builder import cli
from adaptrt.formats.engine.engine_config import EngineConfig
from adaptrt.runtime.engine import load_engine
checkpoint, engine = sys.argv[1:]
build = ["build", "--checkpoint_dir", checkpoint, "--max_seq_len", "64", "--output_dir"]
assert cli.main([*build, engine]) == 0
assert cli.main(["inspect", engine]) == 0
with Executor(engine) as executor:
    (response,) = executor.await_responses(executor.enqueue_request(Request([1, 2], 3)))
    print("TOKENS", response.result.output_token_ids[0])
    assert len(response.result.output_token_ids[0]) == 5
with mock.patch.object(EngineConfig, "load", lambda directory: SimpleNamespace(tensorrt="plans")):
    try:
        load_engine(engine)
    except EngineError as error:
        print("REFUSED", error)
assert cli.main([*build, engine + "2", "--dump_onnx", engine + ".onnx"]) == 2
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(ModelSpec(num_hidden_layers=1), tmp_path_factory.mktemp("without-onnx"))


def test_a_native_engine_needs_no_onnx(checkpoint: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_ONNX, str(checkpoint), str(tmp_path / "engine")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "TOKENS" in done.stdout
    assert f"REFUSED {tmp_path / 'engine'}: TensorRT engines need onnx: pip install 'adaptrt[onnx]'" in done.stdout
    assert "error: dump_onnx needs onnx: pip install 'adaptrt[onnx]'" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["engine"]
