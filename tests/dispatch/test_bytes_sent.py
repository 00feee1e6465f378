"""Messages and bytes of real MoE blocks, forward and backward, beside what users have today.

Two-layer models, 2,048 tokens a step on four ranks, fp32, hidden 512. Bytes are what a rank sends, by the rules of
the recorder. The numbers of others are for transformers 5.24 and DeepSpeed's AutoEP.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.recorder import record
from tests.launcher import Launcher
from tests.oracle import Recipe
from tests.sharded import Layout, make_engine

HIDDEN, TOKENS, WORLD = 512, 2048, 4
MB = 1e6


def sent_by_blocks(layout: Layout, experts: int, per_token: int) -> list[tuple[list[str], float, float]]:
    """By layer: names of a block's messages, bytes this rank sends, and assignments that leave this rank of `ep`."""
    changes = (
        ("hidden_size", HIDDEN),
        ("intermediate_size", 32),  # nothing of it travels
        ("num_local_experts", experts),
        ("num_experts_per_tok", per_token),
        ("max_position_embeddings", 2048),
    )
    engine = make_engine(Recipe(dp=layout.dp, changes=changes), layout)
    inputs: list[Tensor] = []

    def keep(module: nn.Module, args: Any) -> None:
        inputs.append(args[0].detach())

    blocks = [layer.mlp for layer in engine.module.model.layers]
    hooks = [block.register_forward_pre_hook(keep) for block in blocks]
    aims: list[Tensor] = []
    hooks += [block.experts.register_forward_pre_hook(lambda _, args: aims.append(args[1])) for block in blocks]
    generator = torch.Generator().manual_seed(dist.get_rank() // layout.tp)
    ids = torch.randint(0, 96, (4, TOKENS // layout.dp // 4), generator=generator)
    with torch.no_grad():
        engine.module(input_ids=ids)
    for hook in hooks:
        hook.remove()
    results = []
    for block, hidden, index in zip(blocks, inputs, aims, strict=True):
        with record() as recording:
            block(hidden.requires_grad_()).square().sum().backward()
        leaving = index // (experts // layout.ep) != engine.ds_etp.groups.ep.index
        results.append((recording.names, recording.bytes, leaving.sum().item()))
    engine.destroy()
    return results


def measured(launcher: Launcher, sizes: tuple[int, int, int], experts: int, per_token: int) -> tuple[float, float]:
    """Means over ranks and layers of bytes sent and assignments that leave; at most 8 messages a layer."""
    tp, etp, ep = sizes
    layout = Layout(world=WORLD, tp=tp, etp=etp, ep=ep, stage=1)
    by_rank = launcher.run(WORLD, sent_by_blocks, layout=layout, experts=experts, per_token=per_token)
    layers = [layer for result in by_rank for layer in result]
    for names, _, _ in layers:
        assert len(names) <= (3 if ep == 1 else 8), names
    return sum(layer[1] for layer in layers) / len(layers), sum(layer[2] for layer in layers) / len(layers)


def test_etp_equal_to_tp_sends_what_tensor_parallelism_sends(launcher: Launcher) -> None:
    """tp 2, etp 2: an all-reduce of the tokens each way (4.2 MB), and the gradient of the routing weights.

    transformers' own TP=2 on the same block, recorded alike: the same 4,202,496 bytes, in 3 messages.
    """
    sent, _ = measured(launcher, (2, 2, 1), experts=8, per_token=2)
    assert sent == 2 * (TOKENS // 2) * HIDDEN * 4 + (TOKENS // 2) * 2 * 4


@pytest.mark.parametrize(("experts", "per_token", "most"), [(8, 2, 0.95 * 8.4 * MB), (32, 8, 0.55 * 27.6 * MB)])
def test_tp_with_ep(launcher: Launcher, experts: int, per_token: int, most: float) -> None:
    """tp 2, ep 4: transformers' all-to-all sends 8.4 and 27.6 MB, in 8 messages."""
    sent, _ = measured(launcher, (2, 1, 4), experts, per_token)
    assert sent <= most


@pytest.mark.parametrize(("experts", "per_token", "share"), [(8, 2, 0.92), (32, 8, 0.52)])
def test_ep_alone(launcher: Launcher, experts: int, per_token: int, share: float) -> None:
    """ep 4: of what AutoEP sends for the same routing, which is a row each way for every assignment, twice.

    For the mean router that is 6.3 and 25.2 MB. How often two experts of a token share a rank is up to the
    router: with uniform routing to 2 of 8 experts no dispatch sends less than 13/14, 0.93, of it.
    """
    sent, leaving = measured(launcher, (1, 1, 4), experts, per_token)
    assert sent <= share * 4 * leaving * HIDDEN * 4
