"""The loss in other people's trainers: under DDP, under FSDP2, and as ClipLoss in the place of open_clip's."""

from __future__ import annotations

import copy
import itertools

import open_clip
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from tests.helpers.loss_reference import relative_error
from tests.helpers.ranks import run_ranks

BOUND = 1e-5  # of a parameter's gradient: two layers of float32 lie between it and the loss
PAIRS = 7  # of each rank


class TwoTextTowers(nn.Module):
    """Queries and documents: two towers of two layers and a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Sequential(nn.Linear(12, 33), nn.Tanh(), nn.Linear(33, 24))
        self.document = nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 24))
        # (FSDP2 shards no scalars)
        self.logit_scale = nn.Parameter(torch.tensor([3.0]))

    def forward(self, queries, documents):
        query, document = self.query(queries), self.document(documents)
        return F.normalize(query, dim=1), F.normalize(document, dim=1), self.logit_scale.exp()


def expected_gradients(model, queries, documents):
    """Value and gradients in float64, one process, open_clip's loss."""
    reference = copy.deepcopy(model).double()
    loss = open_clip.ClipLoss()(*reference(queries.double(), documents.double()))
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in reference.named_parameters()}


def trainers(seed: int) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    from disco_ds import ClipLoss, ContrastiveLoss

    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(seed)
    model = TwoTextTowers()
    queries, documents = torch.randn(PAIRS * size, 12), torch.randn(PAIRS * size, 7)
    own = slice(PAIRS * rank, PAIRS * rank + PAIRS)
    value, expected = expected_gradients(model, queries, documents)

    def check(case: str, loss: torch.Tensor, gradients, of_all: bool) -> None:
        found = loss.detach().double().clone()
        if not of_all:
            dist.all_reduce(found)
            found /= size
        assert relative_error(found, value) < 2e-6, f"{case}: loss {found.item()}, expected {value.item()}"
        for name, gradient in gradients:
            error = relative_error(gradient.double(), expected[name])
            assert error < BOUND, f"{case}: {name} off by {error:.1e}"

    for flags in itertools.product((True, False), repeat=3):
        options = dict(zip(("local_loss", "gather_with_grad", "cache_labels"), flags, strict=True))
        ddp = DistributedDataParallel(copy.deepcopy(model))
        loss = ClipLoss(**options, rank=rank, world_size=size)(*ddp(queries[own], documents[own]))
        loss.backward()
        gradients = [(name, p.grad) for name, p in ddp.module.named_parameters()]
        check(f"DDP, ClipLoss({options})", loss, gradients, of_all=not options["local_loss"])

    sharded = copy.deepcopy(model)
    for part in (sharded.query, sharded.document, sharded):
        fully_shard(part)
    loss = ContrastiveLoss()(*sharded(queries[own], documents[own]))
    loss.backward()
    gradients = [(name, p.grad.full_tensor()) for name, p in sharded.named_parameters()]
    check("FSDP2", loss, gradients, of_all=False)


def test_under_ddp_and_fsdp2_and_as_open_clips_loss(seed):
    run_ranks(trainers, 3, seed)


def same_as_open_clip(seed: int) -> None:
    """On even batches open_clip's own distributed ClipLoss gives the same values and, under DDP, the same gradients."""
    from disco_ds import ClipLoss

    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(seed)
    model = TwoTextTowers()
    queries, documents = torch.randn(6 * size, 12), torch.randn(6 * size, 7)
    own = slice(6 * rank, 6 * rank + 6)
    for local_loss in (True, False):
        options = {"local_loss": local_loss, "gather_with_grad": True, "rank": rank, "world_size": size}
        gradients = []
        for loss_of in (ClipLoss(**options), open_clip.ClipLoss(**options)):
            towers = copy.deepcopy(model)
            loss = loss_of(*towers(queries[own], documents[own]))
            loss.backward()
            for p in towers.parameters():  # as DDP does
                dist.all_reduce(p.grad)
                p.grad /= size
            gradients.append([loss.detach(), *(p.grad for p in towers.parameters())])
        names = ["loss", *(name for name, _ in model.named_parameters())]
        for name, ours, theirs in zip(names, *gradients, strict=True):
            if name == "loss" and local_loss:  # ours is this rank's share of the same mean
                for value in (ours, theirs):
                    dist.all_reduce(value)
            error = relative_error(ours.double(), theirs.double())
            assert error < BOUND, f"local_loss={local_loss} {name}: {ours} against {theirs}"


def test_clip_loss_gives_what_open_clips_gives(seed):
    run_ranks(same_as_open_clip, 2, seed)
