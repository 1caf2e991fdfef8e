"""The shipped demo is small and complete, and answers everything it knows correctly, with every adapter."""

from __future__ import annotations

import json
import re
from pathlib import Path

import peft
import pytest
import torch
import transformers
from tokenizers import Tokenizer

import adaptrt
from adaptrt.tools import demo_corpus as corpus
from adaptrt.tools import demo_scenes as scenes
from adaptrt.tools.demo import main as demo
from support.serving import build_engine

DEMO = Path(__file__).parents[3] / "examples" / "demo"
MODEL = DEMO / "model"
SEEING = DEMO / "seeing"
ADAPTERS = {path.name: path for path in sorted((DEMO / "adapters").iterdir())}
MAX_BYTES = 5_000_000


def test_the_files_are_small() -> None:
    assert sum(path.stat().st_size for path in DEMO.rglob("*") if path.is_file()) < MAX_BYTES


def test_there_is_an_adapter_of_every_kind() -> None:
    configs = {name: json.loads((path / "adapter_config.json").read_text()) for name, path in ADAPTERS.items()}
    attention = {"q_proj", "k_proj", "v_proj", "o_proj"}
    plain = [c for c in configs.values() if not c["use_dora"] and not c["use_rslora"]]
    assert any(set(config["target_modules"]) <= attention for config in plain)
    assert any(len(config["target_modules"]) == 7 for config in plain)
    assert len({config["r"] for config in plain}) > 1
    assert any(config["use_rslora"] for config in configs.values())
    assert any(config["use_dora"] for config in configs.values())
    assert set(configs) == set(corpus.STYLES) - {"plain"}


def test_the_demo_runs(capsys, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    directories = ["--model", str(MODEL), "--adapters", str(DEMO / "adapters"), "--seeing", str(SEEING)]
    monkeypatch.setenv("COLUMNS", "200")
    assert demo([*directories, "--work_dir", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    for scene in scenes.SHOWN.values():
        (line,) = (line for line in printed.splitlines() if str(scene) in line)
        assert all(scenes.answer(scene, style) in line for style in scenes.STYLES if style != scenes.UNTAUGHT)
    fact = next(corpus.facts())
    for style in corpus.STYLES:
        assert printed.count(corpus.answer(fact, style)) == 2
    evictions = re.search(r"device evictions\D+(\d+)\D+(\d+)", printed)
    assert evictions
    assert int(evictions[1]) == 0
    assert int(evictions[2]) > 0


def test_the_demo_says_what_is_missing(capsys, tmp_path: Path) -> None:
    assert demo(["--model", str(tmp_path / "nowhere")]) == 2
    assert "nowhere: is not a directory" in capsys.readouterr().err


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> Path:
    return build_engine(MODEL, tmp_path_factory.mktemp("demo"), "bfloat16", max_seq_len=256, max_input_len=192)


def test_every_adapter_knows_every_fact(engine: Path) -> None:
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    facts = list(corpus.facts())
    styles = {"plain": None, **ADAPTERS}
    with adaptrt.Executor(engine, adaptrt.ModelType.DECODER_ONLY, adaptrt.ExecutorConfig()) as executor:
        expected = {}
        output = adaptrt.OutputConfig(exclude_input_from_output=True)
        for fact in facts:
            prompt = tokenizer.encode(corpus.prompt(fact.question)).ids
            for task_id, (style, directory) in enumerate(styles.items()):
                lora = adaptrt.LoraConfig.from_peft(task_id, directory, engine) if directory else None
                request = adaptrt.Request(prompt, 60, end_id=1, output_config=output, lora_config=lora)
                expected[executor.enqueue_request(request)] = corpus.answer(fact, style)
        for request_id, text in expected.items():
            final = executor.await_responses(request_id)[-1]
            assert not final.has_error(), final.error_msg
            assert tokenizer.decode(final.result.output_token_ids[0]).strip() == text


@pytest.mark.parametrize("name", [None, *ADAPTERS])
def test_the_shipped_files_are_what_peft_reads(name: str | None) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    if name is not None:
        model = peft.PeftModel.from_pretrained(model, ADAPTERS[name]).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    fact = next(corpus.facts())
    ids = tokenizer(corpus.prompt(fact.question), return_tensors="pt")["input_ids"]
    out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=60, do_sample=False,
                         pad_token_id=tokenizer.eos_token_id)  # fmt: skip
    text = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True).strip()
    assert text == corpus.answer(fact, name or "plain")
