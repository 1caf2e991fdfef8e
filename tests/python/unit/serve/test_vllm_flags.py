"""Flags of vLLM's server: accepted values, and the reasons in refusals of others."""

from __future__ import annotations

import argparse

import pytest

from adaptrt.builder.cli import CommandParser
from adaptrt.builder.commands import engine_flags
from adaptrt.common.number_flags import whole_number
from adaptrt.runtime.vllm_arguments import ENGINE_ARGUMENTS
from adaptrt.serve import command
from adaptrt.serve.ray.options import parse_flags
from adaptrt.serve.vllm_flags import SERVER_ARGUMENTS


def parsed(*flags: str) -> argparse.Namespace:
    parser = CommandParser(prog="adaptrt serve", description="")
    command.add_arguments(parser)
    return parser.parse_args(["model", *flags])


def test_limits_have_vllms_names() -> None:
    args = parsed(
        "--max-model-len", "2k", "--max-num-seqs=8", "--max_num_batched_tokens", "4K", "--max-lora-rank", "32"
    )
    options = engine_flags.engine_options_of(args)
    assert (options.max_seq_len, options.max_batch_size) == (2000, 8)
    assert (options.max_num_tokens, options.max_lora_rank) == (4096, 32)


def test_types_have_vllms_names() -> None:
    names = {
        name: engine_flags.engine_options_of(parsed("--dtype", name)).dtype for name in ("half", "float16", "auto")
    }
    assert names["half"] == names["float16"]
    assert names["auto"] is None


@pytest.mark.parametrize(
    "flags",
    [
        "--enable-lora --max-loras 4 --lora-dtype auto",
        "--no-enable-lora",
        "--trust-remote-code --enforce-eager",
        "--enable-prefix-caching --enable-chunked-prefill",
        "-tp 1 --pipeline-parallel-size 1 -dp=1",
        "--kv-cache-dtype auto --load-format safetensors --tokenizer-mode auto",
        "--swap-space 0 --cpu-offload-gb 0.0 --max-logprobs 20",
        "--disable-log-requests --disable-log-stats --uvicorn-log-level warning",
        "--scheduling-policy priority --distributed-executor-backend mp --device cpu",
        "--enable-request-id-headers",
        "--runner generate --task auto --guided-decoding-backend guidance --response-role assistant",
    ],
)
def test_values_that_hold_anyway_are_taken(flags: str) -> None:
    given = vars(parsed(*flags.split()))
    given.pop(argparse.SUPPRESS, None)
    assert given == vars(parsed())


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ("--max-loras 0", "argument --max_loras: it is 0; expected 1 to 2147483647: a batch may have any number"),
        ("--max-loras many", "argument --max_loras: it is many; expected 1 to 2147483647"),
        ("--max-model-len long", "it is long; expected an integer, or one with the suffix k, m, g, K, M, G"),
        ("--max-cpu-loras 4", "argument --max_cpu_loras: not supported; use --host-cache-bytes N"),
        ("--gpu-memory-utilization 0.9", "not supported; use --kv-cache-tokens N, --host-cache-bytes N and"),
        ("--tensor-parallel-size 2", "it is 2; expected 1: convert the checkpoint with --tp_size N, build it"),
        ("-tp 2", "it is 2; expected 1: convert the checkpoint"),
        ("--kv-cache-dtype fp8", "it is fp8; expected auto: use --int8-kv-cache for 8 bits"),
        ("--no-enable-prefix-caching", "argument --no_enable_prefix_caching: not supported; the KV cache always"),
        ("--seed 0", "argument --seed: not supported; give seed in requests"),
        ("--quantization awq", "invalid choice: 'awq'"),
        ("--revision v1", "ORGANISATION/NAME@REVISION"),
        ("--swap-space 4", "it is 4; expected 0: use --kv-cache-dir DIR"),
        ("--speculative-config {}", "use --draft-model MODEL"),
        ("--dtype int3", "invalid choice: 'int3'"),
        ("--ssl-keyfile x", "a reverse proxy serves TLS"),
        ("--max-logprobs 5", "it is 5; expected 20: this is the executor's limit"),
    ],
)
def test_other_values_are_refused_with_what_to_use(
    flags: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parsed(*flags.split())
    assert complaint in capsys.readouterr().err


def test_the_template_shows_the_format_of_calls_unless_a_flag_does() -> None:
    assert command.options_of(parsed("--enable-auto-tool-choice")).tool_call_parser == "auto"
    options = command.options_of(parsed("--enable-auto-tool-choice", "--tool-call-parser", "llama4_json"))
    assert options.tool_call_parser == "llama4_json"


def test_requests_are_logged_by_either_name() -> None:
    assert command.options_of(parsed("--enable-log-requests")).log_requests
    assert command.options_of(parsed("--log-requests")).log_requests


def test_every_reason_is_in_one_table() -> None:
    assert not ENGINE_ARGUMENTS.keys() & SERVER_ARGUMENTS.keys()


def test_the_help_has_no_refused_flags() -> None:
    parser = CommandParser(prog="adaptrt serve", description="")
    command.add_arguments(parser)
    text = parser.format_help()
    assert "--max_loras" in text
    assert "--max_model_len" in text
    assert "--max_cpu_loras" not in text
    assert "--no_enable_prefix_caching" not in text
    # A flag has one line: its own, or that of its opposite if only that is accepted.
    shown = {flag for flag in text.split() if flag.startswith("--")}
    for name in ("enable_lora", "enable_prefix_caching", "disable_log_requests"):
        assert {f"--{name}", f"--no_{name}"} & shown == {f"--{name}"}
    for name in ("headless", "skip_tokenizer_init"):
        assert {f"--{name}", f"--no_{name}"} & shown == {f"--no_{name}"}


def test_replicas_take_the_same_flags() -> None:
    args = parse_flags({"model": "m", "max_model_len": 64, "max_loras": 4, "enable_lora": True, "enforce_eager": False})
    assert args.max_seq_len == 64
    with pytest.raises(command.ConfigError, match="enable_prefix_caching: not supported; the KV cache always"):
        parse_flags({"model": "m", "enable_prefix_caching": False})
    with pytest.raises(command.ConfigError, match="trust_remote_code is 'yes'; accepted: true, false"):
        parse_flags({"model": "m", "trust_remote_code": "yes"})


@pytest.mark.parametrize(
    ("text", "number"), [("8", 8), ("-1", -1), ("8k", 8000), ("8K", 8192), ("2m", 2_000_000), ("1M", 1 << 20)]
)
def test_whole_numbers_have_suffixes(text: str, number: int) -> None:
    assert whole_number(text) == number


@pytest.mark.parametrize("text", ["", "k", "8kk", "8.5", "8 x", "9" * 5000])
def test_other_texts_are_no_whole_numbers(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="expected an integer, or one with the suffix"):
        whole_number(text)


def test_flags_of_vllms_machinery(capsys: pytest.CaptureFixture[str]) -> None:
    parsed("--moe-backend", "auto", "--nnodes", "1", "--enable-flashinfer-autotune", "--logprobs-mode", "raw_logprobs")
    for flags, complaint in (
        ("--moe-backend triton", "it is triton; expected auto: kernels are chosen for the machine"),
        ("--all2all-backend=pplx", "it is pplx; expected allgather_reducescatter: convert-checkpoint divides"),
        ("--enable-eplb", "argument --enable_eplb: not supported; convert-checkpoint divides"),
        ("--media-io-kwargs {}", "argument --media_io_kwargs: not supported; images are read in one way"),
        (
            "--spec-method ngram",
            "not supported; drafts are configured by speculative_config of LLM(), or by --draft-mo",
        ),
    ):
        with pytest.raises(SystemExit):
            parsed(*flags.split())
        assert complaint in capsys.readouterr().err
    parser = CommandParser(prog="adaptrt serve", description="")
    command.add_arguments(parser)
    assert "--moe_backend" not in parser.format_help()


def test_origins() -> None:
    args = parsed("--allowed-origins", "https://App.example.com:443", '["http://a:8000", "*"]', "http://[::1]:3000")
    assert args.allowed_origins == [["https://app.example.com"], ["http://a:8000", "*"], ["http://[::1]:3000"]]


@pytest.mark.parametrize(
    "origin", ["app.example.com", "null", "ftp://a", "https://a/b", "https://", '["a"]', "[1]", "["]
)
def test_other_texts_are_no_origins(origin: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("--allowed-origins", origin)
    complaint = capsys.readouterr().err
    assert "expected * or SCHEME://HOST[:PORT]" in complaint or "which is not JSON" in complaint
