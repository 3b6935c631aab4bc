"""Random small models, ads and users for tests of the index: no training, everything drawn from a seed."""

from __future__ import annotations

import torch

from models.batch import AdTable, HistorySlice, UserBatch
from models.index.config import RetrievalConfig, RetrievalTraining
from models.index.monn import RetrievalModel
from models.index.publish import Index, build_index
from models.schema import Categorical, Dense, FeatureSchema, Group, Task

NUM_CODES = 64
NUM_TOPICS = 9


def small_schema(history_length: int = 20) -> FeatureSchema:
    """Two fields of each kind, two groups, three event kinds."""
    return FeatureSchema(
        source="small",
        categorical=(
            Categorical("user_id", "user", 51, "user_id"),
            Categorical("country", "user", 8, "country"),
            Categorical("advertiser", "ad", NUM_CODES, "advertiser"),
            Categorical("format", "ad", 4, "format"),
        ),
        dense=(Dense("activity", "user"), Dense("quality", "ad"), Dense("age", "ad")),
        groups=(Group("topic", NUM_TOPICS), Group("advertiser", NUM_CODES)),
        embedding_dim=6,
        history_length=history_length,
        kinds=("view", "like", "click"),
        surfaces=("feed", "stories"),
        tasks=(Task("click", 3600),),
        item_rows=NUM_CODES + 1,
    )


def small_config(sizes: tuple[int, ...] = (4, 4)) -> RetrievalConfig:
    """Towers of a few units over levels of the given sizes."""
    return RetrievalConfig(
        level_sizes=sizes,
        width=8,
        num_user_vectors=(2,) * (len(sizes) + 1),
        hidden=(8,) * (len(sizes) + 1),
        interaction_width=4,
        table_width=8,
        trunk_width=16,
        recent_length=4,
        history_length=20,
        training=RetrievalTraining(batch_size=128, refresh_every=5),
    )


def small_model(sizes: tuple[int, ...] = (4, 4), seed: int = 0) -> RetrievalModel:
    """A model with weights large enough for scores to differ; equal content gives equal vectors, whatever the id."""
    model = RetrievalModel(small_config(sizes), small_schema(), seed)
    with torch.no_grad():
        model.tables.weight.mul_(20.0)
        first = model.tables.offsets["item"]
        model.tables.weight[first : first + model.tables.sizes["item"]] = 0.0
    return model.eval()


def placed_model(schema: FeatureSchema, ads: AdTable, sizes: tuple[int, ...] = (4, 4), seed: int = 0) -> RetrievalModel:
    """An untrained model of another schema, its ads standardised and its codebooks placed on them by k-means."""
    model = RetrievalModel(small_config(sizes), schema, seed)
    with torch.no_grad():
        model.tables.weight.mul_(20.0)
        model.ad_vectors(ads)
        model.eval()
        model.index.initialise(model.ad_vectors(ads).flatten(1), torch.Generator().manual_seed(seed))
    return model


def small_ads(num_ads: int, generator: torch.Generator, *, num_distinct: int | None = None) -> AdTable:
    """Random ads; with `num_distinct`, ads repeat: the same features under other ids and codes."""
    kind = torch.randint(num_distinct or num_ads, (num_ads,), generator=generator)
    if num_distinct is None:
        kind = torch.arange(num_ads)
    size = int(kind.max()) + 1
    topic = torch.randint(NUM_TOPICS, (size,), generator=generator)[kind]
    advertiser = torch.randint(NUM_CODES, (size,), generator=generator)[kind]
    form = torch.randint(4, (size,), generator=generator)[kind]
    return AdTable(
        ad_id_N=torch.randperm(10 * num_ads, generator=generator)[:num_ads],
        categorical_NA=torch.stack([advertiser, form], dim=1),
        dense_NF=torch.randn(size, 2, generator=generator)[kind],
        embedding_NM=torch.randn(size, 6, generator=generator)[kind],
        group_NG=torch.stack([topic, advertiser], dim=1),
        retired_N=torch.zeros(num_ads, dtype=torch.bool),
        created_us_N=torch.zeros(num_ads, dtype=torch.int64),
        bid_N=torch.ones(num_ads),
    )


def small_users(num_rows: int, num_ads: int, generator: torch.Generator, mean_length: int = 8) -> UserBatch:
    """Random users with random histories; some have none."""
    length_B = torch.randint(0, 2 * mean_length, (num_rows,), generator=generator)
    num_events = int(length_B.sum())
    return UserBatch(
        categorical_BC=torch.randint(0, 8, (num_rows, 2), generator=generator),
        dense_BD=torch.randn(num_rows, 1, generator=generator),
        history=HistorySlice(
            start_B1=torch.nn.functional.pad(torch.cumsum(length_B, 0), (1, 0)),
            item_E=torch.randint(num_ads, (num_events,), generator=generator),
            kind_E=torch.randint(3, (num_events,), generator=generator),
            surface_E=torch.randint(2, (num_events,), generator=generator),
            age_E=torch.rand(num_events, generator=generator) * 1e6,
        ),
        surface_B=torch.randint(2, (num_rows,), generator=generator),
        hour_B=torch.randint(24, (num_rows,), generator=generator),
    )


def random_index(model: RetrievalModel, ads: AdTable, generator: torch.Generator, num_used: int | None = None) -> Index:
    """An index with random paths: nodes hold nothing, one ad, or many; at most `num_used` entries a level are used."""
    columns = [
        torch.randint(min(size, num_used or size), (len(ads.ad_id_N),), generator=generator)
        for size in model.config.level_sizes
    ]
    with torch.no_grad():
        vector_NQd = model.ad_vectors(ads)
    return build_index(model, ads, vector_NQd, torch.stack(columns, dim=1), ~ads.retired_N)
