"""Saving and loading of models: safetensors weights, JSON config, schema; and checkpoints inside a day's run.

Nothing is pickled. A checkpoint is one file written under a temporary name and renamed, so a kill while
writing leaves the previous one whole.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from models.schema import FeatureSchema
from models.training.optimizer import TableOptimizer

WEIGHTS = "weights.safetensors"
OPTIMIZER = "optimizer.safetensors"
CONFIG = "config.json"
SCHEMA = "schema.json"
CHECKPOINT = "checkpoint.safetensors"

_MODEL_PREFIX = "model."
_OPTIMIZER_PREFIX = "optimizer."


def save_model(
    folder: Path,
    model: nn.Module,
    schema: FeatureSchema,
    config: Mapping[str, Any],
    optimizer: TableOptimizer | None = None,
) -> None:
    """Write weights, optimiser state (if given), config and schema into a folder (of an artefact draft)."""
    save_file(_contiguous(model.state_dict()), folder / WEIGHTS)
    if optimizer is not None:
        save_file(_contiguous(optimizer.state()), folder / OPTIMIZER)
    (folder / CONFIG).write_text(json.dumps(dict(config), indent=1, sort_keys=True))
    (folder / SCHEMA).write_text(schema.to_json())


def read_config(folder: Path) -> dict[str, Any]:
    """The config that `save_model` wrote; tuples have become lists."""
    config: dict[str, Any] = json.loads((folder / CONFIG).read_text())
    return config


def read_schema(folder: Path) -> FeatureSchema:
    """The schema that `save_model` wrote."""
    return FeatureSchema.from_json((folder / SCHEMA).read_text())


def save_snapshot(folder: Path, name: str, model: nn.Module) -> None:
    """Write the weights that a model had earlier beside those that `save_model` writes."""
    save_file(_contiguous(model.state_dict()), folder / f"{name}.safetensors")


def load_weights(folder: Path, model: nn.Module, name: str = "weights") -> None:
    """Load weights, or a snapshot by its name; raises ValueError that names the tensors which don't fit."""
    path = folder / f"{name}.safetensors"
    tensors = load_file(path)
    own = model.state_dict()
    wrong = [
        name
        for name in sorted(tensors.keys() | own.keys())
        if name not in tensors or name not in own or tensors[name].shape != own[name].shape
    ]
    if wrong:
        raise ValueError(f"{path}: tensors missing, unknown or of another shape: {wrong[:5]}")
    model.load_state_dict(tensors)


def load_optimizer(folder: Path, optimizer: TableOptimizer) -> None:
    """Load the optimiser's state."""
    path = folder / OPTIMIZER
    if not path.exists():
        raise ValueError(f"{path} does not exist: this artefact was saved without its optimiser")
    optimizer.load_state(load_file(path))


def save_checkpoint(folder: Path, model: nn.Module, optimizer: TableOptimizer, step: int, loss_sum: float) -> None:
    """Write the state after `step` steps of a run."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {_MODEL_PREFIX + name: value for name, value in model.state_dict().items()}
    tensors |= {_OPTIMIZER_PREFIX + name: value for name, value in optimizer.state().items()}
    tensors["loss_sum"] = torch.tensor(loss_sum, dtype=torch.float64)
    temporary = folder / f".{CHECKPOINT}.tmp"
    save_file(_contiguous(tensors), temporary, metadata={"step": str(step)})
    os.replace(temporary, folder / CHECKPOINT)


def load_checkpoint(folder: Path, model: nn.Module, optimizer: TableOptimizer) -> tuple[int, float]:
    """Restore the folder's checkpoint: (steps done, sum of their losses); (0, 0.0) when there is none."""
    path = folder / CHECKPOINT
    if not path.exists():
        return 0, 0.0
    with safe_open(path, framework="pt") as file:
        step = int(file.metadata()["step"])
    tensors = load_file(path)
    model.load_state_dict(_part(tensors, _MODEL_PREFIX))
    optimizer.load_state(_part(tensors, _OPTIMIZER_PREFIX))
    return step, float(tensors["loss_sum"])


def _part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _contiguous(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().contiguous() for name, value in tensors.items()}
