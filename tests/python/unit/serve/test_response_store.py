"""Responses in memory: limits, owners, and the order in which they leave."""

from __future__ import annotations

from adaptrt.serve.response_store import OVERHEAD_BYTES, ResponseStore, StoredResponse


def response(num_bytes: int = 3, owner: str = "") -> StoredResponse:
    return StoredResponse(owner, "completed", b"b" * (num_bytes - 2), b"i", b"m")


def names(store: ResponseStore) -> str:
    return "".join(name for name in "abcdefg" if store._responses.get(name) is not None)


def test_the_least_recently_used_leave_first() -> None:
    store = ResponseStore(3, 1 << 20)
    for name in "abc":
        store.put(name, response())
    assert store.find("a", "") is not None
    store.put("d", response())
    assert names(store) == "acd"
    assert store.find("b", "") is None


def test_bytes_are_limited() -> None:
    store = ResponseStore(10, 2 * OVERHEAD_BYTES + 100)
    for name, size in (("a", 40), ("b", 60), ("c", 40)):
        store.put(name, response(size))
    assert (names(store), store.num_bytes) == ("bc", 2 * OVERHEAD_BYTES + 100)
    store.put("d", response(OVERHEAD_BYTES + 101))
    assert (names(store), store.num_bytes) == ("bc", 2 * OVERHEAD_BYTES + 100)
    store.put("e", response(OVERHEAD_BYTES + 100))
    assert (names(store), store.num_bytes) == ("e", 2 * OVERHEAD_BYTES + 100)
    assert store.remove("e", "")
    assert (names(store), store.num_bytes) == ("", 0)
    assert not store.remove("e", "")


def test_a_response_belongs_to_the_key_that_made_it() -> None:
    store = ResponseStore(10, 1 << 20)
    store.put("a", response(owner="key 0"))
    assert store.find("a", "key 1") is None
    assert not store.remove("a", "key 1")
    assert store.find("a", "key 0") is not None


def test_a_store_that_is_off_keeps_nothing() -> None:
    store = ResponseStore(0, 1 << 20)
    store.put("a", response())
    assert (store.is_on, names(store)) == (False, "")
    assert ResponseStore(1, 1).is_on
