"""What a run leaves in its folder for the report, beside its metrics: each start, the memory comparison, shown images.

Rank 0 writes; a file that cannot be written is said and does not end a run.
"""

from __future__ import annotations

import base64
import io
import json
import time
from typing import TYPE_CHECKING, Any

from PIL import Image

from disco_ds.files import append_line, replace_text
from disco_ds.run_layout import HELDOUT, MEMORY, STARTS

if TYPE_CHECKING:
    from disco_ds.evaluation.result import EvalResult, RankedImage
    from disco_ds.planner.compare import Measured
    from disco_ds.planner.memory import Prediction
    from disco_ds.run.prepare import Run

_LONGEST = 500  # characters of a caption
_LOSSLESS_BELOW = 64  # pixels a side: JPEG smears small drawings, and PNG of them is small


def record_start(run: Run) -> None:
    """Append to ``starts.jsonl``, which no resume rewrites, where the run starts, on what, and with which settings."""
    import torch

    from disco_ds import __version__

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
        "versions": {"disco_ds": __version__, "torch": torch.__version__, "deepspeed": _version("deepspeed")},
        "config": run.config.model_dump(mode="json"),
        "ds_config": run.engine_config.deepspeed,
    }
    with run.telemetry.log_and_continue(STARTS):
        append_line(run.folder / STARTS, json.dumps(start, ensure_ascii=False, default=str))


def record_memory(run: Run, prediction: Prediction, measured: Measured) -> None:
    """Write ``memory.json``: bytes planned for the step's highest moment, by category, and bytes measured."""
    content = {
        "step": run.state.step,
        "moment": prediction.peak.name,
        "planned": prediction.peak.bytes,
        "allocated": measured.allocated,
        "reserved": measured.reserved,
        "counted": measured.categories,
    }
    with run.telemetry.log_and_continue(MEMORY):
        replace_text(run.folder / MEMORY, json.dumps(content, indent=1) + "\n")


def record_shown(run: Run, result: EvalResult) -> None:
    """Write ``heldout.json``: the images that the newest evaluation shows, with the captions ranked first."""
    content = {"step": run.state.step, "images": [_shown(image) for image in result.samples]}
    with run.telemetry.log_and_continue(HELDOUT):
        replace_text(run.folder / HELDOUT, json.dumps(content) + "\n")


def _shown(image: RankedImage) -> dict[str, Any]:
    return {
        "key": image.key,
        "rank": int(image.rank),
        "captions": [text[:_LONGEST] for text in image.captions],
        "top": [
            {
                "text": caption.text[:_LONGEST],
                "similarity": round(float(caption.similarity), 4),
                "right": bool(caption.right),
            }
            for caption in image.top
        ],
        "width": image.pixels.shape[1],
        "height": image.pixels.shape[0],
        "src": _data_url(image),
    }


def _data_url(image: RankedImage) -> str:
    kind = "png" if max(image.pixels.shape[:2]) <= _LOSSLESS_BELOW else "jpeg"
    buffer = io.BytesIO()
    Image.fromarray(image.pixels).save(buffer, kind, **({"quality": 88} if kind == "jpeg" else {"optimize": True}))
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _version(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
