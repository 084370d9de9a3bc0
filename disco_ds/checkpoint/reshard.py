"""A checkpoint into an engine with another number of ranks, precision or ZeRO stage (1 to 3).

Every rank reads, of every parameter, the elements that its own partition holds. Where DeepSpeed's optimizers keep
their vectors and what belongs where in them was read in deepspeed 0.19.8.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from disco_ds.checkpoint.state import FP32, SavedState
from disco_ds.errors import CheckpointError


def fill_engine(engine: Any, saved: SavedState) -> None:
    """Weights, buffers, optimizer states and counters of ``saved`` into an engine that has not stepped yet.

    A collective: call it on every rank.

    Raises:
        CheckpointError: the engine has other parameters, or its optimizer is not sharded by ZeRO.
    """
    stage = engine.zero_optimization_stage()
    if stage == 0:
        raise CheckpointError(f"{saved.folder}: saved at ZeRO stage {saved.zero_stage}, cannot be loaded at stage 0")
    names = {parameter: name for name, parameter in engine.module.named_parameters()}
    trained = {name: tuple(getattr(p, "ds_shape", p.shape)) for p, name in names.items() if p.requires_grad}
    there = {name: tuple(parameter.shape) for name, parameter in saved.trained.items()}
    if different := sorted(n for n in {*trained, *there} if trained.get(n) != there.get(n)):
        first = different[0]
        raise CheckpointError(
            f"{saved.folder}: {len(different)} trained parameters differ, the first is {first}: "
            f"{there.get(first, 'not there')} in the checkpoint, {trained.get(first, 'not trained')} in this model"
        )
    with torch.no_grad():
        optimizer = engine.optimizer
        if stage == 3:
            optimizer.checkpoint_event_prologue()
            _fill_vectors(optimizer, saved, optimizer.fp32_partitioned_groups_flat, _parts_stage3(optimizer, names))
            _refresh_working_copies(optimizer)
            _fill_others(engine, saved)
            optimizer.checkpoint_event_epilogue()
        else:
            _fill_vectors(optimizer, saved, optimizer.single_partition_of_fp32_groups, _parts_stage12(optimizer, names))
            optimizer.update_lp_params()
            _fill_others(engine, saved)
    engine.global_steps = saved.counters["global_steps"]
    engine.global_samples = saved.counters["global_samples"]
    engine.skipped_steps = saved.counters["skipped_steps"]


Part = tuple[int, int, str, int, int]
"""(number of the flat vector, place in it, parameter, first and last element + 1 of the parameter)."""


def _parts_stage12(optimizer: Any, names: dict[nn.Parameter, str]) -> Iterator[Part]:
    for number, group in enumerate(optimizer.bit16_groups):
        for parameter in group:
            mapping = parameter._hp_mapping
            if mapping is not None:
                here, there = mapping.hp_fragment_address, mapping.lp_fragment_address
                yield number, here.start, names[parameter], there.start, there.start + there.numel


def _parts_stage3(optimizer: Any, names: dict[nn.Parameter, str]) -> Iterator[Part]:
    for number, group in enumerate(optimizer.fp16_groups):
        place = 0
        for parameter in group:
            part = parameter.partition_numel()
            first = part * optimizer._get_param_partition_rank(parameter)
            yield number, place, names[parameter], first, min(first + part, parameter.ds_numel)
            place += part


def _fill_vectors(optimizer: Any, saved: SavedState, vectors: list[Tensor], parts: Iterator[Part]) -> None:
    """The flat fp32 masters of this rank, and the optimizer's states of each."""
    for vector in vectors:
        vector.zero_()  # padding
    inner = optimizer.optimizer
    for number, place, name, first, last in parts:
        vector, parameter = vectors[number], saved.trained[name]
        state = inner.state[vector]
        for key in parameter.pieces:
            if key != FP32 and key not in state:
                state[key] = torch.zeros_like(vector)
            target = vector if key == FP32 else state[key]
            if first < last:
                target[place : place + last - first].copy_(parameter.read(key, first, last))
        for key, value in parameter.scalars.items():
            state[key] = value.clone() if torch.is_tensor(value) else value


def _refresh_working_copies(optimizer: Any) -> None:
    """Stage 3: the partitions that forward gathers, out of the masters, as DeepSpeed does after a load."""
    for number, master in enumerate(optimizer.fp32_partitioned_groups_flat):
        working = optimizer.fp16_partitioned_groups_flat[number]
        working.data.copy_(master.data)
        parts = optimizer.fp16_partitioned_groups[number]
        for part, fresh in zip(parts, optimizer.unflatten(working, parts), strict=True):
            part.data = fresh.data
    if optimizer.persistent_parameters:
        optimizer.persistent_parameters[0].partition(optimizer.persistent_parameters)


def _fill_others(engine: Any, saved: SavedState) -> None:
    """Frozen parameters and buffers."""
    others = saved.others()
    for name, buffer in engine.module.named_buffers():
        if name in others:
            buffer.copy_(others[name])
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad or name not in others:
            continue
        value = others[name]
        if not hasattr(parameter, "ds_tensor"):
            parameter.copy_(value)
            continue
        part = parameter.ds_tensor.ds_numel
        first = part * torch.distributed.get_rank()
        own = value.reshape(-1)[first : first + part]
        parameter.ds_tensor.view(-1)[: own.numel()].copy_(own)
