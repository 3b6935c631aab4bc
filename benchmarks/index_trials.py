"""Which training suits each scorer? Every scorer of the index benchmark gets as many trials as the others.

Usage: `python -m benchmarks.index_trials [--data NAME ...] [--families NAME ...] [--trials N] [--sources DIR]
[--cache DIR] [--json FILE]`. Trial 0 is the preset as it is; the others multiply its values by factors from one
seeded list, the same for every scorer and data set. All train without an index and are judged on the validation day
by `scorer@10`; the highest wins, of equals the lowest trial. With `--json benchmarks/results/index_trials.json` the
winners are what `benchmarks.index_quality` and `benchmarks.capacity` train with; the file is written whole, so name
all data sets. Every trial is kept in the cache; a stopped run goes on. The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.index_cells import VARIANTS, Cell, K, preset_of, run_cell
from benchmarks.index_quality import value_of
from benchmarks.result import ROOT, make_result, publish
from benchmarks.tuned import FAMILIES, TRIED, suffix
from benchmarks.worlds import World, missing, open_world
from models.index.config import RetrievalTraining

DATA = ("tiny", *dict.fromkeys(TRIED.values()))
"""Data sets with trials of their own; the winners of `tiny` are applied nowhere."""
SEED = 0
STRIDE = 1.1347241384
"""Root of x^6 = x + 1: its negative powers spread points evenly over five axes."""


@dataclass(frozen=True)
class Draw:
    """Factors on the preset's values."""

    learning_rate: float = 1.0
    table_learning_rate: float = 1.0
    dense_decay: float = 1.0
    steps: float = 1.0
    passes: int = 1

    def values(self, preset: RetrievalTraining) -> dict[str, Any]:
        """Values of the training, all of them, so that winners of former trials don't mix in.

        Passes are whole and most presets make one, so that fewer steps come from larger batches: `steps` and `passes`
        together set the batch size. `min_steps` follows the steps, or it would undo them by more passes. Both are
        rounded down: rounded up, they could need one more pass for the last few steps.
        """
        return {
            "learning_rate": _short(preset.learning_rate * self.learning_rate),
            "table_learning_rate": _short(preset.table_learning_rate * self.table_learning_rate),
            "dense_decay": _short(preset.dense_decay * self.dense_decay),
            "batch_size": max(1, int(preset.batch_size * self.passes / self.steps)),
            "epochs": preset.epochs * self.passes,
            "min_steps": int(preset.min_steps * self.steps),
        }


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def draws(count: int) -> list[Draw]:
    """The preset, then drawn factors; a longer list begins with the shorter one.

    From a seeded start, equal steps of irrational length through the space: seven independent draws leave half of some
    axes empty (with this seed, six of them made two passes).
    """
    start, length = np.random.default_rng(SEED).random(5), STRIDE ** -np.arange(1.0, 6.0)
    found = [Draw()]
    for number in range(count - 1):
        rate, table_rate, decay, steps, passes = (float(x) for x in (start + number * length) % 1.0)
        found.append(
            Draw(
                _factor(rate, 1 / 3, 3), _factor(table_rate, 1 / 3, 3), _factor(decay, 0.1, 100),
                _factor(steps, 0.5, 2), 1 if passes < 0.5 else 2,
            )
        )  # fmt: skip
    return found


def _factor(share: float, low: float, high: float) -> float:
    """Log-uniform between both ends."""
    return float(low * (high / low) ** share)


def trial_path(cache: Path, data: str, family: str, trial: int, values: Mapping[str, Any]) -> Path:
    """Where a trial's cell is kept."""
    return cache / "trials" / f"{data}-{family}-{trial}{suffix(values)}"


def search(world: World, family: str, count: int, cache: Path) -> dict[str, Any]:
    """All trials of a family on a data set, from the cache or by training, and the winner."""
    preset, trials = preset_of(world).training, list[dict[str, Any]]()
    for number, draw in enumerate(draws(count)):
        values = draw.values(preset)
        path = trial_path(cache, world.name, family, number, values)
        if not Cell.exists(path):
            run_cell(world, VARIANTS[family], SEED, values).save(path)
        cell = Cell.load(path)
        score = round(value_of(cell, f"scorer@{K}"), 6)
        spent = {name: cell.values[name] for name in ("steps", "train_s")}
        trials.append({"trial": number, f"scorer@{K}": score, "values": values, **spent})
        sys.stdout.write(f"{world.name} {family} {trials[-1]}\n")
        sys.stdout.flush()
    return {"winner": winner([trial[f"scorer@{K}"] for trial in trials]), "trials": trials}


def winner(scores: Sequence[float]) -> int:
    """The trial with the highest score; of equals the lowest."""
    return max(range(len(scores)), key=lambda trial: (scores[trial], -trial))


def _shown(per_data: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """A line for every search: the winner beside the preset."""
    lines = {}
    for data, families in per_data.items():
        for family, found in families.items():
            best, first = found["trials"][found["winner"]], found["trials"][0]
            scores = f"{best[f'scorer@{K}']:.4f}, preset {first[f'scorer@{K}']:.4f}"
            lines[f"{data}, {family}"] = f"trial {found['winner']}: {scores}"
    return lines


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--data", nargs="+", default=list(DATA[1:]), choices=DATA)
    found.add_argument("--families", nargs="+", default=list(FAMILIES), choices=FAMILIES)
    found.add_argument("--trials", type=int, default=8)
    found.add_argument("--sources", type=Path, help="folder of the real data sets")
    found.add_argument("--cache", type=Path, default=ROOT / "data" / "index_quality")
    found.add_argument("--json", type=Path)
    return found


def main() -> int:
    """Compute what the cache lacks, print every trial, then one JSON object as the last line."""
    arguments = parser().parse_args()
    if arguments.trials < 1:
        parser().error(f"--trials: {arguments.trials} is not positive")
    started, per_data, skipped = time.perf_counter(), {}, {}
    for data in arguments.data:
        reason = missing(data, arguments.sources)
        if reason is not None:
            skipped[data] = reason
            continue
        world = open_world(data, arguments.cache, arguments.sources, validation=True)
        per_data[data] = {name: search(world, name, arguments.trials, arguments.cache) for name in arguments.families}
    values = {"trials": arguments.trials, "winners": _shown(per_data), "per_data": per_data, "skipped": skipped}
    sys.stdout.write(f"{time.perf_counter() - started:.0f} s\n")
    publish(make_result("Which training suits each scorer?", values, seed=SEED, headline=[]), arguments.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
