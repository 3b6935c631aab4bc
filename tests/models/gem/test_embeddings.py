"""Hashing, table layout, and the sort-based sums."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from models.gem import embeddings
from models.gem.embeddings import ItemEncoder, Tables
from models.schema import Categorical
from tests.models.worlds import make_world, world_schema


def _splitmix_finaliser(value: int) -> int:
    """Reference in unbounded integers."""
    mask = (1 << 64) - 1
    x = (value + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def test_mix64_is_splitmix64() -> None:
    values = [0, 1, -1, 12345678901234567, -(2**63), 2**63 - 1]
    mixed = embeddings.mix64(torch.tensor(values))
    for value, got in zip(values, mixed.tolist(), strict=True):
        assert got % (1 << 64) == _splitmix_finaliser(value % (1 << 64))


def test_small_values_keep_their_row_and_zero_is_unknown() -> None:
    rows = embeddings.table_rows(torch.tensor([0, 1, 7, 8, -3, 10**15]), 8)
    assert rows[:3].tolist() == [0, 1, 7]
    assert bool(((rows[3:] >= 1) & (rows[3:] < 8)).all())


def test_large_values_spread_over_the_table() -> None:
    rows = embeddings.table_rows(torch.arange(64_000) * 1000 + 10**12, 65)
    counts = torch.bincount(rows, minlength=65)
    assert counts[0] == 0
    assert counts[1:].min() > 850
    assert counts[1:].max() < 1150


def test_tables_do_not_overlap() -> None:
    schema = world_schema(num_ads=20, num_users=10, history_length=10)
    tables = Tables(schema, 4, torch.Generator().manual_seed(0))
    spans = sorted((tables.offsets[name], tables.offsets[name] + size) for name, size in tables.sizes.items())
    assert spans[0][0] == 0
    assert spans[-1][1] == tables.weight.shape[0]
    assert all(left[1] == right[0] for left, right in itertools.pairwise(spans))


def test_history_item_and_ad_id_field_share_a_row() -> None:
    schema = world_schema(num_ads=20, num_users=10, history_length=10)
    tables = Tables(schema, 4, torch.Generator().manual_seed(0))
    codes = torch.arange(20)
    fields = torch.zeros(20, 3, dtype=torch.int64)
    fields[:, 0] = codes
    assert torch.equal(tables.item_rows(codes), tables.ad_rows(fields)[:, 0])


def test_table_size_conflicts_are_refused() -> None:
    schema = world_schema(num_ads=20, num_users=10, history_length=10)
    other = replace(schema, categorical=(*schema.categorical, Categorical("also", "ad", 5, "item")))
    with pytest.raises(ValueError, match="also: table 'item' has 21 rows, not 5"):
        embeddings.table_sizes(other)
    with pytest.raises(ValueError, match="num_rows is 1"):
        embeddings.table_sizes(replace(schema, item_rows=1, categorical=()))


def test_item_vector_sums_item_groups_and_creative() -> None:
    world = make_world(num_users=5, num_ads=12, num_days=1, rows_per_day=5)
    tables = Tables(world.schema, 4, torch.Generator().manual_seed(0))
    encoder = ItemEncoder(world.schema, 4)
    vector = encoder(tables, world.ads, torch.tensor([3]))[0]
    assert encoder.creative is not None
    expected = tables.weight[tables.item_rows(torch.tensor([3]))[0]]
    for row in tables.group_rows(world.ads.group_NG[3:4])[0]:
        expected = expected + tables.weight[row]
    expected = expected + world.ads.embedding_NM[3] @ encoder.creative.weight.t()
    torch.testing.assert_close(vector, expected)


def test_only_seen_rows_have_a_gradient() -> None:
    schema = world_schema(num_ads=20, num_users=10, history_length=10)
    tables = Tables(schema, 4, torch.Generator().manual_seed(0))
    tables(tables.item_rows(torch.tensor([2, 5, 2]))).sum().backward()
    assert tables.weight.grad is not None
    assert tables.weight.grad.is_sparse
    assert tables.weight.grad.coalesce().indices()[0].tolist() == tables.item_rows(torch.tensor([2, 5])).tolist()


def test_age_buckets_double() -> None:
    ages = torch.tensor([0.0, 59.0, 60.0, 180.0, 1e9])
    assert embeddings.age_bucket(ages, 16).tolist() == [0, 0, 1, 2, 15]


def test_local_codes_renumber() -> None:
    distinct, (a, b) = embeddings.local_codes(10, torch.tensor([7, 2, 7]), torch.tensor([9, 2], dtype=torch.int32))
    assert distinct.tolist() == [2, 7, 9]
    assert a.tolist() == [1, 0, 1]
    assert b.tolist() == [2, 0]


def test_transposed_sum_equals_index_add() -> None:
    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(6, 3, generator=generator)
    row = torch.randint(5, (40,), generator=generator)
    source = torch.randint(6, (40,), generator=generator)
    expected = torch.zeros(5, 3).index_add_(0, row, grad[source])
    torch.testing.assert_close(embeddings.transposed_sum(grad, row, source, 5), expected)


def test_sum_duplicates_equals_coalesce() -> None:
    generator = torch.Generator().manual_seed(2)
    rows = torch.randint(9, (30,), generator=generator)
    grad = torch.randn(30, 2, generator=generator)
    distinct, summed = embeddings.sum_duplicates(rows, grad)
    reference = torch.zeros(9, 2).index_add_(0, rows, grad)
    assert distinct.tolist() == rows.unique().tolist()
    torch.testing.assert_close(summed, reference[distinct])
