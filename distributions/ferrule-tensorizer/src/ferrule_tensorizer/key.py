"""The key of an encrypted file that is written."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from ferrule.errors import ConfigError
from ferrule_tensorizer import crypt


@dataclass(frozen=True)
class Key:
    """A key and the file that holds it; `new` where that file is still to be written."""

    file: Path
    value: bytes
    new: bool

    @classmethod
    def of(cls, file: Path) -> Key:
        """Return the key in a file, or a new one for a file that is missing. Raises ConfigError."""
        new = not file.exists()
        return cls(file, secrets.token_bytes(crypt.KEY_BYTES) if new else crypt.read_key(file), new)

    def save(self) -> None:
        """Write a new key to a file that only its owner can read. Raises ConfigError."""
        if not self.new:
            return
        try:
            with os.fdopen(os.open(self.file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
                stream.write(self.value)
        except OSError as error:
            raise ConfigError(f"The key file {self.file} cannot be written: {error.strerror}.") from None
