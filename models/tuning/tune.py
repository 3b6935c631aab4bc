"""Test-time tuning: a few steps on node data, on the node scorers only, and the gate that may refuse them.

Only the OverArchs of the levels learn (their heads, interaction towers and MLPs); towers and codebooks stay, so
the published index stays valid and the ad scorer is untouched by construction. The steps are kept only when an
untouched later slice with real labels says so; controls take the same number of steps on random pairs or on recent
clicks. (HILL, arXiv 2604.12965, section on test-time training.)

Shape legend: B requests of a step, K nodes of a level, X pairs, R rows.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.data import FrameData
from models.index.losses import score_nodes
from models.index.monn import RetrievalModel
from models.index.publish import Index
from models.metrics import Interval, paired_bootstrap
from models.tuning.node_data import NODE_DATA


@dataclass(frozen=True)
class TuningConfig:
    """How far the node scorers move."""

    num_steps: int = 60
    rows_per_step: int = 64
    learning_rate: float = 5e-4
    beam_width: int = 8
    """Nodes of an upper level whose children are compared."""


def tune(
    model: RetrievalModel, index: Index, data: FrameData, pairs: pa.Table, config: TuningConfig, *, seed: int
) -> RetrievalModel:
    """A copy of the model whose node scorers took `num_steps` steps on (request, node) pairs of `data`.

    Raises:
        ValueError: there are no pairs.
    """
    if pairs.num_rows == 0:
        raise ValueError("pairs: there is no node data to tune on")
    tuned = copy.deepcopy(model)
    tuned.train()
    parameters = [p for number in range(len(index.levels)) for p in tuned.level(number).parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=config.learning_rate, weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed)
    rows, targets = _by_row(pairs)
    for _ in range(config.num_steps):
        chosen_B = torch.randint(len(rows), (config.rows_per_step,), generator=generator)
        with torch.no_grad():
            trunk_BT, interest = tuned.trunk(data.user_batch(rows[chosen_B]), data.ads)
        state = tuned.state_of(trunk_BT, interest)
        nodes = score_nodes(tuned, index, state, config.beam_width)
        loss = trunk_BT.new_zeros(())
        for number, (score_BK, visited_BK) in enumerate(zip(nodes.score_LYK, nodes.visited_LYK, strict=True)):
            target_BK = _targets(targets, number, chosen_B, score_BK.shape[1])
            score_BK = (tuned.sharpness()[number].detach() * score_BK).masked_fill(~visited_BK & (target_BK == 0), -1e9)
            loss = loss - (target_BK * torch.log_softmax(score_BK, dim=1)).sum(1).mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    tuned.zero_grad(set_to_none=True)
    tuned.eval()
    return tuned


@dataclass(frozen=True)
class _Targets:
    """Pairs sorted by request: those of request i are `[start[i], start[i + 1])`."""

    start_R1: Tensor
    level_X: Tensor
    node_X: Tensor
    weight_X: Tensor


def _by_row(pairs: pa.Table) -> tuple[Tensor, _Targets]:
    row_X = torch.from_numpy(pairs["row"].to_numpy().copy())
    order = torch.argsort(row_X, stable=True)
    rows, count_R = torch.unique_consecutive(row_X[order], return_counts=True)
    start_R1 = torch.nn.functional.pad(torch.cumsum(count_R, 0), (1, 0))
    columns = [torch.from_numpy(pairs[name].to_numpy().copy())[order] for name in ("level", "node", "weight")]
    return rows, _Targets(start_R1, columns[0].to(torch.int64), columns[1], columns[2])


def _targets(targets: _Targets, number: int, chosen_B: Tensor, num_nodes: int) -> Tensor:
    """Target shares [B, K] of the chosen requests at a level; zeros where a request has no pair there."""
    start_B, count_B = targets.start_R1[chosen_B], targets.start_R1.diff()[chosen_B]
    owner_X = torch.repeat_interleave(torch.arange(len(chosen_B)), count_B)
    first_B = torch.cumsum(count_B, 0) - count_B
    place_X = start_B[owner_X] + torch.arange(len(owner_X)) - first_B[owner_X]
    here = targets.level_X[place_X] == number
    flat = torch.zeros(len(chosen_B) * num_nodes)
    place = owner_X[here] * num_nodes + targets.node_X[place_X[here]]
    return flat.index_add(0, place, targets.weight_X[place_X[here]]).view(len(chosen_B), num_nodes)


def random_pairs(pairs: pa.Table, index: Index, *, seed: int) -> pa.Table:
    """Control: the same requests and levels with uniformly drawn nodes."""
    generator = np.random.default_rng(seed)
    size_X = np.array(index.level_sizes)[pairs["level"].to_numpy()]
    node_X = (generator.random(pairs.num_rows) * size_X).astype(np.int64)
    return pairs.set_column(pairs.schema.get_field_index("node"), "node", pa.array(node_X))


def click_pairs(index: Index, data: FrameData, rows: Tensor) -> pa.Table:
    """Control: the nodes of the ads that were clicked in `rows` of a day, on every level (recent labels)."""
    clicked = rows[data.label_RT[rows, 0] > 0.5]
    parts = [NODE_DATA.empty_table()]
    for number, level in enumerate(index.levels):
        node_X = level.node_N[data.ad_code_R[clicked]]
        row_X, node_X = clicked[node_X >= 0], node_X[node_X >= 0]
        path_XL = level.path_KL[node_X].to(torch.int32)
        offsets = np.arange(len(node_X) + 1, dtype=np.int32) * (number + 1)
        columns = {
            "row": row_X.numpy(),
            "user_code": data.user_code_R[row_X].numpy(),
            "level": np.full(len(row_X), number, np.int8),
            "node": node_X.numpy(),
            "path": pa.ListArray.from_arrays(offsets, path_XL.flatten().numpy()),
            "weight": np.ones(len(row_X), np.float32),
        }
        parts.append(pa.table(columns, schema=NODE_DATA))
    return pa.concat_tables(parts)


@dataclass(frozen=True)
class TuningVerdict:
    """Whether tuned weights replace the untuned ones, and why."""

    kept: bool
    reason: str
    gain: Interval
    """Mean difference of the real-label metric, tuned minus untuned; `low` and `high` bound 90 %, so that each is a
    one-sided 95 % bound."""
    coverage_gain: Interval | None


def judge(
    tuned_B: NDArray[np.float64],
    untuned_B: NDArray[np.float64],
    user_B: NDArray[np.int64],
    *,
    margin: float,
    coverage: tuple[NDArray[np.float64], NDArray[np.float64]] | None = None,
    seed: int = 0,
) -> TuningVerdict:
    """Gate on a later slice: keep when the metric is better, or not worse and coverage at equal cost is better.

    Args:
        tuned_B, untuned_B: the real-label metric (recall of clicked ads, or an oracle's expected clicks) of the same
            requests.
        margin: the loss that matters, in units of the metric; a slice that can't see it decides nothing.
        coverage: coverage of the exact answer, tuned and untuned, at equal cost.
    """
    gain = _gain(tuned_B, untuned_B, user_B, seed)
    found = None if coverage is None else _gain(coverage[0], coverage[1], user_B, seed)
    text = f"gain {gain.estimate:+.5f} (one-sided 95 % bounds {gain.low:+.5f}, {gain.high:+.5f}, margin {margin:.5f})"
    if gain.low > 0.0:
        return TuningVerdict(True, f"kept: better by {text}", gain, found)
    if gain.high < 0.0:
        return TuningVerdict(False, f"refused: worse, {text}", gain, found)
    if (gain.high - gain.low) / 2.0 > margin:
        return TuningVerdict(False, f"refused: the slice can't see an effect of the margin's size, {text}", gain, found)
    if gain.low <= -margin:
        return TuningVerdict(False, f"refused: may be worse by more than the margin, {text}", gain, found)
    if found is not None and found.low > 0.0:
        reason = f"kept: not worse, {text}, and coverage is better by {found.estimate:+.4f} (bound {found.low:+.4f})"
        return TuningVerdict(True, reason, gain, found)
    return TuningVerdict(False, f"refused: no gain, {text}", gain, found)


def _gain(value_B: NDArray[np.float64], other_B: NDArray[np.float64], user_B: NDArray[np.int64], seed: int) -> Interval:
    known = ~(np.isnan(value_B) | np.isnan(other_B))
    generator = np.random.default_rng(seed)
    return paired_bootstrap(value_B[known], other_B[known], user_B[known], generator=generator, confidence=0.9)


def split_by_time(data: FrameData, shares: Sequence[float]) -> list[Tensor]:
    """Rows of a day cut at quantiles of time: earlier parts for collecting and tuning, later ones for the gate.

    Raises:
        ValueError: the shares don't sum to 1.
    """
    if abs(sum(shares) - 1.0) > 1e-9:
        raise ValueError(f"shares: {tuple(shares)} sum to {sum(shares)}, not 1")
    order = torch.argsort(data.time_us_R, stable=True)
    bounds = [round(float(b) * data.num_rows) for b in np.cumsum([0.0, *shares])]
    return [order[a:b] for a, b in itertools.pairwise(bounds)]
