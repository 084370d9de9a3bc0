"""DeepSpeed: start it, wrap the model in an engine, and the few things that differ between ZeRO stages."""

from __future__ import annotations

import logging
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from disco_ds.checkpoint.resume import load_checkpoint
from disco_ds.checkpoint.save import Identity, RunState
from disco_ds.config.schema import OptimizerConfig
from disco_ds.engine.buckets import fill_buckets
from disco_ds.engine.ds_config import EngineConfig
from disco_ds.engine.optimizer import build_optimizer
from disco_ds.engine.temperature import clamp_temperatures, exact_temperatures, has_no_masters
from disco_ds.model.towers import TwoTowers

log = logging.getLogger("disco_ds")


def collective_timeout(timeout_minutes: float) -> timedelta:
    """That of collectives: the watchdog's own comes first, since it can tell which rank is missing."""
    return timedelta(minutes=2 * timeout_minutes)


def start_distributed(timeout_minutes: float = 30.0) -> torch.device:
    """Join the process group (NCCL on GPUs, gloo on CPUs); returns this rank's device."""
    import deepspeed
    import deepspeed.ops

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        # init_distributed would compile a shared-memory extension for minutes; gloo serves as well
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if not dist.is_initialized():
        timeout = collective_timeout(timeout_minutes)
        deepspeed.init_distributed("nccl" if on_gpu else "gloo", timeout=timeout, verbose=False)
    return device


def set_matmul_precision(precision: str, device: torch.device) -> None:
    """Let the fp32 products of a mixed-precision run on a GPU be TF32; other runs keep what the process has.

    What is left in fp32 there is the loss. With TF32 a logit is off by about 2e-3 at a scale of 100, where features in
    bf16 have already made it off by 0.2.
    """
    if device.type == "cuda" and precision != "fp32":
        torch.set_float32_matmul_precision("high")


def configure_checkpointing(section: dict[str, Any]) -> None:
    """Hand the ds_config's activation_checkpointing section to DeepSpeed's own checkpointing."""
    import deepspeed

    deepspeed.checkpointing.configure(
        None,
        partition_activations=section.get("partition_activations", False),
        checkpoint_in_cpu=section.get("cpu_checkpointing", False),
        synchronize=section.get("synchronize_checkpoint_boundary", False),
        profile=section.get("profile", False),
    )


def build_engine(model: TwoTowers, config: OptimizerConfig, engine_config: EngineConfig) -> Any:
    """A DeepSpeedEngine over ``model`` with the optimizer in place; fills bucket sizes that say "auto"."""
    import deepspeed

    on_gpu = torch.cuda.is_available()
    trained = [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]
    zero, source = engine_config.deepspeed["zero_optimization"], engine_config.source
    engine_config.filled |= fill_buckets(zero, sum(trained), max(trained), on_gpu=on_gpu, source=source)
    offload = zero.get("offload_optimizer", {}).get("device", "none") != "none"
    if not on_gpu:  # pinned memory belongs to a GPU
        for section in ("offload_optimizer", "offload_param"):
            if section in zero:
                zero[section] = {**zero[section], "pin_memory": False}
    optimizer = build_optimizer(model, config, on_gpu=on_gpu, offload=offload)
    exact = exact_temperatures(model)  # in bf16 DeepSpeed makes its fp32 masters from weights it has already rounded
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=engine_config.deepspeed, dist_init_required=False
    )
    clamp_temperatures(engine, exact)
    _forget_trial_step(engine)
    return engine


def resume_engine(engine: Any, checkpoint: Path, identity: Identity) -> RunState:
    """As :func:`disco_ds.checkpoint.resume.load_checkpoint`, and the temperatures exact in every copy of them."""
    state = load_checkpoint(engine, checkpoint, identity)
    clamp_temperatures(engine)
    return state


def _forget_trial_step(engine: Any) -> None:
    """Set Adam's step count back to 0 at stage 0 in bf16.

    DeepSpeed (0.19.8) allocates that optimizer's state by a step with zero gradients and leaves the count at 1: the
    bias correction then makes the first update 0.74 of what it should be with betas 0.9, 0.98.
    """
    if engine.zero_optimization_stage() == 0 and engine.bfloat16_enabled():
        for state in engine.optimizer.optimizer.state.values():
            state["step"].zero_()


def update_or_skip(engine: Any) -> bool:
    """The optimizer's update, unless the gradient is not finite: then every rank leaves it out.

    The norm of the whole gradient is the same on all ranks, so all decide alike. DeepSpeed's optimizers decide by it
    themselves and say so in ``overflow`` (0.19.8); at stage 0 in fp32 and under autocast, where DeepSpeed hands the
    step straight to torch, it is done here. Returns whether the update was made.
    """
    if has_no_masters(engine):
        parameters = [p for p in engine.module.parameters() if p.grad is not None]
        engine.disco_grad_norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if not torch.isfinite(engine.disco_grad_norm):
            for parameter in parameters:
                parameter.grad = None
            return False
    engine.step()
    return not getattr(engine.optimizer, "overflow", False)


def gradient_norm(engine: Any) -> float:
    """Global 2-norm of the last step's averaged gradient, before clipping. Call after the step, on every rank."""
    return float(engine.disco_grad_norm if has_no_masters(engine) else engine.get_global_grad_norm())
