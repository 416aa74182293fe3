"""Damaged files for the parsers of weights: whatever is in a file, it is read or it is one clear error."""

import random
import struct
from collections.abc import Callable
from pathlib import Path

from ferrule.errors import CheckpointError

HUGE = 1 << 63


def mutated(whole: bytes, draw: random.Random) -> bytes:
    """A few bytes changed, lengths and counts preferred, or a piece left out, doubled or cut off."""
    content = bytearray(whole)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(content))
        match draw.randrange(5):
            case 0:
                content[at] = draw.randrange(256)
            case 1:
                content[at : at + 8] = struct.pack(
                    "<Q", draw.choice((0, 1, 255, 1 << 31, 1 << 32, 1 << 62, HUGE, HUGE * 2 - 1))
                )
            case 2:
                del content[at : at + draw.randint(1, 16)]
            case 3:
                content[at:at] = content[at : at + draw.randint(1, 64)]
            case 4:
                del content[at:]
        if not content:
            break
    return bytes(content)


def fuzz(place: Path, whole: bytes, read: Callable[[Path], object], count: int, seed: int) -> int:
    """How many of so many mutations are still read. Anything but a CheckpointError is a failure."""
    draw, survived = random.Random(seed), 0
    for _ in range(count):
        place.unlink(missing_ok=True)  # a new file: a mapping of the last one may still be held
        place.write_bytes(mutated(whole, draw))
        try:
            read(place)
        except CheckpointError:
            continue
        survived += 1
    return survived
