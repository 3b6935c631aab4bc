import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from models.artifact import ArtifactStore
from models.release import promote, read_pointer, roll_back
from models.schema import Dense, FeatureSchema, Task, first_difference

SCHEMA = FeatureSchema(
    source="test", categorical=(), dense=(Dense("user_clicks", "user"),), groups=(), embedding_dim=4,
    history_length=10, kinds=("view",), surfaces=("feed", "search"), tasks=(Task("click", 1800),), item_rows=16,
)  # fmt: skip


def make(store: ArtifactStore, content: str = "weights", **fields: dict[str, str]) -> str:
    with store.create("model", schema=SCHEMA, code_version="1") as draft:
        (draft.path / "weights.bin").write_text(content)
        (draft.path / "schema.json").write_text(SCHEMA.to_json())
        for name, value in fields.items():
            setattr(draft, name, value)
    assert draft.result is not None
    return draft.result.version


def test_version_is_the_content(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    assert make(store) == make(store)
    assert make(store) != make(store, "other")
    assert make(store) != make(store, parents={"lake/frame": "abc"})
    assert make(store) == make(store, metrics={"ne": "0.9"})
    assert len(store.versions("model")) == 3


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    with pytest.raises(RuntimeError, match="disk full"), store.create("model", schema=SCHEMA, code_version="1") as d:
        (d.path / "weights.bin").write_text("half")
        raise RuntimeError("disk full")
    assert store.versions("model") == []
    assert list((tmp_path / "model").iterdir()) == []


def test_kill_before_the_manifest_leaves_the_last_good_state(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    good = make(store)
    code = textwrap.dedent(f"""
        import os, signal
        from pathlib import Path
        from models.artifact import ArtifactStore
        from tests.models.test_artifact import SCHEMA
        with ArtifactStore(Path({str(tmp_path)!r})).create("model", schema=SCHEMA, code_version="1") as draft:
            (draft.path / "weights.bin").write_text("new")
            os.kill(os.getpid(), signal.SIGKILL)
    """)
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": "."}, check=False)
    assert done.returncode == -9
    assert store.versions("model") == [good]
    assert store.open("model", good).version == good


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: (p / "weights.bin").write_text("bent"), "weights.bin does not match its checksum"),
        (lambda p: (p / "weights.bin").unlink(), "file weights.bin is missing"),
    ],
)
def test_damage_is_named(tmp_path: Path, damage, message: str) -> None:  # type: ignore[no-untyped-def]
    store = ArtifactStore(tmp_path)
    version = make(store)
    damage(tmp_path / "model" / version)
    with pytest.raises(ValueError, match=message):
        store.open("model", version)


def test_unknown_version_lists_known_ones(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    version = make(store)
    with pytest.raises(ValueError, match=f"nope does not exist .* versions: {version}"):
        store.open("model", "nope")


def test_schema_mismatch_says_what_differs(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    version = make(store)
    other = FeatureSchema.from_json(SCHEMA.to_json().replace("user_clicks", "user_views"))
    with pytest.raises(ValueError, match=r"first difference: dense\[0\].*user_clicks.*user_views"):
        store.open("model", version, schema=other)


def test_schema_round_trip_and_fingerprint() -> None:
    again = FeatureSchema.from_json(SCHEMA.to_json())
    assert again == SCHEMA
    assert again.fingerprint == SCHEMA.fingerprint
    assert first_difference(SCHEMA, again) is None
    with pytest.raises(ValueError, match="surface: 'tv' is unknown; known surfaces: feed, search"):
        SCHEMA.surface_code("tv")


def test_promote_and_roll_back(tmp_path: Path) -> None:
    assert read_pointer(tmp_path) is None
    with pytest.raises(ValueError, match="no previous release"):
        roll_back(tmp_path)
    promote(tmp_path, "r1", "2026-01-17")
    promote(tmp_path, "r1", "2026-01-17")
    with pytest.raises(ValueError, match="no previous release"):
        roll_back(tmp_path)
    promote(tmp_path, "r2", "2026-01-18")
    assert roll_back(tmp_path).version == "r1"
    assert read_pointer(tmp_path).version == "r1"  # type: ignore[union-attr]
    (tmp_path / "current.json").write_text(json.dumps({"version": 1})[:-1])
    with pytest.raises(ValueError, match="not a release pointer"):
        read_pointer(tmp_path)


def test_only_files_of_the_manifest_have_a_path(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    artifact = store.open("model", make(store))
    assert artifact.file("weights.bin").read_text() == "weights"
    (artifact.path / "stray.bin").write_text("not ours")
    with pytest.raises(ValueError, match=r"no file 'stray.bin'; it has \['schema.json', 'weights.bin'\]"):
        artifact.file("stray.bin")


def test_schema_mismatch_without_a_stored_schema_names_both_fingerprints(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    with store.create("numbers", schema=SCHEMA, code_version="1") as draft:
        (draft.path / "numbers.bin").write_text("1")
    assert draft.result is not None
    other = FeatureSchema.from_json(SCHEMA.to_json().replace("user_clicks", "user_views"))
    with pytest.raises(ValueError, match=f"schema fingerprint {SCHEMA.fingerprint} is not {other.fingerprint}$"):
        store.open("numbers", draft.result.version, schema=other)
