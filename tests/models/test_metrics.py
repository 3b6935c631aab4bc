"""Every metric against a value computed by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from models import metrics


def test_log_loss_by_hand() -> None:
    # p = 0.5 and p = 0.75: -log 0.5 and -log 0.25
    expected = (math.log(2) + math.log(4)) / 2
    assert metrics.log_loss([1.0, 0.0], [0.0, math.log(3)]) == pytest.approx(expected)


def test_row_losses_keep_digits_at_extreme_logits() -> None:
    losses = metrics.row_losses([1.0, 0.0, 1.0], [50.0, -50.0, -800.0])
    assert losses[0] == pytest.approx(math.exp(-50.0), rel=1e-9)
    assert losses[1] == pytest.approx(math.exp(-50.0), rel=1e-9)
    assert losses[2] == pytest.approx(800.0)


def test_row_losses_refuse_other_shapes() -> None:
    with pytest.raises(ValueError, match=r"\(2,\) against \(3,\)"):
        metrics.row_losses([1.0, 0.0], [0.0, 0.0, 0.0])


def test_normalised_entropy_is_one_for_the_mean_rate() -> None:
    label = np.array([1, 0, 0, 0])
    assert metrics.normalised_entropy(label, np.full(4, math.log(0.25 / 0.75))) == pytest.approx(1.0)


def test_normalised_entropy_of_soft_labels() -> None:
    soft = np.array([0.9, 0.1])
    logit = np.log(soft / (1 - soft))
    # Mean 0.5 has entropy log 2; the oracle's loss is the mean entropy of its own probabilities.
    own = -(0.9 * math.log(0.9) + 0.1 * math.log(0.1))
    assert metrics.normalised_entropy(soft, logit) == pytest.approx(own / math.log(2))


def test_normalised_entropy_without_positives_is_nan() -> None:
    assert math.isnan(metrics.normalised_entropy([0.0, 0.0], [0.0, 0.0]))


def test_calibration_is_predicted_over_observed() -> None:
    assert metrics.calibration([1, 0, 0, 1], [0.0, 0.0, 0.0, math.log(3)]) == pytest.approx((1.5 + 0.75) / 2)
    assert math.isnan(metrics.calibration([0, 0], [0.0, 0.0]))


def test_auc_counts_ties_half() -> None:
    # Pairs (positive, negative): (3,1) win, (3,2) win, (2,1) win, (2,2) tie.
    assert metrics.auc([1, 1, 0, 0], [3.0, 2.0, 1.0, 2.0]) == pytest.approx(3.5 / 4)


def test_auc_of_one_class_is_nan() -> None:
    assert math.isnan(metrics.auc([1, 1], [0.0, 1.0]))


def test_gauc_weights_groups_by_rows_and_drops_one_class_groups() -> None:
    group = np.array([7, 7, 9, 9, 9, 4, 4])
    label = np.array([1, 0, 1, 0, 0, 1, 1])
    score = np.array([0.2, 0.9, 0.5, 0.5, 0.1, 3.0, 1.0])
    # Group 7: 0 of 1 pair. Group 9: a tie and a win, 1.5 of 2. Group 4: one class.
    assert metrics.gauc(label, score, group) == pytest.approx((0.0 * 2 + 0.75 * 3) / 5)


def test_auc_by_group_equals_auc_of_each_group() -> None:
    rng = np.random.default_rng(0)
    group = rng.integers(0, 12, 300)
    label = rng.integers(0, 2, 300)
    score = rng.integers(0, 9, 300).astype(float)
    value, size = metrics.auc_by_group(label, score, group)
    for g in range(12):
        mine = group == g
        assert size[g] == mine.sum()
        assert value[g] == pytest.approx(metrics.auc(label[mine], score[mine]), nan_ok=True)


def test_recall_at_k_ignores_padding() -> None:
    retrieved = [[5, 3, 9], [1, 2, -1], [4, 4, 4]]
    relevant = [[9, 8, -1], [2, -1, -1], [-1, -1, -1]]
    recall = metrics.recall_at_k(retrieved, relevant)
    np.testing.assert_allclose(recall, [0.5, 1.0, np.nan])
    np.testing.assert_allclose(metrics.recall_at_k(retrieved, relevant, k=1), [0.0, 0.0, np.nan])


def test_expected_clicks_sum_the_first_k() -> None:
    probability = [[0.5, 0.25, 0.125], [0.1, np.nan, np.nan]]
    np.testing.assert_allclose(metrics.expected_clicks(probability), [0.875, 0.1])
    np.testing.assert_allclose(metrics.expected_clicks(probability, k=1), [0.5, 0.1])


def test_clustered_standard_error_by_hand() -> None:
    # Two clusters with residual sums -2 and 2 around the mean 2: sqrt(2/1 * 8) / 4.
    assert metrics.clustered_standard_error([1, 1, 3, 3], [0, 0, 1, 1]) == pytest.approx(1.0)
    assert math.isnan(metrics.clustered_standard_error([1, 2], [0, 0]))


def test_paired_bootstrap_of_a_constant_difference_has_no_spread() -> None:
    base = np.random.default_rng(0).normal(size=200)
    interval = metrics.paired_bootstrap(
        base + 0.25, base, np.arange(200) % 17, generator=np.random.default_rng(1), num_samples=100
    )
    assert interval.estimate == pytest.approx(0.25)
    assert interval.low == pytest.approx(0.25)
    assert interval.standard_error == pytest.approx(0.0, abs=1e-12)
    assert interval.num_clusters == 17
    assert interval.separates_from_zero


def test_paired_bootstrap_sees_dependence_inside_clusters() -> None:
    rng = np.random.default_rng(2)
    cluster = np.repeat(np.arange(50), 20)
    value = rng.normal(size=50)[cluster]
    zero = np.zeros_like(value)
    by_user = metrics.paired_bootstrap(value, zero, cluster, generator=np.random.default_rng(3))
    by_row = metrics.paired_bootstrap(value, zero, np.arange(1000), generator=np.random.default_rng(3))
    assert by_user.standard_error == pytest.approx(metrics.clustered_standard_error(value, cluster), rel=0.1)
    assert by_user.standard_error > 3.5 * by_row.standard_error


def test_bootstrap_ratio_is_a_ratio_of_sums_and_repeats_by_seed() -> None:
    runs = [
        metrics.bootstrap_ratio([1, 2, 3], [2, 2, 2], [0, 1, 2], generator=np.random.default_rng(5), num_samples=50)
        for _ in range(2)
    ]
    assert runs[0] == runs[1]
    assert runs[0].estimate == pytest.approx(1.0)
    with pytest.raises(ValueError, match="no rows"):
        metrics.bootstrap_ratio([], [], [], generator=np.random.default_rng(5))


def test_paired_entropy_difference_is_the_difference_of_entropies() -> None:
    rng = np.random.default_rng(4)
    label = rng.integers(0, 2, 400).astype(float)
    good, bad = (2 * label - 1) * 1.0, np.zeros(400)
    interval = metrics.paired_entropy_difference(
        label, good, bad, rng.integers(0, 40, 400), generator=np.random.default_rng(6)
    )
    expected = metrics.normalised_entropy(label, good) - metrics.normalised_entropy(label, bad)
    assert interval.estimate == pytest.approx(expected)
    assert interval.high < 0.0
