"""What DeepSpeed saved, read parameter by parameter, whatever the number of ranks that saved it.

DeepSpeed writes one file a rank with that rank's stretch of flat vectors (fp32 masters and optimizer states). The files
are mapped into memory and not read, so a rank that needs a part of every parameter touches those pages only, and ranks
of one machine share them. DeepSpeed's own converter (``ds_to_universal``) writes all of it anew, needs Adam's two
states, and only one rank can do it.

The layouts are those of deepspeed 0.19: at stages 1 and 2 ``param_slice_mappings`` says which stretch of a rank's
vector belongs to which parameter, at stage 3 every parameter is cut into equal parts, the last one padded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from disco_ds.errors import CheckpointError

FP32 = "fp32"
"""The key of the fp32 weights, beside those of the optimizer's states (``exp_avg``, …)."""


@dataclass
class _Saved:
    """One trained parameter: its shape, its pieces in order by key, and what the optimizer keeps for it as a whole."""

    shape: torch.Size
    pieces: dict[str, list[Tensor]] = field(default_factory=dict)
    scalars: dict[str, Any] = field(default_factory=dict)

    def add(self, key: str, piece: Tensor) -> None:
        self.pieces.setdefault(key, []).append(piece)


class SavedState:
    """A checkpoint's weights and optimizer states by parameter name.

    Args:
        folder: where DeepSpeed's files are (``step-…/engine``).
        zero_stage: the stage that they were saved at.

    Raises:
        CheckpointError: files are missing or not laid out as expected.
    """

    def __init__(self, folder: Path, zero_stage: int) -> None:
        self.folder, self.zero_stage = folder, zero_stage
        self._models = [_mapped(path) for path in _by_rank(folder, "model_states")]
        self.counters: dict[str, int] = {
            key: self._models[0].get(key, 0) for key in ("global_steps", "global_samples", "skipped_steps")
        }
        readers: dict[int, Callable[[], Iterator[tuple[str, _Saved]]]] = {
            0: self._whole, 1: self._sliced, 2: self._sliced, 3: self._partitioned,
        }  # fmt: skip
        try:
            self._trained = dict(readers[zero_stage]())
        except (KeyError, IndexError, AttributeError) as error:
            raise CheckpointError(
                f"{folder}: not laid out as DeepSpeed 0.19 does at ZeRO stage {zero_stage} "
                f"({type(error).__name__}: {error}); resume with the release and number of ranks that saved it"
            ) from error

    @property
    def trained(self) -> list[str]:
        """Names of the parameters that the optimizer had."""
        return list(self._trained)

    def shape(self, name: str) -> torch.Size:
        """Shape of a trained parameter."""
        return self._trained[name].shape

    def keys(self, name: str) -> list[str]:
        """The optimizer's states of a parameter that have its shape; empty before the first update."""
        return [key for key in self._trained[name].pieces if key != FP32]

    def scalars(self, name: str) -> dict[str, Any]:
        """The optimizer's other states of a parameter: ``step`` and the like."""
        return self._trained[name].scalars

    def read(self, name: str, key: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Elements ``start`` to ``stop`` of a parameter's weights or state, flattened; a copy in memory.

        Raises:
            CheckpointError: the saved pieces do not add up to the parameter.
        """
        saved = self._trained[name]
        pieces, size = saved.pieces[key], math.prod(saved.shape)
        if sum(piece.numel() for piece in pieces) != size:
            found = sum(piece.numel() for piece in pieces)
            raise CheckpointError(f"{self.folder}: {found} elements of {name} ({key}) are saved, it has {size}")
        stop = size if stop is None else min(stop, size)
        parts, offset = [], 0
        for piece in pieces:
            first, last = max(start - offset, 0), min(stop - offset, piece.numel())
            if first < last:
                parts.append(piece[first:last])
            offset += piece.numel()
        return torch.cat(parts).clone() if parts else pieces[0].new_empty(0)

    def others(self) -> dict[str, Tensor]:
        """Frozen parameters and buffers by name, whole; parameters in the precision that the engine held them in."""
        model = self._models[0]
        found = {name: value for name, value in model["module"].items() if name not in self._trained}
        if self.zero_stage == 3:
            shapes = model["frozen_param_shapes"] or {}
            fragments = [rank["frozen_param_fragments"] or {} for rank in self._models]
            for name, shape in shapes.items():
                flat = torch.cat([rank[name].reshape(-1) for rank in fragments])
                found[name] = flat[: math.prod(shape)].reshape(shape)
        return found

    def weights(self) -> dict[str, Tensor]:
        """Every parameter and buffer by name, whole; trained ones in fp32."""
        trained = {name: self.read(name, FP32).reshape(self.shape(name)) for name in self._trained}
        return {**self.others(), **trained}

    def _sliced(self) -> Iterator[tuple[str, _Saved]]:
        shapes = {name: shape for group in self._models[0]["param_shapes"] for name, shape in group.items()}
        saved = {name: _Saved(shape) for name, shape in shapes.items()}
        for shard in self._shards():
            states = shard["base_optimizer_state"]["state"]
            for number, slices in enumerate(shard["param_slice_mappings"]):
                flat, state = shard["single_partition_of_fp32_groups"][number], states.get(number, {})
                for name, piece in slices.items():
                    _add(saved[name], flat, state, piece.start, piece.numel)
        yield from saved.items()

    def _partitioned(self) -> Iterator[tuple[str, _Saved]]:
        groups = self._models[0]["param_shapes"]
        saved = {name: _Saved(shape) for group in groups for name, shape in group.items()}
        shards = list(self._shards())
        for rank, shard in enumerate(shards):
            states = shard["optimizer_state_dict"]["state"]
            for number, group in enumerate(groups):
                flat, state, start = shard["fp32_flat_groups"][number], states.get(number, {}), 0
                for name, shape in group.items():
                    size = math.prod(shape)
                    part = -(-size // len(shards))
                    _add(saved[name], flat, state, start, max(0, min(part, size - rank * part)))
                    start += part
        yield from saved.items()

    def _whole(self) -> Iterator[tuple[str, _Saved]]:
        """Stage 0: everything is whole on rank 0; the optimizer knows parameters by number, in its groups' order."""
        model = self._models[0]
        optimizer, masters = model["optimizer"], None
        if "fp32_groups" in optimizer:  # bf16
            masters = [master for group in optimizer["fp32_groups"] for master in group]
            optimizer = optimizer["optimizer_state_dict"]
        for number, name in enumerate(name for group in model["parameter_groups"] for name in group):
            weights = model["module"][name] if masters is None else masters[number]
            saved = _Saved(weights.shape)
            flat = weights.reshape(-1)
            state = {
                key: value.reshape(-1) if torch.is_tensor(value) and value.shape == weights.shape else value
                for key, value in optimizer["state"].get(number, {}).items()
            }
            _add(saved, flat, state, 0, flat.numel())
            yield name, saved

    def _shards(self) -> Iterator[dict[str, Any]]:
        for path in _by_rank(self.folder, "optim_states"):
            yield _mapped(path)["optimizer_state_dict"]


def _add(saved: _Saved, flat: Tensor, state: dict[str, Any], start: int, count: int) -> None:
    """Note a stretch of a flat vector and of the optimizer's vectors beside it, which may be padded at the end."""
    saved.add(FP32, flat[start : start + count])
    for key, value in state.items():
        if torch.is_tensor(value) and value.dim() == 1 and value.numel() >= flat.numel() and key != "step":
            saved.add(key, value[start : start + count])
        else:
            saved.scalars[key] = value


def _by_rank(folder: Path, kind: str) -> list[Path]:
    # mp_rank_00_model_states.pt, zero_pp_rank_3_mp_rank_00_model_states.pt, bf16_zero_pp_rank_3_…_optim_states.pt
    found = {int(re.findall(r"rank_(\d+)", path.name)[0]): path for path in folder.glob(f"*rank_*_{kind}.pt")}
    if sorted(found) != list(range(len(found))) or not found:
        raise CheckpointError(f"{folder}: files *_{kind}.pt of ranks {sorted(found)}, expected 0 to the last")
    return [found[rank] for rank in sorted(found)]


def _mapped(path: Path) -> dict[str, Any]:
    return torch.load(path, map_location="cpu", mmap=True, weights_only=False)
