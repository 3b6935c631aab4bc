from __future__ import annotations

import torch

from models.index.crossover import Crossover, measure_crossover
from models.index.publish import publish
from tests.models.index.small import small_ads, small_model, small_users


def test_the_crossover_is_where_the_scan_takes_as_long_as_the_beam() -> None:
    slow_beam = Crossover(num_ads=1000, exact_ms=2.0, beam_ms=5.0)
    assert slow_beam.crossover_ads == 2500
    assert slow_beam.exact_is_faster
    assert "from about 2500 ads" in slow_beam.reason
    fast_beam = Crossover(num_ads=1000, exact_ms=2.0, beam_ms=0.5)
    assert fast_beam.crossover_ads == 250
    assert not fast_beam.exact_is_faster


def test_both_searches_are_timed() -> None:
    generator = torch.Generator().manual_seed(0)
    model, ads = small_model(), small_ads(30, generator)
    with torch.no_grad():
        state = model.user_state(small_users(2, 30, generator), ads)
    measured = measure_crossover(model, publish(model, ads), state, beams=(1, 2), k=3, repeats=2)
    assert measured.num_ads == 30
    assert measured.exact_ms > 0.0
    assert measured.beam_ms > 0.0
