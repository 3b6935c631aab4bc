"""Health of a published index: is it used evenly, has it collapsed, does training mean what serving does?

Soft assignments can look uniform while the hard ones use a fraction of the nodes, so everything is taken on
published (hard) paths; the mismatch between both is a figure of its own.

Shape legend: N ads, S slots, K nodes of a level, L levels, D code width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from models.index.monn import RetrievalModel
from models.index.publish import Index
from models.index.quantizer import squared_distance


@dataclass(frozen=True)
class LevelHealth:
    """How the live ads spread over the nodes of one level."""

    num_possible: int
    num_used: int
    largest_share: float
    """Share of the ads in the fullest node."""
    effective: float
    """exp(entropy) of the shares: the number of equally full nodes that would be as spread out."""
    gini: float
    """0 when all possible nodes are equally full, near 1 when one holds everything."""
    num_duplicates: int
    """Codebook entries of the level that (almost) equal another one."""
    mismatch: float
    """Share of an ad's attention, at training's last alpha, that goes to other nodes than its published one."""


@dataclass(frozen=True)
class IndexHealth:
    """Health of all levels, and how much moved since the previous index."""

    levels: tuple[LevelHealth, ...]
    path_change: float | None
    """Share of the ads live in both indexes whose path differs; None without a previous index."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class HealthLimits:
    """What `health_problems` refuses."""

    min_used_share: float = 0.5
    """Used nodes over possible ones (or over the ads, where these are fewer), at the first level."""
    min_effective_share: float = 0.4
    """The same for effective nodes."""
    max_largest_share: float = 0.25
    max_mismatch: float = 0.6
    max_path_change: float = 1.0


@torch.no_grad()
def index_health(model: RetrievalModel, index: Index, previous: Index | None = None) -> IndexHealth:
    """Measure an index published from `model`."""
    residual_SD = index.vector_SQd.flatten(1)
    levels, num_possible = [], 1
    for number, level in enumerate(index.levels):
        codebook_KD = model.index.codebook_LKD[number]
        num_possible *= len(codebook_KD)
        own_S = level.path_KL[level.node_S, number]
        spread = model.index.spread_L[number]
        attention_SK = torch.softmax(
            -model.config.training.max_alpha * squared_distance(residual_SD, codebook_KD) / spread, dim=1
        )
        mismatch = 1.0 - float(attention_SK.gather(1, own_S[:, None]).mean())
        count_K = torch.bincount(level.node_S, minlength=level.num_nodes).double()
        levels.append(_level(count_K, num_possible, num_duplicates(codebook_KD), mismatch))
        residual_SD = model.index.rest(residual_SD, codebook_KD[own_S])
    return IndexHealth(tuple(levels), None if previous is None else path_change(index, previous))


def _level(count_K: Tensor, num_possible: int, duplicates: int, mismatch: float) -> LevelHealth:
    share_K = count_K / count_K.sum()
    entropy = float(-(share_K * share_K.clamp(min=1e-300).log()).sum())
    return LevelHealth(
        num_possible=num_possible,
        num_used=int((count_K > 0).sum()),
        largest_share=float(share_K.max()),
        effective=float(torch.exp(torch.tensor(entropy))),
        gini=gini(count_K, num_possible),
        num_duplicates=duplicates,
        mismatch=mismatch,
    )


def gini(count_K: Tensor, num_possible: int) -> float:
    """Gini coefficient of counts, with the possible but unused nodes as zeros."""
    sorted_K = torch.cat([count_K.new_zeros(num_possible - len(count_K)), count_K.sort().values]).double()
    rank_K = torch.arange(1, num_possible + 1, dtype=torch.float64)
    return float((2.0 * rank_K - num_possible - 1.0) @ sorted_K / (num_possible * sorted_K.sum()))


def num_duplicates(codebook_KD: Tensor, tolerance: float = 1e-3) -> int:
    """Entries closer to an earlier entry than `tolerance` of the codebook's mean squared norm."""
    distance_KK = squared_distance(codebook_KD, codebook_KD)
    limit = tolerance * codebook_KD.square().sum(1).mean()
    return int((distance_KK <= limit).tril(-1).any(dim=1).sum())


def path_change(index: Index, previous: Index) -> float:
    """Share of the ads live in both indexes whose path differs; 0 when they share none."""
    order = torch.argsort(previous.ad_id_S)
    sorted_id = previous.ad_id_S[order]
    place_S = torch.searchsorted(sorted_id, index.ad_id_S).clamp(max=len(sorted_id) - 1)
    both_S = sorted_id[place_S] == index.ad_id_S
    if not bool(both_S.any()):
        return 0.0
    mine_XL = index.levels[-1].path_KL[index.levels[-1].node_S[both_S]]
    theirs_XL = previous.levels[-1].path_KL[previous.levels[-1].node_S[order[place_S[both_S]]]]
    return float((mine_XL != theirs_XL).any(dim=1).double().mean())


def health_problems(health: IndexHealth, num_ads: int, limits: HealthLimits | None = None) -> Sequence[str]:
    """Reasons to refuse an index; empty when it is healthy. `num_ads` are the live ads."""
    limits = limits or HealthLimits()
    first = health.levels[0]
    reachable = min(first.num_possible, num_ads)
    problems = []
    if first.num_used < limits.min_used_share * reachable:
        problems.append(f"level 1 uses {first.num_used} of {reachable} nodes, less than {limits.min_used_share:.0%}")
    if first.effective < limits.min_effective_share * reachable:
        problems.append(
            f"level 1 spreads ads like {first.effective:.1f} of {reachable} nodes, "
            f"less than {limits.min_effective_share:.0%}"
        )
    if first.largest_share > limits.max_largest_share and reachable > 1.0 / limits.max_largest_share:
        problems.append(f"level 1 holds {first.largest_share:.1%} of the ads in one node")
    for number, level in enumerate(health.levels, 1):
        if level.mismatch > limits.max_mismatch:
            problems.append(f"level {number}: {level.mismatch:.1%} of the attention goes to other nodes than published")
    if health.path_change is not None and health.path_change > limits.max_path_change:
        problems.append(f"{health.path_change:.1%} of the ads changed their path")
    return problems
