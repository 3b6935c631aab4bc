"""How bad input is refused: one error that names file, column, count, reason and example rows of every breach."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Breach:
    """One broken rule in one file or table."""

    rule: str
    column: str
    """The column, several joined by commas, or `*` for whole rows or the file itself."""
    count: int
    """Broken rows; for a column or a file that is wrong as a whole, the rows of the file (0 when it has none)."""
    reason: str
    examples: tuple[dict[str, Any], ...] = ()
    table: str = ""
    """Table and day, `impressions/2026-01-06`; empty when the file can't be read at all."""
    file: str = ""

    @property
    def text(self) -> str:
        """One line: where, which rule, how many rows, which column, why, and examples."""
        where = ": ".join(part for part in (self.file, self.table) if part)
        shown = f"; examples: {'; '.join(str(e) for e in self.examples)}" if self.examples else ""
        rows = f"{self.count} row{'' if self.count == 1 else 's'}"
        return f"{where}: {self.rule}: {rows} refused (column {self.column}: {self.reason}){shown}"


class RefusedError(ValueError):
    """Input that was refused; nothing of it was written."""

    def __init__(self, breaches: Sequence[Breach]) -> None:
        self.breaches = tuple(breaches)
        super().__init__("\n".join(breach.text for breach in self.breaches))

    def within(self, *, table: str = "", file: str = "") -> RefusedError:
        """The same with table and file filled in where they are not known yet."""
        known = (replace(b, table=b.table or table, file=b.file or file) for b in self.breaches)
        return RefusedError(tuple(known))


@dataclass
class Breaches:
    """Collects breaches of one file."""

    file: str
    found: list[Breach] = field(default_factory=list)

    def add(self, rule: str, column: str, count: int, reason: str, examples: Sequence[dict[str, Any]] = ()) -> None:
        """Note one."""
        self.found.append(Breach(rule, column, count, reason, tuple(examples), file=self.file))

    def refuse(self) -> None:
        """Raise RefusedError when any was noted."""
        if self.found:
            raise RefusedError(self.found)
