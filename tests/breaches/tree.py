"""What a folder holds, byte for byte."""

import hashlib
from pathlib import Path


def tree(folder: Path) -> dict[str, str]:
    """Relative path -> SHA-256 of every file below a folder; empty where there is none."""
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}
