"""Adapters on disk by name: PEFT directories."""

from __future__ import annotations

import contextlib
import contextvars
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace as with_fields
from pathlib import Path
from typing import Final

from .._core import AdapterError, AdaptrtError, LoraConfig, PromptTuningConfig
from ..formats.adapter import is_prompt_tuned
from ..formats.adapter.adapter_copy import adapter_files
from ..formats.adapter.convert import ConvertedAdapter
from ..formats.adapter.invocation import find_start, invocation_tokens
from ..formats.adapter.one_version import one_version
from ..formats.adapter.proof import read_proof
from ..formats.adapter.recognise import DRAFT_DIRECTORY
from ..formats.adapter.terms import AdapterTerms, max_rank_of, may_have_terms
from ..formats.sources import Source
from ..formats.sources.base_model import warn_of_other_base
from ..formats.sources.lease import Lease
from ..formats.sources.sum_of_names import parse_sum
from .adapter_classifiers import AdapterClassifiers
from .adapter_facts import ReadyAdapter
from .adapter_versions import (
    OldVersions,
    VersionHold,
    VersionLimits,
    choose_version,
    has_whole_digest,
    parse_version,
    version_name,
)
from .classifier import AdaptedClassifier
from .engine import LoadedEngine
from .lora_config import adapter_of_directory, sum_of_directories
from .named_adapter import (
    FIRST_NAMED_TASK_ID,
    AdapterSum,
    NamedAdapter,
    UnknownAdapterError,
    check_unchanged,
    digests_of,
    read_digest,
)
from .prompt_tuning import num_virtual_tokens, prompt_of_directory

_NAMES_SHOWN: Final = 20
"""Maximum number of known names in the error for an unknown name."""
_MAX_SUMS: Final = 1024
"""Maximum number of weighted sums whose task_ids are kept. A sum that is used again later gets a new id and is loaded
again.
"""
_MAX_PROMPTS: Final = 64
"""Maximum number of adapters whose virtual tokens are in memory. Those of others are read again on use."""


class AdapterStore:
    """The third level of the LoRA cache: adapters on disk by name, read on demand.

    The store begins with the adapters that the engine carries; others are added, replaced and removed. Thread-safe.

    Each version of an adapter has its own task_id, so no version's weights, KV or states are taken for another's. A
    replaced version can still be asked for by its digest, within `version_limits`.

    Lock order: first changing() of one name, held while files are read; then the lock of the tables of names, under
    which no file is read and no other lock is taken. A thread changes only one name at a time.
    """

    def __init__(self, engine: LoadedEngine) -> None:
        """Reads no adapter yet."""
        self.version_limits = VersionLimits()
        self.allows_no_op = False
        """True: accepts adapters that change nothing, whose answers are the base model's."""
        self._engine = engine
        self._old = OldVersions()
        self._adapters: dict[str, NamedAdapter] = {}
        for name, checksum in zip(engine.adapters, engine.config.adapter_checksums, strict=True):
            task_id = FIRST_NAMED_TASK_ID + len(self._adapters)
            self._adapters[name] = NamedAdapter(name, task_id, engine.adapters[name], checksum, int(time.time()))
        # An id is never reused: cached data of its old adapter would be taken for the new one.
        self._next_task_id = FIRST_NAMED_TASK_ID + len(self._adapters)
        self._sums: dict[tuple[tuple[NamedAdapter, float], ...], int] = {}
        self._changed = threading.Condition()
        self._changing: set[str] = set()
        self._classifiers = AdapterClassifiers(engine)
        self._prompts: OrderedDict[NamedAdapter, PromptTuningConfig] = OrderedDict()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the adapters."""
        with self._changed:
            return tuple(self._adapters)

    def list(self) -> list[NamedAdapter]:
        """Returns all adapters in the order in which their names were first added."""
        with self._changed:
            return [*self._adapters.values()]

    def knows(self, name: str) -> bool:
        """True if an adapter has this name. Always False for weighted sums."""
        with self._changed:
            return name in self._adapters

    def plain_name(self, name: str) -> str:
        """Returns the adapter's name in NAME@DIGITS; other names as they are."""
        with self._changed:
            parsed = None if name in self._adapters else parse_version(name)
            return parsed[0] if parsed is not None and parsed[0] in self._adapters else name

    def list_old(self) -> tuple[NamedAdapter, ...]:
        """Returns the old versions that requests can ask for; the one that was asked for longest ago first."""
        with self._changed:
            return (*self._old,)

    def list_sums(self) -> tuple[AdapterSum, ...]:
        """Returns the weighted sums whose task_ids are kept, with the versions that they add."""
        with self._changed:
            return tuple(AdapterSum(task_id, terms) for terms, task_id in self._sums.items())

    def has_version(self, name: str) -> bool:
        """True if `name` is NAME@DIGITS of a version, current or old, whose digest is known.

        Raises AdapterError if the digits begin the digests of several versions.
        """
        with self._changed:
            return self._find_version(name) is not None

    def version_name(self, name: str) -> str | None:
        """Returns NAME@DIGEST of the version that `name` stands for now; of sums, the sum of its terms' versions.

        None: call prepare(), which reads a digest that is not known. Raises AdapterError for an unknown name.
        """
        found = self.find(name)
        if isinstance(found, NamedAdapter):
            return version_name(found)
        terms = [(version_name(adapter), weight) for adapter, weight in found.terms]
        if any(version is None for version, _ in terms):
            return None
        return "+".join(f"{version}:{weight!r}" for version, weight in terms)

    def mark_used(self, name: str) -> None:
        """Notes that a request uses the adapter, version or sum. Raises AdapterError for an unknown name."""
        for adapter in self.find(name).adapters:
            adapter.facts.last_used = time.time()

    def hold(self, name: str) -> tuple[VersionHold, ...]:
        """Keeps the versions that `name` stands for from ending as long as the result exists."""
        found = self.find(name)
        with self._changed:
            return tuple(self._old.hold(adapter) for adapter in found.adapters)

    def _find_version(self, name: str) -> NamedAdapter | None:
        parsed = parse_version(name)
        if parsed is None:
            return None
        current = self._adapters.get(parsed[0])
        found = choose_version(name, [*self._old.of(parsed[0]), *(() if current is None else (current,))])
        if found is not None:
            self._old.mark_used(found)
        return found

    def get(self, name: str) -> NamedAdapter:
        """Returns the adapter of this name, or the version NAME@DIGITS. Raises UnknownAdapterError for an unknown name,
        AdapterError for digits that begin the digests of several versions.
        """
        with self._changed:
            found = self._adapters.get(name) or self._find_version(name)
            if found is not None:
                return found
            raise self._unknown(name)

    def _unknown(self, name: str) -> UnknownAdapterError:
        some = [f"'{name}'" for name in list(self._adapters)[:_NAMES_SHOWN]]
        more = len(self._adapters) - len(some)
        known = ", ".join(some) + (f" and {more} more" if more else "") if some else "none"
        return UnknownAdapterError(f"{self._engine.directory}: has no adapter named '{name}'; it has: {known}", name)

    def find(self, name: str) -> NamedAdapter | AdapterSum:
        """Returns the adapter of this name, or the weighted sum that the name describes (see sum_of_names.py). Raises
        AdapterError for neither.
        """
        with self._changed:
            found = self._adapters.get(name) or self._find_version(name)
            if found is not None:
                return found
        named = parse_sum(name)
        if named is None:
            return self.get(name)
        terms = tuple((self.get(term), weight) for term, weight in named.terms)
        with self._changed:
            task_id = self._sums.get(terms)
            if task_id is None:
                task_id = self._new_task_id()
                self._sums[terms] = task_id
                if len(self._sums) > _MAX_SUMS:
                    del self._sums[next(iter(self._sums))]
        return AdapterSum(task_id, terms)

    def task_id(self, name: str) -> int:
        """Returns the executor's task_id for this adapter. Raises AdapterError for an unknown name."""
        return self.find(name).task_id

    def reference(self, name: str) -> LoraConfig:
        """Returns a LoraConfig with only the task_id, for an adapter that is cached."""
        return LoraConfig(self.task_id(name))

    def for_request(self, name: str, input_token_ids: Sequence[int]) -> LoraConfig | None:
        """Returns the same for a request with this prompt. An aLoRA adapter is active from its invocation tokens on.

        None: the prompt has no invocation tokens, so the base model answers, as in PEFT. Raises like reference().
        """
        return self.lora_of(self.find(name), input_token_ids)

    def lora_of(self, found: NamedAdapter | AdapterSum, input_token_ids: Sequence[int]) -> LoraConfig | None:
        """Returns the same for an adapter whose name may not be known yet."""
        tokens = self._invocation_tokens(found) if isinstance(found, NamedAdapter) else ()
        start = find_start(tokens, input_token_ids)
        return None if start is None else LoraConfig(found.task_id, active_from=start)

    def ready(self, name: str) -> ReadyAdapter | None:
        """Returns the facts that a request needs about its adapter if they are in memory; None: call prepare(), which
        reads files.

        If this returns facts, for_request() and refuse_classifier() read no files either. Raises AdapterError for an
        unknown name.
        """
        found = self.find(name)
        if any(adapter.facts.is_classifier is None or adapter.facts.digest is None for adapter in found.adapters):
            return None
        if not isinstance(found, NamedAdapter):
            return ReadyAdapter(AdapterTerms(), None, 0)  # weighted sums have none
        facts = found.facts
        if None in (facts.terms, facts.num_virtual_tokens, facts.invocation_tokens, facts.has_draft):
            return None
        assert facts.terms is not None
        assert facts.num_virtual_tokens is not None
        if facts.num_virtual_tokens == 0:
            return ReadyAdapter(facts.terms, None, 0)
        with self._changed:
            prompt = self._prompts.get(found)
            if prompt is None:
                return None
            self._prompts.move_to_end(found)
        return ReadyAdapter(facts.terms, prompt, facts.num_virtual_tokens)

    def prepare(self, name: str) -> ReadyAdapter:
        """Returns the same, after reading what is not in memory. Raises like load()."""
        found = self.find(name)
        for adapter in found.adapters:
            self._classifiers.is_classifier(adapter)
            self._read_digest(adapter)
        if not isinstance(found, NamedAdapter):
            return ReadyAdapter(AdapterTerms(), None, 0)
        prompt = self._prompt_of(found)
        terms = self._terms_of(found)
        self.has_draft(found)
        if prompt is None:
            self._invocation_tokens(found)
        return ReadyAdapter(terms, prompt, 0 if prompt is None else num_virtual_tokens(prompt))

    def has_draft(self, adapter: NamedAdapter) -> bool:
        """True if the adapter brings one for the draft engine, in its directory `draft`."""
        if adapter.facts.has_draft is None:
            adapter.facts.has_draft = (adapter.directory / DRAFT_DIRECTORY).is_dir()
        return adapter.facts.has_draft

    def _read_digest(self, adapter: NamedAdapter) -> None:
        if adapter.facts.digest is None:
            with one_version(adapter.directory, adapter_files):
                read_digest(adapter, self._engine)

    def _invocation_tokens(self, adapter: NamedAdapter) -> tuple[int, ...]:
        tokens = adapter.facts.invocation_tokens
        if tokens is None:
            tokens = invocation_tokens(adapter.directory, self._engine.adapted_modules)
            adapter.facts.invocation_tokens = tokens
        return tokens

    def terms_of(self, name: str) -> AdapterTerms:
        """Returns the adapter's terms for its requests: vocabulary and positions. Raises like load().

        An adapter that may have terms is read and converted if that has not been done yet.
        """
        found = self.find(name)
        if not isinstance(found, NamedAdapter):
            return AdapterTerms()  # weighted sums have none
        return self._terms_of(found)

    def _terms_of(self, adapter: NamedAdapter) -> AdapterTerms:
        if adapter.facts.terms is not None:
            return adapter.facts.terms
        if self._prompt_of(adapter) is None and may_have_terms(adapter.directory, self._engine.adapted_modules):
            return self._convert(adapter).terms
        adapter.facts.terms = AdapterTerms()
        return adapter.facts.terms

    def _convert(self, adapter: NamedAdapter) -> ConvertedAdapter:
        converted = adapter_of_directory(adapter.directory, self._engine)
        if converted.changes_nothing and not self.allows_no_op and not self._classifiers.is_classifier(adapter):
            raise AdapterError(
                f"{adapter.directory}: adapter '{adapter.name}' changes nothing: A or B is zero in each of its "
                f"{len(converted.paths)} modules; expected trained weights, or --allow_no_op_adapters (in Python "
                "allow_no_op_adapters=True)"
            )
        adapter.facts.invocation_tokens = converted.invocation_tokens
        adapter.facts.terms = converted.terms
        adapter.facts.kind = converted.kind
        adapter.facts.max_rank = max_rank_of(converted.config[0])
        return converted

    def num_virtual_tokens(self, name: str) -> int:
        """Returns the number of tokens that the adapter puts before a prompt; 0 for a LoRA. Raises like load()."""
        found = self.find(name)
        if not isinstance(found, NamedAdapter):
            return 0  # weighted sums have none
        if found.facts.num_virtual_tokens is not None:
            return found.facts.num_virtual_tokens
        prompt = self._read_prompt(found)
        return 0 if prompt is None else num_virtual_tokens(prompt)

    def prompt_of(self, name: str) -> PromptTuningConfig | None:
        """Returns the virtual tokens that the adapter puts before a prompt; None: it is a LoRA. Raises like load()."""
        found = self.find(name)
        return self._prompt_of(found) if isinstance(found, NamedAdapter) else None

    def virtual_tokens_of(self, adapter: NamedAdapter) -> PromptTuningConfig | None:
        """Returns the same for an adapter whose name may not be known yet."""
        return self._prompt_of(adapter)

    def _prompt_of(self, adapter: NamedAdapter) -> PromptTuningConfig | None:
        if adapter.facts.num_virtual_tokens == 0:
            return None
        with self._changed:
            if adapter in self._prompts:
                self._prompts.move_to_end(adapter)
                return self._prompts[adapter]
        return self._read_prompt(adapter)

    def _read_prompt(self, adapter: NamedAdapter) -> PromptTuningConfig | None:
        with one_version(adapter.directory):
            prompt = prompt_of_directory(adapter.directory, self._engine)
            if prompt is not None:
                check_unchanged(adapter, self._engine)
        adapter.facts.num_virtual_tokens = 0 if prompt is None else num_virtual_tokens(prompt)
        if prompt is not None:
            adapter.facts.invocation_tokens = ()
            adapter.facts.kind, adapter.facts.max_rank = "virtual_tokens", 0
            with self._changed:
                self._prompts[adapter] = prompt
                if len(self._prompts) > _MAX_PROMPTS:
                    self._prompts.popitem(last=False)
        return prompt

    def load(self, name: str, *, active_from: int = 0) -> LoraConfig:
        """Reads and converts the adapter, and returns it with its weights.

        active_from: first position at which the adapter is active. Raises EngineError if its files are not those that
        the name was given to, AdapterError for an invalid adapter.
        """
        found = self.find(name)
        if isinstance(found, NamedAdapter):
            with one_version(found.directory):
                check_unchanged(found, self._engine)
                converted = self._convert(found)
            return LoraConfig(found.task_id, converted.weights, converted.config, active_from=active_from)
        with contextlib.ExitStack() as unchanged:
            for adapter in found.adapters:
                unchanged.enter_context(one_version(adapter.directory))
                check_unchanged(adapter, self._engine)
            terms = [(adapter.name, adapter.directory, weight) for adapter, weight in found.terms]
            converted = sum_of_directories(terms, self._engine)
        return LoraConfig(found.task_id, converted.weights, converted.config)

    def read(
        self, name: str, directory: str | os.PathLike[str], *, replace: bool
    ) -> tuple[NamedAdapter, LoraConfig | None]:
        """Reads a PEFT directory as the adapter `name`, with its weights. keep() then makes the name known.

        Adapters of virtual tokens have no weights.

        Raises AdapterError for an empty name, for a taken name unless `replace` is true, and for an invalid adapter;
        EngineError if its files cannot be read.
        """
        if not name:
            raise AdapterError(f"{directory}: the name of an adapter is empty")
        if parse_sum(name) is not None:
            raise AdapterError(f"name of an adapter is '{name}', which is a weighted sum; expected another name")
        if has_whole_digest(name):
            raise AdapterError(f"name of an adapter is '{name}', which is a version's; expected another name")
        with self._changed:
            known = self._adapters.get(name)
        if known is not None and not replace:
            raise AdapterError(f"adapter '{name}' is {known.directory} already; replace it, or choose another name")
        if known is not None:
            with contextlib.suppress(AdaptrtError):  # no request can ask for a version that cannot be read
                self._read_digest(known)
        lease = directory.lease if isinstance(directory, Source) else None
        source = directory.given if isinstance(directory, Source) else str(directory)
        directory = Path(directory).absolute()  # the process may change its working directory later
        if not directory.is_dir():
            raise AdapterError(
                f"{directory}: is not a directory; adapter '{name}' needs the directory of a PEFT adapter"
            )
        adapter = NamedAdapter(name, self._new_task_id(), directory, "", int(time.time()), lease=lease)
        with one_version(directory, adapter_files):
            checksum, converted = self._digest_and_convert(adapter)
            warn_of_other_base(name, directory, self._engine.config.source)
            adapter = with_fields(adapter, checksum=checksum)
            adapter.facts.source = source
            adapter.facts.proof = read_proof(directory)
            self.has_draft(adapter)
            adapter = with_fields(adapter, task_id=self._task_id_of_content(adapter))
            if self._read_prompt(adapter) is not None:
                self._classifiers.is_classifier(adapter)
                adapter.facts.terms = AdapterTerms()
                return adapter, None
            assert converted is not None
            config = LoraConfig(adapter.task_id, converted.weights, converted.config)
            self._classifiers.head_of(adapter)
        return adapter, config

    def _digest_and_convert(self, adapter: NamedAdapter) -> tuple[str, ConvertedAdapter | None]:
        """Reads the checksum and the digest of the adapter's files while it is converted. Virtual tokens are not.

        A thread of its own computes them, because SHA-256 takes about as long as the conversion.
        """
        with ThreadPoolExecutor(1, "adaptrt-digests") as thread:
            digests = thread.submit(contextvars.copy_context().run, digests_of, adapter.name, adapter.directory)
            try:
                converted = None if is_prompt_tuned(adapter.directory) else self._convert(adapter)
            except AdaptrtError:
                digests.result()  # Raises the first error of files that cannot be read.
                raise
        checksum, adapter.facts.digest, adapter.facts.num_bytes = digests.result()
        return checksum, converted

    def keep(self, adapter: NamedAdapter) -> tuple[NamedAdapter, ...]:
        """Makes the adapter known under its name. The one that had the name before becomes an old version.

        Returns the versions that have ended, whose weights the caller removes from the cache.
        """
        ended = []
        with self._changed:
            before = self._adapters.get(adapter.name)
            self._adapters[adapter.name] = adapter
            assert adapter.facts.digest is not None  # read() has read it
            same = self._old.take(adapter.name, adapter.facts.digest)
            if before is not None and before.task_id != adapter.task_id:
                if before.facts.digest is None:
                    ended.append(before)
                else:
                    self._old.add(before)
                before = None
            ended += self._old.take_excess(self.version_limits)
        for one in (before, same, *ended):
            if one is not None:
                self._release(one, unless=adapter.lease)
        return tuple(ended)

    def _release(self, adapter: NamedAdapter, unless: Lease | None = None) -> None:
        """Forgets what is kept for an adapter that requests can no longer ask for. unless: a lease that goes on."""
        with self._changed:
            if self._adapters.get(adapter.name) != adapter:
                self._prompts.pop(adapter, None)
        if adapter.lease is not None and adapter.lease is not unless:
            adapter.lease.release()

    def _task_id_of_content(self, adapter: NamedAdapter) -> int:
        """Returns the task_id of the version with the same name and files if it is known, else the adapter's own."""
        with self._changed:
            current = self._adapters.get(adapter.name)
            known = [*self._old.of(adapter.name), *(() if current is None else (current,))]
            digests = (None, adapter.facts.digest)
            same = [one.task_id for one in known if one.checksum == adapter.checksum and one.facts.digest in digests]
            return same[0] if same else adapter.task_id

    def classifier_for(self, name: str | None) -> AdaptedClassifier:
        """Returns the classifier of the adapter `name`, or of no adapter: the adapter's own head, or else the model's.

        Raises RequestError if neither exists, AdapterError for an unknown name, EngineError for files that have
        changed.
        """
        return self._classifiers.classifier_for(name, None if name is None else self.find(name))

    def refuse_classifier(self, name: str) -> None:
        """Raises RequestError if the adapter `name` is a classifier's, which cannot generate."""
        self._classifiers.refuse(self.find(name))

    def refuse_generation_of(self, adapter: NamedAdapter) -> None:
        """Does the same for an adapter whose name may not be known yet."""
        self._classifiers.refuse(adapter)

    def known_classifier(self, name: str | None) -> AdaptedClassifier | None:
        """Returns the classifier of classifier_for() if it is in memory. None: classifier_for() would read files or
        raise.
        """
        return self._classifiers.known(None if name is None else self.find(name))

    def versions(self, name: str) -> tuple[NamedAdapter, ...]:
        """Returns the adapter of this name and its old versions. Raises UnknownAdapterError for an unknown name."""
        with self._changed:
            if name not in self._adapters:
                raise self._unknown(name)
            return (self._adapters[name], *self._old.of(name))

    def remove(self, name: str) -> None:
        """Removes the adapter of this name and its old versions. Raises AdapterError for an unknown name."""
        with self._changed:
            if name not in self._adapters:
                raise self._unknown(name)
            removed = [self._adapters.pop(name), *self._old.take_all(name)]
        for one in removed:
            self._release(one)

    @contextlib.contextmanager
    def changing(self, name: str) -> Iterator[None]:
        """Keeps other threads from reading, replacing or removing the adapter `name` or a version of it. Waits until
        none of them does.
        """
        with self._changed:
            name = self.plain_name(name)
            self._changed.wait_for(lambda: name not in self._changing)
            self._changing.add(name)
        try:
            yield
        finally:
            with self._changed:
                self._changing.discard(name)
                self._changed.notify_all()

    def _new_task_id(self) -> int:
        with self._changed:
            self._next_task_id += 1
            return self._next_task_id - 1
