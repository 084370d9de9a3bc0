"""The memory of a model's forward and backward, found without a GPU and without memory.

The step of :mod:`disco_ds.engine.step` runs on fake tensors, which have shapes and storages but no bytes, with the
batch at a prime size: a storage whose bytes are a multiple of the prime grows with the batch. Every moment of the step
is thereby known for every batch from one pass, and :class:`~disco_ds.planner.coefficients.Point` keeps those that
can be highest.
"""

from __future__ import annotations

import copy
import gc
from contextlib import ExitStack
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import flop_registry

from disco_ds.config.schema import ModelConfig
from disco_ds.errors import ConfigError
from disco_ds.model.activations import apply_policy
from disco_ds.model.architecture import open_clip_config, registered_name
from disco_ds.model.build import create_clip
from disco_ds.model.towers import Features, TwoTowers, trained_towers
from disco_ds.planner.coefficients import Coefficients, Point, Trace, thin
from disco_ds.planner.tracing import fake_cuda
from disco_ds.planner.tracing.storages import CUDA_GRANULE, LiveStorages

PRIMES = (4099, 4111, 4127)
_LOW_PRECISION = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""DeepSpeed's torch_autocast reduces the parameters of exactly these classes in bf16."""


class Timeline(LiveStorages):
    """Live storages with a record of every moment at which they grew."""

    def __init__(self, batch: int, device: str) -> None:
        super().__init__(CUDA_GRANULE if device == "cuda" else 1, device, batch)
        self.pairs = batch
        self.gradients = 0
        self.flops = 0
        self.arrivals: list[Tensor] = []
        self.points: list[Point] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        count = flop_registry.get(func.overloadpacket)
        if count is not None:
            self.flops += count(*args, **(kwargs or {}), out_val=result)
        return result

    def on_growth(self) -> None:
        self.points.append(Point(*self.activations(), self.gradients, self.gradients, self.per_pair["input"]))

    def activations(self) -> tuple[int, int]:
        """Bytes of activations now: per pair, and fixed."""
        return self.per_pair["activations"], self.fixed["activations"]

    def on_gradient(self, parameter: Tensor) -> None:
        super().on_gradient(parameter)
        self.gradients += parameter.numel()
        self.arrivals.append(parameter)


def build_meta(config: ModelConfig) -> TwoTowers:
    """The towers of a run without weights, on the meta device, following the config's checkpointing policy.

    Of a CoCa model these are the two contrastive towers; its captioning decoder is left out.

    Raises:
        ConfigError: unknown model, or one that cannot be built without a hub.
    """
    towers = copy.deepcopy(_plain_meta(config.model_copy(update={"checkpointing": "none"}).model_dump_json()))
    apply_policy(trained_towers(towers), config.checkpointing)
    return towers.train()


@lru_cache(maxsize=1)
def _plain_meta(config_json: str) -> TwoTowers:
    config = ModelConfig.model_validate_json(config_json)
    if config.name.startswith(("hf-hub:", "local-dir:")):
        raise ConfigError(f"--model {config.name}: give an open_clip name or a JSON file; weights are not needed here")
    name, content = registered_name(config), open_clip_config(config)
    if "multimodal_cfg" in content:
        towers: dict[str, Any] = {key: content[key] for key in ("embed_dim", "vision_cfg", "text_cfg")}
        for tower in ("vision_cfg", "text_cfg"):
            towers[tower] = {**towers[tower], "output_tokens": False}
        towers["custom_text"] = True  # its text tower has a class token, which only the separate module knows
        return _plain_meta(ModelConfig(name=f"{name}-towers", config=towers, freeze=config.freeze).model_dump_json())
    options: dict[str, Any] = {} if config.patch_dropout is None else {"force_patch_dropout": config.patch_dropout}
    return TwoTowers(create_clip(name, device="meta", **options), config.freeze)


def describe(model: TwoTowers, config: ModelConfig) -> Coefficients:
    """The sizes of a model; no traces yet."""
    trained = [p for p in model.parameters() if p.requires_grad]
    size = model.clip.visual.image_size
    size = list(size) if isinstance(size, (tuple, list)) else [size, size]
    return Coefficients(
        name=config.name,
        parameters=sum(p.numel() for p in trained),
        image_parameters=sum(p.numel() for p in model.tower_parameters("image")),
        largest=max(p.numel() for p in trained),
        matrices=[p.numel() for p in trained if p.ndim >= 2],
        vectors=sum(p.numel() for p in trained if p.ndim < 2),
        arrivals=[],
        buffer_bytes=sum(b.numel() * b.element_size() for b in model.buffers()),
        embed_dim=open_clip_config(config)["embed_dim"],
        image_size=size,
        context_length=int(model.clip.context_length),
    )


def trace(
    config: ModelConfig, precision: str, *, attention: str = "flash", device: str = "cuda", walk: bool | None = None
) -> tuple[Coefficients, Trace]:
    """Trace one step of a model.

    Args:
        config: the model and its checkpointing policy.
        precision: "bf16" (weights in bf16), "amp" (bf16 autocast) or "fp32".
        attention: "flash" as torch chooses today, or "math". Only for CUDA.
        device: "cuda", with the stand-ins of :mod:`disco_ds.planner.tracing.fake_cuda`, or "cpu".
        walk: whether the Python copy of autograd's engine drives backward, which fake CUDA needs; None: there alone.

    Returns:
        Sizes of the model, and the trace.

    Raises:
        ConfigError: the model cannot be built or does not follow the policy.
    """
    model = build_meta(config)
    sizes = describe(model, config)
    batch = _prime(model)
    timeline = Timeline(batch, device)
    with FakeTensorMode(allow_non_fake_inputs=True), ExitStack() as stack:
        if device == "cuda":
            stack.enter_context(fake_cuda.autocast_possible())
            stack.enter_context(fake_cuda.cuda_attention(attention))
        fake_cuda.put_on(model, device, torch.bfloat16 if precision == "bf16" else None)
        _keep_temperatures_exact(model)
        for tensor in (*model.parameters(), *model.buffers()):
            timeline.count(tensor, "states")
        images = torch.empty(batch, 3, *sizes.image_size, device=device)
        texts = torch.ones(batch, sizes.context_length, dtype=torch.long, device=device)
        batch_held = [images, texts]
        for tensor in batch_held:
            timeline.count(tensor, "input")
        del images, texts, tensor
        walk = device == "cuda" if walk is None else walk
        traced = _step(model, timeline, batch_held, precision, device, walk, sizes.parameters)
    layers = (module for module in model.modules() if module.__class__ in _LOW_PRECISION)
    low = {id(p) for layer in layers for p in layer.parameters(recurse=False)}
    sizes.arrivals = [-p.numel() if id(p) in low else p.numel() for p in timeline.arrivals]
    return sizes, traced


def _step(
    model: TwoTowers, timeline: Timeline, batch: list[Tensor], precision: str, device: str, walk: bool, total: int
) -> Trace:
    """Forward, a loss that costs nothing, backward; ``batch`` is emptied as the real step's frame is."""
    gc.freeze()  # the collection below is for what forward has left, and need not look at all that was there before
    with timeline:
        with torch.autocast(device, dtype=torch.bfloat16, enabled=precision == "amp"):
            features = model(batch.pop(0), batch.pop())  # nobody else holds them
        gc.collect()
        gc.unfreeze()
        end, feature_bytes = timeline.activations(), features.image_features.element_size()
        flops, end_input = timeline.flops // timeline.pairs, timeline.per_pair["input"]
        loss = [free_loss(features)]
        del features
        if walk:
            fake_cuda.backward(loss, timeline.on_gradient)
        else:
            with timeline.gradients_of(model):
                loss.pop().backward()
    without = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    if len(without) > len(list(model.parameters())) // 2:
        raise ConfigError(f"the trace reached no gradient of {len(without)} parameters, {without[:3]} among them")
    return Trace(thin(timeline.points, total), *end, end_input, feature_bytes, flops)


def free_loss(features: Features) -> Tensor:
    """A loss whose gradients are sums and have no storage of their own; the real loss's are counted with the loss."""
    image, text = features.image_features, features.text_features
    assert image is not None
    assert text is not None
    loss = image.float().sum() + text.float().sum() + features.logit_scale
    return (loss if features.logit_bias is None else loss + features.logit_bias).sum()


def _keep_temperatures_exact(model: TwoTowers) -> None:
    model.clip.logit_scale = torch.zeros(())
    for name in ("logit_scale", "logit_bias"):
        if getattr(model, name) is not None:
            model.set_master(name, torch.zeros(1, device=getattr(model, name).device))


def _prime(model: TwoTowers) -> int:
    """A batch that divides no parameter's and no buffer's size."""
    fixed = [t.numel() for t in (*model.parameters(), *model.buffers())]
    for prime in PRIMES:
        if all(size % prime for size in fixed):
            return prime
    raise ConfigError(f"every batch of {PRIMES} divides the size of some parameter; the trace would mistake it")
