"""Static columns of users and ads: the numbers that the models read, made from the catalogue's attributes.

Shape legend: U users, N ads, C categorical columns of users, A of ads, D and F dense columns, M embedding width,
G groups.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from feature_repo.adapters.base import string_ids
from feature_repo.tables import SourceFacts

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]


def list_matrix(rows: pa.Table, column: str, width: int, dtype: type[np.generic]) -> NDArray[Any]:
    """A list column whose lists all have `width` values as a matrix [rows, width]."""
    if not width or not rows.num_rows:
        return np.zeros((rows.num_rows, width), dtype)
    flat = pa.concat_arrays([chunk.flatten() for chunk in rows[column].chunks])
    values: NDArray[Any] = flat.to_numpy(zero_copy_only=False)
    return values.astype(dtype, copy=False).reshape(rows.num_rows, width)


def user_categorical(users: pa.Table, facts: SourceFacts) -> Ints:
    """Categorical columns of users [U, C]: user_id, then the source's attributes."""
    attributes_UC = list_matrix(users, "categorical", len(facts.user_categorical), np.int64)
    return np.column_stack([users["user_id"].to_numpy(), attributes_UC]).astype(np.int64)


def ad_categorical(ads: pa.Table, facts: SourceFacts) -> Ints:
    """Categorical columns of ads [N, A] in schema order. Column `ad_id` holds the ad code, as histories do."""
    columns = [ads["ad_code"].to_numpy(), ads["advertiser_id"].to_numpy(), ads["campaign_id"].to_numpy()]
    for name in ("objective", "format"):
        encoded = ads[name].combine_chunks().dictionary_encode()
        texts = encoded.dictionary.to_pylist()
        codes = np.where(np.array(texts) == "", 0, string_ids(texts))
        columns.append(codes[encoded.indices.to_numpy(zero_copy_only=False)])
    columns += [ads[f"category_{level}"].to_numpy() for level in range(1, facts.category_levels + 1)]
    return np.column_stack(columns).astype(np.int64)


def user_attributes(users: pa.Table, facts: SourceFacts) -> Floats:
    """Static dense columns of users [U, len(facts.user_dense)]."""
    return finite("users.dense", list_matrix(users, "dense", len(facts.user_dense), np.float32))


def ad_attributes(ads: pa.Table, facts: SourceFacts) -> Floats:
    """Static dense columns of ads [N, len(facts.ad_attributes)]."""
    return finite("ads.attributes", list_matrix(ads, "attributes", len(facts.ad_attributes), np.float32))


def ad_embedding(ads: pa.Table, facts: SourceFacts) -> Floats:
    """Creative embeddings [N, M]; zeros where an ad has none."""
    return finite("ads.embedding", list_matrix(ads, "embedding", facts.embedding_dim, np.float32))


def ad_groups(ads: pa.Table, names: tuple[str, ...]) -> NDArray[np.int32]:
    """Group codes [N, G]."""
    columns = [ads[f"group_{name}"].to_numpy() for name in names]
    return np.column_stack(columns).astype(np.int32)


def deepest_category(ads: pa.Table, facts: SourceFacts) -> Ints:
    """The most specific category of each ad [N], 0 where it has none."""
    deepest_N = np.zeros(ads.num_rows, np.int64)
    for level in range(1, facts.category_levels + 1):
        category_N = ads[f"category_{level}"].to_numpy()
        deepest_N = np.where(category_N != 0, category_N, deepest_N)
    return deepest_N


def finite(name: str, values: NDArray[Any]) -> Floats:
    """The values as float32; raises ValueError that counts those that are not finite."""
    as_float = values.astype(np.float32, copy=False)
    bad = int((~np.isfinite(as_float)).sum())
    if bad:
        raise ValueError(f"{name}: {bad} values are missing or not finite")
    return as_float
