"""When a process of the server looks for objects that hold each other, which counting references does not free.

Python does it whenever objects have become a quarter more, and then looks at all of them: nothing else runs for 150 ms
where 2,600 requests are open. Requests leave no such objects behind, so it may wait.
"""

from __future__ import annotations

import gc

_YOUNG, _MIDDLE = 700, 10  # Python's own
_ALL = 200  # of the middle's turns: once 1.4 million objects have been added, in place of 70 thousand


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
