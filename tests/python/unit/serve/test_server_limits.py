"""Limits of a server: invalid flags are rejected, and connections fit into the limit of open files."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import re
import resource
from pathlib import Path

import pytest

import adaptrt
from adaptrt.runtime.guide_trial import GuideLimits
from adaptrt.runtime.template_limits import TemplateLimits
from adaptrt.serve import options
from adaptrt.serve.command_flags import add_arguments
from adaptrt.serve.command_options import options_of
from adaptrt.serve.media_hosts import MediaHosts
from adaptrt.serve.options import (
    CPUS_PER_ADAPTER_THREAD,
    MAX_JSON_DEPTH,
    MOST_ADAPTER_THREADS,
    MOST_CONNECTIONS,
    OTHER_FILES,
    ServerLimits,
    num_adapter_threads,
    num_connections,
)

SECONDS = ("header_seconds", "body_seconds", "keep_alive_seconds", "write_seconds")
ROOT = Path(__file__).parents[4]
UNIT_FILE = ROOT / "deploy" / "adaptrt.service"
DOCS = ROOT / "docs"


def parse(*flags: object) -> options.ServerOptions:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return options_of(parser.parse_args(["model", *map(str, flags)]))


@functools.cache
def documented() -> str:
    """Returns the pages about the server on one line, with numbers without commas."""
    pages = " ".join(
        (DOCS / name).read_text()
        for name in ("serving.md", "serving-openai.md", "serving-responses.md", "serving-images.md")
    )
    return re.sub(r"(?<=\d),(?=\d{3})", "", " ".join(pages.split()))


@pytest.fixture
def open_files(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    limit: int = request.param
    monkeypatch.setattr(options.resource, "getrlimit", lambda _: (limit, resource.RLIM_INFINITY))
    return limit


def test_every_limit_has_a_flag() -> None:
    names = {field.name for field in dataclasses.fields(ServerLimits)}
    for name in names:
        # A value that no limit has by default.
        assert parse(f"--{name}", 11).limits == dataclasses.replace(ServerLimits(), **{name: 11}), name


@pytest.mark.parametrize(
    "limit",
    [*dataclasses.fields(ServerLimits), *dataclasses.fields(GuideLimits)],
    ids=lambda field: field.name,
)
def test_the_documented_default_is_the_servers(limit: dataclasses.Field[float | None]) -> None:
    """A table has the default in the row's last or last but one column; a sentence has it in parentheses."""
    flag = re.escape(limit.name).replace("_", "[-_]")
    default = {
        "max_connections": f"{MOST_CONNECTIONS}, or the limit of open files less {OTHER_FILES}",
        "adapter_threads": f"one for each {CPUS_PER_ADAPTER_THREAD} CPUs, at most {MOST_ADAPTER_THREADS}",
    }.get(limit.name, limit.default if limit.default is None else f"{limit.default:.0f}")
    assert re.search(rf"`--{flag}`( \|[^|]*\| {default} \||[^(`|]*\({default}\))", documented()), default


def test_flags_of_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert parse("--limit_mm_per_prompt", '{"image": 4, "video": 0}').limits.max_images == 4
    made = parse("--allowed_media_domains", "a.example", "10.0.0.5:81", "--allowed_local_media_path", tmp_path)
    assert made.media_hosts.accepts("10.0.0.5", 81)
    assert made.media_root == tmp_path
    assert (parse().media_hosts, parse("--allowed_local_media_path", "").media_root) == (MediaHosts(), None)
    with pytest.raises(
        adaptrt.ConfigError, match=r"allowed_media_domains has 'http://a'.*allowed_local_media_path is "
    ):
        parse("--allowed_media_domains", "http://a", "--allowed_local_media_path", tmp_path / "missing")
    for text in ("4", '{"image": -1}', '{"image": 1, "video": 1}', "{}", "[" * 10**5):
        with pytest.raises(SystemExit):
            parse("--limit_mm_per_prompt", text)
        assert 'expected {"image": N}' in capsys.readouterr().err


def test_the_documented_limits_of_chat_templates_are_the_servers() -> None:
    limits = TemplateLimits()
    assert f"{limits.max_characters} characters or items" in documented()
    assert f"at most {limits.max_source_characters} characters together" in documented()


def test_time_limits_are_flags() -> None:
    assert parse().limits == ServerLimits()
    given = parse(*(part for i, name in enumerate(SECONDS) for part in (f"--{name}", i + 0.5)), "--max_connections", 9)
    assert [getattr(given.limits, name) for name in SECONDS] == [0.5, 1.5, 2.5, 3.5]
    assert given.limits.max_connections == 9


@pytest.mark.parametrize(("cpus", "expected"), [(1, 1), (4, 1), (7, 1), (8, 2), (16, 4), (64, 4)])
def test_steps_keep_most_of_the_cpus(cpus: int, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "num_usable_cpus", lambda: cpus)
    assert num_adapter_threads(parse().limits) == expected
    assert num_adapter_threads(parse("--adapter_threads", 9).limits) == 9


def test_the_limits_of_chat_templates_are_flags() -> None:
    assert parse().limits.template == TemplateLimits()
    given = parse("--max_template_bytes", 12345, "--max_template_seconds", 0.5)
    assert given.limits.template == TemplateLimits(max_work=12345, max_seconds=0.5)
    for name in ("max_template_bytes", "max_template_seconds"):
        with pytest.raises(SystemExit):
            parse(f"--{name}", 0)


def test_the_tokens_of_counted_texts_are_a_flag() -> None:
    assert parse("--max_tokenize_tokens", 7).limits.max_tokenize_tokens == 7
    with pytest.raises(SystemExit):
        parse("--max_tokenize_tokens", 0)


@pytest.mark.parametrize("value", [0, MAX_JSON_DEPTH + 1])
def test_levels_that_no_parser_has_are_refused(value: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert parse("--max_json_depth", MAX_JSON_DEPTH).limits.max_json_depth == MAX_JSON_DEPTH
    with pytest.raises(SystemExit):
        parse("--max_json_depth", value)
    said = f"--max_json_depth: it is {value}; expected an integer from 1 to {MAX_JSON_DEPTH}"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("name", SECONDS)
@pytest.mark.parametrize("value", ["0", "-1", "inf", "nan"])
def test_time_limits_that_cannot_be_are_refused(name: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(f"--{name}={value}")
    assert f"--{name}: it is {value}; expected seconds above 0 up to 1000000000" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("open_files", "expected"),
    [(1024, 1024 - OTHER_FILES), (1 << 20, MOST_CONNECTIONS), (resource.RLIM_INFINITY, MOST_CONNECTIONS)],
    indirect=["open_files"],
)
def test_connections_fit_into_the_limit_of_open_files(open_files: int, expected: int) -> None:
    assert num_connections(parse().limits) == expected
    assert num_connections(parse("--max_connections", 7).limits) == 7


@pytest.mark.parametrize("open_files", [1024], indirect=True)
def test_more_connections_than_open_files_are_refused(open_files: int) -> None:
    assert num_connections(parse("--max_connections", 896).limits) == 896
    with pytest.raises(adaptrt.ConfigError, match=r"max_connections is 897; expected at most 896: .* is 1024"):
        parse("--max_connections", 897)
    with pytest.raises(SystemExit):
        parse("--max_connections", 0)


@pytest.mark.parametrize("open_files", [OTHER_FILES], indirect=True)
def test_too_few_open_files_are_refused(open_files: int) -> None:
    with pytest.raises(adaptrt.ConfigError, match="the limit of open files is 128; expected at least 129"):
        parse()


def test_the_systemd_unit_leaves_room_for_all_connections() -> None:
    found = re.search(r"^LimitNOFILE=(\d+)$", UNIT_FILE.read_text(), re.MULTILINE)
    assert found is not None
    assert int(found[1]) >= MOST_CONNECTIONS + OTHER_FILES
