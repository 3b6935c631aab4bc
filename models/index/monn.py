"""MoNN: user tower, ad tower, interaction tower and OverArch, one OverArch a level (HSNN arXiv 2408.06653 section 3).

A user is P_l vectors at level l, an ad or a node is Q vectors. A (request, candidate) pair costs its P Q dot
products, one gather a group for its interaction features, and a small MLP; scoring a request against M shared
candidates is two matrix products and that MLP on [*, B, M]; nothing of size [B, M, d] is made.

Shape legend: B requests, M candidates (ads or nodes), P user vectors, Q ad vectors, d width, G groups, C channels,
F interaction features, I interaction width, H hidden units, T trunk width, R recent events, N ads, L levels,
E events of all requests, U distinct ads of a batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.batch import AdTable, HistorySlice, UserBatch
from models.gem.embeddings import ItemEncoder, Tables, age_bucket, local_codes
from models.index.config import RetrievalConfig
from models.index.covisits import CoVisits
from models.index.interactions import Interest, InterestCounter
from models.index.prerank import PreRanker
from models.index.quantizer import LearnedIndex
from models.schema import FeatureSchema

NUM_AGE_BUCKETS = 24


@dataclass(frozen=True)
class LevelState:
    """What the user tower says to one level."""

    vector_BPd: Tensor
    hidden_BH: Tensor
    """The user's and the context's part of the OverArch's hidden layer."""
    bias_B: Tensor

    def rows(self, row_X: Tensor) -> LevelState:
        """Some requests, in the given order."""
        return LevelState(self.vector_BPd[row_X], self.hidden_BH[row_X], self.bias_B[row_X])


@dataclass(frozen=True)
class UserState:
    """The user side of B requests: everything that search needs, computed once a request."""

    levels: tuple[LevelState, ...]
    """One a level of nodes, from the root, then one for ads."""
    interest: Interest
    sketch_BP: Tensor
    """The request's vector of pre-ranking; P is the sketch's width here."""

    @property
    def num_rows(self) -> int:
        """B."""
        return self.levels[0].bias_B.shape[0]

    def rows(self, row_X: Tensor) -> UserState:
        """Some requests, in the given order."""
        levels = tuple(level.rows(row_X) for level in self.levels)
        return UserState(levels, self.interest.rows(row_X), self.sketch_BP[row_X])


class UserTower(nn.Module):
    """Attributes, dense statistics, attention-pooled recent events, long-history mean and context -> trunk [B, T]."""

    def __init__(self, config: RetrievalConfig, schema: FeatureSchema) -> None:
        super().__init__()
        width = config.table_width
        self.config = config
        self.item = ItemEncoder(schema, width)
        self.num_surfaces = len(schema.surfaces)
        self.event = nn.Embedding(max(1, len(schema.kinds)) * self.num_surfaces * NUM_AGE_BUCKETS, width)
        nn.init.normal_(self.event.weight, std=0.02)
        self.query_AW = nn.Parameter(torch.randn(config.num_attention_queries, width) * width**-0.5)
        self.context_query = nn.Linear(2 * width, config.num_attention_queries * width)
        num_inputs = len(schema.dense_of("user")) + 1
        num_inputs += width * (len(schema.categorical_of("user")) + 2 + config.num_attention_queries)
        num_inputs += width * len(schema.groups)
        self.net = nn.Sequential(
            nn.Linear(num_inputs, config.trunk_width), nn.ReLU(),
            nn.Linear(config.trunk_width, config.trunk_width), nn.ReLU(),
        )  # fmt: skip

    def forward(self, tables: Tables, user: UserBatch, interest: Interest, ads: AdTable) -> Tensor:
        """The trunk [B, T] of B requests."""
        own_BX = tables(tables.user_rows(user.categorical_BC)).flatten(1)
        context_BX = tables(tables.context_rows(user.surface_B, user.hour_B)).flatten(1)
        length_B = user.history.start_B1.diff()
        parts = [
            user.dense_BD,
            torch.log1p(length_B.float())[:, None] * 0.2,
            own_BX,
            context_BX,
            self._recent(tables, user.history, context_BX, ads),
            *self._long(tables, interest),
        ]
        trunk: Tensor = self.net(torch.cat(parts, dim=1))
        return trunk

    def _recent(self, tables: Tables, history: HistorySlice, context_BX: Tensor, ads: AdTable) -> Tensor:
        """Attention-pooled newest events, one read-out a query, [B, A W]."""
        length = self.config.recent_length
        end_B1 = history.start_B1[1:, None]
        place_BR = end_B1 - length + torch.arange(length, device=end_B1.device)
        there_BR = place_BR >= history.start_B1[:-1, None]
        place_X = place_BR[there_BR]
        distinct_U, (local_X,) = local_codes(len(ads.ad_id_N), history.item_E[place_X])
        kind_X, surface_X = history.kind_E[place_X].to(torch.int64), history.surface_E[place_X].to(torch.int64)
        age_X = age_bucket(history.age_E[place_X], NUM_AGE_BUCKETS)
        event_XW = self.item(tables, ads, distinct_U)[local_X]
        event_XW = event_XW + self.event((kind_X * self.num_surfaces + surface_X) * NUM_AGE_BUCKETS + age_X)
        event_BRW = event_XW.new_zeros((*place_BR.shape, event_XW.shape[1]))
        event_BRW = event_BRW.masked_scatter(there_BR[..., None], event_XW)
        query_BAW = self.query_AW + self.context_query(context_BX).view(-1, *self.query_AW.shape)
        score_BAR = query_BAW @ event_BRW.transpose(1, 2)
        score_BAR = score_BAR.masked_fill(~there_BR[:, None], -1e9)
        pooled_BAW: Tensor = torch.softmax(score_BAR, dim=2) @ event_BRW
        return pooled_BAW.flatten(1)

    def _long(self, tables: Tables, interest: Interest) -> list[Tensor]:
        """Mean embedding of the long history per group, [B, W] each; events weigh as in the slowest channel."""
        return [share_BV @ tables(_group_rows(tables, g, share_BV)) for g, share_BV in enumerate(interest.shares())]


class Standardise(nn.Module):
    """Zero mean and unit variance per column by running statistics, which take no gradient.

    Unlike batch normalisation, different samples of ads (shown, engaged with, live) are put on one scale.
    """

    mean_D: Tensor
    variance_D: Tensor
    num_updates: Tensor

    def __init__(self, width: int, momentum: float = 0.02) -> None:
        super().__init__()
        self.momentum = momentum
        self.register_buffer("mean_D", torch.zeros(width))
        self.register_buffer("variance_D", torch.ones(width))
        self.register_buffer("num_updates", torch.zeros((), dtype=torch.int64))

    def forward(self, x_ND: Tensor) -> Tensor:
        """Standardised columns; in training mode a sample of at least 2 rows moves the statistics first."""
        if self.training and len(x_ND) > 1:
            with torch.no_grad():
                self.num_updates += 1
                weight = max(self.momentum, 1.0 / int(self.num_updates))
                self.mean_D.lerp_(x_ND.mean(0), weight)
                self.variance_D.lerp_((x_ND - self.mean_D).square().mean(0), weight)
        # Copies: the statistics may move again before the gradient is taken.
        return (x_ND - self.mean_D.clone()) * torch.rsqrt(self.variance_D.clone() + 1e-6)


class AdTower(nn.Module):
    """Ad id, categories, advertiser, format, creative embedding and dense statistics -> Q vectors of width d.

    Every output is standardised over ads (running mean and variance): a scorer leaves most of its ads' variance in
    few directions, and an index of raw vectors collapses along with the others.
    """

    def __init__(self, config: RetrievalConfig, schema: FeatureSchema) -> None:
        super().__init__()
        width = config.table_width
        self.shape = (config.num_ad_vectors, config.width)
        num_fields = 1 + len(schema.groups) + len(schema.categorical_of("ad"))
        num_inputs = num_fields * width + len(schema.dense_of("ad")) + schema.embedding_dim
        self.net = nn.Sequential(
            nn.Linear(num_inputs, config.trunk_width), nn.ReLU(),
            nn.Linear(config.trunk_width, config.num_ad_vectors * config.width),
            Standardise(config.num_ad_vectors * config.width),
        )  # fmt: skip

    def forward(self, tables: Tables, ads: AdTable, code_M: Tensor) -> Tensor:
        """Vectors [M, Q, d] of ads by code."""
        rows_MX = torch.cat(
            [
                tables.item_rows(code_M)[:, None],
                tables.group_rows(ads.group_NG[code_M]),
                tables.ad_rows(ads.categorical_NA[code_M]),
            ],
            dim=1,
        )
        inputs = [tables(rows_MX).flatten(1), ads.dense_NF[code_M], ads.embedding_NM[code_M]]
        vector_MQd: Tensor = self.net(torch.cat(inputs, dim=1)).view(-1, *self.shape)
        scaled_MQd: Tensor = vector_MQd * self.shape[1] ** -0.5
        return scaled_MQd


class OverArch(nn.Module):
    """One level's heads on the trunk, interaction tower and OverArch."""

    def __init__(self, config: RetrievalConfig, level: int, num_features: int) -> None:
        super().__init__()
        self.num_user_vectors, self.width = config.num_user_vectors[level], config.width
        hidden, num_dots = config.hidden[level], config.num_user_vectors[level] * config.num_ad_vectors
        self.num_dots = num_dots
        self.vectors = nn.Linear(config.trunk_width, self.num_user_vectors * config.width)
        self.user_hidden = nn.Linear(config.trunk_width, hidden)
        self.user_bias = nn.Linear(config.trunk_width, 1)
        self.interaction_IF = nn.Parameter(_init(config.interaction_width, num_features))
        self.interaction_bias_I = nn.Parameter(torch.zeros(config.interaction_width))
        self.hidden_HX = nn.Parameter(_init(hidden, num_dots + config.interaction_width))
        self.output_H = nn.Parameter(torch.randn(hidden) * hidden**-0.5)
        self.skip_X = nn.Parameter(torch.cat([torch.full((num_dots,), 0.3), torch.zeros(config.interaction_width)]))

    def state(self, trunk_BT: Tensor) -> LevelState:
        """What the trunk says to this level."""
        vector_BPd = self.vectors(trunk_BT).view(-1, self.num_user_vectors, self.width)
        return LevelState(vector_BPd, self.user_hidden(trunk_BT), self.user_bias(trunk_BT).squeeze(1))

    def interaction(self, feature_FBM: Tensor) -> Tensor:
        """Output of the interaction tower, [I, B, M]."""
        output_IX = torch.addmm(self.interaction_bias_I[:, None], self.interaction_IF, feature_FBM.flatten(1))
        return torch.relu(output_IX).view(len(output_IX), *feature_FBM.shape[1:])

    def shared(self, state: LevelState, vector_MQd: Tensor, feature_FBM: Tensor) -> Tensor:
        """Logits [B, M] of candidates that are the same for every request."""
        num_rows, num_vectors, width = state.vector_BPd.shape
        flat_Xd = state.vector_BPd.transpose(0, 1).reshape(num_vectors * num_rows, width)
        num_candidates = len(vector_MQd)
        dots = [
            (flat_Xd @ vector_MQd[:, q].T).view(num_vectors, num_rows * num_candidates)
            for q in range(vector_MQd.shape[1])
        ]
        return self._combine(state, torch.cat(dots), feature_FBM)

    def own(self, state: LevelState, vector_BMQd: Tensor, feature_FBM: Tensor) -> Tensor:
        """Logits [B, M] of each request's own candidates."""
        num_rows, num_candidates, num_ad_vectors, _ = vector_BMQd.shape
        dots_BPX = state.vector_BPd @ vector_BMQd.flatten(1, 2).transpose(1, 2)
        dots_BPMQ = dots_BPX.view(num_rows, self.num_user_vectors, num_candidates, num_ad_vectors)
        dots_XZ = dots_BPMQ.permute(3, 1, 0, 2).reshape(self.num_dots, num_rows * num_candidates)
        return self._combine(state, dots_XZ, feature_FBM)

    def _combine(self, state: LevelState, dots_XZ: Tensor, feature_FBM: Tensor) -> Tensor:
        """OverArch on dots [Q P, B M] (all user vectors of an ad vector together) and features."""
        shape = feature_FBM.shape[1:]
        mixed_IZ = self.interaction(feature_FBM).flatten(1)
        dot_HX, mixed_HI = self.hidden_HX[:, : self.num_dots], self.hidden_HX[:, self.num_dots :]
        hidden_HZ = torch.addmm(dot_HX @ dots_XZ, mixed_HI, mixed_IZ)
        hidden_HBM = torch.relu(hidden_HZ.view(len(hidden_HZ), *shape) + state.hidden_BH.T[:, :, None])
        skip_Z = self.skip_X[: self.num_dots] @ dots_XZ + self.skip_X[self.num_dots :] @ mixed_IZ
        logit_BM: Tensor = (self.output_H @ hidden_HBM.flatten(1) + skip_Z).view(shape) + state.bias_B[:, None]
        return logit_BM

    def exactly(self, state: LevelState, vector_BMQd: Tensor, feature_FBM: Tensor) -> Tensor:
        """The same as `own`, by element-wise sums: the bits of a pair's logit depend on nothing but the pair."""
        dots_BMQP = (vector_BMQd[:, :, :, None] * state.vector_BPd[:, None, None]).sum(-1)
        feature_BMF = feature_FBM.permute(1, 2, 0).contiguous()
        mixed_BMI = (feature_BMF[:, :, None] * self.interaction_IF).sum(-1) + self.interaction_bias_I
        input_BMX = torch.cat([dots_BMQP.flatten(2), torch.relu(mixed_BMI)], dim=2)
        hidden_BMH = torch.relu((input_BMX[:, :, None] * self.hidden_HX).sum(-1) + state.hidden_BH[:, None])
        return (hidden_BMH * self.output_H).sum(-1) + (input_BMX * self.skip_X).sum(-1) + state.bias_B[:, None]


class RetrievalModel(nn.Module):
    """Towers, one OverArch a level, the learned index and the ensemble over levels."""

    def __init__(self, config: RetrievalConfig, schema: FeatureSchema, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.schema = schema
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            generator = torch.Generator().manual_seed(seed)
            self.tables = Tables(schema, config.table_width, generator)
            self.counter = InterestCounter(schema, config.half_lives_s)
            self.user_tower = UserTower(config, schema)
            self.ad_tower = AdTower(config, schema)
            self.covisits = CoVisits(config.covisit_decay) if config.covisit_neighbours else None
            num_features = config.num_features(len(schema.groups))
            self.levels = nn.ModuleList([OverArch(config, i, num_features) for i in range(config.num_levels + 1)])
            self.index = LearnedIndex(config.level_sizes, config.num_ad_vectors * config.width, generator)
            self.engagement = nn.Linear(config.trunk_width, config.num_ad_vectors * config.width)
            self.ensemble_LL = nn.Parameter(torch.full((config.num_levels + 1, config.num_levels), -1.0))
            # Nodes need the levels above; an ad's own logit says nearly all, and heavy paths only buy coverage.
            self.ensemble_LL.data[-1] = -3.0
            self.sharpness_L = nn.Parameter(torch.ones(config.num_levels))
            self.preranker = PreRanker(config, num_features)
            self.preranker.requires_grad_(False)

    def level(self, number: int) -> OverArch:
        """OverArch of a level of nodes (0 = root) or, at number L, of ads."""
        module = self.levels[number]
        assert isinstance(module, OverArch)
        return module

    def ensemble_weights(self) -> Tensor:
        """Positive weight [L + 1, L] of an earlier level's logit (column) in the score of a level (row)."""
        weight_LL: Tensor = functional.softplus(self.ensemble_LL).tril(-1)
        return weight_LL

    def sharpness(self) -> Tensor:
        """Positive factor [L] on a level's scores where a listwise loss reads them as logits of a choice.

        Listwise targets are sharper than click rates: without the factor they would inflate calibrated logits.
        """
        return torch.exp(self.sharpness_L)

    def trunk(self, user: UserBatch, ads: AdTable, target_B: Tensor | None = None) -> tuple[Tensor, Interest]:
        """Trunk [B, T] and interest of B requests; training names each row's positive (-1: none)."""
        if self.config.ages_by_order:
            user = replace(user, history=aged_by_order(user.history))
        interest = self.counter(newest(user.history, self.config.history_length), ads)
        if self.covisits is not None:
            interest = replace(interest, covisits=self.covisits, target_B=target_B)
        return self.user_tower(self.tables, user, interest, ads), interest

    def user_state(self, user: UserBatch, ads: AdTable) -> UserState:
        """The user side of B requests; items of histories are codes of `ads`."""
        return self.state_of(*self.trunk(user, ads))

    def state_of(self, trunk_BT: Tensor, interest: Interest) -> UserState:
        """The user side from its trunk."""
        levels = tuple(self.level(i).state(trunk_BT) for i in range(len(self.levels)))
        return UserState(levels, interest, self.preranker.user(trunk_BT.detach()))

    def ad_vectors(self, ads: AdTable, code_M: Tensor | None = None) -> Tensor:
        """Vectors [M, Q, d] of ads by code; of all ads when no codes are given."""
        if code_M is None:
            code_M = torch.arange(len(ads.ad_id_N), device=ads.ad_id_N.device)
        vector_MQd: Tensor = self.ad_tower(self.tables, ads, code_M)
        return vector_MQd

    def as_vectors(self, code_XD: Tensor) -> Tensor:
        """Index codes [X, Q d] as vectors [X, Q, d]."""
        vector_XQd: Tensor = code_XD.view(-1, self.config.num_ad_vectors, self.config.width)
        return vector_XQd


def aged_by_order(history: HistorySlice) -> HistorySlice:
    """The same histories with one minute of age for every newer event."""
    row_E = torch.repeat_interleave(torch.arange(history.num_rows), history.start_B1.diff())
    rank_E = history.start_B1[1:][row_E] - 1 - torch.arange(len(row_E))
    return replace(history, age_E=60.0 * rank_E.to(torch.float32))


def newest(history: HistorySlice, length: int) -> HistorySlice:
    """The newest `length` events of every row."""
    count_B = history.start_B1.diff()
    if len(count_B) == 0 or int(count_B.max()) <= length:
        return history
    kept_B = count_B.clamp(max=length)
    start_B1 = functional.pad(torch.cumsum(kept_B, 0), (1, 0))
    row_E = torch.repeat_interleave(torch.arange(len(kept_B), device=kept_B.device), kept_B)
    place_E = (history.start_B1[1:] - kept_B - start_B1[:-1])[row_E] + torch.arange(len(row_E), device=row_E.device)
    return HistorySlice(
        start_B1=start_B1,
        item_E=history.item_E[place_E],
        kind_E=history.kind_E[place_E],
        surface_E=history.surface_E[place_E],
        age_E=history.age_E[place_E],
    )


def _group_rows(tables: Tables, group: int, share_BV: Tensor) -> Tensor:
    """Rows [V] of all codes of a group."""
    return tables.get_buffer("group_offset")[group] + torch.arange(share_BV.shape[1], device=share_BV.device)


def _init(rows: int, columns: int) -> Tensor:
    weight: Tensor = torch.randn(rows, columns) * columns**-0.5
    return weight
