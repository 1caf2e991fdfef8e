"""Other flags of trtllm-build: accepted values, and the reasons in refusals of others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from adaptrt.builder import cli
from support.models import ModelSpec, save_model

TAKEN = [
    "--gather_context_logits",
    "--gather_generation_logits",
    "--gather_all_token_logits",
    "--max_prompt_embedding_table_size=10",
    "--multiple_profiles=enable",
    "--nccl_plugin=auto",
    "--use_paged_context_fmha=enable",
    "--paged_state=enable",
    "--reduce_fusion=disable",
    "--use_fused_mlp=enable",
    "--log_level=info",
    "--opt_num_tokens=8",
    "--strongly_typed",
    "--streamingllm=disable",
    "--profiling_verbosity=layer_names_only",
    "--fast_build",
    "--bert_attention_plugin=auto",
    "--speculative_decoding_mode=draft_tokens_external",
    "--max_draft_len=4",
    "--use_fused_mlp",
    "--moe_plugin=float16",
    "--auto_parallel=1",
    "--gpus_per_node=8",
    "--cluster_key=H100-SXM",
    "--monitor_memory",
    "--enable_xqa=disable",
    "--max_multimodal_len=0",
    "--attention_qk_half_accumulation=disable",
    "--smooth_quant_plugins=disable",
    "--max_decoder_seq_len=64",
    "--user-buffer=disable",
]


def build(*flags: str) -> int:
    """Returns the exit status; no engine is built, because there is no checkpoint."""
    try:
        return cli.main(["build", "--checkpoint_dir", "nowhere", "--output_dir", "nothing", *flags])
    except SystemExit as ended:
        return int(ended.code or 0)


@pytest.mark.parametrize("flag", TAKEN)
def test_values_that_hold_anyway_are_taken(
    flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert build(flag) == 2
    assert "error: nowhere: is not a directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "complaint"),
    [
        ("--use_paged_context_fmha=disable", "it is disable; expected enable: attention always reads the paged KV"),
        ("--paged_state=disable", "it is disable; expected enable: "),
        ("--reduce_fusion=enable", "it is enable; expected disable: all-reduces are not fused"),
        ("--streamingllm=enable", "it is enable; expected disable: attention windows and sinks"),
        ("--smooth_quant_plugins=float16", "it is float16; expected disable: a checkpoint states"),
        ("--nccl_plugin=int3", "it is int3; expected auto or float16 or float32 or bfloat16 or disable"),
        ("--speculative_decoding_mode=medusa", "it is medusa; expected draft_tokens_external or lookahead_decoding"),
        ("--auto_parallel=2", "it is 2; expected an integer from 1 to 1: use --tp_size and --pp_size"),
        ("--opt_num_tokens=0", "it is 0; expected an integer from 1"),
        ("--max_prompt_embedding_table_size=-1", "it is -1; expected an integer from 0"),
        ("--dry_run", "argument --dry_run: not supported; every build writes an engine"),
        ("--weight-streaming", "argument --weight_streaming: not supported; use --weight_memory SIZE"),
        ("--build_config=x.json", "argument --build_config: not supported; give its fields as flags"),
        ("--output_timing_cache=x", "argument --output_timing_cache: not supported; use --timing_cache FILE"),
    ],
)
def test_other_values_are_refused_by_name_and_reason(
    flag: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert build(flag) == 2
    text = capsys.readouterr().err
    assert re.search(f"argument {flag.partition('=')[0]}".replace("-", "[-_]"), text)
    assert complaint in text


def test_prompt_tables_are_refused_with_tensorrt(capsys: pytest.CaptureFixture[str]) -> None:
    assert build("--backend=tensorrt", "--max_prompt_embedding_table_size=1") == 2
    expected = "max_prompt_embedding_table_size is 1; expected 0 with backend tensorrt, or backend native"
    assert expected in capsys.readouterr().err


def test_the_engine_is_the_same_with_them(tmp_path: Path) -> None:
    model = save_model(ModelSpec(num_hidden_layers=1), tmp_path / "model")
    flags = ["build", "--model_dir", str(model), "--max_seq_len", "64"]
    assert cli.main([*flags, "--output_dir", str(tmp_path / "plain")]) == 0
    assert cli.main([*flags, "--output_dir", str(tmp_path / "flags"), *TAKEN]) == 0
    for name in ("config.json", "rank0.engine"):
        assert (tmp_path / "plain" / name).read_bytes() == (tmp_path / "flags" / name).read_bytes()
