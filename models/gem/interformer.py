"""InterFormer: sequence and non-sequence parts exchange summaries both ways in every layer
(Zeng et al., arXiv 2411.09852, section 4).

Neither side is reduced to one vector before the other has seen it: the sequence is transformed by a personal
feed-forward (PFFN) made from the non-sequence summary, and the cross layers see the sequence through CLS tokens,
pooled tokens (PMA, learned queries) and the most recent events, each behind a gate.

Shape legend: B rows, n non-sequence tokens, T sequence tokens, s summary tokens, c CLS, m PMA, r recent tokens,
q queries (T times the heads), d width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.gem.wukong import TokenMixer


class Gate(nn.Module):
    """x * sigmoid(W x): selects coordinates of each token. (The paper prints sigma(x * MLP(x)), which is bounded.)"""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x_Bsd: Tensor) -> Tensor:
        """Tokens [B, s, d]."""
        return x_Bsd * torch.sigmoid(self.linear(x_Bsd))


class FeatureSummary(nn.Module):
    """X_sum: n non-sequence tokens mixed down to s gated ones."""

    def __init__(self, num_in: int, num_summary: int, width: int) -> None:
        super().__init__()
        self.mix = TokenMixer(num_in, num_summary)
        self.gate = Gate(width)

    def forward(self, x_Bnd: Tensor) -> Tensor:
        """Tokens [B, s, d]."""
        summary: Tensor = self.gate(self.mix(x_Bnd))
        return summary


class SequenceSummary(nn.Module):
    """S_sum: gate([CLS; PMA; recent])."""

    def __init__(self, num_cls: int, num_pooled: int, num_recent: int, width: int) -> None:
        super().__init__()
        self.num_cls = num_cls
        self.num_recent = num_recent
        self.query = nn.Linear(width, num_pooled, bias=False)
        self.value = nn.Linear(width, width)
        self.gate = Gate(width)
        self.num_tokens = num_cls + num_pooled + num_recent

    def forward(self, s_BTd: Tensor, bias_BT: Tensor) -> Tensor:
        """Tokens [B, c + m + r, d]; `bias_BT` is 0 for valid tokens and very negative for empty ones."""
        weight_BTm = functional.softmax(self.query(s_BTd) + bias_BT[..., None], dim=1)
        pooled_Bmd = self.value(torch.bmm(weight_BTm.transpose(1, 2), s_BTd))
        parts = torch.cat([s_BTd[:, : self.num_cls], pooled_Bmd, s_BTd[:, -self.num_recent :]], dim=1)
        summary: Tensor = self.gate(parts)
        return summary


class SequenceLayer(nn.Module):
    """LN(S + MHA(PFFN(X_sum, S))). PFFN is S + S X_sum^T W, a matrix of rank s made for every row.

    A head's score q^T k is bilinear in the tokens, and its value and output maps are one map, so keys and values
    are the tokens themselves: two linear maps instead of four, the same functions.
    """

    def __init__(self, num_summary: int, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.personal = nn.Linear(num_summary, width)
        self.query = nn.Linear(width, num_heads * width)
        self.out = nn.Linear(num_heads * width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, s_BTd: Tensor, summary_Bsd: Tensor, bias_BT: Tensor) -> Tensor:
        """Tokens [B, T, d]."""
        num_rows, num_tokens, width = s_BTd.shape
        personal_BTd = s_BTd + self.personal(torch.bmm(s_BTd, summary_Bsd.transpose(1, 2)))
        query_Bqd = self.query(personal_BTd).view(num_rows, num_tokens * self.num_heads, width)
        score_BqT = torch.baddbmm(bias_BT[:, None, :], query_Bqd, personal_BTd.transpose(1, 2), alpha=width**-0.5)
        mixed_Bqd = torch.bmm(functional.softmax(score_BqT, dim=-1), personal_BTd)
        out_BTd: Tensor = self.norm(s_BTd + self.out(mixed_Bqd.view(num_rows, num_tokens, -1)))
        return out_BTd
