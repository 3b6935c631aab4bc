"""True probabilities of a simulated log, in the order of a day's training frame. Metrics read them, nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from feature_repo.adapters.base import Source
from feature_repo.lake import Lake
from feature_repo.sql import query

BLOCK = 64
"""Requests that are asked for together."""

_JOIN = """
select o.click, o.conversion
from frame f
join ads a on a.ad_code = f.ad_code
join oracle o on o.request_id = f.request_id and o.ad_id = a.ad_id
order by f.row_id
"""


def frame_probabilities(lake: Lake, day: str) -> dict[str, NDArray[np.float64]]:
    """`click` and `conversion` probabilities of every row of `training_frame/<day>`, float64 [R].

    Raises:
        ValueError: a row has no probability, or more than one.
    """
    paths = {
        "frame": lake.paths("training_frame", [day]),
        "ads": lake.paths("catalogue", [day], "ads"),
        "oracle": lake.paths("oracle", [day]),
    }
    rows = query(_JOIN, paths)
    wanted = lake.partition("training_frame", day).num_rows
    if rows.num_rows != wanted:
        raise ValueError(f"oracle/{day}: {rows.num_rows} probabilities for {wanted} rows of the training frame")
    return {name: rows[name].to_numpy().astype(np.float64) for name in ("click", "conversion")}


def click_matrix(
    source: Source,
    user_id_B: NDArray[np.int64],
    surface_B: NDArray[np.int64],
    time_us_B: NDArray[np.int64],
    ad_id_N: NDArray[np.int64],
    live_N: NDArray[np.bool_],
) -> NDArray[np.float32]:
    """True click probability of every ad for every request [B, N]; 0 for ads that are not live.

    Each surface is asked at the median time of its requests.
    """
    oracle: Any = source.world  # type: ignore[attr-defined]
    truth_BN = np.zeros((len(user_id_B), len(ad_id_N)), np.float32)
    place_L = np.flatnonzero(live_N)
    for code, surface in enumerate(source.facts.surfaces):
        chosen = np.flatnonzero(surface_B == code)
        for part in np.array_split(chosen, max(1, len(chosen) // BLOCK)):
            if len(part):
                time_us = int(np.median(time_us_B[part]))
                truth_BN[np.ix_(part, place_L)] = oracle.click_matrix(
                    user_id_B[part], surface, time_us, ad_id_N[place_L]
                )
    return truth_BN
