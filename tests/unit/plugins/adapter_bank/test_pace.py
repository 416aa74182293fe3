"""How a load shares Python's lock with other threads."""

from __future__ import annotations

import sys

from ferrule_plugins.adapter_bank.lora.pace import short_turns


def test_loads_that_overlap_leave_the_usual_turns() -> None:
    usual = sys.getswitchinterval()
    first, second = short_turns(), short_turns()
    first.__enter__()
    second.__enter__()
    assert sys.getswitchinterval() < usual
    first.__exit__(None, None, None)
    assert sys.getswitchinterval() < usual
    second.__exit__(None, None, None)
    assert sys.getswitchinterval() == usual
