"""Conversations through the chat templates of a model and its adapters, in Python and at the terminal."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer

import adaptrt
from adaptrt.builder.model_cache.options import EngineOptions
from adaptrt.builder.model_cache.store import EngineCache
from adaptrt.formats.engine.engine_config import EngineConfig
from support.models import ModelSpec, save_adapter, save_model
from support.serving import LORA_MODULES, run_command
from support.tokenizers import byte_level, save_tokenizer

SPEC = ModelSpec(vocab_size=300)
TEMPLATE = "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
OWN = (
    "{% if messages|length > 3 %}{{ raise_exception('too long') }}{% endif %}{{ bos_token }}{{ messages[-1].content }}!"
)
QUESTION = [{"role": "user", "content": "hello €"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = save_model(SPEC, tmp_path_factory.mktemp("chat") / "model")
    save_tokenizer(byte_level(), directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    (directory / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return directory


@pytest.fixture(scope="module")
def engine(model: Path) -> Path:
    plain = save_adapter(model, model.parent / "plain", 1, r=4)
    own = save_adapter(model, model.parent / "own", 2, r=4)
    (own / "chat_template.jinja").write_text(OWN)
    (own / "README.md").write_text("not copied")
    checkpoint, engine = model.parent / "checkpoint", model.parent / "engine"
    run_command("convert-checkpoint", "--model_dir", model, "--output_dir", checkpoint)
    run_command(
        "build", "--checkpoint_dir", checkpoint, "--output_dir", engine, "--max_batch_size", 8, "--max_seq_len", 512,
        "--max_num_tokens", 512, "--lora_plugin", "auto", "--lora_dir", plain, own, "--lora_target_modules",
        *LORA_MODULES,
    )  # fmt: skip
    return engine


@pytest.fixture(scope="module")
def llm(engine: Path) -> Iterator[adaptrt.LLM]:
    with adaptrt.LLM(engine) as made:
        yield made


@pytest.mark.parametrize(
    ("lora", "prompt"),
    [
        (None, "<s><|im_start|>user hello €<|im_end|>"),
        ("plain", "<s><|im_start|>user hello €<|im_end|>"),
        ("own", "<s>hello €!"),
    ],
)
def test_a_chat_is_the_completion_of_its_template(llm: adaptrt.LLM, lora: str | None, prompt: str) -> None:
    expected = llm.generate(prompt, lora=lora, max_tokens=12)
    assert len(expected.token_ids) == 12
    assert llm.chat(QUESTION, lora=lora, max_tokens=12) == expected
    drawn = adaptrt.SamplingConfig(top_k=5, seed=3)
    several = llm.generate(prompt, lora=lora, max_tokens=12, sampling_config=drawn, n=3)
    assert llm.chat(QUESTION, lora=lora, max_tokens=12, sampling_config=drawn, n=3) == several
    both = llm.chat([QUESTION, QUESTION], lora=[None, lora], max_tokens=12)
    assert both == [llm.chat(QUESTION, max_tokens=12), expected]
    params = adaptrt.SamplingParams(temperature=0, max_tokens=12)
    assert llm.chat([QUESTION], [params], lora=lora) == [expected]
    stream = llm.chat_stream(QUESTION, lora=lora, max_tokens=12)
    assert stream.finish_reason is adaptrt.FinishReason.NOT_FINISHED
    assert "".join(stream) == expected.text
    assert stream.finish_reason is adaptrt.FinishReason.LENGTH


def test_a_tokenizers_own_first_token_is_not_doubled(engine: Path, tmp_path: Path) -> None:
    """generate() starts with the token that the tokenizer adds; a chat template already contains it."""
    from tokenizers import processors

    tokenizer = Tokenizer.from_file(str(engine / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        shutil.copyfile(engine / name, tmp_path / name)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with adaptrt.LLM(engine, tokenizer=tmp_path) as llm:
        without_it = "<|im_start|>user hello €<|im_end|>"
        assert llm.chat(QUESTION, max_tokens=12) == llm.generate(without_it, max_tokens=12)


def test_an_adapters_own_template_raises_its_own_errors(llm: adaptrt.LLM) -> None:
    with pytest.raises(adaptrt.RequestError, match=r"lora/1/chat_template\.jinja: .*too long"):
        llm.chat(QUESTION * 4, lora="own")
    llm.chat(QUESTION * 4, lora="plain", max_tokens=1)
    with pytest.raises(adaptrt.AdapterError, match="no adapter named 'none'"):
        llm.chat(QUESTION, lora="none")
    with pytest.raises(adaptrt.RequestError, match="messages is empty"):
        llm.chat_stream([])
    assert llm.executor.get_num_responses_ready() == 0


def test_an_adapters_template_is_part_of_its_checksum(engine: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(engine, tmp_path / "engine"))
    place = copied / "lora" / "1"
    assert {path.name for path in place.iterdir()} == {
        "adapter_config.json", "adapter_model.safetensors", "chat_template.jinja",
    }  # fmt: skip
    (place / "chat_template.jinja").write_text("another")
    with adaptrt.LLM(copied) as llm, pytest.raises(adaptrt.EngineError, match="'own' was changed after the build"):
        llm.chat(QUESTION, lora="own")


def test_without_a_template_there_is_no_chat(engine: Path, tmp_path: Path) -> None:
    shutil.copyfile(engine / "tokenizer.json", tmp_path / "tokenizer.json")
    with adaptrt.LLM(engine, tokenizer=tmp_path) as llm:
        with pytest.raises(adaptrt.ConfigError, match="has no chat template"):
            llm.chat(QUESTION)
        assert llm.generate("hello", max_tokens=2).token_ids


def test_stop_strings_end_a_completion(llm: adaptrt.LLM) -> None:
    whole = llm.generate(["hello", "€"], max_tokens=24)
    for number, prompt in enumerate(["hello", "€"]):
        text = whole[number].text
        stop = next(text[i : i + 2] for i in range(6, len(text)) if "\ufffd" not in text[i : i + 2])
        cut = llm.generate(prompt, max_tokens=24, stop=[stop, "never in there"])
        assert cut.text == text[: text.index(stop)]
        assert cut.finish_reason is adaptrt.FinishReason.STOP_WORDS
        assert cut.token_ids == whole[number].token_ids[: len(cut.token_ids)]
        assert len(cut.token_ids) < 24
        stream = llm.stream(prompt, max_tokens=24, stop=[stop])
        assert "".join(stream) == cut.text
        assert stream.finish_reason is adaptrt.FinishReason.STOP_WORDS
    assert llm.generate(["hello", "€"], max_tokens=24, stop=["never in there"]) == whole
    with pytest.raises(adaptrt.RequestError, match=r"stop\[0\] is ''; expected"):
        llm.generate("hello", stop=[""])
    # A request that was left running would have produced responses by the time that this one ends.
    llm.generate("hello", max_tokens=64)
    assert llm.executor.get_num_responses_ready() == 0


def test_a_model_directory_is_built_on_first_use(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    options = EngineOptions(max_seq_len=256, max_num_tokens=256)
    with adaptrt.LLM(str(model), engine_options=options) as llm:
        first = llm.chat(QUESTION, max_tokens=8)
        assert llm.executor.engine.config.build_config.max_seq_len == 256
    assert "Packing" in capfd.readouterr().err
    with adaptrt.LLM(model, engine_options=options) as llm:
        assert llm.chat(QUESTION, max_tokens=8) == first
        assert len(EngineCache().entries()) == 1
    assert capfd.readouterr().err == ""


def chat(*arguments: object, lines: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "adaptrt.builder.cli", "chat", *map(str, arguments)],
        input=lines,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONIOENCODING": "utf-8", **environment},
    )


def shown(text: str) -> str:
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def test_a_conversation_at_the_terminal(llm: adaptrt.LLM, engine: Path) -> None:
    lines = "hello|and?|/lora own|hello|/lora|/reset|hello|/loras|/nothing|//x|/exit|y".replace("|", "\n")
    done = chat(engine, "--max_tokens", 6, "--system", "Be.", lines=lines)
    assert done.returncode == 0, done.stderr
    messages = [{"role": "system", "content": "Be."}]

    def answer(text: str, lora: str | None) -> str:
        messages.append({"role": "user", "content": text})
        said = llm.chat(messages, lora=lora, max_tokens=6).text
        messages.append({"role": "assistant", "content": said})
        return shown(said) + " [the limit of 6 tokens]\n"

    expected = answer("hello", None) + answer("and?", None)
    expected += f"error: {engine / 'lora' / '1' / 'chat_template.jinja'}: the messages cannot be rendered: too long\n"
    del messages[1:]
    expected += answer("hello", None)
    expected += "plain, own\nerror: unknown command /nothing; commands: /lora, /loras, /system, /reset, /help, /exit\n"
    expected += answer("/x", None)
    assert done.stdout == expected
    assert done.stderr == ""


def test_a_chat_samples_as_its_model_recommends(engine: Path, tmp_path: Path) -> None:
    own = tmp_path / "engine"
    shutil.copytree(engine, own)
    (own / "generation_config.json").write_text('{"temperature": 2.0, "top_k": 1}')
    greedy, drawn = (chat(own, "--max_tokens", 8, *flags, lines="hello\n").stdout for flags in ((), ("--top_k", 50)))
    assert greedy == chat(engine, "--max_tokens", 8, lines="hello\n").stdout
    assert drawn != greedy
    assert chat(own, "--max_tokens", 8, "--generation_config", "vllm", lines="hello\n").stdout == greedy
    (own / "generation_config.json").write_text('{"temperature": 0.0, "repetition_penalty": 9.0}')
    penalised = [chat(own, "--max_tokens", 8, *flags, lines="hello\n").stdout for flags in ((), ("--temperature", 0))]
    assert penalised[0] == penalised[1] != greedy


def test_the_terminals_mistakes_are_said_before_the_chat(engine: Path, model: Path, tmp_path: Path) -> None:
    for flags, expected in (
        (["--lora", "none"], "has no adapter named 'none'"),
        (["--max_batch_size", "3"], "max_batch_size would have no effect"),
        (["--top_k", "3"], "top_k: without a temperature above 0"),
        (["--temperature", "-1"], "temperature is -1.0"),
    ):
        done = chat(engine, *flags, lines="hello\n")
        assert (done.returncode, done.stdout) == (2, "")
        assert expected in done.stderr
        assert done.stderr.count("\n") == 1
    small = ["--max_seq_len", 64, "--max_tokens", 2]
    done = chat(model, *small, lines="hello\n" + "x" * 100, XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 0
    assert done.stdout.count("[the limit of 2 tokens]") == 1
    assert "error: " in done.stdout
    assert "64" in done.stdout


def test_carried_adapters_of_old_engines_are_still_what_they_were(engine: Path) -> None:
    """An adapter without chat files keeps the checksum from before engines copied those files."""
    import xxhash

    digest = xxhash.xxh3_128()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        content = (engine / "lora" / "0" / name).read_bytes()
        digest.update(f"{name}:{len(content)}\n".encode() + content)
    assert EngineConfig.load(engine).adapter_checksums[0] == digest.hexdigest()
