"""Engine files that another process changes while an executor runs: the engine fails, and this process continues."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import adaptrt
from adaptrt import _core
from support.models import ModelSpec
from support.serving import build_random_engine

PROMPT = [3, 4, 5]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_random_engine(ModelSpec(), tmp_path_factory.mktemp("engine"))[1]


@pytest.fixture
def engine(built: Path, tmp_path: Path) -> Path:
    shutil.copytree(built, tmp_path / "engine")
    return tmp_path / "engine"


def answer(executor: adaptrt.Executor) -> list[int]:
    (response,) = executor.await_responses(executor.enqueue_request(adaptrt.Request(PROMPT, 4)))
    assert not response.has_error(), response.error_msg
    return list(response.result.output_token_ids[0])


def test_an_engine_that_is_cut_ends_its_executor_alone(engine: Path, built: Path) -> None:
    config = adaptrt.ExecutorConfig(num_threads=2)
    with (
        adaptrt.Executor(engine, executor_config=config) as executor,
        adaptrt.Executor(built, executor_config=config) as other,
    ):
        expected = answer(executor)
        os.truncate(engine / "rank0.engine", 8192)
        (response,) = executor.await_responses(executor.enqueue_request(adaptrt.Request(PROMPT, 4)))
        assert "rank0.engine: was cut while it was in use" in response.error_msg
        with pytest.raises(adaptrt.ExecutorClosedError, match="was cut while it was in use"):
            executor.enqueue_request(adaptrt.Request(PROMPT, 4))
        assert answer(other) == expected


def test_an_engine_that_is_replaced_goes_on(engine: Path) -> None:
    with adaptrt.Executor(engine, executor_config=adaptrt.ExecutorConfig(num_threads=1)) as executor:
        expected = answer(executor)
        (engine / "new").write_bytes(b"new")
        (engine / "new").replace(engine / "rank0.engine")
        assert answer(executor) == expected


def test_an_engine_that_is_cut_while_it_is_read_is_refused(engine: Path) -> None:
    # This runs in another process, because its loading is disturbed.
    code = """
import os, sys
from pathlib import Path
import adaptrt
from adaptrt.builder.compile import engine_file
check = engine_file.EngineFile._check_data
def cut(self):
    os.truncate(self.path, 8192)
    check(self)
engine_file.EngineFile._check_data = cut
try:
    adaptrt.load_engine(Path(sys.argv[1]))
except adaptrt.EngineError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code, str(engine)], capture_output=True, text=True, check=True)
    assert "rank0.engine: was cut while it was in use" in done.stdout


def test_a_file_that_is_written_is_told(tmp_path: Path) -> None:
    file = tmp_path / "file"
    content = bytes(range(256)) * 64
    file.write_bytes(content)
    import mmap

    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapping:
        mapped = _core.MappedFile(mapping, str(file), interval=0.0)
        mapped.check()
        file.write_bytes(content)
        os.utime(file, ns=(0, 0))
        with pytest.raises(adaptrt.EngineError, match="was written while it was in use"):
            mapped.check()
        del mapped
