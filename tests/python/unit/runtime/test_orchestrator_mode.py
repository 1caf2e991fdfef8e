"""The choice of who starts the processes of an engine of several ranks, and its requirements."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from adaptrt import CommunicationMode, ExecutorConfig, OrchestratorConfig, ParallelConfig
from adaptrt._core import ConfigError
from adaptrt.runtime import ranks
from adaptrt.runtime.orchestrator.launch import find_mpirun
from adaptrt.runtime.orchestrator.mode import orchestrator_of, with_workers

ONE: Any = SimpleNamespace(num_ranks=1)
TWO: Any = SimpleNamespace(num_ranks=2)


@pytest.fixture(autouse=True)
def without_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes this process look as if MPI had not started it, also after other tests imported mpi4py."""
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    for name in ranks._STARTED_BY_MPI:
        monkeypatch.delenv(name, raising=False)


def test_workers_are_started_where_nobody_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ExecutorConfig(num_threads=3)
    for config in (None, given):
        made = with_workers(config, TWO)
        assert made is not None
        assert orchestrator_of(made) == OrchestratorConfig()
        assert with_workers(config, ONE) is config
    assert made.num_threads == 3
    assert given.parallel_config is None
    assert orchestrator_of(given) is None
    stated = ExecutorConfig(parallel_config=ParallelConfig())
    assert with_workers(stated, TWO) is stated
    assert orchestrator_of(stated) is None
    for name in ranks._STARTED_BY_MPI:
        with monkeypatch.context() as started:
            started.setenv(name, "0")
            assert with_workers(given, TWO) is given


@pytest.mark.parametrize(("size", "is_started"), [(1, False), (2, True)])
def test_mpi_that_is_initialised_tells(monkeypatch: pytest.MonkeyPatch, size: int, is_started: bool) -> None:
    world = SimpleNamespace(size=size)
    mpi = SimpleNamespace(COMM_WORLD=world, Is_initialized=lambda: True, Is_finalized=lambda: False)
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", mpi)
    assert ranks.is_started_by_mpi() is is_started


def test_an_orchestrator_says_how_it_starts_them() -> None:
    orchestrator = OrchestratorConfig(worker_executable_path="/usr/bin/python3")
    parallel = ParallelConfig(communication_mode=CommunicationMode.ORCHESTRATOR, orchestrator_config=orchestrator)
    assert orchestrator_of(ExecutorConfig(parallel_config=parallel)) == orchestrator


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match=r"2 ranks, and there is no mpirun: pip install 'adaptrt\[mpi\]'"):
        find_mpirun(2)
    (tmp_path / "mpirun").touch()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"2 ranks, and there is no mpi4py: pip install 'adaptrt\[mpi\]'"):
        find_mpirun(2)
