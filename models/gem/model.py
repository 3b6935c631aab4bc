"""GEM: the ads foundation model. Wukong over features, InterFormer exchange with a two-resolution history,
one trunk for all surfaces with per-surface gates and heads, one logit a task.

Logits are true logits: training adds the sampling offset to them, so that `sigmoid(forward(...))` is the
probability on all impressions, sampled or not.

Shape legend: B rows, n feature tokens, T sequence tokens, s summary tokens, M distinct ads of a batch,
S surfaces, T_ tasks (named `_BT` in outputs), H head width, d width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.batch import AdTable, Batch
from models.gem.embeddings import DenseTokens, ItemEncoder, Tables, local_codes
from models.gem.interformer import FeatureSummary, SequenceLayer, SequenceSummary
from models.gem.match import match_features, num_match_features
from models.gem.pyramid import Pyramid
from models.gem.wukong import LayerAttention, WukongLayer
from models.schema import FeatureSchema

_EMPTY_BIAS = -1e4


@dataclass(frozen=True)
class GemConfig:
    """Sizes of GEM."""

    width: int = 16
    num_layers: int = 2
    num_fm: int = 8
    num_linear: int = 8
    fm_rank: int = 8
    fm_hidden: int = 128
    num_summary: int = 2
    num_pooled: int = 2
    num_recent_summary: int = 2
    num_heads: int = 1
    num_recent: int = 16
    num_chunk_queries: int = 1
    dense_hidden: int = 32
    dense_tokens: int = 2
    head_hidden: int = 64
    dropout: float = 0.0


class GemLayer(nn.Module):
    """Summaries both ways, then the feature side and (but for the last layer) the sequence side in parallel."""

    def __init__(self, config: GemConfig, num_in: int, *, is_first: bool, is_last: bool) -> None:
        super().__init__()
        width, num_summary = config.width, config.num_summary
        # The last layer's feature summary would have no reader.
        self.feature_summary = None if is_last and not is_first else FeatureSummary(num_in, num_summary, width)
        self.sequence_summary = SequenceSummary(num_summary, config.num_pooled, config.num_recent_summary, width)
        num_tokens = num_in + self.sequence_summary.num_tokens
        self.features = WukongLayer(
            num_tokens, config.num_fm, config.num_linear, width, config.fm_rank, config.fm_hidden
        )
        self.attention = None if is_first else LayerAttention(width)
        self.sequence = None if is_last else SequenceLayer(num_summary, width, config.num_heads)

    def forward(self, x_Bnd: Tensor, s_BTd: Tensor, bias_BT: Tensor, earlier: list[Tensor]) -> tuple[Tensor, Tensor]:
        """New feature tokens and new sequence tokens; `earlier` are the feature tokens of layers so far.

        The first layer puts the feature summary before the sequence as CLS tokens.
        """
        summary_Bsd = None if self.feature_summary is None else self.feature_summary(x_Bnd)
        if self.attention is None:
            assert summary_Bsd is not None
            s_BTd = torch.cat([summary_Bsd, s_BTd], dim=1)
        sequence_Bcd = self.sequence_summary(s_BTd, bias_BT)
        next_Bnd: Tensor = self.features(torch.cat([x_Bnd, sequence_Bcd], dim=1))
        if self.attention is not None:
            next_Bnd = self.attention(next_Bnd, torch.cat(earlier, dim=1))
        if self.sequence is not None:
            s_BTd = self.sequence(s_BTd, summary_Bsd, bias_BT)
        return next_Bnd, s_BTd


class SurfaceHeads(nn.Module):
    """Shared MLP, a gate a surface over its units, and a linear head a surface and task."""

    def __init__(self, num_in: int, hidden: int, num_surfaces: int, num_tasks: int, dropout: float) -> None:
        super().__init__()
        self.shared = nn.Sequential(nn.Linear(num_in, hidden), nn.ReLU(), nn.Dropout(dropout))
        self.gate_SH = nn.Parameter(torch.zeros(num_surfaces, hidden))
        self.weight_STH = nn.Parameter(torch.randn(1, num_tasks, hidden).repeat(num_surfaces, 1, 1) * hidden**-0.5)
        self.bias_ST = nn.Parameter(torch.zeros(num_surfaces, num_tasks))

    def forward(self, flat_BF: Tensor, surface_B: Tensor) -> Tensor:
        """Logits [B, T]."""
        surface_BS = functional.one_hot(surface_B, self.bias_ST.shape[0]).to(flat_BF.dtype)
        unit_BH = self.shared(flat_BF) * (surface_BS @ (2.0 * torch.sigmoid(self.gate_SH)))
        all_BST = torch.einsum("bh,sth->bst", unit_BH, self.weight_STH) + self.bias_ST
        return (all_BST * surface_BS[:, :, None]).sum(dim=1)


class Gem(nn.Module):
    """The foundation model. `seed` decides the initial weights."""

    def __init__(self, config: GemConfig, schema: FeatureSchema, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.schema = schema
        generator = torch.Generator().manual_seed(seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._build(config, schema, generator)

    def _build(self, config: GemConfig, schema: FeatureSchema, generator: torch.Generator) -> None:
        width = config.width
        self.tables = Tables(schema, width, generator)
        self.items = ItemEncoder(schema, width)
        self.pyramid = Pyramid(
            num_kinds=len(schema.kinds), num_surfaces=len(schema.surfaces), history_length=schema.history_length,
            width=width, num_recent=config.num_recent, num_queries=config.num_chunk_queries,
        )  # fmt: skip
        num_user, num_ad = len(schema.dense_of("user")), len(schema.dense_of("ad"))
        num_match = num_match_features(len(schema.groups), len(schema.kinds))
        self.dense = nn.ModuleList(
            DenseTokens(size, config.dense_hidden, config.dense_tokens, width)
            for size in (num_user, num_ad, num_match, num_user + num_ad + num_match)
            if size
        )
        num_fields = len(schema.categorical_of("user")) + len(schema.categorical_of("ad"))
        num_in = num_fields + 3 + len(self.dense) * config.dense_tokens
        self.layers = nn.ModuleList()
        for index in range(config.num_layers):
            is_last = index == config.num_layers - 1
            self.layers.append(GemLayer(config, num_in, is_first=index == 0, is_last=is_last))
            num_in = config.num_fm + config.num_linear
        self.heads = SurfaceHeads(
            num_in * width, config.head_hidden, len(schema.surfaces), len(schema.tasks), config.dropout
        )

    def set_prior(self, rate_ST: Tensor) -> None:
        """Start from known rates [S, T]: the head biases become their logits, so that no step is spent on them."""
        with torch.no_grad():
            self.heads.bias_ST.copy_(torch.logit(rate_ST.clamp(1e-4, 1.0 - 1e-4)))

    def forward(self, batch: Batch, ads: AdTable) -> Tensor:
        """True logits [B, T] of the batch's pairs."""
        user, history = batch.user, batch.user.history
        code_M, (candidate_B, item_E) = local_codes(len(ads.ad_id_N), batch.ad_code_B, history.item_E)
        vector_Md = self.items(self.tables, ads, code_M)
        x_Bnd = self._features(batch, ads, vector_Md.index_select(0, candidate_B))
        sequence = self.pyramid(history, item_E, vector_Md)
        s_BTd, valid_BT = sequence.token_BTd, sequence.valid_BT
        bias_BT = torch.zeros(valid_BT.shape).masked_fill_(~valid_BT, _EMPTY_BIAS)
        bias_BT = functional.pad(bias_BT, (self.config.num_summary, 0))
        earlier: list[Tensor] = []
        for layer in self.layers:
            earlier.append(x_Bnd)
            x_Bnd, s_BTd = layer(x_Bnd, s_BTd, bias_BT, earlier)
        logits_BT: Tensor = self.heads(x_Bnd.flatten(1), user.surface_B)
        return logits_BT

    def _features(self, batch: Batch, ads: AdTable, candidate_Bd: Tensor) -> Tensor:
        user, code_B = batch.user, batch.ad_code_B
        rows_BF = torch.cat(
            [
                self.tables.user_rows(user.categorical_BC),
                self.tables.ad_rows(ads.categorical_NA[code_B]),
                self.tables.context_rows(user.surface_B, user.hour_B),
            ],
            dim=1,
        )
        match_BF = match_features(user.history, ads, code_B, len(self.schema.kinds), self.config.num_recent)
        ad_BF = ads.dense_NF[code_B]
        inputs = [user.dense_BD, ad_BF, match_BF, torch.cat([user.dense_BD, ad_BF, match_BF], dim=1)]
        tokens = [self.tables(rows_BF), candidate_Bd[:, None, :]]
        for net, dense_BF in zip(self.dense, [i for i in inputs if i.shape[1]], strict=True):
            tokens.append(net(dense_BF))
        return torch.cat(tokens, dim=1)
