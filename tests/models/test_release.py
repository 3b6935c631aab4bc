"""The release pointer: promotion, roll-back, and files that are no pointer."""

from pathlib import Path

import pytest

from models.release import Pointer, promote, read_pointer, roll_back


def test_promotion_remembers_what_served_before(tmp_path: Path) -> None:
    assert read_pointer(tmp_path) is None
    assert promote(tmp_path, "a", "2026-01-16") == Pointer("a", None, "2026-01-16")
    assert promote(tmp_path, "b", "2026-01-17") == Pointer("b", "a", "2026-01-17")
    assert read_pointer(tmp_path) == Pointer("b", "a", "2026-01-17")


def test_promoting_what_serves_changes_nothing(tmp_path: Path) -> None:
    promote(tmp_path, "a", "2026-01-16")
    promote(tmp_path, "b", "2026-01-17")
    before = (tmp_path / "current.json").read_bytes()
    assert promote(tmp_path, "b", "2026-01-18") == Pointer("b", "a", "2026-01-17")
    assert (tmp_path / "current.json").read_bytes() == before


def test_roll_back_swaps_the_two(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no previous release"):
        roll_back(tmp_path)
    promote(tmp_path, "a", "2026-01-16")
    with pytest.raises(ValueError, match="no previous release"):
        roll_back(tmp_path)
    promote(tmp_path, "b", "2026-01-17")
    assert (roll_back(tmp_path).version, roll_back(tmp_path).version) == ("a", "b")


@pytest.mark.parametrize("content", ["", "{", '{"version": "a"}', "[1]"])
def test_a_file_that_is_no_pointer_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "current.json").write_text(content)
    with pytest.raises(ValueError, match=r"current\.json: not a release pointer"):
        read_pointer(tmp_path)
