"""What a learned tree means: which nodes a request visits, where its ads come from, what a node holds, how pure it is.

Purity of a node is the share of its ads that have the node's most frequent value of a group (category, advertiser). It
stands beside the purity of a random tree of the same shape: the same node sizes, ads drawn without regard to content.

Shape legend: B requests, L levels, W nodes of a beam, K nodes of a level, S slots, G groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from models.index.monn import RetrievalModel, UserState
from models.index.publish import Index, node_values
from models.index.search import SearchResult, beam_search
from models.index.terms import NO_TERMS, Terms


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
    """0 is the best, by score or, with an auction, by log(click probability x largest bid below)."""
    score: float
    node: NodeView


@dataclass(frozen=True)
class FoundAd:
    """An ad of an answer and how the search came to it."""

    ad_id: int
    score: float
    """Value it was ranked by."""
    source: Literal["beam", "related"]
    """`beam`: its leaf was visited. `related`: it follows from the history, whatever its leaf."""
    path: tuple[int, ...]
    """Its node of every level."""


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
    # Slots are stored leaf by leaf, so those of a node lie side by side.
    first, end = torch.searchsorted(published.node_S, published.node_S.new_tensor([node, node + 1])).tolist()
    return NodeView(
        level=level, node=node, num_ads=end - first, values=values, representative=int(index.ad_id_S[slot]),
    )  # fmt: skip


def visits(
    model: RetrievalModel, index: Index, state: UserState, *, beams: Sequence[int], k: int, terms: Terms = NO_TERMS
) -> list[list[list[Visit]]]:
    """Nodes that each request visits, level by level, best first: [requests][levels][places]."""
    groups = [group.name for group in model.schema.groups]
    return visited(index, beam_search(model, index, state, beams=beams, k=k, terms=terms), groups)


def visited(index: Index, found: SearchResult, groups: Sequence[str]) -> list[list[list[Visit]]]:
    """Nodes that each request of a beam search visited, level by level, best first: [requests][levels][places]."""
    requests: list[list[list[Visit]]] = [[] for _ in found.ad_code_BK]
    for number, (node_BW, score_BW) in enumerate(zip(found.beam_LBW, found.beam_score_LBW, strict=True), 1):
        for levels, nodes, scores in zip(requests, node_BW.tolist(), score_BW.tolist(), strict=True):
            pairs = enumerate(zip(nodes, scores, strict=True))
            levels.append(
                [Visit(i, score, view(index, number, node, groups)) for i, (node, score) in pairs if node >= 0]
            )
    return requests


def found_ads(index: Index, found: SearchResult) -> list[list[FoundAd]]:
    """Ads of each request of a beam search, best first, and how the search came to them."""
    slot_BK = index.slot_N[found.ad_code_BK.clamp(min=0)]
    id_BK, path_BKL = index.ad_id_S[slot_BK], torch.stack([level.node_S[slot_BK] for level in index.levels], dim=-1)
    in_beam_BK = (path_BKL[..., -1:] == found.beam_LBW[-1][:, None, :]).any(-1)
    requests = []
    for codes, *columns in zip(
        found.ad_code_BK.tolist(), id_BK.tolist(), found.score_BK.tolist(), in_beam_BK.tolist(), path_BKL.tolist(),
        strict=True,
    ):  # fmt: skip
        requests.append(
            [
                FoundAd(ad_id, score, "beam" if in_beam else "related", tuple(path))
                for code, ad_id, score, in_beam, path in zip(codes, *columns, strict=True)
                if code >= 0
            ]
        )
    return requests
