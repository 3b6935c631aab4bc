"""Is a jointly learned index better than one bolted on afterwards, and what does each of its parts do?

Usage: `python -m benchmarks.index_quality [--data NAME ...] [--variants NAME ...] [--seeds N] [--sources DIR]
[--cache DIR] [--json FILE] [--validation] [--set NAME=VALUE ...]`. Every cell (data set, variant, seed) is computed
once and kept in the cache; a stopped run goes on, and rows that lose stay in the table. `--set` replaces values of
the training, for choices on validation days. The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.index_cells import COSTS, VARIANTS, Cell, Floats, K, run_cell
from benchmarks.result import ROOT, make_result, publish
from benchmarks.tuned import suffix, tuned
from benchmarks.worlds import NAMES, World, missing, open_world
from models.metrics import Interval, bootstrap_ratio

LEARNERS = ("separate", "em", "random", "natural")
Cells = Mapping[tuple[str, int], Cell]
MARGIN = 0.02


def cell_path(cache: Path, data: str, variant: str, seed: int, validation: bool, values: Mapping[str, Any]) -> Path:
    """Where a cell is kept: choices on validation days apart from what is reported."""
    changed = suffix({**tuned(VARIANTS[variant].family, data), **values})
    return cache / ("validation" if validation else "cells") / f"{data}-{variant}-{seed}{changed}"


def compute(
    data: str, variants: Sequence[str], seeds: Sequence[int], arguments: argparse.Namespace, values: Mapping[str, Any]
) -> dict[tuple[str, int], Cell]:
    """All cells of a data set, from the cache or by training."""
    cells: dict[tuple[str, int], Cell] = {}
    world: World | None = None
    for seed in seeds:
        for name in variants:
            path = cell_path(arguments.cache, data, name, seed, arguments.validation, values)
            if not Cell.exists(path):
                world = world or open_world(data, arguments.cache, arguments.sources, validation=arguments.validation)
                cell = run_cell(world, VARIANTS[name], seed, values)
                cell.save(path)
                sys.stdout.write(f"{data} {name} {seed}: {_line(cell)}\n")
                sys.stdout.flush()
            cells[name, seed] = Cell.load(path)
    return cells


def _line(cell: Cell) -> str:
    scorer = value_of(cell, f"scorer@{K}")
    parts = [f"scorer {scorer:.4f}"]
    if f"exact@{K}" in cell.arrays:
        parts.append(f"exact {value_of(cell, f'exact@{K}'):.4f}")
        parts += [f"coverage {p['coverage']:.3f} at {p['cost']:.2%}" for p in cell.values["curve"][-1:]]
        parts.append(f"area {np.nanmean(area(cell)):.4f}, leaves {cell.values['leaves']}")
    return ", ".join([*parts, f"{cell.values['seconds']:.0f} s"])


def value_of(cell: Cell, name: str) -> float:
    """Mean share of clicked ads found, or expected clicks over those of the best answer."""
    value_B, best_B = cell.arrays[name], cell.arrays.get(f"best@{name.split('@')[-1]}")
    return float(np.nanmean(value_B) if best_B is None else value_B.sum() / best_B.sum())


def area(cell: Cell) -> Floats:
    """Area [B] under worth against cost over the grid, per unit of cost; 0 where no beam is that cheap."""
    zero_B = np.zeros_like(cell.arrays["user"])
    points_CB = np.stack([cell.arrays.get(f"cost.{c}", zero_B) for c in COSTS])
    step_C1 = np.diff(COSTS)[:, None]
    total_B: Floats = ((points_CB[1:] + points_CB[:-1]) / 2 * step_C1).sum(0) / (COSTS[-1] - COSTS[0])
    return total_B


def against(cells: Cells, left: str, right: str, what: str) -> Interval | None:
    """Ratio of two variants' worth of the same requests, pooled over seeds, whole users drawn; `what` may be `area`."""
    numerator, denominator, user = [], [], []
    for (name, seed), cell in cells.items():
        other = cells.get((right, seed))
        if name != left or other is None:
            continue
        mine_B, theirs_B = _worth(cell, what), _worth(other, what)
        known_B = ~np.isnan(mine_B) & ~np.isnan(theirs_B)
        numerator.append(mine_B[known_B])
        denominator.append(theirs_B[known_B])
        user.append(cell.arrays["user"][known_B])
    if not numerator or not any(x.any() for x in denominator):
        return None
    drawn = np.random.default_rng(0)
    return bootstrap_ratio(
        *(np.concatenate(x) for x in (numerator, denominator, user)), generator=drawn, confidence=0.9
    )


def _worth(cell: Cell, what: str) -> Floats:
    if what == "area":
        return area(cell)
    return cell.arrays.get(what, np.zeros_like(cell.arrays["user"]))


def table(cells: Cells, variants: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Variant -> means over seeds, with the spread of the scorer."""
    rows: dict[str, dict[str, Any]] = {}
    for name in variants:
        mine = [cell for (variant, _), cell in sorted(cells.items()) if variant == name]
        scorers = [value_of(cell, f"scorer@{K}") for cell in mine]
        row: dict[str, Any] = {"seeds": len(mine), "scorer@10": np.mean(scorers), "spread": np.std(scorers)}
        row["scorer@100"] = np.mean([value_of(cell, "scorer@100") for cell in mine])
        if all("curve" in cell.values for cell in mine):
            row["exact@10"] = np.mean([value_of(cell, "exact@10") for cell in mine])
            row |= {f"coverage at {c:.2%}": np.mean([_coverage(cell, c) for cell in mine]) for c in (0.01, 0.02, 0.05)}
            row["area"] = np.mean([np.nanmean(area(cell)) for cell in mine])
            row["leaves"] = np.mean([cell.values["leaves"] for cell in mine])
            row["alive"] = np.mean([_alive(cell) for cell in mine])
            row["largest leaf over mean"] = max(_largest(cell) for cell in mine)
        row["train_s"] = np.mean([cell.values["train_s"] for cell in mine])
        rows[name] = {key: round(float(value), 4) for key, value in row.items()}
    return rows


def _coverage(cell: Cell, cost: float) -> float:
    found = [point["coverage"] for point in cell.values["curve"] if point["limit"] == cost]
    return float(found[0]) if found else 0.0


def _alive(cell: Cell) -> float:
    first = cell.values["health"]["levels"][0]
    return float(first["num_used"]) / float(first["num_possible"])


def _largest(cell: Cell) -> float:
    last = cell.values["health"]["levels"][-1]
    return float(last["largest_share"]) * float(last["num_used"])


def comparisons(cells: Cells) -> dict[str, list[float]]:
    """Ratios with their one-sided 95 % bounds: estimate, low, high."""
    wanted = [("joint", "none", f"scorer@{K}")]
    wanted += [("joint", learner, "area") for learner in LEARNERS]
    wanted += [("joint", learner, f"cost.{COSTS[-1]}") for learner in LEARNERS[:2]]
    wanted += [("joint", rival, f"scorer@{k}") for rival in ("two_tower", "mixture") for k in (10, 100)]
    found = {f"{left} over {right}, {what}": against(cells, left, right, what) for left, right, what in wanted}
    return {name: [round(x, 4) for x in (i.estimate, i.low, i.high)] for name, i in found.items() if i is not None}


def summary(per_data: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The worst over the data sets of what is claimed."""

    def worst(name: str, place: int) -> float | None:
        known = [data["comparisons"][name][place] for data in per_data.values() if name in data["comparisons"]]
        return min(known) if known else None

    return {
        "scorer_kept_bound": worst("joint over none, scorer@10", 1),
        "scorer_noninferior": (worst("joint over none, scorer@10", 1) or 0.0) >= 1.0 - MARGIN,
        "area_over_separate": worst("joint over separate, area", 0),
        "area_over_em": worst("joint over em, area", 0),
        "gain_vs_two_tower": worst("joint over two_tower, scorer@10", 0),
    }


def parse(values: Sequence[str]) -> dict[str, Any]:
    """`NAME=VALUE` pairs, values as JSON."""
    pairs = [value.partition("=") for value in values]
    return {name: json.loads(value) for name, _, value in pairs}


def main() -> int:
    """Compute what the cache lacks, print the tables, then one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", default=["laptop", "beauty", "beauty_shuffled"], choices=NAMES)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=sorted(VARIANTS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--sources", type=Path, help="folder of the real data sets")
    parser.add_argument("--cache", type=Path, default=ROOT / "data" / "index_quality")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--validation", action="store_true", help="judge the day before the last one: for choices")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="values of the training")
    arguments = parser.parse_args()
    started, per_data, skipped = time.perf_counter(), {}, {}
    for data in arguments.data:
        reason = missing(data, arguments.sources)
        if reason is not None:
            skipped[data] = reason
            continue
        cells = compute(data, arguments.variants, range(arguments.seeds), arguments, parse(arguments.set))
        per_data[data] = {"variants": table(cells, arguments.variants), "comparisons": comparisons(cells)}
    values = {**summary(per_data), "per_data": per_data, "skipped": skipped, "what": _meanings(arguments.variants)}
    sys.stdout.write(f"{time.perf_counter() - started:.0f} s\n")
    question = "Is a jointly learned index better than one bolted on afterwards, and what does each of its parts do?"
    publish(make_result(question, values, seed=0, headline=[]), arguments.json)
    return 0


def _meanings(variants: Sequence[str]) -> dict[str, str]:
    return {name: VARIANTS[name].what for name in variants}


if __name__ == "__main__":
    raise SystemExit(main())
