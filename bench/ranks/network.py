"""Ranks on two hosts: `python bench/ranks/network.py MODEL WORK_DIR [--stages 2] [--repeats 3] [--samples FILE]`.

MODEL is a Hugging Face directory of a dense decoder. Two ranks, with tensor parallelism or as two pipeline stages, run
in two network namespaces, in turn over links of several delays and rates (slow_link.py). The measured times are
compared with a model of bytes and latency (message_model.py). The model starts from the step over the fastest link,
adds the link's delay to every message, and applies the link's rate to its bytes. ping.py measures with MPI only: the
cost of a message for the ranks themselves, and the properties of the links.

--samples adds the measurements to a file of JSON lines, and prints figures over the whole file. Use it with one repeat
at a time on a machine that is only quiet for minutes.

--former is the Python of another environment. Its installed adaptrt runs the same steps in turn, for example a version
whose all-reduces do not overlap.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from message_model import Shape, Step, Wire
from run import SAMPLE, build_engine
from sample import BATCH, PROMPT
from slow_link import ADDRESSES, NAMESPACES, Link, launcher, two_hosts

TCP = {"UCX_TLS": "tcp,self", "FI_PROVIDER": "tcp"}
"""Transports of ranks on two hosts. These two ranks share a kernel, and would otherwise use shared memory."""
PING = Path(__file__).with_name("ping.py")
FASTEST = Link("none added", 0.0, 0.0)
LINKS = (FASTEST, Link("0.1 ms, 10 Gbit/s", 1e-4, 1.25e9), Link("1 ms, 1 Gbit/s", 1e-3, 1.25e8))
ROWS = {"prefill, 512 tokens": PROMPT, "decode, 1 request": 1, "decode, 16 requests": BATCH}


def main() -> None:
    """Prints the median step of each row and link with the model's prediction, and the maximum deviation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("work_dir", type=Path)
    parser.add_argument("--stages", type=int, choices=(1, 2), default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--samples", type=Path, metavar="FILE")
    parser.add_argument("--former", type=Path, metavar="PYTHON")
    options = parser.parse_args()
    whole = build_engine(options.model, options.work_dir, 1, 1)
    cut = build_engine(options.model, options.work_dir, 2, options.stages)
    pythons = [Path(sys.executable), *([options.former] if options.former else [])]
    samples = []
    if options.samples and options.samples.exists():
        samples = [json.loads(line) for line in options.samples.read_text().splitlines()]
    for _ in range(options.repeats):
        for link in LINKS:
            with two_hosts(link):
                samples.append({"link": link.name, "ping": _run(Path(sys.executable), options.work_dir, PING)})
                for python in pythons:
                    figures = _run(python, options.work_dir, SAMPLE, cut, whole, 1)
                    samples.append({"link": link.name, "python": str(python), "figures": figures})
            if options.samples:
                options.samples.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    pings = {
        link: _ping([one["ping"] for one in samples if one["link"] == link.name and "ping" in one]) for link in LINKS
    }
    medians = {
        (row, link, python): statistics.median(
            tokens / sample["figures"][row]
            for sample in samples
            if sample["link"] == link.name and sample.get("python") == str(python)
        )
        for row, tokens in ROWS.items()
        for link in LINKS
        for python in pythons
    }
    for link, ping in pings.items():
        print(
            f"{link.name:20} messages take " + ", ".join(f"{size}: {1e6 * took:.0f} us" for size, took in ping.items())
        )
    shape = Shape.of(json.loads((options.model / "config.json").read_text()))
    _print_fit(medians, shape, options.stages, _wire(pings[FASTEST]))
    if options.former:
        _print_former(medians, options.former)


def _print_fit(medians: dict[tuple[str, Link, Path], float], shape: Shape, stages: int, fastest: Wire) -> None:
    """`fastest`: the cost of messages for the ranks themselves."""
    worst, worst_of = 0.0, ""
    for row, tokens in ROWS.items():
        step = Step(shape, tokens, 1 if tokens == PROMPT else tokens, stages)
        work = step.work(medians[row, FASTEST, Path(sys.executable)], fastest)
        for link in LINKS:
            measured = medians[row, link, Path(sys.executable)]
            wire = Wire(
                fastest.latency + link.delay,
                max(fastest.byte_seconds, 1 / link.rate) if link.rate else fastest.byte_seconds,
            )
            expected = step.seconds(work, wire)
            print(f"{row:22} {link.name:20} {1e3 * measured:8.1f} ms, by the model {1e3 * expected:8.1f}: "
                  f"{measured / expected:.0%}")  # fmt: skip
            if link is not FASTEST and abs(measured / expected - 1) >= worst:
                worst, worst_of = abs(measured / expected - 1), f"{row}, {link.name}"
    print(f"the worst deviation from the model: {worst:.1%} ({worst_of})")


def _print_former(medians: dict[tuple[str, Link, Path], float], former: Path) -> None:
    for row in ROWS:
        for link in LINKS:
            now, then = medians[row, link, Path(sys.executable)], medians[row, link, former]
            print(f"{row:22} {link.name:20} {1e3 * now:8.1f} ms, with {former} {1e3 * then:8.1f}: {now / then:.0%}")


def _ping(pings: list[dict[str, float]]) -> dict[int, float]:
    """Medians of several runs, by size."""
    return {int(size): statistics.median(ping[size] for ping in pings) for size in pings[0]}


def _wire(ping: dict[int, float]) -> Wire:
    """Latency from the smallest message, and time per byte from the largest."""
    least, greatest = min(ping), max(ping)
    return Wire(ping[least], (ping[greatest] - ping[least]) / (greatest - least))


def _run(python: Path, work_dir: Path, script: Path, *arguments: object) -> dict[str, Any]:
    """Runs the script as two ranks on the two hosts; returns its output."""
    command = [
        "ip", "netns", "exec", NAMESPACES[0], python.with_name("mpirun"),
        "-launcher", "ssh", "-launcher-exec", launcher(work_dir),
        "-localhost", ADDRESSES[0], "-hosts", ",".join(ADDRESSES), "-n", "2", python, script, *arguments,
    ]  # fmt: skip
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=False,
        env={**os.environ, **TCP},
    )  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError(done.stdout + done.stderr)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    main()
