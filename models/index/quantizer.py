"""Learning To Index: residual levels of learned nodes (HSNN arXiv 2408.06653 section 4, HILL arXiv 2604.12965).

One level attends with the ad as query and its nodes as keys and values; the attention-weighted sum is the
pseudo ad of the level, and the residual goes on to the next level. Inverse temperature alpha rises during
training, so that soft assignments become the hard ones that are published. Everything here is fp32.

Balance is taken on hard straight-through assignments over a queue of recent batches: soft assignments look
uniform while argmin uses a fraction of the nodes.

Shape legend: N ads of a batch, D width of an ad's code (Q d flattened), L levels, K nodes of a level's codebook,
X nodes of a prefix tree (product of the codebooks down to a level).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Quantised:
    """Result of one pass of ads through the levels."""

    pseudo_LND: tuple[Tensor, ...]
    """Partial sums of the pseudo ads: the approximation of each ad by its path down to each level."""
    soft_LNK: tuple[Tensor, ...]
    hard_LN: tuple[Tensor, ...]
    reconstruction: Tensor
    """Mean squared distance of ads to their approximation by the whole path."""


class LearnedIndex(nn.Module):
    """L codebooks of residual nodes."""

    spread_L: Tensor

    def __init__(self, sizes: tuple[int, ...], dim: int, generator: torch.Generator) -> None:
        super().__init__()
        self.sizes = sizes
        self.codebook_LKD = nn.ParameterList(
            [nn.Parameter(torch.randn(size, dim, generator=generator) * (0.5**level) / dim**0.5)
             for level, size in enumerate(sizes)]
        )  # fmt: skip
        self.register_buffer("spread_L", torch.ones(len(sizes)))

    @property
    def num_levels(self) -> int:
        """L."""
        return len(self.sizes)

    def forward(self, x_ND: Tensor, alpha: float) -> Quantised:
        """Soft pass: attention weights softmax(-alpha d^2 / spread).

        The spread is the mean squared distance to the nearest node, so that alpha is a number without units; in
        training mode it follows the data.
        """
        residual_ND = x_ND.float()
        total_ND = torch.zeros_like(residual_ND)
        pseudo, soft, hard = [], [], []
        for level, codebook_KD in enumerate(self.codebook_LKD):
            distance_NK = squared_distance(residual_ND, codebook_KD)
            nearest = distance_NK.detach().min(dim=1)
            if self.training:
                self.spread_L[level].lerp_(nearest.values.mean().clamp(min=1e-6), 0.05)
            soft_NK = torch.softmax(-alpha * distance_NK / self.spread_L[level].clone(), dim=1)
            pseudo_ND = soft_NK @ codebook_KD
            total_ND = self.joined(total_ND, pseudo_ND)
            residual_ND = self.rest(residual_ND, pseudo_ND)
            pseudo.append(total_ND)
            soft.append(soft_NK)
            hard.append(nearest.indices)
        reconstruction = (total_ND - x_ND).square().sum(dim=1).mean()
        return Quantised(tuple(pseudo), tuple(soft), tuple(hard), reconstruction)

    @torch.no_grad()
    def assign(self, x_ND: Tensor) -> Tensor:
        """Hard path of each ad, [N, L]: nearest node of each level, residual after residual."""
        residual_ND = x_ND.float()
        path = []
        for codebook_KD in self.codebook_LKD:
            node_N = squared_distance(residual_ND, codebook_KD).argmin(dim=1)
            residual_ND = self.rest(residual_ND, codebook_KD[node_N])
            path.append(node_N)
        return torch.stack(path, dim=1)

    def node_vectors(self, path_XL: Tensor) -> Tensor:
        """Vectors [X, D] of nodes given by their path from the root (1 to L columns); differentiable."""
        total_XD: Tensor = self.codebook_LKD[0][path_XL[:, 0]]
        for level in range(1, path_XL.shape[1]):
            total_XD = self.joined(total_XD, self.codebook_LKD[level][path_XL[:, level]])
        return total_XD

    def joined(self, above_XD: Tensor, node_XD: Tensor) -> Tensor:
        """Vectors of nodes from those of their parents and their own entries."""
        return above_XD + node_XD

    def rest(self, vector_XD: Tensor, node_XD: Tensor) -> Tensor:
        """What the next level gets of a vector."""
        return vector_XD - node_XD

    @torch.no_grad()
    def initialise(self, x_ND: Tensor, generator: torch.Generator, *, iterations: int = 10) -> None:
        """Residual k-means on the given ads: start of the codebooks once the ad tower says something."""
        residual_ND = x_ND.float()
        for level, codebook_KD in enumerate(self.codebook_LKD):
            codebook_KD.copy_(k_means(residual_ND, len(codebook_KD), generator, iterations=iterations))
            nearest = squared_distance(residual_ND, codebook_KD).min(dim=1)
            self.spread_L[level] = nearest.values.mean().clamp(min=1e-6)
            residual_ND = self.rest(residual_ND, codebook_KD[nearest.indices])

    @torch.no_grad()
    def follow(self, x_ND: Tensor, rate: float) -> None:
        """One pass of k-means, level by level: every node moves by `rate` towards the mean of the ads it holds.

        Ads keep moving while the scorer learns, and label gradients alone crowd them into few nodes.
        """
        residual_ND = x_ND.float()
        for codebook_KD in self.codebook_LKD:
            node_N = squared_distance(residual_ND, codebook_KD).argmin(dim=1)
            count_K = torch.bincount(node_N, minlength=len(codebook_KD))
            mean_KD = torch.zeros_like(codebook_KD).index_add(0, node_N, residual_ND) / count_K.clamp(min=1)[:, None]
            codebook_KD.copy_(torch.where(count_K[:, None] > 0, torch.lerp(codebook_KD, mean_KD, rate), codebook_KD))
            node_N = squared_distance(residual_ND, codebook_KD).argmin(dim=1)
            residual_ND = self.rest(residual_ND, codebook_KD[node_N])

    @torch.no_grad()
    def reseed(self, x_ND: Tensor, generator: torch.Generator, *, min_share: float) -> int:
        """Move nodes that hold fewer than `min_share` of a fair share of the given ads onto ads of crowded nodes.

        Returns how many nodes were moved.
        """
        residual_ND, moved = x_ND.float(), 0
        for codebook_KD in self.codebook_LKD:
            size = len(codebook_KD)
            node_N = squared_distance(residual_ND, codebook_KD).argmin(dim=1)
            count_K = torch.bincount(node_N, minlength=size)
            dead = (count_K < min_share * len(x_ND) / size).nonzero().squeeze(1)
            if len(dead):
                chosen = torch.multinomial(count_K[node_N].float(), len(dead), True, generator=generator)
                codebook_KD[dead] = residual_ND[chosen]
                node_N = squared_distance(residual_ND, codebook_KD).argmin(dim=1)
                moved += len(dead)
            residual_ND = self.rest(residual_ND, codebook_KD[node_N])
        return moved


class BalanceQueue:
    """Node use over the last batches, and the loss that evens it (FLOPs regulariser of Paria et al. 2020, hard).

    The loss of a level is X sum_x p_x^2 over the nodes x of its prefix tree: 1 at uniform use, X at collapse.
    Its gradient reaches the soft assignments through the straight-through estimator h + q - stopgrad(q).
    """

    def __init__(self, sizes: tuple[int, ...], length: int) -> None:
        self.sizes = sizes
        self.counts: tuple[deque[Tensor], ...] = tuple(deque(maxlen=length) for _ in sizes)

    def loss(self, quantised: Quantised) -> Tensor:
        """Mean over levels of the value above minus 1, and remembers the batch."""
        total = quantised.reconstruction.new_zeros(())
        prefix_N = torch.zeros_like(quantised.hard_LN[0])
        num_nodes = 1
        for level, size in enumerate(self.sizes):
            hard_N, soft_NK = quantised.hard_LN[level], quantised.soft_LNK[level]
            num_nodes *= size
            node_N = prefix_N * size + hard_N
            self.counts[level].append(torch.bincount(node_N, minlength=num_nodes).float())
            use_X = torch.stack(tuple(self.counts[level])).sum(0)
            use_X = use_X / use_X.sum()
            # d/dq of X sum p^2 with p linear in the straight-through assignments of this batch.
            price_NK = use_X[prefix_N[:, None] * size + torch.arange(size)]
            surrogate = 2.0 * num_nodes * (soft_NK * price_NK).sum(dim=1).mean()
            value = num_nodes * use_X.square().sum() - 1.0
            total = total + value + surrogate - surrogate.detach()
            prefix_N = node_N
        return total / len(self.sizes)


def squared_distance(x_ND: Tensor, y_KD: Tensor) -> Tensor:
    """Squared Euclidean distances [N, K], never negative."""
    product_NK = x_ND @ y_KD.T
    return (x_ND.square().sum(1, keepdim=True) - 2.0 * product_NK + y_KD.square().sum(1)).clamp(min=0.0)


@torch.no_grad()
def k_means(x_ND: Tensor, num_nodes: int, generator: torch.Generator, *, iterations: int = 10) -> Tensor:
    """Lloyd's k-means with empty clusters moved onto far points; centres [K, D]."""
    if len(x_ND) == 0:
        raise ValueError("x_ND: there are no ads to cluster")
    chosen = torch.randperm(len(x_ND), generator=generator)[:num_nodes]
    if len(chosen) < num_nodes:
        chosen = torch.cat([chosen, torch.randint(len(x_ND), (num_nodes - len(chosen),), generator=generator)])
    centre_KD = x_ND[chosen].clone()
    for _ in range(iterations):
        nearest = squared_distance(x_ND, centre_KD).min(dim=1)
        count_K = torch.bincount(nearest.indices, minlength=num_nodes)
        sum_KD = torch.zeros_like(centre_KD).index_add(0, nearest.indices, x_ND)
        centre_KD = torch.where(count_K[:, None] > 0, sum_KD / count_K.clamp(min=1)[:, None], centre_KD)
        empty = (count_K == 0).nonzero().squeeze(1)
        if len(empty):
            far = torch.multinomial(nearest.values + 1e-12, len(empty), replacement=True, generator=generator)
            centre_KD[empty] = x_ND[far]
    return centre_KD
