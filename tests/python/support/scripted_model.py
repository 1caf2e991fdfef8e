"""A model with fixed answers: each token is followed by one other token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import transformers
from tokenizers import AddedToken, Tokenizer

from support.tokenizers import byte_level, save_tokenizer

END = "</s>"


def save_scripted_model(scripts: Mapping[str, Sequence[str]], directory: Path) -> Path:
    """Makes a Hugging Face model that answers with fixed pieces to a prompt that ends with a key of `scripts`.

    All keys and pieces are different tokens. The tokenizer also has all bytes.
    """
    tokenizer = byte_level()
    directory.mkdir(parents=True)
    tokens = [token for start, pieces in scripts.items() for token in (start, *pieces)]
    assert len(set(tokens)) == len(tokens)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in tokens])
    save_tokenizer(tokenizer, directory)
    follows = {}
    for start, pieces in scripts.items():
        for token, next_token in zip((start, *pieces), (*pieces, END), strict=True):
            follows[tokenizer.token_to_id(token)] = tokenizer.token_to_id(next_token)
    _save_weights(tokenizer, follows, directory)
    return directory


def _save_weights(tokenizer: Tokenizer, follows: Mapping[int, int], directory: Path) -> None:
    """Writes weights such that each token has one element of the hidden state, and no layer mixes them."""
    size = tokenizer.get_vocab_size()
    config = transformers.LlamaConfig(
        vocab_size=size,
        hidden_size=size + size % 2,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=8,
        max_position_embeddings=512,
        eos_token_id=tokenizer.token_to_id(END),
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)  # adapters let the random weights of attention and MLP have an effect
    model = transformers.AutoModelForCausalLM.from_config(config)
    end = tokenizer.token_to_id(END)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(size, config.hidden_size))
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.lm_head.weight.zero_()
        for token in range(size):
            model.lm_head.weight[follows.get(token, end), token] = 1.0
    model.save_pretrained(directory)
