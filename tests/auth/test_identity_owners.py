"""Ownership: an identity owns what lies below it in a collection of identities."""

import pytest

from pysync import config
from pysync.auth.revocation import Ownership
from pysync.store.memory import MemoryStore

ME, OTHER = "a" * 32, "b" * 32


@pytest.mark.parametrize(
    ("template", "key", "is_owned"),
    [
        ("users/{identity}/{id}", f"users/{ME}/x", True),
        ("users/{identity}/{folder}/{id}", f"users/{ME}/deep/x", True),
        ("users/{identity}/plan", f"users/{ME}/plan", True),
        ("profiles/{identity}", f"profiles/{ME}", True),
        ("{identity}/{id}", f"{ME}/x", True),
        ("users/{identity}/{id}", f"users/{OTHER}/x", False),
        ("users/{identity}/{id}", f"users/{ME}x/x", False),
        ("rooms/{room}/{identity}", f"rooms/r/{ME}", False),
        ("rooms/{room}", f"rooms/{ME}", False),
    ],
)
@pytest.mark.parametrize("namespace", [None, "acme"])
async def test_an_identity_owns_what_lies_below_it(
    template: str, key: str, is_owned: bool, namespace: str | None
) -> None:
    collections = [{"name": "c", "storagePath": template, "readRoles": ["admin"], "writeRoles": ["admin"]}]
    members = {"collections": collections} if namespace is None else {
        "namespaces": {namespace: {"collections": collections}}
    }  # fmt: skip
    store = MemoryStore()
    ownership = Ownership(config.parse({"version": 1, **members}), store)
    assert not await ownership.owns_data(ME)
    await store.put(key, b"{}")
    assert await ownership.owns_data(ME) is is_owned


async def test_a_bundle_makes_an_owner() -> None:
    member = {"name": "a", "storagePath": "u/{identity}", "bundle": "all", "readRoles": ["self"]}
    store = MemoryStore()
    parsed = config.parse({"version": 1, "collections": [{**member, "writeRoles": ["self"]}]})
    await store.put(f"u/{ME}/a", b"{}")
    assert await Ownership(parsed, store).owns_data(ME)
