"""The configuration: every refusal, with its words and its place."""

from typing import Any

import pytest
from support.configurations import collection, config, faults, only

from pysync.config import parse


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"storagePath": "notes/all"}, "listable requires at least one path parameter"),
        (
            {"storagePath": "notes/{id}/doc"},
            "listable requires the last storagePath segment to be a path parameter",
        ),
        (
            {"appendOnly": {"type": "by_timestamp", "persist": False}},
            "listable cannot be used with appendOnly+persist=false",
        ),
        ({"bundle": "b"}, "listable cannot be used with bundle"),
        ({"secretNames": True}, "listable cannot be used with secretNames: a list tells the names"),
    ],
)
def test_listable_is_rejected_in_the_words_of_the_specification(members: Any, message: str) -> None:
    assert only(config(collection(listable=True, **members))) == ("collections[0].listable", message)


def test_members_of_a_bundle_hold_documents() -> None:
    assert only(config(collection(bundle="b", allowedMimeTypes=["*/*"]))) == (
        "collections[0].bundle",
        "bundle needs application/json in allowedMimeTypes",
    )


ADMIN_TOKEN = (
    "must be 16 or more characters of printable ASCII, without spaces (PYSYNC_ADMIN_TOKEN sets it too)"
)
NOTHING_STORED = "cannot be used with persist=false: nothing is stored"
SHARED = "delegated:{identity}:notes"


@pytest.mark.parametrize(
    ("log", "members", "path", "message"),
    [
        (True, {"pullOnly": True}, "appendOnly", "appendOnly cannot be used with pullOnly"),
        (
            True,
            {"bundle": "b"},
            "appendOnly",
            "appendOnly cannot be used with bundle, unless with persist=false",
        ),
        (
            True,
            {"allowedMimeTypes": ["image/png"]},
            "appendOnly",
            "appendOnly needs application/json in allowedMimeTypes",
        ),
        ({"persist": False, "maxItems": 5}, {}, "appendOnly.maxItems", NOTHING_STORED),
        ({"persist": False, "chunkSize": 5}, {}, "appendOnly.chunkSize", NOTHING_STORED),
        ({"persist": False, "maxPullLimit": 5}, {}, "appendOnly.maxPullLimit", NOTHING_STORED),
        ({"persist": False, "maxCheckpointAgeMs": 5}, {}, "appendOnly.maxCheckpointAgeMs", NOTHING_STORED),
        ({"maxItems": -1}, {}, "appendOnly.maxItems", "must be at least 1"),
        ({"chunkSize": 0}, {}, "appendOnly.chunkSize", "must be at least 1"),
        ({"maxPullLimit": 0}, {}, "appendOnly.maxPullLimit", "must be at least 1"),
        ({"maxCheckpointAgeMs": 0}, {}, "appendOnly.maxCheckpointAgeMs", "must be at least 1"),
        ({"maxItems": 1.5}, {}, "appendOnly.maxItems", "must be an integer, not a fraction"),
    ],
)
def test_a_log_that_cannot_work_is_rejected(log: Any, members: Any, path: str, message: str) -> None:
    fault = only(config(collection(appendOnly=log, **members)))
    assert fault == (f"collections[0].{path}", message)


@pytest.mark.parametrize(
    ("log", "members"),
    [
        ({"persist": False, "maxItems": 0}, {"bundle": "b"}),
        ({"persist": False, "allowFull": False, "requireAuthorSignature": False}, {"ttlMs": 5}),
        ({"maxItems": 5, "chunkSize": 50, "maxPullLimit": 1}, {"listable": True, "forceFullFetch": True}),
        (True, {"pushOnly": True, "encryption": "delegated"}),
    ],
)
def test_a_log_that_can_work_is_accepted(log: Any, members: Any) -> None:
    assert parse(config(collection(appendOnly=log, **members)))


@pytest.mark.parametrize("name", ["pull", "push", "health", "batch", "list", "config", "events"])
def test_a_namespace_cannot_take_a_routes_name(name: str) -> None:
    path, message = only({"namespaces": {name: {"collections": [collection()]}}})
    assert (path, message) == (f"namespaces.{name}", f"a namespace cannot be named {name}")


@pytest.mark.parametrize("name", ["a b", "a/b", "é", "a.b", "a\n"])
def test_a_namespace_name_holds_letters_digits_dash_and_underscore(name: str) -> None:
    _, message = only({"namespaces": {name: {"collections": [collection()]}}})
    assert message == "a namespace name may hold only letters, digits, - and _"


def test_a_namespace_needs_a_collection() -> None:
    fault = only({"namespaces": {"acme": {"collections": []}}})
    assert fault == ("namespaces.acme.collections", "a namespace needs at least one collection")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("/a", "must not start or end with a slash"),
        ("a/", "must not start or end with a slash"),
        ("a//b", "must not hold an empty segment"),
        ("a/../b", "must not hold '..'"),
        ("a/b..c/{id}", "must not hold '..'"),
        ("a/.../{id}", "must not hold '..'"),
        ("./a", "must not hold the segment '.'"),
        ("a/{x}/{x}", "repeats the parameter {x}"),
        ("_pysync/x", "must not start with _pysync, the server's own keys"),
        ("a/b-{x}", "segment 'b-{x}' is neither a {name} nor made of A-Z a-z 0-9 . _ : @ -"),
        ("a/{}", "segment '{}' is neither a {name} nor made of A-Z a-z 0-9 . _ : @ -"),
        ("a/{1}", "segment '{1}' is neither a {name} nor made of A-Z a-z 0-9 . _ : @ -"),
        ("a b", "segment 'a b' is neither a {name} nor made of A-Z a-z 0-9 . _ : @ -"),
        ("a\n", r"segment 'a\n' is neither a {name} nor made of A-Z a-z 0-9 . _ : @ -"),
        ("", "must not be empty"),
    ],
)
def test_a_storage_path_is_a_key_template(template: str, message: str) -> None:
    assert only(config(collection(storagePath=template))) == ("collections[0].storagePath", message)


@pytest.mark.parametrize("template", ["a", "a/{x}", "{x}", "a.b_c:d@e-f/{_x1}/z", "x/_pysync"])
def test_a_good_storage_path_is_accepted(template: str) -> None:
    assert parse(config(collection(storagePath=template))).collections[0].storage_path == template


def test_names_are_unique_within_a_namespace_only() -> None:
    twice = [collection(), collection(storagePath="other/{id}")]
    assert only(config(*twice)) == ("collections[1].name", "'notes' is also collections[0]")
    assert parse(config(twice[0], namespaces={"acme": {"collections": [twice[1]]}}))


def test_storage_paths_of_one_shape_collide_within_a_namespace_only() -> None:
    other = collection(name="other", storagePath="notes/{key}")
    message = "matches the same keys as collections[0].storagePath"
    assert only(config(collection(), other)) == ("collections[1].storagePath", message)
    assert parse(config(collection(), namespaces={"acme": {"collections": [other]}}))
    assert parse(config(collection(), collection(name="other", storagePath="notes/index")))


@pytest.mark.parametrize("listable", [False, True])
def test_collection_that_shares_keys_may_be_pulled_by_another_only(listable: bool) -> None:
    inbox = collection(name="in", pushOnly=True)
    view = collection(name="out", storagePath="notes/{key}", pullOnly=True, listable=listable)
    assert [kept.name for kept in parse(config(inbox, view)).collections] == ["in", "out"]
    message = "matches the same keys as collections[0].storagePath"
    for third in (collection(name="x", pushOnly=True), collection(name="x", listable=True)):
        assert ("collections[2].storagePath", message) in faults(config(inbox, view, third))


def test_bundle_members_share_one_storage_path() -> None:
    first, second = collection(bundle="b"), collection(name="other", bundle="b")
    assert parse(config(first, second))
    path, message = only(config(first, second | {"storagePath": "else/{id}"}))
    assert path == "collections[1].storagePath"
    assert message == "members of a bundle share one storagePath: that of collections[0]"


@pytest.mark.parametrize(
    "other",
    [
        collection(name="other"),
        collection(name="other", bundle="another"),
        collection(name="other", storagePath="notes/{id}/notes"),
    ],
)
def test_a_bundle_and_its_members_own_their_keys(other: dict[str, Any]) -> None:
    message = "matches the same keys as collections[0].storagePath"
    assert only(config(collection(bundle="b"), other)) == ("collections[1].storagePath", message)


@pytest.mark.parametrize(
    ("members", "path", "message"),
    [
        ({"name": "a,b"}, "name", "must be printable and hold no comma"),
        (
            {"name": "a/b", "bundle": "b"},
            "name",
            "a bundle member's name is a key segment, of A-Z a-z 0-9 . _ : @ -",
        ),
        (
            {"name": "..", "bundle": "b"},
            "name",
            "a bundle member's name is a key segment, of A-Z a-z 0-9 . _ : @ -",
        ),
        (
            {"name": "a..b", "bundle": "b"},
            "name",
            "a bundle member's name is a key segment, of A-Z a-z 0-9 . _ : @ -",
        ),
        ({"pullOnly": True, "pushOnly": True}, "pushOnly", "pullOnly and pushOnly together leave no route"),
        ({"pullOnly": True, "deletable": True}, "deletable", "deletable cannot be used with pullOnly"),
        ({"deleteRoles": ["admin"]}, "deleteRoles", "deleteRoles needs deletable: true"),
        ({"historyRoles": ["admin"]}, "historyRoles", "historyRoles needs history"),
        (
            {"history": {}, "appendOnly": True},
            "history",
            "history cannot be used with appendOnly: a log keeps its elements",
        ),
        (
            {"history": {}, "allowedMimeTypes": ["application/json", "image/png"]},
            "history",
            "history is for documents: allowedMimeTypes may only be application/json",
        ),
        (
            {"history": {}, "ttlMs": 1000},
            "history",
            "history cannot be used with ttlMs: it would keep what has expired",
        ),
        ({"history": {}, "bundle": "b"}, "history", "history cannot be used with bundle"),
        (
            {"appendOnly": {"persist": False}, "deletable": True},
            "deletable",
            "deletable cannot be used with appendOnly+persist=false: nothing is stored",
        ),
        *(
            (
                {member: ["self", SHARED], **others},
                member,
                f"{SHARED} needs {{identity}} in storagePath: it says whose certificates count",
            )
            for member, others in (
                ("readRoles", {}),
                ("writeRoles", {}),
                ("deleteRoles", {"deletable": True}),
                ("historyRoles", {"history": {}}),
            )
        ),
        (
            {"fieldPermissions": {"a": {"readRoles": [SHARED]}}},
            "fieldPermissions.a.readRoles",
            f"{SHARED} needs {{identity}} in storagePath: it says whose certificates count",
        ),
        (
            {"rootOnly": True, "readRoles": ["public"]},
            "readRoles",
            "rootOnly cannot be used with the role public",
        ),
        (
            {"rootOnly": True, "writeRoles": ["public"]},
            "writeRoles",
            "rootOnly cannot be used with the role public",
        ),
        ({"readRoles": ["self", ""]}, "readRoles[1]", "must not be empty"),
        ({"readRoles": "public"}, "readRoles", "must be a list, not a string"),
        ({"encryption": "identity"}, "encryption", 'must be "none" or "delegated"'),
        ({"keyringPath": "/k"}, "keyringPath", "must not start or end with a slash"),
        ({"keyringPath": "k/{other}"}, "keyringPath", "{other} is not a parameter of storagePath"),
        ({"allowedMimeTypes": []}, "allowedMimeTypes", "must name at least one media type"),
        ({"allowedMimeTypes": ["*/json"]}, "allowedMimeTypes[0]", "must be type/subtype, type/* or */*"),
        ({"maxBodyBytes": 0}, "maxBodyBytes", "must be at least 1"),
        ({"maxBodyBytes": True}, "maxBodyBytes", "must be an integer, not a boolean"),
        ({"maxBodyBytes": 1.5}, "maxBodyBytes", "must be an integer, not a fraction"),
        ({"maxBodyBytes": "10"}, "maxBodyBytes", "must be an integer, not a string"),
        ({"ttlMs": -1}, "ttlMs", "must be at least 1"),
        ({"ttlMs": False}, "ttlMs", "must be an integer, not a boolean"),
        ({"rateLimit": {"push": 5}}, "rateLimit.push", "must be an object, not an integer"),
        ({"ttlMs": 2**60}, "ttlMs", f"must be at most {2**53 - 1}"),
        ({"cacheDurationMs": -1}, "cacheDurationMs", "must be at least 0"),
        ({"listable": 1}, "listable", "must be true or false, not an integer"),
        ({"listable": "true"}, "listable", "must be true or false, not a string"),
        ({"appendOnly": {"type": "by_name"}}, "appendOnly.type", 'must be "by_timestamp"'),
        ({"appendOnly": {"maxItems": -1}}, "appendOnly.maxItems", "must be at least 1"),
        ({"appendOnly": "yes"}, "appendOnly", "must be an object, not a string"),
        ({"rateLimit": 5}, "rateLimit", "must be an object, not an integer"),
        (
            {"rateLimit": {"bucket": "user"}},
            "rateLimit.bucket",
            'must be "identity" or "ip" or "identity+ip"',
        ),
        (
            {"rateLimit": {"windowMs": 5}},
            "rateLimit.maxRequests",
            "is required: windowMs alone limits nothing",
        ),
        (
            {"rateLimit": {"push": {"maxRequests": 5}}},
            "rateLimit.push.windowMs",
            "is required: maxRequests alone limits nothing",
        ),
        ({"rateLimit": {"ip": {"windowMs": 5}}}, "rateLimit.ip.maxRequests", "is required"),
        ({"restrictions": {"mode": "deny"}}, "restrictions[0].identities", "is required"),
        (
            {"fieldPermissions": {"a b": {"readRoles": [""]}}},
            "fieldPermissions['a b'].readRoles[0]",
            "must not be empty",
        ),
        (
            {"objectSchema": {"type": "text"}},
            "objectSchema",
            "is not a usable JSON Schema: "
            "\"text\" is not valid under any of the schemas listed in the 'anyOf' keyword",
        ),
    ],
)
def test_a_collection_that_cannot_work_is_rejected(members: Any, path: str, message: str) -> None:
    assert only(config(collection(**members))) == (f"collections[0].{path}", message)


@pytest.mark.parametrize(
    "ref", ["http://127.0.0.1:1/schema", "file:///etc/hostname", "#/$defs/none", "x.json"]
)
def test_a_schema_stands_by_itself(ref: str) -> None:
    path, message = only(config(collection(objectSchema={"$ref": ref})))
    assert path == "collections[0].objectSchema"
    assert message.startswith("is not a usable JSON Schema: ")


@pytest.mark.parametrize(
    ("value", "path", "message"),
    [
        ({"version": 2}, "version", "must be 1"),
        ({"version": True}, "version", "must be 1"),
        ({"server": {"port": 65536}}, "server.port", "must be at most 65535"),
        ({"server": {"port": -1}}, "server.port", "must be at least 0"),
        ({"server": {"workers": 0}}, "server.workers", "must be at least 1"),
        ({"server": {"host": ""}}, "server.host", "must not be empty"),
        (
            {"server": {"mountPath": "v1"}},
            "server.mountPath",
            "must be empty or of the form /v1, without a slash at its end",
        ),
        (
            {"server": {"mountPath": "/.."}},
            "server.mountPath",
            "must be empty or of the form /v1, without a slash at its end",
        ),
        (
            {"server": {"mountPath": "/v1/"}},
            "server.mountPath",
            "must be empty or of the form /v1, without a slash at its end",
        ),
        (
            {"server": {"publicHosts": ["https://a"]}},
            "server.publicHosts[0]",
            "must be a host, with :port where it is not the default one",
        ),
        (
            {"server": {"cors": {"origins": ["https://a/"]}}},
            "server.cors.origins[0]",
            'must be "*" or scheme://host, without a path',
        ),
        ({"store": "sqlite:x"}, "store", "must be memory:, file:DIR or s3://bucket/prefix"),
        ({"store": "file:"}, "store", "must be memory:, file:DIR or s3://bucket/prefix"),
        ({"store": 1}, "store", "must be an object, not an integer"),
        (
            {"store": "s3://bucket?endpiont=x"},
            "store",
            "the URL's query may hold endpoint, region, path_style, and not 'endpiont'",
        ),
        ({"store": "s3://bucket?path_style=yes"}, "store", "the URL's path_style must be true or false"),
        ({"store": "s3://bucket/a/../b"}, "store", "the prefix may not hold //, /./ or /../"),
        (
            {"store": {"url": "s3://bucket", "endpoint": "127.0.0.1:9000"}},
            "store",
            "the endpoint must be http://host:port or https://host",
        ),
        (
            {"store": {"url": "s3://bucket", "endpoint": "http://:password@host:9000"}},
            "store",
            "the endpoint must be http://host:port or https://host",
        ),
        (
            {"store": {"url": "s3://bucket", "accessKeyId": "k"}},
            "store",
            "accessKeyId and secretAccessKey belong together",
        ),
        (
            {"coordinator": "nats://x"},
            "coordinator",
            "must be memory:, file:, file:DIR or redis://host:port/number",
        ),
        (
            {"store": "memory:", "coordinator": "file:"},
            "coordinator",
            "file: lies in the folder of a file: store; name one: file:DIR",
        ),
        (
            {"store": "memory:", "coordinator": "file:x", "server": {"workers": 2}},
            "store",
            "memory: cannot carry 2 workers",
        ),
        (
            {"coordinator": "memory:", "server": {"workers": 2}},
            "coordinator",
            "2 workers need file:DIR or redis://host:port/number",
        ),
        (
            {"store": "s3://bucket", "server": {"workers": 2}},
            "coordinator",
            "2 workers need file:DIR or redis://host:port/number",
        ),
        (
            {"auth": {"trustedIssuers": ["AB" * 32]}},
            "auth.trustedIssuers[0]",
            "must be a public key of 64 lower-case hex digits",
        ),
        ({"auth": {"spaces": {"param": "x"}}}, "auth.spaces.param", "must be a parameter of accessPath"),
        ({"auth": {"adminToken": "fifteen-letters"}}, "auth.adminToken", ADMIN_TOKEN),
        ({"auth": {"adminToken": ["t" * 16, "short"]}}, "auth.adminToken[1]", ADMIN_TOKEN),
        ({"auth": {"adminToken": "sixteen letters!"}}, "auth.adminToken", ADMIN_TOKEN),
        ({"auth": {"adminToken": "sixteen-letters\n!"}}, "auth.adminToken", ADMIN_TOKEN),
        ({"auth": {"adminToken": "sixteen-letters\u00fc"}}, "auth.adminToken", ADMIN_TOKEN),
        ({"auth": {"identityRoles": {"u": [""]}}}, "auth.identityRoles.u[0]", "must not be empty"),
        ({"configEndpoint": {"auth": "all"}}, "configEndpoint.auth", 'must be "public" or "role-filtered"'),
        ({"configEndpoint": {}}, "configEndpoint.auth", "is required"),
        ({"rateLimit": 1}, "rateLimit", "must be an object, not an integer"),
        (
            {"rateLimit": {"windowMs": 1}},
            "rateLimit.maxRequests",
            "is required: windowMs alone limits nothing",
        ),
        (
            config(collection(), rateLimit={"maxRequests": 1}),
            "rateLimit.windowMs",
            "is required: maxRequests alone limits nothing",
        ),
        ({"batchKeyDenySuffixes": [""]}, "batchKeyDenySuffixes[0]", "must not be empty"),
        (
            {"plugins": ["package.audit", "package.audit:Audit", "a plugin"]},
            "plugins[2]",
            "must be package.module:plugin, or the name of an entry point",
        ),
        ({"collections": {}}, "collections", "must be a list, not an object"),
        ({"namespaces": []}, "namespaces", "must be an object, not a list"),
        ({"namespaces": {"a": None}}, "namespaces.a", "must be an object, not null"),
        ([], "", "the configuration must be an object"),
    ],
)
def test_a_service_that_cannot_work_is_rejected(value: Any, path: str, message: str) -> None:
    assert only(value) == (path, message)


PROJECTION = {"source": "notes", "target": "lists/all", "id": "{id}"}


@pytest.mark.parametrize(
    ("changed", "path", "message"),
    [
        ({"source": []}, "source", "must name at least one collection"),
        ({"source": ["notes", "none"]}, "source", "there is no collection 'none'"),
        ({"id": None}, "id", "is required, or project"),
        ({"id": "{x}"}, "id", "{x} is not a path parameter of every source"),
        ({"target": "l/{x}"}, "target", "{x} is not a path parameter of every source"),
        ({"target": "/l"}, "target", "must not start or end with a slash"),
        ({"project": "m:f"}, "project", "stands in place of id, value and removeWhen"),
        ({"project": "m", "id": None}, "project", "must be module:function"),
        ({"value": {"title": "title"}}, "value", "JSON pointers start with a slash"),
        ({"removeWhen": {"gone": True}}, "removeWhen", "JSON pointers start with a slash"),
    ],
)
def test_a_projection_that_cannot_work_is_rejected(changed: Any, path: str, message: str) -> None:
    value = config(collection(), projections=[PROJECTION | changed])
    assert (f"projections[0].{path}", message) in faults(value)


def test_an_unknown_member_is_rejected_with_the_nearest_name() -> None:
    value = config(
        collection(storage_path="x", readRole=[], zzzz=1, appendOnly={"fields": "x"}),
        servr={},
        store={"uri": "x"},
    )
    assert faults(value) == [
        ("collections[0].storage_path", "unknown member; did you mean storagePath?"),
        ("collections[0].readRole", "unknown member; did you mean readRoles?"),
        ("collections[0].zzzz", "unknown member"),
        ("collections[0].appendOnly.fields", "unknown member; did you mean field?"),
        ("servr", "unknown member; did you mean server?"),
        ("store.uri", "unknown member; did you mean url?"),
    ]


def test_every_problem_is_reported_at_once_with_its_location_in_the_file() -> None:
    value = config(
        {"name": "broken"},
        collection(name="late", listable=True, storagePath="late"),
        collection(name="b", rateLimit={"push": {"windowMs": True, "maxRequests": 1}}),
        namespaces={"pull": {"collections": [{"storagePath": "x/{y"}]}},
        server={"port": "x", "nope": 1},
        auth={"trustedIssuers": ["x"]},
    )
    assert {path for path, _ in faults(value)} == {
        "collections[0].storagePath",
        "collections[1].listable",  # the index is the file's, though [0] could not be built
        "collections[2].rateLimit.push.windowMs",
        "namespaces.pull",
        "namespaces.pull.collections[0].name",
        "server.port",
        "server.nope",
        "auth.trustedIssuers[0]",
        "namespaces.pull.collections",
    }


def test_an_admin_token_from_the_environment_is_as_long() -> None:
    assert faults({}, {"PYSYNC_ADMIN_TOKEN": "short"}) == [("auth.adminToken", ADMIN_TOKEN)]
    assert parse({}, {"PYSYNC_ADMIN_TOKEN": "!" * 16}).auth.admin_token == "!" * 16
