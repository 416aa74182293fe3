"""Files for each tokenizer plugin that reads other than common ones, for `ferrule plugins check` and tests."""

from __future__ import annotations

from ferrule_testkit.tekken import write_tekken

MISTRAL = {"write": (write_tekken,)}
