"""The adaptrt program: its commands, flags and exit status."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from adaptrt import _core
from adaptrt.builder import cli
from adaptrt.formats.models.registry import load_config
from support.models import ModelSpec, save_model


def run(run_: object, *flags: str) -> int:
    """Runs a command whose run() is this function, with flags like those of most commands."""

    def add_arguments(parser: argparse.ArgumentParser) -> None:
        group = parser.add_argument_group("sizes")
        group.add_argument("--max_lora_rank", type=int, default=64)
        parser.add_argument("--storage-type", default="float16")

    module = SimpleNamespace(add_arguments=add_arguments, run=run_)
    return cli.run_command(module, flags, prog="adaptrt test", description="Test.")


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    output = capsys.readouterr().out
    for command in cli.COMMANDS:
        assert f"  {command.name} " in output
        assert command.summary in output


def test_without_a_command_help_is_shown_and_the_status_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "usage: adaptrt <command>" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    from adaptrt._version import __version__

    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"adaptrt {__version__}\n"


def test_an_unknown_command_is_answered_with_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["convert"]) == 2
    assert "unknown command 'convert'; commands: convert-checkpoint, build, " in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--max_lora_rank", "--max-lora-rank", "--max-lora_rank"])
def test_flags_take_underscores_and_dashes(flag: str) -> None:
    seen: list[argparse.Namespace] = []
    assert run(lambda args: seen.append(args) or 0, flag, "8", "--storage_type=a-b_c") == 0
    assert run(lambda args: seen.append(args) or 0, f"{flag}=8", "--storage-type", "a-b_c") == 0
    assert seen[0] == seen[1] == argparse.Namespace(max_lora_rank=8, storage_type="a-b_c")


@pytest.mark.parametrize("flags", [["--max_lora"], ["--unknown"], ["--max_lora_rank", "x"], ["--max_lora_rank"]])
def test_flags_are_never_guessed(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run(lambda args: 0, *flags)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("adaptrt test: error: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (_core.ConfigError("field x is 3"), "adaptrt: error: field x is 3\n"),
        (_core.ConfigError("tensor '\x1b[2J\n\u200eé'"), "adaptrt: error: tensor '\\x1b[2J\n\\u200eé'\n"),
        (_core.LoraCacheFullError("PEFT Cache is full"), "adaptrt: error: PEFT Cache is full\n"),
        (FileNotFoundError(2, "No such file or directory", "x.json"), "adaptrt: error: x.json: No such file"),
    ],
)
def test_a_users_mistake_is_one_line(error: Exception, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(args: argparse.Namespace) -> int:
        raise error

    assert run(fail) == 2
    assert capsys.readouterr().err.startswith(expected)


@pytest.mark.parametrize("error", [ValueError("a defect"), OSError("no file to blame"), KeyError("x")])
def test_a_defect_keeps_its_traceback(error: Exception) -> None:
    def fail(args: argparse.Namespace) -> int:
        raise error

    with pytest.raises(type(error)):
        run(fail)


def test_an_interrupt(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(args: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    assert run(fail) == 130
    assert capsys.readouterr().err == "adaptrt: interrupted\n"


PROGRAM = [sys.executable, "-m", "adaptrt.builder.cli"]


def test_importing_the_program_imports_no_command() -> None:
    commands = [importlib.util.resolve_name(command.module, "adaptrt.builder") for command in cli.COMMANDS]
    assert "adaptrt.builder.commands.convert_checkpoint" in commands
    code = "import sys, adaptrt.builder.cli; print([name for name in sys.argv[1:] if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code, *commands], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_reader_that_goes_away_is_no_defect() -> None:
    process = subprocess.Popen([*PROGRAM, "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    process.wait()
    assert b"Traceback" not in process.stderr.read()


def test_conversion_through_a_pipe_is_plain_lines(tmp_path: Path) -> None:
    save_model(ModelSpec(), tmp_path / "hf")
    command = [*PROGRAM, "convert-checkpoint", "--model-dir", "hf", "--output_dir", "out", "--dtype=float16"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "out: LlamaForCausalLM, 2 layers, float16, 17 tensors of 38.0 KiB in 1 rank\n"
    lines = done.stderr.splitlines()
    assert lines[0] == "Converting: 38.0 KiB"
    assert lines[1].startswith("Converting: done in ")
    assert len(lines) == 2
    assert load_config(tmp_path / "out").dtype == _core.DType.FLOAT16


def test_conversion_on_a_terminal_draws_a_bar(tmp_path: Path) -> None:
    save_model(ModelSpec(), tmp_path / "hf")
    command = [*PROGRAM, "convert-checkpoint", "--model_dir", "hf", "--output_dir", "out"]
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    subprocess.run(command, cwd=tmp_path, stderr=slave, stdout=subprocess.DEVNULL, check=True, env=environment)
    os.close(slave)
    shown = os.read(master, 1 << 16).decode()
    os.close(master)
    assert "Converting" in shown
    assert "\N{BOX DRAWINGS HEAVY HORIZONTAL}" in shown
    assert "done in" not in shown


def test_a_name_that_stdout_cannot_show_is_escaped(tmp_path: Path) -> None:
    save_model(ModelSpec(num_hidden_layers=1), tmp_path / "model")
    command = [
        sys.executable,
        "-m",
        "adaptrt.builder.cli",
        "convert-checkpoint",
        "--model_dir",
        "model",
        "--output_dir",
    ]
    result = subprocess.run(
        [*command, b"out-\xff-\xc3\xbc"],
        cwd=tmp_path, env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(r"out-\udcff-\xfc: LlamaForCausalLM")


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    save_model(ModelSpec(), tmp_path / "hf")
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({16 << 10}, {16 << 10})); "
    code = limit + "import sys; from adaptrt.builder.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "convert-checkpoint", "--model_dir", "hf", "--output_dir", "out"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert "rank0.safetensors: File too large" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == [tmp_path / "hf"]


def test_a_refused_model_is_one_line_and_status_2(tmp_path: Path) -> None:
    model_dir = save_model(ModelSpec(), tmp_path / "hf")
    config = json.loads((model_dir / "config.json").read_text())
    (model_dir / "config.json").write_text(json.dumps({**config, "hidden_act": "gelu"}))
    command = [*PROGRAM, "convert-checkpoint", "--model_dir", "hf", "--output_dir", "out"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == 'adaptrt: error: hf/config.json: hidden_act is "gelu"; accepted: silu, relu, fatrelu\n'
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", [command.name for command in cli.COMMANDS])
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([command, "--help"])
    assert caught.value.code == 0
    assert f"usage: adaptrt {command} " in capsys.readouterr().out


def test_help_fits_into_80_columns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    cli.main(["--help"])
    for command in cli.COMMANDS:
        with pytest.raises(SystemExit):
            cli.main([command.name, "--help"])
    too_long = [line for line in capsys.readouterr().out.splitlines() if len(line) > 80 and " " in line.strip()]
    assert too_long == []


def test_a_short_usage_names_what_must_be_given() -> None:
    for command in cli.COMMANDS:
        module = importlib.import_module(command.module, "adaptrt.builder")
        parser = cli.make_parser(command, module)
        groups = [group for group in parser._mutually_exclusive_groups if group.required]
        needed = [action for group in groups for action in group._group_actions]
        needed += [action for action in parser._actions if action.required]
        for action in needed:
            assert (action.option_strings or [action.metavar])[0] in parser.format_usage(), (command.name, action)


def test_serve_writes_flags_with_dashes_and_reads_both_spellings(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--max-body-bytes", "--max_body_bytes"):
        with pytest.raises(SystemExit):
            cli.main(["serve", "model", flag, "0"])
        assert "argument --max-body-bytes: it is 0; expected an integer from 1" in capsys.readouterr().err
    for flag in ("--max-cpu-loras", "--max_cpu_loras"):
        with pytest.raises(SystemExit):
            cli.main(["serve", "model", flag, "4"])
        assert "argument --max-cpu-loras: not supported" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help"])
    flags = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("  --")]
    assert "--max-body-bytes" in flags
    assert not any("_" in flag for flag in flags)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (
            ["--use_weight_only", "--weight_only_precision", "int4_awq"],
            "m: expected the directory of the published model",
        ),
        (["--weight_only_precision", "int8"], "weight_only_precision needs use_weight_only"),
        (["--use_weight_only", "--per_group"], "per_group needs weight_only_precision int4"),
        (["--use_weight_only", "--has_zero_point"], "has_zero_point needs weight_only_precision int4"),
        (["--group_size", "128"], "group_size needs per_group"),
        (
            ["--use_weight_only", "--weight_only_precision", "int4", "--per_group", "--group_size", "0"],
            "group_size is 0; accepted: 16, 32, 64, 128",
        ),
    ],
)
def test_flags_of_quantisation_are_refused_by_name_and_reason(
    flags: list[str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["convert-checkpoint", "--model_dir", "m", "--output_dir", str(tmp_path / "out"), *flags]) == 2
    assert re.search(f"error: {complaint}", capsys.readouterr().err)
    assert not (tmp_path / "out").exists()
