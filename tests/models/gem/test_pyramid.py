"""Chunk bounds, segment sums, and the two resolutions against a plain loop."""

from __future__ import annotations

import torch

from models.batch import HistorySlice
from models.gem import pyramid
from models.gem.pyramid import Pyramid


def _slice(lengths: list[int], num_items: int = 6, seed: int = 0) -> HistorySlice:
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    return HistorySlice(
        start_B1=torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()]),
        item_E=torch.randint(num_items, (total,), generator=generator, dtype=torch.int32),
        kind_E=torch.randint(2, (total,), generator=generator).to(torch.uint8),
        surface_E=torch.randint(2, (total,), generator=generator).to(torch.uint8),
        age_E=torch.rand(total, generator=generator) * 1e5,
    )


def _pyramid(queries: int = 2) -> Pyramid:
    torch.manual_seed(0)
    return Pyramid(num_kinds=2, num_surfaces=2, history_length=40, width=4, num_recent=4, num_queries=queries)


def test_number_of_chunks_grows_with_the_logarithm() -> None:
    assert pyramid.num_chunks(16, 16) == 1
    assert pyramid.num_chunks(17, 16) == 2
    assert pyramid.num_chunks(1000, 16) == 7
    assert pyramid.num_chunks(2000, 16) == 8


def test_chunks_double_and_cover_every_event() -> None:
    bound = pyramid.chunk_bounds(torch.tensor([0, 20, 23, 23]), num_recent=4, num_chunks=4)
    rows = bound[:-1].view(3, 4)
    # 20 events: the newest 4, then 4, then 8, then the 4 that are left.
    assert rows[0].tolist() == [0, 4, 12, 16]
    assert rows[1].tolist() == [20, 20, 20, 20]
    assert rows[2].tolist() == [23, 23, 23, 23]
    assert bound[-1] == 23
    assert bound.diff()[4:8].tolist() == [0, 0, 0, 3]


def test_segment_sum_and_its_gradient() -> None:
    generator = torch.Generator().manual_seed(3)
    table = torch.randn(5, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    index = torch.tensor([4, 0, 0, 2, 4, 1])
    bound = torch.tensor([0, 2, 2, 6])
    out = pyramid.segment_sum(table, index, bound)
    expected = torch.stack([table[[4, 0]].sum(0), torch.zeros(3), table[[0, 2, 4, 1]].sum(0)])
    torch.testing.assert_close(out, expected)
    assert torch.autograd.gradcheck(lambda t: pyramid.segment_sum(t, index, bound), (table,))


def test_chunk_tokens_are_attention_pools() -> None:
    model, history = _pyramid(), _slice([20, 3, 0])
    vector = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    out = model(history, history.item_E.to(torch.int64), vector)
    assert out.token_BTd.shape == (3, model.num_tokens, 4)
    chunk = list(range(4, 12))  # chunk 2 of 5 in row 0: chunk 0 is empty
    event = vector[history.item_E[chunk].long()] + model.kind_Kd[history.kind_E[chunk].long()]
    score = 6.0 * torch.tanh(model.query(event) / 6.0)
    pooled = torch.softmax(score, dim=0).t() @ event
    size = model.count(torch.log1p(torch.tensor([8.0])))
    torch.testing.assert_close(out.token_BTd[0, 4:6], pooled + model.chunk_Jqd[2] + size)


def test_raw_tokens_are_the_newest_events_right_aligned() -> None:
    model, history = _pyramid(), _slice([20, 3, 0])
    vector = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    out = model(history, history.item_E.to(torch.int64), vector)
    valid = out.valid_BT[:, -4:]
    assert valid.tolist() == [[True] * 4, [False, True, True, True], [False] * 4]
    place = model.place_Ad[history.surface_E[22].long()]
    age = model.place_Ad[2 + pyramid.age_bucket(history.age_E[22:23], 16)[0]]
    item = vector[history.item_E[22].long()] + model.kind_Kd[history.kind_E[22].long()]
    torch.testing.assert_close(out.token_BTd[1, -1], item + place + age + model.slot_Rd[-1])


def test_chunk_validity_follows_the_length() -> None:
    model = _pyramid(queries=1)
    out = model(_slice([20, 3, 0]), torch.zeros(23, dtype=torch.int64), torch.zeros(1, 4))
    assert out.valid_BT[:, : model.num_chunks].sum(dim=1).tolist() == [4, 1, 0]


def test_no_events_at_all() -> None:
    model, history = _pyramid(), _slice([0, 0])
    out = model(history, history.item_E.to(torch.int64), torch.zeros(1, 4))
    assert not out.valid_BT.any()
    assert torch.isfinite(out.token_BTd).all()
