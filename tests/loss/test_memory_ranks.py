"""Live bytes, collectives and bytes on the wire of a loss on real ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.helpers.live_bytes import LiveBytes
from tests.helpers.loss_reference import leaves
from tests.helpers.ranks import run_ranks
from tests.loss.test_memory import MEMORY, measure_peaks


def peaks() -> list[tuple[int, int, int]]:
    return measure_peaks(MEMORY, dist.get_world_size())


def test_loss_bytes_is_what_is_counted_on_ranks():
    for results in run_ranks(peaks, 3):
        for case, (form, counted, _) in zip(MEMORY, results, strict=True):
            assert form == pytest.approx(counted, rel=0.01), case


def collectives() -> tuple[list[str], int]:
    from disco_ds.loss.contrastive import contrastive_loss

    image, text, scale = leaves(512, 128)
    with LiveBytes() as live:
        contrastive_loss(image, text, scale).backward()
    return live.collectives, live.sent


def test_two_towers_and_a_few_numbers_are_sent():
    names, sent = run_ranks(collectives, 2)[0]
    # The agreement; the texts (a broadcast from each rank); column sums there and back; the gradient of the texts.
    assert names.count("alltoall_base") == 2
    assert len(names) == 1 + 2 + 1 + 2 + 1
    tower = 2 * 512 * 128 * 4 / 2
    assert 2 * tower <= sent <= 2 * tower + 3 * 8 * 1024


def wrapped(how: str) -> float:
    """A step of a model of two linear towers under an engine; the error of its gradient against one process."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    from disco_ds.loss.contrastive import contrastive_loss

    class Towers(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.image, self.text = torch.nn.Linear(12, 16), torch.nn.Linear(12, 16)
            self.log_scale = torch.nn.Parameter(torch.tensor([2.0]))

        def forward(self, x, y):
            u, v = (torch.nn.functional.normalize(tower(z), dim=1) for tower, z in ((self.image, x), (self.text, y)))
            return u, v, self.log_scale.exp()

    torch.manual_seed(0)
    reference, model = Towers(), Towers()
    model.load_state_dict(reference.state_dict())
    x, y = torch.randn(2, 24, 12)
    u, v, s = reference(x, y)
    labels = torch.arange(24)
    logits = s * u @ v.T
    entropy = torch.nn.functional.cross_entropy
    ((entropy(logits, labels) + entropy(logits.T, labels)) / 2).backward()
    if how == "ddp":
        model = DistributedDataParallel(model)
    else:
        mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model, mesh=mesh)
    own = slice(dist.get_rank() * 12, dist.get_rank() * 12 + 12)
    contrastive_loss(*model(x[own], y[own])).backward()
    worst = 0.0
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        gradient = p.grad.full_tensor() if how == "fsdp2" else p.grad
        worst = max(worst, ((gradient - q.grad).norm() / q.grad.norm()).item())
    return worst


@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_gradients_are_exact_after_the_engine(how):
    assert max(run_ranks(wrapped, 2, how)) < 1e-5
