import torch
from hypothesis import given
from hypothesis import strategies as st

from models.batch import History, gather_history


def make_history(counts: list[int]) -> History:
    total = sum(counts)
    return History(
        offset_U1=torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()]),
        item_E=torch.arange(total, dtype=torch.int32),
        time_E=torch.arange(total) * 10,
        kind_E=torch.zeros(total, dtype=torch.uint8),
        surface_E=torch.zeros(total, dtype=torch.uint8),
    )


def test_gather_by_hand() -> None:
    history = make_history([3, 0, 4])
    got = gather_history(
        history, torch.tensor([2, 0, 1]), torch.tensor([3, 3, 0]), torch.tensor([100, 25, 7]) * 1_000_000, max_length=2
    )
    assert got.start_B1.tolist() == [0, 2, 4, 4]
    assert got.item_E.tolist() == [4, 5, 1, 2]
    assert got.age_E.tolist() == [60.0, 50.0, 15.0, 5.0]
    assert got.num_rows == 3


@given(
    counts=st.lists(st.integers(0, 7), min_size=1, max_size=6),
    data=st.data(),
    max_length=st.integers(1, 9),
)
def test_gather_equals_a_loop(counts: list[int], data: st.DataObject, max_length: int) -> None:
    history = make_history(counts)
    users = data.draw(st.lists(st.integers(0, len(counts) - 1), max_size=8))
    ends = [data.draw(st.integers(0, counts[u])) for u in users]
    got = gather_history(
        history, torch.tensor(users, dtype=torch.int64), torch.tensor(ends, dtype=torch.int64),
        torch.full((len(users),), 10**9), max_length,
    )  # fmt: skip
    for b, (user, end) in enumerate(zip(users, ends, strict=True)):
        first = sum(counts[:user])
        expected = list(range(first, first + end))[-max_length:]
        assert got.item_E[got.start_B1[b] : got.start_B1[b + 1]].tolist() == expected
