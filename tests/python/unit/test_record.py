"""Comparison of two records of tests/record."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from typing import Any

RUN = Path(__file__).parents[2] / "record" / "run.py"


def run_module() -> Any:
    spec = importlib.util.spec_from_file_location("record_run", RUN)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_place_that_differs_is_named() -> None:
    answer = {"tokens": [1, 2], "logits": "aa"}
    before = {"kernels": ["portable"], "granite float32": {"engine": ["1"], "portable": [answer, answer]}}
    differences = run_module().differences
    assert list(differences(before, copy.deepcopy(before))) == []
    after = copy.deepcopy(before)
    after["granite float32"]["portable"][1]["tokens"] = [1, 3]
    after["granite float32"]["avx2"] = []
    after["gpt2 float32"] = {}
    del after["kernels"]
    assert list(differences(before, after)) == [
        "gpt2 float32: only after",
        "granite float32 / avx2: only after",
        "granite float32 / portable: differs",
        "kernels: only before",
    ]
