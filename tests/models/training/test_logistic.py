"""The baseline is what it says: a sum of weights."""

from __future__ import annotations

import torch

from models.training.logistic import Logistic
from tests.models.worlds import make_world


def test_logit_is_a_sum_of_weights() -> None:
    world = make_world(num_users=10, num_ads=8, num_days=1, rows_per_day=20)
    model, batch = Logistic(world.schema), world.days[0].batch(torch.tensor([4]))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    tables, user, ad = model.tables, batch.user, int(batch.ad_code_B[0])
    rows = [
        *tables.user_rows(user.categorical_BC)[0].tolist(),
        *tables.ad_rows(world.ads.categorical_NA[ad : ad + 1])[0].tolist(),
        *tables.context_rows(user.surface_B, user.hour_B)[0].tolist(),
    ]
    dense = torch.cat([user.dense_BD[0], world.ads.dense_NF[ad]])
    expected = tables.weight[rows].sum(0) + model.dense_TF @ dense + model.bias_ST[user.surface_B[0]]
    # The ad's own row counts twice when a field shares its table.
    expected = expected + tables.weight[tables.item_rows(batch.ad_code_B)[0]]
    torch.testing.assert_close(model(batch, world.ads)[0], expected)


def test_a_fresh_model_predicts_the_prior() -> None:
    world = make_world(num_users=10, num_ads=8, num_days=1, rows_per_day=20)
    model = Logistic(world.schema)
    model.set_prior(torch.tensor([[0.1, 0.02], [0.3, 0.04]]))
    day = world.days[0]
    probability = torch.sigmoid(model(day.batch(day.rows()), world.ads))
    torch.testing.assert_close(
        probability[day.surface_R == 1], torch.tensor([[0.3, 0.04]]).expand(int((day.surface_R == 1).sum()), -1)
    )
