"""True probabilities of a simulated log, in the order of a day's training frame. Metrics read them, nothing else."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from feature_repo.lake import Lake
from feature_repo.sql import query

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
