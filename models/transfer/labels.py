"""Teacher labels: GEM's logits of a day, made once, by the GEM that had not seen that day.

In-sample logits would tell the student the answers instead of the teacher's beliefs, so labelling refuses a
teacher that was trained on the day or a later one.

Shape legend: R rows of the day, T tasks.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from models.data import FrameData
from models.training.loop import predict


@dataclass(frozen=True)
class TeacherLabels:
    """Logits of a day's rows, NaN where a row was not labelled, and who made them."""

    day: str
    trained_through: str
    logit_RT: Tensor


def label_day(
    model: nn.Module, trained_through: str, day: str, data: FrameData, *, kept_only: bool = False
) -> TeacherLabels:
    """Label the rows of `day` (only the training sample if `kept_only`) by a model trained through an earlier day.

    Raises:
        ValueError: the teacher has seen the day.
    """
    if not trained_through < day:
        raise ValueError(f"trained_through: the teacher saw {trained_through}, so it can't label {day}")
    rows_R = data.rows(kept_only=kept_only)
    logit_RT = torch.full(data.label_RT.shape, math.nan)
    logit_RT[rows_R] = predict(model, data, rows_R)
    return TeacherLabels(day, trained_through, logit_RT)


def save_labels(path: Path, labels: TeacherLabels) -> None:
    """Write as one safetensors file.

    One key of metadata: safetensors writes several in an order that changes from process to process, and the version
    of an artefact is a hash of its bytes.
    """
    about = json.dumps({"day": labels.day, "trained_through": labels.trained_through}, sort_keys=True)
    save_file({"logit": labels.logit_RT.contiguous()}, path, metadata={"about": about})


def load_labels(path: Path) -> TeacherLabels:
    """Inverse of `save_labels`."""
    with safe_open(path, framework="pt") as file:
        about = json.loads(file.metadata()["about"])
        return TeacherLabels(about["day"], about["trained_through"], file.get_tensor("logit"))
