"""The commands of TensorRT-LLM's LoRA guide, unchanged except for program names, and their results."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import adaptrt
from support.models import ATTENTION_MODULES, ModelSpec, Reference, save_adapter, save_model
from support.serving import Answer, collect, make_request

SPEC = ModelSpec(hidden_size=72, head_dim=24, intermediate_size=131, vocab_size=509)
PROMPTS = ([17, 301, 42, 508, 2, 77], np.random.default_rng(1).integers(2, 509, 120).tolist())
NUM_TOKENS = 8
# Weights, adapters and activations have 11 significant bits; see FLOAT16_TOLERANCE in test_parity.py.
TOLERANCE = 0.006

CONVERT = """-m adaptrt.builder.cli convert-checkpoint --model_dir ${BASE_MODEL} \
    --output_dir llama_7b/trt_ckpt/fp16/1-gpu/ \
    --dtype float16"""
BUILD = """-m adaptrt.builder.cli build --checkpoint_dir llama_7b/trt_ckpt/fp16/1-gpu/ \
    --output_dir llama_7b_with_lora_qkv/trt_engines/fp16/1-gpu/ \
    --remove_input_padding enable \
    --gpt_attention_plugin float16 \
    --context_fmha enable \
    --paged_kv_cache enable \
    --gemm_plugin float16 \
    --lora_plugin float16 \
    --max_batch_size 128 \
    --max_input_len 512 \
    --max_seq_len 562 \
    --lora_dir Japanese-Alpaca-LoRA-7b-v0 \
    --max_lora_rank 8 \
    --lora_target_modules "attn_q" "attn_k" "attn_v" """
CONVERT_LORA = "-m adaptrt.tools.hf_lora_convert -i {name} -o {name}-weights --storage-type float16"
ENGINE = "llama_7b_with_lora_qkv/trt_engines/fp16/1-gpu"
JAPANESE, LUOTUO = "Japanese-Alpaca-LoRA-7b-v0", "luotuo-lora-7b-0.1"


def run_in(directory: Path, command: str) -> None:
    arguments = shlex.split(command.replace("${BASE_MODEL}", "llama-7b-hf"))
    result = subprocess.run([sys.executable, *arguments], cwd=directory, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.fixture(scope="module")
def guide(tmp_path_factory) -> Path:
    """Returns a directory in which every command of the guide has run."""
    directory = tmp_path_factory.mktemp("guide")
    model = save_model(SPEC, directory / "llama-7b-hf")
    save_adapter(model, directory / JAPANESE, 1, r=8, target_modules=ATTENTION_MODULES)
    save_adapter(model, directory / LUOTUO, 2, r=4, target_modules=["q_proj", "v_proj"])
    run_in(directory, CONVERT)
    run_in(directory, BUILD)
    for name in (JAPANESE, LUOTUO):
        run_in(directory, CONVERT_LORA.format(name=name))
    return directory


@pytest.fixture
def executor(guide: Path):
    with adaptrt.Executor(guide / ENGINE, adaptrt.ModelType.DECODER_ONLY, adaptrt.ExecutorConfig()) as executor:
        yield executor


def assert_agrees(answer: Answer, reference: Reference, prompt: list[int]) -> None:
    """Compares logits on the engine's own tokens, because float32 and float16 may choose differently in a near tie."""
    expected = reference.logits(prompt, answer.tokens).numpy()
    actual = np.concatenate([answer.context_logits, answer.generation_logits[1:]])
    assert len(answer.tokens) == NUM_TOKENS
    assert np.abs(actual - expected).max() <= TOLERANCE * (expected.max() - expected.min())


def tensors_of(guide: Path, name: str) -> tuple[np.ndarray, np.ndarray]:
    directory = guide / f"{name}-weights"
    return np.load(directory / "model.lora_weights.npy"), np.load(directory / "model.lora_config.npy")


def test_the_engine_is_what_the_flags_say(guide: Path) -> None:
    config = adaptrt.load_engine(guide / ENGINE).config
    build = config.build_config
    assert (build.max_batch_size, build.max_input_len, build.max_seq_len) == (128, 512, 562)
    assert build.lora_config.max_lora_rank == 8
    assert build.lora_config.lora_target_modules == ("attn_q", "attn_k", "attn_v")
    assert build.plugin_config.lora_plugin == "float16"
    assert config.pretrained_config.to_dict()["dtype"] == "float16"


@pytest.mark.parametrize("name", [JAPANESE, LUOTUO])
def test_the_tensors_have_the_documented_format(guide: Path, name: str) -> None:
    weights, config = tensors_of(guide, name)
    modules, rank = ((1, 2, 3), 8) if name == JAPANESE else ((1, 3), 4)
    assert weights.dtype == np.float16
    assert config.dtype == np.int32
    assert config.tolist() == [[[module, layer, rank, 0] for layer in range(2) for module in modules]]
    assert weights.shape == (1, 2 * len(modules), rank * (72 + 72))  # q has the widest rows: heads * head_dim = 72


def test_the_adapter_of_lora_dir_is_served_by_name(guide: Path, executor) -> None:
    reference = Reference(guide / "llama-7b-hf", guide / JAPANESE)
    for prompt in PROMPTS:
        request_id = executor.enqueue_request(make_request(prompt, NUM_TOKENS), adapter=JAPANESE)
        assert_agrees(collect(executor, request_id), reference, prompt)


def test_tensors_go_with_the_first_request_and_the_task_id_alone_with_later_ones(guide: Path, executor) -> None:
    first = {}
    for task_id, name in enumerate((JAPANESE, LUOTUO), start=1):
        with pytest.raises(adaptrt.PeftTaskNotCachedError, match=f"LoRA task {task_id} not found in cache"):
            executor.enqueue_request(make_request(PROMPTS[0], NUM_TOKENS, adaptrt.LoraConfig(task_id)))
        lora = adaptrt.LoraConfig(task_id, *tensors_of(guide, name))
        first[name] = collect(executor, executor.enqueue_request(make_request(PROMPTS[0], NUM_TOKENS, lora)))
        assert_agrees(first[name], Reference(guide / "llama-7b-hf", guide / name), PROMPTS[0])
    base = collect(executor, executor.enqueue_request(make_request(PROMPTS[0], NUM_TOKENS)))
    assert_agrees(base, Reference(guide / "llama-7b-hf"), PROMPTS[0])

    # All three run in one batch, by task_id only.
    loras = {JAPANESE: adaptrt.LoraConfig(1), LUOTUO: adaptrt.LoraConfig(2), None: None}
    ids = executor.enqueue_requests([make_request(PROMPTS[0], NUM_TOKENS, lora) for lora in loras.values()])
    again = {name: collect(executor, request_id) for name, request_id in zip(loras, ids, strict=True)}
    for name, answer in first.items():
        assert again[name].same_bits(answer)
    assert again[None].same_bits(base)
    assert not first[JAPANESE].same_bits(base)
    assert not first[LUOTUO].same_bits(base)


def test_the_name_and_the_tensors_are_the_same_adapter(guide: Path, executor) -> None:
    named = executor.enqueue_request(make_request(PROMPTS[1], NUM_TOKENS), adapter=JAPANESE)
    sent = executor.enqueue_request(
        make_request(PROMPTS[1], NUM_TOKENS, adaptrt.LoraConfig(5, *tensors_of(guide, JAPANESE)))
    )
    assert collect(executor, named).same_bits(collect(executor, sent))
