"""What DeepSpeed saved, read parameter by parameter, whatever the number of ranks that saved it.

DeepSpeed writes one file a rank with that rank's stretch of flat vectors (fp32 masters and optimizer states). The files
are mapped into memory, so a rank touches only the pages that it needs, and ranks of one machine share them; DeepSpeed's
own converter (``ds_to_universal``) writes all of it anew, on one rank, for Adam alone.

The layouts are those of deepspeed 0.19: at stages 1 and 2 ``param_slice_mappings`` says which stretch of a rank's
vector belongs to which parameter, at stage 3 every parameter is cut into equal parts, the last one padded.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from disco_ds.errors import CheckpointError

FP32 = "fp32"
"""The key of the fp32 weights, beside those of the optimizer's states (``exp_avg``, …)."""


@dataclass
class SavedParameter:
    """A trained parameter; weights (``FP32``) and each state of its shape are pieces of flat vectors, in order."""

    shape: torch.Size
    pieces: dict[str, list[Tensor]] = field(default_factory=dict)
    scalars: dict[str, Any] = field(default_factory=dict)
    """The optimizer's other states: ``step`` and the like."""

    def add(self, flat: Tensor, state: dict[str, Any], start: int, count: int) -> None:
        """Take a stretch of a flat vector, and of the optimizer's vectors beside it, which may be padded at the end."""
        self.pieces.setdefault(FP32, []).append(flat[start : start + count])
        for key, value in state.items():
            if torch.is_tensor(value) and value.dim() == 1 and value.numel() >= flat.numel() and key != "step":
                self.pieces.setdefault(key, []).append(value[start : start + count])
            else:
                self.scalars[key] = value

    def read(self, key: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Elements ``start`` to ``stop`` of the weights or of a state, flattened; a copy in memory."""
        pieces = self.pieces[key]
        stop = math.prod(self.shape) if stop is None else stop
        parts, offset = [], 0
        for piece in pieces:
            first, last = max(start - offset, 0), min(stop - offset, len(piece))
            if first < last:
                parts.append(piece[first:last])
            offset += len(piece)
        return torch.cat(parts).clone() if parts else pieces[0].new_empty(0)


class SavedState:
    """A checkpoint's weights and optimizer states by parameter name.

    Args:
        folder: where DeepSpeed's files are (``step-…/engine``).
        zero_stage: the stage that they were saved at.

    Raises:
        CheckpointError: files are missing, not laid out as expected, or do not add up to whole parameters.
    """

    def __init__(self, folder: Path, zero_stage: int) -> None:
        self.folder, self.zero_stage = folder, zero_stage
        self._models = [_mapped(path) for path in _by_rank(folder, "model_states")]
        self.counters: dict[str, int] = {
            key: self._models[0].get(key, 0) for key in ("global_steps", "global_samples", "skipped_steps")
        }
        readers = {0: self._whole, 1: self._sliced, 2: self._sliced, 3: self._partitioned}
        try:
            self.trained: dict[str, SavedParameter] = readers[zero_stage]()
            """The parameters that the optimizer had."""
        except (KeyError, IndexError, AttributeError) as error:
            raise CheckpointError(
                f"{folder}: not laid out as DeepSpeed 0.19 does at ZeRO stage {zero_stage} "
                f"({type(error).__name__}: {error}); resume with the release and number of ranks that saved it"
            ) from error
        for name, saved in self.trained.items():
            for key, pieces in saved.pieces.items():
                found, size = sum(map(len, pieces)), math.prod(saved.shape)
                if found != size:
                    raise CheckpointError(f"{folder}: {found} elements of {name} ({key}) are saved, it has {size}")

    def others(self) -> dict[str, Tensor]:
        """Frozen parameters and buffers by name, whole; parameters in the precision that the engine held them in."""
        model = self._models[0]
        found = {name: value for name, value in model["module"].items() if name not in self.trained}
        if self.zero_stage == 3:
            shapes = model["frozen_param_shapes"] or {}
            fragments = [rank["frozen_param_fragments"] or {} for rank in self._models]
            for name, shape in shapes.items():
                flat = torch.cat([rank[name].reshape(-1) for rank in fragments])
                found[name] = flat[: math.prod(shape)].reshape(shape)
        return found

    def weights(self) -> dict[str, Tensor]:
        """Every parameter and buffer by name, whole; trained ones in fp32."""
        trained = {name: saved.read(FP32).reshape(saved.shape) for name, saved in self.trained.items()}
        return {**self.others(), **trained}

    def _sliced(self) -> dict[str, SavedParameter]:
        shapes = {name: shape for group in self._models[0]["param_shapes"] for name, shape in group.items()}
        found = {name: SavedParameter(shape) for name, shape in shapes.items()}
        for shard in self._shards():
            states = shard["base_optimizer_state"]["state"]
            for number, slices in enumerate(shard["param_slice_mappings"]):
                flat, state = shard["single_partition_of_fp32_groups"][number], states.get(number, {})
                for name, piece in slices.items():
                    found[name].add(flat, state, piece.start, piece.numel)
        return found

    def _partitioned(self) -> dict[str, SavedParameter]:
        groups = self._models[0]["param_shapes"]
        found = {name: SavedParameter(shape) for group in groups for name, shape in group.items()}
        shards = self._shards()
        for rank, shard in enumerate(shards):
            states = shard["optimizer_state_dict"]["state"]
            for number, group in enumerate(groups):
                flat, state, start = shard["fp32_flat_groups"][number], states.get(number, {}), 0
                for name, shape in group.items():
                    size = math.prod(shape)
                    part = -(-size // len(shards))
                    found[name].add(flat, state, start, max(0, min(part, size - rank * part)))
                    start += part
        return found

    def _whole(self) -> dict[str, SavedParameter]:
        """Stage 0: everything is whole on rank 0; the optimizer knows parameters by number, in its groups' order."""
        model, found = self._models[0], {}
        optimizer, masters = model["optimizer"], None
        if "fp32_groups" in optimizer:  # bf16
            masters = [master for group in optimizer["fp32_groups"] for master in group]
            optimizer = optimizer["optimizer_state_dict"]
        for number, name in enumerate(name for group in model["parameter_groups"] for name in group):
            weights = model["module"][name] if masters is None else masters[number]
            state = {
                key: value.reshape(-1) if torch.is_tensor(value) and value.shape == weights.shape else value
                for key, value in optimizer["state"].get(number, {}).items()
            }
            found[name] = SavedParameter(weights.shape)
            found[name].add(weights.reshape(-1), state, 0, weights.numel())
        return found

    def _shards(self) -> list[dict[str, Any]]:
        return [_mapped(path)["optimizer_state_dict"] for path in _by_rank(self.folder, "optim_states")]


def _by_rank(folder: Path, kind: str) -> list[Path]:
    # mp_rank_00_model_states.pt, zero_pp_rank_3_mp_rank_00_model_states.pt, bf16_zero_pp_rank_3_…_optim_states.pt
    found = {int(re.findall(r"rank_(\d+)", path.name)[0]): path for path in folder.glob(f"*rank_*_{kind}.pt")}
    if sorted(found) != list(range(len(found))) or not found:
        raise CheckpointError(f"{folder}: files *_{kind}.pt of ranks {sorted(found)}, expected 0 to the last")
    return [found[rank] for rank in sorted(found)]


def _mapped(path: Path) -> dict[str, Any]:
    return torch.load(path, map_location="cpu", mmap=True, weights_only=False)
