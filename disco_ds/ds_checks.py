"""Read a ds_config and refuse what cannot work, in the user's terms, before anything expensive happens.

DeepSpeed itself passes over unknown top-level keys, and meets most bad combinations only when the engine is built.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from disco_ds.errors import ConfigError, nearest

_TAKEN = {
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping",
    "zero_optimization", "bf16", "torch_autocast", "activation_checkpointing", "communication_data_type",
    "prescale_gradients", "gradient_predivide_factor", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer",
    "aio", "steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "flops_profiler",
    "comms_logger", "checkpoint", "data_types", "compile", "disable_python_gc", "log_level",
}  # fmt: skip
REFUSED = {
    "optimizer": "the optimizer is RunConfig's (--optimizer.name, --optimizer.lr …): DeepSpeed's section would drop "
    "CLIP's decay groups",
    "scheduler": "the learning rate is RunConfig's (--schedule.kind, --schedule.warmup_steps …)",
    "fp16": "fp16 is not supported: use --precision bf16 or --precision amp",
    "amp": "NVIDIA Apex is not used: --precision amp is torch's autocast",
    "sparse_gradients": "the token embedding's gradient is dense",
    "sparse_attention": "attention is open_clip's",
    "data_efficiency": "the data stream is this project's own (--data.…)",
    "curriculum_learning": "the data stream is this project's own (--data.…)",
    "elasticity": "give the batch as global_batch; a run resumes on another number of GPUs by itself",
    "autotuning": "the per-GPU batch is given as micro_batch",
    "pipeline": "two towers are not a pipeline",
    "tensorboard": "metrics are written by --logging.tensorboard",
    "wandb": "metrics are written by --logging.wandb",
    "csv_monitor": "metrics are in metrics.jsonl of the run's folder",
}


def read_ds_config(path: str | Path) -> dict[str, Any]:
    """The content of a ds_config file.

    Raises:
        ConfigError: the file is missing, is not JSON, or has a key that DeepSpeed or this project does not take.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--ds_config {path}: cannot be read ({error.strerror})") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--ds_config {path}: not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"--ds_config {path}: expected a JSON object, found {type(content).__name__}")
    _check_keys(content, str(path))
    _check_combinations(content, str(path))
    return content


def _check_keys(content: dict[str, Any], source: str) -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    for key, value in content.items():
        off = isinstance(value, dict) and value.get("enabled") is False
        if key in REFUSED and not off:
            raise ConfigError(f"{source}: {key}: {REFUSED[key]}; take the section out")
        if key not in _TAKEN and key not in REFUSED:
            raise ConfigError(f"{source}: {key}: DeepSpeed has no such key.{nearest(key, sorted(_TAKEN))}")
    zero = content.get("zero_optimization", {})
    if not isinstance(zero, dict):
        raise ConfigError(f"{source}: zero_optimization: expected an object, found {zero!r}")
    known = {name for n, f in DeepSpeedZeroConfig.model_fields.items() for name in (n, f.alias) if name}
    for key in zero:
        if key not in known:
            raise ConfigError(
                f"{source}: zero_optimization.{key}: DeepSpeed has no such key.{nearest(key, sorted(known))}"
            )
    stage = zero.get("stage", 0)
    if stage not in (0, 1, 2, 3) or isinstance(stage, bool):
        raise ConfigError(f"{source}: zero_optimization.stage: expected 0, 1, 2 or 3, found {stage!r}")
    for section in ("bf16", "torch_autocast", "activation_checkpointing"):
        if not isinstance(content.get(section, {}), dict):
            raise ConfigError(f'{source}: {section}: expected an object such as {{"enabled": "auto"}}')


def _check_combinations(content: dict[str, Any], source: str) -> None:
    """What DeepSpeed would refuse later, or accept and then not do."""
    zero = content.get("zero_optimization", {})
    stage = zero.get("stage", 0)
    for section, lowest in (("offload_optimizer", 1), ("offload_param", 3)):
        device = (zero.get(section) or {}).get("device", "none")
        if device not in ("none", "cpu", "nvme"):
            raise ConfigError(
                f"{source}: zero_optimization.{section}.device: expected none, cpu or nvme, found {device!r}"
            )
        if device != "none" and stage < lowest:
            raise ConfigError(
                f"{source}: zero_optimization.{section} needs stage {lowest} or higher, found stage {stage}"
            )
        if device == "nvme" and stage != 3:
            raise ConfigError(f"{source}: zero_optimization.{section}.device nvme needs stage 3, found stage {stage}")
    if stage >= 2 and zero.get("reduce_scatter", True):
        for key, neutral in (("prescale_gradients", False), ("gradient_predivide_factor", 1.0)):
            if content.get(key, neutral) != neutral:
                raise ConfigError(f"{source}: {key}: DeepSpeed does not take it at stage {stage}; take it out")
    _check_activation_section(content.get("activation_checkpointing", {}), source)


def _check_activation_section(section: dict[str, Any], source: str) -> None:
    name = f"{source}: activation_checkpointing"
    if section.get("contiguous_memory_optimization") or section.get("contiguous_checkpointing"):
        raise ConfigError(
            f"{name}.contiguous_memory_optimization: it fails with two towers of unequal blocks; take it out"
        )
    if section.get("cpu_checkpointing") and not section.get("partition_activations"):
        raise ConfigError(
            f"{name}.cpu_checkpointing: DeepSpeed honours it only together with partition_activations; set both, or "
            f"--model.checkpointing offload"
        )


def uses_deepspeed_checkpointing(content: dict[str, Any]) -> bool:
    """Whether the activation_checkpointing section asks for something that only DeepSpeed's own version does."""
    section = content.get("activation_checkpointing", {})
    return any(section.get(key) for key in ("partition_activations", "cpu_checkpointing", "profile"))
