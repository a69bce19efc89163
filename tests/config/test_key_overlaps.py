"""Templates that share keys, and projections: what is refused of them, and who `check` says may read what."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.cli_runner import Shell
from support.collections import OWN, collection
from support.configurations import ROOT, config, faults

from pysync.config import load, parse
from pysync.config.check import lint

ACCESS = collection(
    "access", "spaces/{spaceId}/_access", readRoles=["space:member"], writeRoles=["space:owner"]
)
ANY_DOC = {"name": "docs", "storagePath": "spaces/{spaceId}/{doc}", "readRoles": ["space:member"]}
SPACES = {"auth": {"spaces": {}, "trustedIssuers": ["ab" * 32]}}
VAULT = collection("vault", "vault/{identity}/{id}", encryption="delegated", **OWN)
RING = {**VAULT, "name": "rings", "storagePath": "vault/{identity}/{id}/_keyring", "encryption": "none"}


def elsewhere(*collections: dict[str, Any], **members: Any) -> dict[str, Any]:
    return {"namespaces": {"app": {"collections": list(collections), **members}}}


def warnings(value: dict[str, Any]) -> list[tuple[str, str]]:
    return [(problem.path, problem.message) for problem in lint(parse(value))]


def test_a_members_template_in_another_namespace_may_not_be_the_access_path() -> None:
    docs = {**ANY_DOC, "writeRoles": ["space:member"]}
    assert faults(config(ACCESS, **SPACES, **elsewhere(docs))) == [
        (
            "namespaces.app.collections[0].storagePath",
            "can match auth.spaces.accessPath: space:member could replace what access keeps for space:owner",
        )
    ]


@pytest.mark.parametrize(
    "members",
    [
        {"writeRoles": ["public"]},
        {"writeRoles": ["cap:write:docs"]},
        {"writeRoles": ["space:owner", "self"], "storagePath": "spaces/{identity}/{spaceId}"},
        # The space of another segment: the owner of a space "_access" would own all.
        {"writeRoles": ["space:owner"], "storagePath": "spaces/{doc}/{spaceId}"},
        {"writeRoles": ["space:member"], "storagePath": "{any}/{spaceId}/_access"},
    ],
)
def test_the_access_path_is_its_own_writers_alone(members: Any) -> None:
    (fault,) = faults(config(ACCESS, **SPACES, **elsewhere({**ANY_DOC, **members})))
    assert fault[0] == "namespaces.app.collections[0].storagePath"


def test_pull_access_to_access_documents_grants_no_write() -> None:
    shown = {**ACCESS, "pullOnly": True}
    docs = {**ANY_DOC, "writeRoles": ["space:owner"]}
    (fault,) = faults(config(shown, **SPACES, **elsewhere(docs)))
    assert fault[1].endswith("space:owner could replace what access keeps for nobody")
    # The literal segments of what is pulled do not win a push, in the same namespace either.
    (fault,) = faults(config(shown, docs, **SPACES))
    assert fault[0] == "collections[1].storagePath"


@pytest.mark.parametrize(
    "value",
    [
        config(ACCESS, {**ANY_DOC, "writeRoles": ["space:member"]}, **SPACES),
        config(ACCESS, **SPACES, **elsewhere({**ANY_DOC, "writeRoles": ["space:owner", "admin"]})),
        config(ACCESS, **SPACES, **elsewhere({**ANY_DOC, "writeRoles": ["public"], "pullOnly": True})),
        config(ACCESS, **SPACES, **elsewhere({**ANY_DOC, "writeRoles": ["public"], "storagePath": "x/{a}"})),
        config(
            ACCESS, **SPACES,
            **elsewhere({**ANY_DOC, "writeRoles": ["space:member"]}, {**ACCESS, "name": "also"}),
        ),
        config(ACCESS, **elsewhere({**ANY_DOC, "writeRoles": ["public"]})),
        config(VAULT, RING),
        config(VAULT, {**RING, "writeRoles": ["admin"]}),
        config({**VAULT, "encryption": "none"}, {**RING, "writeRoles": ["public"]}),
    ],
)  # fmt: skip
def test_harmless_overlap_is_accepted(value: Any) -> None:
    parse(value)


@pytest.mark.parametrize(
    ("other", "who"),
    [
        ({"name": "x", "storagePath": "vault/{a}/{b}/{c}", "writeRoles": ["public"]}, "public"),
        ({"name": "x", "storagePath": "vault/{a}/{identity}/{c}", "writeRoles": ["self"]}, "self"),
        ({"name": "x", "storagePath": "{a}/{b}/{c}/_keyring", "writeRoles": ["cap:write:x"]}, "cap:write:x"),
    ],
)
def test_the_keyrings_of_sealed_collections_are_their_own_writers_alone(other: Any, who: str) -> None:
    message = f"can match the keyrings of vault: {who} could replace what vault keeps for self"
    assert faults(config(VAULT, other)) == [("collections[1].storagePath", message)]
    assert faults(config(VAULT, **elsewhere(other)))[0][0] == "namespaces.app.collections[0].storagePath"
    assert "what rings keeps for self" in faults(config(VAULT, RING, **elsewhere(other)))[0][1]
    parse(config(VAULT, RING, other))  # rings' literal segments win


def test_a_keyring_path_is_guarded_where_it_is() -> None:
    named = {**VAULT, "encryption": "none", "keyringPath": "rings/{identity}"}
    other = {"name": "x", "storagePath": "{any}/{id}", "writeRoles": ["device:root"]}
    assert faults(config(named, other)) == [
        (
            "collections[1].storagePath",
            "can match the keyrings of vault: device:root could replace what vault keeps for self",
        )
    ]
    parse(config(named, {**RING, "storagePath": "rings/{identity}"}, other))


@pytest.mark.parametrize("member", [{"ttlMs": 60_000}, {"deletable": True}])
@pytest.mark.parametrize(
    ("value", "path"),
    [
        (lambda more: config({**ACCESS, **more}, **SPACES), "collections[0]"),
        (
            lambda more: config(ACCESS, **SPACES, **elsewhere({**ACCESS, "name": "also", **more})),
            "namespaces.app.collections[0]",
        ),
        (
            lambda more: config(ACCESS, **SPACES, **elsewhere({**ANY_DOC, "writeRoles": ["admin"], **more})),
            "namespaces.app.collections[0]",
        ),
        (
            lambda more: config(
                {**ACCESS, "name": "_access", "storagePath": "spaces/{spaceId}", "bundle": "space", **more},
                **SPACES,
            ),
            "collections[0]",
        ),
        # Pulls go to another collection, which can only be pulled.
        (
            lambda more: config(
                {**ACCESS, "pullOnly": True}, {**ANY_DOC, "writeRoles": ["admin"], **more}, **SPACES
            ),
            "collections[1]",
        ),
    ],
    ids=["its own", "a twin", "a wider template", "a member of a bundle", "its pushes alone"],
)
def test_access_documents_neither_expire_nor_are_deleted(value: Any, path: str, member: Any) -> None:
    token = {"auth": {**SPACES["auth"], "adminToken": "a-token-of-the-operator"}}
    (found,) = faults({**value(member), **token})
    assert found[0] == f"{path}.{next(iter(member))}"
    assert "auth.spaces.accessPath" in found[1]
    assert "pysync erase --prefix" in found[1]


def test_other_documents_of_spaces_expire_and_are_deleted() -> None:
    docs = {**ANY_DOC, "writeRoles": ["space:owner"], "deletable": True, "ttlMs": 60_000}
    parse(config(ACCESS, docs, **SPACES))  # the literal segments of access win
    parse(config(ACCESS, **SPACES, **elsewhere({**docs, "storagePath": "others/{spaceId}/{doc}"})))


def test_access_documents_that_can_only_be_pulled_do_not_expire_either() -> None:
    (found,) = faults(
        config({**ACCESS, "pullOnly": True, "ttlMs": 1}, **SPACES, **elsewhere({**ACCESS, "name": "also"}))
    )
    assert found[0] == "collections[0].ttlMs"


def test_trust_and_restrictions_make_other_writers() -> None:
    access = {**ACCESS, "writeRoles": ["cap:write:access"]}
    docs = {**ANY_DOC, "writeRoles": ["cap:write:access"]}
    parse(config(access, **SPACES, **elsewhere(docs)))
    for value in (
        config(access, **SPACES, **elsewhere(docs, trustedIssuers=["cd" * 32])),
        config({**access, "rootOnly": True}, **SPACES, **elsewhere(docs)),
        config(
            {**access, "restrictions": {"mode": "deny", "identities": ["x"]}}, **SPACES, **elsewhere(docs)
        ),
    ):
        assert faults(value)[0][0] == "namespaces.app.collections[0].storagePath"


def test_lists_and_files_of_events_replace_no_access_document_and_no_keyring() -> None:
    notes = {"name": "notes", "storagePath": "notes/{a}/{batchId}", "readRoles": ["public"]}
    lists = {"source": "notes", "target": "spaces/{a}/_access", "id": "{batchId}"}
    events = {"collection": "notes", "storagePath": "vault/x/{a}/{batchId}"}
    value = config(notes, VAULT, ACCESS, **SPACES, projections=[lists])
    assert ("projections[0].target", "can match auth.spaces.accessPath, which no list may replace") in faults(
        value
    )
    value = config(notes, VAULT, events=[events])
    assert ("events[0].storagePath", "can match the keyrings of vault, which no file may replace") in faults(
        value
    )


def test_the_linter_reports_readers_of_keys_shared_by_namespaces() -> None:
    notes = {"name": "notes", "storagePath": "notes/{id}", "readRoles": ["admin"], "writeRoles": ["admin"]}
    open_to_all = {"name": "any", "storagePath": "{kind}/{id}", "readRoles": ["public"], "pullOnly": True}
    shared = (
        "namespaces.app.collections[0].storagePath",
        "shares keys with notes: here read by public, written by nobody; "
        "there read by admin, written by admin",
    )
    token = {"adminToken": "a-token-of-the-operator"}
    assert shared in warnings(config(notes, auth=token, **elsewhere(open_to_all)))
    assert warnings(config(notes, auth=token, **elsewhere(notes))) == []
    trusting = {**notes, "readRoles": ["cap:read:notes"], "trustedIssuers": ["ab" * 32]}
    (only,) = warnings(config(trusting, auth=token, **elsewhere({**trusting, "trustedIssuers": ["cd" * 32]})))
    assert only[1].endswith("(under other trust)")


def test_the_linter_reports_spaces_whose_members_may_replace_their_owner() -> None:
    docs = {**ANY_DOC, "writeRoles": ["space:member"]}
    assert warnings(config(docs, **SPACES)) == [
        (
            "collections[0].writeRoles",
            "space:member may replace the access documents of spaces (auth.spaces.accessPath)",
        )
    ]
    assert warnings(config(docs, ACCESS, **SPACES)) == []


DIARY = collection("diary", "diary/{identity}/{id}", **OWN)


def listed(*sources: dict[str, Any], roles: list[str], target: str, **members: Any) -> dict[str, Any]:
    lists = {"name": "lists", "storagePath": "lists/{a}", "readRoles": roles, "pullOnly": True}
    if "self" in roles:
        lists["storagePath"] = "lists/{identity}"
    return config(
        *sources,
        lists,
        projections=[{"source": "diary", "target": target, "id": "x", "value": {"all": "/"}}],
        auth={"adminToken": "a-token-of-the-operator"},
        **members,
    )


@pytest.mark.parametrize(
    ("roles", "target", "warns"),
    [
        (["public"], "lists/all", True),
        (["self"], "lists/{identity}", False),
        (["self"], "lists/{id}", True),
        (["self"], "lists/all", True),
        (["device:root"], "lists/{identity}", True),
        (["admin"], "lists/all", False),
    ],
)
def test_the_linter_reports_lists_with_more_readers_than_their_sources(
    roles: list[str], target: str, warns: bool
) -> None:
    found = [one for one in warnings(listed(DIARY, roles=roles, target=target)) if "projected" in one[1]]
    message = (
        f"in lists, {', '.join(roles)} may read what is projected from diary, which only self may read there"
    )
    assert found == ([("projections[0].target", message)] if warns else [])


def test_and_of_every_namespace_in_which_the_source_is_found() -> None:
    open_diary = {**DIARY, "readRoles": ["public"]}
    found = warnings(listed(open_diary, roles=["public"], target="lists/all", **elsewhere(
        {**DIARY, "storagePath": "app/{identity}/{id}"}
    )))  # fmt: skip
    assert [message for _, message in found] == [
        "in lists, public may read what is projected from app/diary, which only self may read there"
    ]


@pytest.mark.parametrize(
    ("value", "warns"),
    [({"all": "/"}, True), ({"pay": "/salary/now"}, True), ({"name": "/name"}, False), ({}, False)],
)
def test_and_of_members_that_the_source_hides(value: dict[str, str], warns: bool) -> None:
    hidden = {"salary": {"readRoles": ["admin"]}, "rank": {"writeRoles": ["admin"]}}
    staff = {**DIARY, "readRoles": ["public"], "fieldPermissions": hidden}
    said = listed(staff, roles=["public"], target="lists/all")
    said["projections"][0]["value"] = value
    message = (
        "in lists, public may read what is projected from diary (salary), which only admin may read there"
    )
    assert warnings(said) == ([("projections[0].target", message)] if warns else [])


def test_readers_of_a_push_only_collection_are_those_of_the_one_that_is_pulled() -> None:
    pushed = {**DIARY, "readRoles": [], "pushOnly": True}
    assert "which only nobody may read" in str(warnings(listed(pushed, roles=["public"], target="lists/all")))
    twin = {**DIARY, "name": "shown", "readRoles": ["public"], "pullOnly": True}
    assert warnings(listed(pushed, twin, roles=["public"], target="lists/all")) == []


@pytest.mark.parametrize(
    ("other", "who"),
    [
        ({"pushOnly": True}, "public"),
        ({"readRoles": ["mods"], "pullOnly": True}, "mods"),
        ({"pushOnly": True, "writeRoles": ["admin", "boss"]}, ""),
        ({"readRoles": ["boss"], "pullOnly": True}, ""),
        ({"pushOnly": True, "fieldPermissions": {"pay": {"readRoles": ["boss"]}}}, ""),
        ({"pushOnly": True, "storagePath": "{any}/{id}"}, ""),
    ],
)
@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_the_linter_reports_hidden_members_that_are_not_hidden(
    other: dict[str, Any], who: str, is_elsewhere: bool
) -> None:
    """A conflict tells the hash of the whole document, from which they can be computed."""
    open_ = {"readRoles": ["public"], "writeRoles": ["public"], "storagePath": "staff/{id}"}
    staff: dict[str, Any] = {**open_, "name": "staff", "fieldPermissions": {"pay": {"readRoles": ["boss"]}}}
    twin = {**open_, "name": "twin", **other}
    if "pushOnly" in other or "pullOnly" in other:
        staff |= {"pullOnly": True} if "pushOnly" in other else {"pushOnly": True}
    value = config(staff, **elsewhere(twin)) if is_elsewhere else config(staff, twin)
    found = [problem for problem in warnings(value) if problem[0].endswith("fieldPermissions")]
    name = "app/twin" if is_elsewhere else "twin"
    if is_elsewhere and other.get("storagePath"):
        who = "public"  # nothing decides whose the keys are
    message = (
        f"pay: {who} may read it, or compute it from the document's hash, in {name}, which has the same keys"
    )
    assert found == ([("collections[0].fieldPermissions", message)] if who else [])


def test_strict_makes_warnings_a_failure(shell: Shell, tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    notes = {"name": "notes", "storagePath": "notes/{id}", "readRoles": ["public"]}
    for value, status in (
        (config({**notes, "pullOnly": True}), (0, 0)),
        (config({**notes, "writeRoles": ["public"]}), (0, 1)),
    ):
        path.write_text(json.dumps(value))
        assert (shell.run("check", str(path))[0], shell.run("check", "--strict", str(path))[0]) == status


def test_the_shipped_configurations_take_nothing_over() -> None:
    load(ROOT / "deploy/example.json", {})
    load(ROOT / "tests/protocol.json", {})


# Certificates of owners

SHARED = ["self", "delegated:{identity}:vault"]
"""The owner of a path, and those whom it lets in."""


def test_guests_of_owners_are_further_writers_of_keyrings() -> None:
    sealed = {**VAULT, "writeRoles": SHARED}
    assert parse(config(sealed, RING)).collections
    ((path, message),) = faults(config(sealed, RING, **elsewhere({**RING, "writeRoles": SHARED})))
    assert path == "namespaces.app.collections[0].storagePath"
    assert "self, delegated:{identity}:vault could replace what rings keeps for self" in message


def test_guests_of_owners_are_the_same_under_any_trust_and_at_one_position_alone() -> None:
    roles = {"readRoles": SHARED, "writeRoles": SHARED}
    here = collection("vault", "vault/{identity}/{id}", **roles)
    assert warnings(config(here, **elsewhere(here, trustedIssuers=["cd" * 32]))) == []
    turned = {**here, "storagePath": "vault/{id}/{identity}"}
    ((path, message),) = warnings(config(here, **elsewhere(turned)))
    assert path == "namespaces.app.collections[0].storagePath"
    assert "shares keys with vault" in message
