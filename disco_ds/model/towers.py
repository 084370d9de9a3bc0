"""The two towers: an open_clip model, with its temperature kept exact at every precision.

:class:`TwoTowers` holds an open_clip model whose logit_scale (and logit_bias) it has taken over. DeepSpeed keeps 0-dim
parameters badly, so here they have shape (1,); export gives them back as 0-dim. In bf16 a working copy of
logit_scale = ln 100 is e^4.5938 = 98.9, so forward uses the fp32 master value (:meth:`TwoTowers.set_master`), while the
gradient goes to the working copy as always.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from disco_ds.config.schema import MAX_LOGIT_SCALE


class Features(NamedTuple):
    """What the towers give: unit-length features, the scale that multiplies the logits, and a bias if there is one.

    ``image_features`` and ``text_features`` have shape (b, D); a tower that was given nothing gives None.
    ``logit_scale`` is exp of the parameter, shape (1,), float32. ``logit_bias`` has shape (1,) or is None.
    """

    image_features: Tensor | None
    text_features: Tensor | None
    logit_scale: Tensor
    logit_bias: Tensor | None


class TwoTowers(nn.Module):
    """An open_clip model as DeepSpeed engines take it.

    Args:
        clip: an ``open_clip.CLIP`` or ``CustomTextCLIP``. Its logit_scale and logit_bias move here.
        freeze: "image" or "text" locks that tower: no gradients, evaluation mode (no dropout, fixed batch statistics).
    """

    clip: Any  # nn.Module would type every attribute of it as Tensor | Module

    def __init__(self, clip: Any, freeze: str = "none") -> None:
        super().__init__()
        self.clip = clip
        self.freeze = freeze
        self.logit_scale = nn.Parameter(clip.logit_scale.detach().float().reshape(1))
        bias = getattr(clip, "logit_bias", None)
        self.logit_bias = None if bias is None else nn.Parameter(bias.detach().float().reshape(1))
        del clip.logit_scale, clip.logit_bias
        # open_clip's forward still reads both; a plain 0 there costs nothing and is no parameter of any engine
        clip.logit_scale, clip.logit_bias = torch.zeros(()), None
        self._masters: dict[str, Tensor] = {}
        for parameter in self.tower_parameters(freeze) if freeze != "none" else ():
            parameter.requires_grad_(False)

    def tower_parameters(self, tower: str) -> Iterator[nn.Parameter]:
        """Parameters of the "image" or the "text" tower (projections included, logit_scale not)."""
        for name, parameter in self.clip.named_parameters():
            if name.startswith("visual.") == (tower == "image"):
                yield parameter

    def train(self, mode: bool = True) -> TwoTowers:
        """Training mode, except for a locked tower."""
        super().train(mode)
        if mode and self.freeze == "image":
            self.clip.visual.eval()
        elif mode and self.freeze == "text":
            for name, module in self.clip.named_children():
                if name != "visual":
                    module.eval()
        return self

    def set_master(self, name: str, value: Tensor) -> None:
        """Tell forward the fp32 value of ``logit_scale`` or ``logit_bias`` that the optimizer holds, shape (1,)."""
        # a plain attribute: a buffer would be cast to bf16 with the module
        self._masters[name] = value.detach().to(torch.float32)

    def _exact(self, name: str, parameter: Tensor) -> Tensor:
        value = parameter.float()
        master = self._masters.get(name)
        return value if master is None else value + (master.to(value.device) - value).detach()

    def forward(self, images: Tensor | None = None, texts: Tensor | None = None) -> Features:
        """Encode images (b, 3, H, W), texts (b, context), or both."""
        image_features = text_features = None
        if texts is not None:
            text_features = self._encode("text", None, texts)[1]
        if images is not None:
            images = images.to(next(self.clip.visual.parameters()).dtype)
            image_features = self._encode("image", images, None)[0]
        bias = None if self.logit_bias is None else self._exact("logit_bias", self.logit_bias)
        return Features(image_features, text_features, self._exact("logit_scale", self.logit_scale).exp(), bias)

    def _encode(self, tower: str, images: Tensor | None, texts: Tensor | None) -> tuple[Tensor, Tensor]:
        # clip is called as a whole, never its encode_* methods: ZeRO-3 gathers parameters in a module's forward hooks
        if self.freeze == tower:
            with torch.no_grad():
                return self.clip(images, texts)[:2]
        return self.clip(images, texts)[:2]

    def clamp_range(self, name: str) -> tuple[float, float] | None:
        """The range that training keeps a temperature parameter in: logit_scale in [0, ln 100]; logit_bias is free."""
        return (0.0, MAX_LOGIT_SCALE) if name == "logit_scale" else None


def trained_towers(model: TwoTowers) -> dict[str, list[nn.Module]]:
    """The modules of each tower that keeps activations: a locked tower runs without a graph.

    Recomputing a locked tower would also be an error under ZeRO-3 (huggingface/transformers#47254).
    """
    children = dict(model.clip.named_children())
    towers = {"image": [children.pop("visual")], "text": list(children.values())}
    return {name: modules for name, modules in towers.items() if name != model.freeze}
