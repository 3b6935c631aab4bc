"""What the retrieval model is compared with: two towers' dot product, a mixture of logits, levels without residuals.

The two scorers keep the towers, losses and data of the retrieval model; only what makes a logit of the vectors differs,
and neither reads interaction features, as their authors' models don't.

Shape legend: B requests, M candidates, P user vectors, Q ad vectors, X = P Q components, d width, F features, H hidden.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.index.config import RetrievalConfig
from models.index.monn import LevelState, OverArch, RetrievalModel
from models.index.quantizer import LearnedIndex
from models.schema import FeatureSchema

TWO_TOWER_WIDTH = 64
GATE_HIDDEN = 16
TEMPERATURE = 0.1


class Dot(OverArch):
    """Two towers: one user vector, one ad vector, their dot product and the user's bias."""

    def shared(self, state: LevelState, vector_MQd: Tensor, feature_FBM: Tensor) -> Tensor:
        """Logits [B, M] of candidates that are the same for every request."""
        return state.vector_BPd[:, 0] @ vector_MQd[:, 0].T + state.bias_B[:, None]

    def own(self, state: LevelState, vector_BMQd: Tensor, feature_FBM: Tensor) -> Tensor:
        """Logits [B, M] of each request's own candidates."""
        return (state.vector_BPd[:, :1] * vector_BMQd[:, :, 0]).sum(-1) + state.bias_B[:, None]

    def exactly(self, state: LevelState, vector_BMQd: Tensor, feature_FBM: Tensor) -> Tensor:
        """The same as `own`."""
        return self.own(state, vector_BMQd, feature_FBM)


class Mixture(OverArch):
    """Mixture of logits (RAILS, arXiv 2407.15462): gates over P Q cosine logits, by user, ad and their logits."""

    def __init__(self, config: RetrievalConfig, level: int, num_features: int) -> None:
        super().__init__(config, level, num_features)
        self.user_gate = nn.Linear(config.hidden[level], self.num_dots)
        self.ad_gate = nn.Linear(config.num_ad_vectors * config.width, self.num_dots)
        self.pair_gate = nn.Sequential(
            nn.Linear(self.num_dots, GATE_HIDDEN), nn.SiLU(), nn.Linear(GATE_HIDDEN, self.num_dots)
        )

    def shared(self, state: LevelState, vector_MQd: Tensor, feature_FBM: Tensor) -> Tensor:
        """Logits [B, M] of candidates that are the same for every request."""
        user_BPd = functional.normalize(state.vector_BPd, dim=-1)
        logit_BMPQ = torch.einsum("bpd,mqd->bmpq", user_BPd, functional.normalize(vector_MQd, dim=-1))
        return self._mixed(state, logit_BMPQ, self.ad_gate(vector_MQd.flatten(1)))

    def own(self, state: LevelState, vector_BMQd: Tensor, feature_FBM: Tensor) -> Tensor:
        """Logits [B, M] of each request's own candidates."""
        user_BPd = functional.normalize(state.vector_BPd, dim=-1)
        logit_BMPQ = torch.einsum("bpd,bmqd->bmpq", user_BPd, functional.normalize(vector_BMQd, dim=-1))
        return self._mixed(state, logit_BMPQ, self.ad_gate(vector_BMQd.flatten(2)))

    def _mixed(self, state: LevelState, logit_BMPQ: Tensor, ad_gate_X: Tensor) -> Tensor:
        """Logits of the components mixed by gates of the user, the ad ([M, X] or [B, M, X]) and both."""
        logit_BMX = logit_BMPQ.flatten(2)
        gate_BMX = self.user_gate(functional.silu(state.hidden_BH))[:, None] + ad_gate_X + self.pair_gate(logit_BMX)
        mixed_BM: Tensor = (torch.softmax(gate_BMX, dim=-1) * logit_BMX).sum(-1) / TEMPERATURE
        return mixed_BM + state.bias_B[:, None]

    def exactly(self, state: LevelState, vector_BMQd: Tensor, feature_FBM: Tensor) -> Tensor:
        """The same as `own`."""
        return self.own(state, vector_BMQd, feature_FBM)


def two_tower(config: RetrievalConfig, schema: FeatureSchema, seed: int) -> RetrievalModel:
    """One vector a side of twice the width, no interaction features."""
    return _with_scorer(Dot, config, schema, seed)


def mixture_of_logits(config: RetrievalConfig, schema: FeatureSchema, seed: int) -> RetrievalModel:
    """As many vectors a side as the retrieval model has, mixed by learned gates."""
    return _with_scorer(Mixture, config, schema, seed)


def dot_config(config: RetrievalConfig) -> RetrievalConfig:
    """The configuration of `two_tower`."""
    last = config.num_user_vectors[:-1]
    return replace(config, width=TWO_TOWER_WIDTH, num_ad_vectors=1, num_user_vectors=(*last, 1), covisit_neighbours=0)


class Unresidual(LearnedIndex):
    """Every level quantises the ad itself instead of what the levels above left of it."""

    def joined(self, above_XD: Tensor, node_XD: Tensor) -> Tensor:
        """A node is its own entry."""
        return node_XD

    def rest(self, vector_XD: Tensor, node_XD: Tensor) -> Tensor:
        """The whole vector goes on."""
        return vector_XD


def without_residual(config: RetrievalConfig, schema: FeatureSchema, seed: int) -> RetrievalModel:
    """The retrieval model over levels that don't take residuals."""
    model, generator = RetrievalModel(config, schema, seed), torch.Generator().manual_seed(seed)
    model.index = Unresidual(config.level_sizes, config.num_ad_vectors * config.width, generator)
    return model


def _with_scorer(scorer: type[OverArch], config: RetrievalConfig, schema: FeatureSchema, seed: int) -> RetrievalModel:
    model = RetrievalModel(config, schema, seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed + 1)
        num_features = config.num_features(len(schema.groups))
        model.levels[config.num_levels] = scorer(config, config.num_levels, num_features)
    return model
