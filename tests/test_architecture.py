"""Who may import whom, what nobody may do, and how long things may be. Walks the AST; imports nothing."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("models", "feature_repo", "bentos", "monitoring", "dagster_project", "benchmarks")
MAX_FILE, MAX_FUNCTION = 400, 60

MODELS = {"torch", "numpy", "pyarrow", "safetensors", "models"}
FEATURES = {
    "feast", "google.protobuf", "duckdb", "pyarrow", "numpy", "pandas", "fsspec", "feature_repo", "models.schema",
}  # fmt: skip
BENTOS = {
    "models", "bentos", "bentoml", "_bentoml_impl", "_bentoml_sdk", "fastapi", "starlette", "pydantic",
    "prometheus_client", "numpy", "pyarrow", "torch", "safetensors", "feature_repo.online",
    "feature_repo.history_bytes",
}  # fmt: skip
MONITORING = {
    "evidently", "duckdb", "pyarrow", "pandas", "numpy", "plotly", "monitoring", "models.metrics", "models.index.audit",
}  # fmt: skip
ORCHESTRATION = {
    "dagster", "sqlalchemy", "rich", "numpy", "pyarrow", "torch", "safetensors", "dagster_project", "feature_repo",
    "models", "bentos", "monitoring",
}  # fmt: skip
ALLOWED = {
    "models": MODELS,
    "feature_repo": FEATURES,
    "bentos": BENTOS,
    "monitoring": MONITORING,
    "dagster_project": ORCHESTRATION,
}
NO_TORCH = ("models/schema.py", "models/metrics.py", "models/artifact.py", "models/release.py", "models/staging.py")
HEAVY = {"torch", "feast", "evidently", "bentoml", "pandas"}


def files(package: str) -> list[Path]:
    return sorted(p for p in (ROOT / package).rglob("*.py") if "__pycache__" not in p.parts)


def all_files() -> list[Path]:
    return [path for package in (*PACKAGES, "tests") for path in files(package)]


def imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, "relative imports hide who imports whom"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def load_time_imports(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    found: set[str] = set()
    for node in tree.body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= set(imports(node))
    return found


def allowed(name: str, prefixes: set[str]) -> bool:
    top = name.partition(".")[0]
    return top in sys.stdlib_module_names or any(name == p or name.startswith(f"{p}.") for p in prefixes)


def breaches(path: Path, prefixes: set[str]) -> list[str]:
    """Modules imported from where they must not be; `from a import b` counts as right when `a.b` is."""
    tree = ast.parse(path.read_text())
    bad = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            bad += [a.name for a in node.names if not allowed(a.name, prefixes)]
        elif isinstance(node, ast.ImportFrom) and node.module and not allowed(node.module, prefixes):
            bad += [f"{node.module}.{a.name}" for a in node.names if not allowed(f"{node.module}.{a.name}", prefixes)]
    return bad


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_packages_import_only_what_they_may(package):
    found = {str(p.relative_to(ROOT)): bad for p in files(package) if (bad := breaches(p, ALLOWED[package]))}
    assert not found


def test_a_breach_is_found(tmp_path):
    path = tmp_path / "module.py"
    path.write_text("def f():\n    from dagster import asset\n    import duckdb, json\n")
    assert breaches(path, MODELS) == ["dagster.asset", "duckdb"]


def test_nobody_imports_the_orchestration():
    others = [p for package in PACKAGES if package != "dagster_project" for p in files(package)]
    found = [str(p) for p in others if any(n.startswith("dagster_project") for n in imports(ast.parse(p.read_text())))]
    assert not found


def test_the_runtime_needs_neither_bentoml_nor_feast():
    names = set(imports(ast.parse((ROOT / "bentos/retrieval/runtime.py").read_text())))
    assert not {n for n in names if n.partition(".")[0] in {"bentoml", "feast", "feature_repo"}}


def test_light_models_need_no_torch():
    for name in NO_TORCH:
        assert not {n for n in imports(ast.parse((ROOT / name).read_text())) if n.partition(".")[0] == "torch"}, name


def test_models_package_is_empty():
    assert (ROOT / "models/__init__.py").read_text() == ""


def test_definitions_load_without_heavy_imports():
    for path in files("dagster_project/defs"):
        tops = {name.partition(".")[0] for name in load_time_imports(path)}
        assert not tops & HEAVY, path
        assert "from __future__ import annotations" not in path.read_text(), f"{path}: breaks Dagster's annotations"


PICKLES = {"pickle", "cPickle", "dill", "joblib", "cloudpickle", "shelve"}
CALLS = {"torch.save", "torch.load", "np.save", "np.load", "numpy.load", "numpy.save", "pd.read_pickle"}


def test_nothing_pickles():
    found = []
    for path in all_files():
        tree = ast.parse(path.read_text())
        found += [f"{path}: {n}" for n in imports(tree) if n.partition(".")[0] in PICKLES]
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in CALLS:
                found.append(f"{path}:{node.lineno}: {ast.unparse(node.func)}")
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "to_pickle":
                found.append(f"{path}:{node.lineno}: to_pickle")
    assert not [f for f in found if "test_no_pickle.py" not in f]


def test_nothing_prints():
    found = []
    for package in PACKAGES:
        for path in files(package):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
                    found.append(f"{path}:{node.lineno}")
    assert not [f for f in found if "/benchmarks/" not in f]


def test_files_are_short():
    found = {str(p): n for p in all_files() if (n := len(p.read_text().splitlines())) > MAX_FILE}
    assert not found


def test_functions_are_short():
    found = []
    for path in all_files():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MAX_FUNCTION:
                    found.append(f"{path}:{node.lineno} {node.name} {length}")
    assert not found


def test_packages_are_listed_for_the_wheel():
    listed = (ROOT / "pyproject.toml").read_text().partition("[tool.setuptools]")[2].partition("[tool.setuptools.")[0]
    for package in PACKAGES:
        for folder in {p.parent for p in files(package) if p.name == "__init__.py"}:
            name = ".".join(folder.relative_to(ROOT).parts)
            assert f'"{name}"' in listed, f"{name} is not in pyproject's packages"
