"""`make erase USER=...`: remove a user from a home. Exit code 0 done, 2 the arguments or settings are wrong."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console

from dagster_project.lib.settings import read_settings
from dagster_project.run import only_one

console = Console(highlight=False)
errors = Console(stderr=True, highlight=False, style="red")


def main(arguments: Sequence[str] | None = None) -> int:
    """Erase, and say what was removed and what the next run will make again."""
    parser = argparse.ArgumentParser(prog="python -m dagster_project.erase", description=__doc__)
    parser.add_argument("--user", type=int, required=True, help="user_id as the source gives it")
    options = parser.parse_args(arguments)
    settings = read_settings()
    if not (settings.home / "settings.json").exists():
        errors.print(f"{settings.home}: nothing was made here yet", markup=False)
        return 2
    from dagster_project.definitions import defs
    from dagster_project.lib.erasure import erase_user
    from dagster_project.lib.instance import open_instance
    from dagster_project.lib.resources import Home

    try:
        with only_one(settings.home), open_instance(settings.home) as instance:
            report = erase_user(Home.of(settings), instance, defs().resolve_asset_graph(), options.user)
    except ValueError as error:
        errors.print(str(error), markup=False)
        return 2
    console.print(f"erased a user from {settings.home}")
    for name, value in asdict(report).items():
        console.print(f"  {name.replace('_', ' '):<20} {'none' if value is None else value}")
    console.print("`make run` makes again what depended on these rows; the release that serves goes on serving")
    return 0


if __name__ == "__main__":
    sys.exit(main())
