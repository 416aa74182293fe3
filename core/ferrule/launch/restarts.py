"""The rule for restarts of an engine that has died. Pure: the supervisor passes in what happened and how long it
ran.
"""

from __future__ import annotations

HEALTHY_SECONDS = 300.0  # after so long a service, restarts are counted anew
_LONGEST_PAUSE = 60  # seconds


class Restarts:
    """The rule for restarts: at most `most` in a row, each after a pause twice as long as the one before: 1, 2, 4 … 60
    seconds.

    Before one engine has served, none is started again: the cause of the failure, such as a damaged checkpoint, would
    still be there.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.in_a_row = 0
        self._has_served = False

    def pause(self, served: float | None) -> int | None:
        """Return the seconds to wait before the next start, or None for no further start.

        The engine that has died had served for `served` seconds (None: never).
        """
        self._has_served = self._has_served or served is not None
        if served is not None and served >= HEALTHY_SECONDS:
            self.in_a_row = 0
        if not self._has_served or self.in_a_row >= self.most:
            return None
        self.in_a_row += 1
        return int(min(2 ** (self.in_a_row - 1), _LONGEST_PAUSE))
