"""The verdict of the judge."""

from collections import Counter
from dataclasses import dataclass

from proof.history import Operation, encode

SHOWN = 20
"""Violations that are told in full, and lines of each; of more the number."""
SHOWN_CHARS = 600
"""Of a line of the history: the answer to a tail may be long."""


@dataclass(frozen=True, slots=True)
class Violation:
    """A promise that was not kept, by its short name; what happened, and the operations that show it."""

    promise: str
    said: str
    operations: tuple[Operation, ...]

    def __str__(self) -> str:
        lines = [f"{self.promise}: {self.said}", *map(_shown, self.operations[:SHOWN])]
        if len(self.operations) > SHOWN:
            lines.append(f"    and {len(self.operations) - SHOWN} more lines")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Verdict:
    """`counts` says how much there was to judge."""

    counts: Counter[str]
    violations: list[Violation]

    def __str__(self) -> str:
        lines = [f"{count:>9,} {what}" for what, count in sorted(self.counts.items())]
        if not self.violations:
            return "\n".join((*lines, "every promise was kept"))
        by_promise = Counter(violation.promise for violation in self.violations)
        broken = ", ".join(f"{promise} ({count})" for promise, count in by_promise.most_common())
        return "\n\n".join(("\n".join(lines), *map(str, self.violations[:SHOWN]), f"NOT KEPT: {broken}"))


def _shown(operation: Operation) -> str:
    text = encode(operation).decode().rstrip()
    shown = text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + "..."
    return f"    line {operation.line}: {shown}"
