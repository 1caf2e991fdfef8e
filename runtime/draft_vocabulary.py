"""Checks that a draft model has the vocabulary of the model that it drafts for."""

from __future__ import annotations

import filecmp
from pathlib import Path

from tokenizers import Tokenizer

from .._core import ConfigError
from .adapter_tokenizers import load_tokenizer


def check_draft_vocabulary(target: Path, draft: Path) -> None:
    """Raises ConfigError if an id is different tokens in two tokenizers.

    `target` and `draft` are the files tokenizer.json of a model and of its draft model. Nothing is compared unless
    both exist. Ids that only one of them has may pass, and so may two added tokens: fine-tuned models rename those
    that their base reserved.
    """
    if not target.is_file() or not draft.is_file() or filecmp.cmp(target, draft, shallow=False):
        return
    tokens, drafted = load_tokenizer(target), load_tokenizer(draft)
    of_target, of_draft = _tokens_by_id(tokens), _tokens_by_id(drafted)
    added = tokens.get_added_tokens_decoder().keys() & drafted.get_added_tokens_decoder().keys()
    for token_id in sorted((of_target.keys() & of_draft.keys()) - added):
        if of_target[token_id] != of_draft[token_id]:
            raise ConfigError(
                f"{draft}: token {token_id} is {of_draft[token_id]!r}; expected {of_target[token_id]!r}, "
                f"as in {target}: a draft model needs the tokenizer of its model"
            )


def _tokens_by_id(tokenizer: Tokenizer) -> dict[int, str]:
    return {token_id: token for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items()}
