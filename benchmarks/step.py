"""Our training step beside open_clip's own under DDP: time, peak live bytes, as ratios, in one launch.

    python benchmarks/step.py                         # two CPU ranks, a 12-layer tower, batch 64
    python benchmarks/step.py --ranks 2 --batch 128 --rounds 10 --json step.json

Contenders take turns round by round on the same inputs, so a drift of the machine's speed hits all of them; a ratio is
taken within a round, and the median and the spread over rounds are printed. Peer code: the training step of
``open_clip_train.train.train_one_epoch`` (open_clip 3.3) in its order of calls, with ``open_clip.loss.ClipLoss`` as its
``create_loss`` makes it for ``--local-loss --gather-with-grad``, DDP and AdamW; and its ``--accum-freq`` branch, which
recomputes the logits of the whole batch once for each micro-batch.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

MODEL = {
    "embed_dim": 256,
    "vision_cfg": {"layers": 6, "width": 256, "head_width": 64, "patch_size": 16, "image_size": 112},
    "text_cfg": {"context_length": 32, "vocab_size": 8192, "width": 256, "heads": 4, "layers": 6},
}


def make_batch(count, rank, seed):
    """Random images and texts of one rank."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    size, context = MODEL["vision_cfg"]["image_size"], MODEL["text_cfg"]["context_length"]
    texts = torch.randint(1, 8000, (count, context), generator=generator)
    texts[:, -1] = 8191
    return torch.randn(count, 3, size, size, generator=generator), texts


class Peer:
    """open_clip's step under DDP, whole or with accumulation."""

    def __init__(self, accumulation):
        import open_clip

        torch.manual_seed(0)
        self.model = torch.nn.parallel.DistributedDataParallel(open_clip.model.CLIP(**MODEL, output_dict=True).train())
        self.loss = open_clip.loss.ClipLoss(
            local_loss=True,
            gather_with_grad=True,
            cache_labels=True,
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
        )
        exempt = [p for p in self.model.parameters() if p.ndim < 2]
        rest = [p for p in self.model.parameters() if p.ndim >= 2]
        self.optimizer = torch.optim.AdamW(
            [{"params": exempt, "weight_decay": 0.0}, {"params": rest, "weight_decay": 0.2}],
            lr=5e-4, betas=(0.9, 0.98), eps=1e-6,
        )  # fmt: skip
        self.accumulation = accumulation

    def __call__(self, images, texts):
        self.optimizer.zero_grad()
        if self.accumulation == 1:
            out = self.model(images, texts)
            loss = self.loss(out["image_features"], out["text_features"], out["logit_scale"])
            loss.backward()
        else:
            loss = self._accumulated(images.chunk(self.accumulation), texts.chunk(self.accumulation))
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        with torch.no_grad():
            self.model.module.logit_scale.clamp_(0, 4.6052)
        return loss.detach()

    def _accumulated(self, images, texts):
        cached = {"image_features": [], "text_features": []}
        with torch.no_grad():
            for image, text in zip(images, texts, strict=True):
                out = self.model(image, text)
                for key, values in cached.items():
                    values.append(out[key])
        for index, (image, text) in enumerate(zip(images, texts, strict=True)):
            out = self.model(image, text)
            inputs = {k: torch.cat([*v[:index], out[k], *v[index + 1 :]]) for k, v in cached.items()}
            loss = self.loss(inputs["image_features"], inputs["text_features"], out["logit_scale"])
            loss.backward()
        return loss


class Ours:
    """The project's step over a DeepSpeed engine."""

    def __init__(self, stage, accumulation, batch, overlap=False):
        from disco_ds.config.schema import ModelConfig, RunConfig
        from disco_ds.engine.deepspeed_engine import build_engine
        from disco_ds.engine.ds_config import resolve
        from disco_ds.engine.step import TrainStep
        from disco_ds.loss.contrastive import build_loss
        from disco_ds.model.build import build_model

        world_size = dist.get_world_size()
        model = ModelConfig(name="benchmark", config=MODEL)
        run = RunConfig(
            data={"train": "x"},
            steps=1,
            global_batch=batch,
            micro_batch=batch // world_size // accumulation,
            model=model,
        )
        zero = {"stage": stage, "reduce_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"}
        config = resolve(run, {"zero_optimization": zero}, world_size=world_size, on_gpu=False, source="benchmark")
        self.engine = build_engine(build_model(model, 0), run.optimizer, config)
        self.step = TrainStep(self.engine, build_loss("one_block"), accumulation, torch.device("cpu"), overlap=overlap)

    def __call__(self, images, texts):
        return self.step(images, texts).loss


def contenders(batch, accumulation):
    """The steps to compare, by name."""
    return {
        "open_clip DDP": lambda: Peer(1),
        f"open_clip DDP, accum-freq {accumulation}": lambda: Peer(accumulation),
        "ours ZeRO 0": lambda: Ours(0, 1, batch),
        "ours ZeRO 2": lambda: Ours(2, 1, batch),
        "ours ZeRO 3": lambda: Ours(3, 1, batch),
        f"ours ZeRO 2, cached k={accumulation}": lambda: Ours(2, accumulation, batch),
        f"ours ZeRO 3, cached k={accumulation}": lambda: Ours(3, accumulation, batch),
    }


def measure(arguments):
    """All contenders on this rank; rank 0 prints and writes."""
    from disco_ds.distributed import mean_over_ranks, prepare_environment
    from disco_ds.engine.deepspeed_engine import start_distributed
    from disco_ds.run.quiet import quiet_libraries
    from tests.helpers.live_bytes import LiveBytes

    prepare_environment()
    quiet_libraries()
    warnings.filterwarnings("ignore", category=FutureWarning)  # the peer's gather, by its old name
    start_distributed()
    per_rank = arguments.batch // dist.get_world_size()
    steps, peaks, losses = {}, {}, {}
    for name, build in contenders(arguments.batch, arguments.accumulation).items():
        batch = make_batch(per_rank, dist.get_rank(), 0)
        with LiveBytes(*batch) as live:  # weights, optimizer states and buckets are part of the peak
            steps[name] = build()
            losses[name] = mean_over_ranks(steps[name](*batch))
            steps[name](*batch)  # the second step has all states
        peaks[name] = live.peak
    times, cpu = {name: [] for name in steps}, {name: [] for name in steps}
    for index in range(arguments.rounds):
        batch = make_batch(per_rank, dist.get_rank(), index)
        for name, step in steps.items():
            dist.barrier()
            wall, process = time.perf_counter(), time.process_time()
            step(*batch)
            dist.barrier()
            times[name].append(time.perf_counter() - wall)
            cpu[name].append(time.process_time() - process)
    if dist.get_rank() == 0:
        report(arguments, times, cpu, peaks, losses)
    dist.destroy_process_group()


def report(arguments, times, cpu, peaks, losses):
    """Print the table."""
    base, whole = next(iter(times)), "ours ZeRO 2"
    rows = []
    for name in times:
        ratios = [a / b for a, b in zip(times[name], times[base], strict=True)]
        own = [a / b for a, b in zip(times[name], times[whole], strict=True)]
        rows.append(
            {
                "step": name,
                "ms": 1000 * statistics.median(times[name]),
                "time_ratio": statistics.median(ratios),
                "low": min(ratios),
                "high": max(ratios),
                "cpu_ratio": statistics.median([a / b for a, b in zip(cpu[name], cpu[base], strict=True)]),
                "over_ours_zero2": statistics.median(own),
                "peak_mib": peaks[name] / 2**20,
                "peak_ratio": peaks[name] / peaks[base],
                "first_loss": losses[name],
            }
        )
    print(f"{arguments.ranks} ranks, batch {arguments.batch}, {arguments.rounds} rounds; ratios to {base}")
    print(f"{'step':34} {'ms':>7} {'time':>6} {'(min-max)':>13} {'cpu':>6} {'/ours z2':>8} {'peak MiB':>9} {'peak':>6}")
    for r in rows:
        spread = f"({r['low']:.2f}-{r['high']:.2f})"
        print(
            f"{r['step']:34} {r['ms']:7.0f} {r['time_ratio']:6.2f} {spread:>13} {r['cpu_ratio']:6.2f} "
            f"{r['over_ours_zero2']:8.2f} {r['peak_mib']:9.1f} {r['peak_ratio']:6.2f}"
        )
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"arguments": vars(arguments), "rows": rows}, indent=1))


def main():
    """Start the ranks and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=64, help="pairs over all ranks")
    parser.add_argument("--accumulation", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", help="also write the table here")
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        measure(arguments)
        return
    port = str(29500 + os.getpid() % 500)
    common = {**os.environ, "WORLD_SIZE": str(arguments.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
              "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}  # fmt: skip
    ranks = [
        subprocess.Popen([sys.executable, *sys.argv], env={**common, "RANK": str(r), "LOCAL_RANK": str(r)})
        for r in range(arguments.ranks)
    ]
    sys.exit(max(process.wait() for process in ranks))


if __name__ == "__main__":
    main()
