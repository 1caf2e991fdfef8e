"""`adaptrt cache`: lists and deletes engines that were made on first use."""

from __future__ import annotations

import argparse

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..._core import ConfigError
from ...common.progress import format_bytes
from ..model_cache.store import CachedEngine, EngineCache


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's flags."""
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--clear", action="store_true", help="delete every engine that no process uses")
    action.add_argument("--remove", nargs="+", metavar="KEY", default=[], help="delete these engines")
    action.add_argument(
        "--max_bytes",
        type=int,
        metavar="N",
        help="delete the least recently used engines until the others take at most N bytes",
    )


def run(args: argparse.Namespace) -> int:
    """Lists the cached engines, or deletes some and prints their names."""
    cache = EngineCache()
    if args.remove:
        for key in args.remove:
            cache.remove(key)
            print(f"{cache.place(key)}: removed")
    elif args.clear:
        cache.clean_up()
        _delete(cache, cache.entries())
    elif args.max_bytes is not None:
        _prune(cache, args.max_bytes)
    else:
        _list(cache)
    return 0


def _delete(cache: EngineCache, entries: list[CachedEngine]) -> None:
    """Deletes the entries that no process uses, and prints the result of each."""
    removed = []
    for entry in entries:
        if cache.remove_if_unused(entry.key):
            removed.append(entry)
        else:
            print(f"{cache.place(entry.key)}: kept, because a process uses it")
    print(f"{_engines(len(removed))} removed, {format_bytes(sum(entry.num_bytes for entry in removed))}")


def _prune(cache: EngineCache, max_bytes: int) -> None:
    if max_bytes < 0:
        raise ConfigError(f"max_bytes is {max_bytes}; it must be at least 0")
    entries = cache.entries()
    kept = 0
    for number, entry in enumerate(entries):
        kept += entry.num_bytes
        if kept > max_bytes:
            _delete(cache, entries[number:])
            return
    print(f"{_engines(0)} removed: {_engines(len(entries))} take {format_bytes(kept)}")


def _list(cache: EngineCache) -> None:
    entries = cache.entries()
    if not entries:
        print(f"{cache.directory}: has no engines")
        return
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("key", "model", "options", "size", "last use"):
        table.add_column(column, justify="right" if column == "size" else "left", no_wrap=column in ("key", "size"))
    for entry in entries:
        # Text shows square brackets literally; a string would be parsed as markup.
        last_use = f"{entry.last_used:%Y-%m-%d %H:%M}"
        cells = (entry.key, entry.model, entry.options, format_bytes(entry.num_bytes), last_use)
        table.add_row(*map(Text, cells))
    Console().print(table)
    total = format_bytes(sum(entry.num_bytes for entry in entries))
    print(f"{cache.directory}: {_engines(len(entries))}, {total}; each is in KEY/engine")


def _engines(count: int) -> str:
    return f"{count} engine{'' if count == 1 else 's'}"
