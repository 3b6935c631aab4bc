"""What a learned tree means: which nodes a request visits, what a node holds, and how pure it is.

Purity of a node is the share of its ads that have the node's most frequent value of a group (category, advertiser). It
stands beside the purity of a random tree of the same shape: the same node sizes, ads drawn without regard to content.

Shape legend: B requests, L levels, W nodes of a beam, K nodes of a level, S slots, G groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from models.index.monn import RetrievalModel, UserState
from models.index.publish import Index, node_values
from models.index.search import beam_search


@dataclass(frozen=True)
class Purity:
    """Mean purity of the nodes of a level, weighted by their ads; one value a group."""

    level: int
    num_nodes: int
    learned: dict[str, float]
    random: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class NodeView:
    """One node: how many ads it holds and the most frequent values of each group with their shares."""

    level: int
    node: int
    num_ads: int
    values: dict[str, list[tuple[int, float]]]
    """Group -> (code, share of the node's ads), most frequent first."""
    representative: int
    """Id of the ad nearest to the node's vector."""


@dataclass(frozen=True)
class Visit:
    """A node that a request visited: its place in the beam, its score, and the node itself."""

    place: int
    score: float
    node: NodeView


def purity(index: Index, groups: Sequence[str], *, seed: int = 0) -> list[Purity]:
    """Purity of every level beside that of a random tree of the same shape."""
    order_S = torch.randperm(index.num_ads, generator=torch.Generator().manual_seed(seed))
    found = []
    for number, level in enumerate(index.levels, 1):
        learned_G = _mean_purity(index.group_SG, level.node_S, level.num_nodes)
        random_G = _mean_purity(index.group_SG[order_S], level.node_S, level.num_nodes)
        found.append(
            Purity(
                level=number, num_nodes=level.num_nodes, learned=dict(zip(groups, learned_G, strict=True)),
                random=dict(zip(groups, random_G, strict=True)),
            )
        )  # fmt: skip
    return found


def _mean_purity(group_SG: Tensor, node_S: Tensor, num_nodes: int) -> list[float]:
    _, weight_KGR = node_values(group_SG, node_S, num_nodes, 1)
    size_K = torch.bincount(node_S, minlength=num_nodes).float()
    mean_G: list[float] = ((weight_KGR[:, :, 0] * size_K[:, None]).sum(0) / size_K.sum()).tolist()
    return mean_G


def view(index: Index, level: int, node: int, groups: Sequence[str]) -> NodeView:
    """What a node of a level (1 = below the root) holds.

    Raises:
        ValueError: the index has no such level or node.
    """
    if not 1 <= level <= len(index.levels):
        raise ValueError(f"level: {level} is not one of 1 .. {len(index.levels)}")
    published = index.levels[level - 1]
    if not 0 <= node < published.num_nodes:
        raise ValueError(f"node: {node} is not one of 0 .. {published.num_nodes - 1} of level {level}")
    codes_GR, shares_GR = published.value_KGR[node].tolist(), published.weight_KGR[node].tolist()
    values = {
        group: [(code, round(share, 4)) for code, share in zip(codes, shares, strict=True) if code]
        for group, codes, shares in zip(groups, codes_GR, shares_GR, strict=True)
    }
    slot = index.slot_N[published.representative_K[node]]
    return NodeView(
        level=level, node=node, num_ads=int((published.node_S == node).sum()), values=values,
        representative=int(index.ad_id_S[slot]),
    )  # fmt: skip


def visits(
    model: RetrievalModel, index: Index, state: UserState, *, beams: Sequence[int], k: int
) -> list[list[list[Visit]]]:
    """Nodes that each request visits, level by level, best first: [requests][levels][places]."""
    groups = [group.name for group in model.schema.groups]
    found = beam_search(model, index, state, beams=beams, k=k)
    requests = []
    for row in range(state.num_rows):
        levels = []
        for number, (node_BW, score_BW) in enumerate(zip(found.beam_LBW, found.beam_score_LBW, strict=True), 1):
            pairs = zip(node_BW[row].tolist(), score_BW[row].tolist(), strict=True)
            levels.append(
                [
                    Visit(i, score, view(index, number, node, groups))
                    for i, (node, score) in enumerate(pairs)
                    if node >= 0
                ]
            )
        requests.append(levels)
    return requests
