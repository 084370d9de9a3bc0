"""Folders of runs as they are found on disks, whole and broken, for the tests of disco-report."""

from __future__ import annotations

import itertools
import json
import math

import yaml

from disco_ds.run_layout import CONFIG, EVALS, HELDOUT, MEMORY, METRICS, RESULT, SKIPPED, STARTS

PIXEL = (
    "data:image/png;base64,"
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
GIB = 2**30


def write_lines(path, objects):
    path.write_text("".join(json.dumps(each) + "\n" for each in objects))


def metrics(steps, every, batch, faults, null_at):
    for number, step in enumerate(range(every, steps + 1, every)):
        loss = None if step in null_at else 5.5 * math.exp(-step / steps) + 0.1 * (-1) ** number
        yield {
            "step": step, "samples_seen": batch * step, "loss": loss,
            "lr": 1e-3 * (1 - step / steps), "logit_scale": 14.3, "grad_norm": 3 + math.sin(step),
            "samples_per_s": 400.0, "step_s": 0.5, "data_wait_s": 0.05, "time_in_forward": 0.3, "time_in_loss": 0.1,
            "time_in_backward": 0.4, "time_in_step": 0.05, "time_in_data": 0.1, "skipped_steps": 1, "failed_saves": 0,
            "peak_memory_bytes": 30 * GIB, "bad_samples": faults if step == every else {},
        }  # fmt: skip


def evaluations(steps, classes):
    for step in steps:
        line = {"step": step, "val/images": 190, "val/pairs": 190}
        for direction, k in itertools.product(("image_to_text", "text_to_image"), (1, 5, 10)):
            line[f"val/{direction}_R@{k}"], line[f"val/{direction}_R@{k}_chance"] = step / steps[-1] * k / 20, k / 190
        if classes:
            line |= {"val/zero_shot_top1": 0.3, "val/zero_shot_top1_chance": 0.1, "val/zero_shot_top5": 0.8}
        yield line


def config(**changes):
    return {
        "name": "clip", "steps": 300, "global_batch": 256, "model": {"name": "ViT-B-32"}, "loss": {"kind": "one_block"},
        "optimizer": {"lr": 1e-3, "clip_norm": 1.0}, **changes,
    }  # fmt: skip


def start(step=0, ranks=8, device="H100", **changes):
    return {
        "time": "2026-01-01T00:00:00+0000", "step": step, "ranks": ranks, "device": device, "zero_stage": 2,
        "precision": "bf16", "global_batch": 256, "micro_batch": 256 // ranks, "total_steps": 300,
        "versions": {"torch": "2.8"}, "config": config(**changes), "ds_config": {"zero_optimization": {"stage": 2}},
    }  # fmt: skip


COMPARISON = {
    "step": 3, "moment": "loss", "allocated": 31 * GIB, "reserved": 34 * GIB,
    "planned": {
        "runtime": GIB, "parameters": 2 * GIB, "gradients": GIB, "optimizer": 3 * GIB, "buckets": GIB,
        "features": GIB, "loss": 2 * GIB, "activations": 20 * GIB, "fragmentation": 2 * GIB,
    },
    "counted": {"parameters": 2 * GIB, "optimizer": 3 * GIB},
}  # fmt: skip


def heldout(caption="a red heart"):
    """Three images: the right caption, "<b>&", is second."""
    top = [{"text": caption, "similarity": 0.5, "right": False}, {"text": "<b>&", "similarity": 0.4, "right": True}]
    image = {"key": "a#1", "rank": 2, "captions": ["<b>&"], "top": top, "width": 1, "height": 1, "src": PIXEL}
    return {"step": 300, "images": [image] * 3}


def make_run(
    folder, *, steps=300, every=10, batch=256, evals=None, classes=True, faults=None, null_at=(), shown=None, **changes
):
    """A run with everything in it: two resumes, one skipped step, faults of two sources."""
    folder.mkdir(parents=True, exist_ok=True)
    faults = {"cc12m/broken_image": 40, "cc12m/no_caption": 3, "coco/broken_image": 2} if faults is None else faults
    evals = range(steps // 3, steps + 1, steps // 3) if evals is None else evals
    write_lines(folder / METRICS, metrics(steps, every, batch, faults, null_at))
    write_lines(folder / EVALS, evaluations(evals, classes))
    resumed = [start(100, 4, **changes), start(200, 4, **{**changes, "optimizer": {"lr": 5e-4, "clip_norm": 1.0}})]
    write_lines(folder / STARTS, [{**each, "global_batch": batch} for each in [start(**changes), *resumed]])
    write_lines(folder / SKIPPED, [{"step": 7, "samples": {"1": ["bad#7"]}}, {"step": 7, "samples": {}}])
    (folder / MEMORY).write_text(json.dumps(COMPARISON))
    (folder / HELDOUT).write_text(json.dumps(heldout() if shown is None else shown))
    (folder / RESULT).write_text(json.dumps({"steps": steps, "samples_seen": batch * steps}))
    (folder / CONFIG).write_text(yaml.safe_dump(config(**changes)))
    return folder
