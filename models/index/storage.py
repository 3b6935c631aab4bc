"""Models and indexes as artefact folders: safetensors and JSON, no pickle.

`save_*` fill the folder of a `models.artifact.Draft`; the manifest with the checksums is the draft's.
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from models.index.config import RetrievalConfig
from models.index.monn import RetrievalModel
from models.index.publish import Index, NodeLevel
from models.schema import FeatureSchema

WEIGHTS = "model.safetensors"
CONFIG = "retrieval.json"
SCHEMA = "schema.json"
INDEX = "index.safetensors"


def save_model(model: RetrievalModel, folder: Path) -> None:
    """Write weights, configuration and schema into a folder."""
    state = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    save_file(state, folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps(model.config.to_dict(), indent=1, sort_keys=True))
    (folder / SCHEMA).write_text(model.schema.to_json())


def load_model(folder: Path) -> RetrievalModel:
    """Read what `save_model` wrote; the model is in evaluation mode.

    Raises:
        ValueError: a file is missing, or weights do not fit the configuration; says which.
    """
    for name in (WEIGHTS, CONFIG, SCHEMA):
        if not (folder / name).exists():
            raise ValueError(f"{folder}: {name} is missing, this is no retrieval model")
    config = RetrievalConfig.from_dict(json.loads((folder / CONFIG).read_text()))
    model = RetrievalModel(config, FeatureSchema.from_json((folder / SCHEMA).read_text()))
    stored = load_file(folder / WEIGHTS)
    if model.covisits is not None:
        model.covisits.resize(stored, "covisits.")
    expected = model.state_dict()
    for name in sorted(stored.keys() | expected.keys()):
        there, wanted = stored.get(name), expected.get(name)
        if there is None or wanted is None or there.shape != wanted.shape:
            shapes = [None if t is None else tuple(t.shape) for t in (there, wanted)]
            raise ValueError(f"{folder / WEIGHTS}: {name} has shape {shapes[0]}, the configuration needs {shapes[1]}")
    model.load_state_dict(stored)
    model.eval()
    return model


def save_index(index: Index, folder: Path) -> None:
    """Write an index into a folder."""
    tensors = {f.name: getattr(index, f.name) for f in fields(Index) if f.name != "levels"}
    for number, level in enumerate(index.levels):
        tensors |= {f"level.{number}.{f.name}": getattr(level, f.name) for f in fields(NodeLevel)}
    save_file({name: value.detach().cpu().contiguous() for name, value in tensors.items()}, folder / INDEX)


def load_index(folder: Path) -> Index:
    """Read what `save_index` wrote.

    Raises:
        ValueError: the file is missing or lacks a tensor.
    """
    path = folder / INDEX
    if not path.exists():
        raise ValueError(f"{folder}: {INDEX} is missing, this is no index")
    stored = load_file(path)
    num_levels = len({name.split(".")[1] for name in stored if name.startswith("level.")})

    def read(name: str) -> Tensor:
        if name not in stored:
            raise ValueError(f"{path}: tensor {name} is missing")
        return stored[name]

    levels = tuple(
        NodeLevel(**{f.name: read(f"level.{number}.{f.name}") for f in fields(NodeLevel)})
        for number in range(num_levels)
    )
    return Index(levels=levels, **{f.name: read(f.name) for f in fields(Index) if f.name != "levels"})
