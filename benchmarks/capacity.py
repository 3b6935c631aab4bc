"""What does a heavier scorer at the nodes buy at equal latency? (HSNN arXiv 2408.06653, table 1.)

Usage: `python -m benchmarks.capacity [--data NAME] [--seeds N] [--sources DIR] [--cache DIR] [--json FILE]`.
Flat rows scan every ad; rows with levels search by the beam that finds most within 2 % of their scan. `ne` is the ad
scorer's normalised entropy on the judged day's impressions (positives-only sets have none), `recall` what the first
ten ads are worth as in `benchmarks.index_quality`, `ms` the median of a request in batches of 64, without the user's
towers. Cells are kept in the cache. The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.baselines import dot_config, two_tower
from benchmarks.index_cells import Cell, K, Variant, run_cell
from benchmarks.result import ROOT, make_result, publish
from benchmarks.tuned import suffix, tuned
from benchmarks.worlds import NAMES, open_world
from models import metrics
from models.data import FrameData
from models.index.audit import draw_requests
from models.index.config import RetrievalConfig
from models.index.cost import candidate_cost
from models.index.monn import RetrievalModel
from models.index.publish import Index
from models.index.search import beam_search, exact_search

SIZES = {"S": (2, 8), "M": (4, 16), "L": (12, 64)}
"""Size -> user vectors and hidden units of a level's OverArch."""
ROWS = ("two tower", "S", "M", "L", "S S", "M S", "L S", "S S S", "L M S")
"""Levels from the root to the ads; a single size is a flat scan."""
NODES = {2: (32,), 3: (8, 8)}
"""Levels with the ads -> sizes of the levels of nodes."""
ROW_COST = 0.02
TIMED, REPEATS = 64, 15


def variant_of(row: str) -> Variant:
    """The variant of a row of the table."""
    if row == "two tower":
        return Variant("two_tower", row, dot_config, with_index=False, build=two_tower)
    sizes = row.split()
    name = f"capacity_{row.replace(' ', '')}"
    if len(sizes) == 1:
        return Variant(name, f"flat {row}", lambda config: _sized(config, [*"SS", row]), with_index=False)
    return Variant(name, row, lambda config: _sized(config, sizes))


def _sized(config: RetrievalConfig, sizes: list[str]) -> RetrievalConfig:
    vectors, hidden = zip(*(SIZES[size] for size in sizes), strict=True)
    return replace(config, level_sizes=NODES[len(sizes)], num_user_vectors=vectors, hidden=hidden)


def measured(
    model: RetrievalModel, index: Index, data: FrameData, beams: Mapping[float, tuple[int, ...]]
) -> dict[str, Any]:
    """Normalised entropy of the ad scorer, FLOPs of a request, and milliseconds of its search."""
    cost, num_ads = candidate_cost(model.config, len(data.schema.groups)), index.num_ads
    (requests,) = draw_requests(data, (min(TIMED, data.num_rows),), seed=1)
    with torch.no_grad():
        rows = torch.from_numpy(requests.row_B)
        state = model.user_state(data.user_batch(rows), data.ads)
        beam = beams.get(ROW_COST)
        if beam is None:
            flops, ms = float(num_ads * cost.ad), _ms(lambda: exact_search(model, index, state, K, ad_scorer=True))
        else:
            found = beam_search(model, index, state, beams=beam, k=K)
            flops = float(found.cost_B.mean()) * num_ads * cost.ad
            ms = _ms(lambda: beam_search(model, index, state, beams=beam, k=K))
    return {"ne": _entropy(model, data), "flops": flops, "ms": ms / state.num_rows}


def _ms(search: Callable[[], object]) -> float:
    search()
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        search()
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times)


@torch.no_grad()
def _entropy(model: RetrievalModel, data: FrameData) -> float | None:
    """NE of the ad scorer on all impressions of the day; None without impressions."""
    if data.drawn_negatives:
        return None
    over, parts = model.level(model.config.num_levels), []
    rows_R = data.rows()
    rows_R = rows_R[data.mature_RT[rows_R, 0] > 0]
    for rows_B in torch.split(rows_R, 2048):
        batch = data.batch(rows_B)
        trunk_BT, interest = model.trunk(batch.user, data.ads)
        code_B1 = batch.ad_code_B[:, None]
        feature_FB1 = torch.cat([interest.own(data.ads.group_NG[code_B1]), interest.seen(code_B1)])
        vector_BQd = model.ad_vectors(data.ads, batch.ad_code_B)[:, None]
        parts.append(over.own(over.state(trunk_BT), vector_BQd, feature_FB1)[:, 0])
    logit_R = torch.cat(parts).double().numpy() + data.judged_offset
    return metrics.normalised_entropy(data.label_RT[rows_R, 0].numpy(), logit_R)


def row_of(cells: Sequence[Cell]) -> dict[str, float]:
    """One row of the table: means over seeds."""
    flat = "curve" not in cells[0].values
    what = f"scorer@{K}" if flat else f"cost.{ROW_COST}"
    recall = [float(np.nansum(c.arrays[what]) / c.arrays.get(f"best@{K}", np.ones(len(c.arrays["user"]))).sum())
              for c in cells]  # fmt: skip
    row = {name: float(np.mean([c.values[name] for c in cells])) for name in ("flops", "ms", "train_s")}
    if cells[0].values["ne"] is not None:
        row["ne"] = float(np.mean([c.values["ne"] for c in cells]))
    return {"recall": float(np.mean(recall)), **row}


def main() -> int:
    """Compute what the cache lacks, print the table, then one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="laptop", choices=NAMES)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--sources", type=Path, help="folder of the real data sets")
    parser.add_argument("--cache", type=Path, default=ROOT / "data" / "index_quality")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    world, rows = open_world(arguments.data, arguments.cache, arguments.sources), {}
    for row in ROWS:
        cells, variant = [], variant_of(row)
        changed = suffix(tuned(variant.family, arguments.data))
        for seed in range(arguments.seeds):
            path = arguments.cache / "capacity" / f"{arguments.data}-{row.replace(' ', '')}-{seed}{changed}"
            if not Cell.exists(path):
                run_cell(world, variant, seed, further=measured).save(path)
            cells.append(Cell.load(path))
        rows[row] = {name: round(value, 5) for name, value in row_of(cells).items()}
        sys.stdout.write(f"{row:<10} {rows[row]}\n")
        sys.stdout.flush()
    heavy, light = rows["L M S"], rows["S S S"]
    values = {
        "large_at_nodes_vs_small": round(heavy["recall"] / light["recall"], 4),
        "its_ms_over_small": round(heavy["ms"] / light["ms"], 4), "data": arguments.data, "rows": rows,
    }  # fmt: skip
    question = "What does a heavier scorer at the nodes buy at equal latency?"
    publish(make_result(question, values, seed=0, headline=[]), arguments.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
