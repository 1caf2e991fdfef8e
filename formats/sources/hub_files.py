"""Repositories of the Hub whose files go into AdaptRT's cache of downloads, which is bounded: for requests."""

from __future__ import annotations

import errno
import hashlib
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from .grammar import HubName
from .hub import require_hub
from .hub_errors import MAIN, HubErrors
from .kind import Kind
from .remote import Listing, Watch


class HubFiles:
    """A repository of the Hub, or a folder of one; a Remote."""

    def __init__(self, name: HubName, kind: Kind, info: Callable[[], Any] | None = None) -> None:
        """info: returns the repository_info(); None: it is requested. Raises kind.error without huggingface_hub."""
        self.name = name
        self.kind = kind
        self._hub = require_hub(name, kind)
        self._errors = HubErrors(self._hub, name)
        self._info: Callable[[], Any] = partial(repository_info, self._hub, name) if info is None else info
        self._commit = ""
        self._digests: dict[str, str] = {}

    def listing(self) -> Listing | None:
        """Lists the files at the commit that the revision is now."""
        info = self._info()
        self._commit = info.sha
        above = self.name.file("")
        files: dict[str, int] = {}
        for entry in info.siblings or ():
            if entry.rfilename.startswith(above) and entry.size is not None:
                name = entry.rfilename[len(above) :]
                files[name] = entry.size
                if entry.lfs is not None:
                    self._digests[name] = entry.lfs.sha256
        return Listing(self._commit, files) if self.kind.config_file in files else None

    def fetch(self, file: str, target: Path, watch: Watch) -> None:
        """Writes a file to `target`; huggingface_hub checks its size."""
        watch.check()
        with tempfile.TemporaryDirectory(dir=target.parent) as place:
            path = self._hub.hf_hub_download(
                self.name.repository,
                self.name.file(file),
                revision=self._commit,
                local_dir=place,
                library_name="adaptrt",
                tqdm_class=_watched(self._hub, watch),
            )
            if file in self._digests and (found := _sha256(Path(path))) != self._digests[file]:
                raise OSError(errno.EIO, f"{file} has the SHA-256 {found}; expected {self._digests[file]}")
            Path(path).rename(target)

    @property
    def failures(self) -> tuple[type[BaseException], ...]:
        """Errors of requests and downloads."""
        return self._errors.failures

    def explain(self, error: BaseException) -> str:
        """Says why a request failed, and what the user can do."""
        return self._errors.explain(error)

    def is_unreachable(self, error: BaseException) -> bool:
        """True if the Hub gave no answer."""
        return self._errors.is_unreachable(error)


def repository_info(hub: Any, name: HubName) -> Any:
    """Asks the Hub for the commit of a repository and its files. Raises one of HubErrors.failures."""
    return hub.HfApi(library_name="adaptrt").model_info(
        name.repository, revision=name.revision or MAIN, files_metadata=True
    )


def _watched(hub: Any, watch: Watch) -> type[Any]:
    """A progress bar that shows nothing, and stops the download when nothing waits for it."""

    class Watched(hub.utils.tqdm):  # type: ignore[misc, name-defined, unused-ignore]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            watch.check()
            watch.advance(int(n or 0))
            shown: bool | None = super().update(n)
            return shown

    return Watched


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()
