"""Render `docs/benchmarks.md` from the JSON files in `benchmarks/results/`, so that prose can't drift from numbers.

Usage: `python -m benchmarks.report [--check]`; `--check` exits with 1 when the page is out of date.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
README = ROOT / "README.md"
SHOWN = ("loop",)
"""Results whose headline stands in the README; the page shows all."""
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"


def render(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown page: one section a result, scalars as a table, nested values as tables of their own."""
    lines = ["# Benchmarks", "", "Rendered by `python -m benchmarks.report` from `benchmarks/results/`.", ""]
    for name, result in sorted(results.items()):
        lines += [f"## {name}", "", str(result.get("question", "")), ""]
        lines += [f"Machine: {result['machine']}; commit `{result['commit']}`; seed {result['seed']}.", ""]
        lines += _table(result["values"])
        for key, value in result["values"].items():
            table = _table(value) if isinstance(value, dict) else []
            lines += [f"**{key}**", "", *table] if table else []
    return "\n".join(lines).rstrip() + "\n"


def _table(values: Mapping[str, Any]) -> list[str]:
    scalars = {k: v for k, v in values.items() if not isinstance(v, (dict, list))}
    if not scalars:
        return []
    rows = [f"| {k} | {_number(v)} |" for k, v in scalars.items()]
    return ["| | |", "| --- | --- |", *rows, ""]


def _number(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def read_results(folder: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """Name -> committed result."""
    return {p.stem: json.loads(p.read_text()) for p in sorted(folder.glob("*.json"))}


def splice(readme: str, results: Mapping[str, Mapping[str, Any]]) -> str:
    """The README with its results table replaced by the `headline` rows of the results that it shows."""
    rows = [row for name in SHOWN if name in results for row in results[name]["headline"]]
    table = ["| what | measured |", "| --- | --- |", *(f"| {what} | {value} |" for what, value in rows)]
    before, rest = readme.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n" + "\n".join(table) + f"\n{END}{after}"


def main() -> int:
    """Write or check the page and the README's table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit with 1 when a page is out of date")
    arguments = parser.parse_args()
    results = read_results()
    pages = {PAGE: render(results), README: splice(README.read_text(), results)}
    stale = [path for path, text in pages.items() if not path.exists() or path.read_text() != text]
    if arguments.check:
        for path in stale:
            sys.stderr.write(f"{path.relative_to(ROOT)} is out of date: run `python -m benchmarks.report`\n")
        return 1 if stale else 0
    for path, text in pages.items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
