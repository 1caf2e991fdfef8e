"""Makes the answers of a receipt again, and compares their tokens and log probs bit by bit."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final

from .._core import AdapterError, ConfigError, ExecutorConfig, PeftCacheConfig, Request, cpu_kernels
from ..common.json_fields import load_json_object
from ..common.number_flags import MAX_INT32, integer
from ..common.regular_file import read_regular
from ..common.shown_value import shown
from ..formats.adapter.adapter_copy import TOKENIZER_FILE
from ..runtime.adapter_tokenizers import Tokenizers, read_tokenizer
from ..runtime.chat_template import ChatTemplate
from ..runtime.engine import load_engine
from ..runtime.executor import Executor
from ..runtime.images.opened import ImageLimits
from ..runtime.images.prompt import PreparedMessages
from ..runtime.images.vision import Vision
from ..runtime.llm_config import needs_chunks
from ..runtime.orchestrator.mode import with_workers
from ..runtime.receipts import (
    FORMAT,
    AnswerDigest,
    differences,
    digest_of_text,
    digest_of_tokens,
    environment_of,
    guide_differences,
    request_of,
)

MAX_RECEIPT_BYTES: Final = 64 << 20
"""Maximum size of a receipt's file."""
EXIT_DIFFERENT: Final = 1
_OWN_FILES: Final = ImageLimits(max_bytes=1 << 28, max_pixels=1 << 30, max_images=1 << 20, max_all_pixels=1 << 40)
"""Limits of images, which are higher than a server needs."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags."""
    parser.add_argument(
        "receipt", type=Path, metavar="RECEIPT",
        help="JSON file with a receipt, or with an answer that has one",
    )  # fmt: skip
    parser.add_argument("--engine_dir", type=Path, required=True, metavar="DIR", help="engine that made the answer")
    parser.add_argument(
        "--lora_modules", nargs="+", default=[], metavar="NAME=DIR", help="directories of the receipt's adapters"
    )
    parser.add_argument(
        "--prompt", type=Path, metavar="FILE",
        help="JSON file with an object whose 'prompts' are lists of token ids, if the receipt has no prompts",
    )  # fmt: skip
    parser.add_argument(
        "--images",
        nargs="+",
        type=Path,
        default=[],
        metavar="FILE",
        help="files of the prompt's images, in their order",
    )
    parser.add_argument(
        "--chat_template", type=Path, metavar="FILE",
        help="the server's or the request's own template, if the receipt's chat used neither the adapter's nor the "
        "model's",
    )  # fmt: skip
    parser.add_argument(
        "--num_threads", type=integer(1, MAX_INT32), metavar="N", help="threads (default: all CPUs); no bits change"
    )


def run(args: argparse.Namespace) -> int:
    """Replays the receipt. Returns 1 if a digest differs."""
    receipt = read_receipt(args.receipt)
    prompts = None if args.prompt is None else load_json_object(args.prompt, ConfigError).get("prompts")
    template = None if args.chat_template is None else _text_of(args.chat_template)
    kernels = str(receipt["environment"].get("kernels", ""))
    config = ExecutorConfig(num_threads=args.num_threads)
    config.peft_cache_config = PeftCacheConfig(lora_storage=receipt["environment"].get("lora_storage", "exact"))
    if kernels in cpu_kernels():
        config.kernels = kernels
    engine = load_engine(args.engine_dir)
    # Whatever a server accepts, as in serve/command.py.
    config.enable_chunked_context = needs_chunks(engine)
    config.max_beam_width = engine.config.build_config.max_beam_width
    with Executor(engine, engine.model_type, with_workers(config, engine)) as executor:
        executor.adapters.allows_no_op = True
        problems = replay(executor, receipt, _modules(args.lora_modules), prompts, template, args.images)
    for problem in problems:
        print(problem)
    num_answers = sum(len(request["answers"]) for request in receipt["requests"])
    print("not reproduced" if problems else f"reproduced {num_answers} answers bit by bit")
    return EXIT_DIFFERENT if problems else 0


def read_receipt(path: Path) -> dict[str, Any]:
    """Reads a receipt, also within an answer or the event that ends a stream. Raises ConfigError for other files."""
    content = load_json_object(path, ConfigError, max_bytes=MAX_RECEIPT_BYTES)
    body = content.get("response", content)
    receipt = body.get("receipt", body) if isinstance(body, dict) else None
    if not isinstance(receipt, dict) or receipt.get("format") != FORMAT:
        raise ConfigError(f"{path}: has no receipt of format {FORMAT}; expected an answer to return_receipt")
    for name, kind in (("environment", dict), ("adapters", list), ("requests", list)):
        if not isinstance(receipt.get(name), kind):
            raise ConfigError(f"{path}: {name} is {shown(receipt.get(name))}; expected a {kind.__name__}")
    return receipt


def replay(
    executor: Executor,
    receipt: Mapping[str, Any],
    modules: Mapping[str, Path],
    prompts: Sequence[Sequence[int]] | None,
    chat_template: str | None = None,
    images: Sequence[Path] = (),
) -> list[str]:
    """Returns everything that differs. Answers are compared only if the environment, the adapters, the tokenizer and
    the chat template are the same.

    modules: directories of adapters by name. prompts: token ids of each request, if the receipt does not have them.
    chat_template: a template that a chat may have used instead of the adapter's or the model's. images: files of the
    prompt's images.

    Raises ConfigError for a missing prompt or image, and for a receipt that cannot be read, AdapterError.
    """
    problems = differences(receipt["environment"], environment_of(executor)) + guide_differences(receipt["requests"])
    vision = Vision(executor.engine, executor.adapters, executor.executor_config, _OWN_FILES)
    try:
        problems += _load_adapters(executor, receipt["adapters"], modules)
        problems += _text_differences(executor, receipt, chat_template)
        if problems:
            return problems
        for index, content in enumerate(receipt["requests"]):
            prompt = _prompt_of(content, index, prompts)
            request = _request_of(executor, receipt, index, prompt, vision, images)
            problems += _replay_request(executor, receipt, index, request)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"the receipt cannot be read: {type(error).__name__}: {error}") from error
    finally:
        vision.shutdown()
    return problems


def _load_adapters(executor: Executor, adapters: Sequence[Mapping[str, Any]], modules: Mapping[str, Path]) -> list[str]:
    """Adds the adapters. Lists those whose digests differ."""
    problems = []
    for adapter in adapters:
        name, store = adapter["name"], executor.adapters
        if name in modules:
            executor.add_adapter(name, modules[name], replace=store.knows(name))
        elif not store.knows(name):
            raise AdapterError(f"the receipt's adapter '{name}' is not in the engine; give --lora_modules {name}=DIR")
        store.prepare(name)
        digest = store.get(name).facts.digest
        if digest != adapter["digest"]:
            problems.append(f"adapter '{name}' has digest {digest} here, and {adapter['digest']} in the receipt")
    return problems


def _text_differences(executor: Executor, receipt: Mapping[str, Any], chat_template: str | None) -> list[str]:
    """Lists the tokenizer and the template if their digests differ. Raises ConfigError for unreadable files."""
    directory, name = executor.engine.directory, _adapter_of(receipt)
    model, store = executor.engine.config.pretrained_config, executor.adapters
    of_model = read_tokenizer(directory / TOKENIZER_FILE, model.eos_token_id, model.vocab_size)
    problems = _different("tokenizer", receipt["tokenizer"], [Tokenizers(of_model, store).of(name).content.hex()])
    if receipt["template"] is not None:
        template = ChatTemplate.load(directory)
        if name is not None:
            template = ChatTemplate.load(store.find(name).directory, base=template) or template
        texts = [] if chat_template is None else [chat_template]
        if template is not None:
            texts += [template.text(with_tools=with_tools) for with_tools in (False, True)]
        problems += _different("template", receipt["template"], list(dict.fromkeys(map(digest_of_text, texts))))
    return problems


def _different(field: str, expected: str, here: Sequence[str]) -> list[str]:
    if expected in here:
        return []
    return [f"{field} has digest {' or '.join(here) or 'none'} here, and {expected} in the receipt"]


def _adapter_of(receipt: Mapping[str, Any]) -> str | None:
    """Returns the name of the receipt's adapter, or the weighted sum; None: the base model."""
    terms = receipt["adapters"]
    return "+".join(one["name"] + (f":{one['weight']!r}" if "weight" in one else "") for one in terms) or None


def _text_of(path: Path) -> str:
    try:
        return read_regular(path, MAX_RECEIPT_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: the chat template cannot be read: {error}") from error


def _prompt_of(content: Mapping[str, Any], index: int, prompts: Sequence[Sequence[int]] | None) -> Sequence[int]:
    known = content["prompt"].get("token_ids")
    if known is None and prompts is not None and index < len(prompts):
        known = prompts[index]
    if known is None:
        raise ConfigError(f"requests[{index}] has no prompt, only its digest; give its token ids with --prompt FILE")
    if digest_of_tokens(known) != content["prompt"]["digest"]:
        raise ConfigError(f"the prompt of requests[{index}] has another digest than the receipt's")
    return list(known)


def _request_of(
    executor: Executor,
    receipt: Mapping[str, Any],
    index: int,
    prompt: Sequence[int],
    vision: Vision,
    images: Sequence[Path],
) -> Request:
    content, name = receipt["requests"][index], _adapter_of(receipt)
    change = 0 if name is None else executor.adapters.terms_of(name).vocabulary_change
    vocab_size = executor.engine_info.vocab_size + change
    digests = list(content.get("images", ()))
    if not digests:
        return request_of(content, prompt, vocab_size)
    if len(images) != len(digests):
        raise ConfigError(
            f"requests[{index}]: the receipt only has digests of images ({len(digests)}); give the file of each with "
            f"--images FILE ... ({len(images)} are given)"
        )
    places = PreparedMessages([], list(images), list(map(str, images)))

    def render(_: Sequence[Any]) -> str:
        return vision.place * len(images)

    _, seen = vision.prompt(places, name, render, lambda _: list(prompt), paths=True, with_digests=True)
    assert seen is not None
    for file, expected, digest in zip(images, digests, seen.digests, strict=True):
        if digest != expected:
            raise ConfigError(f"{file}: its pixels have another digest than the receipt's")
    return request_of(content, prompt, vocab_size, seen.within(prompt, vocab_size))


def _replay_request(executor: Executor, receipt: Mapping[str, Any], index: int, request: Request) -> list[str]:
    content, name = receipt["requests"][index], _adapter_of(receipt)
    request_id = executor.enqueue_request(request, adapter=name)
    tokens: dict[int, list[int]] = {}
    log_probs: dict[int, list[float]] = {}
    is_final = False
    while not is_final:
        for response in executor.await_responses(request_id):
            if response.has_error():
                return [f"requests[{index}] fails here: {response.error_msg}"]
            result = response.result
            is_final = is_final or result.is_final
            for beam, output in enumerate(result.output_token_ids):
                answer = result.sequence_index + beam
                tokens.setdefault(answer, []).extend(output)
                log_probs[answer] = list(result.log_probs[beam]) if result.log_probs else []
    problems = []
    for at, expected in enumerate(content["answers"]):
        digest, length = AnswerDigest(), expected["num_tokens"]
        # Texts that end an answer cut tokens that the executor had generated.
        digest.add(tokens.get(at, [])[:length], islice(log_probs.get(at, []), length))
        problems += [
            f"requests[{index}].answers[{at}]: {field} is {value} here, and {expected[field]} in the receipt"
            for field, value in digest.content().items()
            if value != expected[field]
        ]
    return problems


def _modules(given: Sequence[str]) -> dict[str, Path]:
    modules = {}
    for text in given:
        name, equals, directory = text.partition("=")
        if not equals or not name or not directory:
            raise ConfigError(f"lora_modules is '{text}'; expected NAME=DIR")
        modules[name] = Path(directory)
    return modules
