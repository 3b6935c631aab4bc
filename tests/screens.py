"""The screens of a home in a headless browser: what must be on them, and pictures of them.

`python -m tests.screens --home data/simulator --to docs/images` writes the pictures that the documentation shows
(`make screens`). The tests of the screens open the same pages and wait for the same things.
"""

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHROMIUM = Path("/usr/bin/chromium")
ROOT = Path(__file__).parents[1]
PATIENCE_MS = 90_000
MAX_BYTES = 300_000
PICTURES = """number => [...document.querySelectorAll('canvas, svg')]
    .filter(drawing => drawing.getBoundingClientRect().width > 200).length >= number"""


@dataclass(frozen=True)
class Screen:
    """A page: where it is, which texts it shows when it is whole, and what must be gone by then."""

    name: str
    path: str
    shows: tuple[str, ...]
    pictures: int = 0
    """Drawings that the page must hold at least."""
    clicks: tuple[tuple[str, int], ...] = ()
    """Buttons that are pressed first: text, and which of the elements with that text."""


DAGSTER = (
    Screen(
        "dagster_lineage", "/assets/serving/promoted_release?view=lineage&lineageScope=upstream&lineageDepth=3",
        ("promoted_release", "hierarchical_index", "training_frame", "impressions"),
    ),
    Screen("dagster_asset", "/assets/gem/evaluation?view=overview", ("evaluation", "ne", "work_seconds")),
    Screen(
        "dagster_plots", "/assets/gem/evaluation?view=overview", ("auc", "baseline_ne"), pictures=2,
        clicks=(("Plots", 0), ("Events", 1)),
    ),
    Screen("dagster_checks", "/assets/index/hierarchical_index?view=checks", ("health", "recall_against_exact")),
)  # fmt: skip


def free_port() -> int:
    """A loopback port that was free a moment ago."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@contextlib.contextmanager
def serving(command: Sequence[str], home: Path, ready: str) -> Iterator[None]:
    """Run a server on a home until the end of the block; `ready` is the URL that answers when it is up."""
    environment = {**os.environ, "MIRACH_HOME": str(home), "DO_NOT_TRACK": "1", "DAGSTER_DISABLE_TELEMETRY": "1"}
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            list(command), cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            _wait(process, ready, output)
            yield
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait(process: subprocess.Popen[bytes], ready: str, output: Any) -> None:
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(ready, timeout=2):
                return
        except OSError:
            time.sleep(0.5)
    output.seek(0)
    raise RuntimeError(f"{ready} did not come up: {output.read()[-3000:]}")


@contextlib.contextmanager
def dagster_ui(home: Path) -> Iterator[str]:
    """`make ui` on a free port; its URL."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with serving([sys.executable, "-m", "dagster_project.ui", "--port", str(port)], home, f"{url}/server_info"):
        yield url


@contextlib.contextmanager
def evidently_ui(home: Path) -> Iterator[str]:
    """`make monitor` on a free port; its URL."""
    from monitoring.workspace import ui_command

    port = free_port()
    program, *arguments = ui_command(home, port)
    command = [str(Path(sys.executable).with_name(program)), *arguments]
    url = f"http://127.0.0.1:{port}"
    with serving(command, home, f"{url}/api/version"):
        yield url


def dashboards(home: Path) -> list[Screen]:
    """A screen for each project of the Evidently workspace, with the titles of its panels."""
    from evidently.ui.workspace import Workspace

    from monitoring.workspace import DASHBOARDS, workspace_of

    opened = Workspace.create(str(workspace_of(home)))
    named = {project.name: project.id for project in opened.list_projects()}
    return [
        Screen(
            f"evidently_{topic}", f"/projects/{named[f'mirach {topic}']}", tuple(p.title for p in dashboard.panels),
            pictures=3,
        )
        for topic, dashboard in DASHBOARDS.items()
        if f"mirach {topic}" in named
    ]  # fmt: skip


def explained(home: Path) -> list[Screen]:
    """The newest explain page of an index; its address is below the home."""
    pages = sorted((home / "reports" / "index").glob("explain-*.html"))
    shows = ("Purity", "learned tree", "Level 1: the largest")
    return [Screen("index_explained", f"/reports/index/{page.name}", shows) for page in pages[-1:]]


@contextlib.contextmanager
def browser() -> Iterator[Any]:
    """A page of a headless Chromium."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield opened.new_page(viewport={"width": 1400, "height": 900}, bypass_csp=True)
        opened.close()


def visit(page: Any, url: str, screen: Screen, folder: Path) -> Path:
    """Open a screen, wait for everything that it shows, and take its picture."""
    page.goto(url + screen.path, wait_until="domcontentloaded")
    for text, number in screen.clicks:
        button = page.get_by_text(text, exact=True).nth(number)
        button.wait_for(state="visible", timeout=PATIENCE_MS)
        button.click()
    for text in screen.shows:
        page.wait_for_function(
            "text => document.body.innerText.toLowerCase().includes(text.toLowerCase())", arg=text, timeout=PATIENCE_MS
        )
    page.wait_for_function("() => !document.body.innerText.includes('Loading')", timeout=PATIENCE_MS)
    if screen.pictures:
        page.wait_for_function(PICTURES, arg=screen.pictures, timeout=PATIENCE_MS)
    page.wait_for_timeout(1500)
    path = folder / f"{screen.name}.png"
    page.screenshot(path=str(path))
    return path


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the pictures of a finished home."""
    parser = argparse.ArgumentParser(prog="python -m tests.screens", description=__doc__)
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--to", type=Path, default=ROOT / "docs" / "images")
    options = parser.parse_args(arguments)
    home = options.home.resolve()
    options.to.mkdir(parents=True, exist_ok=True)
    with browser() as page:
        with dagster_ui(home) as url:
            paths = [visit(page, url, screen, options.to) for screen in DAGSTER]
        with evidently_ui(home) as url:
            paths += [visit(page, url, screen, options.to) for screen in dashboards(home)]
        paths += [visit(page, home.as_uri(), screen, options.to) for screen in explained(home)]
    for path in paths:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise ValueError(f"{path}: {size} bytes are more than {MAX_BYTES}")
        sys.stdout.write(f"{path} {size / 1000:.0f} kB\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
