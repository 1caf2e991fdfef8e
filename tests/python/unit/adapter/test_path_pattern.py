"""Patterns of module paths match like `re`, without its backtracking."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptrt._core import AdapterError
from adaptrt.formats.adapter.path_pattern import MAX_PATTERN_LENGTH, PathPattern, is_plain, matches_end
from adaptrt.formats.adapter.peft_config import parse_peft_config
from adaptrt.formats.adapter.peft_fields import MODULE_PATTERN

PATH = "model.layers.12.self_attn.q_proj"

ATOMS = st.sampled_from(
    ["a", "b", ".", r"\.", r"\d", r"\W", "[ab]", "[^a.]", "[]b]", "1", "^", "$", r"\b", r"\B", r"\A", "{", "()"]
)
COUNTS = st.sampled_from(["*", "+", "?", "*?", "+?", "??", "{2}", "{0}", "{0,2}", "{1,}", "{,2}", "{2,3}?"])


def groups(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.builds("{}{}".format, inner, inner),
        st.builds("({}|{})".format, inner, inner),
        st.builds("(?:{}){}".format, inner, COUNTS),
        st.builds("(?{}{})".format, st.sampled_from(["=", "!", "<=", "<!"]), inner),
        st.builds("(?P<name>{})".format, inner).filter(lambda text: text.count("?P<") == 1),
    )


@given(st.recursive(ATOMS, groups, max_leaves=12), st.text("ab.1{", max_size=8))
def test_the_answer_is_that_of_re(pattern: str, path: str) -> None:
    try:
        expected = re.fullmatch(pattern, path) is not None
    except re.error:  # for example, two groups with one name
        with pytest.raises(ValueError, match="not a regular expression"):
            PathPattern(pattern)
        return
    assert PathPattern(pattern).matches(path) is expected


@pytest.mark.parametrize(
    "pattern",
    [
        r".*\.(q_proj|v_proj)",
        r"model\.layers\.(1[0-9]|2\d)\.self_attn\..*",
        r"(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj|k_proj)))",
        r"(?:.*?(?:language|text|model).*?(?:self_attn|attention).*?(?:q_proj|k_proj))",
        r"(.*\.)?(^model\.layers\.12\.self_attn\.q_proj)$",
        r"(.*\.)?(q_proj)$",
        r"^(?!.*(?:visual|patch_embed)).*(?:q_proj|up_proj).*",
        r"^(model(?=\.).*\.(up_proj|q_proj))$",
        r"^(?:(?!.*mlp)(?:.*(?<=attn\.)(?:q_proj|down_proj))).*",
    ],
)
def test_patterns_as_peft_writes_them(pattern: str) -> None:
    assert PathPattern(pattern).matches(PATH)
    assert not PathPattern(pattern).matches("model.layers.12.mlp.down_proj")


# `re` would take longer than the age of the universe for some of these.
@pytest.mark.parametrize(
    "pattern",
    [
        "(.*)*x",
        "(.*.*)*x",
        ".*" * 500 + "x",
        "((((((.*)*)*)*)*)*)*x",
        "(.?){400}x",
        "(.+.+)+x",
        "(){1000000000}x",
        "(?=(.*)*x)" * 50 + ".*",
        "(?:(?=.*(?=.*(?=.*x)))|y)*z",
    ],
)
def test_hostile_patterns_are_answered(pattern: str) -> None:
    assert not PathPattern(pattern).matches(PATH)


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(a)?(?(1)b|c)", r"'\(\?\(' is not supported"),
        ("(?=(a{100}){60})b", "repetitions are too many"),
        ("(?:(?=a{9})){1000}b", "repetitions are too many"),
        ("(?i)a", r"'\(\?i' is not supported"),
        (r"(a)\1", r"'\\1' is not supported"),
        (r"\u0061", r"'\\u' is not supported"),
        ("a{1000000000}", "repetitions are too many"),
        ("((a{100}){100}){100}", "repetitions are too many"),
        ("(" * 60 + ")" * 60, "nested deeper than 50"),
        ("a" * (MAX_PATTERN_LENGTH + 1), "accepted: up to 2000"),
        ("a)(", "not a regular expression"),
    ],
)
def test_patterns_that_need_backtracking_or_are_too_large_are_refused(pattern: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        PathPattern(pattern)


@given(
    pattern=st.text("ab._1", max_size=6),
    path=st.lists(st.text("ab_1", min_size=1, max_size=3), min_size=1, max_size=4).map(".".join),
)
def test_names_match_as_the_regular_expressions_that_they_are(pattern: str, path: str) -> None:
    assert is_plain(pattern)
    assert matches_end(pattern, path) == (re.match(MODULE_PATTERN.format(pattern), path) is not None)


def test_thousands_of_names_are_taken_and_of_regular_expressions_are_not() -> None:
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    names = {f"layers.{i}.self_attn.q_proj": 1 + i % 3 for i in range(20_000)}
    config = parse_peft_config({**fields, "rank_pattern": names}, "here")
    assert [config.rank_of(f"model.layers.{i}.self_attn.q_proj") for i in (0, 19_999)] == [1, 1 + 19_999 % 3]
    patterns = {f"layers.{i}.*q_proj": 2 for i in range(1001)}
    for field in ("rank_pattern", "alpha_pattern"):
        with pytest.raises(AdapterError, match=f"{field}.* has 1001 regular expressions; expected at most 1000"):
            parse_peft_config({**fields, field: patterns}, "here")
