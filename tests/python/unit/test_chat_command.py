"""One conversation of `adaptrt chat`: its state after an interrupt or a failure."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from adaptrt import AdapterError, AdaptrtError, FinishReason, RequestError, SamplingParams
from adaptrt.tools import chat as chat_module
from adaptrt.tools.chat import Chat
from support.models import ModelSpec, save_model
from support.tokenizers import byte_level, save_tokenizer


class Stream(Iterator[str]):
    """The pieces of an answer; one may be an exception."""

    def __init__(self, pieces: Sequence[Any]) -> None:
        self._pieces = iter(pieces)
        self.finish_reason = FinishReason.END_ID
        self.is_closed = False

    def __next__(self) -> str:
        piece = next(self._pieces)
        if isinstance(piece, BaseException):
            raise piece
        return str(piece)

    def close(self) -> None:
        self.is_closed = True


class FakeLLM:
    def __init__(self) -> None:
        self.answers: list[Stream] = []
        self.asked: list[list[Mapping[str, str]]] = []
        self.loras: list[str | None] = []
        self.executor = SimpleNamespace(adapters=SimpleNamespace(names=("poet",)))

    def chat_template(self, lora: str | None) -> None:
        if lora not in (None, "poet"):
            raise AdapterError(f"has no adapter named '{lora}'")

    def chat_stream(self, messages: list[Mapping[str, str]], _: object, *, lora: str | None, **__: object) -> Stream:
        self.asked.append(list(messages))
        self.loras.append(lora)
        return self.answers.pop(0)


@pytest.fixture
def llm() -> FakeLLM:
    return FakeLLM()


def begin(llm: FakeLLM, **options: Any) -> tuple[Chat, io.StringIO]:
    output = io.StringIO()
    return Chat(llm, output=output, **options), output  # type: ignore[arg-type]


def test_an_interrupt_stops_the_answer_and_not_the_program(llm: FakeLLM) -> None:
    chat, output = begin(llm)
    stopped = Stream(["Once upon", KeyboardInterrupt(), "a time"])
    llm.answers = [stopped, Stream(["Yes."])]
    assert chat.take("A story!")
    assert stopped.is_closed
    assert output.getvalue() == "Once upon [stopped]\n"
    assert chat.take("Go on?")
    assert [message["content"] for message in llm.asked[1]] == ["A story!", "Once upon", "Go on?"]


def test_a_failure_leaves_the_conversation_as_it_was(llm: FakeLLM) -> None:
    chat, output = begin(llm)
    llm.answers = [Stream(["Yes."]), Stream([RequestError("the prompt is too long")]), Stream(["No."])]
    for line in ("One?", "Two?", "Three?"):
        assert chat.take(line)
    assert output.getvalue() == "Yes.\nerror: the prompt is too long\nNo.\n"
    assert [message["content"] for message in llm.asked[2]] == ["One?", "Yes.", "Three?"]


def test_control_characters_do_not_reach_the_terminal(llm: FakeLLM) -> None:
    chat, output = begin(llm)
    llm.answers = [Stream(["a\x1b[2Jb\tc\r\n", "\x9b"])]
    chat.take("?")
    assert output.getvalue() == "a\ufffd[2Jb\tc\ufffd\n\ufffd\n"


def test_commands(llm: FakeLLM) -> None:
    chat, output = begin(llm, system="Rhyme.")
    llm.answers = [Stream(["1"]) for _ in range(5)]
    lines = ["a", "/lora poet", "b", "/lora nobody", "/reset", "c", "/lora", "/system", "d", "/system Be brief.", "e"]
    for line in [*lines, ""]:
        assert chat.take(line)
    assert llm.loras == [None, "poet", "poet", None, None]
    contents = [[message["content"] for message in asked] for asked in llm.asked]
    assert contents == [
        ["Rhyme.", "a"],
        ["Rhyme.", "a", "1", "b"],
        ["Rhyme.", "c"],
        ["d"],
        ["Be brief.", "e"],
    ]
    assert output.getvalue() == "1\n1\nerror: has no adapter named 'nobody'\n1\n1\n1\n"
    assert not chat.take("/exit")
    assert chat.take("/help")
    assert all(name in output.getvalue() for name in ("/lora", "/loras", "/system", "/reset", "/exit", "Ctrl-C"))


PLAIN_INSTALL = """
import importlib.metadata, sys
from adaptrt.builder.cli import main

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[1].split(","):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
sys.exit(main(["chat", sys.argv[2], "--max_tokens", "3"]))
"""
EXTRAS = (
    "fastapi httptools huggingface_hub llguidance matplotlib mpi4py peft prometheus_client pydantic ray tensorrt torch "
    "transformers uvicorn uvloop"
)


def test_a_plain_install_suffices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_model(ModelSpec(vocab_size=272), tmp_path / "model")
    save_tokenizer(byte_level(), model)
    (model / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    command = [sys.executable, "-c", PLAIN_INSTALL, ",".join(EXTRAS.split()), str(model)]
    done = subprocess.run(command, input="Hello\n", capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "error" not in done.stdout


def test_the_base_install_has_jinja2() -> None:
    project = (Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8")
    base = re.search(r"^dependencies = \[\n(.*?)^\]", project, re.MULTILINE | re.DOTALL)
    assert base is not None
    assert '"jinja2' in base[1]


@pytest.mark.parametrize(
    ("content", "flags", "expected"),
    [
        ({}, "", None),
        ({"temperature": 0.5}, "", None),
        ({"temperature": 0.5}, "--seed 3", SamplingParams(seed=3)),
        ({"top_k": 4}, "--top_p 0.5 --seed 3", SamplingParams(top_p=0.5, seed=3)),
        ({"top_k": 4}, "--temperature 0", SamplingParams(temperature=0)),
        ({}, "--temperature 2 --top_k 5", SamplingParams(temperature=2, top_k=5)),
        ({}, "--seed 3", "seed: without a temperature above 0 the choice is not random"),
        ({"repetition_penalty": 1.5}, "--top_k 3", "top_k: without a temperature above 0"),
        ({"temperature": 0.5}, "--top_k 3 --temperature 0", "top_k: without a temperature above 0"),
        ({"temperature": 0.5}, "--top_k 3 --generation_config vllm", "top_k: without a temperature above 0"),
        ({"temperature": 0.5}, "--temperature -1", "temperature is -1.0; expected 0 or more"),
        ({"temperature": -1}, "", "generation_config.json: temperature is -1; expected 0 or more"),
        ({}, "--generation_config nowhere", "generation_config is 'nowhere', which has no generation_config.json"),
    ],
)
def test_flags_replace_the_recommended_sampling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: Mapping[str, float], flags: str, expected: Any
) -> None:
    """LLM fills what the flags leave out from the file that it is given."""
    (tmp_path / "generation_config.json").write_text(json.dumps(content))
    made: list[Mapping[str, Any]] = []

    @contextlib.contextmanager
    def llm(model: object, **options: Any) -> Iterator[SimpleNamespace]:
        made.append(options)
        executor = SimpleNamespace(can_enqueue_requests=lambda: True)
        yield SimpleNamespace(executor=executor, chat_template=lambda lora: None)

    chats: list[SamplingParams | None] = []
    monkeypatch.setattr(chat_module, "LLM", llm)
    monkeypatch.setattr(chat_module, "Chat", lambda llm, *, sampling, **_: chats.append(sampling))
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    parser = argparse.ArgumentParser()
    chat_module.add_arguments(parser)
    args = parser.parse_args([str(tmp_path), *flags.split()])
    if isinstance(expected, str):
        with pytest.raises(AdaptrtError, match=expected):
            chat_module.run(args)
        return
    assert chat_module.run(args) == 0
    assert chats == [expected]
    assert made[0]["generation_config"] == "auto"
