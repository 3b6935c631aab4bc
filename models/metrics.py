"""Metrics of ranking and retrieval, and paired bootstrap intervals clustered by user. Needs no torch.

Shape legend: R rows, B requests, K results a request, C clusters, S bootstrap samples.
Scores of clicks are logits in natural units, because losses from logits don't lose digits near 0 and 1.
Labels may be soft wherever a loss is taken: with an oracle, the label is the true probability, so that the
noise of clicks, which is far larger than the difference of two models, drops out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_BLOCK_CELLS = 20_000_000


@dataclass(frozen=True)
class Interval:
    """Estimate with a bootstrap interval. `low` and `high` bound the central `confidence` share."""

    estimate: float
    low: float
    high: float
    standard_error: float
    num_clusters: int
    confidence: float = 0.95

    @property
    def separates_from_zero(self) -> bool:
        """True when zero lies outside the interval."""
        return self.low > 0.0 or self.high < 0.0


def row_losses(label_R: ArrayLike, logit_R: ArrayLike) -> Floats:
    """Log-loss of every row in nats, `log(1 + e^z) - y z`; labels in [0, 1]."""
    label = np.asarray(label_R, dtype=np.float64)
    logit = np.asarray(logit_R, dtype=np.float64)
    if label.shape != logit.shape:
        raise ValueError(f"label and logit differ in shape: {label.shape} against {logit.shape}")
    return np.logaddexp(0.0, logit) - label * logit


def log_loss(label_R: ArrayLike, logit_R: ArrayLike) -> float:
    """Mean log-loss in nats."""
    return float(row_losses(label_R, logit_R).mean())


def entropy(rate: float) -> float:
    """Entropy in nats of a Bernoulli variable; 0 for rates 0 and 1."""
    if rate <= 0.0 or rate >= 1.0:
        return 0.0
    return float(-rate * np.log(rate) - (1.0 - rate) * np.log1p(-rate))


def normalised_entropy(label_R: ArrayLike, logit_R: ArrayLike) -> float:
    """Log-loss over that of always predicting the mean label (He et al., ADKDD 2014); lower is better.

    NaN where the mean label is 0 or 1.
    """
    label = np.asarray(label_R, dtype=np.float64)
    base = entropy(float(label.mean())) if label.size else 0.0
    return log_loss(label, logit_R) / base if base > 0.0 else float("nan")


def calibration(label_R: ArrayLike, logit_R: ArrayLike) -> float:
    """Sum of predicted probabilities over sum of labels; 1 is perfect, NaN without positives."""
    logit = np.asarray(logit_R, dtype=np.float64)
    positives = float(np.asarray(label_R, dtype=np.float64).sum())
    predicted = float(np.exp(-np.logaddexp(0.0, -logit)).sum())
    return predicted / positives if positives > 0.0 else float("nan")


def _mid_ranks(score_R: Floats) -> Floats:
    _, inverse, counts = np.unique(score_R, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    middle: Floats = last - (counts - 1) / 2.0
    ranks: Floats = middle[inverse]
    return ranks


def auc(label_R: ArrayLike, score_R: ArrayLike) -> float:
    """Area under the ROC curve; ties count half; NaN when only one class is present."""
    label = np.asarray(label_R, dtype=np.float64) > 0.5
    num_positives = int(label.sum())
    num_negatives = label.size - num_positives
    if num_positives == 0 or num_negatives == 0:
        return float("nan")
    rank_sum = float(_mid_ranks(np.asarray(score_R, dtype=np.float64))[label].sum())
    return (rank_sum - num_positives * (num_positives + 1) / 2.0) / (num_positives * num_negatives)


def auc_by_group(label_R: ArrayLike, score_R: ArrayLike, group_R: ArrayLike) -> tuple[Floats, Ints]:
    """AUC inside each group and the group's number of rows; NaN for groups with one class only.

    Groups are in order of their sorted ids. Vectorised: one sort for all groups.
    """
    label = np.asarray(label_R, dtype=np.float64) > 0.5
    score = np.asarray(score_R, dtype=np.float64)
    _, group = np.unique(np.asarray(group_R), return_inverse=True)
    num_groups = int(group.max()) + 1 if group.size else 0
    order = np.lexsort((score, group))
    group, score, label = group[order], score[order], label[order]
    size = np.bincount(group, minlength=num_groups)
    start = np.concatenate(([0], np.cumsum(size)))[:-1]
    # Mid rank inside the group: groups are contiguous after the sort, ties share (group, score).
    new_tie = np.concatenate(([True], (group[1:] != group[:-1]) | (score[1:] != score[:-1])))[: group.size]
    tie = np.cumsum(new_tie) - 1
    tie_size = np.bincount(tie) if group.size else np.zeros(0, dtype=np.int64)
    tie_last = np.cumsum(tie_size)
    rank = (tie_last - (tie_size - 1) / 2.0)[tie] - start[group]
    positives = np.bincount(group, weights=label, minlength=num_groups)
    rank_sum = np.bincount(group, weights=rank * label, minlength=num_groups)
    pairs = positives * (size - positives)
    with np.errstate(invalid="ignore", divide="ignore"):
        value = (rank_sum - positives * (positives + 1) / 2.0) / pairs
    return np.where(pairs > 0, value, np.nan), size.astype(np.int64)


def gauc(label_R: ArrayLike, score_R: ArrayLike, group_R: ArrayLike) -> float:
    """AUC inside each group (user), averaged with the group's rows as weights.

    Groups with one class only are left out; NaN when none is left.
    """
    value, size = auc_by_group(label_R, score_R, group_R)
    usable = ~np.isnan(value)
    return float(np.average(value[usable], weights=size[usable])) if usable.any() else float("nan")


def recall_at_k(retrieved_BK: ArrayLike, relevant_BM: ArrayLike, k: int | None = None) -> Floats:
    """Share of each request's relevant ids among its first k retrieved ones.

    Negative ids are padding on both sides; NaN for requests without relevant ids.
    """
    retrieved = np.asarray(retrieved_BK)[:, :k]
    relevant = np.asarray(relevant_BM)
    wanted = relevant >= 0
    found = np.zeros(relevant.shape, dtype=bool)
    for column in range(relevant.shape[1]):
        found[:, column] = (retrieved == relevant[:, column : column + 1]).any(axis=1)
    num_wanted = wanted.sum(axis=1)
    with np.errstate(invalid="ignore"):
        share: Floats = np.where(num_wanted > 0, (found & wanted).sum(axis=1) / num_wanted, np.nan)
    return share


def expected_clicks(probability_BK: ArrayLike, k: int | None = None) -> Floats:
    """Sum of the true click probabilities of each request's first k results; NaN cells (padding) count 0."""
    probability = np.asarray(probability_BK, dtype=np.float64)[:, :k]
    total: Floats = np.nansum(probability, axis=1)
    return total


def clustered_standard_error(value_R: ArrayLike, cluster_R: ArrayLike) -> float:
    """Standard error of the mean of `value_R` when rows of one cluster (user) are dependent; NaN for one cluster."""
    value = np.asarray(value_R, dtype=np.float64)
    _, cluster = np.unique(np.asarray(cluster_R), return_inverse=True)
    residual = np.bincount(cluster, weights=value - value.mean())
    num_clusters = residual.size
    if num_clusters < 2:
        return float("nan")
    return float(np.sqrt(num_clusters / (num_clusters - 1) * (residual**2).sum()) / value.size)


def bootstrap_ratio(
    numerator_R: ArrayLike,
    denominator_R: ArrayLike,
    cluster_R: ArrayLike,
    *,
    generator: np.random.Generator,
    num_samples: int = 2000,
    confidence: float = 0.95,
) -> Interval:
    """Interval of `sum(numerator) / sum(denominator)` when whole clusters are drawn with replacement.

    Vectorised: a block of samples is one multinomial draw [S, C] and one matrix product.

    Raises:
        ValueError: there are no rows.
    """
    _, cluster = np.unique(np.asarray(cluster_R), return_inverse=True)
    if cluster.size == 0:
        raise ValueError("cluster_R: no rows to draw from")
    sums_C2 = np.stack(
        [
            np.bincount(cluster, weights=np.asarray(numerator_R, dtype=np.float64)),
            np.bincount(cluster, weights=np.asarray(denominator_R, dtype=np.float64)),
        ],
        axis=1,
    )
    num_clusters = sums_C2.shape[0]
    block = max(1, min(num_samples, _BLOCK_CELLS // num_clusters))
    ratios: list[Floats] = []
    for first in range(0, num_samples, block):
        size = min(block, num_samples - first)
        weight_SC = generator.multinomial(num_clusters, np.full(num_clusters, 1.0 / num_clusters), size=size)
        total_S2 = weight_SC @ sums_C2
        ratios.append(total_S2[:, 0] / total_S2[:, 1])
    ratio_S = np.concatenate(ratios)
    tail = (1.0 - confidence) / 2.0
    low, high = np.quantile(ratio_S, [tail, 1.0 - tail])
    total: NDArray[Any] = sums_C2.sum(axis=0)
    return Interval(
        estimate=float(total[0] / total[1]),
        low=float(low),
        high=float(high),
        standard_error=float(ratio_S.std(ddof=1)),
        num_clusters=num_clusters,
        confidence=confidence,
    )


def paired_bootstrap(
    value_R: ArrayLike,
    other_R: ArrayLike,
    cluster_R: ArrayLike,
    *,
    generator: np.random.Generator,
    num_samples: int = 2000,
    confidence: float = 0.95,
) -> Interval:
    """Interval of mean(value) - mean(other) over the same rows, whole clusters (users) drawn with replacement."""
    difference = np.asarray(value_R, dtype=np.float64) - np.asarray(other_R, dtype=np.float64)
    return bootstrap_ratio(
        difference,
        np.ones_like(difference),
        cluster_R,
        generator=generator,
        num_samples=num_samples,
        confidence=confidence,
    )


def paired_entropy_difference(
    label_R: ArrayLike,
    logit_R: ArrayLike,
    other_logit_R: ArrayLike,
    cluster_R: ArrayLike,
    *,
    generator: np.random.Generator,
    num_samples: int = 2000,
) -> Interval:
    """Interval of NE(logit) - NE(other); negative means that `logit_R` is better. The base entropy is held fixed."""
    label = np.asarray(label_R, dtype=np.float64)
    base = entropy(float(label.mean()))
    if base == 0.0:
        raise ValueError(f"label_R: mean label {label.mean()} has no entropy to normalise by")
    return paired_bootstrap(
        row_losses(label, logit_R) / base,
        row_losses(label, other_logit_R) / base,
        cluster_R,
        generator=generator,
        num_samples=num_samples,
    )
