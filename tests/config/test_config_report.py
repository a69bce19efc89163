"""The configuration: what people are told about one that is accepted."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.clients import Start
from support.configurations import EXAMPLE, ROOT, collection, config

from pysync.config import ConfigError, Problem, load, parse
from pysync.config.check import check, lint, report, routes_table


def warnings(*collections: dict[str, Any], **members: Any) -> list[tuple[str, str]]:
    found = lint(parse(config(*collections, **members)))
    return [(problem.path, problem.message) for problem in found]


ROOT_DEVICE = "device:root grants no protection: anyone can create a key that has this role"
HOSTS = {"publicHosts": ["sync.example.org"]}
TRUSTED = {"trustedIssuers": ["ab" * 32]}


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ({"writeRoles": ["public"]}, ("writeRoles", "public: anyone may write")),
        (
            {"writeRoles": ["public"], "requireAuth": True},
            ("writeRoles", "public: anyone with a key of their own may write"),
        ),
        (
            {"readRoles": ["self", "cap:read:other"]},
            ("readRoles[1]", "cap:read:other names another collection than notes"),
        ),
        (
            {"readRoles": ["cap:read:*"]},
            (
                "readRoles[0]",
                "cap:read:* is compared as text: only certificates for the collection '*' grant it",
            ),
        ),
        ({"readRoles": ["device:root"], "rootOnly": True}, ("readRoles[0]", ROOT_DEVICE)),
        ({"readRoles": ["self"]}, ("readRoles[0]", "self is never granted: storagePath has no {identity}")),
        (
            {"appendOnly": {"requireAuthorSignature": False}},
            (
                "appendOnly.requireAuthorSignature",
                "false: author proofs are stored as they are sent, unchecked",
            ),
        ),
        (
            {"appendOnly": {"allowFull": False}},
            (
                "appendOnly.allowFull",
                "false, but checkpoint=0 gives the whole log too: set maxPullLimit",
            ),
        ),
        (
            {"allowedMimeTypes": ["*/*"], "objectSchema": {}},
            ("objectSchema", "is for documents: no media type is application/json, so all are files"),
        ),
        (
            {"allowedMimeTypes": ["image/png"], "fieldPermissions": {"a": {}}},
            ("fieldPermissions", "are for documents: no media type is application/json, so all are files"),
        ),
        (
            {"writeRoles": ["self"], "storagePath": "x/{id}"},
            ("writeRoles[0]", "self is never granted: storagePath has no {identity}"),
        ),
    ],
)
def test_the_linter_warns(members: Any, expected: tuple[str, str]) -> None:
    path, message = expected
    assert (f"collections[0].{path}", message) in warnings(collection(**members), auth=TRUSTED)


def test_the_linter_warns_of_roles_that_anybody_can_sign_for() -> None:
    open_to_all = collection(readRoles=["cap:read:notes"], writeRoles=["delegated:someone:notes"])
    assert [path for path, _ in warnings(open_to_all)] == [
        "collections[0].readRoles[0]",
        "collections[0].writeRoles[0]",
    ]
    assert warnings(open_to_all, auth=TRUSTED) == []


def test_the_linter_is_content_with_what_owners_share_by_certificates() -> None:
    roles = ["self", "delegated:{identity}:notes"]
    shared = collection(storagePath="notes/{identity}/{id}", readRoles=roles, writeRoles=roles)
    assert warnings(shared) == warnings({**shared, "trustedIssuers": []}) == []
    spaces = {name: {"collections": [shared]} for name in ("acme", "beta")}
    assert not [
        path for path, _ in warnings(namespaces=spaces, auth=TRUSTED) if path == "auth.trustedIssuers"
    ]


@pytest.mark.parametrize(
    ("role", "members", "message"),
    [
        ("delegated:{identity}:*", {}, "is never granted"),
        ("delegated:{identity}:notes", {"rootOnly": True}, "is never granted"),
        ("delegated:{Identity}:notes", {}, "did you mean delegated:{identity}:notes?"),
        ("delegated:{user}:notes", TRUSTED, "did you mean delegated:{identity}:notes?"),
    ],
)
def test_the_linter_names_roles_of_owners_that_nobody_holds(role: str, members: Any, message: str) -> None:
    shared = collection(storagePath="notes/{identity}/{id}", readRoles=["self", role], **members)
    ((path, found),) = warnings(shared)
    assert path == "collections[0].readRoles[1]"
    assert message in found


def test_the_linter_knows_the_trust_of_namespaces_and_collections() -> None:
    notes = collection(readRoles=["cap:read:notes"])
    trusting = {**notes, "trustedIssuers": ["ab" * 32]}
    assert warnings(trusting) == []
    assert warnings(namespaces={"acme": {"collections": [notes], **TRUSTED}}) == []
    assert [path for path, _ in warnings(trusting, {**notes, "name": "b", "storagePath": "b"})] == [
        "collections[1].readRoles[0]",
        "collections[1].readRoles[0]",
    ]
    editors = collection(readRoles=["editor"])
    assert warnings({**editors, "identityRoles": {"u": ["editor"]}}) == []
    assert warnings({**editors, "identityRoles": {}}, auth={"identityRoles": {"u": ["editor"]}}) == [
        ("collections[0].readRoles[0]", "no caller can have 'editor'")
    ]


def test_the_linter_warns_of_issuers_that_several_namespaces_trust() -> None:
    expected = (
        "auth.trustedIssuers",
        "are trusted in acme, beta alike: give each namespace its own trustedIssuers",
    )
    guarded = collection(readRoles=["cap:read:notes"], writeRoles=["delegated:u:notes"])
    owned = collection(storagePath="own/{identity}/{id}", readRoles=["self"], writeRoles=["self"])

    def names(**namespaces: dict[str, Any]) -> list[tuple[str, str]]:
        return [each for each in warnings(namespaces=namespaces, auth=TRUSTED) if each[0] == expected[0]]

    assert names(acme={"collections": [guarded]}, beta={"collections": [guarded]}) == [expected]
    assert names(acme={"collections": [guarded]}) == []
    assert names(acme={"collections": [guarded]}, beta={"collections": [guarded], **TRUSTED}) == []
    own = {**guarded, **TRUSTED}
    assert names(acme={"collections": [guarded]}, beta={"collections": [own]}) == []
    assert names(acme={"collections": [guarded]}, beta={"collections": [owned]}) == []
    root = warnings(guarded, namespaces={"acme": {"collections": [guarded]}}, auth=TRUSTED)
    assert (expected[0], expected[1].replace("acme, beta", "the root, acme")) in root


def test_the_linter_suggests_the_public_hosts_if_everybody_may_write() -> None:
    """A page whose own name comes to lead to this server is told apart by its Host alone."""
    open_to_all = collection(writeRoles=["public"])
    expected = (
        "server.publicHosts",
        "name the hosts by which this server is reached: without them a page of any site can write to notes "
        "through a visitor's browser (DNS rebinding)",
    )
    assert expected in warnings(open_to_all)
    assert expected not in warnings(open_to_all, server={"publicHosts": ["sync.example.org"]})
    for closed in ({"writeRoles": ["self"]}, {"writeRoles": ["public"], "requireAuth": True}, {}):
        assert expected not in warnings(collection(**closed))


def test_the_linter_accepts_public_writes_from_this_machine_alone() -> None:
    open_to_all = collection(writeRoles=["public"])
    hosts = ["localhost", "127.0.0.1", "[::1]"]
    assert warnings(open_to_all, server={"publicHosts": hosts}) == []
    for reachable in ({"host": "0.0.0.0", "publicHosts": hosts}, {"publicHosts": [*hosts, "a.example"]}):
        assert warnings(open_to_all, server=reachable) == [
            ("collections[0].writeRoles", "public: anyone may write")
        ]


def test_the_linter_warns_of_rate_limits_that_meter_nothing() -> None:
    window = {"windowMs": 1000, "maxRequests": 5}
    assert warnings(collection(rateLimit={"push": True, "pull": {}}))[-1:] == [
        (
            "collections[0].rateLimit",
            "meters no pull, push: neither it nor the server's rateLimit has numbers",
        )
    ]
    unused = ("rateLimit", "meters nothing: no collection has a rateLimit that takes these numbers")
    assert unused in warnings(collection(), rateLimit=window)
    assert unused not in warnings(collection(rateLimit=True), rateLimit=window)


def test_the_linter_warns_of_trust_on_first_use_and_of_nothing_served() -> None:
    paths = [path for path, _ in warnings(auth={"spaces": {"trustOnFirstUse": True}})]
    assert paths == ["collections", "auth.spaces.trustOnFirstUse"]


def test_the_linter_has_nothing_to_say_of_a_careful_configuration() -> None:
    private = collection(storagePath="users/{identity}/{id}", readRoles=["self"], writeRoles=["self"])
    public = collection(name="news", storagePath="news/{id}", readRoles=["public"], pullOnly=True)
    log = {"allowFull": False, "maxPullLimit": 1000}
    posts = collection(name="posts", storagePath="posts/{id}", readRoles=["public"], appendOnly=log)
    assert warnings(private, public, posts) == []


def test_the_route_table_names_routes_without_documents() -> None:
    read = parse(
        config(
            collection(listable=True),
            collection(name="log", storagePath="log/{id}", appendOnly=True),
            collection(name="img", storagePath="img/{id}", allowedMimeTypes=["image/png"]),
            collection(name="mix", storagePath="mix/{id}", allowedMimeTypes=["application/json", "*/*"]),
            {"preset": "parquet", "name": "rows", "storagePath": "rows/{id}", "write": "none"},
            collection(name="taps", storagePath="taps/{batchId}"),
            events=[{"collection": "taps", "storagePath": "events/{batchId}"}],
        )
    )
    rows = [(route.method, route.path, route.collection) for route in routes_table(read) if route.collection]
    assert {name for _, _, name in rows} == {
        "notes",
        "log (log)",
        "img (files)",
        "mix (documents, files)",
        "rows (files)",
        "taps (events)",
    }
    assert [row[:2] for row in rows if row[2] == "rows (files)"] == [
        ("GET", "/pull/rows/{id}"),
        ("GET", "/list/rows"),
    ]


@pytest.mark.process
def test_problem_that_keeps_the_server_from_starting_is_reported_before(tmp_path: Path) -> None:
    value = config(collection(readRoles=["public"]), plugins=["nowhere:plugin", "nowhere"])
    (tmp_path / "c.json").write_text(json.dumps(value))
    for command, expected in ((["check", "c.json"], "stdout"), (["serve", "--config", "c.json"], "stderr")):
        ran = subprocess.run(
            [sys.executable, "-m", "pysync", *command],
            capture_output=True, text=True, cwd=tmp_path, timeout=30, check=False,
        )  # fmt: skip
        assert ran.returncode == 1
        text = getattr(ran, expected)
        assert "plugins[0]" in text
        assert "plugins[1]" in text
        assert text.count("nowhere") == 2


@pytest.mark.parametrize(
    ("role", "hint"),
    [("publik", "public"), ("Self", "self"), ("cap:raed:notes", None), ("device:rot", "device:root")],
)
def test_the_linter_names_roles_that_nobody_holds(role: str, hint: str | None) -> None:
    (path, message), *_ = warnings(collection(readRoles=[role]), auth=TRUSTED)
    assert path == "collections[0].readRoles[0]"
    assert message.startswith(f"no caller can have {role!r}")
    assert hint is None or hint in message


@pytest.mark.parametrize(
    "members",
    [{}, {"pullOnly": True, "writeRoles": ["self"]}, {"pushOnly": True, "readRoles": ["self"]}],
)
def test_the_linter_names_a_collection_that_nobody_may_use(members: dict[str, Any]) -> None:
    secluded = collection(storagePath="n/{identity}", **members)
    assert warnings(secluded) == [("collections[0]", "no caller may use it: no route has roles")]


def test_the_linter_names_the_collection() -> None:
    read = parse(config(collection(readRoles=["nobody"], writeRoles=["public"]), server=HOSTS))
    assert {problem.collection for problem in lint(read)} == {"notes"}


def test_roles_that_a_plugin_may_give_are_not_wondered_at() -> None:
    odd = collection(readRoles=["editor"], pullOnly=True)
    assert len(warnings(odd)) == 1
    assert warnings(odd, plugins=["audit:plugin"]) == []


def test_roles_that_the_configuration_grants_are_held() -> None:
    granted = {**TRUSTED, "identityRoles": {"someone": ["editor"]}}
    assert warnings(collection(readRoles=["editor", "admin:abc"], pullOnly=True), auth=granted) == []


def test_the_linter_warns_of_keys_that_two_collections_keep_otherwise() -> None:
    log = {"name": "log", "storagePath": "notes/{other}", "appendOnly": {"type": "by_timestamp"}}
    files = {"allowedMimeTypes": ["image/png"]}
    for other in (log, collection(ttlMs=1000), {**log, "ttlMs": 5}, files):
        acme = {"acme": {"collections": [collection(**other)]}}
        found = [path for path, message in warnings(collection(), namespaces=acme) if "keys" in message]
        assert found == ["namespaces.acme.collections[0].storagePath"]
    acme = {"acme": {"collections": [collection(**log)]}}
    alike = warnings(collection(**{**log, "name": "x"}), namespaces=acme)
    assert not any("keys" in message for _, message in alike)


def test_the_linter_names_the_location_in_a_namespace() -> None:
    value = {"namespaces": {"acme": {"collections": [collection(writeRoles=["public"])]}}, "server": HOSTS}
    assert [problem.path for problem in lint(parse(value))] == ["namespaces.acme.collections[0].writeRoles"]


def test_the_route_table_names_every_served_route_and_who_may_use_it() -> None:
    read = parse(
        config(
            collection(readRoles=["public"], writeRoles=["admin"], listable=True, requireAuth=True),
            collection(name="in", storagePath="in", pushOnly=True, writeRoles=["x"], rootOnly=True),
            collection(name="out", storagePath="out", pullOnly=True),
            collection(name="a", storagePath="b/{id}", bundle="b", readRoles=["x", "y"], writeRoles=["x"]),
            collection(name="c", storagePath="b/{id}", bundle="b", readRoles=["x"], pullOnly=True),
            namespaces={"acme": {"collections": [collection(pullOnly=True, readRoles=["public"])]}},
            server={"mountPath": "/v1"},
        )
    )
    assert [dataclasses.astuple(route) for route in routes_table(read) if route.collection] == [
        ("GET", "/v1/pull/notes/{id}", "notes", ("public (signed)",)),
        ("POST", "/v1/push/notes/{id}", "notes", ("admin",)),
        ("GET", "/v1/list/notes", "notes", ("public (signed)",)),
        ("POST", "/v1/push/in", "in", ("x + device:root",)),
        ("GET", "/v1/pull/out", "out", ()),
        ("POST", "/v1/push/b/{id}/a", "a", ("x",)),
        ("GET", "/v1/pull/b/{id}", "a, c", ("x", "y")),
        ("GET", "/v1/acme/pull/notes/{id}", "notes", ("public",)),
    ]


def test_the_route_table_names_the_routes_of_no_collection_in_each_namespace() -> None:
    space = {"collections": [collection(pullOnly=True, readRoles=["public"])]}
    read = parse(config(collection(), namespaces={"acme": space}, server={"mountPath": "/v1"}))
    rows = {(route.method, route.path): route.roles for route in routes_table(read) if not route.collection}
    reading = ("as pulls of what is named",)
    assert rows == {
        ("GET", "/v1/batch/pull"): reading,
        ("GET", "/v1/events"): reading,
        ("GET", "/v1/changes"): reading,
        ("GET", "/v1/acme/batch/pull"): reading,
        ("GET", "/v1/acme/events"): reading,
        ("GET", "/v1/acme/changes"): reading,
        ("POST", "/v1/revocations"): ("public (a signed list)",),
        ("GET", "/v1/revocations/{issuer}"): ("public",),
        ("GET", "/v1/openapi.json"): ("public",),
    }
    for auth, roles in (("public", ("public",)), ("role-filtered", ("public (filtered by roles)",))):
        read = parse(config(configEndpoint={"auth": auth}, namespaces={"acme": space}))
        shown = {route.path: route.roles for route in routes_table(read)}
        assert shown["/config"] == shown["/acme/config"] == roles
        assert "/events" not in shown  # there is nothing in the root to tell of
        assert "/acme/events" in shown


async def test_the_route_table_is_what_is_served(start: Start) -> None:
    """Every route that has no collection, but for the front page, probes and second places."""
    settings = json.loads((ROOT / "tests/protocol.json").read_text())
    await start(settings)
    (app,) = start.apps  # type: ignore[attr-defined]
    named = {"batch", "events", "changes", "config", "revocations", "openapi.json"}
    served = {
        (path, method.upper())
        for path, operations in json.loads(app.current.openapi.complete())["paths"].items()
        for method in operations
        if named.intersection(path.split("/")[1:3])
        and not path.startswith("/sync/")  # where a published client asks for what is at /config
    }
    rows = routes_table(parse({"store": "memory:", **settings}))
    assert served == {(row.path, row.method) for row in rows if not row.collection}


def test_the_report_aligns_warnings_and_routes() -> None:
    read = parse(
        config(collection(writeRoles=["public"]), collection(name="x", storagePath="x"), server=HOSTS)
    )
    assert report(read).splitlines()[:10] == [
        "2 warnings",
        "",
        "  collections[0].writeRoles (notes)  public: anyone may write",
        "  collections[1] (x)                 no caller may use it: no route has roles",
        "",
        "METHOD  PATH                   COLLECTION  ROLES",
        "GET     /pull/notes/{id}       notes       nobody",
        "POST    /push/notes/{id}       notes       public",
        "GET     /pull/x                x           nobody",
        "POST    /push/x                x           nobody",
    ]


def test_check_prints_every_problem_of_a_rejected_file(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text('{"server": {"port": "x"}, "stor": 1}')
    accepted, text = check(str(path), {})
    assert not accepted
    assert text.splitlines() == [
        f"{path}: 2 problems",
        "",
        "  server.port  must be an integer, not a string",
        "  stor         unknown member; did you mean store?",
    ]


def test_check_names_a_file_that_cannot_be_read_once(tmp_path: Path) -> None:
    path = str(tmp_path / "none.json")
    assert check(path, {}) == (False, f"{path}: No such file or directory")


def test_the_example_is_accepted_without_warnings_as_long_as_it_is_for_its_machine_alone() -> None:
    accepted, expected = check(str(EXAMPLE), {})
    assert accepted
    assert "warning" not in expected
    example = load(EXAMPLE, {})
    assert (example.store.url, example.server.port) == ("file:./data", 8080)
    reachable = lint(load(EXAMPLE, {}, {"server.host": "0.0.0.0"}))
    open_to_all = {"notes", "_pairing", "title", "cards", "journal", "scratch", "files", "reports", "events"}
    assert {problem.path.split(".")[0] for problem in reachable} == {"server"} | {
        f"collections[{at}]" for at, kept in enumerate(example.collections) if kept.name in open_to_all
    }
    without_pages = json.loads(EXAMPLE.read_text())
    del without_pages["server"]["examples"]
    assert len(lint(parse(without_pages))) == len(reachable)


def test_the_linter_warns_of_versions_that_count_for_users_who_cannot_remove_them() -> None:
    expected = (
        "collections[0].history.forMs",
        "absent: what users delete counts for their quotas of bytes for good",
    )
    quotas = {"identity": {"bytes": 1000}}
    assert expected in warnings(collection(history={}), quotas=quotas, store="memory:")
    assert expected not in warnings(collection(history={}), store="memory:")
    assert expected not in warnings(collection(history={"forMs": 1000}), quotas=quotas, store="memory:")
    documents = {"identity": {"documents": 5}}
    assert expected not in warnings(collection(history={}), quotas=documents, store="memory:")
    assert expected not in warnings(collection(history={}), quotas=quotas, store="file:./data")


def test_the_linter_warns_of_anonymous_writes_that_no_quota_limits() -> None:
    expected = (
        "collections[0].writeRoles",
        "public: anonymous writes count for no identity and no space: limit quotas.namespace too",
    )
    inbox = collection(readRoles=["self"], writeRoles=["public"])
    quotas = {"identity": {"bytes": 1000}}
    assert expected in warnings(inbox, quotas=quotas)
    assert expected not in warnings(inbox)
    assert expected not in warnings(inbox, quotas={})
    assert expected not in warnings(inbox, quotas={**quotas, "namespace": {"bytes": 10_000}})
    assert expected not in warnings({**inbox, "requireAuth": True}, quotas=quotas)
    assert expected not in warnings({**inbox, "writeRoles": ["self"]}, quotas=quotas)


def test_problem_reads_as_its_location_and_message() -> None:
    assert str(ConfigError([Problem("a.b", "is wrong"), Problem("", "no file")])) == "a.b: is wrong\nno file"


def test_a_problem_of_a_collection_names_it() -> None:
    acme = {"acme": {"collections": [collection(name="log", ttlMs=-1)]}}
    with pytest.raises(ConfigError) as rejected:
        parse(config(collection(readRoles=[""]), {"storagePath": "x"}, namespaces=acme))
    assert str(rejected.value).splitlines() == [
        "collections[0].readRoles[0] (notes): must not be empty",
        "collections[1].name: is required",
        "namespaces.acme.collections[0].ttlMs (log): must be at least 1",
    ]


def test_history_of_spaces_says_who_reads_what_was_there_before_they_came() -> None:
    members = {"readRoles": ["space:member"], "writeRoles": ["space:owner"], "history": {}}
    docs = collection(name="docs", storagePath="spaces/{spaceId}/docs/{id}", **members)
    access = collection(name="access", storagePath="spaces/{spaceId}/_access", **members)

    def found(*collections: dict[str, Any]) -> list[tuple[str, str]]:
        value = {"version": 1, "collections": list(collections), "auth": {"spaces": {}}}
        return [(each.path, each.message) for each in lint(parse(value))]

    message = (
        "absent: everybody who may read also reads what was replaced or deleted before they came; "
        'name who may, for example ["space:owner"]'
    )
    assert found(access, docs) == [("collections[1].historyRoles", message)]
    assert found(access, {**docs, "historyRoles": ["space:member"]}) == []
    rows = {
        row.path: row.roles
        for row in routes_table(parse({"version": 1, "collections": [access, docs], "auth": {"spaces": {}}}))
    }
    assert rows["/history/spaces/{spaceId}/_access"] == ("space:owner",)
    assert rows["/history/spaces/{spaceId}/docs/{id}"] == ("space:member",)


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ({"deletable": True}, "public: anyone may delete"),
        ({"deletable": True, "requireAuth": True}, "anyone with a key of their own may delete"),
        ({"deletable": True, "deleteRoles": ["admin"]}, None),
    ],
)
def test_delete_roles_of_everybody_are_a_warning(members: dict[str, Any], said: str | None) -> None:
    found = [
        message for _, message in warnings(collection(readRoles=["public"], writeRoles=["public"], **members))
    ]
    assert (said is None) == (not any("may delete" in message for message in found))
    assert said is None or any(said in message for message in found)
