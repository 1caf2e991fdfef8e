"""Tools run as modules with `python -m`."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

import adaptrt

TOOLS = Path(adaptrt.__file__).parent / "tools"
MODULES = [path.stem for path in sorted(TOOLS.glob("*.py")) if "__main__" in path.read_text()]


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
def test_a_tool_shows_its_help(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(f"adaptrt.tools.{name}", run_name="__main__", alter_sys=True)
    assert ended.value.code in (0, None)
    assert "--help" in capsys.readouterr().out
