"""Publishing: from a trained model and the live ads to an immutable index of tensors.

Only nodes that hold live ads are published, so no node is empty. Nodes of a level are sorted by their path;
the children of a node are therefore contiguous, and so are the ads of a leaf: a visited leaf is one contiguous
read. A node carries its representative (the nearest ad, HSNN arXiv 2408.06653 section 3) and its virtual
features (its most frequent group values with their shares, HILL arXiv 2604.12965).

Shape legend: L levels, K nodes of a level, S slots (live ads in leaf order), N ad codes, Q ad vectors, d width,
G groups, R values kept per node and group, P sketch width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from models.batch import AdTable
from models.index.learners import ad_paths, node_centres
from models.index.monn import RetrievalModel


@dataclass(frozen=True)
class NodeLevel:
    """Published nodes of one level, sorted by path."""

    path_KL: Tensor
    """Codebook entries from the root to this level, [K, level + 1]."""
    vector_KQd: Tensor
    value_KGR: Tensor
    """Most frequent group codes among the node's ads, 0 where there are fewer."""
    weight_KGR: Tensor
    """Share of the node's ads that have the value."""
    representative_K: Tensor
    """Ad code of the nearest ad."""
    child_start_K1: Tensor
    """Children of node k are `[child_start[k], child_start[k + 1])` of the next level, or slots at the last one."""
    node_N: Tensor
    """Node of every ad code, also of retired ads (histories hold them); -1 where the path is not published."""
    node_S: Tensor
    """Node of every slot."""

    @property
    def num_nodes(self) -> int:
        """K."""
        return len(self.path_KL)


@dataclass(frozen=True)
class Index:
    """The searchable corpus: levels of nodes over live ads stored leaf by leaf."""

    levels: tuple[NodeLevel, ...]
    ad_code_S: Tensor
    ad_id_S: Tensor
    vector_SQd: Tensor
    group_SG: Tensor
    slot_N: Tensor
    """Slot of every ad code, -1 for ads that are not published."""
    sketch_SP: Tensor
    """Vectors of pre-ranking (`models/index/prerank.py`)."""
    sketch_bias_S: Tensor

    @property
    def num_ads(self) -> int:
        """S, live ads."""
        return len(self.ad_code_S)

    @property
    def level_sizes(self) -> tuple[int, ...]:
        """Published nodes of every level."""
        return tuple(level.num_nodes for level in self.levels)


@torch.no_grad()
def publish(model: RetrievalModel, ads: AdTable, *, excluded_N: Tensor | None = None) -> Index:
    """Index the live ads of a table; ads that are retired, or true in `excluded_N`, stay out.

    Raises:
        ValueError: no ad is live.
    """
    live_N = ~ads.retired_N if excluded_N is None else ~ads.retired_N & ~excluded_N
    if not bool(live_N.any()):
        raise ValueError(f"ads: none of the {len(live_N)} ads is live")
    vector_NQd = model.ad_vectors(ads)
    return build_index(model, ads, vector_NQd, ad_paths(model, ads, vector_NQd), live_N)


@torch.no_grad()
def build_index(model: RetrievalModel, ads: AdTable, vector_NQd: Tensor, path_NL: Tensor, live_N: Tensor) -> Index:
    """Index given paths (from the codebooks, or from another way to cluster) of the live ads."""
    code_S = live_N.nonzero().squeeze(1)
    key_N = path_key(path_NL, model.config.level_sizes)
    # Leaf by leaf; inside a leaf by ad id, so that equal content gives an equal index.
    order = torch.argsort(ads.ad_id_N[code_S], stable=True)
    order = order[torch.argsort(key_N[-1][code_S[order]], stable=True)]
    code_S = code_S[order]
    slot_N = torch.full_like(ads.ad_id_N, -1)
    slot_N[code_S] = torch.arange(len(code_S), device=code_S.device)
    keys_K = [torch.unique(key[code_S]) for key in key_N]
    levels = []
    for number, key in enumerate(key_N):
        below = keys_K[number + 1] if number + 1 < len(key_N) else None
        levels.append(_level(model, ads, vector_NQd, path_NL[:, : number + 1], key, keys_K[number], below, code_S))
    return Index(
        levels=tuple(levels),
        ad_code_S=code_S,
        ad_id_S=ads.ad_id_N[code_S],
        vector_SQd=vector_NQd[code_S],
        group_SG=ads.group_NG[code_S],
        slot_N=slot_N,
        sketch_SP=model.preranker.ad(vector_NQd[code_S].flatten(1)),
        sketch_bias_S=model.preranker.ad_bias(vector_NQd[code_S].flatten(1)).squeeze(1),
    )


def thinned(index: Index, first: int, every: int) -> Index:
    """The index with the ads of slots `first`, `first + every`, ... only: a sample that takes its share of every leaf.

    It can be scanned; its levels keep all nodes and where all ads are, but their slots are those of the sample.
    """
    slot_S = torch.arange(min(first, index.num_ads - 1), index.num_ads, every, device=index.ad_code_S.device)
    slot_N = torch.full_like(index.slot_N, -1)
    slot_N[index.ad_code_S[slot_S]] = torch.arange(len(slot_S), device=slot_S.device)
    return replace(
        index,
        levels=tuple(replace(level, node_S=level.node_S[slot_S]) for level in index.levels),
        ad_code_S=index.ad_code_S[slot_S],
        ad_id_S=index.ad_id_S[slot_S],
        vector_SQd=index.vector_SQd[slot_S],
        group_SG=index.group_SG[slot_S],
        slot_N=slot_N,
        sketch_SP=index.sketch_SP[slot_S],
        sketch_bias_S=index.sketch_bias_S[slot_S],
    )


def path_key(path_NL: Tensor, sizes: tuple[int, ...]) -> list[Tensor]:
    """One integer a path prefix, for every level; keys of a level sort like its paths."""
    keys = []
    key_N = torch.zeros_like(path_NL[:, 0])
    for level, size in enumerate(sizes):
        key_N = key_N * size + path_NL[:, level]
        keys.append(key_N)
    return keys


def _level(
    model: RetrievalModel, ads: AdTable, vector_NQd: Tensor, path_NL: Tensor, key_N: Tensor, key_K: Tensor,
    below_K: Tensor | None, code_S: Tensor,
) -> NodeLevel:  # fmt: skip
    place_N = torch.searchsorted(key_K, key_N).clamp(max=len(key_K) - 1)
    node_N = torch.where(key_K[place_N] == key_N, place_N, -1)
    node_S = node_N[code_S]
    first_K = torch.searchsorted(node_S, torch.arange(len(key_K), device=node_S.device))
    path_KL = path_NL[code_S[first_K]]
    if below_K is None:
        parent_X = node_S
    else:
        parent_X = torch.searchsorted(key_K, below_K // model.config.level_sizes[path_NL.shape[1]])
    child_start_K1 = torch.searchsorted(parent_X, torch.arange(len(key_K) + 1, device=parent_X.device))
    centre_KD = node_centres(model, path_KL, vector_NQd[code_S], node_S)
    value_KGR, weight_KGR = node_values(ads.group_NG[code_S], node_S, len(key_K), model.config.node_values)
    distance_S = (vector_NQd[code_S].flatten(1) - centre_KD[node_S]).square().sum(1)
    return NodeLevel(
        path_KL=path_KL,
        vector_KQd=model.as_vectors(centre_KD),
        value_KGR=value_KGR,
        weight_KGR=weight_KGR,
        representative_K=code_S[_first_of_each(distance_S, node_S, len(key_K))],
        child_start_K1=child_start_K1,
        node_N=node_N,
        node_S=node_S,
    )


def _first_of_each(value_S: Tensor, node_S: Tensor, num_nodes: int) -> Tensor:
    """Position of the least value in every node; every node has one."""
    order = torch.argsort(value_S, stable=True)
    order = order[torch.argsort(node_S[order], stable=True)]
    return order[torch.searchsorted(node_S[order], torch.arange(num_nodes, device=node_S.device))]


def node_values(group_SG: Tensor, node_S: Tensor, num_nodes: int, num_values: int) -> tuple[Tensor, Tensor]:
    """The `num_values` most frequent known group codes of every node and their share of the node's ads, [K, G, R]."""
    num_groups = group_SG.shape[1]
    value_KGR = group_SG.new_zeros((num_nodes, num_groups, num_values))
    weight_KGR = torch.zeros((num_nodes, num_groups, num_values), device=group_SG.device)
    size_K = torch.bincount(node_S, minlength=num_nodes).clamp(min=1)
    for g in range(num_groups):
        known = group_SG[:, g] > 0
        num_codes = int(group_SG[:, g].max()) + 1 if len(group_SG) else 1
        pair_X, count_X = torch.unique(node_S[known] * num_codes + group_SG[known, g], return_counts=True)
        node_X, code_X = pair_X // num_codes, pair_X % num_codes
        order = torch.argsort(count_X, descending=True, stable=True)
        order = order[torch.argsort(node_X[order], stable=True)]
        node_X, code_X, count_X = node_X[order], code_X[order], count_X[order]
        rank_X = torch.arange(len(node_X), device=node_X.device) - torch.searchsorted(node_X, node_X)
        kept = rank_X < num_values
        value_KGR[node_X[kept], g, rank_X[kept]] = code_X[kept]
        weight_KGR[node_X[kept], g, rank_X[kept]] = count_X[kept].float() / size_K[node_X[kept]]
    return value_KGR, weight_KGR
