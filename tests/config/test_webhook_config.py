"""Webhooks: the configurations that are rejected, and those that are warned about."""

import base64
from typing import Any

import pytest
from support.configurations import collection, config, faults, only

from pysync.config import parse
from pysync.config.check import lint


def secret(size: int = 32) -> str:
    return "whsec_" + base64.b64encode(bytes(size)).decode()


def webhook(**members: Any) -> dict[str, Any]:
    usual = {"name": "search", "url": "https://a.example/hook", "collections": ["notes"], "secret": secret()}
    return {**usual, **members}


def configured(*webhooks: dict[str, Any]) -> dict[str, Any]:
    namespaces = {"acme": {"collections": [collection()]}}
    return config(collection(), namespaces=namespaces, webhooks=list(webhooks))


@pytest.mark.parametrize(
    "members",
    [
        {"collections": ["notes", "acme/notes", "/notes"]},
        {"secret": secret(24)},
        {"secret": [secret(64), secret(24)]},
        {"url": "http://10.0.0.1:8000/hook?token=x", "allowPrivate": True},
        {"url": "https://[2606:4700::1111]/"},
    ],
)
def test_webhook_that_can_work_is_accepted(members: dict[str, Any]) -> None:
    assert parse(configured(webhook(**members))).webhooks[0].name == "search"


FORM = "must be whsec_ and the base64 of 24 to 64 bytes"
URL = "must be http:// or https://, a host, and perhaps a port, a path and a query"


@pytest.mark.parametrize(
    ("member", "value", "fault"),
    [
        ("secret", secret(23), FORM),
        ("secret", secret(65), FORM),
        ("secret", base64.b64encode(bytes(32)).decode(), FORM),
        ("secret", secret().rstrip("="), FORM),
        ("secret", "whsec_" + "ä" * 40, FORM),
        ("secret", "whsec_" + "-_" * 20, FORM),
        ("secret", [secret(), "x"], FORM),
        ("secret", [], FORM),
        ("url", "ftp://a.example", URL),
        ("url", "/hook", URL),
        ("url", "https://", URL),
        ("url", "https://user:password@a.example", URL),
        ("url", "https://a.example:99999", URL),
        ("url", "https://a.example/#part", URL),
        ("collections", [], "must name at least one collection"),
    ],
)
def test_webhook_that_cannot_work_is_rejected(member: str, value: Any, fault: str) -> None:
    assert only(configured(webhook(**{member: value}))) == (f"webhooks[0].{member}", fault)


@pytest.mark.parametrize("name", ["other", "other/notes", "/other"])
def test_webhook_of_a_collection_that_is_not_there_is_rejected(name: str) -> None:
    found = only(configured(webhook(collections=["notes", name])))
    assert found == ("webhooks[0].collections[1]", f"there is no collection {name!r}")


def test_webhooks_have_different_names() -> None:
    found = faults(configured(webhook(), webhook(name="other"), webhook()))
    assert found == [("webhooks[2].name", "'search' is also another one's")]


def test_secret_comes_from_the_environment_and_is_in_no_message() -> None:
    given = configured(webhook(secret="${HOOK_SECRET}"))
    parsed = parse(given, {"HOOK_SECRET": secret()})
    assert parsed.webhooks[0].secret == (secret(),)
    assert secret() not in repr(parsed)
    assert faults(given, {"HOOK_SECRET": "hunter2"}) == [("webhooks[0].secret", FORM)]


@pytest.mark.parametrize(("url", "warned"), [("http://a.example", True), ("https://a.example", False)])
def test_check_warns_about_http(url: str, warned: bool) -> None:
    paths = [found.path for found in lint(parse(configured(webhook(url=url))))]
    assert ("webhooks[0].url" in paths) == warned
