"""Students: small serving models with a head for the truth and a head for the teacher (ExFM, arXiv 2502.17494).

The net is a DLRM: embeddings of width 8, all pairwise dot products, one hidden layer, over few fields and the
mean of the recent history. The serving head sees true labels only, the distillation head the teacher only,
so a biased teacher shapes the shared backbone and never the served logit.

Shape legend: B rows, n fields, E recent events, M distinct ads of a batch, d width, H hidden units, T tasks,
S surfaces.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.batch import AdTable, Batch, HistorySlice
from models.gem.embeddings import DenseTokens, ItemEncoder, Tables, local_codes
from models.gem.pyramid import segment_sum
from models.schema import FeatureSchema

TABLES = ("tables.weight",)


@dataclass(frozen=True)
class StudentConfig:
    """Sizes of a student."""

    width: int = 8
    hidden: int = 48
    num_recent: int = 20
    dense_hidden: int = 16


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad * ctx.scale, None


def scale_gradient(x: Tensor, scale: float) -> Tensor:
    """Identity whose backward multiplies by `scale` (beta of ExFM)."""
    scaled: Tensor = _ScaleGradient.apply(x, scale)  # type: ignore[no-untyped-call]
    return scaled


def recent_items(history: HistorySlice, num_recent: int) -> tuple[Tensor, Tensor]:
    """Items of the last `num_recent` events of each row, and where each row's begin, [B + 1]."""
    begin_B = torch.maximum(history.start_B1[1:] - num_recent, history.start_B1[:-1])
    length_B = history.start_B1[1:] - begin_B
    bound_B1 = functional.pad(length_B.cumsum(0), (1, 0))
    shift_E = torch.repeat_interleave(begin_B - bound_B1[:-1], length_B)
    return history.item_E.index_select(0, shift_E + torch.arange(len(shift_E))), bound_B1


class Student(nn.Module):
    """A domain model (all surfaces) or a vertical model (rows of one surface): the architecture is the same."""

    def __init__(self, config: StudentConfig, schema: FeatureSchema, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.schema = schema
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._build(config, schema, torch.Generator().manual_seed(seed))

    def _build(self, config: StudentConfig, schema: FeatureSchema, generator: torch.Generator) -> None:
        width, num_tasks = config.width, len(schema.tasks)
        num_dense = len(schema.dense_of("user")) + len(schema.dense_of("ad"))
        self.tables = Tables(schema, width, generator)
        self.items = ItemEncoder(schema, width)
        self.dense = DenseTokens(num_dense, config.dense_hidden, 1, width) if num_dense else None
        num_fields = len(schema.categorical_of("user")) + len(schema.categorical_of("ad")) + 4 + (num_dense > 0)
        first_n, second_n = torch.triu_indices(num_fields, num_fields, offset=1)
        self.register_buffer("pair", first_n * num_fields + second_n, persistent=False)
        self.backbone = nn.Sequential(nn.Linear(len(first_n) + num_fields * width, config.hidden), nn.ReLU())
        self.serving = nn.Linear(config.hidden, num_tasks)
        self.distillation = nn.Linear(config.hidden, num_tasks)
        self.bias_ST = nn.Parameter(torch.zeros(len(schema.surfaces), num_tasks))

    def set_prior(self, rate_ST: Tensor) -> None:
        """Start from known rates [S, T]."""
        with torch.no_grad():
            self.bias_ST.copy_(torch.logit(rate_ST.clamp(1e-4, 1.0 - 1e-4)))

    def forward(self, batch: Batch, ads: AdTable) -> Tensor:
        """True logits [B, T] of the serving head."""
        logit_BT: Tensor = self.serving(self._hidden(batch, ads)) + self.bias_ST[batch.user.surface_B]
        return logit_BT

    def both_heads(self, batch: Batch, ads: AdTable, beta: float) -> tuple[Tensor, Tensor]:
        """Logits of the serving head and of the distillation head, whose gradient into the backbone is times beta."""
        hidden_BH = self._hidden(batch, ads)
        bias_BT = self.bias_ST[batch.user.surface_B]
        taught_BT = self.distillation(scale_gradient(hidden_BH, beta)) + bias_BT.detach()
        return self.serving(hidden_BH) + bias_BT, taught_BT

    def _hidden(self, batch: Batch, ads: AdTable) -> Tensor:
        user, code_B = batch.user, batch.ad_code_B
        rows_BF = torch.cat(
            [
                self.tables.user_rows(user.categorical_BC),
                self.tables.ad_rows(ads.categorical_NA[code_B]),
                self.tables.context_rows(user.surface_B, user.hour_B),
            ],
            dim=1,
        )
        recent_E, bound_B1 = recent_items(user.history, self.config.num_recent)
        code_M, (candidate_B, item_E) = local_codes(len(ads.ad_id_N), code_B, recent_E)
        vector_Md = self.items(self.tables, ads, code_M)
        count_B1 = bound_B1.diff().clamp(min=1)[:, None]
        recent_Bd = segment_sum(vector_Md, item_E, bound_B1) / count_B1
        tokens = [self.tables(rows_BF), vector_Md.index_select(0, candidate_B)[:, None], recent_Bd[:, None]]
        if self.dense is not None:
            tokens.append(self.dense(torch.cat([user.dense_BD, ads.dense_NF[code_B]], dim=1)))
        x_Bnd = torch.cat(tokens, dim=1)
        dots_Bnn = torch.bmm(x_Bnd, x_Bnd.transpose(1, 2))
        dots_BP = dots_Bnn.flatten(1).index_select(1, self.get_buffer("pair"))
        hidden: Tensor = self.backbone(torch.cat([dots_BP, x_Bnd.flatten(1)], dim=1))
        return hidden


class Adapter(nn.Module):
    """Student adapter (ExFM section 3.3): refines the teacher's logits by the newest labels, a task and surface each.

    It starts as the identity and is updated first in every step; its stop-gradient output teaches.
    """

    def __init__(self, num_surfaces: int, num_tasks: int, hidden: int = 16) -> None:
        super().__init__()
        self.num_surfaces = num_surfaces
        out = nn.Linear(hidden, num_tasks)
        nn.init.zeros_(out.weight)
        nn.init.zeros_(out.bias)
        self.net = nn.Sequential(nn.Linear(num_tasks + num_surfaces, hidden), nn.Tanh(), out)

    def forward(self, teacher_BT: Tensor, surface_B: Tensor) -> Tensor:
        """Refined logits [B, T]."""
        surface_BS = functional.one_hot(surface_B, self.num_surfaces).to(teacher_BT.dtype)
        refined: Tensor = teacher_BT + self.net(torch.cat([teacher_BT, surface_BS], dim=1))
        return refined
