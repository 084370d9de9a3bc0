"""The random generators of a process, Python's, NumPy's and torch's: as they are now, and put back."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def random_states(device: torch.device) -> dict[str, Any]:
    """The states of all generators, those of a GPU included where ``device`` is one; checkpoints hold it as it is."""
    states = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_states(states: dict[str, Any], device: torch.device) -> None:
    """Put the generators back to what :func:`random_states` found."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
