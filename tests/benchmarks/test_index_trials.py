from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import index_trials, tuned
from benchmarks.capacity import variant_of
from benchmarks.index_cells import VARIANTS, configuration, preset_of
from benchmarks.index_quality import cell_path
from benchmarks.index_trials import Draw, draws, winner
from benchmarks.worlds import World
from models.index.config import RetrievalTraining
from models.index.joint import train_retrieval
from models.training.presets import open_preset
from tests.models.index.small import small_config
from tests.models.worlds import make_world

DAYS = make_world(num_users=40, num_ads=60, num_days=2, rows_per_day=400, negative_rate=1.0)
RATES = {"none": 0.001, "two_tower": 0.002, "mixture": 0.003}


@pytest.fixture
def committed(tmp_path: Path, monkeypatch: Any) -> Iterator[None]:
    """Winners of `laptop` are its second trials; of `beauty` only the two tower has trials."""
    per_data = {"laptop": {f: searched(r) for f, r in RATES.items()}, "beauty": {"two_tower": searched(0.004)}}
    path = tmp_path / "index_trials.json"
    path.write_text(json.dumps({"values": {"per_data": per_data}}))
    monkeypatch.setattr(tuned, "WINNERS", path)
    yield
    tuned._read.cache_clear()


def searched(rate: float) -> dict[str, Any]:
    trials = [{"trial": 0, "values": {"learning_rate": 9.0}}, {"trial": 1, "values": {"learning_rate": rate}}]
    return {"winner": 1, "trials": trials}


def world(name: str) -> World:
    """A world of which only its name and facts are looked at."""
    facts = type("Facts", (), {"name": "simulator", "positives_only": False, "repeats": True})
    return World(name, type("Source", (), {"facts": facts})(), None, (), "")  # type: ignore[arg-type]


def test_trials_go_on_from_their_cache_and_write_the_winners(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    path = tmp_path / "out" / "trials.json"
    command = ["x", "--data", "tiny", "beauty", "--trials", "2", "--cache", str(tmp_path), "--json", str(path)]
    monkeypatch.setattr("sys.argv", command)
    assert index_trials.main() == 0
    first = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert json.loads(path.read_text())["values"] == first
    monkeypatch.setattr(index_trials, "run_cell", None)  # a second run that trained anything would fail
    assert index_trials.main() == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == first
    assert list(first["skipped"]) == ["beauty"]
    found = first["per_data"]["tiny"]
    assert list(found) == ["none", "two_tower", "mixture"]
    values = [[trial["values"] for trial in family["trials"]] for family in found.values()]
    assert values[0] == values[1] == values[2]
    assert values[0][0]["learning_rate"] == RetrievalTraining().learning_rate
    assert len({family["trials"][0]["scorer@10"] for family in found.values()}) == 3
    for name, family in found.items():
        scores = [trial["scorer@10"] for trial in family["trials"]]
        assert scores[family["winner"]] == max(scores)
        assert first["winners"][f"tiny, {name}"].startswith(f"trial {family['winner']}: ")


def test_trials_judge_the_validation_day(monkeypatch: Any, tmp_path: Path) -> None:
    opened: dict[str, Any] = {}
    monkeypatch.setattr(index_trials, "open_world", lambda *_, **named: opened.update(named))
    monkeypatch.setattr(index_trials, "search", lambda *_: searched(0.1) | {"winner": 0})
    monkeypatch.setattr(index_trials, "_shown", lambda _: {})
    monkeypatch.setattr("sys.argv", ["x", "--data", "tiny", "--cache", str(tmp_path)])
    assert index_trials.main() == 0
    assert opened == {"validation": True}


@pytest.mark.parametrize(
    "words", [["--data", "sports"], ["--data", "nowhere"], ["--families", "joint"], ["--trials", "0"]]
)
def test_unknown_names_and_no_trials_are_refused(words: list[str], monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr("sys.argv", ["x", *words])
    with pytest.raises(SystemExit, match="2"):
        index_trials.main()
    assert words[1] in capsys.readouterr().err


def test_the_highest_wins_and_of_equals_the_lowest_trial() -> None:
    assert winner([0.1, 0.3, 0.2, 0.3]) == 1
    assert winner([0.2, 0.2]) == 0


def test_draws_begin_with_the_preset_and_stay_within_their_space() -> None:
    found = draws(200)
    assert found[:8] == draws(8)
    assert found[0] == Draw()
    assert len(set(found)) == 200
    for name, low, high in (("learning_rate", 1 / 3, 3), ("table_learning_rate", 1 / 3, 3), ("dense_decay", 0.1, 100),
                            ("steps", 0.5, 2), ("passes", 1, 2)):  # fmt: skip
        drawn = [float(getattr(draw, name)) for draw in found]
        assert low <= min(drawn) < low * 1.2
        assert high / 1.2 < max(drawn) <= high
        middle = (low * high) ** 0.5
        assert 2 <= sum(value < middle for value in drawn[1:8]) <= 5, name


@pytest.mark.parametrize("positives_only", [False, True])
def test_trial_0_is_the_preset(positives_only: bool) -> None:
    preset = open_preset("laptop", positives_only=positives_only).retrieval.training
    assert replace(preset, **Draw().values(preset)) == preset


@pytest.mark.parametrize("positives_only", [False, True])
def test_steps_are_what_was_drawn(positives_only: bool) -> None:
    training = replace(small_config().training, batch_size=20, epochs=1, min_steps=0)
    if positives_only:
        training = replace(training, impression_weight=0.0, sampled_ads=8, min_steps=27, batch_size=8)
    steps, rows = {}, {}
    for draw in (Draw(), Draw(steps=0.5), Draw(steps=2.0), Draw(passes=2), Draw(steps=2.0, passes=2)):
        config = replace(small_config(), training=replace(training, **draw.values(training)))
        _, report = train_retrieval(config, DAYS.schema, DAYS.days, seed=0, with_index=False)
        steps[draw], rows[draw] = report.num_steps, report.num_rows
    assert steps[Draw()] == (28 if positives_only else 40)
    for draw in steps:
        assert steps[draw] == pytest.approx(draw.steps * steps[Draw()], rel=0.1), draw
        assert rows[draw] == draw.passes * rows[Draw()], draw


@pytest.mark.usefixtures("committed")
def test_winners_are_those_of_the_family_and_of_the_data_set_that_was_tried() -> None:
    assert tuned.tuned("two_tower", "simulator") == {"learning_rate": 0.002}
    assert tuned.tuned("two_tower", "sports_shuffled") == {"learning_rate": 0.004}
    assert tuned.tuned("none", "beauty") == tuned.tuned("none", "kuairand") == tuned.tuned("none", "tiny") == {}
    for name, variant in VARIANTS.items():
        assert variant.family == (name if name in ("two_tower", "mixture") else "none")
        assert configuration(world("laptop"), variant).training.learning_rate == RATES[variant.family]
    assert [variant_of(row).family for row in ("two tower", "L", "L M S")] == ["two_tower", "none", "none"]


@pytest.mark.usefixtures("committed")
def test_given_values_stand_above_winners_and_trials_ignore_them(monkeypatch: Any) -> None:
    training = configuration(world("laptop"), VARIANTS["joint"], {"learning_rate": 0.5}).training
    assert training.learning_rate == 0.5
    preset = preset_of(world("laptop")).training
    assert preset.learning_rate == RetrievalTraining().learning_rate
    again = configuration(world("laptop"), VARIANTS["none"], Draw().values(preset)).training
    assert again == preset


def test_without_committed_trials_nothing_changes(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(tuned, "WINNERS", tmp_path / "absent.json")
    for variant in VARIANTS.values():
        assert configuration(world("laptop"), variant) == preset_of(world("laptop"))
    assert cell_path(tmp_path, "laptop", "joint", 0, False, {}) == tmp_path / "cells" / "laptop-joint-0"


@pytest.mark.usefixtures("committed")
def test_cells_of_tuned_training_are_other_files(tmp_path: Path) -> None:
    path = cell_path(tmp_path, "laptop", "two_tower", 0, False, {})
    assert path.name == "laptop-two_tower-0-learning_rate=0.002"
    assert cell_path(tmp_path, "tiny", "two_tower", 0, False, {}).name == "tiny-two_tower-0"
    assert configuration(world("tiny"), VARIANTS["joint"]) == preset_of(world("tiny"))
