"""A drop-in for ``open_clip.loss.ClipLoss``: the same constructor, the same call, this project's loss inside.

from disco_ds import ClipLoss          # in place of: from open_clip import ClipLoss
loss = ClipLoss(local_loss=True, gather_with_grad=True, rank=args.rank, world_size=args.world_size)
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from disco_ds.loss.contrastive import contrastive_loss
from disco_ds.loss.ranks import Ranks, ranks_of


class ClipLoss(nn.Module):
    """open_clip's ``ClipLoss``, exact under every combination of its flags.

    Args:
        local_loss: whether the value returned is this rank's share of the loss (True) or the loss of all ranks (False,
            which costs the all-reduce of one number). The gradient is that of the global loss either way.
        gather_with_grad: accepted; the gradient always reaches the features of all ranks.
        cache_labels: accepted; there are no labels to cache.
        rank: this process in its group; checked against it.
        world_size: 1 for a loss over this process's pairs alone, whatever process group there is; else the size of
            the group.
        use_horovod: not supported.
        group: the process group; None is the default group.
        tile, keep_logits: as in :func:`disco_ds.contrastive_loss`.

    Raises:
        ValueError: Horovod is asked for, or (at the first call) rank and world_size are not those of the group.
    """

    def __init__(
        self,
        local_loss: bool = False,
        gather_with_grad: bool = False,
        cache_labels: bool = False,
        rank: int = 0,
        world_size: int = 1,
        use_horovod: bool = False,
        *,
        group: dist.ProcessGroup | Ranks | None = None,
        tile: int | None = None,
        keep_logits: bool | str = "auto",
    ) -> None:
        super().__init__()
        if use_horovod:
            raise ValueError("ClipLoss: use_horovod=True is not supported; initialise torch.distributed instead")
        self.local_loss, self.gather_with_grad, self.cache_labels = local_loss, gather_with_grad, cache_labels
        self.rank, self.world_size, self.use_horovod, self.group = rank, world_size, use_horovod, group
        self.options: dict[str, Any] = {"tile": tile, "keep_logits": keep_logits}

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        logit_bias: Tensor | float | None = None,
        output_dict: bool = False,
    ) -> Any:
        """The loss, or ``{"contrastive_loss": loss}`` with ``output_dict``."""
        ranks = ranks_of(self.group) if self.world_size > 1 else Ranks()
        if self.world_size > 1 and (ranks.rank, ranks.size) != (self.rank, self.world_size):
            raise ValueError(
                f"ClipLoss was made for rank {self.rank} of {self.world_size}, but its process group has this process "
                f"as rank {ranks.rank} of {ranks.size}; pass rank and world_size of the group, after it is initialised"
            )
        loss = contrastive_loss(image_features, text_features, logit_scale, logit_bias, group=ranks, **self.options)
        if not self.local_loss and ranks.size > 1:
            share = loss.detach()
            loss = loss + (ranks.sum(share.clone()) / ranks.size - share)  # the value of all ranks, the same gradient
        return {"contrastive_loss": loss} if output_dict else loss
