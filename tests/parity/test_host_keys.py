"""DeepSpeed's own options with split experts: what trains as the unsharded model does, with the option on.

`ds_etp.config.host_keys` names these tests. Options that don't meet each other are on together, in one run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from deepspeed.utils import groups as host_groups

from ds_etp.errors import ConfigError
from tests.launcher import Launcher
from tests.oracle import Recipe, Run, train_unsharded
from tests.parity.test_bf16 import EVERY_EXPERT, FACTOR, errors
from tests.sharded import Layout, full_tensors, make_engine, train, weight
from tests.tolerances import assert_equal_runs

RECIPE = Recipe(dp=4, steps=2)


def zero(**keys: Any) -> tuple[tuple[str, dict[str, Any]], ...]:
    return (("zero_optimization", keys),)


def run_with(launcher: Launcher, stage: int, extra: tuple[Any, ...], recipe: Recipe = RECIPE) -> Run:
    """A run with experts in 2 parts, each of them on two ranks."""
    run: Run = launcher.run(4, train, recipe=recipe, layout=Layout(4, etp=2, stage=stage, extra=extra))[0]
    return run


@pytest.mark.parametrize("stage", [1, 2])
def test_zero_1_and_2(launcher: Launcher, stage: int) -> None:
    extra = zero(
        allgather_partitions=False,
        allgather_bucket_size=1000,
        use_multi_rank_bucket_allreduce=False,
        parameter_alignment=True,
        ignore_unused_parameters=False,
        elastic_checkpoint=True,
    )
    assert_equal_runs(run_with(launcher, stage, extra), train_unsharded(RECIPE))


THRESHOLDS = {
    "sub_group_size": 2000,
    "stage3_prefetch_bucket_size": 100,
    "stage3_max_live_parameters": 100,
    "stage3_max_reuse_distance": 100,
    "stage3_param_persistence_threshold": 100_000,
    "stage3_model_persistence_threshold": 1000,
}
FLAGS = {
    "memory_efficient_linear": False,
    "override_module_apply": False,
    "log_trace_cache_warnings": True,
    "enable_sanity_checks": True,
}


@pytest.mark.sample("all", "offload")
@pytest.mark.parametrize(
    "keys",
    [
        pytest.param(THRESHOLDS | FLAGS | {"stage3_use_all_reduce_for_fetch_params": True}, id="all"),
        pytest.param(FLAGS | {"stage3_allgather_sequential": True, "cpu_offload": True}, id="sequential"),
        pytest.param(
            {
                "offload_param": {"device": "cpu", "pin_memory": False},
                "offload_optimizer": {
                    "device": "cpu",
                    "pin_memory": False,
                    "pipeline_read": True,
                    "pipeline_write": True,
                },
                "stage3_allgather_sequential": True,
            },
            id="offload",
        ),
    ],
)
def test_zero_3(launcher: Launcher, keys: dict[str, Any]) -> None:
    assert_equal_runs(run_with(launcher, 3, zero(**keys)), train_unsharded(RECIPE))


def test_without_a_norm(launcher: Launcher) -> None:
    """Nobody computes the norm then: the reported one is none."""
    recipe = Recipe(dp=4, steps=2, clip=0.0)
    run = run_with(launcher, 2, zero(compute_grad_norm=False), recipe)
    oracle = train_unsharded(recipe)
    assert all(norm != norm for norm in run.norms)
    run.norms = oracle.norms
    assert_equal_runs(run, oracle)


@pytest.mark.sample(1, 3)
@pytest.mark.parametrize("prescale", [False, True])
@pytest.mark.parametrize("stage", [0, 1])  # DeepSpeed asserts against both at 2 and 3
def test_scaled_reductions(launcher: Launcher, stage: int, prescale: bool) -> None:
    """Divided before the sum, in part, or after: the same gradients."""
    extra = (("gradient_predivide_factor", 2.0), ("prescale_gradients", prescale))
    assert_equal_runs(run_with(launcher, stage, extra), train_unsharded(RECIPE))


@pytest.mark.sample(1)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_summed_gradients(launcher: Launcher, stage: int) -> None:
    """Gradients and norm are those of the mean times the data-parallel ranks, experts' too: clipping then hides it."""
    run = run_with(launcher, stage, (("gradient_allreduce_op", "sum"),))
    oracle = train_unsharded(RECIPE)
    run.norms = [norm / RECIPE.dp for norm in run.norms]
    run.grads = {name: grad / RECIPE.dp for name, grad in run.grads.items()}
    assert_equal_runs(run, oracle)


@pytest.mark.sample(3)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_communication_dtype(launcher: Launcher, stage: int) -> None:
    """bf16 between ranks: as far from the truth as plain DeepSpeed, within the factor that `test_bf16` allows."""
    recipe = Recipe(dp=4, steps=2, changes=EVERY_EXPERT)
    extra = (("communication_data_type", "bf16"),)
    plain = Layout(4, stage=stage, with_block=False, extra=extra)
    truth = train_unsharded(recipe)
    got = errors(run_with(launcher, stage, extra, recipe), truth)
    allowed = errors(launcher.run(4, train, recipe=recipe, layout=plain)[0], truth)
    for kind, error in got.items():
        # A sum of many numbers can be right by luck in the plain run: a tenth of a bf16 rounding is always allowed.
        limit = FACTOR * max(allowed[kind] if allowed[kind] == allowed[kind] else 0.0, 2**-8 / 10)
        assert error <= limit, f"{kind} is off by {error:.1e}; plain by {allowed[kind]:.1e}"


def test_bf16_options(launcher: Launcher) -> None:
    """With fp32 accumulation, where they act; as far from the truth as plain DeepSpeed with the same options."""
    recipe = Recipe(dp=4, steps=2, changes=EVERY_EXPERT)
    bf16 = {"enabled": True, "immediate_grad_update": True, "check_grad_overflow": False}
    types = {
        "grad_accum_dtype": "fp32",
        "param_dtype": "bf16",
        "buffer_dtype": "fp32",
        "keep_in_fp32_modules": ["gate"],
    }
    extra = (("bf16", bf16), ("data_types", types))
    truth = train_unsharded(recipe)
    got = errors(run_with(launcher, 1, extra, recipe), truth)
    plain = Layout(4, with_block=False, extra=extra)
    allowed = errors(launcher.run(4, train, recipe=recipe, layout=plain)[0], truth)
    for kind, error in got.items():
        limit = FACTOR * max(allowed[kind], 2**-8 if kind in ("loss", "norm") else 0.0)  # as `test_bf16`
        assert error <= limit, f"{kind} is off by {error:.1e}; plain by {allowed[kind]:.1e}"


def accumulate_by_hand(recipe: Recipe, layout: Layout) -> Run | None:
    """Two backwards a step, and one call of `step`, which is the boundary."""
    engine = make_engine(recipe, layout)
    run = Run()
    for step in range(recipe.steps):
        for micro in range(recipe.accumulate):
            engine.backward(recipe.compute_loss(engine, recipe.batch(step, micro, dist.get_rank())))
        engine.step()
        run.norms.append(float(engine.get_global_grad_norm()))
    run.weights = full_tensors(engine, weight)
    engine.destroy()
    return run if dist.get_rank() == 0 else None


@pytest.mark.sample(3)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_own_accumulation_boundary(launcher: Launcher, stage: int) -> None:
    recipe = Recipe(dp=4, steps=2, accumulate=2)
    layout = Layout(4, etp=2, stage=stage, extra=(("managed_gradient_accumulation", False),))
    run, oracle = launcher.run(4, accumulate_by_hand, recipe=recipe, layout=layout)[0], train_unsharded(recipe)
    # Before `step` there are no reduced gradients to read.
    run.losses, run.grads = oracle.losses, oracle.grads
    assert_equal_runs(run, oracle)


@pytest.mark.sample(1)
@pytest.mark.parametrize("stage", [1, 3])
def test_watched(launcher: Launcher, tmp_path: Path, stage: int) -> None:
    """Timers, profiler and loggers look on, and write what they are asked to."""
    log = {"enabled": True, "verbose": True, "prof_all": False, "prof_ops": ["all_reduce"], "debug": True}
    extra = (
        *((key, True) for key in ("wall_clock_breakdown", "memory_breakdown", "dump_state", "disable_python_gc")),
        ("steps_per_print", 1),
        ("flops_profiler", {"enabled": True, "profile_step": 1, "detailed": True, "output_file": str(tmp_path / "f")}),
        ("comms_logger", log),
        ("csv_monitor", {"enabled": True, "output_path": str(tmp_path), "job_name": "run"}),
    )
    assert_equal_runs(run_with(launcher, stage, extra), train_unsharded(RECIPE))
    assert {path.name for path in tmp_path.iterdir()} == {"f", "run"}


@pytest.mark.sample(0)
@pytest.mark.parametrize("stage", [1, 3])
def test_hybrid_engine(launcher: Launcher, stage: int) -> None:
    """Its training. Its generation asks for kernels that DeepSpeed has for no model with experts, and says so."""
    extra = (("hybrid_engine", {"enabled": True}),)
    assert_equal_runs(run_with(launcher, stage, extra), train_unsharded(RECIPE))


@pytest.mark.sample(0)
@pytest.mark.parametrize("preset", [None, "mixtral"])
def test_dense_layers(launcher: Launcher, preset: str | None) -> None:
    """AutoTP by a plan of the config's own, or by one that DeepSpeed has, in place of the model's."""
    specs = [
        {"patterns": [r".*\.self_attn\.[qkv]_proj\.weight$"], "partition_type": "column"},
        {"patterns": [r".*\.self_attn\.o_proj\.weight$"], "partition_type": "row"},
    ]
    keys = {"partition_config": {"use_default_specs": False, "layer_specs": specs}, "tp_overlap_comm": True}
    if preset is not None:
        keys = {"preset_model": preset}
    recipe = Recipe(dp=2, steps=2)
    layout = Layout(4, tp=2, etp=2, stage=1, extra=(("tensor_parallel", keys),))
    run = launcher.run(4, train, recipe=recipe, layout=layout)[0]
    assert_equal_runs(run, train_unsharded(recipe))


def refusal_of_a_mesh() -> str:
    """The config's own sizes of a device mesh, which DeepSpeed keeps for later engines of the process too."""
    extra = (("sequence_parallel_size", 2), ("data_parallel_size", 1))
    try:
        with pytest.raises(ConfigError) as info:
            make_engine(RECIPE, Layout(2, etp=2, extra=extra))
    finally:
        host_groups.mesh_device = None
    return str(info.value)


def test_device_mesh(launcher: Launcher) -> None:
    for text in launcher.run(2, refusal_of_a_mesh):
        assert text.startswith("sequence parallel size=2 comes from a device mesh"), text
