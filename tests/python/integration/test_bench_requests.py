"""bench/run.py with other engines and requests than those of test_bench.py, on a very small model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from adaptrt.builder.cli import run_command
from adaptrt.tools.bench import limits
from adaptrt.tools.bench.report import Report, Row, load_report
from scenarios import command
from scenarios.demo_quality import DEMO_MODEL
from support.made_up_limits import made_up_limits

SCENARIOS = """schema = 1
[run]
repeats = 1
quiet_share = 1.0
quiet_wait = 0.0

[model]
vocab_size = 320
hidden_size = 64
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
head_dim = 16
intermediate_size = 96
max_position_embeddings = 128
tie_word_embeddings = true

[[engine]]
name = "chunked"
lora = false
max_batch_size = 1
max_num_tokens = 32
max_seq_len = 128
convert_flags = ["--tp_size", "1"]
weight_memory = "all"

[[engine]]
name = "everything"
max_batch_size = 4
max_num_tokens = 128
max_seq_len = 128
max_lora_rank = 8
build_flags = ["--max_extra_tokens", "8", "--long_lora_scaling_factors", "2"]

[[engine]]
name = "demo"
model_dir = "DEMO"
weights = ["bf16", "2-bits-64"]
lora = false
max_batch_size = 1
max_num_tokens = 256
max_seq_len = 256

[[scenario]]
name = "long"
kind = "prefill"
engine = ["everything", "chunked"]
input = 100
  [[scenario.compare]]

[[scenario]]
name = "quality"
kind = "perplexity"
engine = "demo"
tokens = 100
reference = "demo-bf16"

[[scenario]]
name = "shift"
kind = "decode"
engine = "everything"
requests = 2
input = 8
output = 8
adapters = { count = 2, ranks = [8], kind = "shift" }

[[scenario]]
name = "ia3"
kind = "decode"
engine = "everything"
requests = 2
input = 8
output = 8
adapters = { count = 2, ranks = [1], kind = "ia3" }

[[scenario]]
name = "lm-head"
kind = "decode"
engine = "everything"
requests = 2
input = 8
output = 8
adapters = { count = 2, ranks = [4], kind = "lm_head" }

[[scenario]]
name = "rotary"
kind = "decode"
engine = "everything"
requests = 2
input = 8
output = 8
adapters = { count = 2, ranks = [4], kind = "rotary" }

[[scenario]]
name = "json"
kind = "generate"
engine = "everything"
requests = 2
input = 8
output = 16
text = "json"

[[scenario]]
name = "right"
kind = "generate"
engine = "everything"
requests = 1
input = 32
output = 48
text = "one_token"
drafts = 8

[[scenario]]
name = "wrong"
kind = "generate"
engine = "everything"
requests = 1
input = 64
output = 48
text = "few_tokens"
drafts = 8

[[scenario]]
name = "file"
kind = "reuse"
engine = "everything"
input = 96
kv_from = "disk"

[[scenario]]
name = "alora"
kind = "reuse"
engine = "everything"
input = 96
question = 8
kv_from = "pool"
adapters = { count = 1, ranks = [4] }
alora = true
""".replace("DEMO", str(DEMO_MODEL))


@pytest.fixture(scope="module", autouse=True)
def limits_made_up() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "measure_machine_limits", made_up_limits)
        yield


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    work = tmp_path_factory.mktemp("bench")
    (work / "small.toml").write_text(SCENARIOS)
    arguments = [work / "small.toml", "--work_dir", work, "--num_threads", 2, "--output", work / "report.json"]
    assert run_command(command, list(map(str, arguments)), prog="bench/run.py", description="") == 0
    return load_report(work / "report.json")


def row_of(report: Report, name: str) -> Row:
    row = report.row(name)
    assert row is not None
    return row


def work_of(report: Report, name: str) -> int:
    work = row_of(report, name).work_bytes
    assert work is not None
    return work


def test_every_scenario_is_reported(report: Report) -> None:
    assert [row.name for row in report.rows] == [
        "long-everything", "long-chunked", "quality-bf16", "quality-2-bits-64", "shift", "ia3", "lm-head", "rotary",
        "json", "right", "wrong", "file", "alora",
    ]  # fmt: skip
    assert all(row.figure.median > 0 for row in report.rows)
    assert report.not_run == []


def test_a_prompt_in_chunks_has_the_work_of_all_of_them(report: Report) -> None:
    assert work_of(report, "long-chunked") > 2 * work_of(report, "long-everything")  # Four steps read the layers.


def test_kinds_of_adapters_have_their_own_bytes(report: Report) -> None:
    """Bytes of keys and values depend on the steps that are counted; the kinds differ by more than that."""
    work = [work_of(report, name) for name in ("ia3", "rotary", "lm-head", "shift")]
    assert work == sorted(set(work))


def test_drafts_are_right_where_only_one_token_is_allowed(report: Report) -> None:
    right, wrong = (row_of(report, name).figure for name in ("right", "wrong"))
    assert right.metric("drafts_right") == right.metric("drafts") > 30
    assert wrong.metric("drafts_right") == 0 < wrong.metric("drafts")


def test_perplexity_is_compared_with_another_engine(report: Report) -> None:
    plain, rounded = (row_of(report, f"quality-{name}").figure for name in ("bf16", "2-bits-64"))
    assert 1.0 < plain.median < rounded.median < 2.0
    assert plain.metric("divergence") == 0.0 < rounded.metric("divergence")
