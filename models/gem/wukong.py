"""Wukong layers: stacked factorisation machines over embeddings (Zhang et al., arXiv 2403.02545, section 3).

A layer is LN(concat(FMB(X), LCB(X)) + X): FMB sees pairwise interactions of all tokens, LCB recombines
tokens linearly, so layer i covers interaction orders 1 to 2^i. GEM adds attention connections across layers
(engineering.fb.com, 10 Nov 2025); their form isn't published, here a layer's tokens attend over all tokens
of the earlier layers through a learned gate that starts small.

Shape legend: B rows, n tokens in, o tokens out, p tokens of all earlier layers, k rank, d width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class FactorisationBlock(nn.Module):
    """FMB: MLP(LN(flatten(X X^T Y))) -> o tokens. The optimised form costs O(n k d) instead of O(n^2 d)."""

    def __init__(self, num_in: int, num_out: int, width: int, rank: int, hidden: int) -> None:
        super().__init__()
        self.num_out = num_out
        self.width = width
        self.projection_nk = nn.Parameter(torch.empty(num_in, rank))
        nn.init.normal_(self.projection_nk, std=num_in**-0.5)
        self.norm = nn.LayerNorm(num_in * rank)
        self.mlp = nn.Sequential(
            nn.Linear(num_in * rank, hidden), nn.ReLU(), nn.Linear(hidden, num_out * width), nn.ReLU()
        )

    def forward(self, x_Bnd: Tensor) -> Tensor:
        """Tokens [B, o, d]."""
        mixed_Bdk = torch.matmul(x_Bnd.transpose(1, 2), self.projection_nk)
        product_Bnk = torch.bmm(x_Bnd, mixed_Bdk)
        tokens: Tensor = self.mlp(self.norm(product_Bnk.flatten(1)))
        return tokens.view(-1, self.num_out, self.width)


class TokenMixer(nn.Module):
    """LCB: W X with W in R^{o x n}, no bias, so that the interaction order stays as it is."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.weight_on = nn.Parameter(torch.empty(num_out, num_in))
        nn.init.normal_(self.weight_on, std=num_in**-0.5)

    def forward(self, x_Bnd: Tensor) -> Tensor:
        """Tokens [B, o, d]."""
        return torch.matmul(self.weight_on, x_Bnd)


class LayerAttention(nn.Module):
    """The cross-layer connection: tokens attend over the tokens of all earlier layers (as keys and values)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate = nn.Parameter(torch.full((), 0.1))

    def forward(self, x_Bnd: Tensor, earlier_Bpd: Tensor) -> Tensor:
        """Tokens [B, n, d] with what the earlier layers knew added."""
        score_Bnp = torch.bmm(self.query(x_Bnd) * x_Bnd.shape[-1] ** -0.5, earlier_Bpd.transpose(1, 2))
        mixed_Bnd = torch.bmm(functional.softmax(score_Bnp, dim=-1), earlier_Bpd)
        added_Bnd: Tensor = self.gate * self.out(mixed_Bnd)
        return x_Bnd + added_Bnd


class WukongLayer(nn.Module):
    """One layer: n tokens in, `num_fm + num_linear` tokens out."""

    def __init__(self, num_in: int, num_fm: int, num_linear: int, width: int, rank: int, hidden: int) -> None:
        super().__init__()
        self.factorisation = FactorisationBlock(num_in, num_fm, width, rank, hidden)
        # One matrix gives the linear tokens and the residual, which is compressed where counts differ.
        self.linear = TokenMixer(num_in, num_linear)
        self.residual = TokenMixer(num_in, num_fm + num_linear)
        self.norm = nn.LayerNorm(width)

    def forward(self, x_Bnd: Tensor) -> Tensor:
        """Tokens [B, o, d]."""
        joined_Bod = torch.cat([self.factorisation(x_Bnd), self.linear(x_Bnd)], dim=1)
        out_Bod: Tensor = self.norm(joined_Bod + self.residual(x_Bnd))
        return out_Bod
