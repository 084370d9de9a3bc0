"""A plan as the two files that ``launch/train.py`` takes: ds_config.json and run.yaml."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from disco_ds.errors import ConfigError
from disco_ds.files import replace_text
from disco_ds.planner.coefficients import Coefficients
from disco_ds.planner.from_ds_config import planned_buckets
from disco_ds.planner.models import ModelSource
from disco_ds.planner.search import Plan

DS_CONFIG, RUN = "ds_config.json", "run.yaml"


def ds_config(plan: Plan, model: Coefficients) -> dict[str, Any]:
    """The ds_config of a plan: batch keys, precision, stage, and buckets no larger than the model needs.

    ``overlap_comm`` stays "auto": true on GPUs, as planned, and false where a plan is tried on a CPU.
    """
    prediction, setup = plan.prediction, plan.setup
    buckets = setup.buckets or planned_buckets({}, model, setup.device, absent="auto")
    zero: dict[str, Any] = {"stage": setup.zero}
    if setup.zero:
        zero |= {"overlap_comm": "auto", "contiguous_gradients": True, "reduce_bucket_size": buckets.reduce}
    if setup.zero in (1, 2):
        zero |= {"reduce_scatter": True, "allgather_bucket_size": buckets.reduce + buckets.reduce % 2}
    if setup.zero == 3:
        zero |= {
            "stage3_prefetch_bucket_size": buckets.reduce,
            "stage3_max_live_parameters": buckets.max_live,
            "stage3_max_reuse_distance": buckets.reuse_distance,
            "stage3_param_persistence_threshold": "auto",
        }
    if setup.offload in ("optimizer", "all"):
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if setup.offload == "all":
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    content: dict[str, Any] = {
        "train_batch_size": plan.global_batch,
        "train_micro_batch_size_per_gpu": prediction.micro_batch,
        "gradient_accumulation_steps": prediction.accumulation,
        "gradient_clipping": "auto",
        "bf16": {"enabled": setup.precision == "bf16"},
        "zero_optimization": zero,
    }
    if setup.precision == "amp":
        content["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
    return content


def run_config(plan: Plan, source: ModelSource, data: str | None, samples: int | None) -> dict[str, Any]:
    """The fields of RunConfig that a plan decides or took as given, and the two that a run cannot be without."""
    setup = plan.setup
    run: dict[str, Any] = {
        "name": "planned",
        "global_batch": plan.global_batch,
        "micro_batch": plan.prediction.micro_batch,
        "precision": setup.precision,
        "model": {"name": source.name, **source.changes, "checkpointing": setup.checkpointing},
        "loss": {"kind": setup.loss},
        "data": {"train": data or "demo"},
    }
    if setup.optimizer != "adamw":
        run["optimizer"] = {"name": setup.optimizer}
    if setup.tile is not None:
        run["loss"]["tile"] = setup.tile
    if setup.keep_logits != "auto" and setup.loss == "one_block":
        run["loss"]["keep_logits"] = setup.keep_logits
    cached = {"images": "device"} if setup.images_on_device else {}
    cached |= {} if setup.reduce_once else {"reduce": "each"}
    if cached or setup.reuse_last:
        run["cached"] = cached | ({"reuse_last": True} if setup.reuse_last else {})
    return run | ({"steps": 1000} if samples is None else {"samples": samples})


def write_plan(
    folder: Path, plan: Plan, source: ModelSource, data: str | None = None, samples: int | None = None
) -> tuple[Path, Path]:
    """Write both files; returns their paths.

    Args:
        folder: where; it is made.
        plan: one that fits.
        source: the model that it was made for.
        data: ``data.train`` of the run; None: the embedded default.
        samples: length of the run; None: 1,000 steps.

    Raises:
        ConfigError: the folder cannot be written to, or no run has the loss that was planned with.
    """
    import yaml

    setup, model = plan.setup, source.of(plan.setup)
    if setup.loss not in ("one_block", "sigmoid"):
        raise ConfigError(
            f"--write {folder}: --loss {setup.loss} is planned for comparison; a run has one_block or sigmoid"
        )
    head = f"# {plan.global_batch} pairs a step on {setup.gpus} x {plan.request.gpu.name}, by disco-plan\n"
    head += f"# {DS_CONFIG} has the same batch: for other micro-batches or another number of GPUs plan again,\n"
    head += '# or write "auto" for its three batch keys\n'
    if data is None:
        head += "# data.train: put your shards here, or give --data.train; the length likewise (steps or samples)\n"
    body = yaml.safe_dump(run_config(plan, source, data, samples), sort_keys=False, allow_unicode=True)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_text(folder / DS_CONFIG, json.dumps(ds_config(plan, model), indent=2) + "\n")
        replace_text(folder / RUN, head + body)
    except OSError as error:
        raise ConfigError(f"--write {folder}: cannot be written ({error.strerror})") from None
    return folder / DS_CONFIG, folder / RUN
