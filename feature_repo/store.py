"""The Feast store of a home: set-up, export of published cuts, online materialisation, point-in-time joins.

Layout below `<home>/feast`: `feature_store.yaml`, `registry.db`, `online.db` (SQLite), `online.json` (which cut is
online), `offline/<view>/<day>.parquet` (hard links into the lake). `feast -c <home>/feast ...` works as usual.
Feast is imported inside functions: the import takes seconds.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import logging
import os
import sqlite3
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from feature_repo.days import MICROSECONDS, day_bounds_us
from feature_repo.export import export_online, place
from feature_repo.feature_schema import schema_for
from feature_repo.lake import Lake
from feature_repo.tables import SourceFacts
from models.schema import FeatureSchema

if TYPE_CHECKING:
    from feast import FeatureStore

logger = logging.getLogger(__name__)

PROJECT = "mirach"

TTL_DAYS = {"user_features": 7, "ad_features": 7, "user_vector": 7, "user_history": 30, "user_tail": 7}
"""How long a value of each view may be used, in days; `user_vector` stands for the view of every schema.
Feast applies it offline; the online reader applies it itself."""

_YAML = f"""# Written by Mirach. Paths are relative to this folder.
project: {PROJECT}
provider: local
registry:
  registry_type: file
  path: registry.db
  cache_ttl_seconds: 0
offline_store:
  type: duckdb
online_store:
  type: sqlite
  path: online.db
entity_key_serialization_version: 3
materialization:
  pull_latest_features: true
"""

_DEFINITIONS = '''"""Written by Mirach, so that `feast -c <this folder> apply` finds the definitions of this home."""

from pathlib import Path

from feature_repo.definitions import definitions
from feature_repo.tables import read_facts

FOLDER = Path(__file__).resolve().parent
globals().update({f"object_{i}": o for i, o in enumerate(definitions(FOLDER.parent, read_facts(FOLDER)))})
'''


@dataclass(frozen=True)
class OnlineState:
    """Which published cut the online store holds (`<home>/feast/online.json`)."""

    day: str
    published_at_us: int
    schema_fingerprint: str
    num_users: int


@dataclass(frozen=True)
class Materialization:
    """What a materialisation did. `online` is False when a newer cut was online already and stayed there."""

    day: str
    num_users: int
    num_histories: int
    online: bool
    seconds: float


def feast_folder(home: Path) -> Path:
    """The Feast repository of a home."""
    return Path(home) / "feast"


def offline_folder(home: Path, view: str) -> Path:
    """Where a view's offline Parquet files lie, one a day."""
    return feast_folder(home).resolve() / "offline" / view


def vector_view(schema: FeatureSchema) -> str:
    """Name of the view of users' vectors in the order of a schema: each schema has one, so that a release of an older
    schema goes on reading its own while a new one is prepared.
    """
    return f"user_vector_{schema.fingerprint}"


def feature_service_name(schema: FeatureSchema) -> str:
    """Name of the feature service that serving reads."""
    return f"retrieval_{schema.fingerprint}"


def training_service_name(schema: FeatureSchema) -> str:
    """Name of the feature service of point-in-time joins."""
    return f"training_{schema.fingerprint}"


def apply(home: Path, facts: SourceFacts) -> None:
    """Write `feature_store.yaml` and register the home's Feast objects; safe to repeat and to run in parallel.

    A lock file makes parallel calls wait for each other, because Feast's file registry keeps the last writer only.
    The SQLite file is put into write-ahead mode, so that readers go on while a day is materialised.
    """
    folder = feast_folder(home)
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / "apply.lock"):
        (folder / "feature_store.yaml").write_text(_YAML)
        (folder / "definitions.py").write_text(_DEFINITIONS)
        facts.write(folder)
        from feature_repo.definitions import definitions

        for view in (*(v for v in TTL_DAYS if v != "user_vector"), vector_view(schema_for(facts))):
            offline_folder(home, view).mkdir(parents=True, exist_ok=True)
        with contextlib.closing(sqlite3.connect(folder / "online.db")) as connection:
            connection.execute("PRAGMA journal_mode = WAL")
        _drop_broken_registry(folder / "registry.db")
        with _quiet():
            open_store(home).apply(definitions(Path(home), facts))


def _drop_broken_registry(path: Path) -> None:
    """Feast writes its registry in place: a process killed at it leaves none or half. `apply` makes it anew."""
    from feast.protos.feast.core.Registry_pb2 import Registry
    from google.protobuf.message import DecodeError

    try:
        whole = not path.exists() or bool(Registry.FromString(path.read_bytes()).projects)
    except DecodeError:
        whole = False
    if not whole:
        logger.warning("%s is not a registry; writing it anew", path)
        path.unlink()


def open_store(home: Path) -> FeatureStore:
    """Feast's own object for a home; raises ValueError when `apply` was not run there."""
    folder = feast_folder(home)
    if not (folder / "feature_store.yaml").exists():
        raise ValueError(f"{folder}: no feature_store.yaml; run `feature_repo.store.apply` first")
    from feast import FeatureStore

    return FeatureStore(repo_path=str(folder))


def materialize(home: Path, lake: Lake, facts: SourceFacts, day: str) -> Materialization:
    """Export every published cut up to `day` for offline joins and put the cut of `day` online.

    Online are the features of all users and, packed, the newest `history_length` events of users that have any.
    The tail is never touched. A cut older than the one that is online is exported but not put online.

    Raises:
        ValueError: the features or the event log of a day are missing.
    """
    started = time.monotonic()
    _, cut_us = day_bounds_us(facts, day)
    for earlier in facts.days[: facts.days.index(day) + 1]:
        for view in ("user_features", "ad_features"):
            place(lake, view, earlier, offline_folder(home, view) / f"{earlier}.parquet")
    num_users = lake.partition("user_features", day).num_rows
    state = online_state(home)
    if state is not None and state.published_at_us > cut_us:
        logger.warning("the online store holds the cut of %s; the older cut of %s stays offline", state.day, day)
        return Materialization(day, num_users, 0, False, time.monotonic() - started)
    vector = vector_view(schema_for(facts))
    num_histories = export_online(feast_folder(home) / "offline", lake, facts, day, cut_us, vector)
    store = open_store(home)
    cut = datetime.fromtimestamp(cut_us // MICROSECONDS, UTC)
    with _quiet():
        store.materialize(cut - timedelta(seconds=1), cut, feature_views=[vector, "user_history"])
    fingerprint = schema_for(facts).fingerprint
    _write_state(home, OnlineState(day, cut_us, fingerprint, num_users))
    return Materialization(day, num_users, num_histories, True, time.monotonic() - started)


def online_state(home: Path, fingerprint: str | None = None) -> OnlineState | None:
    """Which cut is online, the newest or that of a schema; None before the first materialisation."""
    path = _state_path(home, fingerprint)
    return OnlineState(**json.loads(path.read_text())) if path.exists() else None


def _state_path(home: Path, fingerprint: str | None) -> Path:
    return feast_folder(home) / ("online.json" if fingerprint is None else f"online-{fingerprint}.json")


def historical_features(
    home: Path, entity_rows: pa.Table, *, views: Sequence[str] = ("user_features", "ad_features")
) -> pa.Table:
    """Point-in-time join through Feast: all features of `views` as they were known at each row's time.

    Values created after the row's time are never used (`filter_by_created_timestamp`), rows come back in the order
    in which they were given, and integers stay integers; rows without a match have nulls.

    Args:
        home: with an applied store and exported cuts.
        entity_rows: event_timestamp (UTC) and the keys of the views: user_id, ad_id.
        views: names of feature views.

    Returns:
        `entity_rows` with the views' columns; where two views share a name, `<view>__<name>`.
    """
    store = open_store(home)
    wanted = [store.get_feature_view(view) for view in views]
    keys = {f"{view.name}__{field.name}": field for view in wanted for field in view.features}
    frame = entity_rows.append_column("row_id", pa.array(np.arange(entity_rows.num_rows))).to_pandas()
    with _quiet():
        joined = store.get_historical_features(
            entity_df=frame,
            features=[f"{view.name}:{field.name}" for view in wanted for field in view.features],
            full_feature_names=True,
            filter_by_created_timestamp=True,
        ).to_arrow()
    if joined.num_rows != entity_rows.num_rows:
        raise ValueError(f"feast returned {joined.num_rows} rows for {entity_rows.num_rows}")
    joined = joined.sort_by("row_id")
    result = entity_rows
    for name, field in keys.items():
        plain = name.split("__", 1)[1]
        shared = sum(other.split("__", 1)[1] == plain for other in keys) > 1
        result = result.append_column(name if shared else plain, joined[name].cast(_arrow_type(field)))
    return result


def _arrow_type(field: Any) -> pa.DataType:
    from feast.types import from_feast_to_pyarrow_type

    return from_feast_to_pyarrow_type(field.dtype)


def _write_state(home: Path, state: OnlineState) -> None:
    for path in (_state_path(home, state.schema_fingerprint), _state_path(home, None)):
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_text(json.dumps(asdict(state)))
        os.replace(temporary, path)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Feast prints its progress; keep it in the debug log."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        yield
    if printed.getvalue().strip():
        logger.debug("feast: %s", printed.getvalue().strip())
