"""The loss against its peers: error, time, memory and bytes on the wire, in one launch and on the same inputs.

    python benchmarks/loss.py --ranks 2 --batch 4096 --dim 512 --rounds 7 --json loss.json

Ranks are CPU processes of one thread over gloo. A round runs every contender once, in another order each time; CPU
times are the sum over ranks, ratios are to the official DisCo recipe within the same round, and what is shown is their
median and their range. Peak bytes are counted in a run of their own, which is not timed
(``tests/helpers/live_bytes.py``).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

OFFICIAL, ORIGINAL = "official DisCo", "original CLIP"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


def contenders() -> dict[str, Callable[..., torch.Tensor]]:
    """Losses by name, each called with image features, text features and scale."""
    import open_clip

    from benchmarks.support.rivals import official_disco, original_clip
    from disco_ds import ContrastiveLoss

    rank, size = dist.get_rank(), dist.get_world_size()
    return {
        OFFICIAL: official_disco,
        ORIGINAL: original_clip,
        "open_clip": open_clip.ClipLoss(local_loss=True, gather_with_grad=True, rank=rank, world_size=size),
        "one block, kept": ContrastiveLoss(keep_logits=True),
        "one block, recomputed": ContrastiveLoss(keep_logits=False),
    }


def measure(batch: int, dim: int, dtype: str, rounds: int, kind: str, seed: int) -> dict[str, dict[str, Any]]:
    """Run on every rank; what rank 0 returns is complete."""
    from tests.helpers.live_bytes import LiveBytes
    from tests.helpers.loss_reference import make_features, relative_error, streamed_reference

    rank, size = dist.get_rank(), dist.get_world_size()
    b = batch // size
    all_images, all_texts = make_features(batch, dim, kind, seed, DTYPES[dtype])
    rows = torch.arange(rank * b, (rank + 1) * b)
    expected = streamed_reference(all_images, all_texts, 100.0, rows)
    image, text = (x[rows].clone().requires_grad_() for x in (all_images, all_texts))
    scale = torch.tensor(100.0, requires_grad=True)

    def run(loss: Callable[..., torch.Tensor]) -> torch.Tensor:
        image.grad = text.grad = scale.grad = None
        value = loss(image, text, scale)
        value.backward()
        return value.detach()

    results: dict[str, dict[str, Any]] = {}
    losses = contenders()
    for name, loss in losses.items():
        run(loss)  # warms up libraries and allocator
        with LiveBytes(image, text, scale) as live:
            run(loss)
        # As an engine would: averaged over ranks. The first two are short of a factor N; their error is taken after
        # that is put right, so that it is one of arithmetic.
        factor = 1.0 if name in (OFFICIAL, ORIGINAL) else 1 / size
        errors = [relative_error(x.grad * factor, expected[tower]) for tower, x in (("image", image), ("text", text))]
        of_scale = scale.grad.double()
        dist.all_reduce(of_scale)
        errors.append(relative_error(of_scale / size, expected["scale"]))
        gathered: list[Any] = [None] * size
        dist.all_gather_object(gathered, (errors, live.peak, live.sent))
        results[name] = {
            "gradient_error": max(max(e[:2]) for e, _, _ in gathered),
            "scale_error": max(e[2] for e, _, _ in gathered),
            "peak_bytes": max(p for _, p, _ in gathered),
            "sent_bytes": max(s for _, _, s in gathered),
            "cpu_s": [],
            "wall_s": [],
        }
    order = list(losses)
    shuffle = random.Random(seed)
    for _ in range(rounds):
        shuffle.shuffle(order)
        for name in order:
            dist.barrier()
            cpu, wall = time.process_time(), time.perf_counter()
            run(losses[name])
            spent = torch.tensor([time.process_time() - cpu, time.perf_counter() - wall], dtype=torch.float64)
            slowest = spent.clone()
            dist.all_reduce(spent)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            results[name]["cpu_s"].append(spent[0].item())
            results[name]["wall_s"].append(slowest[1].item())
    return results


def summarise(results: dict[str, dict[str, Any]]) -> None:
    """Add medians, and ratios to the official recipe taken round by round: (median, least, greatest)."""
    official = results[OFFICIAL]
    for row in results.values():
        for what in ("cpu", "wall"):
            ratios = [a / b for a, b in zip(row[f"{what}_s"], official[f"{what}_s"], strict=True)]
            row[f"{what}_median_s"] = statistics.median(row[f"{what}_s"])
            row[f"{what}_ratio"] = statistics.median(ratios), min(ratios), max(ratios)
        row["peak_ratio"] = row["peak_bytes"] / official["peak_bytes"]


def table(results: dict[str, dict[str, Any]]) -> str:
    """The results for the console."""
    lines = [
        f"{'':24}{'gradient':>10}{'scale':>10}{'CPU ms':>9}{'÷ official (range)':>21}"
        f"{'wall ms':>9}{'÷ official (range)':>21}{'peak MiB':>10}{'÷':>6}{'sent MiB':>10}"
    ]
    for name, row in results.items():
        cpu, wall = row["cpu_ratio"], row["wall_ratio"]
        lines.append(
            f"{name:24}{row['gradient_error']:10.1e}{row['scale_error']:10.1e}"
            f"{1e3 * row['cpu_median_s']:9.0f}{f'{cpu[0]:.3f} ({cpu[1]:.2f}-{cpu[2]:.2f})':>21}"
            f"{1e3 * row['wall_median_s']:9.0f}{f'{wall[0]:.3f} ({wall[1]:.2f}-{wall[2]:.2f})':>21}"
            f"{row['peak_bytes'] / 2**20:10.1f}{row['peak_ratio']:6.2f}{row['sent_bytes'] / 2**20:10.1f}"
        )
    return "\n".join(lines)


def main() -> None:
    """Start the ranks, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4096, help="pairs on all ranks")
    parser.add_argument("--dim", type=int, default=512, help="width of the features")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="of the features")
    parser.add_argument("--features", default="trained", help="trained, converged, anisotropic, random")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seed", type=int, default=None, help="default: a new one")
    parser.add_argument("--json", type=Path, default=None, help="write the results there, too")
    args = parser.parse_args()
    if args.batch % args.ranks:
        parser.error(f"--batch {args.batch} does not divide by --ranks {args.ranks}, which the peers need")

    from benchmarks import loss as this  # found by name on the ranks, which __main__ is not
    from tests.helpers.ranks import run_ranks

    seed = random.randrange(2**31) if args.seed is None else args.seed
    options = args.batch, args.dim, args.dtype, args.rounds, args.features, seed
    results = run_ranks(this.measure, args.ranks, *options, timeout_s=3600.0)[0]
    summarise(results)
    print(
        f"N = {args.ranks} ranks of one thread, B = {args.batch}, D = {args.dim}, {args.dtype}, "
        f"{args.features} features, {args.rounds} rounds, seed {seed}, torch {torch.__version__}"
    )
    print(table(results))
    if args.json is not None:
        settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()} | {"seed": seed}
        args.json.write_text(json.dumps({"settings": settings, "results": results}, indent=1))


if __name__ == "__main__":
    main()
