"""Every code block of the README and of the site runs as it stands, or a comment before it says why it does not.

`<!-- not run: REASON -->` marks a block that is not run, and `<!-- output -->` the output of the block before it.
Servers listen on a free port, and `pip install` is only checked: its folders must exist, and its extras be declared.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from support.http_server import http_server
from support.hub_server import hub_server
from support.object_store import object_store
from support.prepared_pages import PREPARE, build_application

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[3]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
MODEL = ROOT / "examples" / "demo" / "model"
ADAPTER = ROOT / "examples" / "demo" / "adapters" / "poet"
ADDRESS = "http://127.0.0.1:8000"
"""Address of a server on the pages."""
SERVED_WITH = {
    "docs/serving.md": (
        "--enable-lora-loading", "--adapter-root", "examples/demo/adapters", "--allowed-adapter-sources", "hub:org/*",
    ),
}  # fmt: skip
"""Flags of a page's servers that its text describes but its commands leave out."""
QUICK_BENCH = ("--repeats", "1", "--requests", "4", "--only", "serve")
"""Flags that make `adaptrt bench` quick."""


@dataclass(frozen=True)
class Block:
    """One code block of a page."""

    line: int
    language: str
    """`python`, or `shell` for a block that is indented or says `bash` or `console`."""
    text: str
    is_output: bool = False


def blocks_of(text: str) -> list[Block]:
    """Returns the blocks that are not marked as not run. Raises ValueError for a language that cannot be run."""
    found = []
    before = ""
    for token in MarkdownIt().parse(text):
        if token.type not in ("fence", "code_block"):
            before = token.content.strip() if token.type == "html_block" else before if token.nesting == 1 else ""
            continue
        mark, before = before, ""
        language = token.info.split()[0] if token.info else "shell"
        if language.startswith("{") or re.fullmatch(r"<!-- not run: \S.* -->", mark):
            continue
        if language not in ("python", "shell", "bash", "console"):
            raise ValueError(f"a block of {language} needs the comment `<!-- not run: REASON -->`")
        assert token.map is not None
        language = language if language == "python" else "shell"
        found.append(Block(token.map[0] + 1, language, token.content, mark == "<!-- output -->"))
    return found


RUN = [page for page in PAGES if blocks_of(page.read_text(encoding="utf-8"))]


class Runner:
    """Runs the blocks of one page in the current directory."""

    def __init__(self, servers: contextlib.ExitStack, flags: tuple[str, ...] = ()) -> None:
        self._servers = servers
        self._flags = flags
        """Further flags of servers."""
        self._names: dict[str, object] = {"__name__": "__main__"}
        self._address = ADDRESS
        self._script = ""
        """Block that a command of the page runs as script.py."""

    def prepare(self, page: str, blocks: list[Block]) -> None:
        """Makes what the blocks of a page use and do not make themselves."""
        if page == "docs/scaling.md":
            (script,) = (block.text for block in blocks if "can_enqueue_requests" in block.text)
            Path("script.py").write_text(script)
            self._script = script
        if page in PREPARE:
            self._names |= PREPARE[page](self._run_command)
            if isinstance(executor := self._names.get("executor"), contextlib.AbstractContextManager):
                self._servers.enter_context(executor)

    def run(self, block: Block) -> str:
        """Returns what the block wrote to standard output."""
        if block.language == "python":
            return self._run_python(block)
        commands = block.text.replace("\\\n", " ").strip().splitlines()
        return "".join(self._run_command(command) for command in commands)

    def _run_python(self, block: Block) -> str:
        if block.text == self._script:
            return ""
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            text = block.text.replace(ADDRESS, self._address)
            text = text.replace("localhost:8000", self._address.removeprefix("http://"))
            exec(compile(text, "block", "exec"), self._names)
        return output.getvalue()

    def _run_command(self, command: str) -> str:
        words = shlex.split(command, comments=True)
        if words[:2] == ["pip", "install"]:
            check_installed(words[2:])
            return ""
        if words[:2] == ["adaptrt", "serve"]:
            if "--port" in words:
                place = words.index("--port")
                del words[place : place + 2]
            self._address = self._servers.enter_context(
                http_server(Path(words[2]), *words[3:], *self._flags, "--num-threads", 1)
            )
            return ""
        if words[:2] == ["serve", "run"]:
            build_application([os.path.expandvars(word) for word in words[2:]])
            return ""
        if words[0] == "adaptrt":
            more = QUICK_BENCH if words[1] == "bench" else ()
            words = [sys.executable, "-m", "adaptrt.builder.cli", *words[1:], *more]
        elif words[0] == "mpirun":
            words = [str(Path(sys.executable).with_name("mpirun")), *words[1:]]
            words[words.index("python")] = sys.executable
        elif words[0] == "curl":
            words = [word.replace(ADDRESS, self._address) for word in [*words, "--fail"]]
        else:
            raise ValueError(
                f"{words[0]} is a command that is not run; expected adaptrt, curl, mpirun, serve run or pip install"
            )
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout


def check_installed(requirements: list[str]) -> None:
    """Checks the arguments of `pip install`: projects of this checkout, and extras that pyproject.toml declares."""
    for requirement in requirements:
        parts = re.fullmatch(r"(\.[\w./]*)(?:\[([\w,-]+)\])?", requirement)
        assert parts, f"pip install {requirement}; expected a folder of the checkout"
        project = tomllib.loads((ROOT / parts[1] / "pyproject.toml").read_text())["project"]
        for extra in parts[2].split(",") if parts[2] else ():
            assert extra in project["optional-dependencies"]


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory with the examples, a model of the Hub and one of its name in a directory."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    chats = shutil.copytree(MODEL, tmp_path / "Qwen3-0.6B")
    (chats / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    monkeypatch.chdir(tmp_path)
    with hub_server() as hub:
        hub.add("Qwen/Qwen3-0.6B", {path.name: path.read_bytes() for path in chats.iterdir()})
        hub.add("someone/qwen3-poet", {path.name: path.read_bytes() for path in ADAPTER.iterdir()}, branch="v2")
        hub.add("org/qwen3-poet", {path.name: path.read_bytes() for path in ADAPTER.iterdir()})
        for name, value in (
            ("XDG_CACHE_HOME", str(tmp_path / "cache")), ("HF_ENDPOINT", hub.address),
            ("HF_HOME", str(tmp_path / "hub")), ("HF_HUB_DISABLE_XET", "1"),
        ):  # fmt: skip
            monkeypatch.setenv(name, value)
        yield tmp_path


@pytest.mark.parametrize("page", RUN, ids=lambda page: str(page.relative_to(ROOT)))
def test_blocks_run(page: Path, checkout: Path) -> None:
    blocks = blocks_of(page.read_text(encoding="utf-8"))
    if any("curl" in block.text for block in blocks) and shutil.which("curl") is None:
        pytest.skip("there is no curl")
    with contextlib.ExitStack() as servers:
        name = str(page.relative_to(ROOT))
        if any("s3://bucket" in block.text for block in blocks):
            servers.enter_context(object_store()).put_directory("loras/poet", ADAPTER)
        runner = Runner(servers, SERVED_WITH.get(name, ()))
        runner.prepare(name, blocks)
        output = ""
        for block in blocks:
            if block.is_output:
                assert output.rstrip() == block.text.rstrip(), f"line {block.line}"
            else:
                output = runner.run(block)


def test_a_block_is_run_or_marked() -> None:
    text = "    make\n\n<!-- not run: a reason -->\n    made\n\n<!-- output -->\n    3\n\n- item\n"
    text += "\n  ```python\n  x\n  ```\n"
    assert blocks_of(text) == [
        Block(1, "shell", "make\n"), Block(7, "shell", "3\n", is_output=True), Block(11, "python", "x\n"),
    ]  # fmt: skip
    assert len(blocks_of("<!-- not run:  -->\n    make\n")) == 1
    with pytest.raises(ValueError, match="a block of yaml needs the comment"):
        blocks_of("```yaml\nkey: 1\n```\n")
    with pytest.raises(ValueError, match="make is a command that is not run"):
        Runner(contextlib.ExitStack()).run(Block(1, "shell", "make\n"))


def test_arguments_of_pip_are_checked() -> None:
    check_installed([".", ".[serve,hub]", "./package/cuda"])
    for wrong in ("adaptrt", ".[nothing]"):
        with pytest.raises(AssertionError):
            check_installed([wrong])
