"""How far a sharded run may be from the unsharded one, and why."""

from __future__ import annotations

import torch

from tests.oracle import Run

# fp32: the same sums in another order. One rounding is 6e-8 relative; a loss or a norm is a sum of many.
LOSS = 1e-6
NORM = 1e-6
# A single small entry of a gradient can cancel, so tensors are measured against their largest entry.
TENSOR = 1e-5
# A gradient that is zero but for rounding (attention's, of a single token) has no digits to compare: it has to stay
# that small. Ten roundings of the whole gradient.
NOISE = 6e-7


def assert_same_bits(run: Run, other: Run) -> None:
    """Losses, norms, gradients and weights of two runs that compute the same in the same order."""
    assert (other.losses, other.norms) == (run.losses, run.norms)
    for before, after in ((run.grads, other.grads), (run.weights, other.weights)):
        assert all(torch.equal(before[name], after[name]) for name in before)


def assert_equal_runs(run: Run, oracle: Run, *, loss: float = LOSS, norm: float = NORM, tensor: float = TENSOR) -> None:
    """Losses, norms, every gradient and every weight of two runs."""
    for kind, got, wanted, limit in (
        ("loss", run.losses, oracle.losses, loss),
        ("norm", run.norms, oracle.norms, norm),
    ):
        assert len(got) == len(wanted)
        for step, (a, b) in enumerate(zip(got, wanted, strict=True)):
            assert abs(a - b) <= limit * abs(b), (
                f"{kind} of step {step}: {a} instead of {b} ({abs(a - b) / abs(b):.1e})"
            )
    for kind, got, wanted in (("gradient", run.grads, oracle.grads), ("weight", run.weights, oracle.weights)):
        assert set(got) == set(wanted), set(got) ^ set(wanted)
        noise = NOISE * torch.stack([tensor.norm() for tensor in wanted.values()]).norm()
        for name, reference in wanted.items():
            assert got[name].shape == reference.shape, f"{kind} of {name}: {got[name].shape}, not {reference.shape}"
            largest = reference.abs().max().clamp(min=1e-12)
            if max(largest, got[name].abs().max()) <= noise:
                continue
            error = ((got[name] - reference).abs().max() / largest).item()
            assert error <= tensor, f"{kind} of {name} is off by {error:.1e} of its largest entry"
            assert torch.isfinite(got[name]).all()
