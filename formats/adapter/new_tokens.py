"""Adapters trained after the embeddings were resized: their vocabulary is longer or shorter than the base's.

PEFT saves resized weights of lm_head and the embedding whole, both those that it trained (modules_to_save) and those
that it puts back into the base. LoRA on these layers, and trained tokens, also cover the new tokens. The two resulting
rows of each new token go into a row of the module new_tokens; the rest becomes an adapter over the base's vocabulary.
If the vocabulary became shorter, the adapter leaves the missing tokens unchanged and states their number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import numpy as np

from ..._core import AdapterError
from ..network.adapter_sites import NEW_TOKENS, AdaptedModule, AdaptedModules
from .adapter import Adapter, Array, FloatArray, ModuleTensors, TokenRows, WholeWeight
from .names import EMBEDDING, LM_HEAD, MODULES, ModuleKey, Role
from .problems import join_problems

KEY: Final = ModuleKey(0, MODULES[NEW_TOKENS].id, NEW_TOKENS)
"""Key of the row with the new tokens."""


def take_new_tokens(
    adapter: Adapter, modules: AdaptedModules | None, max_extra_tokens: int | None
) -> ModuleTensors | None:
    """Moves the adapter's tokens beyond the base's vocabulary into a module of their own; None if there are none.

    A is [new tokens, hidden size], lm_head's rows, and B [hidden size, new tokens], the embedding's. If the adapter has
    fewer tokens than the base, this sets absent_tokens and pads LoRA on lm_head and the embedding with zeros. Without
    `modules` nothing is moved.

    modules: modules of the model that will serve the adapter, or of its base.
    max_extra_tokens: maximum number of new tokens; None: no limit.

    Raises AdapterError for new tokens that cannot be served.
    """
    layers = {} if modules is None else {layer.module: layer for layer in modules.by_path.values()}
    if modules is None or EMBEDDING not in layers:
        for embeddings in adapter.new_embeddings.values():
            raise AdapterError(f"{adapter.directory}: {embeddings.name}: rows of new tokens; give the base model")
        return None
    taken = _Taken(adapter, modules, layers[EMBEDDING])
    if taken.count < 0:
        _leave_out(adapter, modules, taken)
        return None
    if taken.count == 0 and not taken.problems:
        return None
    problems = [*taken.problems, *_unserved(adapter, layers)]
    rows: dict[str, FloatArray] = {}
    if not problems:
        for module in (EMBEDDING, LM_HEAD):
            rows[module], known = taken.rows_of(layers[module])
            problems += _missing(layers[module], known, taken.vocabulary)
    if not problems and max_extra_tokens is not None and taken.count > max_extra_tokens:
        problems.append(
            f"it brings {taken.count} tokens beyond the base's vocabulary of {taken.vocabulary}, above "
            f"max_extra_tokens {max_extra_tokens}; build the engine with --max_extra_tokens {taken.count}"
        )
    if problems:
        raise AdapterError(f"{adapter.file}: " + join_problems(problems))
    names = {Role.A: f"{layers[LM_HEAD].path} of new tokens", Role.B: f"{layers[EMBEDDING].path} of new tokens"}
    return ModuleTensors(rows[LM_HEAD], np.ascontiguousarray(rows[EMBEDDING].T), None, 1.0, names)


def _unserved(adapter: Adapter, layers: dict[str, AdaptedModule]) -> Iterator[str]:
    if LM_HEAD not in layers:
        yield "it brings new tokens, but the model has no lm_head"
    if adapter.invocation_tokens:
        yield "it brings new tokens, but it is an aLoRA: the base model computes all earlier tokens"
    if adapter.base_changing_init:
        yield f'it brings new tokens, but its initialisation "{adapter.base_changing_init}" changed the base'


def _leave_out(adapter: Adapter, modules: AdaptedModules, taken: _Taken) -> None:
    """Pads the adapter to the base's vocabulary, and sets absent_tokens."""
    vocabulary = taken.vocabulary + taken.count
    problems = list(taken.problems)
    if modules.has_encoder:
        problems.append(
            f"it has {vocabulary} tokens; expected the base's {taken.vocabulary} for a model with an encoder"
        )
    for rows in adapter.token_rows.values():
        if max(rows.tokens) >= vocabulary:
            problems.append(
                f"tensor '{rows.name}': has a row for token {max(rows.tokens)}; expected at most {vocabulary - 1}"
            )
    for key, tensors in adapter.modules.items():
        if not key.module.is_of_vocabulary:
            continue
        if tensors.magnitude is not None:
            problems.append(
                f"module '{key.path}' has factors (DoRA or IA3); expected none with fewer tokens than the base"
            )
        elif tensors.bias is not None:
            problems.append(f"module '{key.path}' has a trained bias; expected none with fewer tokens than the base")
        elif key.module.name == EMBEDDING:
            adapter.modules[key] = replace(tensors, a=np.pad(tensors.a, ((0, 0), (0, -taken.count))))
        else:
            shift = None if tensors.shift is None else np.pad(tensors.shift, (0, -taken.count))
            adapter.modules[key] = replace(tensors, b=np.pad(tensors.b, ((0, -taken.count), (0, 0))), shift=shift)
    if problems:
        raise AdapterError(f"{adapter.file}: " + join_problems(problems))
    adapter.absent_tokens = -taken.count


def _missing(layer: AdaptedModule, known: Array, vocabulary: int) -> Iterator[str]:
    absent = np.flatnonzero(~known)
    if len(absent):
        more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
        yield (
            f"it brings tokens beyond the base's vocabulary of {vocabulary}, and its file has no row of '{layer.path}' "
            f"for token {vocabulary + absent[0]}{more}; save the adapter with save_embedding_layers=True"
        )


class _Taken:
    """New tokens of an adapter, by the modules EMBEDDING and LM_HEAD. The constructor removes them from the adapter."""

    def __init__(self, adapter: Adapter, modules: AdaptedModules, embedding: AdaptedModule) -> None:
        self.vocabulary: Final = embedding.in_size
        self.problems: Final[list[str]] = []
        self._width = embedding.out_size
        self._ties_weights = adapter.ties_weights
        self._is_tied = any(layer.tied_to is not None for layer in modules.by_path.values())
        self._whole: dict[tuple[str, bool], WholeWeight] = {}
        self._changes: dict[str, FloatArray] = {}  # changes of the rows by LoRA, [new tokens, hidden size]
        self._tokens: dict[str, TokenRows] = {}
        # Number of new tokens by tensor of lm_head and the embedding; negative: missing tokens.
        self._sizes: dict[str, int] = {}
        self._take_whole_weights(adapter)
        self._take_changes(adapter)
        self._take_token_rows(adapter)
        self._take_new_embeddings(adapter)
        beyond = [max(rows.tokens) + 1 - self.vocabulary for rows in self._tokens.values()]
        self.count: Final = max([*self._sizes.values(), *beyond], default=0)
        """Number of new tokens; negative: number of the base's tokens that are missing."""
        for name, size in self._sizes.items():
            if size != self.count:
                self.problems.append(
                    f"tensor '{name}': has {self.vocabulary + size} tokens, the base {self.vocabulary}, and other "
                    f"tensors {self.vocabulary + self.count}"
                )

    def rows_of(self, layer: AdaptedModule) -> tuple[FloatArray, Array]:
        """Returns the new tokens' rows [new tokens, hidden size], and a mask of those that are known."""
        rows = np.zeros((self.count, self._width), np.float32)
        known = np.zeros(self.count, np.bool_)
        weight = self._weight_of(layer)
        if weight is not None:
            rows, known = weight.values.astype(np.float32), np.ones_like(known)
        if layer.module in self._changes:
            rows = rows + self._changes[layer.module]
        trained = self._tokens.get(layer.module)
        if trained is None and layer.tied_to is not None:
            trained = self._tokens.get(EMBEDDING)  # as in PEFT, unless lm_head has its own rows
        if trained is not None:
            places = np.asarray(trained.tokens) - self.vocabulary
            rows[places], known[places] = trained.values.astype(np.float32), True
        return rows, known

    def _weight_of(self, layer: AdaptedModule) -> WholeWeight | None:
        """Returns the layer's own weight, or else the one put into the base for it or for a layer tied to it."""
        other = EMBEDDING if layer.module == LM_HEAD else LM_HEAD
        places = [(layer.module, True)]
        if self._is_tied and self._ties_weights:
            places.append((other, True))
        places.append((layer.module, False))
        if self._is_tied:
            places.append((other, False))
        return next((self._whole[place] for place in places if place in self._whole), None)

    def _take_whole_weights(self, adapter: Adapter) -> None:
        kept = []
        for weight in adapter.whole_weights:
            if weight.values.shape[1] == self._width and self._goes_beyond(weight.name, len(weight.values)):
                own, beyond = np.split(weight.values, [self.vocabulary])
                self._whole[weight.key.module.name, weight.is_own] = replace(weight, values=beyond)
                weight = replace(weight, values=own)
            kept.append(weight)
        adapter.whole_weights = kept

    def _take_changes(self, adapter: Adapter) -> None:
        for key, tensors in adapter.modules.items():
            name = tensors.names.get(Role.B, key.path)
            of_embedding = key.module.name == EMBEDDING
            tokens, width = tensors.a.shape[1], len(tensors.b)
            if not of_embedding:
                tokens, width = width, tokens
            # A tensor of another hidden size is refused with its module.
            if not key.module.is_of_vocabulary or width != self._width or not self._goes_beyond(name, tokens):
                continue
            if tensors.magnitude is not None:
                self.problems.append(f"module '{key.path}' has factors (DoRA or IA3); expected none with new tokens")
            scaled_b, a = tensors.b.astype(np.float32) * np.float32(tensors.scale), tensors.a.astype(np.float32)
            if of_embedding:
                change = (scaled_b @ a[:, self.vocabulary :]).T
                own = replace(tensors, a=np.ascontiguousarray(tensors.a[:, : self.vocabulary]))
            else:
                change = scaled_b[self.vocabulary :] @ a
                own = replace(tensors, b=tensors.b[: self.vocabulary])
                own.shift, own.bias = (self._of_vocabulary(key, vector) for vector in (tensors.shift, tensors.bias))
            self._changes[key.module.name] = change
            adapter.modules[key] = own

    def _of_vocabulary(self, key: ModuleKey, vector: Array | None) -> Array | None:
        if vector is None:
            return None
        if vector[self.vocabulary :].any():
            self.problems.append(f"module '{key.path}' has a bias for new tokens; expected none")
        return vector[: self.vocabulary]

    def _take_token_rows(self, adapter: Adapter) -> None:
        for key, rows in list(adapter.token_rows.items()):
            beyond = [place for place, token in enumerate(rows.tokens) if token >= self.vocabulary]
            if not beyond or rows.values.shape[1] != self._width:
                continue
            self._tokens[key.module.name] = _some_of(rows, beyond)
            within = [place for place, token in enumerate(rows.tokens) if token < self.vocabulary]
            if within:
                adapter.token_rows[key] = _some_of(rows, within)
            else:
                del adapter.token_rows[key]

    def _take_new_embeddings(self, adapter: Adapter) -> None:
        for module, embeddings in adapter.new_embeddings.items():
            count, width = embeddings.values.shape
            tokens = tuple(range(self.vocabulary, self.vocabulary + count))
            if width != self._width:
                self.problems.append(
                    f"tensor '{embeddings.name}': its rows have {width} elements; expected the model's {self._width}"
                )
            elif module in self._tokens or any(size > 0 for size in self._sizes.values()):
                self.problems.append(
                    f"tensor '{embeddings.name}': has new tokens, but {adapter.file.name} has some too"
                )
            else:
                self._tokens[module] = TokenRows(embeddings.name, tokens, embeddings.values)

    def _goes_beyond(self, name: str, tokens: int) -> bool:
        """True if a tensor with this number of tokens has new ones."""
        self._sizes[name] = tokens - self.vocabulary
        return tokens > self.vocabulary


def _some_of(rows: TokenRows, places: list[int]) -> TokenRows:
    return TokenRows(rows.name, tuple(rows.tokens[place] for place in places), rows.values[places])
