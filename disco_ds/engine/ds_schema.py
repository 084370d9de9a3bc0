"""What a ds_config may say: one pydantic model, for a run and for the planner. Without torch and DeepSpeed.

Values are taken strictly: switches are true or false, numbers have no quotes, ``null`` means absent, and 5e8 is a whole
number. What a section has beyond the keys listed here is left to DeepSpeed (:func:`ask_deepspeed`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    ValidationError,
    ValidationInfo,
    WrapValidator,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from disco_ds.config.read import find_ds_config
from disco_ds.engine.refused_keys import REFUSED, REPLACED
from disco_ds.errors import ConfigError, nearest

AUTO: Final = "auto"
Auto = Literal["auto"]
EXAMPLES = {
    "zero_optimization": '{"stage": 2}',
    "offload_optimizer": '{"device": "cpu"}',
    "offload_param": '{"device": "cpu"}',
    "bf16": '{"enabled": "auto"}',
    "torch_autocast": '{"enabled": "auto"}',
    "activation_checkpointing": '{"partition_activations": true}',
}
"""What messages show in place of a section that is no object."""


def _of_key(key: str, text: str) -> PydanticCustomError:
    """What a section has against one of its keys."""
    return PydanticCustomError("key", "{key}: {text}", {"key": key, "text": text})


def _without(content: Any, refused: Mapping[str, str], message: str) -> Any:
    """A section without keys that are refused and off; ``message`` with its reason is raised for one that is on."""
    if not isinstance(content, dict):
        return content
    for key in content.keys() & refused.keys():
        value = content[key]
        if not (value is False or (isinstance(value, dict) and (not value or value.get("enabled") is False))):
            raise _of_key(key, message.format(refused[key]))
    return {key: value for key, value in content.items() if key not in refused}


def _shown(value: Any) -> str:
    return repr(value) if isinstance(value, str) else json.dumps(value)


def _whole(value: Any) -> Any:
    """5e8 as an int."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _expected(words: str) -> WrapValidator:
    """Whatever is wrong with a value, the message is what was expected, and how a number in quotes is written."""

    def check(value: Any, handler: Callable[[Any], Any]) -> Any:
        with suppress(ValidationError):
            return handler(_whole(value))
        hint = '; "auto" is not known here: give a value' if value == AUTO else ""
        if isinstance(value, str):
            text = value.strip().lower()
            with suppress(ValueError):  # no number or switch, or one that would not do either
                handler(_whole(json.loads(text)))
                hint = f"; write {text} without quotes"
        raise ValueError(f"expected {words}, found {_shown(value)}{hint}")

    return WrapValidator(check)


Switch = Annotated[StrictBool, _expected("true or false")]
SwitchOrAuto = Annotated[StrictBool | Auto, _expected('true or false or "auto"')]
Size = Annotated[StrictInt, Field(ge=0), _expected("a whole number, 0 or more")]
SizeOrAuto = Annotated[Annotated[StrictInt, Field(ge=0)] | Auto, _expected('a whole number, 0 or more or "auto"')]
Count = Annotated[Annotated[StrictInt, Field(ge=1)] | Auto, _expected('a positive whole number or "auto"')]
Positive = Annotated[StrictFloat, Field(gt=0), _expected("a positive number")]


class _Section(BaseModel):
    model_config = ConfigDict(extra="allow")

    @model_validator(mode="after")
    def _written_as_it_is_meant(self) -> _Section:
        """Keys that are DeepSpeed's alone: it would take a number in quotes, or pass over "auto"."""
        for key, value in (self.model_extra or {}).items():
            if value == AUTO:
                raise _of_key(key, '"auto" is not known here; give a value')
            if isinstance(value, str) and re.fullmatch(r"\s*(true|false|\d+|\d*\.?\d+(e\d+)?)\s*", value, re.I):
                raise _of_key(key, f"found {value!r}; write {value.strip().lower()} without quotes")
        return self


class Offload(_Section):
    """``offload_optimizer`` and ``offload_param``."""

    device: Annotated[Literal["none", "cpu", "nvme"], _expected("none, cpu or nvme")] = "none"
    pin_memory: Switch = False


def _stage3(name: str) -> Any:
    """A key that DeepSpeed takes with and without "stage3_"."""
    return Field(None, validation_alias=AliasChoices(f"stage3_{name}", name))


class Zero(_Section):
    """``zero_optimization``. Sizes are in elements."""

    stage: Annotated[StrictInt, Field(ge=0, le=3), _expected("0, 1, 2 or 3")] = 0
    reduce_scatter: Switch = True
    overlap_comm: SwitchOrAuto | None = None
    reduce_bucket_size: Count | None = None
    allgather_bucket_size: SizeOrAuto | None = None
    stage3_prefetch_bucket_size: SizeOrAuto | None = _stage3("prefetch_bucket_size")
    stage3_max_live_parameters: SizeOrAuto | None = _stage3("max_live_parameters")
    stage3_max_reuse_distance: Size | None = _stage3("max_reuse_distance")
    stage3_param_persistence_threshold: SizeOrAuto | None = _stage3("param_persistence_threshold")
    offload_optimizer: Offload | None = None
    offload_param: Offload | None = None

    @model_validator(mode="before")
    @classmethod
    def _replaced(cls, content: Any) -> Any:
        return _without(content, REPLACED, "DeepSpeed has replaced it: write {}")

    @field_validator("allgather_bucket_size")
    @classmethod
    def _even(cls, value: Any) -> Any:
        if value != AUTO and value % 2:
            raise ValueError(f"must be even, found {value}")
        return value

    @field_validator("offload_optimizer", "offload_param")
    @classmethod
    def _offload_has_its_stage(cls, value: Offload, info: ValidationInfo) -> Offload:
        stage, lowest = info.data.get("stage", 0), 1 if info.field_name == "offload_optimizer" else 3
        if value.device != "none" and stage < lowest:
            raise ValueError(f"needs stage {lowest} or higher, found stage {stage}")
        if value.device == "nvme" and stage != 3:
            raise ValueError(f"device nvme needs stage 3, found stage {stage}")
        return value


class Bf16(_Section):
    """``bf16``."""

    enabled: SwitchOrAuto = AUTO


_AutocastType = Literal["bfloat16", "bf16", "torch.bfloat16", "float16", "fp16", "half", "torch.float16"]


class Autocast(Bf16):
    """``torch_autocast``."""

    dtype: Annotated[_AutocastType, _expected("bfloat16 or float16")] = "bfloat16"


class ActivationCheckpointing(_Section):
    """``activation_checkpointing``: how DeepSpeed's own function recomputes, where model.checkpointing recomputes."""

    partition_activations: Switch = False
    cpu_checkpointing: Switch = False
    contiguous_memory_optimization: Switch = False
    contiguous_checkpointing: Switch = False
    profile: Switch = False
    synchronize_checkpoint_boundary: Switch = False

    @field_validator("contiguous_memory_optimization", "contiguous_checkpointing", "cpu_checkpointing")
    @classmethod
    def _honoured_here(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.field_name != "cpu_checkpointing":
            raise ValueError("it fails with two towers of unequal blocks; take it out")
        if value and not info.data.get("partition_activations"):
            raise ValueError(
                "DeepSpeed honours it only together with partition_activations; set both, or --model.checkpointing "
                "offload"
            )
        return value


class DsConfig(_Section):
    """A ds_config. A key that is not here is one that DeepSpeed does not have, or has a reason in :data:`REFUSED`."""

    model_config = ConfigDict(extra="forbid")

    zero_optimization: Zero = Zero()
    train_batch_size: Count = AUTO
    train_micro_batch_size_per_gpu: Count = AUTO
    gradient_accumulation_steps: Count = AUTO
    gradient_clipping: Annotated[
        Annotated[StrictFloat, Field(ge=0, allow_inf_nan=False)] | Auto, _expected('a number, 0 or more or "auto"')
    ] = AUTO
    bf16: Bf16 = Bf16()
    torch_autocast: Autocast = Autocast()
    activation_checkpointing: ActivationCheckpointing = ActivationCheckpointing()
    communication_data_type: Annotated[Literal["fp32", "fp16", "bf16"], _expected("fp32, fp16 or bf16")] | None = None
    prescale_gradients: Switch = False
    gradient_predivide_factor: Positive = 1.0
    steps_per_print: Positive | None = None  # Infinity: never
    zero_allow_untested_optimizer: Switch = False
    zero_force_ds_cpu_optimizer: Switch = True
    memory_breakdown: Switch = False
    wall_clock_breakdown: Switch = False
    dump_state: Switch = False
    disable_python_gc: Switch = False
    log_level: Any = None
    aio: dict[str, Any] | None = None
    flops_profiler: dict[str, Any] | None = None
    comms_logger: dict[str, Any] | None = None
    checkpoint: dict[str, Any] | None = None
    data_types: dict[str, Any] | None = None
    compile: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _refused(cls, content: Any) -> Any:
        return _without(content, REFUSED, "not taken here: {}; take it out")

    @field_validator("prescale_gradients", "gradient_predivide_factor")
    @classmethod
    def _not_with_reduce_scatter(cls, value: Any, info: ValidationInfo) -> Any:
        zero = info.data.get("zero_optimization", Zero())
        if value != cls.model_fields[str(info.field_name)].default and zero.stage >= 2 and zero.reduce_scatter:
            raise ValueError(f"DeepSpeed does not take it at stage {zero.stage}; take it out")
        return value


def read_ds_config(path: str | Path, flag: str = "--ds_config", *, deepspeed: bool = True) -> dict[str, Any]:
    """The content of a ds_config as :func:`checked` gives it.

    Args:
        path: the file, or the name of a shipped ds_config.
        flag: the option that names the file, for messages.
        deepspeed: import DeepSpeed and let it look at the file too: for a run.

    Raises:
        ConfigError: the file is missing, is not JSON, or as :func:`checked` and :func:`ask_deepspeed`.
    """
    path = find_ds_config(path, flag)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{flag} {path}: cannot be read ({error.strerror})") from None
    except ValueError as error:  # not JSON, or not UTF-8
        raise ConfigError(f"{flag} {path}: not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{flag} {path}: expected a JSON object, found {type(content).__name__}")
    content = checked(content, str(path))
    if deepspeed:
        ask_deepspeed(content, str(path))
    return content


def checked(content: dict[str, Any], source: str) -> dict[str, Any]:
    """A copy of a ds_config with what it says alone: no nulls, nothing that is refused and off, whole numbers as int.

    Args:
        content: as JSON gives it.
        source: what messages call the file.

    Raises:
        ConfigError: a key that is not taken, a value of another kind than its key takes, or keys that do not go
            together; the message names the first of them.
    """
    try:
        return DsConfig.model_validate(_without_nulls(content)).model_dump(exclude_unset=True)
    except ValidationError as error:
        first = error.errors()[0]
    context, path = first.get("ctx", {}), [str(part) for part in first["loc"]]
    if first["type"] == "extra_forbidden":
        text = f"DeepSpeed has no such key.{nearest(path[-1], sorted(DsConfig.model_fields))}"
    elif first["type"] in ("model_type", "dict_type"):
        example = f" such as {EXAMPLES[path[-1]]}" if path[-1] in EXAMPLES else ""
        text = f"expected an object{example}, found {_shown(first['input'])}"
    elif first["type"] == "key":
        path, text = [*path, context["key"]], context["text"]
    else:
        text = str(context["error"])
    raise ConfigError(f"{source}: {'.'.join(path)}: {text}")


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return value


def ask_deepspeed(content: dict[str, Any], source: str) -> None:
    """Let DeepSpeed itself look at zero_optimization, which it would do once the model is built. For a run.

    Raises:
        ConfigError: a key that this DeepSpeed does not have, or a value that it does not take.
    """
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    try:
        DeepSpeedZeroConfig(**content.get("zero_optimization", {}))
    except ValidationError as error:
        first = error.errors()[0]
    else:
        return
    name = ".".join(["zero_optimization", *map(str, first["loc"])])
    if first["type"] == "extra_forbidden":
        known = sorted({key for n, f in DeepSpeedZeroConfig.model_fields.items() for key in (n, f.alias) if key})
        raise ConfigError(f"{source}: {name}: this DeepSpeed has no such key.{nearest(str(first['loc'][-1]), known)}")
    found = f"; found {first['input']!r}" if first["loc"] else ""
    raise ConfigError(f"{source}: {name}: DeepSpeed does not take it: {first['msg']}{found}")
