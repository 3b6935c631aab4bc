"""The whole loop on a small log without impressions that a mapping file describes: events in csv, items in csv."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import run_loop
from tests.feature_repo.test_amazon import write_log as write_reviews

pytestmark = pytest.mark.slow
NUM_USERS, NUM_ITEMS, LENGTH = 240, 90, 9
MAPPING = """\
name = "books"
timezone = "UTC"
grain = "month"
positive = "purchase"
repeats = false
negatives = 3
history_length = 20

[engagements]
files = "events.csv"
user_id = "reader"
item_id = "book"
timestamp = "at"
kind = "event"

[ads]
files = "books.csv"
ad_id = "book"
advertiser_id = "publisher"
category = ["shelf"]
"""


def write_log(folder: Path) -> Path:
    """Readers who go through the books of their shelf in order, with a few that they only view, over five months."""
    rng = np.random.default_rng(0)
    rows = ["reader,book,event,at"]
    for reader in range(NUM_USERS):
        shelf, start = rng.integers(0, 9), rng.integers(0, 10)
        days = np.sort(rng.integers(0, 148, LENGTH))
        for place, day in enumerate(days):
            when = np.datetime64("2026-01-01T08:00:00") + np.timedelta64(int(day), "D") + np.timedelta64(place, "m")
            book = shelf * 10 + (start + place) % 10
            rows.append(f"r{reader},b{book},{'view' if rng.random() < 0.1 else 'purchase'},{when}")
    (folder / "events.csv").write_text("\n".join(rows) + "\n")
    books = ["book,publisher,shelf", *(f"b{book},p{book % 5},s{book // 10}" for book in range(NUM_ITEMS))]
    (folder / "books.csv").write_text("\n".join(books) + "\n")
    path = folder / "mirach.toml"
    path.write_text(MAPPING)
    return path


def test_the_loop_closes_without_impressions(tmp_path: Path) -> None:
    home = tmp_path / "home"
    done = run_loop(home, DATA="generic", DATA_DIR=str(write_log(tmp_path)), PRESET="tiny")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads((home / "reports" / "run.json").read_text())
    results = dict(report["results"])
    assert report["source"] == "books"
    assert results["served requests"] > 20
    assert results["foundation model, NE, drawn negatives"] < 1.2
    assert results["  exact Recall@10"] > 0.3, "nine in ten books follow from the one before"
    assert results["last positives"] > 50
    assert "  exact, order of a day shuffled" not in results, "times are exact: there is no order to shuffle"
    for words in ("exact Recall@10", "drawn negatives", "make serve"):
        assert words in done.stdout


def test_the_order_of_a_day_has_a_control(tmp_path: Path) -> None:
    home = tmp_path / "home"
    folder = write_reviews(tmp_path / "log", users=160, length=6)
    done = run_loop(home, DATA="amazon_beauty", DATA_DIR=str(folder), PRESET="tiny")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    results = dict(json.loads((home / "reports" / "run.json").read_text())["results"])
    assert results["last positives"] == 160
    assert results["  exact Recall@10"] > 0.8, "in the stored order the next item is the next number"
    assert 0.0 <= results["  exact, order of a day shuffled"] <= 1.0
    assert (home / "reordered" / "lake" / "training_frame").exists()
