"""What a run tells and writes down beside the metrics: header, options, starts, memory, held-out images, result.

Rank 0 writes. A file that cannot be written is a warning and does not end a run.
"""

from __future__ import annotations

import base64
import io
import json
import textwrap
import time
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from disco_ds import __version__, run_layout
from disco_ds.config.schema import RunConfig
from disco_ds.engine.ds_config import EngineConfig
from disco_ds.evaluation.result import EvalResult, RankedImage, format_result
from disco_ds.files import append_line, replace_text
from disco_ds.model.towers import TwoTowers
from disco_ds.planner import compare
from disco_ds.planner.memory import Prediction
from disco_ds.report.page import write_report
from disco_ds.run.run import Run

_LONGEST = 500  # characters of a caption
_LOSSLESS_BELOW = 64  # pixels a side: JPEG smears small drawings, and PNG of them is small


def record_start(run: Run, checkpoint: Path | None, planned: str | None, aside: Path | None) -> None:
    """Print the header, write ``config.yaml``, and append to ``starts.jsonl``, which no resume rewrites.

    Args:
        checkpoint: the one that the run goes on from.
        planned: the planner's headline, where it chose the settings.
        aside: where checkpoints are that the run leaves behind.
    """
    if run.telemetry.rank != 0:
        return
    replace_text(run.folder / run_layout.CONFIG, _resolved(run.config, run.engine_config).to_yaml())
    plan = run.engine_config.batch
    start = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "step": run.state.step,
        "ranks": plan.world_size,
        "device": torch.cuda.get_device_name(run.device) if run.device.type == "cuda" else run.device.type,
        "zero_stage": run.engine_config.zero_stage,
        "precision": run.engine_config.precision,
        "global_batch": plan.global_batch,
        "micro_batch": plan.micro_batch,
        "total_steps": run.schedule.steps,
        "versions": {"disco_ds": __version__, "torch": torch.__version__, "deepspeed": version("deepspeed")},
        "config": run.config.model_dump(mode="json"),
        "ds_config": run.engine_config.deepspeed,
    }
    with run.telemetry.log_and_continue(run_layout.STARTS):
        append_line(run.folder / run_layout.STARTS, json.dumps(start, ensure_ascii=False, default=str))
    run.telemetry.message(_header(run, checkpoint, planned, aside))


def _header(run: Run, checkpoint: Path | None, planned: str | None, aside: Path | None) -> str:
    """What will happen, in a few lines: everything that was derived or filled in is here."""
    config, plan = run.config, run.engine_config.batch
    towers: TwoTowers = run.engine.module
    image, text = (_millions(towers.tower_parameters(tower)) for tower in ("image", "text"))
    cut = f"{plan.world_size} rank{'s' * (plan.world_size > 1)} x {plan.micro_batch}"
    if plan.accumulation > 1:
        cut += f" x {plan.accumulation} micro-batches (cached gradients)"
    frozen = f", {towers.freeze} tower locked" if towers.freeze != "none" else ""
    filled = ", ".join(f"{key}={value}" for key, value in run.engine_config.filled.items()) or "nothing"
    tf32 = run.device.type == "cuda" and torch.get_float32_matmul_precision() == "high"
    device = run.device.type + (", fp32 products in TF32" if tf32 else "")
    length, warmup = (
        f"{steps:,} step{'s' * (steps != 1)} = {steps * plan.global_batch:,} samples"
        for steps in (run.schedule.steps, run.schedule.warmup)
    )
    lines = [
        f"run {run.folder}" + (f", going on from {checkpoint.name}" if checkpoint else ""),
        f"  model     {config.model.name}: image {image}, text {text}{frozen}",
        f"  batch     {plan.global_batch:,} pairs, all negatives of each other = {cut}",
        f"  length    {length}; warm-up {warmup}, then {run.schedule.kind}",
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


def _millions(parameters: Iterable[torch.nn.Parameter]) -> str:
    elements = sum(int(getattr(p, "ds_numel", p.numel())) for p in parameters)  # ZeRO-3 leaves an empty tensor behind
    return f"{elements / 1e6:.1f} M" if elements >= 1e5 else f"{elements / 1e3:.0f} K"


def _resolved(config: RunConfig, engine: EngineConfig) -> RunConfig:
    """With what the ds_config or the device decided; micro-batches stay open, they hang on the number of ranks."""
    optimizer = config.optimizer.model_copy(update={"clip_norm": float(engine.deepspeed["gradient_clipping"])})
    found = {"global_batch": engine.batch.global_batch, "precision": engine.precision, "optimizer": optimizer}
    return config.model_copy(update=found)


def compare_memory(run: Run) -> None:
    """On a GPU, tell of the memory measured so far beside what the planner predicts, and record both."""
    if run.device.type != "cuda" or run.telemetry.rank != 0:
        return
    try:
        prediction = compare.predict_run(run.config, run.engine_config, device=run.device)
    except Exception as error:  # a model that cannot be traced is no reason to stop: this is advice
        run.telemetry.message(f"memory: not predicted ({error})")
        return
    measured = compare.measure(run.engine, run.device)
    record_memory(run, prediction, measured)
    for line in filter(None, compare.beside_plan(prediction, measured)):
        run.telemetry.message(line)


def record_memory(run: Run, prediction: Prediction, measured: compare.Measured) -> None:
    """Write ``memory.json``: bytes planned for the step's highest moment, by category, and bytes measured."""
    content = {
        "step": run.state.step,
        "moment": prediction.peak.name,
        "planned": prediction.peak.bytes,
        "allocated": measured.allocated,
        "reserved": measured.reserved,
        "counted": measured.categories,
    }
    with run.telemetry.log_and_continue(run_layout.MEMORY):
        replace_text(run.folder / run_layout.MEMORY, json.dumps(content, indent=1) + "\n")


def record_evaluation(run: Run, result: EvalResult) -> None:
    """An evaluation on the console and in ``eval.jsonl``; ``heldout.json`` has the images of the newest one."""
    run.telemetry.log_eval(run.state.step, result.metrics, format_result(result))
    if run.telemetry.rank == 0:
        content = {"step": run.state.step, "images": [_shown(image) for image in result.samples]}
        with run.telemetry.log_and_continue(run_layout.HELDOUT):
            replace_text(run.folder / run_layout.HELDOUT, json.dumps(content) + "\n")


def record_end(run: Run, result: EvalResult | None) -> None:
    """The end of a run: ``result.json``, the picture and the page, and where they are."""
    if run.telemetry.rank != 0:
        return
    metrics = {} if result is None else result.metrics
    outcome = {"steps": run.state.step, "samples_seen": run.state.samples_seen, **metrics}
    with run.telemetry.log_and_continue(run_layout.RESULT):
        replace_text(run.folder / run_layout.RESULT, json.dumps(outcome, indent=1) + "\n")
    made = [f"{what}: {path}" for what, path in write_report(run.folder).items()]
    run.telemetry.message("; ".join([f"finished {run.folder}", *made]))


def _shown(image: RankedImage) -> dict[str, Any]:
    top = [(caption.text[:_LONGEST], round(float(caption.similarity), 4), bool(caption.right)) for caption in image.top]
    kind = "png" if max(image.pixels.shape[:2]) <= _LOSSLESS_BELOW else "jpeg"
    buffer = io.BytesIO()
    Image.fromarray(image.pixels).save(buffer, kind, **({"quality": 88} if kind == "jpeg" else {"optimize": True}))
    return {
        "key": image.key,
        "rank": int(image.rank),
        "captions": [text[:_LONGEST] for text in image.captions],
        "top": [{"text": text, "similarity": similarity, "right": right} for text, similarity, right in top],
        "width": image.pixels.shape[1],
        "height": image.pixels.shape[0],
        "src": f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}",
    }
