"""Feast objects of a home: entities, views, the push source of the tail, and the feature services.

Offline views are `user_features` and `ad_features`, the published cuts column by column. Online views are
`user_vector_<fingerprint>`, the newest cut of a user as two lists in the order of one schema (SQLite keeps a row a
feature, so twenty named ones would cost ten times as much to read), `user_history`, the last events up to the cut,
packed, and `user_tail`, the events since, pushed.
Every view carries `event_timestamp_us`, because Feast's own event timestamps are cut to seconds. Services are named by
the fingerprint of the feature schema, so a model can't read another's columns.
Importing this module imports Feast, which takes seconds; `feature_repo.store` and `.online` do it when they must.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

from feast import Entity, FeatureService, FeatureView, Field, FileSource, PushSource, ValueType
from feast.types import Array, Bool, Bytes, Float32, Int32, Int64

from feature_repo.feature_schema import schema_for
from feature_repo.store import (
    TTL_DAYS,
    feature_service_name,
    offline_folder,
    training_service_name,
    vector_view,
)
from feature_repo.tables import SourceFacts
from models.schema import FeatureSchema, Role

OWNER = "features"

USER = Entity(name="user", join_keys=["user_id"], value_type=ValueType.INT64, description="A person who is shown ads.")
AD = Entity(name="ad", join_keys=["ad_id"], value_type=ValueType.INT64, description="An ad, equal to an item's id.")


def definitions(home: Path, facts: SourceFacts) -> list[Any]:
    """All Feast objects of a home, in the order in which they can be applied."""
    schema = schema_for(facts)
    users = _view(home, "user_features", USER, "user_id", _columns(schema, "user"), online=False)
    ads = _view(home, "ad_features", AD, "ad_id", [*_columns(schema, "ad"), *_ad_extras(schema)], online=False)
    vector_fields = [Field(name="categorical", dtype=Array(Int64)), Field(name="dense", dtype=Array(Float32))]
    vector = _view(home, vector_view(schema), USER, "user_id", vector_fields, online=True)
    history = _view(home, "user_history", USER, "user_id", [Field(name="history", dtype=Bytes)], online=True)
    tail_fields = [Field(name="tail", dtype=Bytes), Field(name="tail_keys", dtype=Bytes)]
    push = PushSource(name="user_tail_push", batch_source=_source(home, "user_tail"), owner=OWNER)
    tail = _view(home, "user_tail", USER, "user_id", tail_fields, online=True, source=push)
    retrieval = FeatureService(
        name=feature_service_name(schema),
        features=[vector, history, tail],
        owner=OWNER,
        description="What the online reader asks for.",
        tags={"schema_fingerprint": schema.fingerprint},
    )
    training = FeatureService(
        name=training_service_name(schema),
        features=[users, ads],
        owner=OWNER,
        description="Published cuts of users and ads for point-in-time joins.",
        tags={"schema_fingerprint": schema.fingerprint},
    )
    return [USER, AD, users, ads, vector, history, push, tail, retrieval, training]


def _columns(schema: FeatureSchema, role: Role) -> list[Field]:
    return [
        *(Field(name=f"cat_{field.name}", dtype=Int64) for field in schema.categorical_of(role)),
        *(Field(name=f"dense_{field.name}", dtype=Float32) for field in schema.dense_of(role)),
    ]


def _ad_extras(schema: FeatureSchema) -> list[Field]:
    return [
        *([Field(name="embedding", dtype=Array(Float32))] if schema.embedding_dim else []),
        *(Field(name=f"group_{group.name}", dtype=Int32) for group in schema.groups),
        Field(name="retired", dtype=Bool),
        Field(name="created_us", dtype=Int64),
        Field(name="bid", dtype=Float32),
    ]


def _source(home: Path, view: str) -> FileSource:
    return FileSource(
        name=f"{view}_files",
        path=str(offline_folder(home, view) / "*.parquet"),
        timestamp_field="published_at",
        created_timestamp_column="created_at",
        owner=OWNER,
    )


def _view(
    home: Path, name: str, entity: Entity, key: str, fields: list[Field], *, online: bool, source: Any = None
) -> FeatureView:
    return FeatureView(
        name=name,
        entities=[entity],
        ttl=timedelta(days=TTL_DAYS["user_vector" if name.startswith("user_vector") else name]),
        schema=[Field(name=key, dtype=Int64), *fields, Field(name="event_timestamp_us", dtype=Int64)],
        source=source or _source(home, name),
        online=online,
        owner=OWNER,
        tags={"team": OWNER},
    )
