"""Collections of Parquet files in few words: the same in a file and in Python."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.configurations import config, faults, only

from pysync.config import Collection, RateLimit, RateRule, parse
from pysync.config.collection import wire_name
from pysync.parquet import (
    PARQUET_MIME_TYPES,
    create_parquet_collection,
    create_sealed_parquet_collection,
)

FACTORIES = {"parquet": create_parquet_collection, "sealedParquet": create_sealed_parquet_collection}
Create = Callable[..., Collection]


def from_file(preset: str, **options: Any) -> Collection:
    members = {wire_name(name): value for name, value in options.items()}
    return parse(config({"preset": preset, **members})).collections[0]


def from_python(preset: str, **options: Any) -> Collection:
    return FACTORIES[preset](**options)


@pytest.fixture(params=[from_file, from_python])
def create(request: pytest.FixtureRequest) -> Create:
    made: Create = request.param
    return made


def test_a_parquet_collection_is_read_by_all_and_written_with_a_certificate(create: Create) -> None:
    assert create("parquet", name="reports", storage_path="reports/{team}/{id}") == Collection(
        name="reports",
        storage_path="reports/{team}/{id}",
        read_roles=("public",),
        write_roles=("cap:write:reports",),
        encryption="none",
        allowed_mime_types=PARQUET_MIME_TYPES,
        listable=True,
    )


def test_a_sealed_collection_is_read_with_a_certificate_and_takes_bytes_alone(create: Create) -> None:
    assert create("sealedParquet", name="vault", storage_path="vault/{id}/rows") == Collection(
        name="vault",
        storage_path="vault/{id}/rows",
        read_roles=("cap:read:vault",),
        write_roles=("cap:write:vault",),
        encryption="none",
        allowed_mime_types=("application/octet-stream",),
    )


def test_the_media_types_of_parquet_are_those_of_the_specification() -> None:
    assert list(PARQUET_MIME_TYPES) == [
        "application/vnd.apache.parquet",
        "application/x-parquet",
        "application/octet-stream",
    ]
    assert create_parquet_collection(name="a", storage_path="a").is_parquet
    assert not create_sealed_parquet_collection(name="a", storage_path="a").is_parquet


@pytest.mark.parametrize("preset", FACTORIES)
@pytest.mark.parametrize(
    ("read", "write", "made"),
    [
        ("public", "public", (("public",), ("public",), False, False)),
        ("authenticated", "authenticated", (("cap:read:r",), ("cap:write:r",), False, False)),
        ("none", "public", ((), ("public",), False, True)),
        ("public", "none", (("public",), (), True, False)),
        (["admin", "none"], ["self"], (("admin", "none"), ("self",), False, False)),
        ([], ["a"], ((), ("a",), False, False)),
    ],
)
def test_access_is_a_word_or_roles(create: Create, preset: str, read: Any, write: Any, made: Any) -> None:
    found = create(preset, name="r", storage_path="r", read=read, write=write)
    assert (found.read_roles, found.write_roles, found.pull_only, found.push_only) == made
    assert found.require_auth is None, "what is public is open, what is not is not"


def test_the_other_options_are_those_of_every_collection(create: Create) -> None:
    found = create(
        "parquet",
        name="r",
        storage_path="r",
        rate_limit={"push": {"windowMs": 1000, "maxRequests": 2}, "pull": False},
        max_body_bytes=5,
        cache_duration_ms=0,
    )
    assert (found.max_body_bytes, found.cache_duration_ms) == (5, 0)
    assert found.rate_limit == RateLimit(push=RateRule(window_ms=1000, max_requests=2), pull=False)
    assert create("parquet", name="r", storage_path="r", rate_limit=False).rate_limit is False
    assert from_file("parquet", name="r", storage_path="r", rate_limit="none").rate_limit is False
    built = create_parquet_collection(name="r", storage_path="r", rate_limit=found.rate_limit)
    assert built.rate_limit == found.rate_limit


@pytest.mark.parametrize("preset", FACTORIES)
def test_a_collection_that_nobody_reads_and_nobody_writes_is_rejected(preset: str) -> None:
    closed = {"preset": preset, "name": "r", "storagePath": "/r", "read": "none", "write": "none"}
    assert faults(config(closed)) == [
        ("collections[0].write", "read and write cannot both be none"),
        ("collections[0].storagePath", "must not start or end with a slash"),
    ]
    with pytest.raises(ValueError, match="write: read and write cannot both be none\nstoragePath: must not"):
        FACTORIES[preset](name="r", storage_path="/r", read="none", write="none")


def test_all_problems_of_an_option_are_reported_in_python_too() -> None:
    options: dict[str, Any] = {"read": "pubic", "write": 5, "max_body_bytes": 0, "rate_limit": {"pull": 1}}
    with pytest.raises(ValueError, match=r"^read: ") as rejected:
        create_parquet_collection(name="r", storage_path="r/{a b}", cache_duration_ms=-1, **options)
    assert str(rejected.value).splitlines() == [
        'read: must be "public" or "authenticated" or "none" or a list',
        'write: must be "public" or "authenticated" or "none" or a list',
        "rateLimit.pull: must be an object, not an integer",
        "maxBodyBytes: must be at least 1",
        "cacheDurationMs: must be at least 0",
        "storagePath: segment '{a b}' is neither a {name} nor made of A-Z a-z 0-9 . _ : @ -",
    ]


@pytest.mark.parametrize(
    ("member", "expected"),
    [
        ({"readRoles": ["public"]}, ("readRoles", "cannot be used with preset; did you mean read?")),
        ({"listable": True}, ("listable", "cannot be used with preset")),
        ({"encryption": "delegated"}, ("encryption", "cannot be used with preset")),
        ({"allowedMimeTypes": []}, ("allowedMimeTypes", "cannot be used with preset")),
        ({"wirte": "none"}, ("wirte", "unknown member; did you mean write?")),
        ({"preset": "parket"}, ("preset", 'must be "parquet" or "sealedParquet"')),
        ({"read": ["a", 1]}, ("read[1]", "must be a string, not an integer")),
        ({"read": "reports"}, ("read", 'must be "public" or "authenticated" or "none" or a list')),
    ],
)
def test_member_fixed_by_a_preset_is_rejected(member: dict[str, Any], expected: tuple[str, str]) -> None:
    path, message = expected
    preset = {"preset": "parquet", "name": "r", "storagePath": "r/{id}", **member}
    plain = {"name": "notes", "storagePath": "notes/{id}"}
    found = only(config(namespaces={"acme": {"collections": [plain, preset]}}))
    assert found == (f"namespaces.acme.collections[1].{path}", message)


def test_collection_without_a_preset_is_offered_one() -> None:
    plain = {"name": "notes", "storagePath": "notes/{id}"}
    assert only(config({**plain, "prest": "parquet"})) == (
        "collections[0].prest",
        "unknown member; did you mean preset?",
    )
    assert only(config({**plain, "read": "public"}))[1] == "unknown member; did you mean readRoles?"
    assert parse(config({**plain, "preset": None})) == parse(config(plain))


def test_problem_elsewhere_names_the_location_of_a_preset() -> None:
    preset = {"preset": "parquet", "name": "r", "storagePath": "notes/{id}"}
    assert faults(config({"name": "notes", "storagePath": "notes/{id}"}, preset)) == [
        ("collections[1].storagePath", "matches the same keys as collections[0].storagePath")
    ]


def test_the_reference_lists_presets() -> None:
    text = (Path(__file__).parents[2] / "docs/reference/configuration.md").read_text()
    assert "list of [Collection](#collection) or [Parquet preset](#parquet-preset)" in text
    assert text.count("## Parquet preset\n") == 1
