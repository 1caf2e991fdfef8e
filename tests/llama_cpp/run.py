"""Compares AdaptRT with llama.cpp on the same GGUF files. CI does not run it.

    bench/peers/install.sh HOME llama_cpp
    .venv/bin/python tests/llama_cpp/run.py --home HOME [--models NAME ...] [--types TYPE ...] REPORT

The demo's model and random models of all architectures are converted and quantised by llama.cpp's programs. For each
file the report says whether token ids are equal, how far the log probs of llama-server's greedy answers are from
AdaptRT's, and by how much AdaptRT prefers another token where it does. Adapters are GGUF files of llama.cpp's
converter. For the demo's model both perplexities are in it.

The exit status is 1 if token ids differ, or if log probs differ from those of llama.cpp with the same values.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))

import numpy as np
from models import EXACT, MODELS, Model
from programs import Position, Server, perplexity, quantize
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

import adaptrt
from adaptrt import DType, LoraConfig
from adaptrt.builder.build import build
from adaptrt.builder.conversion.checkpoint import Checkpoint
from adaptrt.formats.engine.build_config import ENABLE, BuildConfig, LoraBuildConfig, PluginConfig
from adaptrt.formats.sources import find_adapter, find_model
from adaptrt.runtime.engine import load_engine
from adaptrt.tools.demo_corpus import STYLES, document, facts
from support.families import save_family
from support.models import save_adapter
from support.serving import collect, make_request
from support.tokenizers import CORPUS

ROOT = Path(__file__).resolve().parents[2]
DEMO = "demo"
DEMO_DIRECTORY = ROOT / "examples" / "demo"
DEMO_ADAPTERS = ("pirate", "french", "shout", "poet")
"""`json` is DoRA, which llama.cpp's converter refuses."""
TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_M", "Q6_K",
         "IQ4_NL", "IQ4_XS")  # fmt: skip
FEW_TYPES = ("F32", "Q8_0", "Q4_K_M", "Q6_K", "IQ4_XS")
"""Types of the random models. The demo's model is compared in all types."""
PROMPTS = ((0, 12), (3, 40), (60, 90), (211, 30), (417, 5))
"""First token in the text, and number of tokens. Windows of the random models have 24."""
ANSWER_TOKENS = 24
WINDOW = 128
GLM_TOKENS = ("<|endoftext|>", "<|user|>")
"""Tokens that llama.cpp's converter of GLM expects."""


@dataclass(frozen=True)
class Difference:
    """AdaptRT's log probs, compared with those of llama-server's greedy answers."""

    positions: int
    largest: float
    """Largest difference of the log probs of llama-server's most likely tokens."""
    mean: float
    other_tokens: int
    """Positions at which AdaptRT's most likely token is another one."""
    widest_gap: float
    """Largest difference of AdaptRT's log probs of the two tokens at these positions."""

    def __str__(self) -> str:
        tokens = f"{self.other_tokens} of {self.positions} tokens differ"
        if self.other_tokens:
            tokens += f", by at most {self.widest_gap:.2g}"
        return f"at most {self.largest:.2g}, on average {self.mean:.2g}; {tokens}"


@dataclass
class Comparison:
    """Result for one file, alone or with one adapter."""

    model: str
    type: str
    adapter: str | None
    tolerance: float
    exact: Difference
    """llama-server has the file's values in F32, as llama-quantize dequantises them. It rounds no activations then."""
    rounded: Difference | None = None
    """llama-server has the file itself, and rounds activations to the type that fits its weights; None: F32."""
    perplexity: float | None = None
    llama_cpp_perplexity: float | None = None

    @property
    def holds(self) -> bool:
        """True if tokens are equal, unless two are closer than the tolerance, and so are log probs."""
        return self.exact.largest <= self.tolerance and self.exact.widest_gap <= self.tolerance


@dataclass(frozen=True)
class Tools:
    """llama.cpp's sources and programs."""

    python: Path
    sources: Path
    programs: Path

    def convert(self, output: Path, model: Path, *arguments: object) -> Path:
        """Runs llama.cpp's converter, unless the file exists. Raises RuntimeError with its last words."""
        if not output.exists():
            script = Path(__file__).with_name("convert.py")
            command = [self.python, script, self.sources, output, model, *arguments]
            result = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
            if result.returncode != 0:
                raise RuntimeError(f"{output.name}: {result.stderr[-1500:]}")
        return output

    def typed(self, source: Path, kind: str, target: str) -> Path:
        """The file in another type, quantised unless it exists."""
        file = source.with_name(target)
        if not file.exists():
            quantize(self.programs, source, file, kind)
        return file


def main() -> int:
    """Returns 0 if everything agrees."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, help="file to write, JSON")
    parser.add_argument("--home", type=Path, required=True, help="directory of bench/peers/install.sh")
    parser.add_argument(
        "--programs", type=Path, help="directory of llama.cpp's programs (default: HOME/llama-build/bin)"
    )
    parser.add_argument("--models", nargs="+", default=[DEMO, *MODELS], choices=[DEMO, *MODELS], metavar="NAME")
    parser.add_argument("--types", nargs="+", choices=TYPES, metavar="TYPE")
    arguments = parser.parse_args()
    (sources,) = arguments.home.glob("llama_cpp_python-*/vendor/llama.cpp")
    programs = arguments.programs or arguments.home / "llama-build" / "bin"
    tools = Tools(arguments.home / "venv-llama_cpp" / "bin" / "python", sources, programs)
    place = arguments.home / "comparison"
    place.mkdir(exist_ok=True)
    text = write_text(place / "text.txt")
    found: list[Comparison] = []
    failures: list[str] = []
    for name in arguments.models:
        try:
            for each in compared(name, tools, place / name, text, arguments.types, failures):
                found.append(each)
                print(line_of(each), flush=True)
        except (RuntimeError, adaptrt.AdaptrtError) as error:
            failures.append(f"{name}: {error}")
            print(failures[-1], flush=True)
    arguments.report.write_text(json.dumps([asdict(each) for each in found], indent=1) + "\n")
    failures += [f"not within {each.tolerance}: {line_of(each)}" for each in found if not each.holds]
    print("\n".join(failures) or f"{len(found)} comparisons: all are within their tolerance")
    return int(bool(failures))


def write_text(path: Path) -> Path:
    """Writes the demo's corpus, which also trains SentencePiece tokenizers."""
    documents = [document(fact, style, tagged=style != "plain") for style in STYLES for fact in facts()]
    path.write_text("".join(documents[::3]), encoding="utf-8")
    return path


def compared(
    name: str, tools: Tools, place: Path, text: Path, types: Sequence[str] | None, failures: list[str]
) -> Iterator[Comparison]:
    """All comparisons of one model."""
    place.mkdir(exist_ok=True)
    adapters, whole = prepared(name, tools, place, text)
    tolerance = EXACT if name == DEMO else MODELS[name].tolerance
    for kind in types or (TYPES if name == DEMO else FEW_TYPES):
        file = whole if kind == "F32" else tools.typed(whole, kind, f"{name}-{kind}.gguf")
        values = whole if kind == "F32" else tools.typed(file, "F32", f"{name}-{kind}-as-F32.gguf")
        directory = find_model(file).directory
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        content = text.read_text(encoding="utf-8")
        sample = tokenizer.encode(content, add_special_tokens=False).ids
        paths = list(adapters.values())
        with tempfile.TemporaryDirectory() as engine, OwnEngine(directory, Path(engine), has_lora=bool(paths)) as own:
            with Server(tools.programs, values, paths) as server:
                failures += [f"{name} {kind}: {each}" for each in token_differences(server, tokenizer)]
                exact = [difference(server, own, sample, paths, number) for number in (None, *range(len(paths)))]
            found = [
                Comparison(name, kind, adapter, tolerance, each)
                for adapter, each in zip((None, *adapters), exact, strict=True)
            ]
            if kind != "F32":
                with Server(tools.programs, file, paths) as server:
                    for number, each in enumerate(found):
                        each.rounded = difference(server, own, sample, paths, None if number == 0 else number - 1)
            if name == DEMO:
                found[0].perplexity = own.perplexity(tokenizer.encode(content).ids, bos=tokenizer.token_to_id("<s>"))
                found[0].llama_cpp_perplexity = perplexity(tools.programs, file, text, WINDOW)
        yield from found


def prepared(name: str, tools: Tools, place: Path, text: Path) -> tuple[dict[str, Path], Path]:
    """The model's adapters as GGUF files, and the model in F32."""
    if name == DEMO:
        directory = DEMO_DIRECTORY / "model"
        trained = {each: DEMO_DIRECTORY / "adapters" / each for each in DEMO_ADAPTERS}
        extra: list[object] = []
    else:
        own: Model = MODELS[name]
        directory, trained, extra = place / "model", {}, []
        if not directory.exists():
            save_family(own.family, directory)
            soften(directory)
        if own.is_sentencepiece:
            extra = ["--sentencepiece", text]
        else:
            write_tokenizer(directory)
        if own.has_lora:
            trained = {"random": place / "adapter"}
            if not trained["random"].exists():
                save_adapter(directory, trained["random"], 1, target_modules=own.family.targets, r=8)
    whole = tools.convert(place / f"{name}-F32.gguf", directory, *extra)
    adapters = {
        each: tools.convert(place / f"{each}-lora.gguf", directory, "--adapter", path) for each, path in trained.items()
    }
    return adapters, whole


def soften(directory: Path) -> None:
    """Makes the embedding of a model with tied weights smaller: its logits would be so large that one token is
    certain."""
    if not json.loads((directory / "config.json").read_text()).get("tie_word_embeddings"):
        return
    file = directory / "model.safetensors"
    tensors = load_file(file)
    for name in tensors:
        if name.endswith(("embed_tokens.weight", "wte.weight")):
            tensors[name] = tensors[name] * np.float32(0.1)
    save_file(tensors, file, {"format": "pt"})


def write_tokenizer(directory: Path) -> None:
    """Writes the demo's tokenizer with two more tokens."""
    tokenizer = Tokenizer.from_file(str(DEMO_DIRECTORY / "model" / "tokenizer.json"))
    tokenizer.add_special_tokens(list(GLM_TOKENS))
    tokenizer.save(str(directory / "tokenizer.json"))
    config = DEMO_DIRECTORY / "model" / "tokenizer_config.json"
    (directory / config.name).write_bytes(config.read_bytes())


def token_differences(server: Server, tokenizer: Tokenizer) -> Iterator[str]:
    """Texts whose token ids differ."""
    for text in CORPUS:
        for special in (False, True):
            theirs = server.tokenize(text, special=special)
            ours = tokenizer.encode(text, add_special_tokens=special).ids
            if theirs != ours:
                yield f"token ids of {text!r} (special tokens: {special}) are {ours}, in llama.cpp {theirs}"


class OwnEngine:
    """AdaptRT's engine of a file: its blocks are kept, everything else is float32."""

    def __init__(self, model: Path, place: Path, *, has_lora: bool) -> None:
        lora = PluginConfig(lora_plugin="auto", dora_plugin=ENABLE) if has_lora else PluginConfig()
        config = BuildConfig(
            max_batch_size=4, max_num_tokens=512, max_seq_len=256, plugin_config=lora,
            lora_config=LoraBuildConfig(max_lora_rank=16),
        )  # fmt: skip
        build(Checkpoint.of_model(model, DType.FLOAT32), config, place / "engine")
        self._executor = adaptrt.Executor(load_engine(place / "engine"))
        self._loaded: dict[Path, int] = {}

    def log_probs(self, tokens: Sequence[int], adapter: Path | None = None) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Log probs of all tokens after each one: float64 [tokens, vocabulary]."""
        lora = None
        if adapter is not None and adapter not in self._loaded:
            self._loaded[adapter] = len(self._loaded)
            lora = LoraConfig.from_peft(
                self._loaded[adapter], find_adapter(str(adapter)).directory, self._executor.engine
            )
        elif adapter is not None:
            lora = LoraConfig(self._loaded[adapter])
        request = make_request(list(tokens), 1, lora)
        (number,) = self._executor.enqueue_requests([request])
        logits = collect(self._executor, number).context_logits.astype(np.float64)
        shifted = logits - logits.max(axis=1, keepdims=True)
        result: np.ndarray[Any, np.dtype[np.float64]] = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
        return result

    def perplexity(self, tokens: Sequence[int], *, bos: int) -> float:
        """Perplexity of the second half of each window, as llama-perplexity measures it."""
        total, count, first = 0.0, 0, WINDOW // 2
        for start in range(0, len(tokens) - WINDOW + 1, WINDOW):
            window = [bos, *tokens[start + 1 : start + WINDOW]]
            rows = self.log_probs(window)
            total -= sum(float(rows[at, window[at + 1]]) for at in range(first, WINDOW - 1))
            count += WINDOW - 1 - first
        return math.exp(total / count)

    def __enter__(self) -> OwnEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self._executor.shutdown()


def difference(
    server: Server, own: OwnEngine, sample: Sequence[int], adapters: Sequence[Path], number: int | None
) -> Difference:
    """Compares the greedy answers of llama-server with one of the adapters, or without."""
    changes: list[float] = []
    gaps: list[float] = []
    positions = 0
    for start, length in PROMPTS:
        prompt = list(sample[start : start + length])
        answer: list[Position] = server.complete(prompt, ANSWER_TOKENS, number)
        tokens = [*prompt, *(each.token for each in answer)]
        rows = own.log_probs(tokens, None if number is None else adapters[number])[len(prompt) - 1 :]
        for row, position in zip(rows, answer, strict=False):
            positions += 1
            changes += [abs(float(row[token]) - log_prob) for token, log_prob in position.log_probs.items()]
            best = int(row.argmax())
            if best != position.token:
                gaps.append(float(row[best] - row[position.token]))
    return Difference(positions, max(changes), float(np.mean(changes)), len(gaps), max(gaps, default=0.0))


def line_of(result: Comparison) -> str:
    """One line for people."""
    adapter = "" if result.adapter is None else f" + {result.adapter}"
    text = f"{result.model} {result.type}{adapter}: log probs differ by {result.exact}"
    if result.rounded is not None:
        text += f" (with llama.cpp's rounded activations: {result.rounded})"
    if result.perplexity is not None:
        text += f"; perplexity {result.perplexity:.3f}, llama.cpp's {result.llama_cpp_perplexity or math.nan:.3f}"
    return text


if __name__ == "__main__":
    raise SystemExit(main())
