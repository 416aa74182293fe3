"""BlockPool, hash chains and KVCacheManager."""

import hashlib
import struct

import pytest
import xxhash

from ferrule.engine.blocks import BlockPool
from ferrule.engine.cache import KVCacheManager, footprint
from ferrule.engine.hashing import HASHERS, HashChain, root_digest
from ferrule.interfaces.scheduler import SchedulerLimits
from ferrule.types import Adapter, CacheGroup, EngineRequest, MediaItem, TokenSampling

FULL = CacheGroup("full", 4)
SLIDING = CacheGroup("sliding", 4, window=6)


def limits(*groups, num_blocks=20, **more):
    more = {"max_num_seqs": 4, "max_num_batched_tokens": 8, "max_model_len": 64, **more}
    return SchedulerLimits(groups=groups or (FULL,), num_blocks=num_blocks, **more)


def request(prompt=(1,), **more):
    return EngineRequest(id="r", prompt_ids=tuple(prompt), work=TokenSampling(seed=0, max_tokens=1), **more)


def fill(cache, id, ids, **scope):
    """Hold and confirm all of `ids`; returns the tables."""
    chain = cache.chain(request(ids, **scope))
    hit = cache.match(chain, ids)
    blocks = cache.reserve(id, len(ids), hit, chain)
    cache.confirm(id, ids, len(ids))
    return blocks


# ------------------------------------------------------------------------------------------- pool


def test_pool_hands_out_every_block_but_the_null_one():
    pool = BlockPool(5)
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
    assert (pool.num_available, pool.num_used) == (0, 4)


def test_pool_needs_a_block_besides_the_null_one():
    with pytest.raises(ValueError, match="null block"):
        BlockPool(1)


def test_released_block_without_a_prefix_is_free_again():
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    pool.release(blocks)
    assert (pool.num_available, pool.num_idle) == (2, 0)
    pool.check({})


def test_published_block_can_be_found_until_it_is_needed():
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.publish(block, b"key")
    pool.release([block])
    assert pool.find(b"key") == block
    assert pool.num_idle == 1
    pool.allocate(2)
    assert pool.find(b"key") == 0
    pool.check({1: 1, 2: 1})


def test_idle_blocks_are_evicted_least_recently_released_first():
    pool = BlockPool(4)
    a, b, c = pool.allocate(3)
    for block, key in ((a, b"a"), (b, b"b"), (c, b"c")):
        pool.publish(block, key)
    pool.release([b])
    pool.release([a, c])  # the end of a table goes before its beginning
    assert [pool.allocate(1)[0] for _ in range(3)] == [b, c, a]


def test_shared_block_stays_until_its_last_holder_leaves():
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.publish(block, b"key")
    pool.release([block])
    pool.share([0, block])
    pool.share([block])
    pool.release([block])
    pool.check({block: 1})
    pool.release([block])
    pool.check({})


def test_release_of_a_block_that_nobody_holds_is_refused():
    with pytest.raises(RuntimeError, match="has no reference"):
        BlockPool(3).release([1])


def test_first_block_published_under_a_key_keeps_it():
    pool = BlockPool(4)
    first, second = pool.allocate(2)
    pool.publish(first, b"key")
    pool.publish(second, b"key")
    assert pool.find(b"key") == first
    pool.release([first, second])
    assert (pool.num_idle, pool.num_available) == (1, 3)


def test_forget_keeps_only_held_prefixes():
    pool = BlockPool(4)
    first, second = pool.allocate(2)
    pool.publish(first, b"1")
    pool.publish(second, b"2")
    pool.release([second])
    assert not pool.forget()
    assert (pool.find(b"1"), pool.find(b"2")) == (first, 0)
    pool.release([first])
    assert pool.forget()
    assert pool.num_available == 3


@pytest.mark.parametrize(
    ("spoil", "law"),
    [
        (lambda pool: pool._free.append(1), "I1"),
        (lambda pool: pool._references.__setitem__(2, 5), "I2"),
        (lambda pool: pool._references.__setitem__(0, 1), "I3"),
        (lambda pool: pool._published.__setitem__(b"x", 2), "I5"),
        (lambda pool: pool._free.clear(), "I1"),
    ],
)
def test_check_names_the_law_that_is_broken(spoil, law):
    pool = BlockPool(5)
    pool.release(pool.allocate(2)[:1])
    (held,) = (b for b in range(1, 5) if pool._references[b])
    pool.check({held: 1})
    spoil(pool)
    with pytest.raises(AssertionError, match=law):
        pool.check({held: 1})


# ------------------------------------------------------------------------------------------- digests


@pytest.mark.advisory("CVE-2025-25183")
@pytest.mark.parametrize("algo", HASHERS)
def test_chain_depends_on_every_token_and_on_its_root(algo):
    def digests(ids, root=b"root"):
        return HashChain(root, 2, HASHERS[algo]()).grow(ids, len(ids) // 2)

    base = digests([1, 2, 3, 4])
    assert digests([1, 2, 3, 4, 9]) == base
    assert digests([1, 2, 3, 5])[0] == base[0]
    assert digests([1, 2, 3, 5])[1] != base[1]
    assert digests([0, 2, 3, 4])[1] != base[1]
    assert digests([1, 2, 3, 4], b"other")[0] != base[0]


def test_digests_of_cbor_are_those_of_the_bytes_that_the_standard_gives():
    """Encode by RFC 8949: 83 is an array of three, 43 three bytes, 82 an array of two, 19 a number of two bytes, f6
    null.
    """
    written = bytes.fromhex("83 43616263 82 01 1901f4 f6")
    assert HASHERS["sha256_cbor"]()(b"abc", [1, 500]) == hashlib.sha256(written).digest()
    assert HASHERS["xxhash_cbor"]()(b"abc", [1, 500]) == xxhash.xxh3_128_digest(written)
    packed = b"abc" + struct.pack("<2q", 1, 500)
    assert HASHERS["xxhash"]()(b"abc", [1, 500]) == xxhash.xxh3_128_digest(packed)
    assert HASHERS["sha256"]()(b"abc", [1, 500]) == hashlib.sha256(packed).digest()


def test_chain_grows_without_hashing_again():
    calls = []

    def hasher(parent, tokens):
        calls.append(tuple(tokens))
        return bytes(tokens)

    chain = HashChain(b"", 2, hasher)
    ids = [1, 2, 3]
    chain.grow(ids, 1)
    ids += [4, 5]
    assert chain.grow(ids, 2) == [b"\1\2", b"\3\4"]
    assert calls == [(1, 2), (3, 4)]


@pytest.mark.advisory("CVE-2025-25183")
def test_no_two_scopes_have_the_same_root():
    scopes = [(None, "a"), ("a", None), ("", "a"), ("a", ""), ("aa", None), (None, None), ("", ""), ("a",), ()]
    roots = {root_digest(b"boot", *scope) for scope in scopes}
    assert len(roots) == len(scopes)
    assert root_digest(b"boot", "a") != root_digest(b"boo", "ta")


# ------------------------------------------------------------------------------------------- manager


def test_prefix_is_found_in_whole_blocks_and_never_covers_the_prompt():
    cache = KVCacheManager(limits())
    ids = list(range(8))
    fill(cache, "a", ids)
    for prompt, tokens in (([*ids, 9], 8), (ids, 4), (ids[:5], 4), (ids[:4], 0), ([7, *ids], 0)):
        assert cache.match(cache.chain(request(prompt)), prompt).tokens == tokens


IMAGE = MediaItem(kind="image", digest=b"s", start=0, count=1)


@pytest.mark.advisory("CVE-2025-25183")
@pytest.mark.parametrize("scope", [{"cache_salt": "s"}, {"adapter": Adapter(name="s")}, {"media": (IMAGE,)}])
def test_prefix_is_not_found_from_another_scope(scope):
    cache = KVCacheManager(limits())
    ids = list(range(9))
    fill(cache, "a", ids, **scope)
    assert cache.match(cache.chain(request(ids)), ids).tokens == 0
    assert cache.match(cache.chain(request(ids, **scope)), ids).tokens == 8


def test_partial_and_unconfirmed_blocks_are_not_found():
    cache = KVCacheManager(limits())
    ids = list(range(9))
    chain = cache.chain(request(ids))
    cache.reserve("a", 9, cache.match(chain, ids), chain)
    assert cache.match(chain, ids).tokens == 0
    cache.confirm("a", ids, 7)
    assert cache.match(chain, ids).tokens == 4


def test_hit_shares_blocks_and_appends_fresh_ones():
    cache = KVCacheManager(limits())
    ids = list(range(10))
    ((one, two, _),) = fill(cache, "a", ids)
    ((*shared, fresh),) = fill(cache, "b", [*ids[:8], 20])
    assert shared == [one, two]
    cache.check(frozenset({"a", "b"}))
    cache.release("a")
    cache.check(frozenset({"b"}))
    assert cache.pool.num_used == 3
    assert fresh not in (one, two)


def test_reserve_is_all_or_nothing():
    cache = KVCacheManager(limits(num_blocks=4))
    chain = cache.chain(request())
    nothing = cache.match(chain, [1])
    assert cache.reserve("a", 13, nothing, chain) is None
    cache.check(frozenset())
    assert cache.reserve("a", 8, nothing, chain) is not None
    assert cache.reserve("a", 8) == ()
    assert cache.reserve("a", 16) is None
    assert len(cache.reserve("a", 12)[0]) == 1
    cache.check(frozenset({"a"}))


def test_blocks_ahead_are_those_that_no_other_request_may_need_now():
    cache = KVCacheManager(limits(num_blocks=9))
    for id in "ab":
        assert len(cache.reserve(id, 4, cache.match(None, [1]), None)[0]) == 1
    assert cache.reserve("a", 4, ahead=0) == ()
    assert len(cache.reserve("a", 4, ahead=1)[0]) == 1
    assert cache.reserve("a", 8, ahead=0) == ()
    assert len(cache.reserve("a", 8, ahead=100)[0]) == 3  # of five that are free, one is left for each
    assert cache.reserve("a", 20, ahead=8) == ()
    assert len(cache.reserve("a", 21, ahead=8)[0]) == 1  # the certain token's
    assert len(cache.reserve("b", 8)[0]) == 1
    assert cache.reserve("b", 9) is None
    cache.check(frozenset("ab"))


def test_an_idle_hit_is_not_counted_as_room():
    cache = KVCacheManager(limits(num_blocks=4))
    ids = list(range(9))
    fill(cache, "a", ids)
    cache.release("a")
    prompt = [*ids[:8], *range(50, 56)]
    chain = cache.chain(request(prompt))
    hit = cache.match(chain, prompt)
    assert hit.tokens == 8
    assert cache.reserve("b", 14, hit, chain) is None  # two idle blocks are hits, one block is free, two are needed
    assert not cache.room_for(14, hit, 0)
    assert cache.reserve("b", 12, hit, chain) is not None


def test_window_lets_go_of_dead_blocks():
    cache = KVCacheManager(limits(SLIDING))
    ids = list(range(24))
    fill(cache, "a", ids)
    assert cache.pool.num_used == 2  # positions 19 on are seen by position 24; block 4 is the first of them
    cache.check(frozenset({"a"}))


def test_windowed_prefix_needs_only_what_the_window_sees():
    cache = KVCacheManager(limits(FULL, SLIDING))
    ids = list(range(24))
    fill(cache, "a", ids)
    cache.release("a")
    hit = cache.match(cache.chain(request()), [*ids, 99])
    assert hit.tokens == 24
    full, sliding = hit.blocks
    assert 0 not in full
    assert sliding[:4] == (0, 0, 0, 0)
    assert 0 not in sliding[4:]


def test_windowed_prefix_shrinks_to_where_all_groups_have_what_is_seen():
    cache = KVCacheManager(limits(FULL, SLIDING, num_blocks=40))
    ids = list(range(24))
    full, sliding = fill(cache, "a", ids)
    cache.release("a")
    cache.pool._idle.move_to_end(sliding[4], last=False)
    cache.pool._free.clear()
    assert cache.pool._evict() == sliding[4]  # blocks 4 and 5 are what a prefix of 24 sees
    cache.pool._free.append(sliding[4])
    prompt = [*ids, 99]
    assert cache.match(cache.chain(request()), prompt).tokens == 16  # blocks 2 and 3 are still there


def test_footprint_of_a_window_does_not_grow():
    assert footprint(limits(FULL), 17) == 5
    assert footprint(limits(SLIDING), 5) == 2
    assert footprint(limits(SLIDING), 60) == footprint(limits(SLIDING), 6000) == 5
    assert footprint(limits(FULL, SLIDING), 60) == 15 + 5


def test_without_prefix_caching_nothing_is_hashed_or_kept():
    cache = KVCacheManager(limits(prefix_caching=False))
    assert cache.chain(request()) is None
    fill(cache, "a", list(range(9)))
    cache.release("a")
    assert cache.pool.num_idle == 0


@pytest.mark.parametrize(
    "groups", [(FULL, CacheGroup("full", 8)), (CacheGroup("recurrent", 4), FULL), (CacheGroup("tree", 4),)]
)
def test_groups_that_it_cannot_keep_are_refused(groups):
    with pytest.raises(ValueError, match="cache groups"):
        KVCacheManager(limits(*groups))


def test_check_finds_holders_that_do_not_run():
    cache = KVCacheManager(limits())
    fill(cache, "a", [1, 2, 3])
    with pytest.raises(AssertionError, match="I4"):
        cache.check(frozenset())
    cache._requests["a"].tables[0].append(0)
    with pytest.raises(AssertionError, match="I2"):
        cache.check(frozenset({"a"}))
