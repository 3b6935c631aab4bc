"""Compare the simulated world with public logs, and write what was found to a page.

`python -m feature_repo.compare_world --data DIR --page docs/simulator.md` reads `DIR/kuairand_pure_part` and
`DIR/ipinyou_samples`. A row of the comparison has a tolerance that was stated beforehand; a row without one is
shown for orientation because the logs differ there by nature.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from feature_repo.simulator.config import preset
from feature_repo.simulator.source import SimulatorSource

logger = logging.getLogger(__name__)

SESSION_GAP_S = 1800.0


@dataclass(frozen=True)
class Log:
    """A log of impressions as arrays of equal length; times in epoch seconds, local to the log's days."""

    user: NDArray[np.int64]
    item: NDArray[np.int64]
    time_s: NDArray[np.float64]
    click_rate: float


@dataclass(frozen=True)
class Row:
    """One compared number. `tolerance` bounds the absolute difference; None: shown only."""

    name: str
    simulator: float
    public: float
    source: str
    tolerance: float | None

    @property
    def difference(self) -> float:
        """Absolute difference of the two numbers."""
        return abs(self.simulator - self.public)

    @property
    def passed(self) -> bool | None:
        """Whether the row keeps its tolerance; None where none is stated."""
        return None if self.tolerance is None else self.difference <= self.tolerance


@dataclass(frozen=True)
class WorldFigures:
    """What a world is, in numbers."""

    users: int
    ads: int
    impressions: int
    engagements: int
    outcomes: int
    click_rate: float
    oracle_entropy: float
    """Normalised entropy of the oracle on the logged impressions: no model can do better."""


def top_share(ids: NDArray[np.int64], share: float) -> float:
    """Share of rows that belong to the most frequent `share` of the ids."""
    counts = np.sort(np.unique(ids, return_counts=True)[1])[::-1]
    return float(counts[: max(int(len(counts) * share), 1)].sum() / counts.sum())


def activity_spread(users: NDArray[np.int64]) -> float:
    """Standard deviation of the log of rows per user."""
    return float(np.log(np.unique(users, return_counts=True)[1]).std())


def short_gap_share(users: NDArray[np.int64], time_s: NDArray[np.float64]) -> float:
    """Share of the gaps between consecutive requests of a user that are shorter than half an hour.

    Rows of a user with equal times are one request.
    """
    return float((_gaps(users, time_s) < SESSION_GAP_S).mean())


def thinned(log: Log, per_user: float, seed: int) -> Log:
    """A random part of a log with `per_user` rows per user on average (all of it where it has fewer)."""
    rate = per_user * len(np.unique(log.user)) / len(log.user)
    keep = np.random.default_rng(seed).random(len(log.user)) < rate
    return Log(log.user[keep], log.item[keep], log.time_s[keep], log.click_rate)


def hour_distance(left: NDArray[np.float64], right: NDArray[np.float64]) -> float:
    """Total variation distance of the hour-of-day profiles of two arrays of local times."""
    profiles = [np.bincount((t % 86_400 // 3600).astype(np.int64), minlength=24) / len(t) for t in (left, right)]
    return float(np.abs(profiles[0] - profiles[1]).sum() / 2)


def normalised_entropy(p: NDArray[np.float64]) -> float:
    """Expected log loss of the true probabilities over that of their mean."""
    base = p.mean()
    loss = -(p * np.log(p) + (1 - p) * np.log1p(-p)).mean()
    return float(loss / -(base * np.log(base) + (1 - base) * np.log1p(-base)))


def read_simulator(source: SimulatorSource) -> tuple[Log, WorldFigures, NDArray[np.float64]]:
    """All impressions of a world, its figures, and the seconds between organic events within sessions."""
    users, items, times, clicks, gaps = [], [], [], [], []
    counts = {"impressions": 0, "engagements": 0, "outcomes": 0}
    for day in source.facts.days:
        for table, rows in source.tables(day):
            counts[table] = counts.get(table, 0) + rows.num_rows
            if table == "impressions":
                users.append(rows["user_id"].to_numpy())
                items.append(rows["ad_id"].to_numpy())
                times.append(rows["timestamp"].cast(pa.int64()).to_numpy() / 1e6)
            elif table == "engagements":
                gaps.append(_session_gaps(rows))
            elif table == "oracle":
                clicks.append(rows["click"].to_numpy())
    p = np.concatenate(clicks)
    log = Log(np.concatenate(users), np.concatenate(items), np.concatenate(times), float(p.mean()))
    figures = WorldFigures(
        users=source.facts.max_users,
        ads=source.facts.max_ads,
        impressions=counts["impressions"],
        engagements=counts["engagements"],
        outcomes=counts["outcomes"],
        click_rate=log.click_rate,
        oracle_entropy=normalised_entropy(p),
    )
    return log, figures, np.concatenate(gaps)


def _session_gaps(rows: pa.Table) -> NDArray[np.float64]:
    gaps = _gaps(rows["user_id"].to_numpy(), rows["timestamp"].cast(pa.int64()).to_numpy() / 1e6)
    return np.asarray(gaps[gaps < SESSION_GAP_S])


def _gaps(users: NDArray[np.int64], time_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """Positive seconds between consecutive rows of the same user."""
    order = np.lexsort((time_s, users))
    gaps = np.diff(time_s[order])[users[order][1:] == users[order][:-1]]
    return np.asarray(gaps[gaps > 0])


def read_kuairand(data: Path) -> tuple[Log, NDArray[np.float64], NDArray[np.int64]]:
    """KuaiRand's impressions, play times in seconds, and lengths of histories before them."""
    folder = data / "kuairand_pure_part"
    with duckdb.connect(config={"threads": 1}) as connection:
        log = connection.sql(
            "SELECT DISTINCT user_id::BIGINT u, item_id::BIGINT i, timestamp_ms / 1000.0 + 8 * 3600 t, is_click::INT c,"
            " play_time_ms / 1000.0 play FROM read_parquet(?)",
            params=[str(folder / "interactions.parquet")],
        ).fetchnumpy()
        lengths = connection.sql(
            "SELECT history_len::BIGINT n FROM read_parquet(?) WHERE history_len IS NOT NULL",
            params=[str(folder / "users.parquet")],
        ).fetchnumpy()["n"]
    click_rate = float(log["c"].mean())
    return Log(log["u"], log["i"], log["t"].astype(np.float64), click_rate), log["play"].astype(np.float64), lengths


def read_ipinyou(data: Path) -> tuple[float, float, NDArray[np.float64]]:
    """Lowest and highest click rate of the iPinYou samples, and the local times of the timed one."""
    with duckdb.connect(config={"threads": 1}) as connection:
        path = str(data / "ipinyou_samples" / "interactions.parquet")
        rates = connection.sql("SELECT avg(click) r FROM read_parquet(?) GROUP BY source", params=[path]).fetchnumpy()
        times = connection.sql(
            "SELECT timestamp_ms / 1000.0 + 8 * 3600 t FROM read_parquet(?) WHERE timestamp_ms IS NOT NULL",
            params=[path],
        ).fetchnumpy()
    return float(rates["r"].min()), float(rates["r"].max()), times["t"].astype(np.float64)


def compare(source: SimulatorSource, data: Path) -> tuple[list[Row], WorldFigures]:
    """Compare a world with KuaiRand and iPinYou below `data`.

    Raises:
        ValueError: a file of the public logs is missing.
    """
    for needed in ("kuairand_pure_part", "ipinyou_samples"):
        if not (data / needed / "interactions.parquet").exists():
            raise ValueError(f"data: {data / needed / 'interactions.parquet'} does not exist")
    log, figures, gaps = read_simulator(source)
    real, play_s, lengths = read_kuairand(data)
    lowest, highest, ipinyou_times = read_ipinyou(data)
    longest = lengths[np.argsort(-lengths)[: len(lengths) // 10]].sum() / lengths.sum()
    kuairand, ipinyou = "KuaiRand-Pure", "iPinYou samples"
    lengths_of = f"{kuairand} history lengths"
    rows = [
        Row("click rate: middle of the public range", log.click_rate, (lowest + highest) / 2, ipinyou, 0.0162),
        Row("click rate", log.click_rate, real.click_rate, f"{kuairand} (auto-played video, no ads)", None),
        *_popularity_rows(log, real, kuairand),
        Row("log deviation of rows per user", activity_spread(log.user), float(np.log(lengths).std()), lengths_of, 0.2),
        Row("impressions of the top 10 % of users", top_share(log.user, 0.1), float(longest), lengths_of, 0.08),
        _gap_row(log, real, kuairand),
        Row(
            "median log10 seconds between events of a session", _median_log(gaps), _median_log(play_s),
            f"{kuairand} play times", 0.30,
        ),
        Row("hour profile: total variation distance", hour_distance(log.time_s, real.time_s), 0.0, kuairand, 0.05),
        Row("hour profile: total variation distance", hour_distance(log.time_s, ipinyou_times), 0.0, ipinyou, None),
    ]  # fmt: skip
    return rows, figures


def _popularity_rows(log: Log, real: Log, name: str) -> list[Row]:
    return [
        Row(f"impressions of the top {share:.0%} of items", top_share(log.item, share), top_share(real.item, share),
            name, tolerance)
        for share, tolerance in ((0.01, 0.08), (0.10, 0.10))
    ]  # fmt: skip


def _gap_row(log: Log, real: Log, name: str) -> Row:
    thin = thinned(log, len(real.user) / len(np.unique(real.user)), seed=0)
    mine, other = short_gap_share(thin.user, thin.time_s), short_gap_share(real.user, real.time_s)
    return Row("gaps under 30 minutes, thinned to the same rate", mine, other, name, 0.10)


def _median_log(seconds: NDArray[np.float64]) -> float:
    return float(np.median(np.log10(np.maximum(seconds, 0.1))))


def render(rows: Sequence[Row], worlds: dict[str, WorldFigures]) -> str:
    """The page: how the world works, its sizes, and the comparison."""
    sizes = [
        f"| `{name}` | {w.users:,} | {w.ads:,} | {w.impressions:,} | {w.engagements:,} | {w.outcomes:,} | "
        f"{w.click_rate:.4f} | {w.oracle_entropy:.3f} |"
        for name, w in worlds.items()
    ]
    verdict = {True: "yes", False: "**no**", None: "shown only"}
    compared = [
        f"| {r.name} | {r.simulator:.3f} | {r.public:.3f} | {r.source} | "
        f"{'' if r.tolerance is None else f'{r.tolerance:.3f}'} | {verdict[r.passed]} |"
        for r in rows
    ]
    return (Path(__file__).parent / "simulator" / "page.md").read_text().format(
        sizes="\n".join(sizes), rows="\n".join(compared)
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line: write the page; exit 1 when a tolerance is broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of the public logs")
    parser.add_argument("--page", type=Path, required=True, help="Markdown file to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--preset", default="laptop", help="world that is compared")
    chosen = parser.parse_args(arguments)
    rows, figures = compare(SimulatorSource(preset(chosen.preset), chosen.seed), chosen.data)
    worlds = {chosen.preset: figures}
    if chosen.preset != "tiny":
        worlds = {"tiny": read_simulator(SimulatorSource(preset("tiny"), chosen.seed))[1], **worlds}
    chosen.page.write_text(render(rows, worlds))
    for row in rows:
        logger.info("%s: %.4f against %.4f (%s)", row.name, row.simulator, row.public, row.passed)
    return int(any(row.passed is False for row in rows))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    raise SystemExit(main())
