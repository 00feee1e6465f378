"""Every key of DeepSpeed's config is decided in `ds_etp.config.host_keys`: one that a new release brings fails here.

The keys are DeepSpeed's own: the fields of its config models, and whatever it looks up in a config while it reads one
and while it makes, trains and saves with an engine, which is given a config that takes down what is asked of it.
"""

from __future__ import annotations

import ast
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import pytest
from deepspeed.comm.config import CommsLoggerConfig
from deepspeed.compile.config import CompileConfig
from deepspeed.monitor.config import DeepSpeedMonitorConfig
from deepspeed.runtime import config as host_config
from deepspeed.runtime.config import HybridEngineConfig
from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

from ds_etp.config import host_keys
from ds_etp.config.deepspeed import BLOCK
from ds_etp.config.host_keys import TESTED, WITHOUT_EFFECT, ineffective, is_decided, rules_for
from ds_etp.config.host_rules import HOST_RULES, REMOVED_BLOCKS, REMOVED_ZERO_KEYS
from tests.launcher import Launcher
from tests.oracle import Recipe
from tests.sharded import Layout, ds_config

ROOT = Path(__file__).parents[2]
MODELS: dict[str, type[DeepSpeedConfigModel]] = {
    "zero_optimization": DeepSpeedZeroConfig,
    "fp16": DeepSpeedFP16Config,
    "bf16": DeepSpeedBF16Config,
    "compile": CompileConfig,
    "tensor_parallel": TPTrainingConfig,
    "hybrid_engine": HybridEngineConfig,
    "comms_logger": CommsLoggerConfig,
    "timers.throughput": DeepSpeedThroughputTimerConfig,
    "": DeepSpeedMonitorConfig,
}
# Blocks without a model, whose keys DeepSpeed looks up one by one. They are given, empty, so that it looks.
LOOKED_UP = (
    *("activation_checkpointing", "flops_profiler", "checkpoint", "checkpoint.writer", "checkpoint.parallel_write"),
    *("data_types", "torch_autocast", "pipeline", "aio", "timers", "data_efficiency", "data_efficiency.data_sampling"),
    *("data_efficiency.data_routing", "optimizer"),
)
# Asked for by DeepSpeed and no option of the config: what a script or another library puts there.
NOT_OPTIONS = {"optimizer.params.max_grad_norm", "optimizer.params.per_head_muon"}


def model_keys(model: type[DeepSpeedConfigModel], block: str) -> Iterator[str]:
    """The dotted keys of a config model, as a config spells them, and of the models in it."""
    for name, field in model.model_fields.items():
        key = f"{block}.{field.alias or name}".lstrip(".")
        yield key
        for part in inner_types(field.annotation):
            yield from model_keys(part, key)


def inner_types(annotation: Any) -> Iterator[type[DeepSpeedConfigModel]]:
    """The config models that a field may hold."""
    if isinstance(annotation, type) and issubclass(annotation, DeepSpeedConfigModel):
        yield annotation
    elif isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        for part in typing.get_args(annotation):
            yield from inner_types(part)


class Asked(dict[str, Any]):
    """A config that takes down, dotted, every key it is asked for."""

    def __init__(self, values: dict[str, Any], block: str = "", asked: set[str] | None = None) -> None:
        self.block, self.asked = block, set() if asked is None else asked
        super().__init__(
            {key: Asked(v, self._dotted(key), self.asked) if isinstance(v, dict) else v for key, v in values.items()}
        )

    def _dotted(self, key: object) -> str:
        return f"{self.block}.{key}".lstrip(".")

    def __contains__(self, key: object) -> bool:
        self.asked.add(self._dotted(key))
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(self._dotted(key))
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """The value, as of any dict."""
        self.asked.add(self._dotted(key))
        return super().get(key, default)

    def keys(self) -> Any:
        """Itself: DeepSpeed asks `in config.keys()`."""
        return self

    def __copy__(self) -> Asked:
        copied = Asked({}, self.block, self.asked)
        copied.update(dict(self.items()))
        return copied

    __deepcopy__ = lambda self, memo: self.__copy__()  # noqa: E731


def asked_while_read() -> set[str]:
    """What DeepSpeed asks of a config to read it."""
    values: dict[str, Any] = {"train_batch_size": 1}
    for block in LOOKED_UP:
        inner = values
        for part in block.split("."):
            inner = inner.setdefault(part, {})
    config = Asked(values)
    host_config.DeepSpeedConfig(config)
    return config.asked


def asked_by_an_engine(stage: int, folder: str) -> set[str]:
    """What DeepSpeed asks of its config from `initialize` to a checkpoint, without our block."""
    config = Asked(ds_config(Recipe(), Layout(1, stage=stage, with_block=False)))
    model = Recipe().model()
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=list(model.parameters()))
    engine.backward(Recipe().compute_loss(engine, Recipe().batch(0, 0, 0)))
    engine.step()
    engine.save_checkpoint(folder)
    engine.destroy()
    return config.asked


def assert_decided(keys: set[str]) -> None:
    unknown = sorted(key for key in keys if not is_decided(key))
    assert not unknown, (
        f"DeepSpeed has keys that nobody looked at with split experts: {unknown}. For each of them add a test, the "
        "reason why it has no effect, or a rule: see ds_etp/config/host_keys.py"
    )


@pytest.mark.parametrize("block", MODELS)
def test_every_field_is_decided(block: str) -> None:
    assert_decided(set(model_keys(MODELS[block], block)))


def test_every_key_that_is_read_is_decided() -> None:
    asked = asked_while_read()
    assert {"gradient_accumulation_steps", "torch_autocast.dtype", "checkpoint.writer.type"} <= asked  # it does listen
    assert_decided(asked - NOT_OPTIONS - {BLOCK})  # ours, which patches ask for that other tests have put there


@pytest.mark.sample(0)
@pytest.mark.parametrize("stage", [1, 3])
def test_every_key_that_an_engine_asks_for_is_decided(launcher: Launcher, tmp_path: Path, stage: int) -> None:
    asked = launcher.run(1, asked_by_an_engine, stage=stage, folder=str(tmp_path))[0]
    assert {"sequence_parallel_size", "tensor_parallel", "gradient_clipping"} <= asked
    assert_decided(asked - NOT_OPTIONS - {BLOCK})  # ours, which patches ask for that other tests have put there


def test_every_key_of_the_tables_is_deepspeeds() -> None:
    """Nothing is listed that DeepSpeed has no more; a key of the tables is a field, or is spelled in its sources."""
    fields = {key for block, model in MODELS.items() for key in model_keys(model, block)}
    root = Path(deepspeed.__file__).parent
    files = [path for part in ("runtime", "profiling", "utils", "comm") for path in (root / part).rglob("*.py")]
    source = "".join(path.read_text(encoding="utf-8") for path in [*files, root / "__init__.py"])
    for key in {**host_keys.tested(), **ineffective()}:
        last = key.rpartition(".")[2]
        assert key in fields or f'"{last}"' in source or f"'{last}'" in source, key


def test_no_key_is_decided_twice() -> None:
    both = [key for keys in (*TESTED.values(), *WITHOUT_EFFECT.values()) for key in keys]
    assert sorted(both) == sorted(set(both))
    # A rule may still refuse some values, or some stages, of what is tested or has no effect; not the whole key.
    assert not [key for key in both if any(rule.key == key and rule.works == "none" for rule in rules_for(key))]


@pytest.mark.parametrize("test", TESTED)
def test_every_test_that_is_named_exists(test: str) -> None:
    """And its file, or one of the files it builds its configs with, spells the key."""
    file, _, name = test.partition("::")
    source = (ROOT / file).read_text(encoding="utf-8")
    assert name in {node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}, test
    helpers = [ROOT / "tests" / helper for helper in ("sharded.py", "oracle.py")] + sorted(
        (ROOT / file).parent.glob("*runs.py")
    )
    source += "".join(path.read_text(encoding="utf-8") for path in helpers)
    for key in TESTED[test]:
        assert key.rpartition(".")[2] in source, f"{test} does not say {key}"


def test_what_deepspeed_removed_is_refused() -> None:
    """DeepSpeed's own list of what it has removed, which older releases that are let in still have."""
    assert set(host_config._REMOVED_TOP_LEVEL_CONFIG_KEYS) == set(REMOVED_BLOCKS)
    rules = {rule.key for rule in HOST_RULES}
    assert {f"zero_optimization.{key}" for key in host_config._REMOVED_ZERO_CONFIG_KEYS} <= rules
    assert set(REMOVED_ZERO_KEYS) <= set(host_config._REMOVED_ZERO_CONFIG_KEYS)
