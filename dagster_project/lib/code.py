"""Code versions: a hash of the source that makes an asset, so that nobody has to remember to raise a number."""

from __future__ import annotations

import ast
import hashlib
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


def code_version(*parts: str) -> str:
    """Hash of files and folders below the repository root, by meaning: comments and docstrings don't count.

    Folders stand for their `*.py` and `*.sql` files, without sub-folders.
    """
    digest = hashlib.sha256()
    for part in sorted(parts):
        path = ROOT / part
        if not path.exists():
            raise ValueError(f"code_version: {part} does not exist below the repository root")
        files = sorted([*path.glob("*.py"), *path.glob("*.sql")]) if path.is_dir() else [path]
        for file in files:
            digest.update(f"{file.relative_to(ROOT)} {_file_hash(file)}".encode())
    return digest.hexdigest()[:16]


@cache
def _file_hash(path: Path) -> str:
    if path.suffix == ".py":
        content = ast.dump(_without_docstrings(ast.parse(path.read_text()))).encode()
    else:
        content = path.read_bytes()
    return hashlib.sha256(content).hexdigest()


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [s for s in body if not _is_string(s)]  # type: ignore[attr-defined]
    return tree


def _is_string(statement: ast.AST) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )
