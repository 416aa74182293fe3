"""What `--pt-load-map-location` says: the devices that the tensors of torch files are put on.

It is the `map_location` of `torch.load`: a device for all tensors, or an object of devices by the location that a file
states for a tensor, of which "" is every location that is not named.
https://docs.pytorch.org/docs/stable/generated/torch.load.html
"""

from __future__ import annotations

import json
import re

_DEVICE = re.compile(r"[a-z]{1,32}(:[0-9]{1,4})?")


def map_locations(text: str) -> dict[str, str]:
    """Read `cuda`, or `{"cuda:1": "cuda:0"}`, as devices by locations, where "" stands for every other location. Raises
    ValueError.
    """
    try:
        stated = json.loads(text) if text.lstrip().startswith("{") else {"": text.strip()}
    except (ValueError, RecursionError):
        raise ValueError("it begins as a JSON object and is not one") from None
    found = {}
    for location, device in stated.items():
        if not isinstance(device, str) or not _DEVICE.fullmatch(device.lower()):
            raise ValueError(f"{device!r:.80} is not a device such as cpu or cuda:0")
        if location and not _DEVICE.fullmatch(location.lower()):
            raise ValueError(f"{location!r:.80} is not a location such as cpu or cuda:0, or the empty text")
        found[location.lower()] = device.lower()
    return found
