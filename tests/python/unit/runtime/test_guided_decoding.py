"""Tokenizers and guides as llguidance gets them, and errors if it cannot be used."""

from __future__ import annotations

import json
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import llguidance
import pytest
from tokenizers import Tokenizer, decoders, models

import adaptrt
from adaptrt.runtime import guided_decoding
from adaptrt.runtime.guided_decoding import grammar_compiler_of, make_grammar_compiler, token_bytes
from support.tokenizers import SPECIAL, byte_level, metaspace

END = SPECIAL.index("</s>")
Params = adaptrt.GuidedDecodingParams
GuideType = Params.GuideType
Config = adaptrt.GuidedDecodingConfig


@pytest.mark.parametrize("make", [byte_level, metaspace])
def test_the_bytes_of_tokens_are_those_of_their_texts(make: Any) -> None:
    tokenizer = make()
    size = tokenizer.get_vocab_size()
    tokens = token_bytes(tokenizer, size + 3)
    assert tokens[size:] == [b""] * 3
    for number in range(size):
        if number < len(SPECIAL):
            assert tokens[number] == b"\xff" + SPECIAL[number].encode()
            continue
        # Decoded between other tokens, so that nothing is stripped. Single bytes become replacement characters.
        around = tokenizer.encode("a.", add_special_tokens=False).ids[-2:]
        text = tokenizer.decode([around[0], number, around[1]])
        assert text == (b"a" + tokens[number] + b".").decode(errors="replace"), tokenizer.id_to_token(number)


def test_stop_tokens_are_no_text() -> None:
    tokenizer = byte_level()
    tool_call = tokenizer.token_to_id("<tool_call>")
    assert token_bytes(tokenizer, 300)[tool_call] == b"<tool_call>"
    assert token_bytes(tokenizer, 300, [tool_call])[tool_call] == b"\xff<tool_call>"


def test_the_letters_of_byte_level_vocabularies_are_all_bytes() -> None:
    tokens = token_bytes(byte_level(), 300)
    assert {token for token in tokens if len(token) == 1} == {bytes([byte]) for byte in range(256)}


def test_metaspace_decoders_are_known() -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"▁a": 0, "b": 1}, merges=[]))
    tokenizer.decoder = decoders.Metaspace()
    assert token_bytes(tokenizer, 2) == [b" a", b"b"]


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece()])
def test_a_tokenizer_without_bytes_is_refused(decoder: Any) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    if decoder is not None:
        tokenizer.decoder = decoder
    with pytest.raises(adaptrt.ConfigError, match=r"bytes of tokens.*accepted: ByteLevel, ByteFallback, Metaspace"):
        token_bytes(tokenizer, 1)


def test_options_that_do_not_fit_the_engine_are_refused() -> None:
    tokenizer = byte_level()
    with pytest.raises(adaptrt.ConfigError, match="the tokenizer has token 267; the engine's vocabulary is 0 to 266"):
        make_grammar_compiler(tokenizer, 267, [END])
    with pytest.raises(adaptrt.ConfigError, match="stop_token_ids has 300; the vocabulary is 0 to 299"):
        make_grammar_compiler(tokenizer, 300, [END, 300])
    with pytest.raises(adaptrt.ConfigError, match="give stop_token_ids"):
        make_grammar_compiler(tokenizer, 300, [])


def test_the_configuration_goes_before_the_engines(tmp_path: Path) -> None:
    text = byte_level().to_str()
    backend = Config.GuidedDecodingBackend.LLGUIDANCE
    assert grammar_compiler_of(Config(backend, tokenizer_str=text), tmp_path / "none", 268, [END])
    with pytest.raises(adaptrt.ConfigError, match=r"there is no .*none; give tokenizer_str"):
        grammar_compiler_of(Config(backend), tmp_path / "none", 268, [END])
    with pytest.raises(adaptrt.ConfigError, match=r"tokenizer_str: cannot be read as a tokenizer"):
        grammar_compiler_of(Config(backend, tokenizer_str="{}"), tmp_path / "none", 268, [END])
    (tmp_path / "tokenizer.json").write_text(text)
    assert grammar_compiler_of(None, tmp_path / "tokenizer.json", 268, [END])
    with pytest.raises(adaptrt.ConfigError, match="stop_token_ids has 268"):
        grammar_compiler_of(Config(backend, stop_token_ids=[268]), tmp_path / "tokenizer.json", 268, [END])


def test_without_llguidance_it_is_said_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(adaptrt.ConfigError, match=r"pip install 'adaptrt\[guided\]'"):
        make_grammar_compiler(byte_level(), 268, [END])


@pytest.mark.parametrize("version", ["1.8.3", "2.0.0", "0.9"])
def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: version)
    with pytest.raises(adaptrt.ConfigError, match=rf"llguidance is {version}; accepted: 1.9 or newer, below 2"):
        make_grammar_compiler(byte_level(), 268, [END])


def test_a_library_without_the_functions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llguidance, "_lib", __import__("_ctypes"))
    with pytest.raises(adaptrt.ConfigError, match="does not export llg_new_tokenizer_v2"):
        make_grammar_compiler(byte_level(), 268, [END])


def tag(**changes: Any) -> str:
    structure = {"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"}
    content = {"type": "structural_tag", "structures": [structure], "triggers": ["<f="], **changes}
    return json.dumps({name: value for name, value in content.items() if value is not None})


@pytest.mark.parametrize(
    ("guide", "message"),
    [
        ("{", "the guide is not JSON"),
        ("[]", "the guide is not a structural tag"),
        (tag(triggers=None), "the guide is not a structural tag"),
        (tag(more=1), "the guide is not a structural tag"),
        (tag(structures=[]), "structures of the guide is empty"),
        (tag(structures=[{"begin": "<f"}]), r"structures\[0\] of the guide is not a structure"),
        (tag(triggers=["<g"]), "'<f=a>', begins with none of the triggers"),
        (tag(triggers=[""]), "begins with none of the triggers"),
    ],
)
def test_a_structural_tag_that_is_none_is_refused(guide: str, message: str) -> None:
    with pytest.raises(adaptrt.RequestError, match=message):
        guided_decoding._grammar_of(Params(GuideType.STRUCTURAL_TAG, guide), llguidance, set())


def test_triggers_are_special_tokens_or_none_is() -> None:
    def structural(*triggers: str) -> str:
        structures = [{"begin": trigger, "schema": {}, "end": ""} for trigger in triggers]
        return json.dumps({"structures": structures, "triggers": triggers})

    def grammar(*triggers: str) -> str:
        params = Params(GuideType.STRUCTURAL_TAG, structural(*triggers))
        return guided_decoding._grammar_of(params, llguidance, {"<|im_start|>"})[1]

    assert "TAG_TEXT <|im_start|>" in grammar("<|im_start|>", "call:")
    assert '"<call>"' in grammar("<call>")
    with pytest.raises(adaptrt.RequestError, match=r"special tokens and \['<call>'\]; accepted: either"):
        grammar("<|im_start|>", "<call>")


def test_params_and_config_are_values() -> None:
    import copy
    import pickle

    params = Params(GuideType.REGEX, "a")
    assert pickle.loads(pickle.dumps(params)) == copy.copy(params) == params != Params(GuideType.REGEX, "b")
    assert params.validate() == []
    params.guide = None
    assert params.validate() == ["guide is None; expected a guide, because only guide_type JSON has none"]
    config = Config(Config.GuidedDecodingBackend.XGRAMMAR, ["a"], None, [])
    assert pickle.loads(pickle.dumps(config)) == config
    assert len(config.validate()) == 3
    executor_config = adaptrt.ExecutorConfig(guided_decoding_config=config)
    assert any("guided_decoding_config.backend is XGRAMMAR" in problem for problem in executor_config.validate())
    with pytest.raises(TypeError, match=r"^Request\.guided_decoding_params is "):
        adaptrt.Request([1], 1, guided_decoding_params="json")


@pytest.mark.parametrize(
    ("schema", "written"),
    [
        ("{}", '{"x-guidance": {"a": 1}}'),
        (" true\n", '{"x-guidance": {"a": 1}}'),
        ('{"type": "object"}', '{"x-guidance": {"a": 1}, "type": "object"}'),
        ('{ \n"x-guidance": {}}', '{"x-guidance": {"a": 1}, "x-guidance": {}}'),
        ("false", "false"),
        ("", ""),
        ("nonsense", "nonsense"),
    ],
)
def test_a_schemas_own_options_win(schema: str, written: str) -> None:
    assert guided_decoding.with_json_options(schema, {"a": 1}) == written


def accepts(params: Params, text: str) -> bool:
    """True if the guide allows the text, which may continue."""
    kind, grammar = guided_decoding._grammar_of(params, llguidance, set())
    if kind == "json_schema":
        grammar = llguidance.LLMatcher.grammar_from_json_schema(grammar)
    elif kind == "lark":
        grammar = llguidance.LLMatcher.grammar_from_lark(grammar)
    tokenizer = llguidance.LLTokenizer("byte")
    matcher = llguidance.LLMatcher(tokenizer, grammar)
    assert not matcher.is_error(), matcher.get_error()
    tokens = tokenizer.tokenize_str(text)
    return bool(matcher.try_consume_tokens(tokens) == len(tokens))


FREE = json.dumps({"x-guidance": {"whitespace_flexible": True}, "type": "object"})


@pytest.mark.parametrize(
    ("params", "prefix"),
    [
        (Params(GuideType.JSON), ""),
        (Params(GuideType.JSON_SCHEMA, "{}"), ""),
        (Params(GuideType.JSON_SCHEMA, "true"), ""),
        (
            Params(
                GuideType.STRUCTURAL_TAG,
                json.dumps({"structures": [{"begin": "<f>", "schema": {}, "end": ""}], "triggers": ["<f>"]}),
            ),
            "<f>",
        ),
    ],
    ids=["JSON", "schema", "any schema", "structural tag"],
)
def test_json_is_compact_unless_the_schema_says_otherwise(params: Params, prefix: str) -> None:
    for text in ('{"a": [1, 2], "b": {}}', '{"a":[1,2],"b":{}}'):
        assert accepts(params, prefix + text)
    for text in (" {", "{ ", '{"a" :', '{"a":  1', '{"a": 1 ', '{"a": 1,\n'):
        assert not accepts(params, prefix + text), text
    assert accepts(Params(GuideType.JSON_SCHEMA, FREE), '{\n\n  "a" :   1 ,')
