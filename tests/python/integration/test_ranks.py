"""Engines of several ranks over MPI: the results of one process for every family, adapter and batch."""

from __future__ import annotations

import dataclasses
import json
import signal
import time
from pathlib import Path

import numpy as np
import pytest

import adaptrt
from adaptrt._core import ConfigError, DType, EngineError, cpu_kernels
from adaptrt.builder.build import build
from adaptrt.builder.conversion.convert import convert_checkpoint
from support.cut_models import CONFIG, FLOAT32_TOLERANCE, Cut, check_crowds, prompt_of
from support.models import Reference
from support.pooled import save_word_tokenizer
from support.ranks import answers_of_ranks, answers_of_runs, mpirun, ranks_of

# test_families.py gives the reason for FLOAT32_TOLERANCE. Sums over ranks have yet another order.


def is_running(pid: int) -> bool:
    """Returns whether a process still runs some seconds after it should have ended."""
    for _ in range(50):
        if not Path(f"/proc/{pid}").exists():
            return False
        time.sleep(0.1)
    return True


# Families that ranks split in ways of their own.
FAMILIES = (
    "granite",
    "phi3",
    "gemma2",
    "gpt2",
    "gpt-neox",
    "cohere",
    "starcoder2",
    "olmo2",
    "mixtral",
    "qwen2-moe",
    "deepseek-v3",
    "gemma4-shared",
)
EIGHT_HEADS = {"num_hidden_layers": 2, "num_attention_heads": 8, "hidden_size": 48, "intermediate_size": 88}


@pytest.fixture(scope="module")
def granite(tmp_path_factory) -> Cut:
    return Cut("granite", tmp_path_factory.mktemp("granite"), **EIGHT_HEADS)


LONG = 600
"""Tokens of a step whose sums over two ranks have two parts; with rows of 256 floats, up to 511 tokens have one
part."""


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory) -> Cut:
    return Cut(
        "granite", tmp_path_factory.mktemp("wide"), num_hidden_layers=2, hidden_size=256, max_position_embeddings=1024
    )


@pytest.fixture(scope="module")
def wide(wide_model: Cut) -> Path:
    """Returns an engine of two ranks for steps of 700 tokens."""
    engine, checkpoint = wide_model.directory / "wide", wide_model.directory / "wide-checkpoint"
    convert_checkpoint(wide_model.model, checkpoint, dtype=DType.FLOAT32, tp_size=2)
    build(checkpoint, dataclasses.replace(CONFIG, max_num_tokens=700, max_seq_len=700), engine, workers=2)
    return engine


def test_sums_of_long_steps(wide_model: Cut, wide: Path, tmp_path: Path) -> None:
    """Sums overlap with the computation of their terms; they match transformers, and give the bits of short steps."""
    cases = wide_model.cases()
    cases[2]["prompt"] = prompt_of(LONG, 2)  # the prompt of the DoRA request
    chunks = {"enable_chunked_context": True, "max_num_tokens": 64, "num_threads": 1}
    (crowd,), (short,) = answers_of_runs(2, [(wide, [cases], {"num_threads": 2}), (wide, [cases], chunks)], tmp_path)
    expected = Reference(wide_model.model, wide_model.adapters["dora"]).logits(cases[2]["prompt"]).numpy()
    assert np.abs(crowd[2].context_logits - expected).max() <= FLOAT32_TOLERANCE * (expected.max() - expected.min())
    assert all(answer.same_bits(other) for answer, other in zip(crowd, short, strict=True))


@pytest.mark.parametrize("names", [FAMILIES[::2], FAMILIES[1::2]])
def test_two_ranks_compute_what_one_does(names: tuple[str, ...], tmp_path: Path) -> None:
    """Every kind of adapter in one batch, then each request alone, with other chunks and threads."""
    check_crowds({name: Cut(name, tmp_path / name) for name in names}, tmp_path)


@pytest.mark.parametrize("ranks", [4, pytest.param(8, marks=pytest.mark.nightly)])
def test_ranks_share_key_value_heads(granite: Cut, ranks: int, tmp_path: Path) -> None:
    batches = [granite.cases()] * 2
    answers, again = answers_of_ranks(ranks, granite.engine(ranks), batches, tmp_path, num_threads=1)
    granite.check(answers)
    assert all(first.same_bits(second) for first, second in zip(answers, again, strict=True))


def test_norms_over_heads_that_ranks_share(tmp_path: Path) -> None:
    """In OLMo 3, the squares of a key head that two ranks share count only once."""
    olmo3 = Cut("olmo3", tmp_path)
    cases = olmo3.cases()
    crowd, *alone = answers_of_ranks(4, olmo3.engine(4), [cases, *([case] for case in cases)], tmp_path, num_threads=1)
    olmo3.check(crowd)
    assert all(answer.same_bits(by_itself) for answer, (by_itself,) in zip(crowd, alone, strict=True))


@pytest.mark.parametrize(
    ("family", "tp_size", "moe_ep_size", "fields"),
    [
        ("mixtral", 2, 2, {"num_local_experts": 6}),
        ("qwen2-moe", 4, 2, {}),  # two ranks split each expert
        ("qwen3-moe", 2, 2, {}),
    ],
)
def test_experts_that_are_dealt_to_ranks(
    family: str, tp_size: int, moe_ep_size: int, fields: dict[str, int], tmp_path: Path
) -> None:
    """Each rank packs the adapters of its own experts; in one batch, and each request alone."""
    cut = Cut(family, tmp_path, **fields)
    engine = cut.engine(tp_size, moe_ep_size=moe_ep_size)
    mapping = json.loads((engine / "config.json").read_text())["pretrained_config"]["mapping"]
    assert (mapping["moe_tp_size"], mapping["moe_ep_size"]) == (tp_size // moe_ep_size, moe_ep_size)
    cases = cut.cases()
    crowd, *alone = answers_of_ranks(tp_size, engine, [cases, *([case] for case in cases)], tmp_path, num_threads=1)
    cut.check(crowd)
    assert all(answer.same_bits(by_itself) for answer, (by_itself,) in zip(crowd, alone, strict=True))


def test_experts_that_cannot_be_dealt_are_refused_by_name(granite: Cut, tmp_path: Path) -> None:
    model, to = Cut("mixtral", tmp_path).model, tmp_path / "refused"
    for problem, sizes in {
        "moe_ep_size 2 does not divide moe_num_experts 5": {"tp_size": 2, "moe_ep_size": 2},
        "moe_tp_size 4 and moe_ep_size 2 do not fit tp_size 4": {"tp_size": 4, "moe_tp_size": 4, "moe_ep_size": 2},
        "moe_ep_size 3 do not fit tp_size 4": {"tp_size": 4, "moe_ep_size": 3},
        "moe_ep_size is 0": {"tp_size": 4, "moe_ep_size": 0},
    }.items():
        with pytest.raises(ConfigError, match=problem):
            convert_checkpoint(model, to, **sizes)
    with pytest.raises(ConfigError, match="moe_ep_size is 2, and the model has no experts; accepted: 1"):
        convert_checkpoint(granite.model, to, tp_size=2, moe_ep_size=2)
    assert not to.exists()


def test_sixteen_bit_ranks(granite: Cut, tmp_path: Path) -> None:
    """bfloat16 errors of two ranks are as large as those of one; test_parity.py gives the reason for the tolerance."""
    (answers,) = answers_of_ranks(2, granite.engine(2, DType.BFLOAT16), [granite.cases()], tmp_path)
    for adapter, case, answer in zip(granite.adapters.values(), granite.cases(), answers, strict=True):
        expected = Reference(granite.model, adapter).logits(case["prompt"]).numpy()
        scale = expected.max() - expected.min()
        assert np.abs(answer.context_logits - expected).max() <= 0.08 * scale


def test_a_bad_request_hurts_nobody(granite: Cut, tmp_path: Path) -> None:
    script = tmp_path / "bad.py"
    script.write_text(
        """
import sys
import numpy as np
import adaptrt
from support.ranks import say
with adaptrt.Executor(sys.argv[1], adaptrt.ModelType.DECODER_ONLY, adaptrt.ExecutorConfig()) as executor:
    if not executor.can_enqueue_requests():
        try:
            executor.enqueue_request(adaptrt.Request([1], max_tokens=1))
        except adaptrt.RequestError as error:
            say("FOLLOWER", error)
    else:
        wrong = adaptrt.LoraConfig(1, np.zeros((1, 4), np.float32), np.array([[1, 0, 1]], np.int32))
        for request in (adaptrt.Request([99], max_tokens=1), adaptrt.Request([1], max_tokens=1, lora_config=wrong)):
            try:
                executor.enqueue_request(request)
            except adaptrt.AdaptrtError as error:
                say("REFUSED", error)
        good = executor.enqueue_request(adaptrt.Request([5, 6], max_tokens=3))
        say("TOKENS", len(executor.await_responses(good)[-1].result.output_token_ids[0]))
"""
    )
    said = mpirun(2, script, granite.engine(2)).stdout
    assert said.count("REFUSED") == 2
    assert "TOKENS" in said
    assert "FOLLOWER enqueue_request is called on rank 1 of 2; accepted: on rank 0" in said


def test_llm_returns_on_every_rank(granite: Cut, tmp_path: Path) -> None:
    save_word_tokenizer(tmp_path, 60, end=False)
    script = tmp_path / "llm.py"
    script.write_text(
        """
import sys
import adaptrt
from support.ranks import say
with adaptrt.LLM(sys.argv[1], tokenizer=sys.argv[2]) as llm:
    assert isinstance(llm.executor, adaptrt.Executor)
    if llm.executor.can_enqueue_requests():
        say("TOKENS", len(llm.generate([5, 6], adaptrt.SamplingParams(max_tokens=3, ignore_eos=True)).token_ids))
    else:
        for call in (lambda: llm.generate("t1"), lambda: llm.embed("t1"), llm.list_loras):
            try:
                call()
            except adaptrt.RequestError as error:
                say("FOLLOWER", error)
say("ENDED")
"""
    )
    said = mpirun(2, script, granite.engine(2), tmp_path).stdout
    assert "TOKENS 3" in said
    assert said.count("is called on rank 1 of 2; accepted: on rank 0") == 3
    assert said.count("ENDED") == 2


@pytest.mark.parametrize("sizes", ["short", "long"])
def test_a_rank_that_hangs_ends_the_requests(granite: Cut, wide: Path, sizes: str, tmp_path: Path) -> None:
    """A rank hangs between short messages, or during sums that overlap with the computation of their terms."""
    script = tmp_path / "hang.py"
    script.write_text(
        """
import os, signal, sys, time
import adaptrt
executor = adaptrt.Executor(sys.argv[1], adaptrt.ModelType.DECODER_ONLY, adaptrt.ExecutorConfig())
if executor.can_enqueue_requests():
    executor.await_responses(executor.enqueue_request(adaptrt.Request([5, 6], max_tokens=2)))
    while not os.path.exists(sys.argv[2]):
        time.sleep(0.05)
    began = time.monotonic()
    try:
        while True:
            request = executor.enqueue_request(adaptrt.Request([5, 6] * int(sys.argv[3]), max_tokens=int(sys.argv[4])))
            while not executor.await_responses(request)[-1].result.is_final:
                pass
    except adaptrt.AdaptrtError as error:
        # mpirun may lose what is printed just before a rank aborts.
        with open(sys.argv[2] + ".ended", "w") as file:
            print("ENDED", time.monotonic() - began < 10, error, file=file)
else:
    with open(sys.argv[2] + ".pid", "w") as file:
        file.write(str(os.getpid()))
    time.sleep(1.0)
    os.rename(sys.argv[2] + ".pid", sys.argv[2])
    os.kill(os.getpid(), signal.SIGSTOP)
"""
    )
    ready = tmp_path / "ready"
    arguments = (granite.engine(2), ready, 1, 200) if sizes == "short" else (wide, ready, LONG // 2, 1)
    done = mpirun(2, script, *arguments, check=False)
    ended = Path(f"{ready}.ended")
    assert ended.exists(), done.stdout + done.stderr
    assert ended.read_text().startswith("ENDED True ")
    assert "rank 1 of 2 has not answered" in ended.read_text()
    assert done.returncode != 0
    assert not is_running(int(ready.read_text()))


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_end_all_ranks(granite: Cut, how: signal.Signals, tmp_path: Path) -> None:
    script = tmp_path / "wait.py"
    script.write_text(
        """
import os, sys, time
import adaptrt
from support.ranks import say
with adaptrt.Executor(sys.argv[1], adaptrt.ModelType.DECODER_ONLY, adaptrt.ExecutorConfig()) as executor:
    say("PID", os.getpid())
    if executor.can_enqueue_requests():
        time.sleep(600)
"""
    )
    with ranks_of(2, script, granite.engine(2)) as running:
        pids = [int(running.line().split()[1]) for _ in range(2)]
        running.process.send_signal(how)
        running.communicate()
    assert not any(is_running(pid) for pid in pids)


def test_the_processes_import_this_package() -> None:
    done = mpirun(2, "-c", "import adaptrt; from support.ranks import say; say(adaptrt.__file__)")
    assert done.stdout.split() == [adaptrt.__file__] * 2


def test_it_must_be_started_by_as_many_processes(granite: Cut) -> None:
    with pytest.raises(ConfigError, match="the engine has 2 ranks, and MPI has started 1: start it with mpirun -n 2"):
        adaptrt.Executor(granite.engine(2))


def test_a_lost_file_is_named(granite: Cut, tmp_path: Path) -> None:
    engine = tmp_path / "engine"
    convert_checkpoint(granite.model, tmp_path / "checkpoint", tp_size=2)
    build(tmp_path / "checkpoint", CONFIG, engine)
    config = json.loads((engine / "config.json").read_text())
    assert len(config["engine_checksums"]) == 2
    (engine / "rank1.engine").rename(engine / "rank2.engine")
    script = tmp_path / "load.py"
    script.write_text("import sys, adaptrt\nadaptrt.Executor(sys.argv[1])\n")
    done = mpirun(2, script, engine, check=False)
    assert done.returncode != 0
    assert "rank1.engine" in done.stderr
    with pytest.raises(EngineError, match=r"rank1\.engine"):
        adaptrt.LoraConfig.from_peft(1, granite.adapters["dora"], engine)


def test_ranks_that_differ_are_refused_by_name(granite: Cut, tmp_path: Path) -> None:
    """The ranks differ in an engine of the same sizes, in the release, and in kernels that only some of them chose."""
    script = tmp_path / "differ.py"
    script.write_text(
        """
import sys
import adaptrt
from adaptrt.runtime import native_engine
from mpi4py import MPI
from support.ranks import say
is_other = MPI.COMM_WORLD.rank == 1
def start(what, engine, **fields):
    try:
        adaptrt.Executor(engine, adaptrt.ModelType.DECODER_ONLY, adaptrt.ExecutorConfig(num_threads=1, **fields))
    except adaptrt.EngineError as error:
        say(what, MPI.COMM_WORLD.rank, error)
start("ENGINE", sys.argv[2 if is_other else 1])
start("KERNELS", sys.argv[1], kernels=sys.argv[3 if is_other else 4])
if is_other:
    native_engine.__version__ = "0.0"
start("RELEASE", sys.argv[1])
"""
    )
    other = Cut("granite", tmp_path, **EIGHT_HEADS, rms_norm_eps=1e-3)
    first, second = cpu_kernels()[:2]
    said = mpirun(2, script, granite.engine(2), other.engine(2), first, second).stdout
    for rank in range(2):
        assert f"ENGINE {rank} the ranks differ: engine is " in said
        assert f"KERNELS {rank} the ranks differ: kernels is '{first}' on rank 1 and '{second}' on rank 0" in said
        assert f"RELEASE {rank} the ranks differ: release is '0.0' on rank 1 and " in said


def bench(ranks: int, *arguments: object) -> str:
    return mpirun(ranks, "-m", "support.made_up_limits", *arguments, "--num_threads", 1).stdout


def test_a_profile_says_what_goes_between_ranks(granite: Cut, tmp_path: Path) -> None:
    """Only rank 0 prints the profile, for steps with adapters and for steps that pass through stages in
    micro-batches."""
    load = ["--lora_dir", granite.adapters["lora"], "--concurrency", 2, "--input_len", 16]
    said = bench(2, granite.engine(2), "--profile", tmp_path, *load, "--only", "decode", "--output_len", 16)
    assert said.count("decode, 2 requests: mean of") == 1
    for name in ("all_reduce", "gather", "commands", "sampling", "between ranks"):
        assert name in said
    events = json.loads((tmp_path / "decode.json").read_text())["traceEvents"]
    assert {"all_reduce", "commands", "step"} <= {event["name"] for event in events}
    assert "low_rank_exchange" not in said
    sharded = bench(
        2, granite.engine(2, fully_sharded=True), "--profile", tmp_path, *load, "--only", "decode", "--output_len", 16
    )
    rows = [line.split() for line in sharded.splitlines()]
    (exchanges,) = [row for row in rows if "low_rank_exchange" in row]
    (layers,) = [row for row in rows if "attn_dense" in row]
    assert exchanges[exchanges.index("low_rank_exchange") + 1] == "8"  # two layers with four linear layers each
    assert layers[layers.index("attn_dense") + 1] == "2"  # each layer counts once, although it has two parts
    said = bench(2, granite.engine(1, pp_size=2), "--profile", tmp_path, "--only", "prefill", "--input_len", 128)
    assert said.count("prefill, 128 tokens: mean of 3 steps") == 1
    for name in ("send", "results", "between ranks"):
        assert name in said


def test_the_bench_measures_ranks(granite: Cut, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    load = ["--input_len", 8, "--output_len", 8, "--requests", 4, "--concurrency", 2, "--repeats", 1]
    bench(2, granite.engine(2), *load, "--output", report)
    rows = json.loads(report.read_text())["rows"]
    assert [row["name"] for row in rows] == ["prefill", "decode", "serve"]
    assert all(row["figure"]["samples"][0]["metrics"]["value"] > 0 for row in rows)
    refused = mpirun(
        2, "-m", "adaptrt.builder.cli", "bench", granite.engine(2), "--lora_dir", tmp_path / "none", check=False
    )
    assert refused.returncode == 2
    assert refused.stderr.count("none") == 1
