"""`runai_streamer_sharded`: the files of `sharded_state`, read by many threads at once (Run:ai Model Streamer)."""

from __future__ import annotations

from pathlib import Path

from ferrule_plugins.load_format.runai_streamer import RunaiStreamer
from ferrule_plugins.load_format.sharded_state import ShardedState


class RunaiStreamerSharded(ShardedState, RunaiStreamer):
    """A reader of `sharded_state` files with many threads. Options: those of `sharded_state` and of
    `runai_streamer`.
    """

    forms = ("*.safetensors",)
    streams_from = ()
    options = ShardedState.options + RunaiStreamer.options

    @classmethod
    def refuses(cls, folder: Path | None) -> str | None:
        return "used only when it is asked for by name"
