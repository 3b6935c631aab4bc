"""Logistic regression, the floor every model must clear: hashed categorical fields without crosses, and dense ones.

It sees the same rows in the same passes as GEM, through the same loop, but no history.

Shape legend: B rows, F fields, T tasks.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from models.batch import AdTable, Batch
from models.gem.embeddings import Tables
from models.schema import FeatureSchema

TABLES = ("tables.weight",)


class Logistic(nn.Module):
    """One weight a field value and task, one a dense feature and task, one bias a surface and task."""

    def __init__(self, schema: FeatureSchema, seed: int = 0) -> None:
        super().__init__()
        num_tasks = len(schema.tasks)
        self.tables = Tables(schema, num_tasks, torch.Generator().manual_seed(seed), std=0.0)
        num_dense = len(schema.dense_of("user")) + len(schema.dense_of("ad"))
        self.dense_TF = nn.Parameter(torch.zeros(num_tasks, num_dense))
        self.bias_ST = nn.Parameter(torch.zeros(len(schema.surfaces), num_tasks))

    def set_prior(self, rate_ST: Tensor) -> None:
        """Start from known rates [S, T]."""
        with torch.no_grad():
            self.bias_ST.copy_(torch.logit(rate_ST.clamp(1e-4, 1.0 - 1e-4)))

    def forward(self, batch: Batch, ads: AdTable) -> Tensor:
        """True logits [B, T]."""
        user, code_B = batch.user, batch.ad_code_B
        rows_BF = torch.cat(
            [
                self.tables.user_rows(user.categorical_BC),
                self.tables.ad_rows(ads.categorical_NA[code_B]),
                self.tables.context_rows(user.surface_B, user.hour_B),
                self.tables.item_rows(code_B)[:, None],
            ],
            dim=1,
        )
        dense_BF = torch.cat([user.dense_BD, ads.dense_NF[code_B]], dim=1)
        logit_BT: Tensor = self.tables(rows_BF).sum(dim=1) + dense_BF @ self.dense_TF.t()
        return logit_BT + self.bias_ST[user.surface_B]
