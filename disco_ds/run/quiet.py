"""Silence what torch, DeepSpeed and open_clip say on a healthy run and no user can act on; nothing else.

Each entry names one message by its logger or category and its text, so that every other warning of the same library
still comes through. What the launchers print is theirs to silence (``deepspeed -q``).
"""

from __future__ import annotations

import glob
import logging
import re
import warnings
from functools import partial

_DEPRECATED = r"`torch\.distributed\.\w+` is deprecated\. Please use `torch\.distributed\.\w+` instead"
"""FutureWarning: DeepSpeed calls these by the names that older torch releases have."""
_LOG_RECORDS = {
    # open_clip, through the root logger, on every rank, for a model that is asked for without pretrained weights
    "root": r"No pretrained weights loaded for model .* Model initialized randomly",
}
_LOG_RECORDS_WITHOUT_GPU = {
    # both say "there is no GPU", to someone who has none; the run's own first lines name the device
    "DeepSpeed": r"Setting accelerator to CPU\. If you have GPU or other accelerator",
    "torch.utils.cpp_extension": r"No CUDA runtime is found, using CUDA_HOME",
}
_GPU_DEVICE_FILES = ("/dev/nvidia[0-9]*", "/dev/kfd", "/dev/dxg", "/dev/accel*")


def quiet_libraries() -> None:
    """Install the filters. Call before the first import of DeepSpeed, which already speaks while it is imported.

    On a machine with a GPU (its device file is there, usable or not) the messages about a missing GPU pass: they then
    mean a broken driver or a torch built for CPUs, and the user can act.
    """
    warnings.filterwarnings("ignore", message=_DEPRECATED, category=FutureWarning)
    has_gpu = any(glob.glob(pattern) for pattern in _GPU_DEVICE_FILES)
    for name, pattern in {**_LOG_RECORDS, **({} if has_gpu else _LOG_RECORDS_WITHOUT_GPU)}.items():
        logging.getLogger(name).addFilter(partial(_is_other, re.compile(pattern)))


def _is_other(pattern: re.Pattern[str], record: logging.LogRecord) -> bool:
    return pattern.match(record.getMessage()) is None
