"""The configuration: what is accepted, from where, and that anything else is refused and never crashes."""

import dataclasses
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from support.configurations import EXAMPLE, WINDOW, collection, config, faults

from pysync.config import (
    AppendOnly,
    Config,
    ConfigError,
    Limit,
    RateLimit,
    RateRule,
    Restriction,
    load,
    parse,
    schema,
)
from pysync.config.check import report
from pysync.config.collection import wire_name
from pysync.config.loader import MAX_BYTES


def test_nothing_configured_is_every_default() -> None:
    assert parse({}) == Config()


def test_every_member_of_a_starfish_configuration_is_read() -> None:
    read = parse(
        {
            "version": 1,
            "collections": [
                {
                    "name": "posts",
                    "storagePath": "posts/{identity}/{id}",
                    "readRoles": ["public"],
                    "writeRoles": ["self", "cap:write:posts"],
                    "requireAuth": False,
                    "encryption": "delegated",
                    "maxBodyBytes": 4096,
                    "allowedMimeTypes": ["application/json", "image/*"],
                    "pullOnly": False,
                    "pushOnly": False,
                    "appendOnly": {"type": "by_timestamp", "field": "entries", "persist": True},
                    "ttlMs": 60000,
                    "forceFullFetch": True,
                    "listable": True,
                    "keyringPath": "rings/{identity}",
                    "rateLimit": {"push": {"windowMs": 1000, "maxRequests": 2}, "pull": None},
                    "bundle": None,
                }
            ],
            "namespaces": {
                "acme": {
                    "collections": [
                        {"name": "a", "storagePath": "acme/{id}", "bundle": "all"},
                        {"name": "b", "storagePath": "acme/{id}", "bundle": "all"},
                    ]
                }
            },
        }
    )
    (posts,) = read.collections
    assert (posts.name, posts.storage_path) == ("posts", "posts/{identity}/{id}")
    assert (posts.read_roles, posts.write_roles) == (("public",), ("self", "cap:write:posts"))
    assert (posts.require_auth, posts.encryption, posts.max_body_bytes) == (False, "delegated", 4096)
    assert posts.allowed_mime_types == ("application/json", "image/*")
    assert posts.append_only == AppendOnly(field="entries", persist=True)
    assert (posts.ttl_ms, posts.force_full_fetch, posts.listable) == (60000, True, True)
    assert (posts.keyring_path, posts.bundle) == ("rings/{identity}", None)
    assert posts.rate_limit == RateLimit(push=RateRule(window_ms=1000, max_requests=2))
    assert [member.bundle for member in read.namespaces["acme"].collections] == ["all", "all"]


def test_a_collection_accepts_json_and_a_mebibyte_by_default() -> None:
    (notes,) = parse(config(collection())).collections
    assert notes.allowed_mime_types == ("application/json",)
    assert notes.max_body_bytes == 1_048_576


def test_pulls_may_be_cached_for_no_time_at_all() -> None:
    (notes,) = parse(config(collection(cacheDurationMs=0))).collections
    assert notes.cache_duration_ms == 0  # and not None, which says nothing of caching


def test_every_member_of_the_service_configuration_is_read() -> None:
    read = parse(
        config(
            collection(name="events", storagePath="in/{app}/{batchId}"),
            collection(storagePath="notes/{spaceId}/{noteId}"),
            server={
                "host": "0.0.0.0",
                "port": 0,
                "mountPath": "/v1",
                "publicHosts": ["sync.example.org"],
                "trustedProxyHops": 1,
                "cors": {"origins": ["https://app.example.org", "*"]},
                "workers": 2,
                "drainTimeoutMs": 5000,
            },
            store={"url": "s3://bucket/prefix", "endpoint": "http://127.0.0.1:9000", "forcePathStyle": True},
            coordinator="redis://127.0.0.1:6379/0",
            auth={
                "adminToken": "hush-hush-hush-hush",
                "trustedIssuers": ["ab" * 32],
                "identityRoles": {"someone": ["editor"]},
                "spaces": {"accessPath": "s/{sid}/_access", "param": "sid"},
            },
            configEndpoint={"auth": "role-filtered"},
            maxCollectionsPerBatch=7,
            maxBatchAppendElements=8,
            batchKeyDenySuffixes=["_x"],
            rateLimit={**WINDOW, "bucket": "identity+ip"},
            restrictions={"mode": "deny", "identities": ["someone"], "actions": ["push"]},
            projections=[
                {
                    "source": "notes",
                    "target": "lists/{spaceId}",
                    "id": "{noteId}",
                    "value": {"title": "/title"},
                    "removeWhen": {"/deleted": True},
                    "maxItems": 10,
                },
                {"source": ["notes"], "target": "lists:target", "project": "lists:project"},
            ],
            events=[{"collection": "events", "storagePath": "events/{app}/{batchId}"}],
            plugins=["package.module:plugin"],
        )
    )
    assert (read.server.port, read.server.mount_path, read.server.workers) == (0, "/v1", 2)
    assert read.server.cors.origins == ("https://app.example.org", "*")
    assert (read.store.url, read.store.force_path_style) == ("s3://bucket/prefix", True)
    assert read.auth.identity_roles == {"someone": ("editor",)}
    assert read.auth.spaces == schema.SpacesConfig(access_path="s/{sid}/_access", param="sid")
    assert read.config_endpoint == schema.ConfigEndpoint(auth="role-filtered")
    assert (read.max_collections_per_batch, read.max_batch_append_elements) == (7, 8)
    assert read.restrictions == (Restriction(mode="deny", identities=("someone",), actions=("push",)),)
    assert [projection.source for projection in read.projections] == [("notes",), ("notes",)]
    assert read.projections[0].remove_when == {"/deleted": True}
    assert read.projections[0].max_retries == 8
    assert read.plugins == ("package.module:plugin",)


@pytest.mark.parametrize(
    ("short", "meant"),
    [
        ({"store": "memory:"}, {"store": {"url": "memory:"}}),
        ({"rateLimit": "none"}, {}),
        ({"rateLimit": False}, {}),
        ({"rateLimit": True}, {}),
        (config(collection(appendOnly=True)), config(collection(appendOnly={"type": "by_timestamp"}))),
        (config(collection(appendOnly=False)), config(collection())),
        (config(collection(rateLimit=True)), config(collection(rateLimit={}))),
        (config(collection(rateLimit="none")), config(collection(rateLimit=False))),
        (
            config(collection(rateLimit={"push": "none", "pull": True})),
            config(collection(rateLimit={"push": False, "pull": {}})),
        ),
        (config(collection(ttlMs=None, listable=None)), config(collection())),
        (config(collection(ttlMs=0)), config(collection())),
        (config(collection(appendOnly={"maxItems": 0})), config(collection(appendOnly=True))),
        (config(collection(maxBodyBytes=1e6)), config(collection(maxBodyBytes=1_000_000))),
        (
            config(collection(allowedMimeTypes=["application/json; charset=utf-8", "text/*;q=1"])),
            config(collection(allowedMimeTypes=["application/json", "text/*"])),
        ),
        (
            config(collection(restrictions={"mode": "allow", "identities": []})),
            config(collection(restrictions=[{"mode": "allow", "identities": []}])),
        ),
    ],
)
def test_a_short_spelling_means_its_long_one(short: Any, meant: Any) -> None:
    assert parse(short) == parse(meant)


def test_json_yaml_and_toml_give_one_configuration(tmp_path: Path) -> None:
    value = orjson.loads(EXAMPLE.read_bytes())
    value["server"]["examples"] = str(EXAMPLE.parent / "examples")
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(value))
    (tmp_path / "c.yml").write_text(yaml.safe_dump(value))
    assert load(tmp_path / "c.yaml") == load(tmp_path / "c.yml") == load(EXAMPLE, {})
    (tmp_path / "c.toml").write_text(
        'store = "memory:"\n[[collections]]\nname = "notes"\nstoragePath = "notes/{id}"\nttlMs = 5\n'
    )
    assert load(tmp_path / "c.toml", {}) == parse(config(collection(ttlMs=5), store="memory:"))


LOOSEST = {"windowMs": 9, "maxRequests": 9}
TIGHT = RateRule(window_ms=1000, max_requests=5, bucket="identity")
LOOSE = RateRule(window_ms=9, max_requests=9, bucket="identity")


@pytest.mark.parametrize(
    ("server", "own", "action", "holds"),
    [
        (None, None, "pull", None),
        (LOOSEST, None, "push", None),
        (LOOSEST, True, "push", LOOSE),
        (LOOSEST, True, "pull", None),
        (LOOSEST, True, "list", None),
        (None, True, "push", None),
        (LOOSEST, False, "push", None),
        (LOOSEST, "none", "push", None),
        (LOOSEST, WINDOW, "push", TIGHT),
        (LOOSEST, WINDOW, "pull", None),
        (LOOSEST, {**WINDOW, "push": False}, "push", None),
        (LOOSEST, {**WINDOW, "pull": {}}, "push", TIGHT),
        (LOOSEST, {**WINDOW, "pull": {}}, "pull", TIGHT),
        (LOOSEST, {"push": WINDOW}, "pull", None),
        (LOOSEST, {"pull": {}}, "pull", LOOSE),
        (LOOSEST, {"pull": True}, "pull", LOOSE),
        (LOOSEST, {"pull": True}, "push", None),
        (None, {"push": WINDOW}, "push", TIGHT),
        ({**LOOSEST, "push": False}, True, "push", None),
        ({**LOOSEST, "push": False}, {"push": WINDOW}, "push", TIGHT),
        (
            {"windowMs": 1000, "maxRequests": 100, "bucket": "ip"},
            {"pull": {"maxRequests": 3}},
            "pull",
            RateRule(window_ms=1000, max_requests=3, bucket="ip"),
        ),
        ({**LOOSEST, "pull": WINDOW}, {"pull": True}, "pull", TIGHT),
        (LOOSEST, {"ip": WINDOW}, "push", RateRule(ip=Limit(window_ms=1000, max_requests=5))),
        (None, {"bucket": "ip"}, "push", None),
        (LOOSEST, {"bucket": "ip", "list": {}}, "list", RateRule(window_ms=9, max_requests=9, bucket="ip")),
        (LOOSEST, {"bucket": "ip", "list": {}}, "push", None),
    ],
)
def test_of_what_a_collection_meters_the_nearest_limit_holds(
    server: Any, own: Any, action: Any, holds: Any
) -> None:
    read = parse(config(collection(rateLimit=own), rateLimit=server))
    assert read.effective_limit(read.collections[0], action) == holds


@pytest.mark.parametrize(
    ("value", "url"),
    [
        ({"store": "memory:"}, "memory:"),
        ({"store": "s3://bucket/prefix"}, "memory:"),
        ({"store": "file:./data"}, "file:"),
        ({"store": "file:./data", "coordinator": "memory:"}, "memory:"),
        ({"store": "file:./data", "server": {"workers": 4}}, "file:"),
    ],
)
def test_the_coordinator_suits_the_store(value: Any, url: str) -> None:
    assert parse(value).effective_coordinator == url


def test_the_environment_overrides_the_file_and_flags_override_both() -> None:
    value = {"server": {"port": 1, "host": "a", "workers": 3}, "store": "file:a"}
    environ = {"PYSYNC_SERVER_PORT": "2", "PYSYNC_SERVER_HOST": "b", "PYSYNC_STORE": "file:b"}
    read = parse(value, environ, {"server.port": 3, "store": "file:c", "coordinator": None})
    assert (read.server.port, read.server.host, read.server.workers) == (3, "b", 3)
    assert (read.store.url, read.coordinator) == ("file:c", None)
    assert parse(value, environ, {"server.port": "4"}).server.port == 4


def test_a_variable_keeps_the_other_members_of_its_section() -> None:
    value = {"store": {"url": "s3://bucket", "region": "r"}, "auth": {"trustedIssuers": []}}
    read = parse(value, {"PYSYNC_STORE": "memory:", "PYSYNC_ADMIN_TOKEN": "token-of-the-tests"})
    assert (read.store.url, read.store.region) == ("memory:", "r")
    assert (read.auth.trusted_issuers, read.auth.admin_token) == ((), "token-of-the-tests")


def test_an_empty_variable_counts_as_unset() -> None:
    assert parse({}, {"PYSYNC_ADMIN_TOKEN": "", "PYSYNC_SERVER_PORT": ""}) == Config()


def test_a_faulty_variable_is_named() -> None:
    assert faults({}, {"PYSYNC_SERVER_PORT": "http"}) == [
        ("server.port", "must be an integer, not a string (environment variable PYSYNC_SERVER_PORT)")
    ]


def test_an_unknown_flag_is_an_error_of_the_program() -> None:
    with pytest.raises(KeyError):
        parse({}, {}, {"server.prot": 1})


def test_variables_are_substituted_in_any_string() -> None:
    value = config(
        collection(name="${NAME}", storagePath="x/${NAME}/{id}", objectSchema={"const": ["${NAME}"]}),
        server={"port": "${PORT}"},
        auth={"adminToken": "${TOKEN}", "identityRoles": {"u": ["${NAME}"]}},
    )
    read = parse(value, {"NAME": "docs", "PORT": "81", "TOKEN": "a${NAME}" * 3})
    assert (read.collections[0].name, read.collections[0].storage_path) == ("docs", "x/docs/{id}")
    assert read.collections[0].object_schema == {"const": ["docs"]}
    assert read.server.port == 81
    assert read.auth.identity_roles == {"u": ("docs",)}
    assert read.auth.admin_token == "a${NAME}" * 3  # what a variable holds is not looked into again
    assert type(read.collections[0].name) is str


def test_variable_of_the_environment_is_not_substituted_again() -> None:
    assert parse({}, {"PYSYNC_ADMIN_TOKEN": "a${b}" * 4}).auth.admin_token == "a${b}" * 4


def test_a_missing_variable_is_a_problem() -> None:
    assert faults({"auth": {"adminToken": "${A}-${B}"}}, {"A": "x"}) == [
        ("auth.adminToken", "environment variable B is not set")
    ]


def test_an_empty_token_is_rejected() -> None:
    path, _ = faults({"auth": {"adminToken": "${A}"}}, {"A": ""})[0]
    assert path == "auth.adminToken"


def test_a_bucket_is_where_its_url_says_and_else_where_the_members_do() -> None:
    members = {"endpoint": "https://a", "region": "r", "forcePathStyle": True}

    def location(url: str, **members: Any) -> tuple[Any, ...]:
        return dataclasses.astuple(parse({"store": {"url": url, **members}}).store.s3_location())

    assert location("s3://bucket") == ("bucket", "", None, None, False)
    assert location("s3://bucket/a/b/", **members) == ("bucket", "a/b", "https://a", "r", True)
    url = "s3://bucket/a?endpoint=http://127.0.0.1:9000&region=q&path_style=false"
    assert location(url, **members) == ("bucket", "a", "http://127.0.0.1:9000", "q", False)


def test_secrets_stay_out_of_repr_and_messages() -> None:
    secrets = {
        "store": {"url": "s3://bucket", "accessKeyId": "k", "secretAccessKey": "hush-key"},
        "coordinator": "redis://:hush-password@127.0.0.1/0",
        "auth": {"adminToken": "hush-token-of-tests"},
    }
    assert "hush" not in repr(parse(secrets))
    wrong = {"store": "hush-store", "coordinator": "hush", "server": {"port": "${X}"}, "version": "hush"}
    message = str(faults(wrong, {"X": "hush", "PYSYNC_SERVER_WORKERS": "hush"}))
    assert "hush" not in message


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("c.json", '{"a": 1,}', "line 1 column"),
        ("c.json", '{"version": 1, "version": 1}', "member 'version' is written twice in one object"),
        ("c.json", '{"server": {"port": NaN}}', "NaN is not JSON"),
        ("c.json", "[" * 100_000, "nested too deeply"),
        ("c.json", "", "Expecting value"),
        ("c.yaml", "version: 1\nversion: 1\n", "member 'version' is written twice in one object"),
        ("c.yaml", "a: [", "expected the node content, but found '<stream end>' (line 1, column 5)"),
        ("c.yaml", "a: \0", "holds characters that YAML does not allow"),
        ("c.toml", "version = 1\nversion = 1\n", "Cannot overwrite a value"),
        ("c.toml", "x", "Expected"),
        ("c.ini", "", "its name must end in .json, .yaml, .yml, .toml"),
        ("c.json", " " * (MAX_BYTES + 1), "more than"),
        ("c.json", b"\xff", "utf-8"),
        ("c.json", "[]", "the configuration must be an object"),
        ("c.yaml", "store: 2020-01-01\n", "must be an object, not date"),
        ("c.yaml", "1: 2\n", "unknown member"),
        ("c.yaml", "collections: &a [*a]\n", "must be an object, not a list"),
        (
            "c.yaml",
            "collections: [{name: a, storagePath: a, objectSchema: &a {x: *a}}]\n",
            "nested too deeply",
        ),
    ],
)
def test_a_file_that_cannot_be_read_is_rejected(
    tmp_path: Path, name: str, content: str | bytes, message: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError) as rejected:
        load(path, {})
    assert message in str(rejected.value)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("c.json", '{"auth": {"adminToken": "hush" "x"}}'),
        ("c.yaml", 'auth: {adminToken: "hush" "x"}'),
        ("c.toml", '[auth]\nadminToken = "hush" "x"'),
    ],
)
def test_a_broken_file_is_not_quoted(tmp_path: Path, name: str, content: str) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(ConfigError) as rejected:
        load(path, {})
    assert "hush" not in str(rejected.value)


def test_a_missing_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load(tmp_path / "none.json")


NAMES = sorted(
    {
        wire_name(field.name)
        for kind in vars(schema).values()
        if dataclasses.is_dataclass(kind)
        for field in dataclasses.fields(kind)
    }
)
WORDS = [
    "notes",
    "a/{id}",
    "{identity}",
    "public",
    "none",
    "memory:",
    "file:x",
    "${X}",
    "${Y}",
    "/v1",
    "by_timestamp",
    "",
]
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(WORDS)
    | st.text(st.characters(), max_size=8)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(NAMES) | st.text(st.characters(), max_size=4), inner, max_size=6)
    ),
    max_leaves=25,
)


def rejected_or_read(value: object) -> None:
    """Nothing but ConfigError comes out, and what is read can be reported on."""
    try:
        read = parse(value, {"X": "x"})
    except ConfigError:
        return
    report(read)


@given(VALUES)
def test_any_value_is_read_or_rejected(value: object) -> None:
    rejected_or_read(value)


@st.composite
def damaged(draw: st.DrawFn) -> object:
    """The example with one value, at any depth, replaced."""
    value = orjson.loads(EXAMPLE.read_bytes())
    target = value
    while True:
        key = draw(st.sampled_from(sorted(target) if isinstance(target, dict) else range(len(target))))
        inner = target[key]
        if not (isinstance(inner, dict | list) and inner) or draw(st.booleans()):
            target[key] = draw(VALUES)
            return value
        target = inner


@given(damaged())
def test_a_damaged_configuration_is_read_or_rejected(value: object) -> None:
    rejected_or_read(value)
