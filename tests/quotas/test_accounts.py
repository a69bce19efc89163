"""Who a write counts for: in a folder its writer, in a bucket the account of its key."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from pysync import config
from pysync.model import Caller, Claims
from pysync.quotas.accounts import Accounts
from pysync.store import Account

WRITER = Caller("anna", claims=Claims("issuer", "anna", frozenset(), frozenset()))


def parse(collections: list[dict[str, Any]], **namespaces: list[dict[str, Any]]) -> config.Config:
    return config.parse(
        {
            "version": 1,
            "store": "memory:",
            "auth": {"spaces": {}},
            "collections": collections,
            "namespaces": {name: {"collections": inner} for name, inner in namespaces.items()},
        }
    )


def notes(template: str, roles: list[str]) -> dict[str, Any]:
    return {"name": "notes", "storagePath": template, "writeRoles": roles, "readRoles": ["self"]}


@pytest.mark.parametrize(
    ("roles", "identity", "space"),
    [
        (["self"], "anna", None),
        (["admin"], "anna", "s"),
        (["admin:anna", "self"], "anna", None),
        (["space:member", "space:owner", "admin"], None, "s"),
        (["self", "space:member"], None, None),
        (["self", "cap:write:notes"], None, None),
        (["self", "delegated:{identity}:notes"], "anna", None),
        (["self", "delegated:anna:notes"], None, None),
        (["selfless"], None, None),
        (["public"], None, None),
        ([], None, None),
    ],
)
def test_a_key_counts_only_for_those_who_alone_may_write_it(
    roles: list[str], identity: str | None, space: str | None
) -> None:
    parsed = parse([notes("{spaceId}/{identity}/{id}", roles)])
    assert Accounts(parsed, {}).charge_of("s/anna/1").account == Account("", "notes", identity, space)


def test_a_key_of_several_namespaces_counts_for_the_root_or_the_first_by_name() -> None:
    shared = [notes("notes/{id}", ["public"])]
    inner = Accounts(parse([], second=shared, first=shared), {})
    assert inner.charge_of("notes/1").account == Account("first", "first/notes")
    assert Accounts(parse(shared, first=shared), {}).charge_of("notes/1").account == Account("", "notes")


def test_in_a_folder_a_write_counts_for_its_writer() -> None:
    parsed = parse([notes("notes/{id}", ["public"])])
    ((_, _, collection),) = parsed.each_collection()
    charge = Accounts(parsed, {}).of_route(None, collection)(["1"], WRITER)
    assert charge.account == Account("", "notes", "anna", None, "issuer")


def test_commits_in_a_thread_find_an_account_while_a_reload_changes_the_configuration() -> None:
    names = [f"c{at}" for at in range(100)]
    parsed = parse([notes(f"{name}/{{id}}", ["public"]) | {"name": name} for name in names])
    accounts, is_over = Accounts(parsed, {}), threading.Event()

    def commit() -> set[str | None]:
        found = set[str | None]()
        while not is_over.is_set():
            for name in names:
                account = accounts.charge_of(f"{name}/1").account
                found.add(None if account is None else account.collection)
        return found

    with ThreadPoolExecutor(1) as thread:
        committing = thread.submit(commit)
        for _ in range(100):
            accounts.use(parsed)
        is_over.set()
        assert committing.result() == set(names)
