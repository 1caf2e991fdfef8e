"""The committed stub file of adaptrt._core is the one that its signatures make."""

from __future__ import annotations

import difflib
import importlib.util
from pathlib import Path

from adaptrt import _core

_BINDINGS = Path(__file__).parents[3] / "cpp" / "bindings"


def test_the_stub_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("make_stub", _BINDINGS / "stub" / "make_stub.py")
    assert spec is not None
    assert spec.loader is not None
    make_stub = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_stub)
    made = make_stub.make_stub(_core).splitlines()
    committed = (_BINDINGS / "adaptrt" / "_core.pyi").read_text().splitlines()
    difference = "\n".join(difflib.unified_diff(committed, made, "_core.pyi", "made now", lineterm="", n=0))
    assert not difference, "run: python cpp/bindings/stub/make_stub.py > cpp/bindings/adaptrt/_core.pyi\n" + difference
