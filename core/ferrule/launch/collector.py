"""The garbage collector's schedule in the processes of the server.

By default Python looks at all objects whenever they have become a quarter more: nothing else runs for 150 ms where
2,600 requests are open. Requests leave no reference cycles behind, so the collector may wait.
"""

from __future__ import annotations

import gc

_YOUNG, _MIDDLE = 700, 10  # Python's own
_ALL = 200  # collections of the middle generation: every 1.4 million new objects, in place of 70 thousand


def put_off() -> None:
    """Turn the collector off while a process starts: the objects that a start makes stay."""
    gc.disable()


def settle() -> None:
    """Turn the collector on after the start: leave out the objects made until now, and look at all others only
    seldom.
    """
    gc.freeze()
    gc.set_threshold(_YOUNG, _MIDDLE, _ALL)
    gc.enable()
