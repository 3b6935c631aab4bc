"""`make ui`: the Dagster UI and its daemon on a home, with every finished run in it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from dagster_project.lib.instance import prepare
from dagster_project.lib.settings import read_settings


def main(arguments: Sequence[str] | None = None) -> None:
    """Replace this process by `dg dev` on the home's instance."""
    parser = argparse.ArgumentParser(prog="python -m dagster_project.ui", description=__doc__)
    parser.add_argument("--port", type=int, default=3000, help="port on 127.0.0.1")
    options = parser.parse_args(arguments)
    settings = read_settings()
    prepare(settings.home)
    os.environ["MIRACH_HOME"] = str(settings.home)
    os.chdir(Path(__file__).parents[1])
    dg = Path(sys.executable).with_name("dg")
    os.execv(dg, [str(dg), "dev", "--host", "127.0.0.1", "--port", str(options.port)])


if __name__ == "__main__":
    main()
