"""Which sizes and training values a preset uses, for every trained asset."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from models.gem.model import GemConfig
from models.index.config import RetrievalConfig, RetrievalTraining
from models.training.loop import TrainConfig
from models.transfer.distill import TransferConfig
from models.transfer.student import StudentConfig


@dataclass(frozen=True)
class Recipe:
    """All trained assets of one preset."""

    gem: GemConfig = field(default_factory=GemConfig)
    gem_train: TrainConfig = field(default_factory=TrainConfig)
    student: StudentConfig = field(default_factory=StudentConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    retrieval: RetrievalConfig = field(default_factory=RetrievalConfig)
    retrieval_days: int = 7
    """Newest days that the retrieval model learns from."""
    pair_rows: int = 2_000
    """Rows a day for which the foundation model scores unlabelled ads."""
    ads_per_row: int = 16
    audit_requests: int = 500
    probe_requests: int = 400
    beams: dict[str, tuple[int, ...]] = field(default_factory=dict)


def recipe(preset: str) -> Recipe:
    """The recipe of a preset; raises ValueError that lists the known ones."""
    if preset == "laptop":
        return Recipe(beams={"lite": (4, 8), "standard": (8, 24), "full": (16, 64)})
    if preset == "tiny":
        base = Recipe()
        return replace(
            base,
            gem=replace(base.gem, num_layers=1),
            gem_train=replace(base.gem_train, batch_size=256),
            transfer=replace(base.transfer, train=replace(base.transfer.train, batch_size=256)),
            retrieval=replace(
                base.retrieval, level_sizes=(8, 8),
                training=replace(RetrievalTraining(), batch_size=256, epochs=1, refresh_every=10),
            ),
            retrieval_days=4, pair_rows=300, ads_per_row=8, audit_requests=200, probe_requests=80,
            beams={"lite": (2, 4), "standard": (4, 12), "full": (8, 32)},
        )  # fmt: skip
    raise ValueError(f"preset: {preset!r} is unknown; known presets: tiny, laptop")
