"""Small tokenizers of the two common kinds."""

from __future__ import annotations

import string
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "Hello world, it's the cat's 12345 hats; they'LL see!",
    "  leading and   many    spaces \t tabs\n\n\nnewlines\r\n end  ",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    "Быстрая лиса прыгает через ленивую собаку 2024 года.",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία — «καλημέρα»",
    "مرحبا بالعالم ١٢٣ שלום עולם",
    "नमस्ते दुनिया क्षत्रिय",
    "你好,世界!今天是2024年。日本語のテキストとカタカナ",
    "안녕하세요 세계 각하",
    "สวัสดีชาวโลก",
    "emoji 😀👩‍👩‍👧‍👦🏳️‍🌈 and é vs e\u0301 ﬁ",
    "def f(x):\n    return x ** 2  # ∑∫√\n\tif x != 3: pass",
    "",
    " ",
    "a",
]
"""Texts of many scripts."""
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
BERT_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
ROBERTA_SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]


def word_piece(**normalizer: bool) -> Tokenizer:
    """Returns a tokenizer like BERT's, trained on the corpus. normalizer: arguments of BertNormalizer."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(**normalizer)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=BERT_SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=_ids(tokenizer, "[CLS]", "[SEP]")
    )
    return tokenizer


def unigram(charsmap: bytes | None = None) -> Tokenizer:
    """Returns a tokenizer like XLM-RoBERTa's, trained on the corpus without some of its texts. charsmap: table of the
    normaliser.
    """
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([] if charsmap is None else [normalizers.Precompiled(charsmap)])
    metaspace = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), metaspace])
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=ROBERTA_SPECIAL, unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator([*CORPUS[:5], *CORPUS[6:]] * 3, trainer)
    tokenizer.post_processor = _roberta_ends(tokenizer)
    return tokenizer


def roberta() -> Tokenizer:
    """Returns a tokenizer like RoBERTa's, trained on the corpus."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=ROBERTA_SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    tokenizer.post_processor = _roberta_ends(tokenizer)
    return tokenizer


def _roberta_ends(tokenizer: Tokenizer) -> processors.TemplateProcessing:
    return processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=_ids(tokenizer, "<s>", "</s>")
    )


def _ids(tokenizer: Tokenizer, *tokens: str) -> list[tuple[str, int]]:
    return [(token, tokenizer.token_to_id(token)) for token in tokens]


def byte_level() -> Tokenizer:
    """Returns a tokenizer like Qwen's and Llama 3's: its tokens are all bytes and some strings, including parts of
    characters.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    # A euro sign, its first two bytes, its last two bytes, a space before a word.
    joined = ["âĤ¬", "âĤ", "Ĥ¬", "Ġhello", "hello", "Ġ.", "</"]
    vocabulary = {piece: number for number, piece in enumerate([*SPECIAL, *alphabet, *joined])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False)])
    return tokenizer


def metaspace() -> Tokenizer:
    """Returns a tokenizer like Llama 2's and Mistral's: spaces are characters, and text outside the vocabulary becomes
    tokens of bytes.
    """
    pieces = ["▁", "▁▁", "▁hello", "hello", "▁.", "€", "\ufffd", "▁\ufffd", *string.ascii_letters, *".,!?</|_\n"]
    pieces += [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary = {piece: number for number, piece in enumerate([*SPECIAL, *pieces])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<s>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Writes tokenizer.json into a model's directory."""
    tokenizer.save(str(directory / "tokenizer.json"))
