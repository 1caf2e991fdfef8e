"""Downloads models and adapters of the Hugging Face Hub into the cache of huggingface_hub.

huggingface_hub itself reads HF_TOKEN, HF_HOME, HF_HUB_OFFLINE, HF_ENDPOINT and proxies, shows progress, resumes broken
downloads, and lets only one process download a file at a time.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Final

from ..._core import AdaptrtError, CheckpointError
from ...common.progress import format_bytes
from ..checkpoint.hf_weights import INDEX_SUFFIX, read_index, weight_file_names
from .grammar import HubName
from .hub_downloads import HubDownloads
from .hub_errors import MAIN, HubErrors
from .kind import Kind
from .lease import Lease
from .needed_files import small_files, weight_files, weights_problem
from .shown import some

_PART: Final = "only a part of it has been downloaded, and {}"


@dataclass(frozen=True)
class Snapshot:
    """A repository, or a folder of one, in the local cache."""

    directory: Path
    name: HubName
    """The name with the commit as its revision."""
    lease: Lease | None = None
    """Keeps `adaptrt cache` from deleting the files; None: AdaptRT did not download them."""


def fetch(name: HubName, kind: Kind) -> Snapshot:
    """Returns the files that AdaptRT needs of a repository. Downloads those that are not in the cache.

    If the Hub cannot be reached, a complete copy in the cache is used.

    Raises kind.error that says why there are no files: huggingface_hub is missing, the repository is gated, missing or
    of another kind, the Hub cannot be reached, or the disk is full.
    """
    return _Download(require_hub(name, kind), name, kind).run()


def require_hub(name: HubName, kind: Kind) -> ModuleType:
    """Returns huggingface_hub. Raises kind.error if it is not installed."""
    try:
        import huggingface_hub
    except ImportError:
        raise kind.error(
            f"{name.without_prefix}: is not a local path, and names of the Hugging Face Hub need huggingface_hub: "
            "pip install 'adaptrt[hub]'"
        ) from None
    found: ModuleType = huggingface_hub
    return found


class _Download:
    """One call of fetch()."""

    def __init__(self, hub: ModuleType, name: HubName, kind: Kind) -> None:
        self._hub = hub
        self._name = name
        self._kind = kind
        self._errors = HubErrors(hub, name)

    def run(self) -> Snapshot:
        """Downloads the files: the config first, which pins the commit, and the weights last."""
        directory = self._config().parent
        root = directory
        for _ in self._name.folder.split("/") if self._name.folder else ():
            root = root.parent
        pinned = replace(self._name, revision=root.name)
        try:
            sizes = self._list(pinned)
        except self._errors.failures as failure:
            self._check_complete(directory, failure)
            return Snapshot(directory, pinned, HubDownloads().note(pinned, self._kind, root, is_new=False))
        chosen = weight_files(self._kind, sizes)
        if (problem := weights_problem(self._kind, chosen, sizes)) is not None:
            raise self._error(problem)
        small = small_files(self._kind, sizes)
        self._check_space(directory, [*small, *chosen], sizes)
        is_new = not all((directory / file).exists() for file in (*small, *chosen))
        lease = HubDownloads().note(pinned, self._kind, root, is_new=is_new)
        for file in small:
            self._get(file, root.name)
        if self._kind is Kind.MODEL and len(chosen) == 1 and chosen[0].endswith(INDEX_SUFFIX):
            index = self._get(chosen[0], root.name)
            chosen = sorted(set(self._named_in(index).values()))
            if absent := [file for file in chosen if file not in sizes]:
                raise self._error(f"the index names {some(absent)}, which the repository does not have")
            self._check_space(directory, chosen, sizes)
        for file in chosen:
            self._get(file, root.name)
        return Snapshot(directory, pinned, lease)

    def _config(self) -> Path:
        """The config file at the commit that the revision is now."""
        try:
            return self._request(self._kind.config_file, self._name.revision or MAIN)
        except self._hub.errors.RemoteEntryNotFoundError:
            raise self._error(self._what_it_holds()) from None
        except self._errors.failures as error:
            raise self._error(self._errors.explain(error)) from error

    def _get(self, file: str, commit: str) -> Path:
        """Path of a file in the cache, downloaded if necessary."""
        try:
            return self._request(file, commit)
        except self._errors.failures as error:
            raise self._error(f"{file}: {self._errors.explain(error)}") from error

    def _request(self, file: str, revision: str) -> Path:
        path = self._name.file(file)
        return Path(self._hub.hf_hub_download(self._name.repository, path, revision=revision, library_name="adaptrt"))

    def _list(self, pinned: HubName) -> dict[str, int | None]:
        """Sizes of the files in the directory, by their paths in it."""
        info = self._hub.HfApi(library_name="adaptrt").model_info(
            pinned.repository, revision=pinned.revision, files_metadata=True
        )
        above = pinned.file("")
        return {
            entry.rfilename[len(above) :]: entry.size
            for entry in info.siblings or ()
            if entry.rfilename.startswith(above)
        }

    def _check_complete(self, directory: Path, failure: BaseException) -> None:
        """Raises an error if the cache lacks weights. They are downloaded last, so they show that all files exist."""
        if self._kind is Kind.MODEL:
            try:
                weight_file_names(directory)
            except CheckpointError:
                raise self._error(
                    f"only a part of it has been downloaded, and {self._errors.why(failure)}"
                ) from failure
        elif not weight_files(self._kind, [path.name for path in directory.iterdir()]):
            raise self._error(_PART.format(self._errors.why(failure))) from failure

    def _check_space(self, directory: Path, files: Sequence[str], sizes: dict[str, int | None]) -> None:
        """Raises an error before a download that the disk has no space for."""
        needed = sum(sizes[file] or 0 for file in files if not (directory / file).exists())
        free = shutil.disk_usage(directory).free
        if needed > free:
            raise self._error(
                f"the download needs {format_bytes(needed)}, and {format_bytes(free)} are free at "
                f"{self._errors.cache}; free some space, or set HF_HOME to another directory"
            )

    def _named_in(self, index: Path) -> dict[str, str]:
        try:
            return read_index(index, check_files=False)
        except CheckpointError as error:
            raise self._error(str(error)) from None

    def _what_it_holds(self) -> str:
        """Explains why the directory has no config of this kind."""
        file = self._kind.config_file
        try:
            files = self._list(replace(self._name, revision=self._name.revision or MAIN))
        except self._errors.failures:
            return f"has no {file}"
        if self._kind is Kind.MODEL and Kind.ADAPTER.config_file in files:
            return f"has no {file}: it is an adapter; expected its base model"
        if self._kind is Kind.ADAPTER and Kind.MODEL.config_file in files and weight_files(Kind.MODEL, files):
            return f"has no {file}: it is a whole model; expected an adapter"
        folders = sorted({path.rpartition("/")[0] for path in files if path.rpartition("/")[2] == file})
        if folders:
            return f"has no {file}, but its folders {some(folders)} have; expected one of them in the name"
        if gguf := sorted(path for path in files if path.endswith(".gguf")):
            return (
                f"has no {file}, but GGUF files ({some(gguf)}); expected one of them in the name: "
                "ORGANISATION/NAME:Q4_K_M or ORGANISATION/NAME/FILE.gguf"
            )
        return f"has no {file}; expected the {self._kind.value} itself, in the format of Hugging Face"

    def _error(self, reason: str) -> AdaptrtError:
        return self._kind.error(f"{self._name.without_prefix}: {reason}")
