"""Silence what torch, DeepSpeed and open_clip print on a healthy run and no user can act on; nothing else.

Each entry below names one message by its logger or category and its text, so that every other warning of the same
library still comes through. :func:`quiet_libraries` belongs before the first import of DeepSpeed, which already speaks
while it is imported. What the launchers print is theirs to silence: ``deepspeed -q`` (errors only), and
``OMP_NUM_THREADS`` set for ``torchrun``, which otherwise announces that it sets it.
"""

from __future__ import annotations

import builtins
import glob
import importlib
import logging
import re
import warnings
from typing import Any

_WARNINGS: tuple[tuple[type[Warning], str], ...] = (
    # DeepSpeed calls these by the names that older torch releases have; only DeepSpeed can change that
    (FutureWarning, r"`torch\.distributed\.\w+` is deprecated\. Please use `torch\.distributed\.\w+` instead"),
)
_LOG_RECORDS: tuple[tuple[str, str], ...] = (
    # open_clip, through the root logger, on every rank, for a model that is asked for without pretrained weights
    ("root", r"No pretrained weights loaded for model .* Model initialized randomly"),
)
_LOG_RECORDS_ON_CPU: tuple[tuple[str, str], ...] = (
    # both say "there is no GPU", to someone who has none; the run's own first lines name the device
    ("DeepSpeed", r"Setting accelerator to CPU\. If you have GPU or other accelerator"),
    ("torch.utils.cpp_extension", r"No CUDA runtime is found, using CUDA_HOME"),
)
_PRINTS = r"DeepSpeed [\w.]+ built successfully"  # DeepSpeed prints this on every rank, at every start
_GPU_DEVICE_FILES = ("/dev/nvidia[0-9]*", "/dev/kfd", "/dev/dxg", "/dev/accel*")


class _Drop(logging.Filter):
    """Drops the records whose text matches; compares equal by pattern, so that adding it twice adds it once."""

    def __init__(self, pattern: str) -> None:
        super().__init__()
        self.pattern = pattern

    def filter(self, record: logging.LogRecord) -> bool:
        return re.match(self.pattern, record.getMessage()) is None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Drop) and other.pattern == self.pattern

    def __hash__(self) -> int:
        return hash(self.pattern)


def quiet_libraries() -> None:
    """Install the filters; calling it again changes nothing. Imports DeepSpeed.

    On a machine that has a GPU (its device file is there) the messages about a missing GPU pass: they then mean a
    broken driver or a torch built for CPUs, and the user can act.
    """
    for category, message in _WARNINGS:
        warnings.filterwarnings("ignore", message=message, category=category)
    for name, pattern in _LOG_RECORDS + (() if has_gpu_device() else _LOG_RECORDS_ON_CPU):
        logging.getLogger(name).addFilter(_Drop(pattern))
    try:
        # not "import … as": the package's attribute "torch" is torch itself
        speaker = importlib.import_module("deepspeed.comm.torch")
    except ModuleNotFoundError:  # moved by another release: then the line is printed, no more
        return
    speaker.__dict__["print"] = _print_except  # the module's own name for print; builtins stay as they are


def has_gpu_device() -> bool:
    """Whether this machine shows the device file of a GPU or another accelerator, usable or not."""
    return any(glob.glob(pattern) for pattern in _GPU_DEVICE_FILES)


def _print_except(*args: Any, **kwargs: Any) -> None:
    if not (len(args) == 1 and isinstance(args[0], str) and re.fullmatch(_PRINTS, args[0])):
        builtins.print(*args, **kwargs)
