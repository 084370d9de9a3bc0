"""What the values of a ds_config may be: sections are objects, numbers are numbers, switches are true or false.

Whoever reads a ds_config reads it with :func:`read_json` and :func:`typed`: a run (:mod:`~disco_ds.engine.ds_checks`)
and the planner. Without torch and DeepSpeed. What is not listed here is left to DeepSpeed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Union

from disco_ds.errors import ConfigError

AUTO = "auto"


@dataclass(frozen=True)
class Kind:
    """One kind of value."""

    words: str
    """What messages call it."""
    fits: Callable[[Any], bool]
    auto: bool = False
    """Whether "auto" stands for it too."""

    def allows(self, value: Any) -> bool:
        """Whether the value is of this kind."""
        return (self.auto and value == AUTO) or self.fits(value)

    def __str__(self) -> str:
        return f'{self.words} or "auto"' if self.auto else self.words


Kinds = Mapping[str, Union[Kind, "Kinds"]]


def _number(value: Any, least: float = 0) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= least  # false for NaN


def _whole(value: Any, least: float = 0) -> bool:
    return _number(value, least) and (isinstance(value, int) or value.is_integer())


def _one_of(*choices: Any) -> Kind:
    words = f"{', '.join(map(str, choices[:-1]))} or {choices[-1]}"
    return Kind(words, lambda value: any(type(value) is type(choice) and value == choice for choice in choices))


_SWITCH = Kind("true or false", lambda value: isinstance(value, bool))
_SWITCH_OR_AUTO = Kind(_SWITCH.words, _SWITCH.fits, auto=True)
_SIZE = Kind("a whole number, 0 or more", _whole, auto=True)
_COUNT = Kind("a positive whole number", lambda value: _whole(value, 1), auto=True)
_SHARE = Kind("a number from 0 to 1", lambda value: _number(value) and value <= 1, auto=True)
_DTYPE = Kind("fp32, fp16 or bf16", lambda value: str(value).lower() in ("fp32", "fp16", "bf16"))
_AUTOCAST_DTYPES = ("bfloat16", "bf16", "torch.bfloat16", "float16", "fp16", "half", "torch.float16")

_OFFLOAD: Kinds = {
    "device": _one_of("none", "cpu", "nvme"),
    **dict.fromkeys(("pin_memory", "pipeline_read", "pipeline_write", "fast_init", "super_offload"), _SWITCH_OR_AUTO),
    **dict.fromkeys(("buffer_count", "buffer_size", "max_in_cpu"), _SIZE),
    **dict.fromkeys(("ratio", "cpuadam_cores_perc"), _SHARE),
}
_ZERO_SIZES = (
    "allgather_bucket_size", "sub_group_size", "prefetch_bucket_size", "param_persistence_threshold",
    "model_persistence_threshold", "max_live_parameters", "max_reuse_distance", "module_granularity_threshold",
)  # fmt: skip
_ZERO_SWITCHES = (
    "contiguous_gradients", "reduce_scatter", "use_multi_rank_bucket_allreduce", "allgather_partitions", "overlap_comm",
    "load_from_fp32_weights", "gather_16bit_weights_on_model_save", "ignore_unused_parameters", "legacy_stage1",
    "round_robin_gradients", "zero_quantized_weights", "zero_quantized_nontrainable_weights",
    "zero_quantized_gradients", "memory_efficient_linear", "override_module_apply", "log_trace_cache_warnings",
)  # fmt: skip
_ZERO: Kinds = {
    "stage": _one_of(0, 1, 2, 3),
    "reduce_bucket_size": _COUNT,
    "zero_hpz_partition_size": _SIZE,
    **{f"{stage3}{key}": _SIZE for key in _ZERO_SIZES for stage3 in ("", "stage3_")},
    **{f"{stage3}{key}": _SWITCH_OR_AUTO for key in _ZERO_SWITCHES for stage3 in ("", "stage3_")},
    "offload_optimizer": _OFFLOAD,
    "offload_param": _OFFLOAD,
    "zenflow": {},
    "leaf_module": {},
}
KINDS: Kinds = {
    **dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), _COUNT),
    "gradient_clipping": Kind("a number, 0 or more", lambda v: _number(v) and v < math.inf, auto=True),
    "gradient_predivide_factor": Kind("a positive number", lambda v: _number(v) and 0 < v < math.inf),
    "steps_per_print": Kind("a positive number", lambda v: _number(v) and v > 0),  # Infinity: never
    **dict.fromkeys(
        (
            "prescale_gradients", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "memory_breakdown",
            "wall_clock_breakdown", "dump_state", "disable_python_gc",
        ),
        _SWITCH,
    ),
    "communication_data_type": _DTYPE,
    "zero_optimization": _ZERO,
    "bf16": {"enabled": _SWITCH_OR_AUTO},
    "torch_autocast": {"enabled": _SWITCH_OR_AUTO, "dtype": _one_of(*_AUTOCAST_DTYPES)},
    "activation_checkpointing": {
        **dict.fromkeys(
            (
                "partition_activations", "cpu_checkpointing", "contiguous_memory_optimization", "profile",
                "synchronize_checkpoint_boundary",
            ),
            _SWITCH,
        ),
        "number_checkpoints": _SIZE,
    },
    **{section: {} for section in ("aio", "flops_profiler", "comms_logger", "checkpoint", "data_types", "compile")},
}  # fmt: skip
_EXAMPLES = {
    "zero_optimization": '{"stage": 2}',
    "offload_optimizer": '{"device": "cpu"}',
    "offload_param": '{"device": "cpu"}',
    "bf16": '{"enabled": "auto"}',
    "torch_autocast": '{"enabled": "auto"}',
    "activation_checkpointing": '{"partition_activations": true}',
}


def read_json(path: str | Path, flag: str) -> dict[str, Any]:
    """The object in a ds_config file, as it stands there.

    Args:
        path: the file.
        flag: the option that names it, for messages.

    Raises:
        ConfigError: the file is missing, is not JSON, or holds something else than an object.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{flag} {path}: cannot be read ({error.strerror})") from None
    except ValueError as error:  # not JSON, or not UTF-8
        raise ConfigError(f"{flag} {path}: not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{flag} {path}: expected a JSON object, found {type(content).__name__}")
    return content


def typed(content: Mapping[str, Any], source: str, kinds: Kinds = KINDS, prefix: str = "") -> dict[str, Any]:
    """A copy of a ds_config without its nulls, which mean absent, and with whole numbers as int (5e8 too).

    Args:
        content: as :func:`read_json` gives it.
        source: what messages call the file.
        kinds, prefix: of a section: its own kinds, and its name with a dot.

    Raises:
        ConfigError: a value of another kind than its key takes.
    """
    found: dict[str, Any] = {}
    for key, value in content.items():
        if value is None:
            continue
        kind, name = kinds.get(key), f"{source}: {prefix}{key}"
        if isinstance(kind, Mapping):
            if not isinstance(value, dict):
                example = f" such as {_EXAMPLES[key]}" if key in _EXAMPLES else ""
                raise ConfigError(f"{name}: expected an object{example}, found {_shown(value)}")
            value = typed(value, source, kind, f"{prefix}{key}.")
        elif kind is not None:
            if not kind.allows(value):
                raise ConfigError(f"{name}: expected {kind}, found {_shown(value)}{_spelling(value, kind)}")
            if kind in (_SIZE, _COUNT) and value != AUTO:
                value = int(value)
        found[key] = value
    return found


def _shown(value: Any) -> str:
    return repr(value) if isinstance(value, str) else json.dumps(value)


def _spelling(value: Any, kind: Kind) -> str:
    """How a number or switch that stands in quotes is written."""
    if not isinstance(value, str):
        return ""
    text = value.strip().lower()
    try:
        meant = json.loads(text)
    except ValueError:
        return ""
    return f"; write {text} without quotes" if kind.allows(meant) else ""
