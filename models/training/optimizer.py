"""Row-wise Adagrad for embedding tables and AdamW for everything else, with a flat tensor state.

Shape legend: R rows of a table, X rows with a gradient, d width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from models.gem.embeddings import Tables, sum_duplicates


@dataclass(frozen=True)
class OptimizerConfig:
    """Learning rates and their warm-up. Rates rise linearly over the first `warmup_steps` steps of a model's life."""

    dense_rate: float = 2e-3
    table_rate: float = 0.05
    weight_decay: float = 1e-5
    warmup_steps: int = 50
    clip_norm: float = 5.0


class RowWiseAdagrad:
    """Adagrad with one accumulator a row (mean square of the row's gradient), on sparse gradients.

    Only rows seen in a batch are read or written, so the cost doesn't depend on the size of the tables.
    (Duchi et al. 2011; row-wise as in DLRM, Mudigere et al., arXiv 2104.05158.)
    """

    def __init__(self, tables: list[nn.Parameter]) -> None:
        self.tables = tables
        self.square = [torch.zeros(table.shape[0]) for table in tables]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Apply the gradients of all tables."""
        for table, square_R in zip(self.tables, self.square, strict=True):
            if table.grad is None:
                continue
            grad = table.grad if table.grad.is_sparse else table.grad.to_sparse(1)
            rows_X, grad_Xd = sum_duplicates(grad._indices()[0], grad._values())
            square_X = square_R[rows_X] + grad_Xd.square().mean(dim=1)
            square_R[rows_X] = square_X
            table.index_add_(0, rows_X, grad_Xd * (-rate / (square_X.sqrt() + 1e-10))[:, None])


class TableOptimizer:
    """Optimiser of a whole model: tables by row-wise Adagrad, the rest by AdamW.

    Tables are the weights of all `Tables` modules and whatever else `table_names` lists. Parameters that don't
    require a gradient are left alone. Gradients are clipped by their norm; those of parameters whose name begins with
    one of `apart` by their own, so that they can't shorten the steps of the others.
    """

    def __init__(
        self, model: nn.Module, config: OptimizerConfig, table_names: tuple[str, ...] = (), apart: tuple[str, ...] = ()
    ) -> None:  # fmt: skip
        own = [f"{name}.weight" for name, module in model.named_modules() if isinstance(module, Tables)]
        table_names = tuple(dict.fromkeys([*own, *table_names]))
        parameters = dict(model.named_parameters())
        missing = [name for name in table_names if name not in parameters]
        if missing:
            raise ValueError(f"table_names: no parameters {missing}; there are {sorted(parameters)}")
        self.config = config
        self.table_names = tuple(name for name in table_names if parameters[name].requires_grad)
        self.num_steps = 0
        self.adagrad = RowWiseAdagrad([parameters[name] for name in self.table_names])
        self.dense = {n: p for n, p in parameters.items() if n not in table_names and p.requires_grad}
        self.clipped = [[p for n, p in self.dense.items() if n.startswith(apart) is alone] for alone in (False, True)]
        self.adam = torch.optim.AdamW(
            list(self.dense.values()), lr=config.dense_rate, weight_decay=config.weight_decay, fused=True
        )

    def step(self, scale: float = 1.0) -> None:
        """Apply and clear the gradients; `scale` multiplies the rates of this step."""
        warm = scale * min(1.0, (self.num_steps + 1) / max(1, self.config.warmup_steps))
        for parameters in self.clipped:
            nn.utils.clip_grad_norm_(parameters, self.config.clip_norm)
        for group in self.adam.param_groups:
            group["lr"] = self.config.dense_rate * warm
        self.adam.step()
        self.adagrad.step(self.config.table_rate * warm)
        self.num_steps += 1
        self.adam.zero_grad(set_to_none=True)
        for table in self.adagrad.tables:
            table.grad = None

    def state(self) -> dict[str, Tensor]:
        """Everything needed to continue, as named tensors (copies)."""
        tensors = {"num_steps": torch.tensor(self.num_steps, dtype=torch.int64)}
        for name, square_R in zip(self.table_names, self.adagrad.square, strict=True):
            tensors[f"square.{name}"] = square_R.clone()
        for name, parameter in self.dense.items():
            for key, value in self.adam.state.get(parameter, {}).items():
                tensors[f"adam.{key}.{name}"] = value.clone()
        return tensors

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from what `state` gave; raises ValueError when it belongs to other parameters."""
        self.num_steps = int(tensors["num_steps"])
        for name, square_R in zip(self.table_names, self.adagrad.square, strict=True):
            if f"square.{name}" not in tensors:
                raise ValueError(f"optimizer state has no accumulator for table {name!r}")
            square_R.copy_(tensors[f"square.{name}"])
        self.adam.state.clear()
        for key, value in tensors.items():
            if not key.startswith("adam."):
                continue
            _, slot, name = key.split(".", 2)
            if name not in self.dense:
                raise ValueError(f"optimizer state names parameter {name!r}, which the model does not train")
            self.adam.state[self.dense[name]][slot] = value.clone()
