"""The loss at the size of the published claim: B = 196,608 pairs over 64 ranks, on one machine.

    python benchmarks/scale.py                                  # 7 to 13 minutes of two CPU cores
    python benchmarks/scale.py --ranks 8 --pairs-per-rank 96    # a second

Ranks are threads of one process and talk through memory; each runs ``disco_ds.contrastive_loss`` as it is, forward and
backward. As many compute at a time as there are cores. Loss value, the gradient of the scale, and the gradients of a
few hundred random pairs are then compared with a float64 reference that streams over all B x B logits.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from disco_ds import contrastive_loss, loss_bytes  # noqa: E402
from disco_ds.loss.ranks import Ranks  # noqa: E402
from tests.helpers.loss_reference import make_features, relative_error, streamed_reference  # noqa: E402


class Meeting:
    """Where threads exchange tensors: a call returns when all have come. Who waits lets another compute."""

    def __init__(self, size: int, at_a_time: int) -> None:
        self.size = size
        self.slots = threading.Semaphore(at_a_time)
        self._barrier = threading.Barrier(size)
        self._brought: list[Tensor | None] = [None] * size

    def exchange(self, rank: int, tensor: Tensor) -> list[Tensor]:
        self._brought[rank] = tensor
        self._wait()
        everyone = [x for x in self._brought if x is not None]
        self._wait()
        return everyone

    def _wait(self) -> None:
        self.slots.release()
        try:
            self._barrier.wait()
        finally:
            self.slots.acquire()

    def abort(self) -> None:
        self._barrier.abort()


class ThreadRanks(Ranks):
    """One thread's side of a meeting, as the loss knows process groups."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting = meeting
        self.rank = rank
        self.size = meeting.size

    def gather(self, rows: Tensor) -> Tensor:
        return torch.cat(self.meeting.exchange(self.rank, rows))

    def reduce_scatter(self, rows: Tensor) -> Tensor:
        everyone = self.meeting.exchange(self.rank, rows)
        return torch.stack([x.chunk(self.size)[self.rank] for x in everyone]).sum(0)

    def sum(self, values: Tensor) -> Tensor:
        return values.copy_(torch.stack(self.meeting.exchange(self.rank, values.clone())).sum(0))

    def max(self, values: Tensor) -> Tensor:
        return values.copy_(torch.stack(self.meeting.exchange(self.rank, values.clone())).amax(0))


def run(ranks: int, b: int, dim: int, features: str, seed: int, checked: int, threads: int) -> dict[str, float]:
    """The loss on all ranks and its errors against the reference; times in seconds."""
    torch.set_num_threads(1)
    images, texts = make_features(ranks * b, dim, features, seed)
    meeting = Meeting(ranks, threads)
    results: list[tuple[float, Tensor, Tensor, float] | BaseException | None] = [None] * ranks

    def one_rank(rank: int) -> None:
        with meeting.slots:
            try:
                own = slice(rank * b, (rank + 1) * b)
                image, text = images[own].clone().requires_grad_(), texts[own].clone().requires_grad_()
                scale = torch.tensor(100.0, requires_grad=True)
                loss = contrastive_loss(image, text, scale, group=ThreadRanks(meeting, rank), keep_logits=False)
                loss.backward()
                assert image.grad is not None and text.grad is not None and scale.grad is not None  # noqa: PT018
                results[rank] = loss.item(), image.grad, text.grad, scale.grad.item()
            except BaseException as error:
                results[rank] = error
                meeting.abort()

    started = time.perf_counter()
    workers = [threading.Thread(target=one_rank, args=(rank,)) for rank in range(ranks)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    done: list[tuple[float, Tensor, Tensor, float]] = []
    for result in results:
        if not isinstance(result, tuple):
            raise RuntimeError("a rank failed") from result
        done.append(result)
    loss_s = time.perf_counter() - started

    started = time.perf_counter()
    torch.set_num_threads(threads)
    rows = torch.randperm(ranks * b, generator=torch.Generator().manual_seed(seed))[:checked]
    expected = streamed_reference(images, texts, 100.0, rows, chunk=32)
    torch.set_num_threads(1)

    def mean(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64).mean()

    return {
        "loss": mean([x[0] for x in done]).item(),
        "loss_error": relative_error(mean([x[0] for x in done]), expected["loss"]),
        "image_gradient_error": relative_error(torch.cat([x[1] for x in done])[rows] / ranks, expected["image"]),
        "text_gradient_error": relative_error(torch.cat([x[2] for x in done])[rows] / ranks, expected["text"]),
        "scale_gradient": expected["scale"].item(),
        "scale_gradient_error": relative_error(mean([x[3] for x in done]), expected["scale"]),
        # its terms cancel: the same error beside the loss, as the tests take it
        "scale_error_beside_loss": abs(mean([x[3] for x in done]) - expected["scale"].item()).item()
        / (0.05 * expected["loss"].item()),
        "loss_s": loss_s,
        "reference_s": time.perf_counter() - started,
        "bytes_a_rank": loss_bytes(b, ranks * b, dim, keep_logits=False, device="cpu"),
        "bytes_a_rank_disco": loss_bytes(b, ranks * b, dim, kind="disco"),
        "bytes_a_rank_clip": loss_bytes(b, ranks * b, dim, kind="clip"),
    }


def main() -> None:
    """Run the loss and the reference, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--pairs-per-rank", type=int, default=3072)
    parser.add_argument("--dim", type=int, default=64, help="width of the features")
    parser.add_argument("--features", default="trained", help="trained, converged, anisotropic, random")
    parser.add_argument("--check", type=int, default=300, help="pairs whose gradients are compared")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="ranks that compute at a time")
    parser.add_argument("--seed", type=int, default=None, help="default: a new one")
    parser.add_argument("--json", type=Path, default=None, help="write the results there, too")
    args = parser.parse_args()
    seed = random.randrange(2**31) if args.seed is None else args.seed
    print(
        f"B = {args.ranks * args.pairs_per_rank:,} pairs on {args.ranks} ranks, D = {args.dim}, seed {seed}", flush=True
    )
    options = args.ranks, args.pairs_per_rank, args.dim, args.features, seed, args.check, args.threads
    results = run(*options)
    for name, value in results.items():
        shown = f"{value / 2**20:,.1f} MiB" if name.startswith("bytes") else f"{value:.4g}"
        print(f"{name:24}{shown}")
    if args.json is not None:
        args.json.write_text(json.dumps(results | {"seed": seed}, indent=1))


if __name__ == "__main__":
    main()
