"""Guides that would crash their process or exhaust its memory or time: they are rejected, and nothing else ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import llguidance
import pytest

import adaptrt
from adaptrt.runtime import guide_trial, guide_trial_process
from adaptrt.runtime.guide_trial import GuideLimits, GuideTrial
from adaptrt.runtime.guided_decoding import token_bytes
from support.tokenizers import SPECIAL, byte_level

END = SPECIAL.index("</s>")
OBJECT = '{"type": "object", "properties": {"a": {"type": "string"}}}'


def trial_of(limits: GuideLimits) -> GuideTrial:
    return GuideTrial(llguidance.__file__, token_bytes(byte_level(), 300, [END]), [END], limits)


@pytest.fixture(scope="module")
def trial() -> Iterator[GuideTrial]:
    made = trial_of(GuideLimits())
    yield made
    made.close()


def processes(trial: GuideTrial) -> list[int]:
    return [process._popen.pid for process in trial._idle]


def definitions(count: int) -> str:
    """Returns a JSON schema of nested arrays, each defined by the next definition."""
    chain = {f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(count)}
    return json.dumps({"$defs": {**chain, f"d{count}": {"type": "string"}}, "$ref": "#/$defs/d0"})


def rules(count: int) -> str:
    """Returns a Lark grammar in which each rule needs the next one."""
    return "\n".join(["start: r0", *(f'r{i}: "a" r{i + 1}' for i in range(count)), f'r{count}: "b"'])


def patterns(count: int) -> str:
    """Returns a JSON schema of strings that match `count` expressions at once."""
    found = [{"type": "string", "pattern": f"^.*a{i}.*b.{{1,{i + 1}}}$"} for i in range(count)]
    return json.dumps({"allOf": found})


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", OBJECT),
        ("json_schema", definitions(250)),
        ("lark", rules(500)),
        ("lark", 'start: "a" <|im_start|>'),
        ("regex", "[ab]{3}"),
        ("llguidance", llguidance.grammar_from("grammar", 'start: "a"')),
    ],
)
def test_the_memory_of_a_guide_is_counted(trial: GuideTrial, kind: str, text: str) -> None:
    num_bytes = trial.compile(kind, text)
    assert len(text) <= num_bytes < 16 << 20
    if kind == "json_schema" and len(text) > 1000:
        assert num_bytes > trial.compile(kind, OBJECT)


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("regex", "(", "the guide cannot be compiled: .*unclosed group"),
        ("json_schema", "{", "the guide cannot be compiled: expected"),
        ("json_schema", '{"type": "nothing"}', "the guide cannot be compiled: Invalid type: nothing"),
        ("lark", "start: nothing", 'the guide cannot be compiled: .*unknown name: "nothing"'),
        ("llguidance", "{}", "the guide cannot be compiled"),
    ],
)
def test_errors_have_llguidances_words(trial: GuideTrial, kind: str, text: str, message: str) -> None:
    trial.compile("regex", "a")
    before = processes(trial)
    with pytest.raises(adaptrt.RequestError, match=rf"(?s){message}"):
        trial.compile(kind, text)
    assert processes(trial) == before  # an error ends no process


@pytest.mark.parametrize(
    ("kind", "text"),
    [("json_schema", definitions(2000)), ("json_schema", definitions(15_000)), ("lark", rules(3000))],
    ids=["2,000 definitions", "15,000 definitions", "3,000 rules"],
)
def test_a_guide_that_is_nested_too_deeply_is_refused(trial: GuideTrial, kind: str, text: str) -> None:
    with pytest.raises(adaptrt.RequestError, match="the guide cannot be compiled: it is nested too deeply"):
        trial.compile(kind, text)
    assert trial.compile("regex", "a") > 0


def test_memory_is_bounded() -> None:
    trial = trial_of(GuideLimits(max_guide_bytes=64 << 20))
    with pytest.raises(adaptrt.RequestError, match=r"or needs more than 64 MiB \(max_guide_bytes\)"):
        trial.compile("json_schema", patterns(300))
    assert trial.compile("json_schema", OBJECT) > 0
    trial.close()


def test_time_is_bounded() -> None:
    trial = trial_of(GuideLimits(max_guide_seconds=1, max_guide_bytes=4 << 30))
    with pytest.raises(adaptrt.RequestError, match=r"more than 1 s of CPU time \(max_guide_seconds\)"):
        trial.compile("json_schema", patterns(300))
    assert trial.compile("json_schema", OBJECT) > 0
    trial.close()


def test_the_time_limit_begins_anew_with_each_guide(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(guide_trial_process.resource, "setrlimit", lambda _, pair: limits.append(pair))
    monkeypatch.setattr(guide_trial_process.time, "process_time", lambda: 100.5)
    guide_trial_process._limit_cpu(10)
    assert [soft for soft, _ in limits] == [111]


def test_a_process_that_stands_still_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guide_trial, "_WALL_FACTOR", 0.2)
    trial = trial_of(GuideLimits(max_guide_seconds=1))
    trial._idle.append(trial._take())
    os.kill(processes(trial)[0], signal.SIGSTOP)
    with pytest.raises(adaptrt.RequestError, match="CPU time"):
        trial.compile("regex", "a")
    assert processes(trial) == []
    trial.close()


def test_a_compilation_that_is_interrupted_ends_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = trial_of(GuideLimits())
    trial._idle.append(trial._take())
    (process,) = trial._idle
    os.kill(process._popen.pid, signal.SIGSTOP)  # a stopped process does not notice a closed pipe

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(guide_trial.select, "select", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trial.compile("regex", "a")
    assert process._popen.returncode == -signal.SIGKILL
    assert processes(trial) == []
    trial.close()


def test_length_is_bounded() -> None:
    trial = trial_of(GuideLimits(max_guide_characters=4))
    with pytest.raises(adaptrt.RequestError, match=r"the guide has 5 characters; expected at most 4"):
        trial.compile("regex", "abcde")
    assert processes(trial) == []  # none was needed
    assert trial.compile("regex", "abcd") > 0
    trial.close()


def test_a_process_that_ended_while_it_waited_is_replaced(trial: GuideTrial) -> None:
    trial.compile("regex", "a")
    (first, *_) = ended = processes(trial)
    for process in list(trial._idle):
        process._popen.kill()
        process._popen.wait()
    assert trial.compile("regex", "a") > 0
    assert first not in processes(trial)
    assert not set(ended) & set(processes(trial))


def test_a_crowd_shares_the_processes(trial: GuideTrial) -> None:
    guides = [("regex", f"a{{{i}}}") for i in range(1, 20)] + [("lark", rules(3000)), ("regex", "(")] * 4

    def tried(guide: tuple[str, str]) -> Any:
        try:
            return trial.compile(*guide) > 0
        except adaptrt.RequestError:
            return None

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(tried, guides)) == [True] * 19 + [None] * 8
    assert 1 <= len(processes(trial)) <= guide_trial.MAX_PROCESSES


def test_processes_end_with_the_trial() -> None:
    trial = trial_of(GuideLimits())
    trial.compile("regex", "a")
    (process,) = trial._idle
    del trial
    assert process._popen.returncode is not None


def test_without_an_interpreter_nothing_can_be_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "")
    with pytest.raises(adaptrt.ConfigError, match=r"sys\.executable is empty"):
        trial_of(GuideLimits()).compile("regex", "a")


def test_memory_is_counted_without_glibcs_function(monkeypatch: pytest.MonkeyPatch) -> None:
    heap = guide_trial_process._Heap()
    before = heap.num_bytes()
    kept = bytearray(os.urandom(8 << 20))
    assert 8 << 20 <= heap.num_bytes() - before < 9 << 20
    heap._mallinfo2 = None
    before = heap.num_bytes()
    more = bytearray(os.urandom(64 << 20))
    assert 60 << 20 <= heap.num_bytes() - before < 70 << 20
    del kept, more


def test_the_script_needs_nothing_of_the_package() -> None:
    code = (
        "import runpy, sys; runpy.run_path(sys.argv[1], run_name='x'); "
        "print([name for name in sys.modules if 'adaptrt' in name])"
    )
    command = [guide_trial.sys.executable, "-c", code, str(guide_trial._SCRIPT)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "[]"
