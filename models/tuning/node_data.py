"""Node data: pairs of a user and an inner node that the index itself says the user cares about.

For recent traffic the beam is run, and the nodes on the paths of its best ads become pseudo-labelled positives (HILL,
arXiv 2604.12965: a small set of high quality, no labels needed). Two knobs: `depth`, how many levels above the
ads give nodes, and `interest_rate`, the share of the best ads that the kept nodes of a level must hold between
them, most frequent nodes first; a lower rate keeps fewer and purer nodes.

Shape legend: B requests, K best ads, X pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.data import FrameData
from models.index.monn import RetrievalModel
from models.index.publish import Index
from models.index.search import beam_search

NODE_DATA = pa.schema(
    [
        ("row", pa.int64()), ("user_code", pa.int64()), ("level", pa.int8()), ("node", pa.int64()),
        ("path", pa.list_(pa.int32())), ("weight", pa.float32()),
    ]
)  # fmt: skip
"""One (request, node) pair: frame row, user, level (0 = root), published node, its path, share of the best ads."""

BATCH = 64


@dataclass(frozen=True)
class NodeDataConfig:
    """Which nodes of which beam become data."""

    beams: tuple[int, ...]
    best: int = 20
    """Ads of each beam whose paths are followed."""
    depth: int = 2
    interest_rate: float = 0.6

    def __post_init__(self) -> None:
        """Raise ValueError where a knob is out of its range."""
        if not 0.0 < self.interest_rate <= 1.0:
            raise ValueError(f"interest_rate: {self.interest_rate} is outside (0, 1]")
        if self.depth < 1 or self.best < 1:
            raise ValueError(f"depth: {self.depth} and best: {self.best} must be at least 1")


@torch.no_grad()
def collect_node_data(
    model: RetrievalModel, index: Index, data: FrameData, rows: Tensor, config: NodeDataConfig
) -> pa.Table:
    """Node data (`NODE_DATA`) of requests given as frame rows; weights of a request and level sum to 1."""
    parts = [NODE_DATA.empty_table()]
    first_level = max(0, len(index.levels) - config.depth)
    for rows_B in torch.split(rows, BATCH):
        state = model.user_state(data.user_batch(rows_B), data.ads)
        found = beam_search(model, index, state, beams=config.beams, k=config.best)
        slot_BK = torch.where(found.ad_code_BK >= 0, index.slot_N[found.ad_code_BK.clamp(min=0)], -1)
        for number in range(first_level, len(index.levels)):
            level = index.levels[number]
            node_BK = torch.where(slot_BK >= 0, level.node_S[slot_BK.clamp(min=0)], -1)
            row_X, node_X, weight_X = interesting_nodes(node_BK, level.num_nodes, config.interest_rate)
            frame_row_X = rows_B[row_X]
            parts.append(
                pa.table(
                    {
                        "row": frame_row_X.numpy(),
                        "user_code": data.user_code_R[frame_row_X].numpy(),
                        "level": np.full(len(row_X), number, np.int8),
                        "node": node_X.numpy(),
                        "path": _lists(level.path_KL[node_X]),
                        "weight": weight_X.numpy(),
                    },
                    schema=NODE_DATA,
                )
            )
    return pa.concat_tables(parts)


def interesting_nodes(node_BK: Tensor, num_nodes: int, interest_rate: float) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, nodes and weights of the fewest nodes that hold `interest_rate` of each row's ads (-1: no ad)."""
    row_BK = torch.arange(len(node_BK))[:, None].expand_as(node_BK)
    there = node_BK >= 0
    pair_X, count_X = torch.unique(row_BK[there] * num_nodes + node_BK[there], return_counts=True)
    row_X, node_X = pair_X // num_nodes, pair_X % num_nodes
    order = torch.argsort(count_X, descending=True, stable=True)
    order = order[torch.argsort(row_X[order], stable=True)]
    row_X, node_X, share_X = row_X[order], node_X[order], count_X[order].double()
    total_B = torch.zeros(len(node_BK), dtype=torch.float64).index_add(0, row_X, share_X)
    share_X = share_X / total_B[row_X]
    # Mass of the row's better nodes: a node is kept while that is below the rate.
    running_X = torch.cumsum(share_X, 0) - share_X
    first_X = torch.searchsorted(row_X, row_X)
    before_X = running_X - running_X[first_X]
    kept = before_X < interest_rate - 1e-9
    row_X, node_X, share_X = row_X[kept], node_X[kept], share_X[kept]
    kept_B = torch.zeros(len(node_BK), dtype=torch.float64).index_add(0, row_X, share_X)
    return row_X, node_X, (share_X / kept_B[row_X]).float()


def _lists(path_XL: Tensor) -> pa.Array:
    offsets = np.arange(len(path_XL) + 1, dtype=np.int32) * path_XL.shape[1]
    return pa.ListArray.from_arrays(offsets, path_XL.to(torch.int32).flatten().numpy())


@dataclass(frozen=True)
class NodeDataQuality:
    """How good the pseudo labels of one level are, by clicks that came later."""

    level: int
    num_pairs: int
    num_users: int
    nodes_per_request: float
    purity: float
    """Share of the pairs whose node holds an ad that the user clicked later; users without later clicks left out."""
    coverage: float
    """Share of those clicks whose node was in the user's node data."""


def node_data_quality(
    table: pa.Table, index: Index, user_code_X: NDArray[np.int64], ad_code_X: NDArray[np.int64]
) -> Sequence[NodeDataQuality]:
    """Quality per level against later clicks given as (user, ad) pairs; NaN where no user of the data clicked."""
    qualities = []
    level_R = table["level"].to_numpy()
    for number in np.unique(level_R):
        part = table.filter(pa.array(level_R == number))
        user_R, node_R = part["user_code"].to_numpy(), part["node"].to_numpy()
        node_X = index.levels[int(number)].node_N.numpy()[ad_code_X]
        size = index.levels[int(number)].num_nodes
        known_X = (node_X >= 0) & np.isin(user_code_X, user_R)
        clicked = np.unique(user_code_X[known_X] * size + node_X[known_X])
        pair_R = user_R * size + node_R
        judged_R = np.isin(user_R, user_code_X[known_X])
        hits = np.isin(pair_R[judged_R], clicked)
        found = np.isin(user_code_X[known_X] * size + node_X[known_X], pair_R)
        qualities.append(
            NodeDataQuality(
                level=int(number),
                num_pairs=len(user_R),
                num_users=len(np.unique(user_R)),
                nodes_per_request=len(user_R) / max(1, len(np.unique(part["row"].to_numpy()))),
                purity=float(hits.mean()) if len(hits) else float("nan"),
                coverage=float(found.mean()) if len(found) else float("nan"),
            )
        )
    return qualities
