"""The grammar of names of models and adapters; docs/names.md describes it for users.

A name is a path, a repository of the Hugging Face Hub, a prefix in an object store, or a weighted sum of adapters
(sum_of_names.py). An existing path always wins. A name that could mean two things is refused with both meanings.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Final

from ..._core import AdaptrtError
from ...common.shown_value import shown
from .sum_of_names import SumOfNames, parse_sum

HUB_PREFIX: Final = "hf://"
"""Begins a name that can only be a repository of the Hub."""
OBJECT_PREFIX: Final = "s3://"
"""Begins a name of an object store."""
LONGEST_NAME: Final = 4096
"""Maximum number of characters of a name; longer than any path that Linux accepts."""
_LONGEST_REPOSITORY: Final = 96
_URL: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://.*", re.DOTALL)
_WEB_PAGE: Final = re.compile(r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/([^/?#]+/[^/?#]+)", re.ASCII)
_PART: Final = r"[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?"
_REVISION: Final = r"refs/(?:pr|convert)/[A-Za-z0-9._-]+|(?:[A-Za-z0-9._+-]|%2F)+"
_HUB: Final = re.compile(rf"({_PART}/{_PART})(?:@({_REVISION}))?(?:/([^:@\\]+))?")
_TAGGED: Final = re.compile(r"([^:]+):([A-Za-z][A-Za-z0-9._-]*)")
_GGUF: Final = ".gguf"
_OBJECTS: Final = re.compile(r"s3://([A-Za-z0-9][A-Za-z0-9._-]{1,254})(?:/(.*))?", re.DOTALL)
_LONGEST_KEY: Final = 1024
_OTHER_SCHEMES: Final[Mapping[tuple[str, ...], str]] = {
    ("file",): "its path",
    ("s3a", "s3n"): f"{OBJECT_PREFIX}BUCKET/PREFIX",
    ("hub",): f"{HUB_PREFIX}ORGANISATION/NAME",
    (
        "gs",
        "gcs",
    ): f"{OBJECT_PREFIX}BUCKET/PREFIX with AWS_ENDPOINT_URL=https://storage.googleapis.com and HMAC keys, "
    "because Google's store speaks S3, or a copy in a directory",
    ("az", "abfs", "abfss", "adl", "wasb", "wasbs"): "a copy in a directory, because Azure's store does not speak S3",
    ("r2", "oci", "oss", "obs", "cos", "minio", "b2"): f"{OBJECT_PREFIX}BUCKET/PREFIX with AWS_ENDPOINT_URL, if the "
    "store speaks S3",
}
"""Schemes of other programs, and how such files are named here."""
_PATH_STARTS: Final = ("/", "./", "../", "~")


@dataclass(frozen=True)
class LocalName:
    """A path, existing or not."""

    path: Path


@dataclass(frozen=True)
class HubName:
    """A repository of the Hub, or a folder of one."""

    repository: str
    """ORGANISATION/NAME."""
    revision: str | None = None
    """Branch, tag or commit; None: the repository's main branch."""
    folder: str = ""
    """Path of the folder in the repository; empty: the repository itself."""
    gguf: str = ""
    """GGUF file in the folder: its name, which ends with .gguf, or its quantisation, such as Q4_K_M. Empty: the name
    stands for the folder."""

    def __str__(self) -> str:
        """The name in the grammar, with the prefix that makes it unambiguous."""
        return HUB_PREFIX + self.without_prefix

    @property
    def without_prefix(self) -> str:
        """The name as users write it."""
        revision = "" if self.revision is None else "@" + _written(self.revision)
        if self.gguf.endswith(_GGUF):
            return f"{self.repository}{revision}/{self.file(self.gguf)}"
        tag = f":{self.gguf}" if self.gguf else ""
        return self.repository + revision + (f"/{self.folder}" if self.folder else "") + tag

    @property
    def label(self) -> str:
        """Repository and folder without the revision."""
        return self.repository + (f"/{self.folder}" if self.folder else "")

    def file(self, name: str) -> str:
        """Path of a file in the repository."""
        return f"{self.folder}/{name}" if self.folder else name

    def child(self, path: str) -> HubName:
        """Returns the name of a folder below this one."""
        return HubName(self.repository, self.revision, self.file(path))

    def has_below(self, name: HubName | ObjectName) -> bool:
        """True for names of folders below this one, at the same revision."""
        if not isinstance(name, HubName) or name.revision != self.revision:
            return False
        is_same = name.repository.lower() == self.repository.lower()
        return is_same and bool(name.folder) and name.folder.startswith(self.file(""))


@dataclass(frozen=True)
class ObjectName:
    """The objects below a prefix in a bucket, as if the prefix were a directory."""

    bucket: str
    path: str = ""
    """Path of the directory in the bucket; empty: the whole bucket."""

    def __str__(self) -> str:
        """The name in the grammar."""
        return OBJECT_PREFIX + self.in_store

    @property
    def without_prefix(self) -> str:
        """The name as users write it."""
        return str(self)

    @property
    def in_store(self) -> str:
        """Bucket and path."""
        return f"{self.bucket}/{self.path}" if self.path else self.bucket

    @property
    def label(self) -> str:
        """Last part of the name."""
        return self.in_store.rpartition("/")[2]

    def child(self, path: str) -> ObjectName:
        """Returns the name of a directory below this one."""
        return ObjectName(self.bucket, f"{self.path}/{path}" if self.path else path)

    def has_below(self, name: HubName | ObjectName) -> bool:
        """True for names of directories below this one."""
        return isinstance(name, ObjectName) and name.in_store.startswith(f"{self.in_store}/")


def parse_name(name: str | os.PathLike[str], error: type[AdaptrtError]) -> LocalName | HubName | ObjectName:
    """Returns what a name of one model or adapter means. Reads only if paths exist, and downloads nothing.

    A Path, and a text that looks like a path or names something that exists, is a path. A text of the form
    s3://BUCKET/PREFIX is a directory of an object store, and one of the form ORGANISATION/NAME[@REVISION][/FOLDER] is a
    repository of the Hub. Any other text is a path that does not exist, and the caller reports that.

    Raises `error` for names that are reserved, ambiguous or not supported.
    """
    if not isinstance(name, str):
        return LocalName(Path(name))
    if not name or len(name) > LONGEST_NAME or "\0" in name:
        raise error(
            f"name is {shown(name)}; expected a path or a name of 1 to {LONGEST_NAME} characters without null "
            "characters"
        )
    if name.startswith(_PATH_STARTS) or _exists(name):
        return LocalName(Path(name))
    if parse_sum(name) is not None:
        raise error(f"name is '{name}', a weighted sum of adapters; expected one model or adapter")
    if name.startswith(OBJECT_PREFIX):
        if (objects := object_name(name)) is None:
            raise error(f"name is '{name}'; expected {OBJECT_PREFIX}BUCKET/PREFIX without '..', '//', '*', '?' and '#'")
        return objects
    if (scheme := _URL.fullmatch(name)) is not None and not name.startswith(HUB_PREFIX):
        raise error(f"name is '{name}', a URL with the scheme {scheme[1]}; expected {_instead_of(name)}")
    explicit = name.startswith(HUB_PREFIX)
    text = name.removeprefix(HUB_PREFIX)
    found = gguf_name(text) or hub_name(text)
    if explicit and found is None:
        raise error(f"name is '{name}'; expected {HUB_PREFIX}ORGANISATION/NAME[@REVISION][/FOLDER]")
    if found is None:
        return LocalName(Path(name))
    if not explicit and _exists(first := name.split("/")[0]):
        raise error(
            f"name is '{name}', which could be a path (the directory '{first}' exists, but has no such entry) or the "
            f"repository '{found.label}' of the Hugging Face Hub; write './{name}' or '{found}'"
        )
    return found


def weighted_sum_name(name: str | os.PathLike[str]) -> SumOfNames | None:
    """Returns the weighted sum that a text names; None for other names, and for a text that is an existing path.

    Raises AdapterError for more than MAX_TERMS terms.
    """
    return None if not isinstance(name, str) or _exists(name) else parse_sum(name)


def hub_name(text: str) -> HubName | None:
    """Returns the repository that a text without prefix names, whatever exists locally; None for other texts."""
    match = _HUB.fullmatch(text)
    if match is None:
        return None
    repository, revision, folder = match[1], match[2], match[3] or ""
    parts = repository.split("/")
    if len(repository) > _LONGEST_REPOSITORY or any("--" in part or ".." in part for part in parts):
        return None
    if parts[1].endswith(".git"):
        return None
    revision = None if revision is None else revision.replace("%2F", "/")
    if revision is not None and not is_revision(revision):
        return None
    if folder and (str(PurePosixPath(folder)) != folder or ".." in folder.split("/") or not folder.isprintable()):
        return None
    return HubName(repository, revision, folder)


def gguf_name(text: str) -> HubName | None:
    """Returns the GGUF file of a repository that a text without prefix names; None for other texts.

    Such texts end with a quantisation (org/repo:Q4_K_M) or with the path of a file (org/repo/folder/name.gguf).
    """
    if (tagged := _TAGGED.fullmatch(text)) is not None:
        found = hub_name(tagged[1])
        return None if found is None else replace(found, gguf=tagged[2])
    found = hub_name(text)
    if found is None or not found.folder.endswith(_GGUF):
        return None
    folder, _, file = found.folder.rpartition("/")
    return replace(found, folder=folder, gguf=file)


def object_name(text: str) -> ObjectName | None:
    """Returns the directory of an object store that a text names; None for other texts."""
    match = _OBJECTS.fullmatch(text)
    if match is None or parse_sum(text) is not None:
        return None
    path = (match[2] or "").removesuffix("/")
    parts = path.split("/") if path else []
    if len(path.encode()) > _LONGEST_KEY or not path.isprintable() or any(mark in path for mark in "*?#"):
        return None
    return None if any(part in ("", ".", "..") for part in parts) else ObjectName(match[1], path)


def remote_name(text: str) -> HubName | ObjectName | None:
    """Returns the repository or the directory of an object store that a text names, whatever exists locally.

    None for other texts, among them weighted sums.
    """
    if not text or len(text) > LONGEST_NAME:
        return None
    if text.startswith(OBJECT_PREFIX):
        return object_name(text)
    return hub_name(text.removeprefix(HUB_PREFIX))


def is_revision(text: str) -> bool:
    """True if Git could have a branch or tag of this name, and it cannot leave the directory of the Hub's cache."""
    parts = text.split("/")
    return all(part and ".." not in part and not part.startswith(".") and not part.startswith("-") for part in parts)


def _written(revision: str) -> str:
    is_plain = re.fullmatch(r"refs/(?:pr|convert)/[A-Za-z0-9._-]+", revision) is not None
    return revision if is_plain else revision.replace("/", "%2F")


def _exists(path: str) -> bool:
    return os.path.lexists(path)


def _instead_of(url: str) -> str:
    page = _WEB_PAGE.match(url)
    if page is not None:
        return f"the name of the repository, '{page[1]}'"
    scheme = url.partition(":")[0].lower()
    for schemes, instead in _OTHER_SCHEMES.items():
        if scheme in schemes:
            return instead
    return (
        f"a path, ORGANISATION/NAME of the Hugging Face Hub, or {OBJECT_PREFIX}BUCKET/PREFIX; copy other files to a "
        "directory first"
    )
