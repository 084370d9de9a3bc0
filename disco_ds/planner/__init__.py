"""What a training step takes, before anyone rents a GPU: memory, the largest batch, the settings that reach it.

:func:`plan` is ``disco-plan`` from Python. Nothing here imports torch, unless a model has to be traced.
"""

from __future__ import annotations

from typing import Any

from disco_ds.planner.devices import GIB, device_of
from disco_ds.planner.models import ModelSource, Progress, to_stderr
from disco_ds.planner.search import Plan, Planner, Request

__all__ = ["Plan", "Planner", "Request", "plan"]


def plan(
    *,
    gpus: int,
    mem: str | None = None,
    gpu: str | None = None,
    model: str = "ViT-B-32",
    frag: float = Request.fragmentation,
    reserve_gib: float = 0.0,
    model_config: dict[str, Any] | None = None,
    progress: Progress = to_stderr,
    **settings: Any,
) -> Plan:
    """The largest exact contrastive batch, or the fastest settings for a given one; as ``disco-plan``.

    Args:
        gpus: how many.
        mem: memory of one, "40G" for a device sold as 40 GB, "39.4GiB" for exactly that much.
        gpu: kind of GPU instead of ``mem``, such as "A100-80G".
        model: an open_clip name, "demo", or a path to an open_clip JSON.
        frag: what a process holds over what it has allocated of activations.
        reserve_gib: GiB of each device to leave free.
        model_config: the model itself, as the content of an open_clip JSON; ``model`` is then a label.
        progress: told when a model has to be traced.
        settings: other fields of :class:`Request`, such as ``global_batch``, ``micro_batch``, ``zero``, ``precision``.

    Returns:
        The plan: ``fits``, ``global_batch``, ``prediction`` (bytes by category at every moment), ``setup``, ``step_s``.

    Raises:
        ConfigError: unknown model or device, numbers or settings that contradict each other, or a model that would have
            to be traced with a torch on which tracing does not work.
    """
    settings |= {"fragmentation": frag, "reserve_bytes": int(reserve_gib * GIB)}
    request = Request(gpus=gpus, gpu=device_of(mem, gpu), **settings)
    return Planner(ModelSource(model, progress, {"config": model_config}, check=True)).best(request)
