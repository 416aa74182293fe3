"""Builds the tokenizer: byte-level BPE of 2048 tokens, trained on the generator's own dialogues.

Letters, single digits and everything between them are split from each other. So a word has the same tokens at the
start of a line, behind a blank and inside JSON quotes, so copying a word is easy for the model, and a number is read
digit by digit. Any byte string survives the round trip.
"""

import itertools
import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tools.tiny import chat, dialogues

VOCAB_SIZE = 2048
MAX_LENGTH = 2048
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Single tokens that stay visible in decoded text, for the parsers.
MARKS = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<tools>", "</tools>",
)  # fmt: skip
PIECES = r"\p{L}+|\p{N}|[^\p{L}\p{N}]+"


def build(seed: int = 0, samples: int = 12_000) -> Tokenizer:
    """Train the tokenizer on ``samples`` dialogues of the training side; the same for the same arguments."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(MARKS),
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    template = chat.load_template()
    weights = dict.fromkeys(dialogues.HELD_OUT_COUNTS, 1.0)
    drawn = itertools.islice(dialogues.stream(f"tokenizer {seed}", weights, worked=False), samples)
    texts = (chat.prompt_of(d, template) + chat.completion_of(d) for d in drawn)
    tokenizer.train_from_iterator((_without_marks(text) for text in texts), trainer)
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    return tokenizer


def _without_marks(text: str) -> str:
    for mark in (*SPECIAL, *MARKS):
        text = text.replace(mark, "\n")
    return text


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``; the chat template lies beside them in its own file."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_LENGTH,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "additional_special_tokens": ["<|im_start|>"],
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
