"""Samples a second out of shards: our training stream against open_clip's own, same shards, transform and workers.

    OMP_NUM_THREADS=1 python benchmarks/data.py --samples 2000 --workers 1 --rounds 7 --json data.json

Shards of JPEGs with a photograph's spectrum are drawn first (``--folder`` keeps them). Every contender runs with its
own loader workers; a round takes so many batches from each in turn, in another order each time, after a few that are
not counted, so that none lives on what was read ahead. open_clip's is its ``get_wds_dataset`` with shards resampled.
Samples are divided by the CPU seconds of the contender's workers and of this process, which other work on the machine
disturbs little; wall time is shown too. Ratios are to open_clip within the same round; what is shown is their median
and their range.

"draft" is data.draft. "reduced first" averages whole pixels (Pillow's reduce) down to no less than the model's
resolution before the crop, which is not an option of disco_ds: it is here to say what it would give.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import os
import random
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import psutil  # noqa: E402
import torch  # noqa: E402
from PIL import Image  # noqa: E402
from webdataset.tariterators import tar_file_expander  # noqa: E402

from disco_ds.config.schema import DataConfig  # noqa: E402
from disco_ds.data.images import ImageRules, open_rgb  # noqa: E402
from disco_ds.data.stream import TrainStream  # noqa: E402
from disco_ds.data.tools.write import shard_writer  # noqa: E402

PEER = "open_clip"
MODEL = "ViT-B-32"
SIZE_PX = 224
WORDS = "a photo of the old red house by river with two dogs and some people under tall trees in evening light"


def photograph(rng: np.random.Generator, width: int, height: int) -> bytes:
    """A JPEG (quality 85) of noise in octaves: the spectrum of a photograph, and about its size in bytes."""
    total = np.zeros((height, width, 3), np.float32)
    for octave in range(8):
        cells = (2 ** (octave + 1), 2 ** (octave + 1), 3)
        grid = Image.fromarray(rng.integers(0, 256, cells, dtype=np.uint8))
        layer = grid.resize((width, height), Image.Resampling.BICUBIC)
        total += (np.asarray(layer, np.float32) - 128) / 1.4**octave
    total += rng.normal(0, 6, total.shape)
    buffer = io.BytesIO()
    Image.fromarray((total * 0.6 + 128).clip(0, 255).astype(np.uint8)).save(buffer, "JPEG", quality=85)
    return buffer.getvalue()


def draw_shards(folder: Path, samples: int, width: int, height: int, shards: int) -> list[str]:
    """Shards ``00000.tar``, … with so many pairs, drawn if they are not there."""
    folder.mkdir(parents=True, exist_ok=True)
    rng, words = np.random.default_rng(0), random.Random(0)
    paths = [folder / f"{samples}-{width}x{height}-{number:05d}.tar" for number in range(shards)]
    for number, path in enumerate(paths):
        if path.exists():
            continue
        with shard_writer(path) as writer:
            for i in range(number, samples, shards):
                caption = " ".join(words.choices(WORDS.split(), k=words.randint(5, 20)))
                image = photograph(rng, width, height)
                writer.write({"__key__": f"{i:06d}", "jpg": image, "txt": caption.encode()})
    return [str(path) for path in paths]


class ReducedFirst:
    """A transform on an image that was averaged down to no less than ``px`` a side."""

    def __init__(self, then: Callable[[Image.Image], torch.Tensor], px: int) -> None:
        self.then, self.px = then, px

    def __call__(self, image: Image.Image) -> torch.Tensor:
        factor = min(image.size) // self.px
        return self.then(image.reduce(factor) if factor > 1 else image)


def the_transform() -> Any:
    """The training transform, the same for both pipelines."""
    from open_clip.transform import PreprocessCfg, image_transform_v2

    return image_transform_v2(PreprocessCfg(size=SIZE_PX), is_train=True)


def ours(shards: list[str], batch: int, workers: int, transform: Any, **fields: Any) -> Iterator[int]:
    """Sizes of the batches of our stream."""
    import open_clip

    config = DataConfig(train=shards, workers=workers, shuffle=1000, **fields)
    options = {"rank": 0, "world_size": 1, "seed": 0, "transform": transform, "global_batch": batch}
    stream = TrainStream(config, tokenizer=open_clip.get_tokenizer(MODEL), **options)
    return (len(batch.images) for batch in stream)


def theirs(shards: list[str], batch: int, workers: int) -> Iterator[int]:
    """Sizes of the batches of open_clip's own pipeline, without an end (it draws shards with replacement)."""
    import open_clip

    if importlib.util.find_spec("pandas") is None:  # open_clip imports it for tables, which are not read here
        sys.modules["pandas"] = ModuleType("pandas")
    from open_clip_train import data as peer

    # open_clip 3.3 is written for webdataset up to 0.2.86, which does not mark the ends of shards.
    peer.tar_file_expander = partial(tar_file_expander, eof_value=None)
    peer._SAMPLE_SHUFFLE_SIZE = peer._SAMPLE_SHUFFLE_INITIAL = 1000  # as many as ours
    arguments = Namespace(
        train_data="::".join(shards), train_data_upsampling_factors=None, dataset_resampled=True,
        train_num_samples=10**9, seed=0, batch_size=batch, workers=workers, world_size=1,
    )  # fmt: skip
    tokenizer = open_clip.get_tokenizer(MODEL)
    found = peer.get_wds_dataset(arguments, the_transform(), is_train=True, tokenizer=tokenizer)
    return (len(images) for images, _ in found.dataloader)


class Contender:
    """A stream and the processes that belong to it."""

    def __init__(self, batches: Iterator[int]) -> None:
        self.batches = batches
        before = {child.pid for child in psutil.Process().children(recursive=True)}
        next(batches)
        self.workers = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]

    def _cpu_s(self) -> float:
        every = [process.cpu_times() for process in [psutil.Process(), *self.workers]]
        return sum(times.user + times.system for times in every)

    def round(self, batches: int, uncounted: int) -> tuple[float, float]:
        """Samples per CPU second, and per second."""
        for _ in range(uncounted):
            next(self.batches)
        cpu_s, wall_s = self._cpu_s(), time.perf_counter()
        samples = sum(next(self.batches) for _ in range(batches))
        return samples / (self._cpu_s() - cpu_s), samples / (time.perf_counter() - wall_s)


def parts(shards: list[str]) -> dict[str, float]:
    """Milliseconds of one core a sample takes in each part, alone in this process: median over 200 images."""
    from disco_ds.data.shards import read_shard

    raws = [raw for raw, _ in zip(read_shard(shards[0], None), range(200), strict=False)]
    transform, crop = the_transform(), ReducedFirst(the_transform(), SIZE_PX)
    whole, draft = ImageRules(10**8), ImageRules(10**8, draft_px=SIZE_PX)
    images = [open_rgb(raw.files["jpg"], whole) for raw in raws]
    small = [open_rgb(raw.files["jpg"], draft) for raw in raws]

    def median_ms(function: Callable[[Any], Any], items: list[Any]) -> float:
        taken = []
        for item in items:
            before = time.process_time()
            function(item)
            taken.append(1000 * (time.process_time() - before))
        return round(statistics.median(taken), 2)

    jpegs = [raw.files["jpg"] for raw in raws]
    return {
        "decode": median_ms(lambda data: open_rgb(data, whole), jpegs),
        "decode, draft": median_ms(lambda data: open_rgb(data, draft), jpegs),
        "transform": median_ms(transform, images),
        "transform after draft": median_ms(transform, small),
        "transform, reduced first": median_ms(crop, images),
        "kB a JPEG": round(statistics.mean(map(len, jpegs)) / 1000, 1),
    }


def measure(shards: list[str], arguments: Namespace) -> dict[str, Any]:
    """Every contender's rounds."""
    batch, workers = arguments.batch, arguments.workers
    contenders = {
        PEER: Contender(theirs(shards, batch, workers)),
        "disco_ds": Contender(ours(shards, batch, workers, the_transform())),
        "disco_ds, draft": Contender(ours(shards, batch, workers, the_transform(), draft=True)),
        "disco_ds, reduced first": Contender(ours(shards, batch, workers, ReducedFirst(the_transform(), SIZE_PX))),
    }
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for number in range(arguments.rounds):
        order = list(contenders)
        random.Random(number).shuffle(order)
        for name in order:
            rates[name].append(contenders[name].round(arguments.batches, uncounted=2 * workers + 2))
        print(f"round {number}: " + ", ".join(f"{name} {rates[name][-1][0]:.0f}" for name in order), file=sys.stderr)
    return {name: summary(rates[name], rates[PEER]) for name in contenders}


def summary(own: list[tuple[float, float]], peer: list[tuple[float, float]]) -> dict[str, Any]:
    """Medians, and the ratios to the peer within each round."""
    found: dict[str, Any] = {}
    for which, name in enumerate(("per_cpu_s", "per_s")):
        ratios = [a[which] / b[which] for a, b in zip(own, peer, strict=True)]
        found[name] = round(statistics.median(item[which] for item in own), 1)
        found[f"{name}_ratio"] = [round(value, 3) for value in (statistics.median(ratios), min(ratios), max(ratios))]
    return found


def main() -> None:
    """Run both pipelines in turns and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--size", type=int, nargs=2, default=[640, 480], metavar=("WIDTH", "HEIGHT"), help="pixels")
    parser.add_argument("--shards", type=int, default=64)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--batches", type=int, default=8, help="counted in each round")
    parser.add_argument("--workers", type=int, default=1, help="loader processes of each contender")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="keep the shards here")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="bench-data-") as temporary:
        shards = draw_shards(arguments.folder or Path(temporary), arguments.samples, *arguments.size, arguments.shards)
        found = {"parts_ms": parts(shards), "contenders": measure(shards, arguments)}
        print(json.dumps(found["parts_ms"]))
        print(f"{'':26} {'samples / CPU s':>16} {'ratio':>7} {'range':>15} {'samples / s':>12}")
        for name, row in found["contenders"].items():
            median, least, most = row["per_cpu_s_ratio"]
            span = f"{least:.2f} to {most:.2f}"
            print(f"{name:26} {row['per_cpu_s']:16.0f} {median:7.2f} {span:>15} {row['per_s']:12.0f}")
        if arguments.json:
            arguments.json.write_text(json.dumps(found, indent=2))
        sys.stdout.flush()
        for child in psutil.Process().children(recursive=True):
            child.kill()  # the loaders' workers would be waited for
    os._exit(0)


if __name__ == "__main__":
    main()
