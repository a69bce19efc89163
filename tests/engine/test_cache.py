"""`BoundedCache`."""

from pysync.cache import BoundedCache


def test_the_least_recently_used_value_is_evicted_first() -> None:
    cache = BoundedCache[str, str](2)
    cache.put("a", "1")
    cache.put("b", "2")
    assert cache.get("a") == "1"
    cache.put("c", "3")
    assert [cache.get(key) for key in "abc"] == ["1", None, "3"]
    cache.put("a", "4")
    assert (cache.get("a"), cache.cost) == ("4", 2)
    cache.evict("a")
    cache.evict("a")
    assert (cache.get("a"), cache.cost) == (None, 1)


def test_the_cost_of_all_values_stays_within_the_bound() -> None:
    cache = BoundedCache[int, bytes](100, len)
    for key in range(50):
        cache.put(key, bytes(key))
        assert cache.cost <= 100
    assert [key for key in range(50) if cache.get(key) is not None] == [48, 49]
    cache.put(48, b"")
    assert cache.cost == 49
    cache.put(1, bytes(101))
    assert cache.get(1) is None
    assert cache.cost == 0
