"""`adaptrt chat`: a conversation with a model and its adapters, on a terminal or with lines from stdin."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Final, TextIO

from .._core import AdaptrtError, ConfigError, FinishReason
from ..builder.commands import engine_flags
from ..common.number_flags import MAX_INT32, MAX_UINT64, integer
from ..formats.sources import find_model
from ..runtime.answer import AnswerStream
from ..runtime.llm import LLM
from ..runtime.llm_options import recommended_sampling
from ..runtime.sampling_defaults import SamplingDefaults
from ..runtime.sampling_params import SamplingParams

_PROMPT: Final = "> "
_HELP: Final = """\
/lora NAME      answer with an adapter from now on; /lora alone: with the model itself
/loras          the adapters that there are
/system TEXT    begin a new conversation with these instructions; /system alone: without any
/reset          forget the conversation
/exit           end; so does the end of the input
Ctrl-C stops an answer. A line that begins with // is sent with one / less."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags."""
    parser.add_argument("model", metavar="MODEL", help=engine_flags.MODEL_HELP)
    parser.add_argument("--lora", metavar="NAME", help="adapter that answers at first")
    parser.add_argument("--system", metavar="TEXT", help="instructions at the beginning of the conversation")
    parser.add_argument(
        "--max_tokens", type=integer(1, MAX_INT32), default=512, metavar="N",
        help="maximum tokens of an answer (default: %(default)s)",
    )  # fmt: skip
    engine_flags.add_device_ids(parser)
    engine_flags.add_weight_memory(parser)
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        help="0: always choose the most likely token (default: from generation_config, or else 0)",
    )
    sampling.add_argument(
        "--top_k", type=integer(0, MAX_INT32), metavar="N", help="choose among the N most likely tokens"
    )
    sampling.add_argument(
        "--top_p", type=float, metavar="P", help="choose among the most likely tokens whose probabilities add up to P"
    )
    sampling.add_argument("--seed", type=integer(0, MAX_UINT64), metavar="N", help="seed of the random choices")
    sampling.add_argument(
        "--generation_config", default="auto", metavar="auto|vllm|DIR",
        help="sampling that the flags above do not set; auto: from the model's generation_config.json, DIR: from the "
        "file there, vllm: from no file (default: %(default)s)",
    )  # fmt: skip
    engine_flags.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Reads and answers lines until the input ends."""
    model = find_model(args.model)
    sampling = _sampling_of(args, recommended_sampling(model.directory, args.generation_config))
    options = engine_flags.engine_options_of(args)
    with LLM(
        model,
        device_ids=args.device_ids,
        weight_memory=args.weight_memory,
        engine_options=options,
        generation_config=args.generation_config,
    ) as llm:
        if not llm.executor.can_enqueue_requests():
            return 0  # rank 0 reads the lines
        llm.chat_template(args.lora)  # Raises an error early if the model has no chat template.
        chat = Chat(llm, lora=args.lora, system=args.system, max_tokens=args.max_tokens, sampling=sampling)
        is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        if is_terminal:
            print(f"{args.model}, adapters: {chat.adapters()}. /help lists the commands.")
        for line in _lines(sys.stdin, is_terminal=is_terminal):
            if not chat.take(line):
                break
    return 0


class Chat:
    """One conversation: its messages, and the adapter that answers."""

    def __init__(
        self,
        llm: LLM,
        *,
        lora: str | None = None,
        system: str | None = None,
        max_tokens: int = 512,
        sampling: SamplingParams | None = None,
        output: TextIO | None = None,
    ) -> None:
        """sampling: None: as the model's generation_config.json recommends. output: None: the current sys.stdout."""
        self._llm = llm
        self._lora = lora
        self._system = system
        self._max_tokens = max_tokens
        self._sampling = sampling
        self._output = sys.stdout if output is None else output
        self._messages: list[dict[str, str]] = []

    def adapters(self) -> str:
        """Names of the adapters, for the user."""
        return ", ".join(self._llm.executor.adapters.names) or "none"

    def take(self, line: str) -> bool:
        """Answers a line or executes its command. Returns False when the conversation ends.

        Prints the error of an invalid line; the conversation stays unchanged.
        """
        if not line.strip():
            return True
        if line.startswith("/") and not line.startswith("//"):
            return self._obey(line)
        try:
            self._answer(line[1:] if line.startswith("//") else line)
        except AdaptrtError as error:
            self._say(f"error: {error}")
        return True

    def _obey(self, line: str) -> bool:
        name, _, rest = line.partition(" ")
        commands: dict[str, Callable[[str], None]] = {
            "/lora": self._choose,
            "/loras": lambda _: self._say(self.adapters()),
            "/system": self._instruct,
            "/reset": lambda _: self._messages.clear(),
            "/help": lambda _: self._say(_HELP),
        }
        if name == "/exit":
            return False
        if name in commands:
            commands[name](rest.strip())
        else:
            self._say(f"error: unknown command {name}; commands: {', '.join(commands)}, /exit")
        return True

    def _choose(self, lora: str) -> None:
        try:
            self._llm.chat_template(lora or None)
        except AdaptrtError as error:
            self._say(f"error: {error}")
            return
        self._lora = lora or None

    def _instruct(self, system: str) -> None:
        self._system = system or None
        self._messages.clear()

    def _answer(self, text: str) -> None:
        """Writes the answer while it is generated. The partial text of an interrupted answer stays in the
        conversation."""
        instructions = [] if self._system is None else [{"role": "system", "content": self._system}]
        question = {"role": "user", "content": text}
        pieces = []
        with contextlib.closing(
            self._llm.chat_stream(
                [*instructions, *self._messages, question],
                self._sampling,
                lora=self._lora,
                max_tokens=self._max_tokens,
            )
        ) as answer:
            try:
                for piece in answer:
                    pieces.append(piece)
                    self._write(piece)
                ending = self._ending(answer)
            except KeyboardInterrupt:
                ending = " [stopped]"
        self._write(ending + "\n")
        self._messages += [question, {"role": "assistant", "content": "".join(pieces)}]

    def _ending(self, answer: AnswerStream) -> str:
        is_cut = answer.finish_reason is FinishReason.LENGTH
        return f" [the limit of {self._max_tokens} tokens]" if is_cut else ""

    def _say(self, text: str) -> None:
        self._write(text + "\n")

    def _write(self, text: str) -> None:
        """Writes immediately. Escapes control characters, which a model may generate and a terminal would obey."""
        self._output.write("".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text))
        self._output.flush()


def _lines(stream: TextIO, *, is_terminal: bool) -> Iterator[str]:
    """Lines without their line ends. A terminal gets a prompt and a history, and Ctrl-C clears the typed line."""
    if not is_terminal:
        for line in stream:
            yield line.rstrip("\n")
        return
    with contextlib.suppress(ImportError):  # Some Python builds lack readline; typing works without it.
        import readline  # noqa: F401
    while True:
        try:
            yield input(_PROMPT)
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()


def _sampling_of(args: argparse.Namespace, recommended: SamplingDefaults) -> SamplingParams | None:
    """Returns the sampling that the flags set; None: they set none.

    Raises RequestError for a value that cannot be used, ConfigError for flags without effect.
    """
    given = {name: getattr(args, name) for name in ("temperature", "top_k", "top_p", "seed")}
    given = {name: value for name, value in given.items() if value is not None}
    is_random = args.temperature != 0 and (args.temperature is not None or recommended.samples)
    if not is_random and (idle := [name for name in given if name != "temperature"]):
        raise ConfigError(
            f"{' and '.join(idle)}: without a temperature above 0 the choice is not random, so this has no effect"
        )
    return SamplingParams(**given) if given else None
