"""vLLM's arguments of LLM.generate() and LLM.chat(), and its LoRARequest."""

from __future__ import annotations

import dataclasses
import inspect
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import adaptrt
from adaptrt import LLM, AdapterError, ConfigError, LoRARequest, RequestError, SamplingParams
from support.models import ModelSpec, save_adapter, save_model
from support.serving import build_engine
from support.tokenizers import byte_level, save_tokenizer
from support.vllm_names import names_of

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
TALK = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("methods")
    model = save_model(ModelSpec(vocab_size=272), made / "model")
    save_tokenizer(byte_level(), model)
    (model / "chat_template.jinja").write_text("{{ word }}{% for m in messages %}{{ m.content }}{% endfor %}")
    for seed, name in enumerate(("poet", "clerk")):
        save_adapter(model, made / name, seed, strength=3.0, r=4)
    build_engine(model, made)
    return made


@pytest.fixture
def llm(root: Path) -> Iterator[LLM]:
    with LLM(root / "engine") as made:
        yield made


def tokens(llm: LLM, **arguments: Any) -> tuple[int, ...]:
    """The completion of one prompt."""
    return tuple(llm.generate("hello", GREEDY, **arguments).token_ids)


def test_lora_requests_load_and_use_adapters(llm: LLM, root: Path) -> None:
    base, as_poet, as_clerk = (tokens(llm, lora=lora) for lora in (None, root / "poet", root / "clerk"))
    assert len({base, as_poet, as_clerk}) == 3
    poet = LoRARequest("poet", 1, str(root / "poet"))
    assert tokens(llm, lora_request=poet) == as_poet
    assert "poet" in llm.list_loras()
    # Objects of vLLM and TensorRT-LLM have these attributes.
    other = SimpleNamespace(lora_name="clerk", lora_int_id=2, lora_path=str(root / "clerk"), load_inplace=False)
    made = llm.generate(["hello"] * 3, GREEDY, lora_request=[None, poet, other])
    assert [tuple(one.token_ids) for one in made] == [base, as_poet, as_clerk]
    assert [one.adapter for one in made] == [None, "poet", "clerk"]
    assert tokens(llm, lora=LoRARequest("poet", 7)) == as_poet
    with pytest.raises(AdapterError, match=r"lora_path is .*clerk', and adapter 'poet' was loaded from .*poet; expect"):
        tokens(llm, lora_request=LoRARequest("poet", 1, root / "clerk"))
    assert tokens(llm, lora_request=LoRARequest("poet", 1, root / "clerk", load_inplace=True)) == as_clerk
    with pytest.raises(AdapterError, match="was loaded from"):
        tokens(llm, lora_request=poet)
    llm.unload_lora("poet")
    assert tokens(llm, lora_request=poet) == as_poet
    with pytest.raises(AdapterError, match="no adapter named 'nobody'"):
        tokens(llm, lora_request=LoRARequest("nobody", 1))
    talk = llm.chat(TALK, GREEDY, lora="poet")
    assert llm.chat(TALK, GREEDY, lora_request=poet) == talk


def test_a_copied_adapter_is_another_directory(llm: LLM, root: Path, tmp_path: Path) -> None:
    llm.load_lora("poet", root / "poet")
    llm.generate("hello", GREEDY, lora_request=LoRARequest("poet", 1, root / "poet"))
    shutil.copytree(root / "poet", tmp_path / "poet")
    with pytest.raises(AdapterError, match="was loaded from"):
        llm.generate("hello", GREEDY, lora_request=LoRARequest("poet", 1, tmp_path / "poet"))


@pytest.mark.parametrize("method", ["generate", "chat"])
def test_every_argument_of_vllm_is_taken_or_refused_by_name(llm: LLM, method: str) -> None:
    own = inspect.signature(getattr(LLM, method)).parameters
    prompt: Any = "hello" if method == "generate" else TALK
    for name in {*names_of(f"LLM.{method}"), "prompt_token_ids" if method == "generate" else "chat_template"} - {*own}:
        with pytest.raises((RequestError, AdapterError)) as refused:
            getattr(llm, method)(prompt, GREEDY, **{name: object()})
        assert (
            name in str(refused.value)
            or (name, "template") == ("chat_template_kwargs", "template")
            or (name == "lora_request" and "lora is <object" in str(refused.value))
        )
    with pytest.raises(TypeError, match=rf"LLM\.{method}\(\) got an unexpected keyword argument 'max_token'"):
        getattr(llm, method)(prompt, GREEDY, max_token=3)


@pytest.mark.parametrize("method", ["embed", "classify"])
def test_methods_for_rows_take_vllms_arguments(llm: LLM, method: str) -> None:
    own = inspect.signature(getattr(LLM, method)).parameters
    how = {"pooling_type": adaptrt.PoolingType.LAST, "normalize": True} if method == "embed" else {}
    for name in {*names_of(f"LLM.{method}")} - {*own, "prompts"}:
        with pytest.raises((RequestError, AdapterError)) as refused:
            getattr(llm, method)("hello", **how, **{name: object()})
        assert name in str(refused.value) or "lora is <object" in str(refused.value)
    with pytest.raises(TypeError, match=rf"LLM\.{method}\(\) got an unexpected keyword argument 'loras'"):
        getattr(llm, method)("hello", loras=[])


def test_embeddings_take_a_lora_request(llm: LLM, root: Path) -> None:
    how: dict[str, Any] = {"pooling_type": adaptrt.PoolingType.LAST, "normalize": True}
    poet = LoRARequest("poet", 1, str(root / "poet"))
    row = llm.embed("hello", lora_request=poet, use_tqdm=False, **how)
    assert row.tolist() == llm.embed("hello", lora="poet", **how).tolist()
    assert row.tolist() != llm.embed("hello", use_tqdm=True, **how).tolist()


def test_a_seed_gives_the_seeds_of_requests(root: Path) -> None:
    def drawn(of_llm: int | None, **fields: Any) -> list[tuple[int, ...]]:
        params = SamplingParams(temperature=1.0, max_tokens=6, ignore_eos=True, **fields)
        with LLM(root / "engine", seed=of_llm) as made:
            return [tuple(one.token_ids) for one in made.generate(["hello", "hello"], params)]

    assert drawn(0) == drawn(0) != drawn(1)
    assert len(set(drawn(0))) == 2
    assert drawn(0, seed=3) == drawn(1, seed=3)
    with pytest.raises(ConfigError, match="seed is 'x'; expected an integer of 64 bits"):
        LLM(root / "engine", seed="x")  # type: ignore[arg-type]


def test_defaults_of_vllm_are_accepted(llm: LLM) -> None:
    plain = llm.generate("hello", GREEDY)
    taken: dict[str, Any] = {"use_tqdm": False, "lora_request": None, "priority": None, "tokenization_kwargs": None}
    assert llm.generate("hello", GREEDY, **taken, mm_processor_kwargs=None) == plain
    talk = llm.chat(TALK, GREEDY, template_variables={"word": "so "})
    made = llm.chat(
        TALK, GREEDY, **taken, chat_template_kwargs={"word": "so "}, add_generation_prompt=True, chat_template=None,
        continue_final_message=False, chat_template_content_format="auto",
    )  # fmt: skip
    assert made == talk


@pytest.mark.parametrize(
    ("method", "arguments", "said"),
    [
        (
            "generate",
            {"lora_request": LoRARequest("a", 1), "lora": "a"},
            "lora_request and lora are given",
        ),
        ("generate", {"use_tqdm": print}, "use_tqdm is <built-in function print>; expected True or False"),
        ("generate", {"use_tqdm": True, "progress": False}, "use_tqdm and progress are given; expected one of them"),
        ("generate", {"priority": [1]}, r"priority is \[1\]; expected 0: a Request of the executor takes priority"),
        (
            "generate",
            {"prompt_token_ids": [1]},
            r"prompt_token_ids is \[1\]; expected no value: give the ids",
        ),
        ("chat", {"chat_template": "x"}, "chat_template is 'x'; expected no value: give LLM"),
        ("chat", {"add_generation_prompt": False}, "add_generation_prompt is False; expected True: generate"),
        ("chat", {"continue_final_message": True}, "continue_final_message is True; expected False: generate"),
        (
            "chat",
            {"chat_template_kwargs": {}, "template_variables": {}},
            "chat_template_kwargs and template_vari",
        ),
    ],
)
def test_other_values_are_refused(llm: LLM, method: str, arguments: dict[str, Any], said: str) -> None:
    prompt: Any = "hello" if method == "generate" else TALK
    with pytest.raises(RequestError, match=said):
        getattr(llm, method)(prompt, GREEDY, **arguments)


def test_every_field_of_vllms_lora_request_is_a_field() -> None:
    fields = {one.name for one in dataclasses.fields(LoRARequest)}
    assert set(names_of("LoRARequest")) <= fields
    LoRARequest("poet", 1, "/poet", base_model_name="org/model", load_inplace=True, is_3d_lora_weight=True)
    refused: dict[str, tuple[Any, str]] = {
        "lora_name": ("", "lora_name is ''; expected a text of one character or more"),
        "lora_int_id": (True, "lora_int_id is True; expected 0 or more"),
        "lora_path": (3, "lora_path is 3; expected a directory or a name in a store"),
        "base_model_name": (3, "base_model_name is 3; expected a text or None"),
        "load_inplace": (1, "load_inplace is 1; expected True or False"),
        "is_3d_lora_weight": (None, "is_3d_lora_weight is None; expected True or False"),
        "tensorizer_config_dict": (
            {},
            "tensorizer_config_dict is {}; expected None: adapters are read",
        ),
        "long_lora_max_len": (9, "long_lora_max_len is 9; expected None: EngineOptions(long_lora_scaling_factors"),
        "lora_local_path": ("/x", "lora_local_path is '/x'; expected None or '': give lora_path"),
    }
    assert refused.keys() == fields
    for name, (value, said) in refused.items():
        with pytest.raises(AdapterError) as raised:
            LoRARequest(**{"lora_name": "poet", "lora_int_id": 1, name: value})
        assert said in str(raised.value)


def test_an_unknown_field_of_another_class_is_refused() -> None:
    from adaptrt.runtime.lora_request import LoRARequest as Request

    given = SimpleNamespace(lora_name="poet", lora_int_id=1, lora_path="/x", newest=None)
    assert Request.of(given) == adaptrt.LoRARequest("poet", 1, "/x")
    given.newest = "?"
    with pytest.raises(AdapterError, match="LoRARequest: newest is '\\?'; expected no value: the field is unknown"):
        Request.of(given)
