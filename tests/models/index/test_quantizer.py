from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from models.index.quantizer import BalanceQueue, LearnedIndex, Quantised, k_means, squared_distance


def _index(*codebooks: list[list[float]]) -> LearnedIndex:
    index = LearnedIndex(tuple(map(len, codebooks)), len(codebooks[0][0]), torch.Generator().manual_seed(0))
    with torch.no_grad():
        for parameter, values in zip(index.codebook_LKD, codebooks, strict=True):
            parameter.copy_(torch.tensor(values))
    return index.eval()


def test_paths_follow_residuals() -> None:
    index = _index([[0.0, 0.0], [10.0, 0.0]], [[0.0, 1.0], [0.0, -1.0]])
    x_ND = torch.tensor([[0.2, 0.9], [9.0, -2.0], [10.0, 1.5]])
    path_NL = index.assign(x_ND)
    assert path_NL.tolist() == [[0, 0], [1, 1], [1, 0]]
    assert_close(index.node_vectors(path_NL), torch.tensor([[0.0, 1.0], [10.0, -1.0], [10.0, 1.0]]))
    assert_close(index.node_vectors(path_NL[:, :1]), torch.tensor([[0.0, 0.0], [10.0, 0.0], [10.0, 0.0]]))


def test_soft_assignment_is_the_softmax_of_distances_and_hardens_with_alpha() -> None:
    index = _index([[0.0], [2.0]])
    x_ND = torch.tensor([[0.5]])
    soft = index(x_ND, 1.0)
    weights = torch.softmax(torch.tensor([-0.25, -2.25]), 0)
    assert_close(soft.soft_LNK[0][0], weights)
    assert_close(soft.pseudo_LND[0], (weights @ torch.tensor([[0.0], [2.0]]))[None])
    hard = index(x_ND, 1e4)
    assert_close(hard.pseudo_LND[0], torch.tensor([[0.0]]))
    assert_close(hard.reconstruction, torch.tensor(0.25))
    assert hard.hard_LN[0].tolist() == [0]


def test_gradient_of_a_soft_pass_reaches_codebooks_and_ads() -> None:
    index = _index([[0.0, 1.0], [2.0, 0.5]], [[0.1, 0.0], [0.0, 0.2]])
    x_ND = torch.tensor([[0.5, 0.5]], requires_grad=True)
    index(x_ND, 2.0).reconstruction.backward()
    assert x_ND.grad is not None
    assert float(x_ND.grad.abs().sum()) > 0.0
    assert all(float(c.grad.abs().sum()) > 0.0 for c in index.codebook_LKD)  # type: ignore[union-attr]


def _quantised(hard: list[list[int]], sizes: tuple[int, ...], logits: torch.Tensor | None = None) -> Quantised:
    one_hot = [torch.nn.functional.one_hot(torch.tensor(h), s).float() for h, s in zip(hard, sizes, strict=True)]
    if logits is not None:
        one_hot[0] = torch.softmax(logits, dim=1)
    return Quantised((), tuple(one_hot), tuple(torch.tensor(h) for h in hard), torch.tensor(0.0))


def test_balance_is_zero_at_uniform_use_and_size_minus_one_at_collapse() -> None:
    assert float(BalanceQueue((2, 2), 4).loss(_quantised([[0, 0, 1, 1], [0, 1, 0, 1]], (2, 2)))) == pytest.approx(0.0)
    # level 1: one of 2 nodes -> 2 - 1; level 2: one of 4 -> 4 - 1; mean 2
    assert float(BalanceQueue((2, 2), 4).loss(_quantised([[0, 0], [1, 1]], (2, 2)))) == pytest.approx(2.0)


def test_balance_sees_recent_batches_and_pushes_away_from_crowded_nodes() -> None:
    queue = BalanceQueue((2,), 2)
    queue.loss(_quantised([[0, 0, 0, 0]], (2,)))
    logits = torch.zeros(2, 2, requires_grad=True)
    loss = queue.loss(_quantised([[1, 1]], (2,), logits))
    # use is 4 : 2, so 2 * (16 + 4) / 36 - 1
    assert float(loss) == pytest.approx(2 * 20 / 36 - 1.0)
    loss.backward()
    assert logits.grad is not None
    assert (logits.grad[:, 0] > 0).all()
    assert (logits.grad[:, 1] < 0).all()


def test_k_means_finds_separated_clusters() -> None:
    generator = torch.Generator().manual_seed(0)
    centre = torch.tensor([[0.0, 0.0], [10.0, 0.0], [0.0, 10.0]])
    x_ND = (centre[:, None] + 0.1 * torch.randn(3, 50, 2, generator=generator)).flatten(0, 1)
    found = k_means(x_ND, 3, generator, iterations=20)
    assert float(squared_distance(centre, found).min(dim=1).values.max()) < 0.01
    assert len(k_means(x_ND[:2], 5, generator)) == 5
    with pytest.raises(ValueError, match="no ads"):
        k_means(x_ND[:0], 3, generator)


def test_initialise_reconstructs_better_than_random_codebooks() -> None:
    generator = torch.Generator().manual_seed(0)
    x_ND = torch.randn(400, 6, generator=generator)
    index = LearnedIndex((8, 8), 6, generator).eval()
    before = float(index(x_ND, 100.0).reconstruction)
    index.initialise(x_ND, generator)
    after = float(index(x_ND, 100.0).reconstruction)
    assert after < 0.6 * before
    assert len(torch.unique(index.assign(x_ND)[:, 0])) == 8


def test_dead_nodes_are_moved_onto_crowded_ads() -> None:
    generator = torch.Generator().manual_seed(0)
    x_ND = torch.randn(200, 2, generator=generator)
    index = _index([[0.0, 0.0], [1e3, 1e3], [-1e3, 0.0]])
    assert index.reseed(x_ND, generator, min_share=0.1) == 2
    assert torch.bincount(index.assign(x_ND)[:, 0], minlength=3).min() > 0
    assert index.reseed(x_ND, generator, min_share=0.0) == 0


def test_nodes_follow_the_mean_of_their_ads() -> None:
    index = _index([[0.0, 0.0], [10.0, 0.0], [99.0, 99.0]], [[0.0, 0.0]])
    x_ND = torch.tensor([[1.0, 0.0], [3.0, 0.0], [10.0, 4.0]])
    index.follow(x_ND, 0.5)
    # node 0 goes halfway to (2, 0), node 1 halfway to (10, 4), node 2 holds nothing and stays
    assert_close(index.codebook_LKD[0], torch.nn.Parameter(torch.tensor([[1.0, 0.0], [10.0, 2.0], [99.0, 99.0]])))
    # residuals (0, 0), (2, 0), (0, 2) have mean (2/3, 2/3)
    assert_close(index.codebook_LKD[1], torch.nn.Parameter(torch.full((1, 2), 1 / 3)))
