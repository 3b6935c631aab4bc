"""`make retain DAYS=... [APPLY=1]`: list what a home no longer needs, and remove it when told to.

Exit code 0 done, 2 the arguments or settings are wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import groupby

from rich.console import Console
from rich.table import Table

from dagster_project.lib.settings import read_settings
from dagster_project.run import only_one

console = Console(highlight=False)
errors = Console(stderr=True, highlight=False, style="red")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one line a kind and reason; with `--apply` remove what was listed."""
    parser = argparse.ArgumentParser(prog="python -m dagster_project.retain", description=__doc__)
    parser.add_argument("--days", type=int, required=True, help="newest days of the log that keep everything")
    parser.add_argument("--apply", action="store_true", help="remove; without it nothing is touched")
    options = parser.parse_args(arguments)
    settings = read_settings()
    from dagster_project.lib.resources import Home
    from dagster_project.lib.retention import apply, plan

    home = Home.of(settings)
    try:
        with only_one(settings.home):
            items = plan(home, options.days)
            freed = apply(home, items) if options.apply else 0
    except ValueError as error:
        errors.print(str(error), markup=False)
        return 2
    table = Table(title=f"{settings.home}, newest {options.days} days kept", title_justify="left")
    for name in ("what", "why", "number", "MB"):
        table.add_column(name, justify="left" if name in ("what", "why") else "right")
    for (kind, reason), group in groupby(sorted(items, key=lambda i: (i.kind, i.reason)), lambda i: (i.kind, i.reason)):
        chosen = list(group)
        table.add_row(kind, reason, str(len(chosen)), f"{sum(i.num_bytes for i in chosen) / 1e6:.1f}")
    console.print(table)
    total = sum(item.num_bytes for item in items) / 1e6
    if options.apply:
        console.print(f"removed {len(items)} items, {freed / 1e6:.1f} MB")
    else:
        console.print(f"dry run: {len(items)} items, {total:.1f} MB would go; APPLY=1 removes them")
    return 0


if __name__ == "__main__":
    sys.exit(main())
