"""What is found out before an engine starts."""

from __future__ import annotations

import pytest

from ferrule.config import CacheConfig, Config, ModelConfig
from ferrule.errors import ConfigError
from ferrule.launch import prepare as module
from ferrule.launch.prepare import prepare
from ferrule.plugin import discover


@pytest.mark.parametrize(
    ("algo", "missing"),
    [("sha256_cbor", "needs cbor2,"), ("xxhash", "needs xxhash,"), ("xxhash_cbor", "needs cbor2 and xxhash,")],
)
def test_a_hash_without_its_package_is_refused(monkeypatch: pytest.MonkeyPatch, algo: str, missing: str) -> None:
    config = Config(model=ModelConfig(model="org/model"), cache=CacheConfig(prefix_caching_hash_algo=algo))
    assert prepare(config, (), discover(), "test")[0].cache.prefix_caching_hash_algo == algo
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=missing) as caught:
        prepare(config, (), discover(), "test")
    assert "ferrule[hashes]" in str(caught.value.hint)
    prepare(Config(model=ModelConfig(model="org/model")), (), discover(), "test")
