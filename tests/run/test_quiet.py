"""What libraries say on a healthy run is silenced, and nothing else."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys

import pytest

from disco_ds.run import quiet
from tests.helpers.ranks import ROOT, rank_environment

PROGRAM = """
import logging, warnings
from disco_ds.run.quiet import quiet_libraries
quiet_libraries()
quiet_libraries()
import deepspeed, torch
import deepspeed.ops
from deepspeed.utils import logger
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # as engine.deepspeed_engine.start_distributed
model = torch.nn.Linear(4, 4)
engine, *_ = deepspeed.initialize(
    model=model, optimizer=torch.optim.AdamW(model.parameters()),
    config={"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}},
)
for _ in range(2):
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
logging.getLogger("torch.utils.cpp_extension").warning("No CUDA runtime is found, using CUDA_HOME='/usr/local'")
logging.warning("No pretrained weights loaded for model 'demo'. Model initialized randomly.")
torch.distributed.destroy_process_group()
print("--- told ---", flush=True)
logger.warning("lower your learning rate")
logging.getLogger("torch.utils.cpp_extension").warning("no compiler")
logging.warning("No pretrained weights found")
warnings.warn("`torch.load` is deprecated", FutureWarning)
warnings.warn("`torch.distributed.x` is deprecated. Please use `torch.distributed.y` instead.", UserWarning)
"""


@pytest.mark.skipif(
    any(map(quiet.glob.glob, quiet._GPU_DEVICE_FILES)), reason="needs a machine without an accelerator's device file"
)
def test_a_healthy_cpu_run_prints_nothing_and_other_warnings_pass(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        env = rank_environment(0, 1, free.getsockname()[1])
    del env["DS_ACCELERATOR"]  # so that DeepSpeed has something to say about it
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, str(tmp_path / "program.py")]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    before, after = done.stdout.split("--- told ---\n")
    assert before == ""
    assert "lower your learning rate" in after
    for told in ("No pretrained weights found", "`torch.load` is deprecated", "`torch.distributed.x` is deprecated"):
        assert told in done.stderr
    assert "no compiler" in done.stderr.splitlines()[0]  # nothing came before what the program itself says


@pytest.mark.parametrize(("files", "told"), [(("/dev/null",), True), ((), False)])
def test_a_fall_back_to_the_cpu_is_told_where_there_is_a_gpu(monkeypatch, files, told):
    monkeypatch.setattr(quiet, "_GPU_DEVICE_FILES", files)
    for name in ("root", "DeepSpeed", "torch.utils.cpp_extension"):
        monkeypatch.setattr(logging.getLogger(name), "filters", [])
    quiet.quiet_libraries()
    messages = {
        "DeepSpeed": "Setting accelerator to CPU. If you have GPU or other accelerator, we were unable to detect it.",
        "torch.utils.cpp_extension": "No CUDA runtime is found, using CUDA_HOME='/usr/local/cuda'",
    }
    for name, message in messages.items():
        record = logging.LogRecord(name, logging.WARNING, "", 0, message, None, None)
        assert bool(logging.getLogger(name).filter(record)) == told
