"""`make serve`: serve the Bento of the promoted release on the loopback interface until interrupted.

The home of a replayed log (a simulated world, a public data set) ended long ago; its clock then starts at the
newest published cut (`--clock log`), or every user's features would be out of date. A live log wants `--clock wall`.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from bentos.build import bentoml_environment, build_bento
from models.release import read_pointer

HOST = "127.0.0.1"


def command(home: Path, port: int) -> list[str]:
    """The `bentoml serve` command line of the promoted release; its Bento is built when there is none.

    Raises:
        ValueError: nothing was promoted in this home.
    """
    pointer = read_pointer(home / "releases")
    if pointer is None:
        raise ValueError(f"{home}: no release is promoted; `make run` makes and promotes one")
    bento = build_bento(home, pointer.version)
    return [sys.executable, "-m", "bentoml", "serve", str(bento.path), "--host", HOST, "--port", str(port)]


def main() -> int:
    """Replace this process by `bentoml serve`; 2 when there is nothing to serve."""
    parser = argparse.ArgumentParser(description="Serve the promoted release.")
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--port", type=int, default=3001)
    parser.add_argument("--clock", choices=("log", "wall"), default="log")
    arguments = parser.parse_args()
    home = arguments.home.absolute()
    try:
        line = command(home, arguments.port)
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    variables = {**bentoml_environment(home), "MIRACH_HOME": str(home), "MIRACH_CLOCK": arguments.clock}
    os.execve(line[0], line, {"OMP_NUM_THREADS": "1", **variables})


if __name__ == "__main__":
    sys.exit(main())
