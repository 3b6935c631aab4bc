"""Nothing that a loop leaves behind is a pickle: opcodes and zip headers are looked for in every file."""

import pickle
import pickletools
import zipfile
from pathlib import Path

import pytest

KNOWN = (".parquet", ".safetensors", ".json", ".html")
FOLDERS = ("artifacts", "releases", "lake", "reports", "logs")


def is_pickle(path: Path) -> bool:
    """A zip archive (what `torch.save` writes), or bytes that parse as a pickle program to its STOP opcode."""
    content = path.read_bytes()
    if zipfile.is_zipfile(path):
        return True
    if not content.startswith(b"\x80") and not content.rstrip().endswith(b"."):
        return False
    try:
        return [opcode.name for opcode, _, _ in pickletools.genops(content)][-1] == "STOP"
    except Exception:
        return False


def test_pickles_are_recognised(tmp_path):
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        (tmp_path / "a").write_bytes(pickle.dumps({"a": [1, 2]}, protocol))
        assert is_pickle(tmp_path / "a"), protocol
    with zipfile.ZipFile(tmp_path / "b", "w") as archive:
        archive.writestr("data.pkl", pickle.dumps(1))
    assert is_pickle(tmp_path / "b")
    (tmp_path / "c").write_text('{"a": 1.}')
    assert not is_pickle(tmp_path / "c")


@pytest.mark.slow
def test_no_file_of_a_home_is_a_pickle(tiny_home):
    files = [p for folder in FOLDERS for p in (tiny_home / folder).rglob("*") if p.is_file()]
    assert len(files) > 200
    assert not [p for p in files if is_pickle(p)]


@pytest.mark.slow
def test_artefacts_are_of_known_kinds(tiny_home):
    files = [p for p in (tiny_home / "artifacts").rglob("*") if p.is_file()]
    assert {p.suffix for p in files} <= set(KNOWN)
    for path in files:
        if path.suffix == ".safetensors":
            length = int.from_bytes(path.read_bytes()[:8], "little")
            assert path.read_bytes()[8:9] == b"{", path
            assert length < path.stat().st_size
