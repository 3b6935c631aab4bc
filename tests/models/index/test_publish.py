from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from models.index.publish import node_values, path_key, publish, thinned
from tests.models.index.small import random_index, small_ads, small_model


def test_every_live_ad_has_one_slot_and_leaves_are_contiguous() -> None:
    generator = torch.Generator().manual_seed(0)
    model, ads = small_model(), small_ads(40, generator)
    ads.retired_N[[3, 7]] = True
    index = publish(model, ads)
    assert index.num_ads == 38
    assert set(index.ad_code_S.tolist()) == set(range(40)) - {3, 7}
    assert index.slot_N[[3, 7]].tolist() == [-1, -1]
    assert torch.equal(index.ad_code_S[index.slot_N[index.ad_code_S]], index.ad_code_S)
    path_NL = model.index.assign(model.ad_vectors(ads).flatten(1))
    for number, level in enumerate(index.levels):
        assert torch.equal(level.node_S, level.node_S.sort().values)
        assert torch.equal(level.path_KL[level.node_S], path_NL[index.ad_code_S][:, : number + 1])
    assert_close(index.vector_SQd, model.ad_vectors(ads)[index.ad_code_S])


def test_children_are_the_nodes_below_and_none_is_empty() -> None:
    generator = torch.Generator().manual_seed(1)
    model, ads = small_model((4, 3)), small_ads(60, generator)
    index = random_index(model, ads, generator, num_used=3)
    upper, lower = index.levels
    assert upper.num_nodes <= 3
    assert upper.child_start_K1[0] == 0
    assert upper.child_start_K1[-1] == lower.num_nodes
    for node in range(upper.num_nodes):
        children = lower.path_KL[upper.child_start_K1[node] : upper.child_start_K1[node + 1]]
        assert len(children) > 0
        assert (children[:, 0] == upper.path_KL[node, 0]).all()
    assert lower.child_start_K1[-1] == index.num_ads
    assert (lower.child_start_K1.diff() > 0).all()
    assert torch.equal(
        torch.repeat_interleave(torch.arange(lower.num_nodes), lower.child_start_K1.diff()), lower.node_S
    )


def test_nodes_carry_their_sum_of_codebook_entries_and_the_nearest_ad() -> None:
    generator = torch.Generator().manual_seed(2)
    model, ads = small_model(), small_ads(50, generator)
    index = publish(model, ads)
    for level in index.levels:
        assert_close(level.vector_KQd.flatten(1), model.index.node_vectors(level.path_KL))
        for node in range(level.num_nodes):
            members = level.node_S == node
            distance = (index.vector_SQd[members] - level.vector_KQd[node]).flatten(1).square().sum(1)
            assert level.representative_K[node] == index.ad_code_S[members][distance.argmin()]


def test_paths_of_retired_ads_are_known_where_their_node_is_published() -> None:
    generator = torch.Generator().manual_seed(3)
    model, ads = small_model(), small_ads(50, generator)
    whole = publish(model, ads)
    leaf = whole.levels[-1]
    crowded = int(leaf.child_start_K1.diff().argmax())
    retired = int(whole.ad_code_S[leaf.child_start_K1[crowded]])
    ads.retired_N[retired] = True
    index = publish(model, ads)
    node = int(index.levels[-1].node_N[retired])
    assert torch.equal(index.levels[-1].path_KL[node], leaf.path_KL[crowded])


def test_node_values_are_the_most_frequent_known_codes() -> None:
    group_SG = torch.tensor([[1, 0], [1, 4], [2, 0], [3, 5], [3, 5], [3, 0]])
    node_S = torch.tensor([0, 0, 0, 1, 1, 1])
    value_KGR, weight_KGR = node_values(group_SG, node_S, 2, 2)
    assert value_KGR.tolist() == [[[1, 2], [4, 0]], [[3, 0], [5, 0]]]
    expected = [[[2 / 3, 1 / 3], [1 / 3, 0.0]], [[1.0, 0.0], [2 / 3, 0.0]]]
    assert_close(weight_KGR, torch.tensor(expected))


def test_path_keys_sort_like_paths() -> None:
    keys = path_key(torch.tensor([[1, 2], [0, 3], [1, 0]]), (2, 4))
    assert keys[0].tolist() == [1, 0, 1]
    assert keys[1].tolist() == [6, 3, 4]


def test_nothing_live_is_refused() -> None:
    generator = torch.Generator().manual_seed(0)
    ads = small_ads(3, generator)
    with pytest.raises(ValueError, match="none of the 3 ads"):
        publish(small_model(), ads, excluded_N=torch.ones(3, dtype=torch.bool))


def test_samples_of_an_index_take_turns_and_are_scanned_like_the_whole() -> None:
    generator = torch.Generator().manual_seed(4)
    model, ads = small_model(), small_ads(50, generator)
    index = publish(model, ads)
    parts = [thinned(index, first, 3) for first in range(3)]
    assert sorted(torch.cat([part.ad_code_S for part in parts]).tolist()) == sorted(index.ad_code_S.tolist())
    for part in parts:
        slot_S = index.slot_N[part.ad_code_S]
        assert torch.equal(part.slot_N[part.ad_code_S], torch.arange(part.num_ads))
        assert int((part.slot_N >= 0).sum()) == part.num_ads
        assert torch.equal(part.vector_SQd, index.vector_SQd[slot_S])
        for whole, level in zip(index.levels, part.levels, strict=True):
            assert torch.equal(level.node_S, whole.node_S[slot_S])
            assert torch.equal(level.node_N, whole.node_N)
