"""A hub with known repositories for each plugin, for `ferrule plugins check` and tests. Not for servers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

from ferrule_testkit.fake_hub import Files, fake_hub

_NAME = "ferrule/conformance"


@contextmanager
def _huggingface(revisions: Mapping[str, Files]) -> Iterator[str]:
    """Serve a fake hub, and point huggingface_hub's settings to it: the library reads them only when it is imported."""
    from huggingface_hub import constants

    with fake_hub({_NAME: revisions}) as hub:
        settings: dict[str, Any] = {
            "ENDPOINT": hub.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": hub.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_OFFLINE": False,
            "HF_HUB_DISABLE_XET": True,
        }
        with mock.patch.multiple(constants, **settings):
            yield _NAME


HUGGINGFACE = {"world": _huggingface}
