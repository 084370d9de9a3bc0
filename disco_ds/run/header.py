"""What a run tells of itself at its start."""

from __future__ import annotations

import textwrap
from pathlib import Path

import torch

from disco_ds.engine.ds_config import BatchPlan
from disco_ds.model.towers import TwoTowers
from disco_ds.run.run import Run


def header(run: Run, checkpoint: Path | None, planned: str | None, aside: Path | None) -> str:
    """What will happen, in a few lines: everything that was derived or filled in is here.

    Args:
        checkpoint: the one that the run goes on from.
        planned: the planner's headline, where it chose the settings.
        aside: where checkpoints are that the run leaves behind.
    """
    config, plan = run.config, run.engine_config.batch
    towers: TwoTowers = run.engine.module
    sizes = {tower: sum(_elements(p) for p in towers.tower_parameters(tower)) for tower in ("image", "text")}
    steps, warmup = run.schedule.steps, run.schedule.warmup
    ranks = "1 rank" if plan.world_size == 1 else f"{plan.world_size} ranks"
    cut = f"{ranks} x {plan.micro_batch}" + (
        f" x {plan.accumulation} micro-batches (cached gradients)" if plan.accumulation > 1 else ""
    )
    frozen = f", {towers.freeze} tower locked" if towers.freeze != "none" else ""
    filled = ", ".join(f"{key}={value}" for key, value in run.engine_config.filled.items()) or "nothing"
    device = run.device.type + _products(run.device)
    lines = [
        f"run {run.folder}" + (f", going on from {checkpoint.name}" if checkpoint else ""),
        f"  model     {config.model.name}: image {_millions(sizes['image'])}, text {_millions(sizes['text'])}{frozen}",
        f"  batch     {plan.global_batch:,} pairs, all negatives of each other = {cut}",
        f"  length    {_steps(steps, plan)}; warm-up {_steps(warmup, plan)}, then {run.schedule.kind}",
        f"  engine    ZeRO {run.engine_config.zero_stage}, {run.engine_config.precision}, {device}; "
        f"{config.optimizer.name}; loss {config.loss.kind}; checkpointing {config.model.checkpointing}",
        textwrap.fill(f'  "auto"    {filled}', 110, subsequent_indent=" " * 12, break_on_hyphens=False),
    ]
    if planned:
        lines.append(f"  planned   {planned}")
    if aside is not None:
        lines.append(
            f"another way from step {run.state.step}: the checkpoints that this run leaves behind are now in {aside}"
        )
    return "\n".join(lines)


def _steps(steps: int, plan: BatchPlan) -> str:
    return f"{steps:,} step{'' if steps == 1 else 's'} = {steps * plan.global_batch:,} samples"


def _products(device: torch.device) -> str:
    tf32 = device.type == "cuda" and torch.get_float32_matmul_precision() == "high"
    return ", fp32 products in TF32" if tf32 else ""


def _elements(parameter: torch.nn.Parameter) -> int:
    return int(getattr(parameter, "ds_numel", parameter.numel()))  # ZeRO-3 leaves an empty tensor behind


def _millions(elements: int) -> str:
    return f"{elements / 1e6:.1f} M" if elements >= 1e5 else f"{elements / 1e3:.0f} K"
