"""Code that uses what only Linux has: what it does on macOS, as far as a Linux machine can show."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from adaptrt.common import process_memory
from adaptrt.common.usable_cpus import num_usable_cpus
from adaptrt.formats.engine import engine_file
from adaptrt.runtime import guide_trial_process, memory
from adaptrt.tools.bench import noise


def test_all_cpus_are_used_without_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    assert num_usable_cpus() == len(os.sched_getaffinity(0))
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    assert num_usable_cpus() == 7


def test_memory_is_known_without_proc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "none")
    monkeypatch.setattr(memory, "_ROOTS", ())
    assert memory.available_memory() == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    monkeypatch.setattr(process_memory, "_STATUS", tmp_path / "none")
    assert process_memory.peak_memory() > 0


def test_guides_have_no_memory_limit_without_proc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    limits = []
    monkeypatch.setattr(guide_trial_process, "_STATM", tmp_path / "none")
    monkeypatch.setattr(guide_trial_process.resource, "setrlimit", lambda kind, limit: limits.append(kind))
    guide_trial_process._limit_memory(1 << 20)
    assert limits == [guide_trial_process.resource.RLIMIT_CORE]
    heap = guide_trial_process._Heap()
    heap._mallinfo2 = None
    assert heap.num_bytes() > 0


def test_benches_measure_no_noise_without_proc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(noise, "_PROC", tmp_path)
    with noise.NoiseMeter() as meter:
        pass
    assert meter.noise == noise.Noise(0.0, 0.0)


def test_files_are_read_without_advice_to_the_page_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delattr(os, "posix_fadvise")
    file = tmp_path / "file"
    file.write_bytes(b"0123456789")
    assert b"".join(bytes(piece) for piece in engine_file.read_once(file, 2, 5)) == b"23456"
