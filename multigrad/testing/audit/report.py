"""The audit's table: in a terminal, in Markdown and in JSON."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from multigrad.testing.audit.rows import FAULTS, VERDICTS, Row


class Audit(NamedTuple):
    """The result of an audit."""

    module: str
    """The audited module, `keras.ops` or `multigrad.ops`."""
    versions: Mapping[str, Mapping[str, str]]
    """For each backend, the versions of Keras and of the framework."""
    rows: Mapping[str, Sequence[Row]]
    """The rows of each backend."""

    @property
    def faults(self) -> list[tuple[str, Row]]:
        """The rows with the verdict `wrong`, `NaN` or `error`, each with its backend."""
        return [(name, row) for name, rows in self.rows.items() for row in rows if row.verdict in FAULTS]

    def to_json(self) -> str:
        """Return the result as JSON, with one row per line."""
        lines = [
            f'{{"module": {json.dumps(self.module)}, "versions": {json.dumps(self.versions)}, "rows": {{'
        ]
        for index, (backend, rows) in enumerate(self.rows.items()):
            lines.append(f"{json.dumps(backend)}: [")
            lines += [json.dumps(row) + ("," if i < len(rows) - 1 else "") for i, row in enumerate(rows)]
            lines.append("]," if index < len(self.rows) - 1 else "]")
        return "\n".join([*lines, "}}"])

    @classmethod
    def from_json(cls, text: str) -> "Audit":
        """Return the result that `to_json` wrote."""
        data = json.loads(text)
        rows = {backend: [Row(*row) for row in rows] for backend, rows in data["rows"].items()}
        return cls(data["module"], data["versions"], rows)

    def to_markdown(self) -> str:
        """Return the counts, and the rows that are not right or a convention, as Markdown tables."""
        body = [
            (f"`{row.op}`", row.point, str(row.order), name, row.verdict, row.got, row.truth)
            for name, row in self._notable()
        ]
        headings = ("Op", "Point", "Order", "Backend", "Verdict", "Result", "Right")
        return "\n\n".join([_markdown(*self._counts()), _markdown(headings, body)])

    def to_text(self) -> str:
        """Return the same tables for a terminal."""
        body = [
            (row.op, row.point, str(row.order), name, row.verdict, row.got, row.truth)
            for name, row in self._notable()
        ]
        headings = ("op", "point", "order", "backend", "verdict", "result", "right")
        return "\n\n".join([_align(*self._counts()), _align(headings, body)])

    def _counts(self) -> tuple[Sequence[str], list[Sequence[str]]]:
        counts = {name: Counter(row.verdict for row in rows) for name, rows in self.rows.items()}
        body: list[Sequence[str]] = [
            (name, *(str(count[verdict]) for verdict in VERDICTS)) for name, count in counts.items()
        ]
        return (self.module, *VERDICTS), body

    def _notable(self) -> list[tuple[str, Row]]:
        """Return the rows that are not right or multigrad's convention, by op and point."""
        found = [
            (name, row)
            for name, rows in self.rows.items()
            for row in rows
            if row.verdict not in ("right", "convention")
        ]
        return sorted(found, key=lambda pair: (pair[1].op, pair[1].point, pair[1].order, pair[0]))


def _markdown(headings: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    rows = [headings, ["---"] * len(headings), *body]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)


def _align(headings: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    cut = [[cell if len(cell) <= 34 else f"{cell[:31]}..." for cell in row] for row in (headings, *body)]
    widths = [max(map(len, column)) for column in zip(*cut, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cut
    )
