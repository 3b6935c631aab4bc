"""The one currency of every comparison: FLOPs of a request relative to scoring every ad.

cost = (sum of node FLOPs + ad FLOPs) / (N x ad FLOPs), each level with its own MoNN. FLOPs of a candidate are
those of its dot products, its interaction features, the interaction tower and the OverArch; the towers, which
run once a request or once an ad, are not counted on either side. Look-ups count one operation a value.

Shape legend: B requests, L levels.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from models.index.config import RetrievalConfig


@dataclass(frozen=True)
class CandidateCost:
    """FLOPs of scoring one node of every level and one ad, and of pre-ranking one ad."""

    node_L: tuple[int, ...]
    ad: int
    sketch: int

    def request(
        self, nodes_scored_BL: Tensor, ads_scored_B: Tensor, num_ads: int, preranked_B: Tensor | None = None
    ) -> Tensor:
        """Cost of requests, [B] float64; a full scan by the ad scorer costs 1."""
        nodes_BL = nodes_scored_BL.double()
        flops_B = (nodes_BL * nodes_BL.new_tensor(self.node_L)).sum(1) + ads_scored_B.double() * self.ad
        if preranked_B is not None:
            flops_B = flops_B + preranked_B.double() * self.sketch
        return flops_B / (num_ads * self.ad)


def candidate_cost(config: RetrievalConfig, num_groups: int) -> CandidateCost:
    """FLOPs a candidate of every level, from the sizes of the configuration."""
    num_features = config.num_features(num_groups)
    flops = []
    for level in range(config.num_levels + 1):
        num_dots = config.num_user_vectors[level] * config.num_ad_vectors
        num_inputs = num_dots + config.interaction_width
        dots = 2 * num_dots * config.width
        is_ad = level == config.num_levels
        features = num_features if is_ad else 2 * num_features * config.node_values
        tower = 2 * num_features * config.interaction_width + config.interaction_width
        over = 2 * config.hidden[level] * (num_inputs + 1) + config.hidden[level] + 2 * num_inputs
        ensemble = 2 * level
        flops.append(dots + features + tower + over + ensemble)
    # The dot product; bias and features of the ad itself, a look-up and a sum each; the same for every group.
    sketch = 2 * config.sketch_width + 2 * 2 + 2 * num_groups
    return CandidateCost(node_L=tuple(flops[:-1]), ad=flops[-1], sketch=sketch)
