"""`accelerate launch -m ds_etp`, with the YAML that is shipped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.export.test_live import load
from tests.launch.test_launchers import BIN, ROOT, free_port, launch
from tests.sharded import Layout
from tests.tolerances import LOSS, NORM
from tests.trainer.runs import Job, deepspeed_config
from tests.trainer.test_trainer import plain

SCRIPT = Path(__file__).with_name("train_script.py")
SHIPPED = ROOT / "configs" / "accelerate.yaml"


def test_the_shipped_file_names_our_json() -> None:
    content = yaml.safe_load(SHIPPED.read_text())
    config = json.loads((ROOT / content["deepspeed_config"]["deepspeed_config_file"]).read_text())
    assert config["expert_tensor_parallel"]["etp_size"] == 2
    assert content["distributed_type"] == "DEEPSPEED"


@pytest.mark.full
def test_accelerate_launch(tmp_path: Path) -> None:
    content = yaml.safe_load(SHIPPED.read_text())
    config = {**deepspeed_config(Layout(world=2, etp=2, stage=1)), "gradient_clipping": 0.5}
    config["gradient_accumulation_steps"], config["train_micro_batch_size_per_gpu"] = 2, 2
    (tmp_path / "ds.json").write_text(json.dumps(config))
    content["deepspeed_config"]["deepspeed_config_file"] = str(tmp_path / "ds.json")
    content["num_processes"] = 2
    (tmp_path / "accelerate.yaml").write_text(yaml.safe_dump(content))
    command = [str(BIN / "accelerate"), "launch", "--config_file", str(tmp_path / "accelerate.yaml")]
    command += ["--main_process_port", str(free_port()), "-m", "ds_etp", str(SCRIPT), str(tmp_path / "out")]
    code, output = launch(command)
    lines = [line for line in output.splitlines() if line.startswith('{"losses"')]
    assert (code, len(lines)) == (0, 1), output[-4000:]
    logged, oracle = json.loads(lines[0]), plain(Job())
    assert logged["expert"] == [4, 32, 8]
    assert logged["losses"] == pytest.approx(oracle.losses, rel=LOSS)
    assert logged["norms"] == pytest.approx(oracle.norms, rel=NORM)
    load(tmp_path / "out" / "model")
