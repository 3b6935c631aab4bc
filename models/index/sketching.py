"""What pre-ranking learns from: serving scores of sampled requests on their best ads and on drawn ones.

Shape legend: X requests, B requests of a block, S slots, J sampled slots, F interaction features, T trunk width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from models.data import FrameData
from models.index.monn import RetrievalModel
from models.index.prerank import SketchSample, fit_sketch
from models.index.publish import Index
from models.index.scoring import ad_features, scan_scores

REQUESTS, BLOCK = 2048, 32
NUM_BEST, NUM_DRAWN = 32, 224


def distil_sketch(model: RetrievalModel, index: Index, data: FrameData, *, seed: int) -> None:
    """Fit the model's pre-ranker to its serving scores on requests of a day; an index must be published again after.

    The model must be in evaluation mode. A day without requests leaves the pre-ranker as it is.
    """
    generator = torch.Generator().manual_seed(seed)
    rows_R = data.rows()
    if model.config.training.impression_weight == 0.0:
        rows_R = rows_R[data.label_RT[rows_R, 0] > 0.5]
    rows_X = rows_R[torch.randperm(len(rows_R), generator=generator)[:REQUESTS]]
    if len(rows_X):
        sample = sketch_sample(model, index, data, rows_X, generator)
        fit_sketch(model.preranker, index.vector_SQd.flatten(1), sample, generator)


@torch.no_grad()
def sketch_sample(
    model: RetrievalModel, index: Index, data: FrameData, rows_X: Tensor, generator: torch.Generator
) -> SketchSample:
    """Serving scores and features of the requests' best slots and of as many uniformly drawn ones as J leaves."""
    num_best = min(NUM_BEST, index.num_ads)
    parts: list[tuple[Tensor, ...]] = []
    for rows_B in torch.split(rows_X, BLOCK):
        trunk_BT, interest = model.trunk(data.user_batch(rows_B), data.ads)
        state = model.state_of(trunk_BT, interest)
        score_BS = scan_scores(model, index, state)
        if model.config.exclude_seen:
            held_BS = interest.holds(index.ad_code_S.expand(len(rows_B), -1))
            score_BS = score_BS.masked_fill(held_BS, -torch.inf)
        best_BJ = score_BS.topk(num_best, dim=1).indices
        drawn_BJ = torch.randint(index.num_ads, (len(rows_B), NUM_DRAWN), generator=generator)
        slot_BJ = torch.cat([best_BJ, drawn_BJ], dim=1)
        is_best_BS = torch.zeros_like(score_BS, dtype=torch.bool).scatter_(1, best_BJ, True)
        twice_BJ = is_best_BS.gather(1, slot_BJ)
        twice_BJ[:, :num_best] = False
        score_BJ = score_BS.gather(1, slot_BJ).masked_fill(twice_BJ, -torch.inf)
        parts.append((trunk_BT, ad_features(index, state, slot_BJ).movedim(1, 0), slot_BJ, score_BJ))
    trunk_XT, feature_XFJ, slot_XJ, score_XJ = (torch.cat(part) for part in zip(*parts, strict=True))
    log_weight_XJ = torch.zeros_like(score_XJ)
    log_weight_XJ[:, num_best:] = math.log(max(1, index.num_ads - num_best) / NUM_DRAWN)
    return SketchSample(trunk_XT, feature_XFJ.movedim(1, 0), slot_XJ, score_XJ, log_weight_XJ, num_best)
