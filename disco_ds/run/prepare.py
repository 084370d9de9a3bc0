"""From a checked configuration to everything the loop needs, cheap checks before expensive ones."""

from __future__ import annotations

import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from disco_ds import run_layout
from disco_ds.checkpoint.folder import set_aside
from disco_ds.checkpoint.resume import check_resumable, choose_checkpoint
from disco_ds.checkpoint.save import Identity, RunState
from disco_ds.config.schema import RunConfig
from disco_ds.data.cursor import check_stream
from disco_ds.data.probe import probe
from disco_ds.data.sources import Source, expand
from disco_ds.data.stream import TrainStream
from disco_ds.distributed import on_rank_0
from disco_ds.engine.deepspeed_engine import (
    build_engine,
    collective_timeout,
    configure_checkpointing,
    resume_engine,
    set_matmul_precision,
)
from disco_ds.engine.ds_config import EngineConfig, resolve, uses_deepspeed_checkpointing
from disco_ds.engine.ds_schema import read_ds_config
from disco_ds.engine.schedule import build_schedule
from disco_ds.engine.step import TrainStep
from disco_ds.errors import ConfigError
from disco_ds.evaluation.evaluate import check_evaluation
from disco_ds.loss.contrastive import build_loss
from disco_ds.model.build import build_model
from disco_ds.model.preprocess import build_tokenizer, build_transform
from disco_ds.model.towers import TwoTowers
from disco_ds.planner.auto import fill_auto
from disco_ds.planner.models import to_stderr
from disco_ds.planner.text import headline
from disco_ds.run.recorder import record_start
from disco_ds.run.run import Run
from disco_ds.run.watchdog import Watchdog
from disco_ds.telemetry.sinks import Telemetry, check_logging


def prepare(
    config: RunConfig, ds_config: str | Path, device: torch.device, watchdog: Watchdog, *, plan: bool = False
) -> Run:
    """Check, build and resume. Raises the same error on every rank before anything on disk has changed.

    Args:
        watchdog: is told how far this has come, and goes on to watch the run.
        plan: let the planner fill what run and ds_config leave open, for the device at hand.

    Raises:
        ConfigError, DataError, CheckpointError: see the modules that they come from.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    config, engine_config, planned = _settle_options(config, ds_config, device, plan)
    set_matmul_precision(engine_config.precision, device)
    identity = _identify(config, engine_config)
    folder, global_batch = config.runs_dir / config.name, identity.global_batch
    checkpoints = folder / run_layout.CHECKPOINTS

    watchdog.progress("starts: looks at data and checkpoints")
    check_logging(tensorboard=config.logging.tensorboard, wandb=config.logging.wandb)
    check_evaluation(config.evaluation)
    sources = on_rank_0(lambda: _find_shards(config))  # the embedded default is built here, once
    checkpoint = choose_checkpoint(config.resume, checkpoints, lambda what: watchdog.progress(f"starts: {what}"))
    cursor = None if checkpoint is None else on_rank_0(lambda: check_resumable(checkpoint, identity))
    check_stream(config.data, sources, global_batch, world_size, config.seed, cursor)
    on_rank_0(lambda: _check_writable(folder))

    watchdog.progress("starts: builds the model")
    model = _build_towers(config, engine_config)
    tokenizer = build_tokenizer(config.model)
    transform = build_transform(model, training=True, augment=config.data.augment)
    on_rank_0(lambda: probe(config.data, transform=transform))
    if config.data.val is not None:
        on_rank_0(lambda: probe(config.data, transform=transform, field="data.val"))

    watchdog.progress("starts: builds the engine")
    torch.manual_seed(config.seed * 1_000_003 + rank)  # dropout differs between ranks; a checkpoint brings its own
    engine = build_engine(model, config.optimizer, engine_config)
    state = RunState(step=0, samples_seen=0, cursor=None)
    if checkpoint is not None:
        watchdog.progress(f"starts: reads {checkpoint.name}")
        state = resume_engine(engine, checkpoint, identity)
    schedule = build_schedule(config, global_batch)
    run = Run(
        config=config, folder=folder, engine_config=engine_config, engine=engine, tokenizer=tokenizer,
        stream=TrainStream(
            config.data, global_batch=global_batch, rank=rank, world_size=world_size, seed=config.seed,
            transform=transform, tokenizer=tokenizer, cursor=state.cursor,
        ),
        train_step=_train_step(config, engine_config, engine, device), schedule=schedule,
        telemetry=_open_telemetry(config, folder, state.step, schedule.steps),
        control=dist.new_group(backend="gloo", timeout=collective_timeout(config.timeout_minutes)),
        watchdog=watchdog, state=state, identity=identity,
    )  # fmt: skip
    aside = None if checkpoint is None else _leave_behind(checkpoint, state.step, checkpoints)
    record_start(run, checkpoint, planned, aside)
    return run


def _settle_options(
    config: RunConfig, ds_config: str | Path, device: torch.device, plan: bool
) -> tuple[RunConfig, EngineConfig, str | None]:
    """Run and ds_config, checked against each other; with ``plan`` filled by the planner, and its headline."""
    content, planned, source, world_size = read_ds_config(ds_config), None, str(ds_config), dist.get_world_size()
    if plan:
        progress = to_stderr if dist.get_rank() == 0 else lambda message: None
        config, content, found = fill_auto(
            config, content, world_size=world_size, device=device, source=source, progress=progress
        )
        planned = "\n".join(headline(found, config.model.name))
    return config, resolve(config, content, world_size=world_size, on_gpu=device.type == "cuda", source=source), planned


def _identify(config: RunConfig, engine_config: EngineConfig) -> Identity:
    compared = {"name", "config", "freeze", "image_size", "context_length"}
    return Identity(
        world_size=engine_config.batch.world_size,
        zero_stage=engine_config.zero_stage,
        precision=engine_config.precision,
        global_batch=engine_config.batch.global_batch,
        model=config.model.model_dump(mode="json", include=compared),
        optimizer=config.optimizer.name,
    )


def _find_shards(config: RunConfig) -> list[Source]:
    if config.data.val is not None:
        expand(config.data.val, "data.val")
    return expand(config.data.train, "data.train")


def _check_writable(folder: Path) -> None:
    """Try the run's folder, or the nearest one above it that is there; nothing is left behind."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryDirectory(dir=there):
            pass
    except OSError as error:
        raise ConfigError(f"runs_dir: nothing can be written to {folder}: {error}. Choose another --runs_dir") from None


def _build_towers(config: RunConfig, engine_config: EngineConfig) -> TwoTowers:
    by_deepspeed = uses_deepspeed_checkpointing(engine_config.deepspeed)
    if by_deepspeed:
        configure_checkpointing(engine_config.deepspeed["activation_checkpointing"])
    model = build_model(config.model, config.seed, deepspeed_checkpointing=by_deepspeed)
    if config.loss.kind == "sigmoid" and model.logit_bias is None:
        raise ConfigError(
            f"loss.kind sigmoid needs a model with a bias, {config.model.name} has none: choose a SigLIP model, or "
            f"give init_logit_bias (SigLIP's is -10) and init_logit_scale in the model's JSON"
        )
    return model


def _train_step(config: RunConfig, engine_config: EngineConfig, engine: Any, device: torch.device) -> TrainStep:
    loss, cached = build_loss(config.loss.kind, **config.loss.options()), config.cached
    return TrainStep(
        engine, loss, engine_config.batch.accumulation, device, on_host=cached.images == "host",
        reduce_once=cached.reduce == "once", reuse_last=cached.reuse_last,
    )  # fmt: skip


def _open_telemetry(config: RunConfig, folder: Path, start_step: int, total_steps: int) -> Telemetry:
    return Telemetry(
        folder, tensorboard=config.logging.tensorboard, wandb=config.logging.wandb, rank=dist.get_rank(),
        total_steps=total_steps, start_step=start_step, run_config=config.model_dump(mode="json"),
    )  # fmt: skip


def _leave_behind(checkpoint: Path, step: int, folder: Path) -> Path | None:
    """Move aside what the run has saved on a way that it does not take: after the checkpoint that it goes on from, or,
    where that one is from elsewhere, all of it."""
    after = step if checkpoint.resolve().parent == folder.resolve() else -1
    return on_rank_0(lambda: set_aside(folder, after), failure=f"what is in {folder} could not be moved aside")


def start_logging(rank: int) -> None:
    """Show the project's warnings on the console, with the rank that they come from."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"[rank {rank}] %(levelname)s %(message)s"))
    logger = logging.getLogger("disco_ds")
    logger.handlers = [handler]
    logger.propagate = False
