"""Several processes that need the same engine at once, and one that is killed while it builds the engine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from adaptrt.builder.model_cache.store import EngineCache
from adaptrt.runtime.engine import load_engine
from support.models import ModelSpec, save_model

ASK = """
import sys
from adaptrt.builder.model_cache.first_use import engine_for
from adaptrt.builder.model_cache.options import EngineOptions
from adaptrt.common.progress import progress_on
print(engine_for(sys.argv[1], EngineOptions(max_seq_len=64), progress_on()))
"""
# Stops in the middle of the build, reports it, and continues when it is allowed to.
ASK_AND_STOP = (
    """
import sys
from adaptrt.builder import build as module
build = module.build
def stop_and_build(*arguments, **options):
    print("building", flush=True)
    sys.stdin.readline()
    return build(*arguments, **options)
module.build = stop_and_build
"""
    + ASK
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_model(ModelSpec(num_hidden_layers=1), tmp_path / "model")


def start(code: str, model: Path, cache: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, str(model)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "XDG_CACHE_HOME": str(cache)},
    )


def test_one_process_builds_and_the_other_waits(model: Path, tmp_path: Path) -> None:
    first = start(ASK_AND_STOP, model, tmp_path)
    assert first.stdout is not None
    assert first.stdout.readline() == "building\n"
    second = start(ASK, model, tmp_path)
    assert second.stderr is not None
    waiting = second.stderr.readline()
    assert waiting == "Waiting for another process that builds this engine\n"
    assert EngineCache(tmp_path / "adaptrt" / "engines").entries() == []  # an unfinished engine is not listed
    output, _ = first.communicate("\n")
    others, errors = second.communicate()
    assert (first.returncode, second.returncode) == (0, 0)
    assert output == others
    assert "Packing" not in errors
    load_engine(output.strip())


def test_a_process_that_is_killed_leaves_nothing_half_made(model: Path, tmp_path: Path) -> None:
    first = start(ASK_AND_STOP, model, tmp_path)
    assert first.stdout is not None
    assert first.stdout.readline() == "building\n"
    second = start(ASK, model, tmp_path)
    assert second.stderr is not None
    assert second.stderr.readline() == "Waiting for another process that builds this engine\n"
    first.send_signal(signal.SIGKILL)
    first.communicate()
    output, errors = second.communicate()
    assert second.returncode == 0, errors
    assert "Packing" in errors
    cache = EngineCache(tmp_path / "adaptrt" / "engines")
    (entry,) = cache.entries()
    assert str(entry.directory) == output.strip()
    assert {path.name for path in cache.directory.iterdir()} == {entry.key, f"{entry.key}.lock", "digests"}
    load_engine(entry.directory)


def test_an_engine_that_another_process_loaded_is_not_deleted(model: Path, tmp_path: Path) -> None:
    code = ASK.replace("print(", "engine = (") + (
        "from adaptrt.runtime.engine import load_engine\nloaded = load_engine(engine)\n"
        "print('loaded', flush=True)\nsys.stdin.readline()\n"
    )
    user = start(code, model, tmp_path)
    assert user.stdout is not None
    assert user.stdout.readline() == "loaded\n"
    cache = EngineCache(tmp_path / "adaptrt" / "engines")
    (entry,) = cache.entries()
    assert not cache.remove_if_unused(entry.key)
    user.communicate("\n")
    assert cache.remove_if_unused(entry.key)
    assert cache.entries() == []
