"""Coefficients for whatever model is asked for: from the shipped table, or traced on the spot. Torch only then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from disco_ds.errors import ConfigError
from disco_ds.planner.coefficients import Coefficients, shipped, trace_key

if TYPE_CHECKING:
    from disco_ds.planner.memory import Setup

Progress = Callable[[str], None]

SHIPPED_MODELS = (
    "ViT-S-32", "ViT-S-16", "ViT-M-32", "ViT-M-16", "ViT-B-32", "ViT-B-32-quickgelu", "ViT-B-16", "ViT-B-16-plus-240",
    "ViT-L-14", "ViT-L-14-336", "ViT-H-14", "ViT-g-14", "ViT-bigG-14", "RN50", "RN101", "RN50x4", "convnext_base",
    "convnext_base_w", "convnext_large_d", "ViT-B-16-SigLIP", "ViT-L-16-SigLIP-256", "ViT-SO400M-14-SigLIP",
    "MobileCLIP-S1", "MobileCLIP-B", "EVA02-B-16", "EVA02-L-14", "ViTamin-S", "ViTamin-B", "ViTamin-L",
    "coca_ViT-B-32", "coca_ViT-L-14",
)  # fmt: skip
SHIPPED_TRACES = tuple(
    (precision, checkpointing) for precision in ("bf16", "amp") for checkpointing in ("none", "full", "every:2", "ops")
)

SHIPPED_MATH = ("ViT-B-32", "ViT-B-16", "ViT-B-16-plus-240", "ViT-L-14")
"""Also traced with the attention of torch before 2.0, under amp: the published runs of 2021 and 2022 were made so."""


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
        if self.known is None or key not in self.known.traces:
            self._trace(key, precision, checkpointing, attention, device)
        assert self.known is not None
        return self.known

    def _trace(self, key: str, precision: str, checkpointing: str, attention: str, device: str) -> None:
        check = ", with a self-check first" if self.check else ""
        self.progress(f"tracing {self.name}, {key} (not in the shipped table; a few seconds, no GPU needed{check}) ...")
        started = time.monotonic()
        import torch

        from disco_ds.config.schema import ModelConfig
        from disco_ds.planner.tracing.selfcheck import self_check
        from disco_ds.planner.tracing.trace import coefficients

        devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        with torch.random.fork_rng(devices):  # a run that is traced on the way draws on as if it had not been
            if self.check:
                self_check()
                self.check = False
            config = ModelConfig(**{"name": self.name, "checkpointing": checkpointing, **self.changes})
            found = coefficients(config, precision, attention=attention, device=device)
        if self.known is None:
            self.known = found
        else:
            self.known.traces.update(found.traces)
        self.progress(f"traced in {time.monotonic() - started:.1f} s")


def trace_shipped(
    names: Sequence[str] = SHIPPED_MODELS, progress: Progress = to_stderr
) -> tuple[list[Coefficients], dict[str, str]]:
    """Trace the models of the shipped table anew; a model that cannot be built here is skipped with a message.

    Returns:
        The models, and the versions they were made with.
    """
    import open_clip
    import torch

    from disco_ds.config.schema import ModelConfig
    from disco_ds.planner.tracing.trace import coefficients

    made: list[Coefficients] = []
    for name in names:
        started = time.monotonic()
        wanted = [(*trace, "flash") for trace in SHIPPED_TRACES]
        if name in SHIPPED_MATH:
            wanted += [("amp", "none", "math"), ("amp", "full", "math")]
        try:
            found = [
                coefficients(ModelConfig(name=name, checkpointing=checkpointing), precision, attention=attention)
                for precision, checkpointing, attention in wanted
            ]
        except (ConfigError, RuntimeError, ValueError) as error:
            progress(f"{name}: skipped: {error}")
            continue
        for other in found[1:]:
            found[0].traces.update(other.traces)
        made.append(found[0])
        progress(f"{name}: {len(wanted)} traces in {time.monotonic() - started:.0f} s")
    return made, {"torch": torch.__version__, "open_clip": open_clip.__version__}
