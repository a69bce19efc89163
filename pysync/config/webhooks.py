"""Webhooks: their members, and the rules for them."""

from base64 import b64decode
from collections.abc import Container, Iterator
from contextlib import suppress
from dataclasses import dataclass

from pysync.config.collection import option
from pysync.config.problem import FieldError


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookConfig:
    """A program that the server notifies of writes by HTTP."""

    name: str = option("Name in logs and metrics, by which the server keeps what it has delivered.")
    url: str = option("`https://…` or `http://…`, to which changes are posted.")
    collections: tuple[str, ...] = option(
        "Collections whose writes it is sent: `notes` means every namespace, `acme/notes` one, `/notes` the "
        "root alone."
    )
    secret: tuple[str, ...] = option(
        "`whsec_` and the base64 of 24 to 64 random bytes; a list while one replaces another. Each signs "
        "every request.",
        secret=True,
    )
    allow_private: bool = option(
        "Also connects to addresses that are not public: of this machine or of a private network.", False
    )


def is_secret(secret: str) -> bool:
    """Return True if a secret has the form that Standard Webhooks specifies."""
    with suppress(ValueError):
        key = b64decode(secret.removeprefix("whsec_"), validate=True)
        return secret.startswith("whsec_") and 24 <= len(key) <= 64
    return False


def webhook_errors(webhook: WebhookConfig, known: Container[str]) -> Iterator[FieldError]:
    """Yield every rule that the webhook breaks. `known` has all names of collections, with and without
    namespace."""
    from yarl import URL  # takes 30 ms, and most configurations have no webhook

    try:
        url = URL(webhook.url)
        if url.scheme not in ("http", "https") or not url.host or url.user is not None or url.fragment:
            raise ValueError
    except ValueError:
        yield "url", "must be http:// or https://, a host, and perhaps a port, a path and a query"
    if not webhook.collections:
        yield "collections", "must name at least one collection"
    for at, name in enumerate(webhook.collections):
        if name not in known:
            yield f"collections[{at}]", f"there is no collection {name!r}"
    if not webhook.secret or not all(map(is_secret, webhook.secret)):
        yield "secret", "must be whsec_ and the base64 of 24 to 64 bytes"
