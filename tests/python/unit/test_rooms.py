"""Imports between the package's folders follow the map in docs/architecture.md."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import adaptrt

PACKAGE = Path(adaptrt.__file__).parent
CPP = {"_core", "_program", "_version"}
FORMATS = ("template_files", "gguf", "checkpoint", "network", "models", "hugging_face", "adapter", "engine", "sources")
"""Each of these may import those before it."""
GROUND = {"common", *(f"formats/{room}" for room in FORMATS)}
COMMANDS = {"builder/cli", "builder/commands"}
BUILDER = {"builder/network", "builder/conversion", "builder/compile", "builder/engine"}

ALLOWED = {
    "plugins": CPP,
    "common": CPP,
    **{f"formats/{room}": {*CPP, "common", *(f"formats/{below}" for below in FORMATS[:number])}
       for number, room in enumerate(FORMATS)},
    "builder/network": {*CPP, *GROUND, "plugins"},
    "builder/conversion": {*CPP, *GROUND, "builder/network"},
    "builder/compile": {*CPP, *GROUND, "plugins", "builder/network"},
    "builder/engine": {*CPP, *GROUND, "builder/network", "builder/conversion", "builder/compile"},
    "builder": {*CPP, *GROUND, *BUILDER},
    "builder/model_cache": {*CPP, *GROUND, *BUILDER, "builder"},
    "builder/cli": {*CPP},
    "builder/commands": {*CPP, *GROUND, *BUILDER, "builder", "builder/model_cache", "runtime"},
    "runtime": {*CPP, *GROUND, "plugins", "builder/model_cache"},
    "serve": {*CPP, *GROUND, *COMMANDS, "runtime", "builder/model_cache"},
    "tools": {*CPP, *GROUND, *COMMANDS, *BUILDER, "builder", "runtime", "plugins", "adaptrt"},
}  # fmt: skip
"""Rooms that each room may import, in addition to itself. A folder without a row is part of the one around it.
`adaptrt` is the package itself, with the names that users import."""
ROOMS = {room.split("/")[0] for room in ALLOWED}


def room_of(path: tuple[str, ...]) -> str:
    """Returns the room of a module from its path."""
    inner = "/".join(path[:2])
    if inner in ALLOWED:
        return inner
    return path[0] if path and path[0] in {*ROOMS, *CPP, "_cuda"} else "adaptrt"


def imported_modules(source: str, package: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Returns our modules that a module in `package` imports, including imports in functions."""
    found: list[tuple[str, ...]] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [tuple(name.name.split("."))[1:] for name in node.names if name.name.split(".")[0] == "adaptrt"]
        elif isinstance(node, ast.ImportFrom):
            named = tuple(node.module.split(".")) if node.module else ()
            if node.level:
                base = (*package[: len(package) - node.level + 1], *named)
            elif named[0] == "adaptrt":
                base = named[1:]
            else:
                continue
            # A name of a module, or a module of a package. Both have the same room unless the package contains several
            # rooms.
            found += [(*base, name.name) for name in node.names]
    return found


def forbidden(source: str, module: tuple[str, ...]) -> list[str]:
    """Returns the rooms that a module must not import but does; `module` is the path of its file without the suffix."""
    room = room_of(module)
    rooms = {room_of(imported) for imported in imported_modules(source, module[:-1])}
    return sorted(rooms - ALLOWED[room] - {room})


def sources() -> list[Path]:
    return sorted(path.relative_to(PACKAGE) for room in ROOMS for path in (PACKAGE / room).rglob("*.py"))


def test_rooms_import_what_they_may() -> None:
    files = [path for path in sources() if path != Path("formats/__init__.py")]
    assert len(files) > 300
    wrong = {str(path): forbidden((PACKAGE / path).read_text(), path.with_suffix("").parts) for path in files}
    assert {path: rooms for path, rooms in wrong.items() if rooms} == {}


def test_every_room_of_formats_has_its_place() -> None:
    names = {path.stem if path.suffix else path.name for path in (PACKAGE / "formats").iterdir()}
    assert names - {"__init__", "__pycache__"} == set(FORMATS)


@pytest.mark.parametrize(
    ("module", "line", "rooms"),
    [
        ("common/progress", "from ..formats.checkpoint.config import CONFIG_FILE", ["formats/checkpoint"]),
        ("formats/network/ops", "from ..models import registry", ["formats/models"]),
        ("formats/network/ops", "from .. import models", ["formats/models"]),
        ("formats/network/ops", "from ..checkpoint.rotary import rotary", []),
        ("formats/adapter/names", "import adaptrt.formats.engine.plan", ["formats/engine"]),
        ("formats/engine/tensorrt/plan_config", "from ....builder import build", ["builder"]),
        ("runtime/llm", "from ..builder.model_cache.first_use import engine_for", []),
        ("runtime/llm", "def f():\n    from ..builder.build import build", ["builder"]),
        ("runtime/tensorrt/engine", "from adaptrt.serve import app", ["serve"]),
        ("serve/app", "from .. import tools", ["tools"]),
        ("serve/app", "from .. import LLM\nimport adaptrt", ["adaptrt"]),
        ("builder/build", "from ..runtime.llm import LLM", ["runtime"]),
        (
            "builder/network/graph",
            "from ..compile import emit\nfrom ..build import build",
            ["builder", "builder/compile"],
        ),
        ("builder/conversion/convert", "from ..engine.problems import problems_of", ["builder/engine"]),
        ("builder/engine/directory", "from ..compile.native import compile_network", []),
        ("builder/commands/build", "from ...runtime.llm import LLM\nfrom ..build import build\nimport os", []),
    ],
)
def test_an_import_upwards_is_found(module: str, line: str, rooms: list[str]) -> None:
    assert forbidden(line, tuple(module.split("/"))) == rooms


def test_the_map_of_cpp_has_the_dependencies_that_cmake_allows() -> None:
    root = Path(__file__).parents[3]
    page = (root / "docs" / "architecture.md").read_text(encoding="utf-8").partition("## C++")[2]
    rows = re.findall(r"^\| `([\w/]+)/` \| .* \|([^|]*)\|$", page, re.MULTILINE)
    documented = {
        room.removeprefix("cpu/"): set(re.sub(r" \([^)]*\)", "", needed).replace("cpu/", "").strip().split(", ")) - {""}
        for room, needed in rows
    }
    # CUDA kernels include headers of lora and program but do not link them. A program that links cuda_program chooses
    # between the kernels and their emulation.
    for room, included in {"cuda": {"lora", "program"}, "cuda_program": {"cuda"}}.items():
        assert documented[room] >= included
        documented[room] -= included
    declared = {}
    for file in (root / "cpp" / "src").rglob("CMakeLists.txt"):
        for room, arguments in re.findall(r"^adaptrt_room\(\s*(\w+)([^)]*)\)", file.read_text(), re.MULTILINE):
            declared[room] = set(arguments.partition("DEPENDS_ON")[2].split())
    assert len(declared) > 20
    assert {room: documented.get(room) for room in declared} == declared
