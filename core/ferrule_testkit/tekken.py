"""A tiny tokenizer in the form of Mistral AI's ``tekken.json``."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path

_SPECIALS = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]"),
    *("[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "<pad>", "[SYSTEM_PROMPT]"),
    *("[/SYSTEM_PROMPT]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[CALL_ID]", "[ARGS]"),
    *("[TOOL_CONTENT]", "[IMG]"),
)


def write_tekken(folder: Path, version: str = "v11") -> Path:
    """Write a tokenizer with 320 entries: 20 special ones, 256 bytes, and 44 pairs of letters."""
    letters = [bytes([byte]) for byte in range(256)]
    letters += [pair.encode() for pair in re.findall("..", "thheineranreonatenndstesorteofedisitalar")]
    letters += [b" " + bytes([byte]) for byte in b"abcdefghijklmnopqrstuvwx"]
    vocabulary = [
        {"rank": rank, "token_bytes": base64.b64encode(word).decode(), "token_str": word.decode("utf-8", "replace")}
        for rank, word in enumerate(letters)
    ]
    tekken = {
        "config": {
            "pattern": r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s+",
            "num_vocab_tokens": len(letters),
            "default_vocab_size": len(letters) + len(_SPECIALS),
            "default_num_special_tokens": len(_SPECIALS),
            "version": version,
        },
        "vocab": vocabulary,
        "special_tokens": [
            {"rank": rank, "token_str": token, "is_control": True} for rank, token in enumerate(_SPECIALS)
        ],
    }
    file = folder / "tekken.json"
    file.write_text(json.dumps(tekken))
    return file
