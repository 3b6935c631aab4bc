"""What retention removes and keeps, on a home with artefacts, releases, logs and reports made by hand."""

import json
from pathlib import Path

import pytest

from dagster_project import retain
from dagster_project.lib.resources import Home
from dagster_project.lib.retention import apply, kept_releases, plan
from dagster_project.lib.settings import read_settings
from feature_repo.adapters.registry import open_source
from models.artifact import Artifact
from models.release import promote

SOURCE = open_source("simulator", preset="tiny", seed=0)
DAYS = SOURCE.facts.days


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home(root=str(tmp_path), source="simulator", preset="tiny", seed=0)
    SOURCE.facts.write(tmp_path / "lake")
    for day in DAYS:
        for name in ("gem/foundation_model", "transfer/teacher_labels", "transfer/domain_model"):
            home.remember(name, day, store(home, name.replace("/", "_"), day))
    home.remember("transfer/vertical_model", f"{DAYS[0]}|feed", store(home, "vertical", DAYS[0]))
    return home


def store(home: Home, kind: str, text: str, **config: str) -> Artifact:
    with home.artifacts.create(kind, schema=home.feature_schema(), code_version="1") as draft:
        (draft.path / "weights.json").write_text(json.dumps(text))
        draft.config = config
    assert draft.result is not None
    return draft.result


def release(home: Home, text: str) -> str:
    model, index = store(home, "retrieval_model", text), store(home, "hierarchical_index", text)
    return store(
        home, "release", text, model=f"retrieval_model/{model.version}", index=f"hierarchical_index/{index.version}"
    ).version


def removed(home: Home, num_days: int) -> set[tuple[str, str]]:
    return {(item.kind, item.path.relative_to(home.path).as_posix()) for item in plan(home, num_days)}


def test_old_days_go_but_not_what_later_days_are_made_from(home: Home) -> None:
    kinds = [path.split("/")[1] for kind, path in removed(home, 3) if kind == "artefact"]
    cut_is_old = home.facts().evaluation_cut < DAYS[-3]
    assert kinds.count("gem_foundation_model") == len(DAYS) - 3 - cut_is_old
    assert kinds.count("transfer_domain_model") == len(DAYS) - 3
    assert kinds.count("vertical") == 1
    assert "transfer_teacher_labels" not in kinds


def test_a_dry_run_touches_nothing_and_applying_is_what_it_said(home: Home) -> None:
    before = sorted(home.path.rglob("*"))
    items = plan(home, 3)
    assert sorted(home.path.rglob("*")) == before
    assert apply(home, items) == sum(item.num_bytes for item in items) > 0
    assert not any(item.path.exists() for item in items)
    assert plan(home, 3) == []
    assert home.artifact("gem/foundation_model", DAYS[-1]).version
    with pytest.raises(ValueError, match=r"domain_model\[.*was removed by retention"):
        home.artifact("transfer/domain_model", DAYS[0])


def test_releases_keep_their_parts_and_the_others_go(home: Home) -> None:
    versions = [release(home, f"release {i}") for i in range(6)]
    promote(home.releases, versions[0], DAYS[-2])
    promote(home.releases, versions[1], DAYS[-2])
    kept = kept_releases(home)
    assert kept[:2] == [versions[1], versions[0]]
    assert len(kept) >= 4
    gone = {path for _, path in removed(home, len(DAYS))}
    for version in versions:
        manifest = home.artifacts.open("release", version).manifest
        parts = {f"artifacts/release/{version}", *(f"artifacts/{manifest.config[p]}" for p in ("model", "index"))}
        assert parts.isdisjoint(gone) if version in kept else parts <= gone
    apply(home, plan(home, len(DAYS)))
    for version in kept:
        home.artifacts.open("release", version)


def test_a_superseded_version_goes_whatever_its_day(home: Home) -> None:
    old = home.artifact("transfer/domain_model", DAYS[-1])
    home.remember("transfer/domain_model", DAYS[-1], store(home, "transfer_domain_model", "better"))
    (item,) = [i for i in plan(home, len(DAYS)) if i.kind == "artefact"]
    assert (item.path, item.reason) == (old.path, "replaced by a newer version")


def test_logs_bentos_and_reports_go_by_age(home: Home) -> None:
    kept = release(home, "kept")
    promote(home.releases, kept, DAYS[-2])
    files = {
        f"logs/requests/{DAYS[0]}/11/a.parquet": "old", f"logs/requests/{DAYS[-1]}/11/a.parquet": "new",
        "logs/service/serve-1.log": "x", f"bentoml/bentos/retrieval/{kept}-abc/bento.yaml": "x",
        "bentoml/bentos/retrieval/0000-abc/bento.yaml": "x", f"reports/drift/user-{DAYS[0]}.html": "x",
        f"reports/drift/user-{DAYS[-1]}.html": "x",
        "reports/workspace/p/snapshots/1.json": json.dumps({"timestamp": f"{DAYS[0]}T12:00:00"}),
        "reports/workspace/p/snapshots/2.json": json.dumps({"timestamp": f"{DAYS[-1]}T12:00:00"}),
    }  # fmt: skip
    for name, text in files.items():
        (home.path / name).parent.mkdir(parents=True, exist_ok=True)
        (home.path / name).write_text(text)
    found = {(kind, path) for kind, path in removed(home, 2) if kind != "artefact"}
    assert found == {
        ("request log", f"logs/requests/{DAYS[0]}"), ("service log", "logs/service/serve-1.log"),
        ("bento", "bentoml/bentos/retrieval/0000-abc"), ("report", f"reports/drift/user-{DAYS[0]}.html"),
        ("snapshot", "reports/workspace/p/snapshots/1.json"),
    }  # fmt: skip


def test_the_command_lists_then_removes(
    home: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MIRACH_HOME", str(home.path))
    assert read_settings().home == home.path
    assert retain.main(["--days", "0"]) == 2
    assert "DAYS: 0 is not a positive" in capsys.readouterr().err
    assert retain.main(["--days", "3"]) == 0
    assert "dry run" in capsys.readouterr().out
    assert len(plan(home, 3)) > 10
    assert retain.main(["--days", "3", "--apply"]) == 0
    assert "removed" in capsys.readouterr().out
    assert plan(home, 3) == []
