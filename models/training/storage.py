"""GEM and student artefacts: a folder of safetensors and JSON each, ready to be the content of an artefact draft."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from models.gem.model import Gem, GemConfig
from models.training.checkpoint import (
    load_optimizer,
    load_weights,
    read_config,
    read_schema,
    save_model,
    save_snapshot,
)
from models.training.loop import TrainConfig
from models.training.optimizer import TableOptimizer
from models.transfer.student import Student, StudentConfig

TABLES = ("tables.weight",)
"""The parameters that row-wise Adagrad trains, in GEM, students and the baseline."""


def save_gem(folder: Path, model: Gem, optimizer: TableOptimizer) -> None:
    """Write weights, optimiser state, config and schema; `load_gem` continues from it bit for bit."""
    save_model(folder, model, model.schema, asdict(model.config), optimizer)


def load_gem(folder: Path, config: TrainConfig) -> tuple[Gem, TableOptimizer]:
    """The model and its optimiser, ready for the next day.

    Args:
        folder: what `save_gem` filled.
        config: learning rates of the training that goes on.
    """
    model = Gem(GemConfig(**read_config(folder)), read_schema(folder))
    load_weights(folder, model)
    optimizer = TableOptimizer(model, config.optimizer, TABLES)
    load_optimizer(folder, optimizer)
    return model, optimizer


def load_gem_model(folder: Path) -> Gem:
    """The model alone, in evaluation mode."""
    model = Gem(GemConfig(**read_config(folder)), read_schema(folder))
    load_weights(folder, model)
    return model.eval()


def save_student(folder: Path, model: Student, snapshots: Mapping[str, Student] | None = None) -> None:
    """Write a student's weights, config and schema, and what it was earlier under other names."""
    save_model(folder, model, model.schema, asdict(model.config))
    for name, earlier in (snapshots or {}).items():
        save_snapshot(folder, name, earlier)


def load_student(folder: Path, snapshot: str = "weights") -> Student:
    """A student in evaluation mode, or what it was at a snapshot."""
    model = Student(StudentConfig(**read_config(folder)), read_schema(folder))
    load_weights(folder, model, snapshot)
    return model.eval()
