"""Verified certificates are remembered, and strangers put nobody's out of the memory."""

import dataclasses

from support.clients import ISSUER

from pysync._core import PublicKey
from pysync.auth.certificate_cache import (
    IDLE_PERIODS,
    MAX_IDENTITY_BYTES,
    PERIOD_MS,
    CertificateCache,
)
from pysync.auth.verification import VerifiedCertificate, cache_key_of
from pysync.model import Caller

KEY = PublicKey(ISSUER.ed_pub)


def proof(
    identity: str, header: str, presenter: str = "", *, is_trusted: bool = False
) -> VerifiedCertificate:
    return VerifiedCertificate(
        iss=ISSUER.ed_pub,
        iss_user_id=ISSUER.user_id,
        sub="",
        nonce="",
        nbf=0,
        exp=1,
        key=KEY,
        caller=Caller(identity=identity),
        not_in_audience=False,
        is_trusted=is_trusted,
        cache_key=cache_key_of(header, presenter),
    )


def test_certificates_of_unknown_issuers_evict_none_that_the_configuration_trusts() -> None:
    cache = CertificateCache(max_bytes=100_000)
    friend = proof("friend", "header", is_trusted=True)
    cache.put(friend, 0)
    for n in range(100):
        cache.put(proof(f"stranger {n}", f"{n} {'x' * 2000}"), 0)
    assert cache.get("header", "", 0) is friend
    assert cache.get(f"0 {'x' * 2000}", "", 0) is None


def test_a_proof_that_is_used_stays_and_the_memory_is_bounded() -> None:
    cache = CertificateCache(max_bytes=100_000)
    used = proof("somebody", "used")
    cache.put(used, 0)
    strangers = [proof(f"stranger {n}", f"header {n}") for n in range(1000)]
    for stranger in strangers:
        cache.put(stranger, 0)
        assert cache.get("used", "", 0) is used
    kept = [stranger for stranger in strangers if cache.get(stranger.cache_key, "", 0) is stranger]
    assert 0 < sum(each.size for each in kept) <= 100_000
    assert kept == strangers[-len(kept) :]


def test_one_identity_holds_no_more_than_its_share() -> None:
    cache = CertificateCache()
    own = [proof("busy", f"{n} {'x' * 8000}") for n in range(10)]
    cache.put(proof("other", "other"), 0)
    for each in own:
        cache.put(each, 0)
    kept = [each for each in own if cache.get(each.cache_key, "", 0) is each]
    assert kept == own[-len(kept) :]
    assert 0 < sum(each.size for each in kept) <= MAX_IDENTITY_BYTES
    assert cache.get("other", "", 0) is not None


def test_a_certificate_for_anybody_is_remembered_by_presenter() -> None:
    cache = CertificateCache()
    audience = proof("one", "header", "key")
    cache.put(audience, 0)
    assert cache.get("header", "key", 0) is audience
    assert cache.get("header", "other", 0) is None
    assert cache.get("header", "", 0) is None


def test_certificate_put_twice_counts_once() -> None:
    cache = CertificateCache(max_bytes=10_000)
    one = proof("one", "header")
    for _ in range(100):
        cache.put(dataclasses.replace(one), 0)
    cache.put(proof("two", "other"), 0)
    assert cache.get("header", "", 0) is not None


def test_callers_who_come_once_evict_none_who_comes_regularly() -> None:
    cache = CertificateCache(max_bytes=100_000)
    regular = proof("regular", "header")
    cache.put(regular, 0)
    assert cache.get("header", "", PERIOD_MS) is regular
    for n in range(1000):
        cache.put(proof(f"stranger {n}", f"{n} {'x' * 2000}"), PERIOD_MS)
    assert cache.get("header", "", PERIOD_MS) is regular


def test_callers_who_come_twice_evict_none_who_comes_regularly() -> None:
    cache = CertificateCache(max_bytes=100_000)
    regular = proof("regular", "header")
    cache.put(regular, 0)
    for period in range(1, 3 * IDLE_PERIODS):
        assert cache.get("header", "", period * PERIOD_MS) is regular
        for n in range(100):
            header = f"{period} {n}"
            cache.put(proof(header, header), period * PERIOD_MS)
            assert cache.get(header, "", (period + 1) * PERIOD_MS) is not None


def test_certificates_that_are_no_longer_used_make_room_in_the_old_generation() -> None:
    cache = CertificateCache(max_bytes=100_000)

    def use(name: str, period: int) -> None:
        cache.put(proof(name, name), period * PERIOD_MS)
        cache.get(name, "", (period + 1) * PERIOD_MS)

    for n in range(100):
        use(f"early {n}", 0)
    later = 2 + IDLE_PERIODS
    use("late", later)
    for n in range(100):
        cache.put(proof(f"stranger {n}", f"stranger {n}"), later * PERIOD_MS)
    assert cache.get("late", "", later * PERIOD_MS) is not None
