"""CPU kernels by name: an executor runs and reports the chosen kernels, and refuses those that the CPU cannot run."""

from __future__ import annotations

import copy
import logging
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

import adaptrt
from adaptrt import _core
from support.models import ModelSpec, save_model
from support.serving import build_engine

DECODER_ONLY = adaptrt.ModelType.DECODER_ONLY
CHOSEN, *OTHERS = _core.cpu_kernels()
IMPOSSIBLE = _core.impossible_cpu_kernels()

# A seccomp sandbox: Linux answers the request for tile registers with EPERM.
REFUSAL = """
import ctypes, struct, sys
LOAD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
NUMBER, FIRST_ARGUMENT = 0, 16
ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, EPERM = 158, 0x1023, 1
REFUSE, ALLOW = 0x00050000 | EPERM, 0x7FFF0000
rules = [
    (LOAD, 0, 0, NUMBER),
    (JUMP_IF_EQUAL, 0, 3, ARCH_PRCTL),
    (LOAD, 0, 0, FIRST_ARGUMENT),
    (JUMP_IF_EQUAL, 0, 1, ARCH_REQ_XCOMP_PERM),
    (RETURN, 0, 0, REFUSE),
    (RETURN, 0, 0, ALLOW),
]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(rules), ctypes.addressof(code)))
libc = ctypes.CDLL(None, use_errno=True)
NO_NEW_PRIVILEGES, SECCOMP, FILTER = 38, 22, 2
if libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0) or libc.prctl(SECCOMP, FILTER, program):
    sys.exit("seccomp: " + str(ctypes.get_errno()))
import adaptrt
from adaptrt import _core
print(_core.impossible_cpu_kernels()[0])
with adaptrt.Executor(sys.argv[1]) as executor:
    assert not executor.await_responses(executor.enqueue_request(adaptrt.Request([3, 4, 5], 4)))[-1].has_error()
    print(executor.engine_info.kernels)
"""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> adaptrt.LoadedEngine:
    root = tmp_path_factory.mktemp("kernels")
    return adaptrt.load_engine(build_engine(save_model(ModelSpec(), root / "model"), root))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    Tokenizer(models.BPE(vocab={"a": 0}, merges=[])).save(str(path))
    return path


@pytest.mark.parametrize("kernels", ["", *_core.cpu_kernels()])
def test_an_executor_runs_the_kernels_that_it_is_told_to(
    engine: adaptrt.LoadedEngine, kernels: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = adaptrt.ExecutorConfig(num_threads=1, kernels=kernels)
    with caplog.at_level(logging.INFO, logger="adaptrt"), adaptrt.Executor(engine, DECODER_ONLY, config) as executor:
        assert executor.engine_info.kernels == (kernels or CHOSEN)
        request_id = executor.enqueue_request(adaptrt.Request([3, 4, 5], 4))
        assert not executor.await_responses(request_id)[-1].has_error()
    (record,) = caplog.records
    why = "asked for" if kernels else "chosen"
    if not kernels and IMPOSSIBLE:
        why += f"; not {IMPOSSIBLE[0][0]}: {IMPOSSIBLE[0][1]}"
    said = f"{engine.directory}: kernels {kernels or CHOSEN} ({why}), threads 1"
    assert (record.name, record.levelname, record.getMessage()) == ("adaptrt", "INFO", said)


def refusal(engine: adaptrt.LoadedEngine, kernels: str) -> str:
    with pytest.raises(adaptrt.ConfigError) as refused:
        adaptrt.Executor(engine, DECODER_ONLY, adaptrt.ExecutorConfig(kernels=kernels))
    return str(refused.value)


@pytest.mark.parametrize("kernels", ["abacus", "AVX2", " "])
def test_unknown_kernels_are_refused_with_those_that_can_run(engine: adaptrt.LoadedEngine, kernels: str) -> None:
    names = ", ".join(_core.cpu_kernels())
    assert refusal(engine, kernels) == f"ExecutorConfig: kernels is '{kernels}'; this CPU can run: {names}"


@pytest.mark.parametrize(("kernels", "reason"), IMPOSSIBLE)
def test_impossible_kernels_are_refused_with_what_is_missing(
    engine: adaptrt.LoadedEngine, kernels: str, reason: str
) -> None:
    assert f"kernels is '{kernels}', but {reason}; this CPU can run: " in refusal(engine, kernels)


@pytest.mark.skipif(CHOSEN != "avx512_amx", reason="this machine has no AMX to be refused")
def test_where_linux_refuses_amx_the_next_kernels_run(engine: adaptrt.LoadedEngine) -> None:
    done = subprocess.run(
        [sys.executable, "-c", REFUSAL, str(engine.directory)], timeout=60, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    refused, chosen = done.stdout.splitlines()
    assert refused == "('avx512_amx', 'Linux refused the tile registers of AMX')"
    assert chosen == OTHERS[0]


def test_an_engine_with_other_kernels_is_refused(engine: adaptrt.LoadedEngine) -> None:
    made = engine.start(adaptrt.ExecutorConfig(num_threads=1, kernels="portable"))
    if not OTHERS:
        pytest.skip("this CPU can run portable kernels only")
    with pytest.raises(adaptrt.ConfigError, match=f"kernels is '{CHOSEN}'; the engine runs portable"):
        _core.Executor(made, adaptrt.ExecutorConfig(kernels=CHOSEN), 1 << 30)


def test_a_configuration_keeps_its_kernels() -> None:
    config = adaptrt.ExecutorConfig(kernels="portable")
    assert pickle.loads(pickle.dumps(config)) == copy.copy(config) == config
    assert config != adaptrt.ExecutorConfig()
    assert "kernels='portable'" in repr(config)
    with pytest.raises(TypeError, match=r"ExecutorConfig\.kernels is None .*; accepted: str"):
        adaptrt.ExecutorConfig(kernels=None)  # type: ignore[arg-type]


def test_text_is_served_by_kernels_of_a_name(engine: adaptrt.LoadedEngine, tokenizer: Path) -> None:
    config = adaptrt.ExecutorConfig(num_threads=1)
    with adaptrt.LLM(engine.directory, config, tokenizer=tokenizer, kernels="portable") as llm:
        assert llm.executor.engine_info.kernels == "portable"
    assert config.kernels == ""
    config.kernels = "portable"
    with adaptrt.LLM(engine.directory, config, tokenizer=tokenizer) as llm:
        assert llm.executor.engine_info.kernels == "portable"
    with pytest.raises(adaptrt.ConfigError, match="kernels is 'abacus', and executor_config has 'portable'"):
        adaptrt.LLM(engine.directory, config, tokenizer=tokenizer, kernels="abacus")
