"""Coefficients for whatever model is asked for: from the shipped table, or traced on the spot. Torch only then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from disco_ds.planner.coefficients import Coefficients, shipped, trace_key

if TYPE_CHECKING:
    from disco_ds.planner.memory import Setup

Progress = Callable[[str], None]


def to_stderr(message: str) -> None:
    """Progress goes to stderr: stdout is the answer."""
    print(message, file=sys.stderr, flush=True)


class ModelSource:
    """A model whose traces are fetched as they are asked for.

    Args:
        name: an open_clip name, "demo", or a path to an open_clip JSON.
        progress: told when something is traced, since that takes seconds.
        changes: fields of ModelConfig that differ from the defaults (``config``, ``freeze``, ``patch_dropout``,
            ``image_size``, ``context_length``); with any of them the shipped table does not apply.
        check: before the first trace, see whether tracing works on this torch (3 s): for whoever decides by the answer
            alone. A run compares its plan with what it measures instead.
    """

    def __init__(
        self,
        name: str,
        progress: Progress = to_stderr,
        changes: dict[str, Any] | None = None,
        *,
        check: bool = False,
    ) -> None:
        self.name = name
        self.progress = progress
        self.changes = {key: value for key, value in (changes or {}).items() if value not in (None, "none")}
        self.check = check
        self.known = None if self.changes else shipped(name)
        self.in_table = frozenset(self.known.traces if self.known else ())
        """Keys of the traces that need no tracing."""

    def of(self, setup: Setup) -> Coefficients:
        """:meth:`get` for a setup."""
        return self.get(setup.precision, setup.checkpointing, setup.attention, setup.device)

    def get(self, precision: str, checkpointing: str, attention: str = "flash", device: str = "cuda") -> Coefficients:
        """The model's coefficients with this trace in them.

        Raises:
            ConfigError: the model cannot be built, the policy does not fit it, or tracing does not pass its check.
        """
        key = trace_key(precision, checkpointing, attention, device)
        if self.known is not None and key in self.known.traces:
            return self.known
        check = ", with a self-check first" if self.check else ""
        self.progress(f"tracing {self.name}, {key} (not in the shipped table; a few seconds, no GPU needed{check}) ...")
        started = time.monotonic()
        import torch

        from disco_ds.config.schema import ModelConfig
        from disco_ds.planner.tracing.selfcheck import self_check
        from disco_ds.planner.tracing.trace import trace

        devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        with torch.random.fork_rng(devices):  # a run that is traced on the way draws on as if it had not been
            if self.check:
                self_check()
                self.check = False
            config = ModelConfig(**{"name": self.name, "checkpointing": checkpointing, **self.changes})
            sizes, found = trace(config, precision, attention=attention, device=device)
        self.known = self.known or sizes
        self.known.traces[key] = found
        self.progress(f"traced in {time.monotonic() - started:.1f} s")
        return self.known
