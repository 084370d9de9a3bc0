"""GPUs and how much of their memory a process can use, and sizes as people write them. GiB unless a name says GB.

What a device is sold as and what CUDA reports differ: a 40 GB A100 has 39.39 GiB, a 24 GB RTX 4090 has 23.53.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from itertools import pairwise

from disco_ds.errors import ConfigError, nearest

GIB = 2**30


@dataclass(frozen=True)
class Device:
    """A kind of GPU."""

    name: str
    usable_gib: float
    """Total memory as CUDA reports it."""
    tflops: float
    """Dense bf16 matrix products, from the data sheet; the ranking of settings uses it."""
    hopper: bool = False

    @property
    def usable_bytes(self) -> int:
        """Total memory in bytes."""
        return int(self.usable_gib * GIB)

    def runtime_bytes(self, gpus: int) -> int:
        """What a process holds before its first tensor: CUDA context, cuBLAS's workspaces, NCCL's communicator."""
        context = int(0.5 * GIB)
        cublas = (8 + (32 if self.hopper else 4)) * 2**20
        return context + cublas + (int(0.65 * GIB) if gpus > 1 else 0)


DEVICES = {
    device.name: device
    for device in (
        Device("V100-16G", 15.77, 125),
        Device("V100-32G", 31.74, 125),
        Device("T4", 14.56, 65),
        Device("RTX3090", 23.69, 71),
        Device("RTX4090", 23.53, 165),
        Device("RTX5090", 31.36, 210),
        Device("A10G", 22.19, 70),
        Device("L4", 22.03, 121),
        Device("L40S", 44.42, 362),
        Device("A40", 44.42, 150),
        Device("A6000", 47.43, 155),
        Device("A100-40G", 39.39, 312),
        Device("A100-80G", 79.15, 312),
        Device("A800-80G", 79.15, 312),
        Device("H100", 79.10, 989, hopper=True),
        Device("H200", 139.80, 989, hopper=True),
        Device("GH200-96G", 94.50, 989, hopper=True),
        Device("B200", 178.35, 2250, hopper=True),
    )
}
"""Usable memory as torch.cuda.mem_get_info reports it on an idle device of that kind."""

_SOLD_AS = {16: "V100-16G", 24: "RTX4090", 32: "V100-32G", 40: "A100-40G", 48: "L40S", 80: "H100", 96: "GH200-96G",
            141: "H200", 180: "B200"}  # fmt: skip


def device_of(mem: str | None, gpu: str | None) -> Device:
    """The device of ``--mem`` or ``--gpu``.

    Raises:
        ConfigError: both or neither are given, or there is no such device.
    """
    if (mem is None) == (gpu is None):
        found = "neither is" if mem is None else "both are"
        raise ConfigError(f"give --mem (40G) or --gpu (A100-40G): {found} given")
    return device_with(mem) if mem is not None else device_named(str(gpu))


def device_named(name: str) -> Device:
    """The device of ``--gpu``.

    Raises:
        ConfigError: there is none of that name.
    """
    device = {known.lower(): device for known, device in DEVICES.items()}.get(name.lower())
    if device is None:
        raise ConfigError(f"--gpu {name}: not in the table.{nearest(name, list(DEVICES))} Known: {', '.join(DEVICES)}")
    return device


def device_with(memory: str) -> Device:
    """The device of ``--mem``: "40G" is one sold as 40 GB, "39.4GiB" or "39.4Gi" is exactly that much.

    The usable part of a size that no device is sold with lies between those of its neighbours.

    Raises:
        ConfigError: not a size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(G|GB|Gi|GiB)?\s*", memory, re.IGNORECASE)
    if match is None or float(match[1]) <= 0:
        raise ConfigError(f"--mem {memory}: expected a size such as 40G (a device sold as 40 GB) or 39.4GiB")
    size, unit = float(match[1]), (match[2] or "G").lower()
    if unit in ("gi", "gib"):
        return Device(f"{size:g} GiB", size, 312)
    if size in _SOLD_AS:
        return replace(DEVICES[_SOLD_AS[int(size)]], name=f"{size:g} GB device")
    known = [(0.0, 0.0), *((float(gb), DEVICES[name].usable_gib) for gb, name in _SOLD_AS.items())]
    usable = known[-1][1] * size / known[-1][0]
    for (low, low_gib), (high, high_gib) in pairwise(known):
        if low <= size <= high:
            usable = low_gib + (high_gib - low_gib) * (size - low) / (high - low)
    return Device(f"{size:g} GB device", usable, 312)


def device_here(kind: str) -> Device:
    """The device of this process with the memory that it has: the current GPU ("cuda"), or this rank's share of the
    machine's memory ("cpu")."""
    if kind == "cuda":
        import torch

        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        total = properties.total_memory / GIB
        like = min(DEVICES.values(), key=lambda known: abs(known.usable_gib - total))
        return Device(properties.name, total, like.tflops, hopper=properties.major >= 9)
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Device("CPU", machine / int(os.environ.get("LOCAL_WORLD_SIZE", "1")) / GIB, 0.05)
