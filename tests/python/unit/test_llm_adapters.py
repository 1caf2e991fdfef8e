"""LLM loads, lists and unloads adapters: from directories, PEFT models and state dicts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import peft
import pytest
import transformers
from safetensors.numpy import load_file, save_file

import adaptrt
from adaptrt import AdapterError, LoraTensors
from adaptrt.formats.sources import Source
from adaptrt.runtime import executor as executor_module
from adaptrt.runtime import unnamed_adapters
from adaptrt.runtime.llm_adapters import Lora
from adaptrt.runtime.text_requests import TextRequests
from support.models import ModelSpec, save_adapter, save_model
from support.serving import build_engine
from support.tokenizers import byte_level, save_tokenizer

SPEC = ModelSpec(vocab_size=272)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = save_model(SPEC, tmp_path_factory.mktemp("llm") / "model")
    save_tokenizer(byte_level(), made)
    return made


@pytest.fixture(scope="module")
def adapter(model: Path) -> Path:
    return save_adapter(model, model.parent / "other", 1, r=4)


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[adaptrt.LLM]:
    first = save_adapter(model, model.parent / "first", 0, r=4)
    with adaptrt.LLM(build_engine(model, model.parent, lora_dir=first)) as made:
        yield made


@pytest.fixture
def trained(model: Path, adapter: Path) -> peft.PeftModel:
    base = transformers.AutoModelForCausalLM.from_pretrained(model)
    return peft.PeftModel.from_pretrained(base, adapter, adapter_name="tuned")


def scored(llm: adaptrt.LLM, lora: Lora | None) -> adaptrt.Completion:
    params = adaptrt.SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=3, prompt_logprobs=3)
    made: adaptrt.Completion = llm.generate("hello", params, lora=lora)
    return made


def results(llm: adaptrt.LLM, lora: Lora | None) -> tuple[object, ...]:
    made = scored(llm, lora)
    return made.token_ids, made.log_probs, made.prompt_log_probs


def test_an_adapter_in_memory_equals_its_directory(llm: adaptrt.LLM, adapter: Path, trained: peft.PeftModel) -> None:
    llm.load_lora("directory", adapter)
    llm.load_lora("model", trained)
    state = peft.get_peft_model_state_dict(trained, adapter_name="tuned")
    llm.load_lora("state", state, config=trained.peft_config["tuned"])
    fields = json.loads((adapter / "adapter_config.json").read_text())
    llm.load_lora("arrays", load_file(adapter / "adapter_model.safetensors"), config=fields)
    expected = results(llm, "directory")
    assert expected != results(llm, None)
    names = ["directory", "model", "state", "arrays"]
    assert [results(llm, name) == expected for name in names] == [True] * 4
    tensors = [llm.executor.adapters.load(name) for name in names]
    for made in tensors[1:]:
        assert made.weights.tobytes() == tensors[0].weights.tobytes()
        assert made.config.tobytes() == tensors[0].config.tobytes()
    assert llm.list_loras() == ["first", *names]
    directories = [llm.executor.adapters.get(name).directory for name in names]
    for name in names:
        llm.unload_lora(name)
    assert llm.list_loras() == ["first"]
    assert [path.exists() for path in directories] == [True, False, False, False]
    with pytest.raises(AdapterError, match="has no adapter named 'model'"):
        llm.unload_lora("model")


def test_a_model_is_read_again_where_it_replaces(llm: adaptrt.LLM, trained: peft.PeftModel) -> None:
    first = llm.load_lora("tuned", trained).directory
    before = results(llm, "tuned")
    with pytest.raises(AdapterError, match=r"adapter 'tuned' is .* already; replace it"):
        llm.load_lora("tuned", trained)
    for name, parameter in trained.named_parameters():
        if "lora_B" in name:
            parameter.data *= 8
    assert results(llm, "tuned") == before
    llm.load_lora("tuned", trained, replace=True)
    assert results(llm, "tuned") != before
    (old,) = llm.executor.adapters.list_old()
    assert results(llm, f"tuned@{str(old.facts.digest)[:8]}") == before
    llm.unload_lora("tuned")
    assert not first.exists()


def test_refused_adapters_leave_nothing_behind(llm: adaptrt.LLM, adapter: Path, trained: peft.PeftModel) -> None:
    state = load_file(adapter / "adapter_model.safetensors")
    fields = json.loads((adapter / "adapter_config.json").read_text())
    refused = [
        (state, None, "config is None; expected the fields of the adapter's adapter_config.json"),
        (state, {**fields, "peft_type": "OFT"}, 'peft_type = "OFT"'),
        ({**state, "odd.weight": next(iter(state.values()))}, fields, "odd.weight"),
        ({"a": 3}, fields, "tensor 'a' is 3; expected a tensor of torch or numpy"),
        (7, None, "an adapter is 7; expected its directory, a PeftModel"),
        (trained, fields, "config is given with a PeftModel, which has its own"),
        (adapter, fields, "config is given with a directory, which has its own"),
    ]
    for source, config, said in refused:
        with pytest.raises(AdapterError) as raised:
            llm.load_lora("bad", source, config=config)
        assert said in str(raised.value)
    assert llm.list_loras() == ["first"]
    root = llm.load_lora("good", trained).directory.parent
    assert [path.name for path in root.parent.iterdir()] == [root.name]
    llm.unload_lora("good")


def test_lora_is_a_name_or_a_path(llm: adaptrt.LLM, adapter: Path, tmp_path: Path) -> None:
    llm.load_lora("named", adapter)
    expected = results(llm, "named")
    for path in (adapter, str(adapter)):
        assert results(llm, path) == expected
        assert scored(llm, path).adapter == str(adapter)
        assert "".join(llm.stream("hello", lora=path)) == "".join(llm.stream("hello", lora="named"))
    assert llm.list_loras() == ["first", "named", str(adapter)]
    assert llm.generate(["a", "a"], lora=[adapter, "named"], max_tokens=3)[0].adapter == str(adapter)
    with pytest.raises(AdapterError, match="has no adapter named 'unknown'"):
        llm.generate("a", lora="unknown")
    with pytest.raises(adaptrt.EngineError, match=r"cannot be read: .*adapter_config\.json"):
        llm.generate("a", lora=tmp_path)
    odd: list[tuple[object, str]] = [
        (7, "lora is 7; expected the name or the path of an adapter, a LoRARequest, a PeftModel, or LoraTensors"),
        ({"a": 3}, r"lora is a dictionary; expected LoraTensors\(tensors, config\)"),
        (LoraTensors({"a": 3}, {}), "tensor 'a' is 3; expected a tensor of torch or numpy"),
        (LoraTensors({}, None), "config is None; expected the fields of the adapter's adapter_config.json"),
    ]
    for value, said in odd:
        with pytest.raises(AdapterError, match=said):
            llm.generate("a", lora=value)  # type: ignore[call-overload]
    for name in ("named", str(adapter)):
        llm.unload_lora(name)


def scaled(model: peft.PeftModel, factor: float) -> None:
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data *= factor


def in_memory(llm: adaptrt.LLM) -> list[str]:
    return [name for name in llm.list_loras() if name.startswith(unnamed_adapters.PREFIX)]


def test_lora_is_an_adapter_in_memory(llm: adaptrt.LLM, adapter: Path, trained: peft.PeftModel) -> None:
    llm.load_lora("directory", adapter)
    fields = json.loads((adapter / "adapter_config.json").read_text())
    tensors = LoraTensors(load_file(adapter / "adapter_model.safetensors"), fields)
    expected = results(llm, "directory")
    assert [results(llm, one) == expected for one in (trained, tensors)] == [True, True]
    text = llm.generate("hello", lora="directory").text
    assert "".join(llm.stream("hello", lora=trained)) == text
    answers = llm.generate(["hello", "hello", "hello"], lora=[tensors, None, "directory"])
    assert [answer.text for answer in answers] == [text, llm.generate("hello").text, text]
    assert answers[0].adapter in in_memory(llm)
    llm.load_lora("named", tensors)
    assert results(llm, "named") == expected
    for name in ("directory", "named", *in_memory(llm)):
        llm.unload_lora(name)
    assert results(llm, trained) == expected
    for name in in_memory(llm):
        llm.unload_lora(name)


def test_an_adapter_in_memory_is_used_as_it_is_at_the_call(llm: adaptrt.LLM, trained: peft.PeftModel) -> None:
    before = results(llm, trained)
    names = in_memory(llm)
    written = llm.executor.adapters.get(names[-1]).directory.parents
    root = next(path for path in written if path.name.startswith("adaptrt"))
    files = sorted(root.rglob("*"))
    assert results(llm, trained) == before
    assert in_memory(llm) == names
    assert sorted(root.rglob("*")) == files
    scaled(trained, 8)
    after = results(llm, trained)
    assert after != before
    scaled(trained, 1 / 8)
    assert results(llm, trained) == before
    assert len(in_memory(llm)) == len(names) + 1


def test_unused_adapters_in_memory_are_removed(
    llm: adaptrt.LLM, trained: peft.PeftModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unnamed_adapters, "_MAX_UNUSED", 1)
    stream = llm.stream("hello", adaptrt.SamplingParams(temperature=0, max_tokens=6), lora=trained)
    held = in_memory(llm)[-1]
    directories = []
    for _ in range(4):
        scaled(trained, 2)
        llm.generate("a", lora=trained, max_tokens=2)
        directories.append(llm.executor.adapters.get(in_memory(llm)[-1]).directory)
    assert held in in_memory(llm)
    assert len(in_memory(llm)) == 3  # the stream's adapter, the last call's, and an unused one
    assert [path.exists() for path in directories] == [False, False, True, True]
    scaled(trained, 1 / 16)
    assert "".join(stream) == llm.generate("hello", lora=trained, max_tokens=6).text
    del stream
    for name in in_memory(llm):
        llm.unload_lora(name)


def test_adapters_of_one_call_are_all_kept(llm: adaptrt.LLM, adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unnamed_adapters, "_MAX_UNUSED", 0)
    fields = json.loads((adapter / "adapter_config.json").read_text())
    state = load_file(adapter / "adapter_model.safetensors")
    several = [
        LoraTensors({name: tensor * factor if "lora_B" in name else tensor for name, tensor in state.items()}, fields)
        for factor in (1, 8, 64)
    ]
    together = llm.generate(["hello"] * 3, adaptrt.SamplingParams(temperature=0, logprobs=1), lora=several)
    alone = [llm.generate("hello", adaptrt.SamplingParams(temperature=0, logprobs=1), lora=one) for one in several]
    assert [one.log_probs for one in together] == [one.log_probs for one in alone]
    assert len({one.log_probs for one in together}) == 3
    llm.generate("a", lora=several[0], max_tokens=1)
    assert len(in_memory(llm)) == 1
    for name in in_memory(llm):
        llm.unload_lora(name)


def test_names_of_the_hub_are_downloaded(llm: adaptrt.LLM, adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def find(name: object) -> object:
        asked.append(name)
        return Source(str(name), adapter)

    monkeypatch.setattr(executor_module, "find_adapter", find)
    assert llm.generate("a", lora="someone/poet", max_tokens=2).adapter == "someone/poet"
    llm.generate(["a", "b"], lora="someone/poet", max_tokens=2)
    assert asked == ["someone/poet"]
    llm.unload_lora("someone/poet")


def test_a_shutdown_deletes_adapters_in_memory(llm: adaptrt.LLM, trained: peft.PeftModel) -> None:
    with adaptrt.LLM(llm.executor.engine.directory) as other:
        directory = other.load_lora("tuned", trained).directory
        assert directory.is_dir()
    assert not directory.parent.parent.exists()


def zeroed(adapter: Path, directory: Path, name: str) -> Path:
    """Copies an adapter, with zeros in its tensors that have `name` in theirs."""
    shutil.copytree(adapter, directory)
    path = directory / "adapter_model.safetensors"
    tensors = load_file(path)
    save_file({key: value * np.float32(name not in key) for key, value in tensors.items()}, path, {"format": "pt"})
    return directory


def test_adapters_that_change_nothing_are_refused(llm: adaptrt.LLM, adapter: Path, tmp_path: Path) -> None:
    for matrix in ("lora_A", "lora_B"):
        idle = zeroed(adapter, tmp_path / matrix, matrix)
        with pytest.raises(AdapterError, match=r"adapter 'idle' changes nothing: A or B is zero .* --allow_no_op"):
            llm.load_lora("idle", idle)
    one = zeroed(adapter, tmp_path / "one", "layers.0")  # the other layers change something
    llm.load_lora("one", one)
    llm.unload_lora("one")
    assert llm.list_loras() == ["first"]
    llm.executor.adapters.allows_no_op = True
    try:
        llm.load_lora("idle", idle)
        assert results(llm, "idle") == results(llm, None)
    finally:
        llm.executor.adapters.allows_no_op = False
        llm.unload_lora("idle")


def test_a_request_keeps_the_version_that_it_began_with(
    llm: adaptrt.LLM, model: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = (shutil.copytree(adapter, tmp_path / name) for name in ("old", "new"))
    (old / "chat_template.jinja").write_text("old {{ messages[0].content }}")
    (new / "chat_template.jinja").write_text("a new {{ messages[0].content }}")
    save_adapter(model, tmp_path / "other", 7, strength=3.0, r=4)
    shutil.copy(tmp_path / "other" / "adapter_model.safetensors", new)
    messages = [{"role": "user", "content": "hello"}]
    llm.load_lora("chat", old)
    expected = llm.chat(messages, lora="chat", max_tokens=8)
    ask = TextRequests.ask

    def swap_and_ask(*args: object, **named: object) -> object:
        llm.load_lora("chat", new, replace=True)
        return ask(*args, **named)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(TextRequests, "ask", swap_and_ask)
        swapped = llm.chat(messages, lora="chat", max_tokens=8)
    after = llm.chat(messages, lora="chat", max_tokens=8)
    assert (swapped, swapped.adapter) == (expected, "chat")
    assert after.prompt_token_ids != expected.prompt_token_ids
    assert after.token_ids != expected.token_ids
    llm.unload_lora("chat")
