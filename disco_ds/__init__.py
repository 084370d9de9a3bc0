"""Exact contrastive training of CLIP-like models with very large batches, on DeepSpeed engines.

The public names are loaded on first use, so that ``import disco_ds`` and the planner start without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

_HOME = {
    "contrastive_loss": "disco_ds.loss.contrastive",
    "ContrastiveLoss": "disco_ds.loss.contrastive",
    "build_loss": "disco_ds.loss.contrastive",
    "loss_bytes": "disco_ds.loss.memory",
    "ClipLoss": "disco_ds.loss.open_clip",
    "SigmoidLoss": "disco_ds.loss.sigmoid",
    "RunConfig": "disco_ds.config.schema",
    "plan": "disco_ds.planner",
}

__all__ = [
    "ClipLoss",
    "ContrastiveLoss",
    "RunConfig",
    "SigmoidLoss",
    "__version__",
    "build_loss",
    "contrastive_loss",
    "loss_bytes",
    "plan",
]

if TYPE_CHECKING:
    from disco_ds.config.schema import RunConfig
    from disco_ds.loss.contrastive import ContrastiveLoss, build_loss, contrastive_loss
    from disco_ds.loss.memory import loss_bytes
    from disco_ds.loss.open_clip import ClipLoss
    from disco_ds.loss.sigmoid import SigmoidLoss
    from disco_ds.planner import plan


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'disco_ds' has no attribute {name!r}; it has {', '.join(sorted(__all__))}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
