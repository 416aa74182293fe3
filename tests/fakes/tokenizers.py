"""Each further kind of ``tokenizer.json`` that is common, small."""

from __future__ import annotations

from typing import Any

from ferrule_testkit.tokenizers import CORPUS, byte_level


def byte_fallback(prepend: bool = True) -> Any:
    """Make BPE over characters with bytes for unknown ones, as Llama 2 (with a space put before the text) and Gemma."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    characters = sorted(set("".join(CORPUS[0:1])) | {"▁"})
    words = ["▁t", "▁th", "▁the", "he", "ox", "▁qu", "▁d"]
    vocab = {piece: number for number, piece in enumerate(dict.fromkeys([*pieces, *characters, *words]))}
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("h", "e"), ("o", "x"), ("▁", "d")]
    core = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    first = [normalizers.Prepend("▁")] if prepend else []
    core.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    core.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if prepend else [])])
    core.add_special_tokens(["<unk>", "<s>", "</s>"])
    return core


def metaspace() -> Any:
    """Make a unigram tokenizer with a mark for spaces, as T5 and XLNet."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    core = Tokenizer(models.Unigram())
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=120, special_tokens=["<unk>", "</s>"], unk_token="<unk>")
    core.train_from_iterator(CORPUS, trainer)
    return core


def word_piece() -> Any:
    """Make a tokenizer of words and their continuations, as BERT."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    core = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.decoder = decoders.WordPiece()
    core.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]", "[SEP]"]))
    return core


def end_of_word() -> Any:
    """Make BPE that marks the ends of words: its decoder looks at neighbours, so text is decoded in windows."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    core = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.decoder = decoders.BPEDecoder()
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>"], end_of_word_suffix="</w>")
    core.train_from_iterator(CORPUS, trainer)
    return core


def no_decoder() -> Any:
    """Make a tokenizer of whole words and nothing to join them with: a space stands between tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    core = Tokenizer(models.WordLevel(unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.train_from_iterator(CORPUS, trainers.WordLevelTrainer(vocab_size=100, special_tokens=["<unk>"]))
    return core


KINDS = {
    "byte_level": byte_level,
    "byte_fallback": byte_fallback,
    "gemma": lambda: byte_fallback(prepend=False),
    "metaspace": metaspace,
    "word_piece": word_piece,
    "end_of_word": end_of_word,
    "no_decoder": no_decoder,
}
