"""Orchestrator mode: an ordinary process runs the executor of an engine with several ranks and starts its workers."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import adaptrt
from adaptrt import CommunicationMode, ExecutorConfig, ModelType, OrchestratorConfig, ParallelConfig
from adaptrt._core import ConfigError, DType, EngineError
from adaptrt.builder.cli import main as command_line
from adaptrt.tools.bench import limits
from support.cut_models import Cut, prompt_of
from support.http_server import http_server
from support.made_up_limits import made_up_limits
from support.processes import has_mapped, have_ended, processes_with
from support.rank_script import answer_batches, result_of
from support.ranks import answers_of, answers_of_ranks, mpirun, ranks_of
from support.watched import watched

SHAPES = {"tensor": {"tp_size": 2}, "pipeline": {"tp_size": 1, "pp_size": 2}}
DEMO = Path(__file__).resolve().parents[3] / "examples" / "demo"
OLD, NEW = "pirate", "french"
# Rank 0 waits at most 8 seconds for the other ranks.
SECONDS_TO_NOTICE = 10


def orchestrated(**fields: Any) -> ExecutorConfig:
    parallel = ParallelConfig(
        communication_mode=CommunicationMode.ORCHESTRATOR, orchestrator_config=OrchestratorConfig()
    )
    return ExecutorConfig(parallel_config=parallel, num_threads=1, **fields)


def executor_over(engine: Path, **fields: Any) -> adaptrt.Executor:
    return adaptrt.Executor(engine, ModelType.DECODER_ONLY, orchestrated(**fields))


def workers_of(engine: Path) -> set[int]:
    return processes_with("adaptrt.runtime.orchestrator.worker", engine)


@pytest.fixture(scope="module")
def cut(tmp_path_factory) -> Cut:
    return Cut("granite", tmp_path_factory.mktemp("granite"), num_hidden_layers=2)


@pytest.fixture(scope="module", params=list(SHAPES))
def shape(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def engine(cut: Cut, shape: str) -> Path:
    return cut.engine(**SHAPES[shape])


@pytest.fixture(scope="module")
def alone(cut: Cut, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns an engine of two ranks for tests that need its workers for themselves; the module's executor uses
    another."""
    made = tmp_path_factory.mktemp("alone") / "engine"
    shutil.copytree(cut.engine(2), made)
    return made


@pytest.fixture(scope="module")
def executor(engine: Path) -> Iterator[adaptrt.Executor]:
    kv_cache = adaptrt.KvCacheConfig(event_buffer_max_size=1000)
    with executor_over(engine, kv_cache_config=kv_cache, iter_stats_max_iterations=1000) as made:
        workers = workers_of(engine)
        assert len(workers) == 2
        yield made
    assert not any(Path(f"/proc/{process}").exists() for process in workers)
    assert not made.is_alive


def test_it_computes_what_leader_mode_does(cut: Cut, engine: Path, executor: adaptrt.Executor, tmp_path: Path) -> None:
    """Compares bits, including prompt logits: every kind of adapter in one batch, then each by its task id only."""
    cases = cut.cases()
    (expected,) = answers_of_ranks(2, engine, [cases], tmp_path)
    cut.check(expected)
    batches = [cases, *([{**case, "task_alone": True}] for case in cases)]
    crowd, *alone = answers_of(answer_batches(executor, batches), batches)
    for answer, in_crowd, (by_itself,) in zip(expected, crowd, alone, strict=True):
        assert in_crowd.same_bits(answer)
        assert by_itself.same_bits(answer)
    stats = executor.lora_cache_stats()
    assert (stats.host_adapters, stats.host_misses) == (3, 3)
    assert {entry.task_id for entry in executor.list_adapters()} == {1, 2, 3}


def test_hidden_states_and_processors_of_python(executor: adaptrt.Executor, cut: Cut) -> None:
    pooled = adaptrt.Request(prompt_of(40, 1), 0, pooling_params=adaptrt.PoolingParams())
    rows = result_of(executor, executor.enqueue_request(pooled)).pooled_output
    with adaptrt.Executor(cut.engine(1), ModelType.DECODER_ONLY, ExecutorConfig(num_threads=1)) as alone:
        expected = result_of(alone, alone.enqueue_request(pooled)).pooled_output
    np.testing.assert_allclose(rows, expected, rtol=1e-4, atol=1e-5)

    def only_seven(request_id: int, logits: Any, token_ids: Any, stream: int, client: int | None) -> None:
        logits[..., np.arange(logits.shape[-1]) != 7] = -np.inf

    request = adaptrt.Request([5, 6], max_tokens=3, logits_post_processor=only_seven)
    assert result_of(executor, executor.enqueue_request(request)).output_token_ids == [[5, 6, 7, 7, 7]]


def test_drafts_of_a_model_in_the_orchestrator(executor: adaptrt.Executor, cut: Cut, engine: Path) -> None:
    request = adaptrt.Request(prompt_of(9, 2), max_tokens=12)
    expected = result_of(executor, executor.enqueue_request(request)).output_token_ids
    draft = adaptrt.DraftTargetDecodingConfig(speculative_model_dir=str(cut.engine(1)))
    with executor_over(engine, draft_target_decoding_config=draft, iter_stats_max_iterations=100) as drafted:
        assert result_of(drafted, drafted.enqueue_request(request)).output_token_ids == expected
        assert len(drafted.get_latest_iteration_stats()) < 12


def test_streams_cancels_and_statistics(executor: adaptrt.Executor) -> None:
    prompt = prompt_of(11, 3)
    whole = result_of(executor, executor.enqueue_request(adaptrt.Request(prompt, max_tokens=6)))
    stream = executor.enqueue_request(adaptrt.Request(prompt, max_tokens=6, streaming=True))
    pieces: list[int] = []
    is_final = False
    while not is_final:
        for response in executor.await_responses(stream):
            pieces += response.result.output_token_ids[0]
            is_final = response.result.is_final
    assert prompt + pieces == whole.output_token_ids[0]
    executor.get_latest_iteration_stats()
    is_cancelled = threading.Event()

    def until_cancelled(request_id: int, logits: Any, token_ids: Any, stream: int, client: int | None) -> None:
        if len(token_ids[0]) > len(prompt) + 1:  # otherwise it might have ended before
            is_cancelled.wait(SECONDS_TO_NOTICE)

    long = executor.enqueue_request(
        adaptrt.Request(prompt, max_tokens=200, streaming=True, logits_post_processor=until_cancelled)
    )
    executor.await_responses(long)
    executor.cancel_request(long)
    is_cancelled.set()
    while not (last := executor.await_responses(long)[-1].result).is_final:
        pass
    assert last.finish_reasons == [adaptrt.FinishReason.CANCELLED]
    stats = executor.get_latest_iteration_stats()
    assert stats[0].num_active_requests == 1
    assert stats[0].inflight_batching_stats.num_ctx_tokens > 0
    events = executor.get_kv_cache_event_manager()
    assert events is not None
    assert events.get_latest_events(0)


def test_bad_requests_hurt_nobody(executor: adaptrt.Executor) -> None:
    wrong = adaptrt.LoraConfig(77, np.zeros((1, 4), np.float32), np.array([[1, 0, 1]], np.int32))
    running = executor.enqueue_request(adaptrt.Request([5, 6], max_tokens=30))
    with pytest.raises(adaptrt.RequestError, match="99"):
        executor.enqueue_request(adaptrt.Request([99], max_tokens=1))
    with pytest.raises(adaptrt.AdapterError, match="row 0 \\(attn_q, layer 0\\)"):
        executor.enqueue_request(adaptrt.Request([1], max_tokens=1, lora_config=wrong))
    with pytest.raises(adaptrt.PeftTaskNotCachedError):
        executor.enqueue_request(adaptrt.Request([1], max_tokens=1, lora_config=adaptrt.LoraConfig(78)))
    assert len(result_of(executor, running).output_token_ids[0]) == 32


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_worker_ends_the_requests(alone: Path, rank: int) -> None:
    with executor_over(alone) as executor:
        # Find the workers before there are requests: on a busy machine the search can take longer than 240 tokens.
        workers = workers_of(alone)
        victim = worker_of_rank(workers, rank)
        requests = [adaptrt.Request([5, 6], max_tokens=240, streaming=True) for _ in range(3)]
        ids = executor.enqueue_requests(requests)
        executor.await_responses(ids[0])
        os.kill(victim, signal.SIGKILL)
        for one in ids:
            while not (response := executor.await_responses(one, SECONDS_TO_NOTICE)[-1]).has_error():
                assert not response.result.is_final
            assert f"rank {rank} of 2" in response.error_msg
        with pytest.raises(adaptrt.ExecutorClosedError, match=f"rank {rank} of 2"):
            executor.enqueue_request(requests[0])
        assert have_ended(workers)


def test_workers_that_are_killed_at_random_times(cut: Cut, request: pytest.FixtureRequest) -> None:
    """A worker dies while adapters load, prompts run or tokens are generated; every request ends and names the rank."""
    adapters = [(task, path) for task, path in enumerate(cut.adapters.values(), start=1)]
    for number in range(request.config.getoption("--soak-kills")):
        random = np.random.default_rng((17, number))
        engine = cut.engine(**list(SHAPES.values())[number % len(SHAPES)])
        rank, errors, killed_at = int(random.integers(2)), list[str](), list[float]()
        others = workers_of(engine)
        with executor_over(engine) as executor:
            workers = workers_of(engine) - others
            victim = worker_of_rank(workers, rank)

            def kill(victim: int = victim, killed_at: list[float] = killed_at) -> None:
                killed_at.append(time.monotonic())
                os.kill(victim, signal.SIGKILL)

            loads = [
                None if path is None else adaptrt.LoraConfig.from_peft(task, path, engine) for task, path in adapters
            ]
            killer = threading.Timer(random.uniform(0.0, 0.6), kill)
            killer.start()
            began = time.monotonic()
            while not errors and time.monotonic() - began < 30:
                requests = [
                    adaptrt.Request(
                        prompt_of(int(random.integers(1, 100)), at), int(random.integers(1, 60)), lora_config=lora
                    )
                    for at, lora in enumerate(loads * 2)
                ]
                try:
                    ids = executor.enqueue_requests(requests)
                except adaptrt.ExecutorClosedError as error:
                    errors.append(str(error))
                    break
                for one in ids:
                    (response,) = executor.await_responses(one, SECONDS_TO_NOTICE)
                    errors += [response.error_msg] if response.has_error() else []
            killer.join()
            assert time.monotonic() - killed_at[0] < SECONDS_TO_NOTICE
            assert errors
            assert all(f"rank {rank} of 2" in error for error in errors)
            assert have_ended(workers)


def test_a_worker_that_hangs_ends_the_requests(cut: Cut, alone: Path) -> None:
    """A worker stops between two requests, when no request waits for it. Each rank is tried, in an engine of its
    own."""
    with executor_over(alone) as first, executor_over(cut.engine(2, DType.BFLOAT16)) as second:
        requests = []
        for rank, executor in enumerate((first, second)):
            result_of(executor, executor.enqueue_request(adaptrt.Request([5, 6], max_tokens=2)))
            workers = workers_of(executor.engine.directory)
            os.kill(worker_of_rank(workers, rank), signal.SIGSTOP)
            request = executor.enqueue_request(adaptrt.Request([5, 6], max_tokens=2))
            requests.append((rank, executor, workers, request))
        for rank, executor, workers, request in requests:
            (response,) = executor.await_responses(request, SECONDS_TO_NOTICE)
            assert f"rank {rank} of 2 has not answered for 8000 ms" in response.error_msg
            assert have_ended(workers)


def test_a_worker_that_runs_out_of_memory_is_named(cut: Cut, alone: Path) -> None:
    """The worker runs out of memory while it loads an adapter; steps need no memory beyond that of the start."""
    with executor_over(alone) as executor:
        result_of(executor, executor.enqueue_request(adaptrt.Request([5, 6], max_tokens=2)))
        workers = workers_of(alone)
        victim = worker_of_rank(workers, 1)
        (size,) = re.findall(r"VmSize:\s+(\d+) kB", Path(f"/proc/{victim}/status").read_text())
        resource.prlimit(victim, resource.RLIMIT_AS, (int(size) * 1024,) * 2)
        lora = adaptrt.LoraConfig.from_peft(1, cut.adapters["lora"], alone)
        request = executor.enqueue_request(adaptrt.Request([5, 6], max_tokens=2, lora_config=lora))
        (response,) = executor.await_responses(request, SECONDS_TO_NOTICE)
        assert re.search(r"rank 1 of 2: .*memory|rank 1 of 2: MemoryError", response.error_msg)
        assert have_ended(workers)


def worker_of_rank(workers: set[int], rank: int) -> int:
    (found,) = [process for process in workers if has_mapped(process, f"rank{rank}.engine")]
    return found


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_workers_end_with_their_orchestrator(alone: Path, tmp_path: Path, how: signal.Signals) -> None:
    """Workers end in the middle of steps, even if a child of the orchestrator lives on. No MPI is in the
    orchestrator."""
    script = tmp_path / "wait.py"
    script.write_text(
        """
import os, signal, sys, time
import adaptrt
from adaptrt import CommunicationMode, ExecutorConfig, ModelType, ParallelConfig
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts the tests behind itself ignores it
parallel = ParallelConfig(communication_mode=CommunicationMode.ORCHESTRATOR)
with adaptrt.Executor(sys.argv[1], ModelType.DECODER_ONLY, ExecutorConfig(parallel_config=parallel)) as executor:
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    print(child, "mpi4py" in sys.modules, flush=True)
    while True:
        for request in executor.enqueue_requests([adaptrt.Request([5, 6], max_tokens=100)] * 8):
            executor.await_responses(request)
"""
    )
    sockets = tempfile.mkdtemp()
    with watched([sys.executable, script, alone], env={"TMPDIR": sockets}) as running:
        number, has_mpi = running.line().split()
        child = int(number)
        try:
            assert has_mpi == "False"
            workers = workers_of(alone)
            assert len(workers) == 2
            running.process.send_signal(how)
            assert have_ended(workers)
            assert Path(f"/proc/{child}").exists()
        finally:
            os.kill(child, signal.SIGKILL)
        running.communicate()
    Path(sockets).rmdir()  # fails unless it is empty


def test_an_orchestrator_may_be_a_process_of_mpi(cut: Cut, tmp_path: Path) -> None:
    """TensorRT-LLM starts its orchestrator with mpirun -n 1."""
    script = tmp_path / "one.py"
    script.write_text(
        """
import sys
import adaptrt
from adaptrt import CommunicationMode, ExecutorConfig, ModelType, ParallelConfig
parallel = ParallelConfig(communication_mode=CommunicationMode.ORCHESTRATOR)
with adaptrt.Executor(sys.argv[1], ModelType.DECODER_ONLY, ExecutorConfig(parallel_config=parallel)) as executor:
    request = executor.enqueue_request(adaptrt.Request([5, 6], max_tokens=3))
    print("TOKENS", len(executor.await_responses(request)[-1].result.output_token_ids[0]))
"""
    )
    assert "TOKENS 5" in mpirun(1, script, cut.engine(2)).stdout


def test_the_end_of_an_executor_that_nobody_shuts_down(alone: Path) -> None:
    executor = executor_over(alone)
    workers = workers_of(alone)
    del executor
    assert have_ended(workers)


def test_ranks_that_cannot_begin_are_named(cut: Cut, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sockets = tempfile.mkdtemp()  # a short path, because socket paths have a length limit
    monkeypatch.setattr(tempfile, "tempdir", sockets)
    engine = tmp_path / "engine"
    shutil.copytree(cut.engine(2), engine)
    content = bytearray((engine / "rank1.engine").read_bytes())
    content[-1] ^= 1
    (engine / "rank1.engine").write_bytes(content)
    with pytest.raises(EngineError, match=r"^rank 1 of 2: .*rank1\.engine: its header does not match config"):
        executor_over(engine)
    broken = tmp_path / "broken.sh"
    broken.write_text("#!/bin/sh\necho 'no library of that name' >&2\nexit 3\n")
    broken.chmod(0o755)
    config = orchestrated()
    config.parallel_config.orchestrator_config = OrchestratorConfig(worker_executable_path=str(broken))
    with pytest.raises(EngineError, match=r"(?s)2 ranks have ended before they began.*no library") as raised:
        adaptrt.Executor(cut.engine(2), ModelType.DECODER_ONLY, config)
    assert "BAD TERMINATION" not in str(raised.value)
    assert not workers_of(engine)
    Path(sockets).rmdir()  # fails unless it is empty again


def test_a_configuration_that_the_executor_refuses_leaves_no_worker(alone: Path) -> None:
    with pytest.raises(ConfigError, match="host_cache"):
        executor_over(alone, kv_cache_config=adaptrt.KvCacheConfig(host_cache_size=1 << 20, host_cache_dir="/tmp"))
    assert have_ended(workers_of(alone))


def test_unsupported_options_of_an_orchestrator_are_refused_by_name(cut: Cut, tmp_path: Path) -> None:
    config = orchestrated()
    config.parallel_config.num_nodes = 2
    config.parallel_config.orchestrator_config = OrchestratorConfig(False, None, object(), False)
    with pytest.raises(ConfigError) as raised:
        adaptrt.Executor(cut.engine(2), ModelType.DECODER_ONLY, config)
    for name in (
        "num_nodes is 2",
        "is_orchestrator is False",
        "orch_leader_comm is <object",
        "spawn_processes is False",
    ):
        assert name in str(raised.value)
    config.parallel_config = ParallelConfig(orchestrator_config=OrchestratorConfig())
    with pytest.raises(ConfigError, match="orchestrator_config is given; accepted: None with LEADER"):
        adaptrt.Executor(cut.engine(2), ModelType.DECODER_ONLY, config)
    with pytest.raises(ConfigError, match="an engine of one rank, which runs in this process; accepted: LEADER"):
        executor_over(cut.engine(1))
    script = tmp_path / "rank.py"
    script.write_text(
        "import sys, adaptrt\n"
        "parallel = adaptrt.ParallelConfig(communication_mode=adaptrt.CommunicationMode.ORCHESTRATOR)\n"
        "config = adaptrt.ExecutorConfig(parallel_config=parallel)\n"
        "adaptrt.Executor(sys.argv[1], adaptrt.ModelType.DECODER_ONLY, config)\n"
    )
    done = mpirun(2, script, cut.engine(2), check=False)
    assert "ORCHESTRATOR, and this is rank 1 of those that MPI has started; accepted: LEADER" in done.stderr


@pytest.fixture(scope="module")
def demo_engine(tmp_path_factory) -> Path:
    """Returns an engine of two ranks, with a tokenizer and an adapter inside."""
    root = tmp_path_factory.mktemp("demo")
    checkpoint, engine = root / "checkpoint", root / "engine"
    convert = ["convert-checkpoint", "--model_dir", DEMO / "model", "--tp_size", 2, "--output_dir", checkpoint]
    assert command_line([str(part) for part in (*convert, "--dtype", "float32")]) == 0
    build = ["build", "--checkpoint_dir", checkpoint, "--output_dir", engine, "--lora_plugin", "auto"]
    limits = ["--max_batch_size", 4, "--max_num_tokens", 128, "--max_seq_len", 128, "--max_lora_rank", 16]
    adapters = sorted(path for path in (DEMO / "adapters").iterdir() if path.is_dir())
    flags = ["--dora_plugin", "enable", "--lora_dir", adapters[0]]
    assert command_line([str(part) for part in (*build, *limits, *flags)]) == 0
    return engine


def test_the_bench_starts_its_workers(
    engine: Path, cut: Cut, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The bench also ends its workers. Its report has no roofline, because steps are recorded in the workers."""
    monkeypatch.setattr(limits, "measure_machine_limits", made_up_limits)
    others = workers_of(engine)  # workers of an executor that other tests use
    profiled = ["bench", str(engine), "--profile", str(tmp_path / "profile")]
    assert command_line(profiled) == 2
    assert f"to record rank 0's steps, run mpirun -n 2 adaptrt bench {engine} --profile" in capsys.readouterr().err
    report = tmp_path / "report.json"
    load = ["--input_len", "8", "--output_len", "8", "--requests", "4", "--concurrency", "2", "--repeats", "1"]
    adapters = ["--lora_dir", str(cut.adapters["lora"]), str(cut.adapters["dora"])]
    assert command_line(["bench", str(engine), *load, *adapters, "--num_threads", "1", "--output", str(report)]) == 0
    assert workers_of(engine) == others
    rows = json.loads(report.read_text())["rows"]
    assert [row["name"] for row in rows] == ["prefill", "decode", "serve"]
    for row in rows:
        assert row["figure"]["samples"][0]["metrics"]["value"] > 0
        assert row["work_bytes"] is None
    missing = ["--lora_dir", str(tmp_path / "none")]
    assert command_line(["bench", str(engine), *load, *missing]) == 2
    assert workers_of(engine) == others


def test_a_server_and_an_llm_in_leader_mode(demo_engine: Path, tmp_path: Path) -> None:
    """The same commands and scripts under mpirun: rank 0 answers, and the other ranks serve it and end with it."""
    script = tmp_path / "llm.py"
    script.write_text(
        "import sys\n"
        "from adaptrt import LLM\n"
        "from support.ranks import say\n"
        "with LLM(sys.argv[1]) as llm:\n"
        "    if llm.executor.can_enqueue_requests():\n"
        "        say('TEXT', repr(llm.generate('The sea', max_tokens=8).text))\n"
    )
    said = mpirun(2, script, demo_engine).stdout
    assert said.count("TEXT") == 1
    serve = ("-m", "adaptrt.builder.cli", "serve", demo_engine, "--port", 0, "--num_threads", 1)
    with ranks_of(2, *serve) as running:
        address = running.line().split()[-1]
        ranks = processes_with("adaptrt.builder.cli", demo_engine)
        assert len(ranks) == 2
        model = httpx.get(f"{address}/v1/models").json()["data"][0]["id"]
        body = {"model": model, "prompt": "The sea", "max_tokens": 8, "temperature": 0}
        answer = httpx.post(f"{address}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"]
        assert repr(answer) in said
        running.process.send_signal(signal.SIGTERM)
        running.communicate()
    assert have_ended(ranks)


def test_a_server_and_an_llm_start_their_workers(
    demo_engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The server also keeps versions of adapters, and `adaptrt replay` starts workers too."""
    with adaptrt.LLM(demo_engine) as llm:
        (name,) = llm.executor.adapters.names
        texts = [llm.generate("The sea", lora=lora, max_tokens=8).text for lora in (None, name)]
        assert len(workers_of(demo_engine)) == 2
    assert texts[0] != texts[1]
    flags = ("--num_threads", 1, "--enable_lora_loading", "--adapter_root", DEMO / "adapters")
    with http_server(demo_engine, *flags) as address:
        workers = workers_of(demo_engine)
        assert len(workers) == 2
        models = [model["id"] for model in httpx.get(f"{address}/v1/models").json()["data"]]
        assert name in models
        for model, text in zip(models, texts, strict=True):
            body = {"model": model, "prompt": "The sea", "max_tokens": 8, "temperature": 0}
            answer = httpx.post(f"{address}/v1/completions", content=json.dumps(body), timeout=60)
            assert answer.json()["choices"][0]["text"] == text
        version, receipt = version_and_receipt(address)
    assert have_ended(workers)
    path = tmp_path / "receipt.json"
    path.write_text(json.dumps(receipt))
    replay = ["replay", str(path), "--engine_dir", str(demo_engine), "--num_threads", "2"]
    assert receipt["receipt"]["environment"]["ranks"] == 2
    assert receipt["receipt"]["adapters"] == [dict(zip(("name", "digest"), version.split("@"), strict=True))]
    assert command_line([*replay, "--lora_modules", f"it={DEMO / 'adapters' / OLD}"]) == 0
    assert capsys.readouterr().out == "reproduced 1 answers bit by bit\n"


def version_and_receipt(address: str) -> tuple[str, Any]:
    """Replaces an adapter. Returns NAME@DIGEST of its old version, and an answer of that with its receipt."""

    def post(path: str, **fields: Any) -> httpx.Response:
        return httpx.post(f"{address}{path}", json=fields, timeout=60).raise_for_status()

    def text(model: str) -> Any:
        body = {"model": model, "prompt": "The sea", "max_tokens": 8, "temperature": 0}
        return post("/v1/completions", **body).json()["choices"][0]["text"]

    answers = []
    for adapter in (OLD, NEW):
        post("/v1/load_lora_adapter", lora_name="it", lora_path=adapter, load_inplace=True)
        answers.append(text("it"))
    rows = httpx.get(f"{address}/v1/adapters", params={"name": "it"}).json()["data"]
    assert [row["current"] for row in rows] == [True, False]
    version = str(rows[1]["id"])
    assert text(version) == answers[0] != answers[1]
    asked = {"return_receipt": True, "return_receipt_prompt": True, "max_tokens": 8}
    return version, post("/v1/completions", model=version, prompt="The sea", **asked).json()
