"""Positives-only logs: what users chose becomes requests, outcomes, and drawn negatives.

Such a log has no impressions, so nobody knows what a user saw and left. A request is then an event of the main label
(review, purchase, ...) at the moment it became available, its own ad is the positive, and for every positive
`facts.num_negatives` ads are drawn uniformly from the catalogue. A drawn ad stands for (ads / num_negatives) ads, which
is what `facts.negative_rate` says; a logit with that correction is the log-odds that this ad, of all ads, is the
next one (binary NCE, Gutmann and Hyvarinen 2010; the log-q correction of sampled softmax, Jean et al. 2015).

Shape legend: P positives of a day, R rows, J drawn negatives a positive.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from feature_repo.adapters.base import mixed_ids
from feature_repo.days import contract_rows, day_bounds_us, previous_day
from feature_repo.lake import Lake
from feature_repo.sql import run_transform
from feature_repo.tables import SourceFacts

Ints = NDArray[np.int64]


def requests_of(lake: Lake, facts: SourceFacts, day: str) -> pa.Table:
    """The positives of a day in the columns of `impressions`, and `happened_at`, the event's own time.

    `timestamp` is when the event became available: its history is what was available strictly before.
    """
    start_us, _ = day_bounds_us(facts, day)
    floor_us = start_us if previous_day(facts, day) else 0
    inputs = {"engagements": contract_rows(lake, "engagements", [day])}
    return run_transform("positives", inputs, {"label": facts.main_label, "floor_us": floor_us})


def outcomes_of(lake: Lake, facts: SourceFacts, day: str) -> pa.Table:
    """The same positives in the columns of `outcomes`: each request's own ad has the main label with value 1."""
    rows = requests_of(lake, facts, day)
    return pa.table(
        {
            "request_id": rows["request_id"],
            "ad_id": rows["ad_id"],
            "label": pa.repeat(facts.main_label, rows.num_rows),
            "value": pa.array(np.ones(rows.num_rows, np.float32)),
            "event_time": rows["happened_at"],
            "known_at": rows["timestamp"],
        }
    )


def draw_negatives(request_P: Ints, ad_code_P: Ints, num_negatives: int, num_ads: int) -> Ints:
    """Ad codes [P, J] of drawn negatives, uniform and the same on every run; never the positive's own ad.

    Raises:
        ValueError: there is no second ad to draw.
    """
    if num_ads < 2:
        raise ValueError(f"num_ads: {num_ads}, negatives need at least 2 ads")
    draw = np.arange(num_negatives)
    mixed = mixed_ids(np.repeat(request_P, num_negatives), np.tile(draw, len(request_P))).reshape(-1, num_negatives)
    # Uniform over the other ads: a step of 1 .. num_ads - 1 from the positive.
    return (ad_code_P[:, None] + 1 + mixed % (num_ads - 1)) % num_ads
