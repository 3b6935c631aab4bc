"""How ads get their paths: the joint learner and those it is compared with, behind one interface.

joint     codebooks learn under the model's loss and follow its ads (`models/index/quantizer.py`)
em        expectation-maximisation: residual k-means again every few rounds, paths fixed between them while the model
          learns (JOIM with EM, HSNN arXiv 2408.06653 table 2)
separate  the scorer learns alone, k-means on its final ads, then only the levels learn: an index bolted on (SIL)
random    a balanced tree by a hash of the ad's id (TDM's start)
natural   what advertisers entered: the finest category, then the advertiser, hashed onto as many nodes

The first three share the codebooks; nodes of the last two are the means of their ads.

Shape legend: N ads, L levels, K nodes of a level, S slots, Q ad vectors, d width, D = Q d.
"""

from __future__ import annotations

import torch
from torch import Tensor

from models.batch import AdTable
from models.index.config import RetrievalTraining
from models.index.monn import RetrievalModel

WITH_CODEBOOKS = ("joint", "em", "separate")
MULTIPLIERS = (2_654_435_761, 2_246_822_519, 3_266_489_917, 668_265_263)


@torch.no_grad()
def ad_paths(model: RetrievalModel, ads: AdTable, vector_NQd: Tensor) -> Tensor:
    """Path [N, L] of every ad of a table, also of ads that no training saw."""
    learner, sizes = model.config.learner, model.config.level_sizes
    if learner in WITH_CODEBOOKS:
        return model.index.assign(vector_NQd.flatten(1))
    if learner == "random":
        return torch.stack([_hashed(ads.ad_id_N, level) % size for level, size in enumerate(sizes)], dim=1)
    num_groups = ads.group_NG.shape[1]
    # Groups go from coarse categories to the advertiser; the last level takes the advertiser.
    chosen = [max(0, num_groups - len(sizes) + level) for level in range(len(sizes))]
    return torch.stack([ads.group_NG[:, g] % size for g, size in zip(chosen, sizes, strict=True)], dim=1)


def _hashed(ad_id_N: Tensor, level: int) -> Tensor:
    mixed_N = (ad_id_N + level + 1) * MULTIPLIERS[level % len(MULTIPLIERS)] & 0xFFFF_FFFF
    return (mixed_N ^ (mixed_N >> 15)) * MULTIPLIERS[(level + 1) % len(MULTIPLIERS)] >> 16 & 0xFF_FFFF


def node_centres(model: RetrievalModel, path_KL: Tensor, vector_SQd: Tensor, node_S: Tensor) -> Tensor:
    """Vectors [K, D] of published nodes: from the codebooks, or the means of their ads."""
    if model.config.learner in WITH_CODEBOOKS:
        return model.index.node_vectors(path_KL)
    flat_SD = vector_SQd.flatten(1)
    total_KD = flat_SD.new_zeros((len(path_KL), flat_SD.shape[1])).index_add(0, node_S, flat_SD)
    return total_KD / torch.bincount(node_S, minlength=len(path_KL)).clamp(min=1)[:, None]


class LearnerSchedule:
    """What a learner does to the codebooks during a training: at its start and at every refresh."""

    def __init__(self, learner: str, training: RetrievalTraining) -> None:
        self.learner, self.training = learner, training
        self.rounds = 0

    @property
    def codebook_rate(self) -> float:
        """Rate of the codebooks relative to the towers."""
        return self.training.codebook_rate if self.learner == "joint" else 0.0

    def start(self, model: RetrievalModel, vector_ND: Tensor, generator: torch.Generator) -> None:
        """Place the codebooks by residual k-means on the live ads."""
        if self.learner in WITH_CODEBOOKS:
            model.index.initialise(vector_ND, generator)
            self.rounds = 1

    def refresh(
        self, model: RetrievalModel, vector_ND: Tensor, share: float, progress: float, generator: torch.Generator
    ) -> int:
        """Move the codebooks as the learner does; how many dead nodes were moved.

        Args:
            share: part of the whole training that is done.
            progress: part of the index's own training that is done.
        """
        if self.learner == "em" and progress * self.training.em_rounds >= self.rounds:
            model.index.initialise(vector_ND, generator)
            self.rounds += 1
        if self.learner != "joint":
            return 0
        model.index.follow(vector_ND, self.training.follow_rate)
        if share >= LAST_RESEED:
            return 0
        return model.index.reseed(vector_ND, generator, min_share=self.training.reseed_below)


LAST_RESEED = 0.8
"""Share of training after which nodes are not moved any more: their scorers could not follow."""
