"""A schedule-free SGD as its paper has it (arXiv:2405.15682): steps `z`, averages into `x`, takes gradients at `y`."""

from __future__ import annotations

from typing import Any

import torch


class ScheduleFree(torch.optim.Optimizer):
    """Parameters hold `y` while training and `x` after `eval()`. All of it goes entry by entry."""

    def __init__(self, params: Any, lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "train_mode": True})

    @torch.no_grad()
    def _switch(self, train: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] == train:
                continue
            group["train_mode"] = train
            weight = 1 - group["beta"] if train else 1 - 1 / group["beta"]
            for p in group["params"]:
                if "z" in self.state[p]:
                    p.lerp_(self.state[p]["z"], weight)

    def train(self) -> None:
        """Parameters become `y`."""
        self._switch(True)

    def eval(self) -> None:
        """Parameters become `x`."""
        self._switch(False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step."""
        for group in self.param_groups:
            assert group["train_mode"]
            beta = group["beta"]
            group["k"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                z = state.setdefault("z", p.clone())
                x = p.lerp(z, 1 - 1 / beta)
                z.sub_(p.grad, alpha=group["lr"])
                x.lerp_(z, 1 / group["k"])
                p.copy_(x.lerp(z, 1 - beta))
