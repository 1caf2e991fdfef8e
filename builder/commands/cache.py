"""`adaptrt cache`: lists and deletes engines that were made on first use, and downloads."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..._core import ConfigError
from ...common.entry_cache import CacheEntry, EntryCache
from ...common.progress import format_bytes
from ...formats.sources.downloads import FILES_DIRECTORY, DownloadCache
from ...formats.sources.gguf_models import GgufModels
from ...formats.sources.hub_downloads import HubDownloads
from ..model_cache.store import ENGINE_DIRECTORY, EngineCache


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's flags."""
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--clear", action="store_true", help="delete all engines and downloads that no process uses")
    action.add_argument("--remove", nargs="+", metavar="KEY", default=[], help="delete these engines and downloads")
    action.add_argument(
        "--max_bytes",
        type=int,
        metavar="N",
        help="delete the least recently used engines and downloads until the others take at most N bytes",
    )


def run(args: argparse.Namespace) -> int:
    """Lists the cached engines and downloads, or deletes some and prints their names."""
    shelves = (
        _Shelf(EngineCache(), ("engine", "engines"), f"each is in KEY/{ENGINE_DIRECTORY}", ("model", "options")),
        _Shelf(DownloadCache(), ("download", "downloads"), f"each is in KEY/{FILES_DIRECTORY}", ("name", "kind")),
        _Shelf(
            GgufModels(), ("GGUF file", "GGUF files"), f"their metadata is in KEY/{FILES_DIRECTORY}", ("name", "kind")
        ),
        _Shelf(
            HubDownloads(),
            ("download from the Hub", "downloads from the Hub"),
            "the files are in the cache of huggingface_hub",
            ("name", "kind"),
        ),
    )
    if args.remove:
        for key in args.remove:
            _remove(shelves, key)
    elif args.clear:
        for shelf in shelves:
            shelf.cache.clean_up()
            _delete(shelf, shelf.cache.entries())
    elif args.max_bytes is not None:
        _prune(shelves, args.max_bytes)
    else:
        for shelf in shelves:
            _list(shelf)
    return 0


@dataclass(frozen=True)
class _Shelf:
    """One of the caches, and the words for it."""

    cache: EntryCache[Any]
    nouns: tuple[str, str]
    """Words for one entry, and for several."""
    place: str
    """Says where the entries' content is."""
    columns: tuple[str, str]
    """Fields of its entries that are shown."""

    def count(self, number: int) -> str:
        return f"{number} {self.nouns[number != 1]}"


def _remove(shelves: Sequence[_Shelf], key: str) -> None:
    """Deletes the entry with a key. Raises ConfigError if there is none, or if it is used."""
    shelf = next((shelf for shelf in shelves if shelf.cache.has(key)), shelves[0])
    shelf.cache.remove(key)
    print(f"{shelf.cache.place(key)}: removed")


def _delete(shelf: _Shelf, entries: Sequence[CacheEntry]) -> None:
    """Deletes the entries that no process uses, and prints the result of each."""
    removed = []
    for entry in entries:
        if shelf.cache.remove_if_unused(entry.key):
            removed.append(entry)
        else:
            print(f"{shelf.cache.place(entry.key)}: kept, because a process uses it")
    print(f"{shelf.count(len(removed))} removed, {format_bytes(sum(entry.num_bytes for entry in removed))}")


def _prune(shelves: Sequence[_Shelf], max_bytes: int) -> None:
    if max_bytes < 0:
        raise ConfigError(f"max_bytes is {max_bytes}; it must be at least 0")
    entries = [(entry, shelf) for shelf in shelves for entry in shelf.cache.entries()]
    entries.sort(key=lambda pair: pair[0].last_used, reverse=True)
    totals = itertools.accumulate(entry.num_bytes for entry, _ in entries)
    num_kept = sum(total <= max_bytes for total in totals)
    for shelf in shelves:
        _delete(shelf, [entry for entry, own in entries[num_kept:] if own is shelf])


def _list(shelf: _Shelf) -> None:
    entries = shelf.cache.entries()
    if not entries:
        print(f"{shelf.cache.directory}: has no {shelf.nouns[1]}")
        return
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("key", *shelf.columns, "size", "last use"):
        table.add_column(column, justify="right" if column == "size" else "left", no_wrap=column in ("key", "size"))
    for entry in entries:
        # Text shows square brackets literally; a string would be parsed as markup.
        fields = [getattr(entry, column) for column in shelf.columns]
        cells = (entry.key, *fields, format_bytes(entry.num_bytes), f"{entry.last_used:%Y-%m-%d %H:%M}")
        table.add_row(*map(Text, cells))
    Console().print(table)
    total = format_bytes(sum(entry.num_bytes for entry in entries))
    print(f"{shelf.cache.directory}: {shelf.count(len(entries))}, {total}; {shelf.place}")
