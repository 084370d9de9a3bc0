"""What a run's preparation leaves set for the whole process."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.ranks import ROOT, run_ranks
from tests.helpers.runs import write_run

pytestmark = pytest.mark.ranks


def products_after_prepare(config, precisions):
    """torch's matmul precision before, and after each run is prepared as if this rank had a GPU."""
    from disco_ds.cli.train import parse
    from disco_ds.engine.deepspeed_engine import start_distributed
    from disco_ds.run import prepare as preparing
    from disco_ds.run.watchdog import Watchdog

    found, original = [torch.get_float32_matmul_precision()], preparing.set_matmul_precision
    preparing.set_matmul_precision = lambda precision, device: original(precision, torch.device("cuda"))
    device = start_distributed()
    watchdog = Watchdog(300)
    for precision in precisions:
        run_config, _ = parse(["--config", config, "--name", precision, "--precision", precision])
        preparing.prepare(run_config, ROOT / "disco_ds" / "ds_configs" / "zero1.json", device, watchdog)
        found.append(torch.get_float32_matmul_precision())
    return found


def test_fp32_products_are_tf32_in_mixed_precision_alone(tmp_path):
    config = str(write_run(tmp_path))
    found = run_ranks(products_after_prepare, 1, config, ["fp32", "bf16"])[0]
    assert found == ["highest", "highest", "high"]
