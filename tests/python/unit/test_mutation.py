"""The faults that tests/mutation puts into sources."""

from __future__ import annotations

from pathlib import Path

import pytest
from faults import Fault, find_faults
from nearest import CPP_PROGRAMS, PYTHON_WIDER, SEEN_THROUGH_BINDINGS, stages_of

CPP = """\
#include <vector>
// a < b
if (is_ready && count < 2) return;  // not "x == y"
problems.add("a" + name);
const auto left = std::min(limit - 1, room);
"""
PYTHON = '''\
"""a < b"""
if not ready and names[0] is None:
    raise ValueError(f"{count + 1} of {2 * 3}")
total = max(a // 2, 0)  # a - b
self.total = total
tensors: dict = field(repr=False)
'''


def lines_with_faults(path: str, text: str) -> dict[int, set[str]]:
    """Returns every faulty version of each line."""
    lines: dict[int, set[str]] = {}
    for fault in find_faults(path, text):
        changed = fault.applied_to(text).splitlines()
        lines.setdefault(fault.line, set()).add(changed[fault.line - 1].strip())
        before = text.splitlines()
        assert [line for number, line in enumerate(changed, 1) if number != fault.line] == [
            line for number, line in enumerate(before, 1) if number != fault.line
        ]
    return lines


def test_faults_of_cpp() -> None:
    assert lines_with_faults("cpp/src/exec/a.cpp", CPP) == {
        3: {
            'if (is_ready || count < 2) return;  // not "x == y"',
            'if (is_ready && count <= 2) return;  // not "x == y"',
            'if (is_ready && count < 3) return;  // not "x == y"',
            ";",
        },
        4: {";"},
        5: {
            "const auto left = std::max(limit - 1, room);",
            "const auto left = std::min(limit + 1, room);",
            "const auto left = std::min(limit - 2, room);",
        },
    }


def test_faults_of_python() -> None:
    assert lines_with_faults("runtime/a.py", PYTHON) == {
        2: {
            "if ready and names[0] is None:",
            "if not ready or names[0] is None:",
            "if not ready and names[1] is None:",
            "if not ready and names[0] is not None:",
        },
        3: {"pass"},
        4: {
            "total = min(a // 2, 0)  # a - b",
            "total = max(a * 2, 0)  # a - b",
            "total = max(a // 3, 0)  # a - b",
            "total = max(a // 2, 1)  # a - b",
        },
        5: {"pass"},
    }


def test_a_fault_of_another_text_is_refused() -> None:
    fault = Fault("runtime/a.py", 1, 0, "x", "y")
    assert fault.applied_to("x = 1\n") == "y = 1\n"
    with pytest.raises(ValueError, match=r"runtime/a\.py:1"):
        fault.applied_to("z = 1\n")


@pytest.mark.parametrize("files", [SEEN_THROUGH_BINDINGS, *PYTHON_WIDER.values()])
def test_the_tests_nearest_to_a_room_are_there(files: tuple[str, ...]) -> None:
    tests = Path(__file__).parents[1]
    assert [file for file in files if not (tests / file).exists()] == []


def test_every_room_has_programs() -> None:
    """Every folder except cuda, which needs a GPU's driver, has test programs."""
    repository = Path(__file__).parents[3]
    rooms = {room.name for room in (repository / "cpp" / "src").iterdir() if room.is_dir()}
    assert rooms - set(CPP_PROGRAMS) == {"cuda"}
    programs = {name for names in CPP_PROGRAMS.values() for name in names}
    assert [name for name in programs if not (repository / "tests" / "cpp" / name).is_dir()] == []


def test_tests_named_like_the_module_run_first(tmp_path: Path) -> None:
    folder = tmp_path / "unit" / "serve"
    folder.mkdir(parents=True)
    (folder / "test_all.py").write_text("from adaptrt.serve.work import Work\n")
    (folder / "test_other.py").write_text("from adaptrt.serve.workers import Work\n")
    (folder / "test_work.py").write_text("")
    first = stages_of("serve/work.py", tmp_path)[0]
    assert first.files == ("unit/serve/test_work.py", "unit/serve/test_all.py")
