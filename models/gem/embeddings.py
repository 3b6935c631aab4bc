"""Hashed embedding tables and the small encoders that every model shares.

All tables of a schema are rows of one weight matrix, so that a batch costs one gather and one sparse
gradient whatever the number of fields. Row 0 of every table stands for missing or unknown. Values that fit
into the table keep their own row (small vocabularies and append-only codes never collide); larger ones are
mixed by splitmix64 and folded (hashing trick, Weinberger et al. 2009).

Shape legend: B rows, C user and A ad categorical fields, G groups, E events, M distinct ads of a batch,
R rows of all tables together, F dense inputs, t tokens, d width.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from models.batch import AdTable
from models.schema import Categorical, FeatureSchema

NUM_HOURS = 24
ITEM_TABLE = "item"
SURFACE_TABLE = "context:surface"
HOUR_TABLE = "context:hour"


def mix64(value: Tensor) -> Tensor:
    """Finaliser of splitmix64 (Steele et al. 2014) on int64 bit patterns; a bijection."""
    x = value + -7046029254386353131
    x = (x ^ _shift_right(x, 30)) * -4658895280553007687
    x = (x ^ _shift_right(x, 27)) * -7723592293110705685
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    # torch shifts int64 arithmetically; the mask drops the copied sign bits.
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def table_rows(value: Tensor, num_rows: Tensor | int) -> Tensor:
    """Rows in `[0, num_rows)` of raw int64 values: 0 stays 0, `1..num_rows-1` keep their row, others are hashed.

    `num_rows` (>= 2) may be a tensor that broadcasts against `value` (one table size per column).
    """
    hashed = 1 + (mix64(value) & 0x7FFF_FFFF_FFFF_FFFF) % (num_rows - 1)
    return torch.where((value >= 0) & (value < num_rows), value, hashed)


def table_sizes(schema: FeatureSchema) -> dict[str, int]:
    """Rows of every table of a schema, by table name, in the order in which they are laid out.

    Surface and hour, whose codes are closed, have tables of exactly their size, whatever the schema's context fields.

    Raises:
        ValueError: a table has fewer than 2 rows, or two fields give one table different sizes.
    """
    sizes = {ITEM_TABLE: schema.item_rows, SURFACE_TABLE: len(schema.surfaces) + 1, HOUR_TABLE: NUM_HOURS + 1}
    for group in schema.groups:
        sizes[_group_table(group.name)] = max(2, group.num_codes)
    for field in (*schema.categorical_of("user"), *schema.categorical_of("ad")):
        if sizes.setdefault(field.table, field.num_rows) != field.num_rows:
            raise ValueError(f"{field.name}: table {field.table!r} has {sizes[field.table]} rows, not {field.num_rows}")
    for name, size in sizes.items():
        if size < 2:
            raise ValueError(f"table {name!r}: num_rows is {size}, at least 2 are needed")
    return sizes


def _group_table(name: str) -> str:
    return f"group:{name}"


class Tables(nn.Module):
    """All embedding tables of a schema as one weight `[R, d]`, with the mapping of raw values to its rows."""

    def __init__(
        self, schema: FeatureSchema, width: int, generator: torch.Generator, *, std: float = 0.02, sparse: bool = True
    ) -> None:
        super().__init__()
        self.sizes = table_sizes(schema)
        offsets: dict[str, int] = {}
        total = 0
        for name, size in self.sizes.items():
            offsets[name] = total
            total += size
        self.offsets = offsets
        self.sparse = sparse
        self.weight = nn.Parameter(torch.randn(total, width, generator=generator) * std)
        self._register("user", schema.categorical_of("user"))
        self._register("ad", schema.categorical_of("ad"))
        group_names = [_group_table(g.name) for g in schema.groups]
        self._register_columns("group", group_names)

    def _register(self, role: str, fields: Sequence[Categorical]) -> None:
        self._register_columns(role, [f.table for f in fields])

    def _register_columns(self, role: str, tables: Sequence[str]) -> None:
        offset = torch.tensor([self.offsets[t] for t in tables], dtype=torch.int64)
        size = torch.tensor([self.sizes[t] for t in tables], dtype=torch.int64)
        self.register_buffer(f"{role}_offset", offset, persistent=False)
        self.register_buffer(f"{role}_size", size, persistent=False)

    def _rows(self, role: str, value: Tensor) -> Tensor:
        return table_rows(value, self.get_buffer(f"{role}_size")) + self.get_buffer(f"{role}_offset")

    def user_rows(self, categorical_BC: Tensor) -> Tensor:
        """Rows [B, C] of the users' raw categorical values."""
        return self._rows("user", categorical_BC)

    def ad_rows(self, categorical_BA: Tensor) -> Tensor:
        """Rows [B, A] of the ads' raw categorical values."""
        return self._rows("ad", categorical_BA)

    def group_rows(self, group_BG: Tensor) -> Tensor:
        """Rows [B, G] of group codes; 0 (unknown) is the unknown row."""
        return self._rows("group", group_BG)

    def item_rows(self, code_E: Tensor) -> Tensor:
        """Rows of ad codes, which are also the items of histories and the values of a field that shares the table."""
        return table_rows(code_E, self.sizes[ITEM_TABLE]) + self.offsets[ITEM_TABLE]

    def context_rows(self, surface_B: Tensor, hour_B: Tensor) -> Tensor:
        """Rows [B, 2] of surface and local hour."""
        surface = table_rows(surface_B + 1, self.sizes[SURFACE_TABLE]) + self.offsets[SURFACE_TABLE]
        hour = table_rows(hour_B + 1, self.sizes[HOUR_TABLE]) + self.offsets[HOUR_TABLE]
        return torch.stack([surface, hour], dim=1)

    def forward(self, rows: Tensor) -> Tensor:
        """Embeddings `[..., d]` of rows; the gradient is sparse when the tables were made so."""
        return functional.embedding(rows, self.weight, sparse=self.sparse)


class ItemEncoder(nn.Module):
    """Vector of an ad as an item of histories: own row + rows of its groups + creative embedding passed through.

    Every event of an ad shares the ad's vector, so it is made once per distinct ad of a batch.
    """

    def __init__(self, schema: FeatureSchema, width: int) -> None:
        super().__init__()
        self.creative = nn.Linear(schema.embedding_dim, width, bias=False) if schema.embedding_dim else None

    def forward(self, tables: Tables, ads: AdTable, code_M: Tensor) -> Tensor:
        """Vectors [M, d] of ads by code."""
        rows_MF = torch.cat([tables.item_rows(code_M)[:, None], tables.group_rows(ads.group_NG[code_M])], dim=1)
        vector_Md: Tensor = tables(rows_MF).sum(dim=1)
        if self.creative is not None:
            vector_Md = vector_Md + self.creative(ads.embedding_NM[code_M])
        return vector_Md


class DenseTokens(nn.Module):
    """MLP that turns F dense inputs into t tokens of width d."""

    def __init__(self, num_inputs: int, hidden: int, num_tokens: int, width: int) -> None:
        super().__init__()
        self.num_tokens = num_tokens
        self.width = width
        self.net = nn.Sequential(nn.Linear(num_inputs, hidden), nn.ReLU(), nn.Linear(hidden, num_tokens * width))

    def forward(self, dense_BF: Tensor) -> Tensor:
        """Tokens [B, t, d]."""
        tokens: Tensor = self.net(dense_BF)
        return tokens.view(-1, self.num_tokens, self.width)


def age_bucket(age_E: Tensor, num_buckets: int) -> Tensor:
    """Logarithmic bucket of an age in seconds: floor(log2(1 + minutes)), at most `num_buckets - 1`; int64."""
    return torch.log2(age_E * (1.0 / 60.0) + 1.0).clamp(max=num_buckets - 1).to(torch.int64)


def local_codes(num_ads: int, *codes: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Distinct codes among all given ones (ascending, [M]) and each input renumbered to positions in it.

    Costs one pass over a bitmap of N ads instead of a sort.
    """
    mark_N = torch.zeros(num_ads, dtype=torch.int32)
    for code in codes:
        mark_N[code.to(torch.int64)] = 1
    distinct_M = mark_N.nonzero().squeeze(1)
    position_N = torch.cumsum(mark_N, 0) - 1
    return distinct_M, [position_N.index_select(0, code) for code in codes]


def transposed_sum(grad_Sd: Tensor, row_E: Tensor, source_E: Tensor, num_rows: int) -> Tensor:
    """`out[r] = sum of grad[source[e]] over all e with row[e] = r`, [num_rows, d].

    One packed sort and one pass; about 5 times faster on CPU than scattering row by row, and deterministic.
    """
    packed = np.sort(((row_E.to(torch.int64) << 32) | source_E).numpy())
    bound_R1 = functional.pad(torch.bincount(row_E, minlength=num_rows).cumsum(0), (1, 0))
    by_row_E = torch.from_numpy(packed & 0xFFFF_FFFF)
    return functional.embedding_bag(by_row_E, grad_Sd.contiguous(), bound_R1, mode="sum", include_last_offset=True)


def sum_duplicates(row_X: Tensor, grad_Xd: Tensor) -> tuple[Tensor, Tensor]:
    """Distinct rows, ascending, and the sums of their gradients: what `coalesce` does, faster on CPU."""
    packed = np.sort(((row_X << 32) | torch.arange(len(row_X))).numpy())
    sorted_X = torch.from_numpy(packed >> 32)
    distinct_Y, count_Y = torch.unique_consecutive(sorted_X, return_counts=True)
    bound_Y1 = functional.pad(count_Y.cumsum(0), (1, 0))
    order_X = torch.from_numpy(packed & 0xFFFF_FFFF)
    return distinct_Y, functional.embedding_bag(
        order_X, grad_Xd.contiguous(), bound_Y1, mode="sum", include_last_offset=True
    )
