"""Audit of an index: what it finds of the exact answer, of the labels, of the true clicks, and at what cost.

Four answers are compared for the same requests: the beam, the full scan of the serving score (exact), the full scan
of the ad's own logit (ad scorer, which a model without an index is compared with), and, with an oracle, the
best ads there are. Beams are chosen on calibration requests whose users are not among the audited ones.

Shape legend: B requests, K results, M relevant ads a request, N ad codes.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from models.data import FrameData
from models.index.cost import candidate_cost
from models.index.monn import RetrievalModel, UserState
from models.index.publish import Index
from models.index.search import SearchResult, beam_search, exact_search
from models.metrics import Interval, bootstrap_ratio, clustered_standard_error, expected_clicks, recall_at_k

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Scan = Literal["exact", "ad_scorer"]
BATCH = 64


@dataclass(frozen=True)
class Answers:
    """What one way of searching answered to B requests."""

    ad_code_BK: Ints
    cost_B: Floats
    nodes_B: Floats
    ads_B: Floats


@dataclass(frozen=True)
class Requests:
    """Requests to audit: rows of a day, and what is known about the right answers."""

    row_B: Ints
    """Rows of the training frame."""
    user_B: Ints
    """User codes, the clusters of every interval."""
    surface_B: Ints
    activity_B: Ints
    """Events in the history."""
    relevant_BM: Ints
    """Ad codes that the user clicked on that day, -1 for padding."""


def draw_requests(data: FrameData, num_parts: Sequence[int], *, seed: int) -> tuple[Requests, ...]:
    """Random requests of a day, one a user, in parts with disjoint users (calibration and audit, for instance).

    Raises:
        ValueError: the day has fewer users than requests asked for in the first part; later parts take the rest.
    """
    generator = np.random.default_rng(seed)
    order = generator.permutation(data.num_rows)
    user_R = data.user_code_R.numpy()
    _, first = np.unique(user_R[order], return_index=True)
    rows = order[np.sort(first)]
    if len(rows) < num_parts[0]:
        raise ValueError(f"num_parts: {num_parts[0]} requests of different users, the day has {len(rows)}")
    bounds = np.minimum(np.cumsum([0, *num_parts]), len(rows))
    relevant = _clicked(data)
    return tuple(_requests(data, rows[a:b], relevant) for a, b in itertools.pairwise(bounds))


def requests_at(data: FrameData, rows: Ints) -> Requests:
    """Given rows of a day as requests."""
    return _requests(data, rows, _clicked(data))


def _clicked(data: FrameData) -> dict[int, Ints]:
    """Ad codes that each user clicked, by user code."""
    row = (data.label_RT[:, 0] > 0.5).nonzero().squeeze(1)
    pair = np.unique(np.stack([data.user_code_R[row].numpy(), data.ad_code_R[row].numpy()], axis=1), axis=0)
    user, first = np.unique(pair[:, 0], return_index=True)
    return dict(zip(user.tolist(), np.split(pair[:, 1], first[1:]), strict=True)) if len(user) else {}


def _requests(data: FrameData, rows: Ints, relevant: Mapping[int, Ints]) -> Requests:
    user_B = data.user_code_R.numpy()[rows]
    found = [relevant.get(int(user), np.empty(0, np.int64)) for user in user_B]
    relevant_BM = np.full((len(rows), max([1, *map(len, found)])), -1, dtype=np.int64)
    for row, codes in enumerate(found):
        relevant_BM[row, : len(codes)] = codes
    return Requests(
        row_B=rows,
        user_B=user_B,
        surface_B=data.surface_R.numpy()[rows],
        activity_B=data.end_offset_R.numpy()[rows],
        relevant_BM=relevant_BM,
    )


@torch.no_grad()
def answer(
    model: RetrievalModel,
    index: Index,
    data: FrameData,
    row_B: Ints,
    ways: Sequence[tuple[int, ...] | Scan],
    *,
    k: int,
) -> list[Answers]:
    """Answer requests in every given way: a beam per level, `exact`, or `ad_scorer`; user states are shared."""
    parts: list[list[SearchResult]] = [[] for _ in ways]
    for first in range(0, len(row_B), BATCH):
        rows = torch.from_numpy(row_B[first : first + BATCH])
        state = model.user_state(data.user_batch(rows), data.ads)
        for way, results in zip(ways, parts, strict=True):
            results.append(_search(model, index, state, way, k))
    return [_join(results) for results in parts]


def _search(model: RetrievalModel, index: Index, state: UserState, way: tuple[int, ...] | Scan, k: int) -> SearchResult:
    if isinstance(way, tuple):
        return beam_search(model, index, state, beams=way, k=k)
    return exact_search(model, index, state, k, ad_scorer=way == "ad_scorer")


def _join(results: Sequence[SearchResult]) -> Answers:
    return Answers(
        ad_code_BK=torch.cat([r.ad_code_BK for r in results]).numpy(),
        cost_B=torch.cat([r.cost_B for r in results]).double().numpy(),
        nodes_B=torch.cat([r.nodes_scored_B for r in results]).double().numpy(),
        ads_B=torch.cat([r.ads_scored_B for r in results]).double().numpy(),
    )


@dataclass(frozen=True)
class AuditReport:
    """Figures of one tier with intervals clustered by user; shares lie in [0, 1]."""

    beams: tuple[int, ...]
    k: int
    num_requests: int
    coverage: Interval
    """Share of the exact answer that the beam found."""
    recall: dict[str, Interval]
    """Share of the clicked ads found by `index`, `exact`, `ad_scorer`; absent without clicks."""
    expected_clicks: dict[str, Interval]
    """True clicks of `index`, `exact`, `ad_scorer` over those of the best k ads; absent without an oracle."""
    cost: float
    nodes_scored: float
    ads_scored: float
    slices: dict[str, dict[str, float]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def audit_index(
    model: RetrievalModel,
    index: Index,
    data: FrameData,
    requests: Requests,
    *,
    beams: tuple[int, ...],
    k: int = 10,
    probability_BN: NDArray[Any] | None = None,
    seed: int = 0,
) -> AuditReport:
    """Audit one choice of beams.

    Args:
        probability_BN: true click probability of every ad code for every request (0 for ads that are not live).
    """
    ways: list[tuple[int, ...] | Scan] = [beams, "exact", "ad_scorer"]
    found, exact, scanned = answer(model, index, data, requests.row_B, ways, k=k)
    generator = np.random.default_rng(seed)
    covered_B = recall_at_k(found.ad_code_BK, exact.ad_code_BK)
    named = {"index": found, "exact": exact, "ad_scorer": scanned}
    recalls = {name: recall_at_k(a.ad_code_BK, requests.relevant_BM) for name, a in named.items()}
    clicks, best_B = _clicks(named, probability_BN, k)
    return AuditReport(
        beams=beams,
        k=k,
        num_requests=len(requests.row_B),
        coverage=_mean(covered_B, requests.user_B, generator),
        recall={n: _mean(r, requests.user_B, generator) for n, r in recalls.items() if not np.isnan(r).all()},
        expected_clicks={
            n: bootstrap_ratio(value_B, best_B, requests.user_B, generator=generator) for n, value_B in clicks.items()
        },
        cost=float(found.cost_B.mean()),
        nodes_scored=float(found.nodes_B.mean()),
        ads_scored=float(found.ads_B.mean()),
        slices=_slices(requests, covered_B, found.cost_B, clicks.get("index"), best_B, data.schema.surfaces),
    )


def _clicks(
    named: Mapping[str, Answers], probability_BN: NDArray[Any] | None, k: int
) -> tuple[dict[str, Floats], Floats]:
    if probability_BN is None:
        return {}, np.empty(0)
    best_B = np.sort(np.partition(probability_BN, -k, axis=1)[:, -k:], axis=1).sum(axis=1).astype(np.float64)
    return {name: true_clicks(a.ad_code_BK, probability_BN) for name, a in named.items()}, best_B


def true_clicks(ad_code_BK: Ints, probability_BN: NDArray[Any]) -> Floats:
    """Expected clicks of each answer under an oracle; unfilled places count 0."""
    probability_BK = np.take_along_axis(probability_BN, ad_code_BK.clip(min=0), axis=1)
    return expected_clicks(np.where(ad_code_BK >= 0, probability_BK, np.nan))


def _mean(value_B: Floats, user_B: Ints, generator: np.random.Generator) -> Interval:
    known = ~np.isnan(value_B)
    return bootstrap_ratio(value_B[known], np.ones(int(known.sum())), user_B[known], generator=generator)


def _slices(
    requests: Requests, covered_B: Floats, cost_B: Floats, clicks_B: Floats | None, best_B: Floats,
    surfaces: Sequence[str],
) -> dict[str, dict[str, float]]:  # fmt: skip
    masks = {f"surface={name}": requests.surface_B == code for code, name in enumerate(surfaces)}
    low, high = np.quantile(requests.activity_B, [1 / 3, 2 / 3]) if len(requests.activity_B) else (0.0, 0.0)
    masks["activity=low"] = requests.activity_B <= low
    masks["activity=middle"] = (requests.activity_B > low) & (requests.activity_B <= high)
    masks["activity=high"] = requests.activity_B > high
    slices = {}
    for name, mask in masks.items():
        if not mask.any():
            continue
        row = {"num_requests": float(mask.sum()), "coverage": float(np.nanmean(covered_B[mask]))}
        row["coverage_se"] = clustered_standard_error(covered_B[mask], requests.user_B[mask])
        row["cost"] = float(cost_B[mask].mean())
        if clicks_B is not None:
            row["expected_clicks"] = float(clicks_B[mask].sum() / best_B[mask].sum())
        slices[name] = row
    return slices


@dataclass(frozen=True)
class SweepPoint:
    """Coverage and cost of one choice of beams on calibration requests."""

    beams: tuple[int, ...]
    coverage: float
    standard_error: float
    cost: float
    nodes_scored: float
    ads_scored: float


def beam_sweep(
    model: RetrievalModel,
    index: Index,
    data: FrameData,
    requests: Requests,
    choices: Sequence[tuple[int, ...]],
    *,
    k: int = 10,
) -> list[SweepPoint]:
    """The recall/cost curve: every choice of beams on the same requests, cheapest first."""
    exact, *found = answer(model, index, data, requests.row_B, ["exact", *choices], k=k)
    points = []
    for beams, answers in zip(choices, found, strict=True):
        covered_B = recall_at_k(answers.ad_code_BK, exact.ad_code_BK)
        points.append(
            SweepPoint(
                beams=beams,
                coverage=float(np.nanmean(covered_B)),
                standard_error=clustered_standard_error(covered_B, requests.user_B),
                cost=float(answers.cost_B.mean()),
                nodes_scored=float(answers.nodes_B.mean()),
                ads_scored=float(answers.ads_B.mean()),
            )
        )
    return sorted(points, key=lambda p: p.cost)


def beam_choices(level_sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Beams worth trying: geometric widths at every level, never narrower than its parent allows.

    Steps are of half a power of two at a single level, and of a whole one where levels multiply them.
    """
    steps = [step / 2 for step in range(26)] if len(level_sizes) == 1 else range(13)
    choices: list[tuple[int, ...]] = [()]
    for size in level_sizes:
        widths = sorted({min(size, max(1, round(2**step))) for step in steps})
        choices = [(*c, w) for c in choices for w in widths if not c or c[-1] <= w <= 16 * c[-1]]
    return choices


RELATED = (0, 16, 64)
"""Numbers of related ads worth trying beside a beam, where the model counts co-visits."""
SPARE = (5, 10, 20, 40, 80, 160, 320)
"""Numbers of ads worth scoring in full beyond those asked for."""


def choices_to_sweep(model: RetrievalModel, index: Index, *, max_cost: float, k: int = 10) -> list[tuple[int, ...]]:
    """Beams of this index that may be worth `max_cost`: an evenly filled tree would cost at most half as much again.

    With them, how many related ads join, and how many ads are scored in full beyond `k`; the cheapest choice if none
    is affordable.
    """
    related = RELATED if model.covisits is not None else (0,)
    choices = list(itertools.product(beam_choices(index.level_sizes), related, SPARE))
    cost = candidate_cost(model.config, len(model.schema.groups))

    def expected(choice: tuple[tuple[int, ...], int, int]) -> float:
        beams, num_related, spare = choice
        nodes = [float(index.level_sizes[0])]
        nodes += [b * below / size + num_related for b, size, below in
                  zip(beams, index.level_sizes, index.level_sizes[1:], strict=False)]  # fmt: skip
        under = beams[-1] * index.num_ads / index.level_sizes[-1] + num_related
        flops = sum(n * each for n, each in zip(nodes, cost.node_L, strict=True))
        return (flops + under * cost.sketch + min(under, k + spare) * cost.ad) / (index.num_ads * cost.ad)

    kept = [c for c in choices if expected(c) <= 1.5 * max_cost] or [min(choices, key=expected)]
    return [(*beams, num_related, spare) for beams, num_related, spare in kept]


def choose_beams(points: Sequence[SweepPoint], *, target: float, max_cost: float) -> SweepPoint:
    """The cheapest beams that reach the target coverage within the cost; else the best coverage within it.

    They reach it with a standard error to spare: the cheapest of many choices that look good enough was lucky.

    Raises:
        ValueError: no point is within the cost.
    """
    affordable = [p for p in points if p.cost <= max_cost]
    if not affordable:
        cheapest = min(p.cost for p in points) if points else float("nan")
        raise ValueError(f"max_cost: {max_cost} is below the cheapest beams, which cost {cheapest:.4f}")
    reaching = [p for p in affordable if p.coverage - p.standard_error >= target]
    if reaching:
        return min(reaching, key=lambda p: (p.cost, p.beams))
    return max(affordable, key=lambda p: (p.coverage, -p.cost))


TIER_TARGETS = {"lite": (0.90, 0.02), "standard": (0.97, 0.05), "full": (0.99, 0.15)}
"""Tier -> target coverage and largest cost."""


def choose_tiers(
    points: Sequence[SweepPoint], targets: Mapping[str, tuple[float, float]] | None = None
) -> dict[str, SweepPoint]:
    """Beams of every tier; where a tier's cost admits nothing (small inventories), the cheapest beams."""
    tiers = {}
    for tier, (target, max_cost) in (targets or TIER_TARGETS).items():
        limit = max(max_cost, min(p.cost for p in points))
        tiers[tier] = choose_beams(points, target=target, max_cost=limit)
    return tiers


@dataclass(frozen=True)
class Verdict:
    """Outcome of a non-inferiority test."""

    passed: bool
    ratio: Interval
    """Sum of the values over sum of the reference's; `low` is the one-sided 95 % bound."""
    margin: float
    reason: str


def non_inferiority(
    value_B: Floats, reference_B: Floats, user_B: Ints, *, margin: float = 0.02, seed: int = 0
) -> Verdict:
    """Is the first at least (1 - margin) of the reference? Paired bootstrap, users drawn with replacement."""
    ratio = bootstrap_ratio(value_B, reference_B, user_B, generator=np.random.default_rng(seed), confidence=0.9)
    passed = ratio.low >= 1.0 - margin
    text = f"ratio {ratio.estimate:.4f}, one-sided 95 % bound {ratio.low:.4f}, margin {margin:.2%}"
    return Verdict(passed=passed, ratio=ratio, margin=margin, reason=text)
