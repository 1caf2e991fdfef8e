"""Compiles guides in a separate process, which may crash. guide_trial.py starts it.

This file runs as a script without the adaptrt package: it needs only llguidance. Messages in both directions are JSON
after their length in four bytes. The first message to this process is the vocabulary. Each further one is a grammar;
its answer has an error or the memory that the grammar holds.
"""

from __future__ import annotations

import ctypes
import json
import resource
import struct
import sys
import threading
import time
from base64 import b64decode
from pathlib import Path
from typing import Any, BinaryIO, Final

_STATM: Final = Path("/proc/self/statm")
_LENGTH: Final = struct.Struct("<I")
_MAKERS: Final = {
    "json_schema": "grammar_from_json_schema",
    "regex": "grammar_from_regex",
    "lark": "grammar_from_lark",
}
"""Functions of llguidance's matcher by language. A grammar in the language "llguidance" needs none."""


class _Vocabulary:
    """The tokenizer in the form that llguidance.LLTokenizer expects."""

    bos_token_id: Final = None
    special_token_ids: Final[list[int]] = []
    is_tokenizer_wrapper: Final = True

    def __init__(self, tokens: list[bytes], stop_token_ids: list[int]) -> None:
        self.tokens = tokens
        self.eos_token_id = stop_token_ids[0]
        self._ids = {token: number for number, token in enumerate(tokens) if token}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: str) -> list[int]:
        """Tokenises greedily with the longest token, as the executor lets llguidance do."""
        data, place, found = text.encode(), 0, []
        while place < len(data):
            ends = range(min(place + self._longest, len(data)), place, -1)
            end = next((end for end in ends if data[place:end] in self._ids), None)
            if end is None:
                break
            found.append(self._ids[data[place:end]])
            place = end
        return found


class _Heap:
    """Measures the memory that the process uses, in bytes."""

    class _Info(ctypes.Structure):
        _fields_ = [
            (name, ctypes.c_size_t)
            for name in (
                "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks",
                "keepcost",
            )
        ]  # fmt: skip

    def __init__(self) -> None:
        # glibc has mallinfo2 since 2.33. Elsewhere resident pages are counted, which may include free heap memory.
        self._mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
        if self._mallinfo2 is not None:
            self._mallinfo2.restype = self._Info

    def num_bytes(self) -> int:
        if self._mallinfo2 is None and not _STATM.exists():  # macOS
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if self._mallinfo2 is None:
            return _num_pages(1) * resource.getpagesize()
        info = self._mallinfo2()
        return int(info.uordblks + info.hblkhd)


def _num_pages(column: int) -> int:
    """Returns the number of pages of this process: all (0), or the resident ones (1)."""
    return int(_STATM.read_text(encoding="ascii").split()[column])


def framed(message: Any) -> bytes:
    """Returns a message in the format of both streams."""
    data = json.dumps(message).encode()
    return _LENGTH.pack(len(data)) + data


def read_message(stream: BinaryIO) -> Any:
    """Returns the next message; None at the end."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    return json.loads(stream.read(_LENGTH.unpack(head)[0]))


def _limit_cpu(seconds: int) -> None:
    """Makes the kernel end the process after this many further seconds of CPU time."""
    used = time.process_time()
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(used) + 1 + seconds, hard))


def _limit_memory(num_bytes: int) -> None:
    """Makes allocations fail once the process has this many bytes more than now. macOS has no such limit."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash here is expected and needs no core dump
    if not _STATM.exists():
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_num_pages(0) * resource.getpagesize() + num_bytes, hard))


def _compile(llguidance: Any, tokenizer: Any, heap: _Heap, kind: str, text: str) -> dict[str, Any]:
    """Compiles a grammar and computes its first mask, as the executor does, then frees it."""
    before = heap.num_bytes()
    maker = _MAKERS.get(kind)
    try:
        grammar = text if maker is None else getattr(llguidance.LLMatcher, maker)(text)
        matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()
    except ValueError as error:
        return {"error": str(error)}
    if matcher.is_error():
        return {"error": matcher.get_error()}
    return {"num_bytes": max(heap.num_bytes() - before, len(text))}


def main() -> None:
    """Runs the script. Arguments: directory of llguidance, stack size of a compilation in bytes."""
    sys.path[0] = sys.argv[1]
    import llguidance

    heap = _Heap()
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    first = read_message(source)
    if first is None:
        return
    tokens = [b64decode(token) for token in first["tokens"]]
    tokenizer = llguidance.LLTokenizer(
        _Vocabulary(tokens, first["stop_token_ids"]), n_vocab=len(tokens), eos_token=first["stop_token_ids"]
    )
    _limit_memory(first["max_bytes"])

    def serve() -> None:
        while (asked := read_message(source)) is not None:
            _limit_cpu(first["max_seconds"])
            sink.write(framed(_compile(llguidance, tokenizer, heap, asked["kind"], asked["text"])))
            sink.flush()

    threading.stack_size(int(sys.argv[2]))
    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
