"""Whom a write counts for: in a bucket for the account of its key, which a route often knows at once."""

from typing import Any

import pytest

from pysync import config
from pysync.model import Caller, Claims
from pysync.quotas.accounts import Accounts
from pysync.store import Account

WRITER = Caller("anna", claims=Claims("issuer", frozenset(), frozenset()))
OPEN = {"readRoles": ["public"], "writeRoles": ["public"]}


def accounts(
    templates: dict[str, str], *, by_key: bool = True, files: bool = False
) -> tuple[Accounts, config.Config]:
    """The accounts of collections with these key templates; those of `inner_...` are in a namespace."""

    roles = {"own": ["self"], "deep": ["self", "admin:anna"], "rooms": ["space:member"]}

    def collections(is_inner: bool) -> list[dict[str, Any]]:
        return [
            {"name": name.removeprefix("inner_"), "storagePath": template, **OPEN}
            | {"writeRoles": roles.get(name.removeprefix("inner_"), ["public"])}
            | ({"appendOnly": {"requireAuthorSignature": False}} if name == "log" else {})
            for name, template in templates.items()
            if name.startswith("inner_") == is_inner
        ]

    inner = collections(True)
    parsed = config.parse(
        {
            "version": 1,
            "store": "memory:",
            "auth": {"spaces": {}},
            "collections": collections(False),
            **({"namespaces": {"inner": {"collections": inner}}} if inner else {}),
        }
    )
    stored = {"events": ("events/{id}", ".parquet")} if files else {}
    return Accounts(parsed, stored, by_key=by_key), parsed


def charges(found: Accounts, parsed: config.Config) -> dict[str, Any]:
    """For each collection, the charge of a write to its route, and whether it has the account of the key."""
    result = {}
    for namespace, _, collection in parsed.each_collection():
        values = [f"v-{name}" for name in collection.key_template.params]
        key = collection.key_template.text
        for name, value in zip(collection.key_template.params, values, strict=True):
            key = key.replace("{" + name + "}", value)
        charge = found.of_route(namespace, collection)(values, WRITER)
        result[collection.name] = charge, charge.account == found.charge_of(key).account
    return result


def test_a_route_with_keys_of_its_own_knows_the_account_of_a_key() -> None:
    templates = {"notes": "notes/{id}", "own": "own/{identity}/{id}", "rooms": "rooms/{spaceId}/{id}"}
    found = charges(*accounts({**templates, "inner_deep": "deep/{identity}/{id}"}))
    assert all(charge.by_key and is_equal for charge, is_equal in found.values())
    assert found["notes"][0].account == Account("", "notes")
    assert found["own"][0].account == Account("", "own", "v-identity")
    assert found["rooms"][0].account == Account("", "rooms", None, "v-spaceId")
    assert found["deep"][0].account == Account("inner", "inner/deep", "v-identity")


@pytest.mark.parametrize(
    ("roles", "identity", "space"),
    [
        (["self"], "anna", None),
        (["admin"], "anna", "s"),
        (["admin:anna", "self"], "anna", None),
        (["space:member", "space:owner", "admin"], None, "s"),
        (["self", "space:member"], None, None),
        (["self", "cap:write:notes"], None, None),
        (["selfless"], None, None),
        (["public"], None, None),
        ([], None, None),
    ],
)
def test_a_key_counts_only_for_those_who_alone_may_write_it(
    roles: list[str], identity: str | None, space: str | None
) -> None:
    notes = {"name": "notes", "storagePath": "{spaceId}/{identity}/{id}", "writeRoles": roles}
    parsed = config.parse(
        {
            "version": 1,
            "store": "memory:",
            "auth": {"spaces": {}},
            "collections": [{**notes, "readRoles": ["self"]}],
        }
    )
    assert Accounts(parsed, {}).charge_of("s/anna/1").account == Account("", "notes", identity, space)


@pytest.mark.parametrize(
    ("templates", "by_key"),
    [
        ({"notes": "notes/{id}", "inner_shared": "notes/{id}"}, set[str]()),
        ({"notes": "notes/{id}", "first": "notes/first", "own": "own/{id}"}, {"own"}),
        ({"notes": "{name}/{id}", "own": "own/{id}", "deep": "own/{name}/{id}"}, {"deep"}),
        ({"notes": "notes/{id}", "log": "log/{id}"}, {"notes"}),
    ],
)
def test_a_route_with_keys_that_others_share_does_not(templates: dict[str, str], by_key: set[str]) -> None:
    found = charges(*accounts(templates))
    assert {name for name, (charge, _) in found.items() if charge.by_key} == by_key
    assert all(is_equal for charge, is_equal in found.values() if charge.by_key)


def test_beside_files_that_a_plugin_stores_none_does() -> None:
    found = charges(*accounts({"notes": "notes/{id}", "events": "events/{id}"}, files=True))
    assert not any(charge.by_key for charge, _ in found.values())


def test_in_a_folder_a_write_counts_for_its_writer() -> None:
    charge, _ = charges(*accounts({"notes": "notes/{id}"}, by_key=False))["notes"]
    assert charge.account == Account("", "notes", "anna", None, "issuer")
    assert not charge.by_key
