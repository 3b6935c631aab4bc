"""Shadow requests of positives-only logs say of a user exactly what the training frame says."""

import numpy as np
import torch
from torch.testing import assert_close

from dagster_project.lib.serving_stages import _logged_requests
from tests.models.worlds import make_world


def test_requests_carry_what_was_known_before_the_choice() -> None:
    data = make_world(num_users=30, num_ads=20, num_days=1, rows_per_day=60).days[0]
    row_B = np.array([3, 11, 40])
    requests = _logged_requests(data, row_B)
    batch = data.user_batch(torch.from_numpy(row_B))
    for number, request in enumerate(requests):
        events = slice(int(batch.history.start_B1[number]), int(batch.history.start_B1[number + 1]))
        history = request.user.history
        assert history["item"].tolist() == batch.history.item_E[events].tolist()
        assert history["kind"].tolist() == batch.history.kind_E[events].tolist()
        age = request.timestamp_us // 1_000_000 - history["time"].astype(np.int64)
        assert age.tolist() == batch.history.age_E[events].to(torch.int64).tolist()
        assert_close(torch.from_numpy(np.asarray(request.user.dense)), batch.dense_BD[number])
        assert request.surface == data.schema.surfaces[int(batch.surface_B[number])]
