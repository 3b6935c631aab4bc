"""One cell of the index benchmark: train a variant on a data set, judge it, and keep what its requests got.

A cell is a JSON file and an array file in the cache; it is computed once, so that a stopped benchmark goes on.

Shape legend: B requests, K results, N ads, C points of the cost grid.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from benchmarks.baselines import dot_config, mixture_of_logits, two_tower, without_residual
from benchmarks.tuned import FAMILIES, tuned
from benchmarks.worlds import World
from models.data import FrameData
from models.index.audit import (
    Answers,
    Requests,
    Scan,
    answer,
    beam_sweep,
    choices_to_sweep,
    choose_beams,
    draw_requests,
    requests_at,
    true_clicks,
)
from models.index.config import RetrievalConfig, RetrievalTraining
from models.index.health import index_health
from models.index.joint import train_retrieval
from models.index.monn import RetrievalModel
from models.index.publish import Index, publish
from models.metrics import recall_at_k
from models.training.presets import open_preset

COSTS = (0.0025, 0.005, 0.01, 0.02, 0.03, 0.05)
"""Grid of costs, as shares of the full scan."""
K, LARGE_K = 10, 100
CALIBRATION, JUDGED, JUDGED_POSITIVES = 200, 4_000, 5_000
JUDGED_PAIRS = 500_000_000
"""Pairs of a judged request and an ad, of which the oracle's probabilities are held in memory."""
LEVELS = {"simulator": (16, 16), "million": (32, 32)}
"""Levels of large worlds; one of 32 nodes, the preset's, suits some ten thousand ads."""
Change = Callable[[RetrievalConfig], RetrievalConfig]
Floats = NDArray[np.float64]
Further = Callable[[RetrievalModel, Index, FrameData, Mapping[float, tuple[int, ...]]], dict[str, Any]]


@dataclass(frozen=True)
class Variant:
    """What is trained: a change of the set's configuration, with or without an index."""

    name: str
    what: str
    change: Change
    with_index: bool = True
    build: Callable[..., RetrievalModel] = RetrievalModel

    @property
    def family(self) -> str:
        """Whose trials chose its training: its own, or those of the scorer that all variants with an index share."""
        return self.name if self.name in FAMILIES else "none"


def _same(config: RetrievalConfig) -> RetrievalConfig:
    return config


def _learner(name: str) -> Change:
    return lambda config: replace(config, learner=name)


def _training(**values: Any) -> Change:
    return lambda config: replace(config, training=replace(config.training, **values))


VARIANTS = {
    v.name: v
    for v in (
        Variant("joint", "model and index under one loss", _same),
        Variant("none", "the same scorer without any loss of an index", _same, with_index=False),
        Variant("separate", "scorer first, k-means after, then the levels (SIL)", _learner("separate")),
        Variant("em", "k-means again every few rounds, paths fixed between", _learner("em")),
        Variant("random", "random tree", _learner("random")),
        Variant("natural", "category, then advertiser", _learner("natural")),
        Variant("mixture", "mixture of logits, exact", _same, with_index=False, build=mixture_of_logits),
        Variant("two_tower", "two tower, exact dot product", dot_config, with_index=False, build=two_tower),
        Variant("no_balance", "joint without the balance loss", _training(balance_weight=0.0)),
        Variant("no_schedule", "joint with alpha fixed at its last value", _training(min_alpha=20.0)),
        Variant("no_warm_up", "joint with the index's full weight at once", _training(index_warm_up=0.0)),
        Variant("no_beam", "joint without negatives from the beam", _training(beam_weight=0.0)),
        Variant("no_follow", "joint whose nodes move by gradients only", _training(follow_rate=0.0)),
        Variant("trunk", "joint whose levels shape the user's trunk, too", _training(trunk_gradient=1.0)),
        Variant("bent", "joint whose levels bend the ads late, by a tenth", _training(level_gradient=0.1)),
        Variant("two_levels", "joint with two levels of 8 x 8 nodes", lambda c: with_levels(c, 8, 8)),
        Variant(
            "no_residual",
            "the same two levels without residuals",
            lambda c: with_levels(c, 8, 8),
            build=without_residual,
        ),
    )
}
"""Name -> variant."""


def with_levels(config: RetrievalConfig, *sizes: int) -> RetrievalConfig:
    """The configuration with other levels, each with the first level's scorer."""
    vectors, hidden = config.num_user_vectors, config.hidden
    return replace(
        config,
        level_sizes=sizes,
        num_user_vectors=(*vectors[:1] * len(sizes), vectors[-1]),
        hidden=(*hidden[:1] * len(sizes), hidden[-1]),
    )


def preset_of(world: World) -> RetrievalConfig:
    """The preset's configuration for a data set, without a teacher."""
    name = "tiny" if world.name == "tiny" else "laptop"
    config = open_preset(name, world.source.facts.name, positives_only=world.positives_only).retrieval
    training: RetrievalTraining = replace(config.training, distillation_weight=0.0)
    config = with_levels(config, *LEVELS.get(world.name, config.level_sizes))
    return replace(config, exclude_seen=not world.source.facts.repeats, training=training)


def configuration(world: World, variant: Variant, values: Mapping[str, Any] | None = None) -> RetrievalConfig:
    """The preset with the training that won the trials of the variant's family, and `values` on top."""
    config = preset_of(world)
    chosen = {**tuned(variant.family, world.name), **(values or {})}
    return replace(config, training=replace(config.training, **chosen))


@dataclass(frozen=True)
class Cell:
    """Figures of a cell, and what each judged request got."""

    values: dict[str, Any]
    arrays: dict[str, Floats]
    """`user`, `best` (what the best answer is worth), `scorer` and `exact` by K and LARGE_K, `cost.<share>`."""

    @staticmethod
    def exists(path: Path) -> bool:
        """Whether a cell was computed."""
        return Path(f"{path}.json").exists()

    def save(self, path: Path) -> None:
        """Write both files, arrays first: the JSON says that the cell is whole."""
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(self.arrays, f"{path}.safetensors")
        Path(f"{path}.json").write_text(json.dumps(self.values, indent=1))

    @classmethod
    def load(cls, path: Path) -> Cell:
        """Read a cell."""
        arrays = load_file(f"{path}.safetensors")
        return cls(json.loads(Path(f"{path}.json").read_text()), arrays)


def run_cell(
    world: World, variant: Variant, seed: int, values: Mapping[str, Any] | None = None,
    further: Further | None = None,
) -> Cell:  # fmt: skip
    """Train and judge one variant; `further` adds figures of the trained model, given its index and its beams."""
    config, days = variant.change(configuration(world, variant, values)), world.days()
    started = time.perf_counter()
    model, report = train_retrieval(
        config, days[0].schema, days, seed=seed, with_index=variant.with_index, build=variant.build
    )
    trained_s = time.perf_counter() - started
    data = world.judged_day()
    calibration, judged = _requests(world, data)
    arrays: dict[str, Floats] = {"user": judged.user_B.astype(np.float64)}
    index = publish(model, data.ads)
    scans: list[tuple[int, ...] | Scan] = ["ad_scorer", "exact"] if variant.with_index else ["ad_scorer"]
    truth_BN = world.truth(data, judged.row_B)
    scanned = answer(model, index, data, judged.row_B, scans, k=LARGE_K)
    worth = _worth(judged, truth_BN)
    arrays |= {f"scorer@{k}": worth(scanned[0], k) for k in (K, LARGE_K)}
    if truth_BN is not None:
        arrays |= {f"best@{k}": _best(truth_BN, k) for k in (K, LARGE_K)}
    figures: dict[str, Any] = {
        "data": world.name, "variant": variant.name, "what": variant.what, "seed": seed, "config": asdict(config),
        "train_s": round(trained_s, 1), "steps": report.num_steps, "ads": index.num_ads, "requests": len(judged.row_B),
    }  # fmt: skip
    beams: dict[float, tuple[int, ...]] = {}
    if variant.with_index:
        beams = _beams(model, index, data, calibration)
        # Asked for K ads only: a beam scores more of them when asked for more.
        answered = answer(model, index, data, judged.row_B, list(beams.values()), k=K)
        found = dict(zip(beams, answered, strict=True))
        arrays |= {f"exact@{k}": worth(scanned[1], k) for k in (K, LARGE_K)}
        arrays |= {f"cost.{cost}": worth(answers, K) for cost, answers in found.items()}
        figures |= _index_figures(model, index, scanned[1].ad_code_BK[:, :K], found, beams)
    if further is not None:
        figures |= further(model, index, data, beams)
    figures["seconds"] = round(time.perf_counter() - started, 1)
    return Cell(figures, arrays)


def _requests(world: World, data: FrameData) -> tuple[Requests, Requests]:
    """Calibration and judged requests of different users; positives-only sets judge the last item of each user."""
    if not world.positives_only:
        num_judged = min(JUDGED, JUDGED_PAIRS // len(data.ads.ad_id_N))
        calibration, judged = draw_requests(data, (CALIBRATION, num_judged), seed=0)
        return calibration, judged
    rows = (data.label_RT[:, 0] > 0.5).nonzero().squeeze(1).numpy()
    rows = np.random.default_rng(0).permutation(rows)
    both = rows[:CALIBRATION], rows[CALIBRATION : CALIBRATION + JUDGED_POSITIVES]
    return requests_at(data, both[0]), requests_at(data, both[1])


def _beams(model: RetrievalModel, index: Index, data: FrameData, calibration: Requests) -> dict[float, tuple[int, ...]]:
    """Best beams within every cost of the grid that admits any, by coverage of the calibration requests."""
    choices = choices_to_sweep(model, index, max_cost=max(COSTS))
    points = beam_sweep(model, index, data, calibration, choices, k=K)
    cheapest = min(point.cost for point in points)
    return {c: choose_beams(points, target=2.0, max_cost=c).beams for c in COSTS if c >= cheapest}


def _worth(judged: Requests, truth_BN: NDArray[Any] | None) -> Callable[[Answers, int], Floats]:
    """What the first k ads of an answer are worth: expected clicks, or the share of the clicked ads."""

    def worth(found: Answers, k: int) -> Floats:
        code_BK = found.ad_code_BK[:, :k]
        return recall_at_k(code_BK, judged.relevant_BM) if truth_BN is None else true_clicks(code_BK, truth_BN)

    return worth


def _best(truth_BN: NDArray[Any], k: int) -> Floats:
    best_B: Floats = np.partition(truth_BN, -k, axis=1)[:, -k:].sum(axis=1).astype(np.float64)
    return best_B


def _index_figures(
    model: RetrievalModel, index: Index, exact_BK: NDArray[np.int64], found: Mapping[float, Answers],
    beams: Mapping[float, tuple[int, ...]],
) -> dict[str, Any]:  # fmt: skip
    """Curve over the cost grid, and health."""
    curve = []
    for limit, answers in found.items():
        coverage = float(np.nanmean(recall_at_k(answers.ad_code_BK, exact_BK)))
        cost = float(answers.cost_B.mean())
        curve.append({"limit": limit, "beams": beams[limit], "cost": cost, "coverage": coverage})
    health = index_health(model, index)
    with torch.no_grad():
        weights = [round(float(w), 4) for w in model.ensemble_weights()[-1]]
    return {"curve": curve, "health": health.to_dict(), "leaves": index.level_sizes[-1], "path_weights": weights}
