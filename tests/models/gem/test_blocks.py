"""Wukong and InterFormer blocks against their equations."""

from __future__ import annotations

import torch
from torch.nn import functional

from models.gem.interformer import FeatureSummary, SequenceLayer, SequenceSummary
from models.gem.wukong import FactorisationBlock, LayerAttention, WukongLayer


def _tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_factorisation_is_x_xt_y() -> None:
    torch.manual_seed(0)
    block, x = FactorisationBlock(5, 2, 3, rank=4, hidden=7), _tokens(6, 5, 3)
    plain = torch.bmm(torch.bmm(x, x.transpose(1, 2)), block.projection_nk.expand(6, -1, -1))
    expected = block.mlp(block.norm(plain.flatten(1))).view(6, 2, 3)
    torch.testing.assert_close(block(x), expected)


def test_wukong_layer_is_normalised_concat_plus_residual() -> None:
    torch.manual_seed(0)
    layer, x = WukongLayer(5, 2, 3, width=4, rank=3, hidden=6), _tokens(2, 5, 4)
    linear = torch.einsum("on,bnd->bod", layer.linear.weight_on, x)
    residual = torch.einsum("on,bnd->bod", layer.residual.weight_on, x)
    joined = torch.cat([layer.factorisation(x), linear], dim=1) + residual
    torch.testing.assert_close(layer(x), functional.layer_norm(joined, (4,)))


def test_layer_attention_reads_earlier_tokens() -> None:
    torch.manual_seed(0)
    block, x, earlier = LayerAttention(4), _tokens(2, 3, 4), _tokens(2, 7, 4, seed=1)
    weight = torch.softmax(block.query(x) @ earlier.transpose(1, 2) / 2.0, dim=-1)
    torch.testing.assert_close(block(x, earlier), x + 0.1 * block.out(weight @ earlier))


def test_sequence_summary_ignores_empty_tokens() -> None:
    torch.manual_seed(0)
    block, s = SequenceSummary(num_cls=2, num_pooled=1, num_recent=2, width=4), _tokens(1, 8, 4)
    bias = torch.zeros(1, 8)
    bias[0, 3:5] = -1e4
    changed = s.clone()
    changed[0, 3:5] = 100.0
    assert block(s, bias).shape == (1, 5, 4)
    torch.testing.assert_close(block(s, bias), block(changed, bias))


def test_sequence_layer_is_conditioned_on_the_features_and_masks() -> None:
    torch.manual_seed(0)
    layer, s, summary = SequenceLayer(2, 4, num_heads=2), _tokens(1, 6, 4), _tokens(1, 2, 4, seed=1)
    bias = torch.zeros(1, 6)
    bias[0, 2] = -1e4
    changed = s.clone()
    changed[0, 2] = 50.0
    out = layer(s, summary, bias)
    keep = [0, 1, 3, 4, 5]
    torch.testing.assert_close(layer(changed, summary, bias)[:, keep], out[:, keep])
    assert not torch.allclose(layer(s, summary + 1.0, bias), out)


def test_single_head_equals_scaled_dot_product_attention() -> None:
    torch.manual_seed(0)
    layer, s, summary = SequenceLayer(2, 4, num_heads=1), _tokens(3, 6, 4), _tokens(3, 2, 4, seed=1)
    personal = s + layer.personal(s @ summary.transpose(1, 2))
    mixed = functional.scaled_dot_product_attention(layer.query(personal), personal, personal)
    torch.testing.assert_close(layer(s, summary, torch.zeros(3, 6)), layer.norm(s + layer.out(mixed)))


def test_feature_summary_is_gated() -> None:
    torch.manual_seed(0)
    block, x = FeatureSummary(5, 2, 4), _tokens(2, 5, 4)
    mixed = block.mix(x)
    torch.testing.assert_close(block(x), mixed * torch.sigmoid(block.gate.linear(mixed)))
