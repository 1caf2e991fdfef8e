"""Names of models and adapters: paths, repositories of the Hub, and names that are refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptrt import AdapterError, ConfigError
from adaptrt.formats.sources import HubName, LocalName, ObjectName, find_sum, parse_name
from adaptrt.formats.sources.grammar import remote_name

_WORD = st.from_regex(r"[A-Za-z0-9](?:[A-Za-z0-9_-]{0,8}[A-Za-z0-9])?", fullmatch=True).filter(
    lambda text: "--" not in text and not os.path.lexists(text)
)
_FOLDERS = st.lists(_WORD, max_size=3).map("/".join)
_REVISIONS = st.none() | st.lists(_WORD, min_size=1, max_size=3).map("/".join) | st.just("refs/pr/7")


@given(_WORD, _WORD, _REVISIONS, _FOLDERS)
def test_a_name_of_the_hub_reads_as_it_is_written(owner: str, name: str, revision: str | None, folder: str) -> None:
    hub = HubName(f"{owner}/{name}", revision, folder)
    assert parse_name(str(hub), ConfigError) == hub
    assert parse_name(hub.without_prefix, ConfigError) == hub


@given(st.text(max_size=40))
def test_every_text_has_one_meaning_or_an_error(text: str) -> None:
    try:
        found = parse_name(text, ConfigError)
    except ConfigError as error:
        assert "expected" in str(error) or "write './" in str(error)  # noqa: PT017
        return
    if isinstance(found, HubName):
        assert not os.path.lexists(text)
        assert parse_name(str(found), ConfigError) == found
        assert ".." not in found.folder.split("/")
        assert ".." not in (found.revision or "").split("/")
    elif isinstance(found, ObjectName):
        assert parse_name(str(found), ConfigError) == found
        assert ".." not in found.path.split("/")
    else:
        assert found == LocalName(Path(text))


_URLS = st.tuples(st.just("s3://"), st.text(max_size=6) | _WORD, st.lists(st.text(max_size=6), max_size=3)).map(
    lambda parts: parts[0] + "/".join([parts[1], *parts[2]])
)
_SUMS = st.lists(st.tuples(_WORD, st.floats(-9, 9)), min_size=1, max_size=3).map(
    lambda terms: "+".join(f"org/{name}:{weight!r}" for name, weight in terms)
)


@given(_URLS | _SUMS | st.text(max_size=20).map("hf://{}".format))
def test_a_remote_name_means_the_same_wherever_it_is_written(text: str) -> None:
    meaning = remote_name(text)
    try:
        found = parse_name(text, ConfigError)
    except ConfigError:
        assert meaning is None
        return
    assert meaning == (None if isinstance(found, LocalName) else found)
    if isinstance(found, ObjectName):
        assert found.child("poet").in_store.startswith(found.bucket + "/")


@given(st.text(max_size=40))
def test_a_path_that_begins_like_one_is_a_path(text: str) -> None:
    if "\0" not in text:
        assert parse_name(f"./{text}", ConfigError) == LocalName(Path(f"./{text}"))
        assert parse_name(f"/{text}", ConfigError) == LocalName(Path(f"/{text}"))


def test_an_existing_path_always_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("org/name", "org/name@v1", "a:0.7+b:0.3", "model"):
        Path(name).mkdir(parents=True)
        assert parse_name(name, ConfigError) == LocalName(Path(name))
        assert find_sum(name) is None
    Path("org/link").symlink_to("nowhere")
    assert parse_name("org/link", ConfigError) == LocalName(Path("org/link"))


def test_a_path_object_is_a_path() -> None:
    assert parse_name(Path("org/name"), ConfigError) == LocalName(Path("org/name"))


def test_both_meanings_of_an_ambiguous_name_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("models").mkdir()
    with pytest.raises(ConfigError, match=r"directory 'models' exists.*write '\./models/qwen' or 'hf://models/qwen'"):
        parse_name("models/qwen", ConfigError)
    assert parse_name("hf://models/qwen", ConfigError) == HubName("models/qwen")
    assert parse_name("./models/qwen", ConfigError) == LocalName(Path("models/qwen"))


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("Qwen/Qwen3-0.6B", HubName("Qwen/Qwen3-0.6B")),
        ("Qwen/Qwen3-0.6B@v1.0", HubName("Qwen/Qwen3-0.6B", "v1.0")),
        ("a/b@feature%2Fx/sub/folder", HubName("a/b", "feature/x", "sub/folder")),
        ("a/b@refs/pr/3/sub", HubName("a/b", "refs/pr/3", "sub")),
        ("a/b/sub", HubName("a/b", None, "sub")),
        ("org/repo:Q4_K_M", HubName("org/repo", gguf="Q4_K_M")),
        ("org/repo@v1/sub:q8_0", HubName("org/repo", "v1", "sub", "q8_0")),
        ("org/repo/x-Q8_0.gguf", HubName("org/repo", gguf="x-Q8_0.gguf")),
        ("hf://org/repo@v1/sub/x.gguf", HubName("org/repo", "v1", "sub", "x.gguf")),
        ("s3://bucket/x.gguf", ObjectName("bucket", "x.gguf")),
        ("s3://bucket/a/poet:v1", ObjectName("bucket", "a/poet:v1")),
        ("s3://bucket/a/", ObjectName("bucket", "a")),
        ("s3://bucket", ObjectName("bucket")),
        ("gone", LocalName(Path("gone"))),
        ("a/b/", LocalName(Path("a/b/"))),
        ("a//b", LocalName(Path("a//b"))),
        ("a/b/../c", LocalName(Path("a/b/../c"))),
        ("a/b.git", LocalName(Path("a/b.git"))),
        ("a/b@..%2Fx", LocalName(Path("a/b@..%2Fx"))),
        ("a/b@-x", LocalName(Path("a/b@-x"))),
        ("my models/x", LocalName(Path("my models/x"))),
    ],
)
def test_names_and_their_meanings(text: str, meaning: HubName | LocalName | ObjectName) -> None:
    assert parse_name(text, ConfigError) == meaning
    if isinstance(meaning, HubName):
        assert parse_name(str(meaning), ConfigError) == meaning
        assert meaning.without_prefix == text.removeprefix("hf://")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a path or a name"),
        ("a\0b", "null character"),
        ("gs://bucket/x", "URL with the scheme gs; expected s3://BUCKET/PREFIX with AWS_ENDPOINT_URL=https://storage"),
        ("az://container/x", "URL with the scheme az; expected a copy in a directory, because Azure's store does not"),
        ("S3A://bucket/x", "URL with the scheme S3A; expected s3://BUCKET/PREFIX"),
        ("r2://bucket/x", "URL with the scheme r2; expected s3://BUCKET/PREFIX with AWS_ENDPOINT_URL, if the store"),
        ("file:///adapters/x", "URL with the scheme file; expected its path"),
        (
            "https://example.com/x",
            "URL with the scheme https; expected a path, ORGANISATION/NAME .* or s3://BUCKET/PRE",
        ),
        ("s3://", "expected s3://BUCKET/PREFIX without"),
        ("s3://bucket/../x", "expected s3://BUCKET/PREFIX without"),
        ("s3://bucket//x", "expected s3://BUCKET/PREFIX without"),
        ("s3://bucket/x*", "expected s3://BUCKET/PREFIX without"),
        ("s3://bucket/x?versionId=1", "expected s3://BUCKET/PREFIX without"),
        ("s3://bucket/x:0.5", "a weighted sum of adapters; expected one model or adapter"),
        ("https://huggingface.co/Qwen/Qwen3-0.6B/tree/main", "the name of the repository, 'Qwen/Qwen3-0.6B'"),
        ("a/b:0.7+c/d:0.3", "a weighted sum of adapters; expected one model or adapter"),
        ("hf://org", "expected hf://ORGANISATION/NAME"),
        ("hf://org/../x", "expected hf://ORGANISATION/NAME"),
    ],
)
def test_other_names_are_refused(text: str, message: str) -> None:
    with pytest.raises(AdapterError, match=message):
        parse_name(text, AdapterError)


def test_a_sum_has_local_adapters(tmp_path: Path) -> None:
    terms = find_sum(f"{tmp_path}/a:0.7+{tmp_path}/b:0.3")
    assert terms is not None
    assert [(source.directory, weight) for source, weight in terms.items()] == [
        (tmp_path / "a", 0.7),
        (tmp_path / "b", 0.3),
    ]
    with pytest.raises(AdapterError, match="twice; expected each adapter once"):
        find_sum(f"{tmp_path}/a:0.7+{tmp_path}/a:0.3")
