"""Recall against clicks: the request log joined with the outcomes that became known later.

A served request and its later outcomes share the request id. Recall@k of a request is the share of its positive
ads among the first k answered; requests without a positive outcome say nothing about recall and are left out
(and counted). The value-weighted recall weighs each positive by its value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

import duckdb
import pyarrow as pa


@dataclass(frozen=True)
class OutcomeSlice:
    """Recall of one slice of requests."""

    release: str
    tier: str
    surface: str
    """`all` for all surfaces together."""
    k: int
    num_requests: int
    """Requests with at least one positive outcome."""
    num_positives: int
    recall: float
    standard_error: float
    """Of the mean over users, so that a user's requests count as one observation."""
    value_recall: float


@dataclass(frozen=True)
class OutcomesReport:
    """Joined outcomes of a time range."""

    slices: tuple[OutcomeSlice, ...]
    requests: pa.Table
    """One row per (request with a positive, k): request_id, user_id, release, tier, surface, k, positives, hits,
    value, value_hits."""
    num_requests: int
    num_without_positive: int
    label: str

    def slice(self, *, k: int, surface: str = "all", tier: str | None = None) -> OutcomeSlice:
        """One slice; raises ValueError when it is not there or not unique."""
        found = [s for s in self.slices if s.k == k and s.surface == surface and tier in (None, s.tier)]
        if len(found) != 1:
            raise ValueError(f"slice k={k} surface={surface!r} tier={tier!r}: {len(found)} found")
        return found[0]


_JOIN = """
with positive as (
    select request_id, ad_id, max(value) as value
    from outcomes where label = $label and value > 0 and known_at < $cut
    group by all
), asked as (
    select request_id, coalesce(user_id, -request_id) as user_id, release, tier, surface, ad_ids, unnest($ks)::int as k
    from requests
)
select a.request_id, a.user_id, a.release, a.tier, a.surface, a.k,
    count(*)::int as positives,
    count(*) filter (where p.ad_id in a.ad_ids[1:a.k])::int as hits,
    sum(p.value)::double as value,
    coalesce(sum(p.value) filter (where p.ad_id in a.ad_ids[1:a.k]), 0)::double as value_hits
from asked a join positive p using (request_id)
group by all order by a.request_id, a.release, a.tier, a.k
"""

_SLICES = """
with per_user as (
    select release, tier, case when grouping(surface) = 1 then 'all' else surface end as surface, k, user_id,
        count(*) as requests, sum(positives) as positives, avg(hits / positives) as recall, sum(value) as value,
        sum(value_hits) as value_hits
    from joined
    group by grouping sets ((release, tier, k, user_id, surface), (release, tier, k, user_id))
)
select release, tier, surface, k, sum(requests)::int as num_requests, sum(positives)::int as num_positives,
    avg(recall) as recall, coalesce(stddev_samp(recall) / sqrt(count(*)), 'nan'::double) as standard_error,
    sum(value_hits) / sum(value) as value_recall
from per_user group by release, tier, surface, k order by release, tier, surface, k
"""


def join_outcomes(
    requests: pa.Table, outcomes: pa.Table, *, label: str, known_before: datetime, ks: Sequence[int] = (10, 50, 100)
) -> OutcomesReport:
    """Join served requests with outcomes known before a time, and compute recall by release, tier and surface.

    Args:
        requests: rows of `monitoring.request_log`.
        outcomes: rows of the lake's `outcomes` table (request_id, ad_id, label, value, known_at).
        label: which outcome counts as positive.
        known_before: outcomes known at this time or later are not looked at.
        ks: list lengths, each at least 1.

    Raises:
        ValueError: `known_before` has no zone, or a k is below 1.
    """
    if known_before.tzinfo is None:
        raise ValueError(f"known_before: {known_before} has no time zone")
    if not ks or min(ks) < 1:
        raise ValueError(f"ks: {tuple(ks)} must hold numbers of at least 1")
    with duckdb.connect() as connection:
        connection.execute("set timezone = 'UTC'")
        connection.register("requests", requests)
        connection.register("outcomes", outcomes)
        parameters = {"label": label, "cut": known_before, "ks": sorted(set(ks))}
        joined: pa.Table = connection.sql(_JOIN, params=parameters).to_arrow_table()
        connection.register("joined", joined)
        slices: pa.Table = connection.sql(_SLICES).to_arrow_table()
    found = set(joined.column("request_id").to_pylist())
    known = requests.column("request_id").to_pylist()
    return OutcomesReport(
        slices=tuple(OutcomeSlice(**row) for row in slices.to_pylist()),
        requests=joined,
        num_requests=len(known),
        num_without_positive=sum(1 for request_id in known if request_id not in found),
        label=label,
    )
