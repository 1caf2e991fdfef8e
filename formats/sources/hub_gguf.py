"""Downloads GGUF files of the Hugging Face Hub into the cache of huggingface_hub."""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from ..._core import AdaptrtError
from ...common.progress import format_bytes
from ..gguf.model_directory import label_of
from .grammar import HubName
from .hub import require_hub
from .hub_downloads import HubDownloads
from .hub_errors import MAIN, HubErrors
from .kind import Kind
from .lease import Lease
from .shown import some

_SUFFIX: Final = ".gguf"
_NO_MODEL: Final = re.compile(r"(.*/)?(mmproj|imatrix)[^/]*|.*[-._](mmproj|imatrix)[-._].*", re.IGNORECASE)
"""Files that belong to models but are none."""


@dataclass(frozen=True)
class HubGguf:
    """A GGUF file of a repository in the local cache."""

    path: Path
    """The file, or the first part of a split one."""
    name: HubName
    """The name with the commit as its revision."""
    lease: Lease | None = None
    """Keeps `adaptrt cache` from deleting the files; None: AdaptRT did not download them."""


def fetch_gguf(name: HubName, kind: Kind) -> HubGguf:
    """Returns the GGUF file of a model or an adapter that a name stands for, with all its parts. Downloads those that
    are not in the cache.

    If the Hub cannot be reached, a complete copy in the cache is used.

    Raises `kind.error` that says why there is no such file, or why it cannot be downloaded.
    """
    hub = require_hub(name, kind)
    errors = HubErrors(hub, name)
    try:
        info = hub.HfApi(library_name="adaptrt").model_info(
            name.repository, revision=name.revision or MAIN, files_metadata=True
        )
    except errors.failures as failure:
        found = _cached(hub, name, kind) if errors.is_unreachable(failure) else None
        if found is None:
            raise _error(name, kind, errors.explain(failure)) from failure
        return found
    sizes = {entry.rfilename: entry.size or 0 for entry in info.siblings or ()}
    chosen = chosen_files(name, sizes, kind)
    absent = [file for file in chosen if not _is_cached(hub, name, file, info.sha)]
    _check_space(name, kind, errors, absent, sizes)
    paths, revision = [], name.revision or MAIN
    try:
        for file in chosen:
            paths.append(Path(hub.hf_hub_download(name.repository, file, revision=revision, library_name="adaptrt")))
            revision = _commit_directory(paths[0], chosen[0]).name  # the first file pins the commit
    except errors.failures as failure:
        raise _error(name, kind, errors.explain(failure)) from failure
    pinned = replace(name, revision=revision)
    lease = HubDownloads().note(pinned, kind, _commit_directory(paths[0], chosen[0]), is_new=bool(absent))
    return HubGguf(paths[0], pinned, lease)


def chosen_files(name: HubName, files: Collection[str], kind: Kind) -> list[str]:
    """Returns the parts of the one GGUF file among the files of a repository that a name stands for, in order.

    Raises `kind.error` if there is none, or several.
    """
    above = name.file("")
    models = [
        file for file in sorted(files)
        if file.startswith(above) and file.endswith(_SUFFIX) and not _NO_MODEL.fullmatch(file)
    ]  # fmt: skip
    if not models:
        instead = f"leave out the file to get the {kind.value} in Hugging Face's format"
        raise _error(name, kind, f"has no GGUF files; {instead}")
    exact = name.file(name.gguf)
    wanted = {_model_of(exact)} if exact in models else {_model_of(file) for file in models if _matches(file, name)}
    if len(wanted) != 1:
        what = f"has no GGUF file of {name.gguf}" if not wanted else f"has several GGUF files of {name.gguf}"
        raise _error(name, kind, f"{what}; it has {some(sorted(wanted) or models)}")
    return [file for file in models if _model_of(file) in wanted]


def _model_of(file: str) -> str:
    """Path of a file without suffix and part number."""
    folder, _, last = file.rpartition("/")
    return f"{folder}/{label_of(Path(last))}"


def _matches(file: str, name: HubName) -> bool:
    # K_M is a part of Q4_K_M.
    pattern = rf"(.*[-.]|.*(?<!Q\d)(?<!_K)_)?{re.escape(name.gguf)}"
    return re.fullmatch(pattern, label_of(Path(file.rpartition("/")[2])), re.IGNORECASE) is not None


def _is_cached(hub: Any, name: HubName, file: str, commit: str) -> bool:
    return isinstance(hub.try_to_load_from_cache(name.repository, file, revision=commit), str)


def _commit_directory(path: Path, file: str) -> Path:
    """Directory of the commit in the cache, from the path there of a file of the repository."""
    return path.parents[file.count("/")]


def _check_space(name: HubName, kind: Kind, errors: HubErrors, chosen: Iterable[str], sizes: dict[str, int]) -> None:
    place = Path(errors.cache)
    while not place.exists():
        place = place.parent
    needed, free = sum(sizes[file] for file in chosen), shutil.disk_usage(place).free
    if needed > free:
        raise _error(
            name,
            kind,
            f"the download needs up to {format_bytes(needed)}, and {format_bytes(free)} are free at {errors.cache}; "
            "free some space, or set HF_HOME to another directory",
        )


def _cached(hub: Any, name: HubName, kind: Kind) -> HubGguf | None:
    """The file in the cache, without asking the Hub; None if it is not there."""
    try:
        commit = Path(hub.snapshot_download(name.repository, revision=name.revision or MAIN, local_files_only=True))
    except OSError:
        return None
    files = [path.relative_to(commit).as_posix() for path in commit.rglob(f"*{_SUFFIX}") if path.exists()]
    try:
        chosen = chosen_files(name, files, kind)
    except kind.error:
        return None
    pinned = replace(name, revision=commit.name)
    return HubGguf(commit / chosen[0], pinned, HubDownloads().note(pinned, kind, commit, is_new=False))


def _error(name: HubName, kind: Kind, reason: str) -> AdaptrtError:
    return kind.error(f"{name.without_prefix}: {reason}")
