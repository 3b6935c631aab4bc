"""Pre-ranking: a sketch of the serving score, cheap enough for every ad under a wide beam.

A sketch is one short vector a request and one an ad, a bias an ad, and one weight a feature of the interaction tower:
its cost is a thirtieth of the ad scorer's, so that a beam may hold a large part of the ads and only the best of them
are scored in full (the h-indexer of Zhai et al., arXiv 2306.04039, put under a learned tree). It is distilled from the
finished scorer and shapes nothing: towers, levels and paths are what they would be without it. Weights of features are
summed once a request into one table a group, so that a candidate costs one look-up a group.

Shape legend: B requests, T trunk width, P sketch width, S slots, D width of an ad's code, G groups, C channels,
F = G C + V interaction features, V of the candidate itself, M candidates, X sampled requests, J sampled slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from models.index import covisits
from models.index.config import RetrievalConfig
from models.index.interactions import Interest


@dataclass(frozen=True)
class Sketch:
    """What a request brings to pre-ranking."""

    vector_BP: Tensor
    table_GBV: tuple[Tensor, ...]
    """Per group: the weighted features [B, codes] of every value."""
    itself_BS: Tensor
    """The weighted features of every slot itself: visited before, co-visited with the history."""

    def scores(self, sketch_SP: Tensor, bias_S: Tensor, group_SG: Tensor, slot_BM: Tensor) -> Tensor:
        """Sketched serving scores [B, M] of each request's own slots."""
        score_BM = torch.bmm(sketch_SP[slot_BM], self.vector_BP[:, :, None]).squeeze(2)
        score_BM += bias_S[slot_BM]
        score_BM += self.itself_BS.gather(1, slot_BM)
        for table_BV, code_S in zip(self.table_GBV, group_SG.unbind(1), strict=True):
            score_BM += table_BV.gather(1, code_S[slot_BM])
        return score_BM


class PreRanker(nn.Module):
    """Weights of the sketch."""

    def __init__(self, config: RetrievalConfig, num_features: int) -> None:
        super().__init__()
        code_width = config.num_ad_vectors * config.width
        self.user = nn.Linear(config.trunk_width, config.sketch_width)
        self.ad = nn.Linear(code_width, config.sketch_width)
        self.ad_bias = nn.Linear(code_width, 1)
        self.feature_F = nn.Parameter(torch.zeros(num_features))

    def sketch(self, user_BP: Tensor, interest: Interest, slot_N: Tensor, num_slots: int) -> Sketch:
        """The request side, with the weights of the features summed; `slot_N` is the slot of every ad code."""
        num_channels, num_groups = interest.num_channels, len(interest.num_codes_G)
        weight_GC = self.feature_F[: num_groups * num_channels].view(num_groups, num_channels)
        tables = [torch.einsum("c,cbv->bv", weight_C, count_CBV)
                  for weight_C, count_CBV in zip(weight_GC, interest.counts, strict=True)]  # fmt: skip
        weight_V = self.feature_F[num_groups * num_channels :]
        key_Z, value_ZC = interest.distinct
        pairs = [(key_Z, torch.log1p(value_ZC) @ weight_V[:num_channels])]
        if interest.covisits is not None:
            key_Z, value_ZK = interest.related_pairs
            pairs.append((key_Z, covisits.features(value_ZK.T).T @ weight_V[num_channels:]))
        itself_X = user_BP.new_zeros(interest.num_rows * num_slots)
        for key_Z, value_Z in pairs:
            slot_Z = slot_N[key_Z % interest.num_ads]
            there_Z = slot_Z >= 0
            place_X = (key_Z // interest.num_ads * num_slots + slot_Z)[there_Z]
            itself_X = itself_X.index_add(0, place_X, value_Z[there_Z])
        return Sketch(user_BP, tuple(tables), itself_X.view(interest.num_rows, num_slots))


@dataclass(frozen=True)
class SketchSample:
    """What the sketch learns from: sampled requests, and of each the best slots and some others."""

    trunk_XT: Tensor
    feature_FXJ: Tensor
    slot_XJ: Tensor
    score_XJ: Tensor
    """Serving scores, the `num_best` largest first; -inf where an ad may not be answered."""
    log_weight_XJ: Tensor
    """Log of how many slots each one stands for."""
    num_best: int


STEPS, ROWS, RATE = 400, 32, 6e-3


def fit_sketch(ranker: PreRanker, code_SD: Tensor, sample: SketchSample, generator: torch.Generator) -> float:
    """Distil the serving scores; returns the last mean cross entropy.

    The sketch is asked which slots are the best of a request (listwise, each of them an equal share of the target);
    a regression over those slots then puts it on the scale of the scores, which bids need.
    """
    temperature = nn.Parameter(torch.zeros(()))
    ranker.requires_grad_(True)
    optimizer = torch.optim.Adam([*ranker.parameters(), temperature], lr=RATE)
    losses: list[float] = []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = RATE * (1.0 - step / STEPS)
        rows = torch.randint(len(sample.trunk_XT), (ROWS,), generator=generator)
        sketched_RJ = _sketched(ranker, code_SD, sample, rows)
        allowed_RJ = sample.score_XJ[rows] > -torch.inf
        logit_RJ = sketched_RJ * temperature.exp() + sample.log_weight_XJ[rows]
        log_share_RJ = torch.log_softmax(logit_RJ.masked_fill(~allowed_RJ, -1e9), dim=1)[:, : sample.num_best]
        best_RJ = allowed_RJ[:, : sample.num_best]
        loss = -(log_share_RJ * best_RJ).sum() / best_RJ.sum().clamp(min=1)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(loss.detach()))
    _rescale(ranker, code_SD, sample)
    ranker.requires_grad_(False)
    return sum(losses[-20:]) / len(losses[-20:])


def _sketched(ranker: PreRanker, code_SD: Tensor, sample: SketchSample, rows: Tensor) -> Tensor:
    ad_RJD = code_SD[sample.slot_XJ[rows]]
    user_RP = ranker.user(sample.trunk_XT[rows])
    score_RJ: Tensor = torch.bmm(ranker.ad(ad_RJD), user_RP[:, :, None]).squeeze(2)
    score_RJ = score_RJ + ranker.ad_bias(ad_RJD).squeeze(2)
    feature_RJ: Tensor = torch.einsum("f,frj->rj", ranker.feature_F, sample.feature_FXJ[:, rows])
    return score_RJ + feature_RJ


@torch.no_grad()
def _rescale(ranker: PreRanker, code_SD: Tensor, sample: SketchSample) -> None:
    """Scale and shift by least squares on the best slots: slope within requests, shift over all."""
    sketched_XJ = torch.cat(
        [_sketched(ranker, code_SD, sample, rows)[:, : sample.num_best]
         for rows in torch.split(torch.arange(len(sample.trunk_XT)), 256)]
    )  # fmt: skip
    score_XJ = sample.score_XJ[:, : sample.num_best]
    whole_X = (score_XJ > -torch.inf).all(1)
    x_XJ, y_XJ = sketched_XJ[whole_X], score_XJ[whole_X]
    x_mean, y_mean = x_XJ.mean(1, keepdim=True), y_XJ.mean(1, keepdim=True)
    slope = ((x_XJ - x_mean) * (y_XJ - y_mean)).sum() / (x_XJ - x_mean).square().sum().clamp(min=1e-12)
    if not bool(torch.isfinite(slope)) or float(slope) <= 0.0:
        return
    for parameter in (ranker.user.weight, ranker.user.bias, ranker.ad_bias.weight, ranker.ad_bias.bias):
        parameter.mul_(slope)
    ranker.feature_F.mul_(slope)
    ranker.ad_bias.bias.add_(y_mean.mean() - slope * x_mean.mean())
