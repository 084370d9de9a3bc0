"""Read a ds_config and refuse what cannot work, in the user's terms, before anything expensive happens.

DeepSpeed itself passes over unknown top-level keys, and meets most bad combinations only when the engine is built.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from disco_ds.engine.ds_types import read_json, typed
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
    "bfloat16": 'the section is called "bf16" now',
    "sparse_gradients": "the token embedding's gradient is dense",
    "sparse_attention": "attention is open_clip's",
    "data_efficiency": "the data stream is this project's own (--data.…)",
    "curriculum_learning": "the data stream is this project's own (--data.…)",
    "dataloader_drop_last": "the data stream is this project's own (--data.…), and each of its batches is whole",
    "elasticity": "give the batch as global_batch; a run resumes on another number of GPUs by itself",
    "autotuning": "the per-GPU batch is given as micro_batch",
    "managed_gradient_accumulation": "gradient_accumulation_steps are cached feature gradients here",
    "gradient_allreduce_op": "the loss counts on the mean over ranks",
    "disable_allgather": "the optimizer's new weights have to reach every rank",
    "pipeline": "two towers are not a pipeline",
    "tensor_parallel": "the ranks are data parallel, each with both towers",
    "expert_parallel": "the towers have no experts",
    "use_data_before_expert_parallelism": "the towers have no experts",
    "data_parallel_size": "all ranks are data parallel",
    "sequence_parallel_size": "the ranks are data parallel, each with whole sequences",
    "seq_parallel_communication_data_type": "the ranks are data parallel, each with whole sequences",
    "hybrid_engine": "it is for generating text while training",
    "compression_training": "weights are trained as they are",
    "quantize_training": "weights are trained as they are",
    "weight_quantization": "weights are trained as they are",
    "eigenvalue": "weights are trained as they are",
    "progressive_layer_drop": "every block is trained at every step; --model.patch_dropout saves time in its stead",
    "graph_harvesting": "the step is not recorded as a graph",
    "tensorboard": "metrics are written by --logging.tensorboard",
    "wandb": "metrics are written by --logging.wandb",
    "csv_monitor": "metrics are in metrics.jsonl of the run's folder",
    "comet": "metrics are written by --logging.tensorboard or --logging.wandb",
    "timers": "seconds and samples a second are in metrics.jsonl of the run's folder",
    "nebula": "checkpoints are this project's own (--checkpoint.…)",
    "datastates_ckpt": "checkpoints are this project's own (--checkpoint.…)",
    "vocabulary_size": "the vocabulary is the model's",
}
"""Keys of DeepSpeed, present or past, that a run does not take, and why. A switch that is off may stand there."""
_OLD_OFFLOAD = {
    "cpu_offload": '"offload_optimizer": {"device": "cpu"}',
    "cpu_offload_param": '"offload_param": {"device": "cpu"}',
    "cpu_offload_use_pin_memory": '"pin_memory" in offload_optimizer and offload_param',
}


def read_ds_config(path: str | Path) -> dict[str, Any]:
    """The content of a ds_config file, without its nulls.

    Raises:
        ConfigError: the file is missing, is not JSON, has a key that DeepSpeed or this project does not take, or a
            value that its key does not take.
    """
    source = str(path)
    content = typed(read_json(path, "--ds_config"), source)
    _check_keys(content, source)
    _check_combinations(content, source)
    _check_zero(content.get("zero_optimization", {}), source)
    return content


def is_off(value: Any) -> bool:
    """Whether the value of a key switches it off: false, or a section with nothing in it or "enabled": false."""
    return value is False or (isinstance(value, dict) and (not value or value.get("enabled") is False))


def _check_keys(content: dict[str, Any], source: str) -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    for key, value in content.items():
        if key in REFUSED and not is_off(value):
            raise ConfigError(f"{source}: {key}: not taken here: {REFUSED[key]}; take it out")
        if key not in _TAKEN and key not in REFUSED:
            raise ConfigError(f"{source}: {key}: DeepSpeed has no such key.{nearest(key, sorted(_TAKEN))}")
    known = {name for n, f in DeepSpeedZeroConfig.model_fields.items() for name in (n, f.alias) if name}
    for key, value in content.get("zero_optimization", {}).items():
        name = f"{source}: zero_optimization.{key}"
        if key in _OLD_OFFLOAD and value is not False:
            raise ConfigError(f"{name}: DeepSpeed has replaced it: write {_OLD_OFFLOAD[key]}")
        if key not in known:
            raise ConfigError(f"{name}: this DeepSpeed has no such key.{nearest(key, sorted(known))}")


def _check_zero(zero: dict[str, Any], source: str) -> None:
    """What DeepSpeed itself has to say of the section, which it would say once the model is built."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    try:
        DeepSpeedZeroConfig(**{key: value for key, value in zero.items() if key not in _OLD_OFFLOAD})
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(["zero_optimization", *map(str, first["loc"])])
        found = f"; found {first['input']!r}" if first["loc"] else ""
        raise ConfigError(f"{source}: {name}: DeepSpeed does not take it: {first['msg']}{found}") from None


def _check_combinations(content: dict[str, Any], source: str) -> None:
    """What DeepSpeed would refuse later, or accept and then not do."""
    zero = content.get("zero_optimization", {})
    stage = zero.get("stage", 0)
    for section, lowest in (("offload_optimizer", 1), ("offload_param", 3)):
        device = zero.get(section, {}).get("device", "none")
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
