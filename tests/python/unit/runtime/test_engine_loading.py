"""Loading engine directories: a built engine loads unchanged, and anything else is rejected with path and reason."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptrt._core import AdapterError, DType, EngineError, LinearOp, dtype_name
from adaptrt.builder.build import build
from adaptrt.builder.conversion.checkpoint import Checkpoint
from adaptrt.formats.adapter.adapter_copy import adapter_checksum, adapter_digests
from adaptrt.formats.adapter.names import MODULES
from adaptrt.formats.engine.build_config import LoraBuildConfig, PluginConfig
from adaptrt.formats.engine.engine_file import FORMAT_VERSION, EngineFile, EngineTensor, write_engine_file
from adaptrt.formats.engine.plan_json import program_from_json, program_to_json
from adaptrt.runtime import adapter_store, adapter_tokenizers
from adaptrt.runtime.adapter_store import AdapterStore
from adaptrt.runtime.engine import load_engine
from adaptrt.runtime.named_adapter import NamedAdapter
from support.engines import SMALL, make_checkpoint, make_engine
from support.models import ModelSpec, save_adapter
from support.opened import opens_of
from support.tokenizers import byte_level, save_tokenizer

WITH_LORA = replace(SMALL, plugin_config=PluginConfig(lora_plugin="auto", dora_plugin="enable"))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("engine")
    make_engine(ModelSpec(num_hidden_layers=1), directory, WITH_LORA)
    return directory / "engine"


@pytest.fixture
def engine(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "engine"))


def test_the_program_is_what_was_built(built: Path) -> None:
    engine = load_engine(built)
    program = engine.program
    assert (program.vocab_size, program.num_layers, program.max_batch_size) == (61, 1, 8)
    assert (program.max_seq_len, program.max_input_len, program.tokens_per_block) == (96, 96, 4)
    assert program.lora.max_rank == 64
    assert program.lora.dora_enabled
    assert program.lora.target_modules == [1, 2, 3, 4, 5, 6, 7, 26, 27]
    assert program.lora.dtype is program.dtype is DType.FLOAT32
    assert engine.config.pretrained_config.architecture == "LlamaForCausalLM"
    assert engine.adapters == {}


def test_a_native_engine_runs_without_what_others_need(built: Path) -> None:
    code = (
        "import sys, adaptrt\n"
        "adaptrt.Executor(sys.argv[1]).shutdown()\n"
        "models = 'adaptrt.formats.models'\n"
        "assert f'{models}.llama' in sys.modules\n"
        "others = ('onnx', 'torch', 'rich', 'tensorrt', 'tensorrt_rtx', 'adaptrt._cuda', f'{models}.mistral')\n"
        "print([name for name in others if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, built], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("dtype", list(DType))
def test_packed_weights_are_the_checkpoints(dtype: DType, tmp_path: Path) -> None:
    """Compares rows of every linear layer, unpacked by C++, with the checkpoint's tensors; all dtypes, odd sizes."""
    make_engine(ModelSpec(num_hidden_layers=1, hidden_size=69, intermediate_size=131), tmp_path, dtype=dtype)
    reader = Checkpoint.open(tmp_path / "checkpoint").ranks[0].reader
    engine = load_engine(tmp_path / "engine")  # keeps the mapping alive
    linears = [op for op in engine.program.body if isinstance(op, LinearOp)]
    names = ("attention.qkv", "attention.dense", "mlp.fc", "mlp.gate", "mlp.proj")
    expected = [reader.array(f"transformer.layers.0.{name}.weight").astype(np.float32) for name in names]
    parts = [part.weight for op in linears for part in op.parts]
    assert [weight.n for weight in parts] == [36, 12, 12, 69, 131, 131, 69]
    actual = [weight.rows(0, weight.n) for weight in parts]
    np.testing.assert_array_equal(np.concatenate(actual[:3]), expected[0])
    for got, wanted in zip(actual[3:], expected[1:], strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_anyones_safetensors_reads_the_engine_file(built: Path) -> None:
    from safetensors import safe_open

    with safe_open(built / "rank0.engine", framework="np") as file:
        program = json.loads(file.metadata()["program"])
        assert {"embedding", "linear", "attention"} <= {op["op"] for op in program["body"]}
        assert file.get_tensor("transformer.ln_f.weight").shape == (36,)


def test_the_weights_are_mapped_at_aligned_places(built: Path) -> None:
    storage = load_engine(built).storage
    for array in storage.tensors.values():
        assert array.ctypes.data % 64 == 0
        assert not array.flags.writeable
        assert not array.flags.owndata


def test_a_tied_head_is_stored_once(tmp_path: Path) -> None:
    spec = ModelSpec(num_hidden_layers=1, vocab_size=1000)
    tied = make_engine(replace(spec, tie_word_embeddings=True), tmp_path / "tied")
    apart = make_engine(spec, tmp_path / "apart")
    assert apart.engine_bytes - tied.engine_bytes >= 1000 * 36 * 4


def test_programs_survive_json(built: Path) -> None:
    program = load_engine(built).storage.program
    assert program_from_json(json.loads(json.dumps(program_to_json(program))), "test") == program


@pytest.mark.parametrize("arena_bytes", [(1 << 62) - 1, -(1 << 62) + 1])
def test_sizes_are_read_up_to_the_limit(built: Path, arena_bytes: int) -> None:
    program = replace(load_engine(built).storage.program, arena_bytes=arena_bytes)
    assert program_from_json(program_to_json(program), "test") == program


def test_an_engine_can_be_moved_and_replaced(engine: Path, tmp_path: Path) -> None:
    shutil.move(engine, tmp_path / "elsewhere")
    assert load_engine(tmp_path / "elsewhere").program.vocab_size == 61


@pytest.mark.parametrize("missing", ["config.json", "rank0.engine"])
def test_an_incomplete_directory_is_refused(engine: Path, missing: str) -> None:
    (engine / missing).unlink()
    with pytest.raises(EngineError, match=missing):
        load_engine(engine)


def test_other_directories_are_refused(engine: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="nowhere: File does not exist; accepted: the directory of an engine"):
        load_engine(tmp_path / "nowhere")
    shutil.copy(engine / "rank0.engine", engine / "config.json")
    with pytest.raises(EngineError, match="config"):
        load_engine(engine)


def test_a_checkpoint_directory_is_refused(tmp_path: Path) -> None:
    make_engine(ModelSpec(num_hidden_layers=1), tmp_path)
    with pytest.raises(EngineError, match="not the config of an engine"):
        load_engine(tmp_path / "checkpoint")


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_no_altered_byte_of_the_engine_file_goes_unnoticed(built: Path, data: st.DataObject) -> None:
    original = (built / "rank0.engine").read_bytes()
    # Half of the positions are in the header, where more can go wrong.
    header = 8 + int.from_bytes(original[:8], "little")
    position = data.draw(st.one_of(st.integers(0, header), st.integers(0, len(original) - 1)))
    flipped = original[position] ^ data.draw(st.integers(1, 255))
    _assert_refused(built, original[:position] + bytes([flipped]) + original[position + 1 :])


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_truncated_or_extended_engine_file_is_refused(built: Path, data: st.DataObject) -> None:
    original = (built / "rank0.engine").read_bytes()
    end = data.draw(st.integers(0, len(original) - 1))
    _assert_refused(built, original[:end])
    _assert_refused(built, original + original[end:])


def _assert_refused(built: Path, content: bytes) -> None:
    path = built / "altered.engine"
    path.write_bytes(content)
    checksum = json.loads((built / "config.json").read_text())["engine_checksum"]
    try:
        with pytest.raises(EngineError) as refusal:
            EngineFile(path, checksum)
    finally:
        path.unlink()
    assert str(path) in str(refusal.value)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_altered_value_of_config_json_goes_unnoticed(built: Path, data: st.DataObject) -> None:
    original = (built / "config.json").read_bytes()
    position = data.draw(st.integers(0, len(original) - 1))
    altered = bytearray(original)
    altered[position] ^= data.draw(st.integers(1, 255))
    try:
        same = json.loads(altered) == json.loads(original)
    except ValueError:
        same = False
    (built / "config.json").write_bytes(altered)
    try:
        if same:  # white space
            load_engine(built)
        else:
            with pytest.raises(EngineError, match=r"config\.json"):
                load_engine(built)
    finally:
        (built / "config.json").write_bytes(original)


def rewrite_config(engine: Path, change: Callable[[dict], None]) -> None:
    """Changes config.json and its checksum."""
    config = json.loads((engine / "config.json").read_text())
    del config["checksum"]
    change(config)
    text = json.dumps(config, sort_keys=True, separators=(",", ":"))
    config["checksum"] = xxhash.xxh3_64_hexdigest(text.encode())
    (engine / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda c: c.update(format_version=4), "format_version 4"),
        (lambda c: c.update(extra=1), "extra is unknown"),
        (
            lambda c: c["build_config"].update(max_batch_size=9),
            "max_batch_size is 9 in config.json and 8 in the engine file",
        ),
        (lambda c: c["build_config"].update(max_batch_size="9"), "expected an integer"),
        (lambda c: c["build_config"].pop("plugin_config"), "plugin_config is missing"),
        (lambda c: c["build_config"]["lora_config"].update(max_lora_rank=65), "max_lora_rank is 65"),
        (lambda c: c["pretrained_config"].update(vocab_size=62), "vocab_size is 62"),
        (lambda c: c["pretrained_config"].update(hidden_act="tanh"), "hidden_act"),
        (lambda c: c.update(pretrained_config=None), "pretrained_config"),
        (lambda c: c.update(engine_checksum="0" * 32), "rank0.engine"),
        (
            lambda c: (
                c["build_config"]["lora_config"].update(lora_dir=["../../etc"], adapter_names=["x"]),
                c.update(adapter_checksums=["0"]),
            ),
            "adapter 'x' is not at lora/0",
        ),
        (
            lambda c: c["build_config"]["lora_config"].update(adapter_names=["x"]),
            "0 directories of adapters for 1 different names and 0 checksums",
        ),
        (lambda c: c.update(adapter_checksums=[1]), "expected a list of strings"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(engine: Path, change, complaint: str) -> None:
    rewrite_config(engine, change)
    with pytest.raises(EngineError, match=complaint) as refusal:
        load_engine(engine)
    assert str(engine) in str(refusal.value)


def reseal(engine: Path, change: Callable[[dict], None], version: int = FORMAT_VERSION) -> None:
    """Rewrites the engine file with a changed program and valid checksums, as an attacker would."""
    checksum = json.loads((engine / "config.json").read_text())["engine_checksum"]
    storage = EngineFile(engine / "rank0.engine", checksum)
    tensors = [
        EngineTensor(name, array.dtype, array.size, lambda array=array: iter([array.copy()]))
        for name, array in storage.tensors.items()
    ]
    program = program_to_json(storage.program)
    change(program)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("adaptrt.formats.engine.engine_file.program_to_json", lambda _: program)
        patch.setattr("adaptrt.formats.engine.engine_file.FORMAT_VERSION", version)
        checksum = write_engine_file(engine / "rank0.engine", storage.program, tensors, lambda num_bytes: None)
    rewrite_config(engine, lambda config: config.update(engine_checksum=checksum))


def first(program: dict, op: str) -> dict:
    return next(item for item in program["body"] if item["op"] == op)


def linear_weight(program: dict) -> dict:
    return first(program, "linear")["parts"][0]["weight"]


W8A16 = {"algo": "w8a16", "group_size": 0, "zero_points": False}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda p: p.update(extra=1), "program.extra is unknown"),
        (lambda p: p.pop("logits"), "program.logits is missing"),
        (lambda p: p["body"].append({"op": "exec", "code": "x"}), "'op' is one of"),
        (lambda p: p["body"].append(7), "'op' is one of"),
        (lambda p: first(p, "linear").pop("epilogue"), "epilogue is missing"),
        (lambda p: first(p, "linear").update(epilogue="explode"), "expected one of store, add, silu_mul"),
        (lambda p: first(p, "linear").update(input="nowhere"), "no buffer 'nowhere'"),
        (lambda p: first(p, "linear").update(lora_site=99), "lora_site"),
        (lambda p: first(p, "linear").update(lora_site=1 << 40), "rank0.engine"),
        (lambda p: first(p, "rms_norm").update(epsilon=float("nan")), "finite"),
        (lambda p: first(p, "rms_norm").update(epsilon=1e300), "finite"),
        (lambda p: first(p, "rms_norm").update(gather_logit_rows=1), "true or false"),
        (lambda p: first(p, "embedding")["table"].update(n=1 << 61), "impossible"),
        (lambda p: first(p, "embedding")["table"].update(n=-1), "impossible"),
        (lambda p: first(p, "embedding")["table"].update(n=62), "holds"),
        (lambda p: first(p, "embedding")["table"].update(tensor="transformer.ln_f.weight"), "holds"),
        (lambda p: first(p, "embedding")["table"].update(tensor="x"), "no tensor 'x'"),
        (lambda p: first(p, "embedding")["table"].update(exceptions=0), "cannot be compressed"),
        (lambda p: linear_weight(p).update(exceptions=-1), "rank0.engine"),
        (lambda p: linear_weight(p).update(exceptions=1 << 40), "rank0.engine"),
        (lambda p: linear_weight(p).update(exceptions="few"), "an integer"),
        (
            lambda p: p["head"][-1]["parts"][0]["weight"].update(exceptions=0, quantization=W8A16),
            "both quantised and compressed",
        ),
        (lambda p: p.update(arena_bytes=64), "arena"),
        (lambda p: p.update(arena_bytes=1 << 62), "an integer"),
        (lambda p: p.update(arena_bytes=-(1 << 62)), "an integer"),
        (lambda p: p.update(arena_bytes=1 << 70), "an integer"),
        (lambda p: p.update(arena_bytes=-64), "rank0.engine"),
        (lambda p: p.update(num_layers=True), "an integer"),
        (lambda p: p.update(buffers=[*p["buffers"], p["buffers"][0]]), "one name"),
        (lambda p: p["buffers"][0].update(offset=0, width=1 << 40), "rank0.engine"),
        (lambda p: p["lora"]["sites"][0]["parts"][0].update(module=77), "77"),
        (lambda p: p["lora"].update(target_modules="all"), "a list"),
        (lambda p: next(op for op in p["body"] if op["op"] == "attention")["shape"].update(head_dim=0), "rank0.engine"),
        (lambda p: p.update(int8_kv_cache=True), "int8_kv_cache is False in config.json and True in the engine file"),
        (lambda p: p.update(int8_kv_cache=1), "true or false"),
    ],
)
def test_a_hostile_program_is_refused(engine: Path, change, complaint: str) -> None:
    reseal(engine, change)
    with pytest.raises(EngineError, match=complaint) as refusal:
        load_engine(engine)
    assert str(engine) in str(refusal.value)


def test_another_format_version_is_refused(engine: Path) -> None:
    reseal(engine, lambda program: None)
    load_engine(engine)
    reseal(engine, lambda program: None, version=1)
    with pytest.raises(EngineError, match=f"format version '1', this release reads {FORMAT_VERSION}"):
        load_engine(engine)


def test_adapters_travel_with_the_engine(tmp_path: Path) -> None:
    make_engine(ModelSpec(num_hidden_layers=1), tmp_path, WITH_LORA)
    adapters = [save_adapter(tmp_path / "model", tmp_path / name, 1, r=2) for name in ("pirate", "poet")]
    config = replace(WITH_LORA, lora_config=LoraBuildConfig(lora_dir=tuple(adapters), max_lora_rank=4))
    build(tmp_path / "checkpoint", config, tmp_path / "engine")
    for adapter in adapters:
        shutil.rmtree(adapter)
    engine = load_engine(tmp_path / "engine")
    assert list(engine.adapters) == ["pirate", "poet"]
    assert engine.config.build_config.lora_config.lora_target_modules == tuple(
        name for name in MODULES if name in ("attn_q", "attn_k", "attn_v", "attn_dense", "mlp_h_to_4h",
                                             "mlp_4h_to_h", "mlp_gate")
    )  # fmt: skip
    for directory in engine.adapters.values():
        names = {entry.name for entry in directory.iterdir()}
        assert names == {"adapter_config.json", "adapter_model.safetensors"}
    shutil.rmtree(tmp_path / "engine" / "lora" / "1")
    with pytest.raises(EngineError, match="poet"):
        load_engine(tmp_path / "engine")


def test_adapters_are_found_after_a_change_of_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(ModelSpec(num_hidden_layers=1), tmp_path)
    save_adapter(tmp_path / "model", tmp_path / "adapter", 0, r=2)
    build(
        tmp_path / "checkpoint", replace(WITH_LORA, lora_config=LoraBuildConfig(lora_dir=(tmp_path / "adapter",))),
        tmp_path / "engine",
    )  # fmt: skip
    monkeypatch.chdir(tmp_path)
    engine = load_engine("engine")
    monkeypatch.chdir("/")
    assert (engine.adapters["adapter"] / "adapter_config.json").is_file()


def test_dtype_names_are_those_of_the_table(built: Path) -> None:
    program = program_to_json(load_engine(built).storage.program)
    assert program["dtype"] == dtype_name(DType.FLOAT32)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_an_adapter_that_was_changed_after_the_build_is_refused(tmp_path: Path, name: str) -> None:
    make_checkpoint(ModelSpec(num_hidden_layers=1), tmp_path)
    save_adapter(tmp_path / "model", tmp_path / "poet", 0, r=2)
    config = replace(WITH_LORA, lora_config=LoraBuildConfig(lora_dir=(tmp_path / "poet",)))
    build(tmp_path / "checkpoint", config, tmp_path / "engine")
    store = AdapterStore(load_engine(tmp_path / "engine"))
    store.load("poet")
    path = tmp_path / "engine" / "lora" / "0" / name
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(EngineError, match=r"lora/0: adapter 'poet' was changed after the build"):
        store.load("poet")
    path.unlink()
    with pytest.raises(EngineError, match=f"adapter 'poet' cannot be read: .*{name}"):
        store.load("poet")
    path.write_bytes(content)
    store.load("poet")


@pytest.mark.parametrize(("step", "name"), [("digests_of", None), ("check_unchanged", "poet"),
                                           ("check_unchanged", "poet:0.5")])  # fmt: skip
def test_weights_are_read_from_the_version_that_was_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, name: str | None
) -> None:
    make_checkpoint(ModelSpec(num_hidden_layers=1), tmp_path)
    adapter = save_adapter(tmp_path / "model", tmp_path / "poet", 0, r=2)
    config = replace(WITH_LORA, lora_config=LoraBuildConfig(lora_dir=(adapter,)))
    build(tmp_path / "checkpoint", config, tmp_path / "engine")
    store = AdapterStore(load_engine(tmp_path / "engine"))
    compare = getattr(adapter_store, step)

    def compare_and_change(*arguments: Any) -> Any:
        found = compare(*arguments)
        for directory in (adapter, tmp_path / "engine" / "lora" / "0"):
            os.utime(directory / "adapter_config.json", ns=(0, 0))
        return found

    def read() -> object:
        return store.read("other", adapter, replace=False) if name is None else store.load(name)

    read()
    monkeypatch.setattr(adapter_store, step, compare_and_change)
    with pytest.raises(AdapterError, match="the adapter's files were changed while they were read"):
        read()


def test_an_adapter_is_converted_while_its_digests_are_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(ModelSpec(num_hidden_layers=1), tmp_path)
    build(tmp_path / "checkpoint", WITH_LORA, tmp_path / "engine")
    store = AdapterStore(load_engine(tmp_path / "engine"))
    directory = save_adapter(tmp_path / "model", tmp_path / "poet", 0, r=2)
    is_converted = threading.Event()
    convert, digest = adapter_store.adapter_of_directory, adapter_store.digests_of

    def convert_and_say(*arguments: Any) -> Any:
        converted = convert(*arguments)
        is_converted.set()
        return converted

    def digest_afterwards(*arguments: Any) -> Any:
        assert is_converted.wait(60)
        return digest(*arguments)

    monkeypatch.setattr(adapter_store, "adapter_of_directory", convert_and_say)
    monkeypatch.setattr(adapter_store, "digests_of", digest_afterwards)
    with opens_of(directory / "adapter_model.safetensors") as opened:
        adapter, _ = store.read("poet", directory, replace=False)
    assert len(opened) == 3  # for both digests, to see that it is no pointer of Git LFS, and for the tensors
    assert (adapter.checksum, adapter.facts.digest) == (adapter_checksum(directory), adapter_digests(directory)[1])


def test_a_tokenizer_and_what_is_told_of_it_are_one_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "adapter").mkdir()
    for directory in (tmp_path, tmp_path / "adapter"):
        save_tokenizer(byte_level(), directory)
    adapter = NamedAdapter("own", 1 << 63, tmp_path / "adapter", "")
    store: Any = types.SimpleNamespace(find=lambda _: adapter, get=lambda _: adapter)
    of_model = adapter_tokenizers.read_tokenizer(tmp_path / "tokenizer.json", (1,))
    tokenizers = adapter_tokenizers.Tokenizers(of_model, store)
    find = adapter_tokenizers.special_tokens

    def find_and_change(directory: Path) -> dict[str, str]:
        os.utime(directory / "tokenizer.json", ns=(0, 0))
        return find(directory)

    monkeypatch.setattr(adapter_tokenizers, "special_tokens", find_and_change)
    with pytest.raises(AdapterError, match="the adapter's files were changed while they were read"):
        tokenizers.of("own")
    assert tokenizers.of("own").end_ids == (1,)


@pytest.mark.parametrize("has_own", [False, True])
def test_an_adapters_tokenizer_is_looked_up_once(tmp_path: Path, has_own: bool) -> None:
    (tmp_path / "adapter").mkdir()
    for directory in (tmp_path, *([tmp_path / "adapter"] if has_own else [])):
        save_tokenizer(byte_level(), directory)
    adapter = NamedAdapter("it", 1 << 63, tmp_path / "adapter", "")
    store: Any = types.SimpleNamespace(find=lambda _: adapter, get=lambda _: adapter)
    of_model = adapter_tokenizers.read_tokenizer(tmp_path / "tokenizer.json", (1,))
    tokenizers = adapter_tokenizers.Tokenizers(of_model, store)
    assert tokenizers.known("it") is None
    found = tokenizers.of("it")
    assert (found is of_model) == (not has_own)
    assert found.vocabulary is of_model.vocabulary
    shutil.rmtree(tmp_path / "adapter")
    assert tokenizers.known("it") is found
