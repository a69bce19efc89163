"""Quotas: how much may be stored for whom (docs/how-to/limit-storage.md)."""
# ruff: noqa: RUF009 (`option` is `dataclasses.field`)

from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass, fields
from math import inf

from pysync.config.collection import option, wire_name
from pysync.config.problem import FieldError


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """The most that may be stored for one subject."""

    bytes: int | None = option("Bytes of documents, logs and files; absent: any number.", None)
    documents: int | None = option("Documents; absent: any number.", None)
    log_elements: int | None = option("Elements of logs; absent: any number.", None)
    files: int | None = option("Files; absent: any number.", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotasConfig:
    """How much may be stored for whom. What is stored is counted while this is configured, also without any
    limit."""

    identity: Quota | None = option(
        "The most for each identity. In a folder: what it wrote last. Otherwise: what has it as `{identity}` "
        "in the key, in collections whose `writeRoles` are `self` or `admin` alone.",
        None,
    )
    space: Quota | None = option(
        "The most for each space, by the path parameter of `auth.spaces`. In a folder: what its members "
        "wrote last. Otherwise: what lies in collections whose `writeRoles` are `space:` roles or `admin` "
        "alone.",
        None,
    )
    namespace: Quota | None = option("The most for each namespace, and for the root.", None)
    issuer: Quota | None = option(
        "The most for each issuer: the one of the certificate with which was written last. Needs a store in "
        "a folder.",
        None,
    )

    def limits(self) -> Mapping[str, tuple[float, float, float, float]]:
        """Return the limits of each kind of subject: bytes, documents, log elements and files, each `inf` for
        none."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            kind: tuple(inf if most is None else most for most in astuple(quota))  # type: ignore[misc]
            for kind, quota in found.items()
            if quota is not None
        }


def quota_errors(quotas: QuotasConfig, *, is_folder: bool, has_spaces: bool) -> Iterator[FieldError]:
    """Yield the rules that quotas break, by members below `quotas`. `is_folder`: the store is one."""
    if not is_folder and quotas.issuer is not None:
        yield ".issuer", "needs a store in a folder (file:DIR): other stores count by keys, without issuers"
    if quotas.space is not None and not has_spaces:
        yield ".space", "needs auth.spaces, whose path parameter names the space"
    for field in fields(quotas):
        quota = getattr(quotas, field.name)
        if quota is not None and all(most is None for most in astuple(quota)):
            names = ", ".join(wire_name(each.name) for each in fields(quota))
            yield f".{field.name}", f"must limit one of {names}"
