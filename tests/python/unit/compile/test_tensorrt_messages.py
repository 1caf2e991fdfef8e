"""Messages of a child process: TensorRT's log, the progress of a build, and requests and results as text."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from adaptrt.builder.compile.tensorrt import log as log_module
from adaptrt.builder.compile.tensorrt.log import Log, Phases, nodes_named
from adaptrt.builder.compile.tensorrt.messages import (
    Built,
    NetworkTensor,
    PlanRequest,
    built_from_message,
    built_to_message,
    request_from_json,
    request_to_json,
)

OPERATORS = {"layers.0/Add_1": "Add", "layers.0/Add_17": "Add", "head/Gemm_2": "Gemm"}


def test_a_fraction_grows_through_phases_within_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "_SECONDS_BETWEEN_PHASES", 0.0)
    sent: list[dict[str, Any]] = []
    steps = []
    phases = Phases(sent.append, lambda: steps.append(1))
    phases.start("Building", 4)
    phases.step("Building", 0)
    phases.start("Timing", 2)  # within the second quarter
    phases.step("Timing", 0)
    phases.start("Reformatting", 1)  # within the last eighth of it
    phases.step("Reformatting", 0)
    phases.finish("Reformatting")
    phases.step("Timing", 1)
    phases.finish("Timing")
    phases.step("Building", 1)
    phases.start("Timing", 2)
    phases.step("Unheard", 5)
    phases.step("Building", 9)
    fractions = [message["fraction"] for message in sent]
    assert fractions == [0, 0.25, 0.25, 0.375, 0.375, 0.5, 0.5, 0.5, 0.5, 0.5, 1.0]
    assert [message["name"] for message in sent[:3]] == ["Building", "Building", "Timing"]
    assert len(steps) == 7


def test_a_phase_may_have_no_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "_SECONDS_BETWEEN_PHASES", 0.0)
    sent: list[dict[str, Any]] = []
    phases = Phases(sent.append, lambda: None)
    phases.start("Building", 2)
    phases.step("Building", 0)
    phases.start("Nothing to do", 0)
    phases.finish("Nothing to do")
    phases.step("Building", 1)
    assert [message["fraction"] for message in sent] == [0, 0.5, 0.5, 1.0]


def test_phases_are_told_now_and_then() -> None:
    sent: list[dict[str, Any]] = []
    phases = Phases(sent.append, lambda: None)
    for _ in range(100):
        phases.start("Reformatting", 1)
        phases.finish("Reformatting")
    assert len(sent) < 10


def test_names_of_nodes_are_whole() -> None:
    text = "Error Code 4: (layers.0/Add_17: shapes differ) after {ForeignNode[head/Gemm_2...layers.0/Add_1]}."
    assert nodes_named(text, OPERATORS) == ["layers.0/Add_17", "head/Gemm_2", "layers.0/Add_1"]
    assert nodes_named("layers.0/Add_1, head/Gemm_2, layers.0/Add_1.", OPERATORS) == ["layers.0/Add_1", "head/Gemm_2"]
    assert nodes_named("layers.0/Add_12 layers.0/Add", OPERATORS) == []


def test_log_messages_are_sent_without_details() -> None:
    sent: list[dict[str, Any]] = []
    log = Log(sent.append)
    log.add("VERBOSE", "Parsing node: layers.0/Add_1 [Add]")
    log.add("VERBOSE", "Static check")
    log.add("WARNING", "slow")
    log.add("ERROR", "broken")
    log.add("ERROR", "broken")
    log.add("VERBOSE", "Engine Layer Information:\nLayer(PluginV3): x")
    assert [message["severity"] for message in sent] == ["WARNING", "ERROR", "ERROR"]
    assert log.errors == ["broken"]
    assert log.layers.endswith("Layer(PluginV3): x")
    assert log.last_node(OPERATORS) == "layers.0/Add_1"
    assert Log(sent.append).last_node(OPERATORS) is None


def test_requests_and_results_as_text() -> None:
    request = PlanRequest(
        package="tensorrt_rtx", network="/n.onnx", weights=None, compute_capability="8.0",
        profiles=({"x": ((1, 2), (3, 2), (4, 2))}, {"x": ((1, 2), (1, 2), (1, 2))}), timing_cache="/t",
        streams_weights=True, plan="/p",
    )  # fmt: skip
    assert request_from_json(request_to_json(request)) == request
    tensor = NetworkTensor(name="x", dtype="float16", shape=(-1, 2), mode="input")
    built = Built(num_bytes=1, checksum="0", tensors=(tensor,), layers="", base_bytes=2, peak_bytes=3)
    assert built_from_message(json.loads(json.dumps(built_to_message(built)))) == built


def test_a_process_without_a_parent_ends() -> None:
    code = (
        "from adaptrt.builder.compile.tensorrt.child import Messages; import sys; "
        "messages = Messages(); messages.send({}); print('went on', file=sys.stderr)"
    )
    reader, writer = os.pipe()
    os.close(reader)
    try:
        child = subprocess.run(
            [sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE, text=True, check=False
        )
    finally:
        os.close(writer)
    assert (child.returncode, child.stderr) == (1, "")
