"""Sources that requests may cause downloads from."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptrt import ConfigError
from adaptrt.formats.sources import HubName, ObjectName
from adaptrt.formats.sources.allowed import AllowedSources, allowed_sources
from adaptrt.formats.sources.grammar import remote_name

ALLOWED = allowed_sources(
    ["hub:org/*,hub:Other/poet", "s3://bucket/loras/*", "s3://bucket/one"], [ObjectName("roots", "team")]
)


@pytest.mark.parametrize(
    ("text", "is_allowed"),
    [
        ("org/poet", True),
        ("hf://ORG/poet", True),
        ("org/poet@v1", True),
        ("org/poet@refs/convert/x/folder", False),
        ("org/poet@refs/pr/1", False),
        ("org/poet@refs%2Fpr%2F1", False),
        ("org/poet@0123abc", False),
        (f"org/poet@{'0aF' * 13}0", False),
        ("org/poet/folder", True),
        ("other/poet", True),
        ("other/poet/folder", True),
        ("other/clerk", False),
        ("organisation/poet", False),
        ("s3://bucket/loras/poet", True),
        ("s3://bucket/loras/team/poet", True),
        ("s3://bucket/loras", False),
        ("s3://bucket/loras-other/poet", False),
        ("s3://bucket/one", True),
        ("s3://bucket/one/more", False),
        ("s3://roots/team/poet", True),
        ("s3://roots/teams/poet", False),
        ("s3://elsewhere/loras/poet", False),
    ],
)
def test_what_is_allowed(text: str, is_allowed: bool) -> None:
    name = remote_name(text)
    assert name is not None
    assert ALLOWED.allows(name) is is_allowed


def test_nothing_is_allowed_by_default() -> None:
    for text in ("org/poet", "s3://bucket/poet"):
        name = remote_name(text)
        assert name is not None
        assert not AllowedSources().allows(name)
        assert not allowed_sources([]).allows(name)


@given(st.lists(st.text(alphabet="ab./-_%2F@:", max_size=8), max_size=4).map("/".join))
def test_no_spelling_leaves_a_prefix(text: str) -> None:
    name = remote_name(f"s3://bucket/{text}")
    allowed = allowed_sources(["s3://bucket/a/*"])
    if name is not None and allowed.allows(name):
        assert isinstance(name, ObjectName)
        parts = name.in_store.split("/")
        assert parts[:2] == ["bucket", "a"]
        assert len(parts) > 2
        assert not {"", ".", ".."} & set(parts)


@pytest.mark.parametrize(
    ("root", "text", "is_below"),
    [
        (HubName("org/loras"), "org/loras/poet", True),
        (HubName("org/loras"), "hf://ORG/loras/team/poet", True),
        (HubName("org/loras"), "org/loras", False),
        (HubName("org/loras"), "org/loras@v1/poet", False),
        (HubName("org/loras"), "org/loras-other/poet", False),
        (HubName("org/loras", "v1", "team"), "org/loras@v1/team/poet", True),
        (HubName("org/loras", "v1", "team"), "org/loras@v1/teams/poet", False),
        (HubName("org/loras", "v1", "team"), "org/loras/team/poet", False),
        (HubName("org/loras"), "s3://org/loras/poet", False),
        (ObjectName("bucket", "loras"), "s3://bucket/loras/poet", True),
        (ObjectName("bucket", "loras"), "bucket/loras/poet", False),
    ],
)
def test_names_below_a_root(root: HubName | ObjectName, text: str, is_below: bool) -> None:
    name = remote_name(text)
    assert name is not None
    assert root.has_below(name) is is_below


@pytest.mark.parametrize(
    "pattern",
    ["", "*", "hub:*", "hub:*/*", "hub:org", "hub:org/x@v1", "hub:org/x/folder", "hub:org/x/*", "hf://org/*", "s3://*",
     "s3://bucket/*/x", "s3://bucket/../x", "gs://bucket/*", "/local/*", "org/*", "hub:org/*/*"],
)  # fmt: skip
def test_other_patterns_are_refused(pattern: str) -> None:
    with pytest.raises(ConfigError, match=r"allowed_adapter_sources has '.*'; expected hub:ORGANISATION/\*"):
        allowed_sources([pattern])
