"""Held-out images as a folder for each class, as many data sets come: ``DIR/tabby cat/0001.jpg``."""

from __future__ import annotations

import functools
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageColor
from torch import Tensor
from torch.utils.data import DataLoader, Subset
from torchvision.datasets import DatasetFolder

from disco_ds.config.schema import DataConfig
from disco_ds.data.faults import SampleFault
from disco_ds.data.heldout import HeldoutBatch
from disco_ds.data.images import ImageRules, open_rgb
from disco_ds.data.loader import loader_options
from disco_ds.errors import DataError

log = logging.getLogger("disco_ds.data")

ENDINGS = tuple(ending for ending, kind in Image.registered_extensions().items() if kind in Image.OPEN)
NAMED_FAULTS = 5
"""So many of the images that cannot be read are named on the console."""


class ClassFolder(DatasetFolder):
    """torchvision's folder of images with a sub-folder (``classes``) for each class; hidden sub-folders are none.

    Raises:
        DataError: it does not exist, or is not a folder for each class.
    """

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            raise DataError(f"--folder {root} does not exist, or is no folder; expected one with a folder a class")
        count = len(self.find_classes(root)[0])
        if count:
            super().__init__(root, str, extensions=ENDINGS, allow_empty=True)
        if not count or not self.samples:
            raise DataError(f"--folder {root}: no image in its {count} sub-folders; expected one for each class")

    def find_classes(self, directory: str | Path) -> tuple[list[str], dict[str, int]]:
        names = sorted(path.name for path in Path(directory).iterdir() if path.is_dir() and path.name[0] != ".")
        return names, {name: number for number, name in enumerate(names)}

    def labels(self, classes: Sequence[str]) -> list[str]:
        """For each sub-folder the label that its images get: a number that counts ``classes``, or a name.

        By name where every sub-folder is called as a class is (case set aside); else by order, where there are as many
        sub-folders as classes: the n-th in sorted order is the n-th class, as ImageNet's n01440764, … are.

        Raises:
            DataError: neither.
        """
        by_name = {name.strip().casefold(): number for number, name in reversed(list(enumerate(classes)))}
        unknown = [name for name in self.classes if name.casefold() not in by_name]
        if unknown and len(self.classes) != len(classes):
            raise DataError(
                f"--folder {self.root}: {len(unknown)} of its {len(self.classes)} sub-folders are called as no class "
                f"is, such as {unknown[0]!r}, and there are {len(classes)} classes: name folders as the classes, or "
                "have one for each class, in the same order when sorted"
            )
        numbers = range(len(classes)) if unknown else [by_name[name.casefold()] for name in self.classes]
        decimal = any(name.strip().isdecimal() for name in classes)  # "7" would then be the class of that name
        return [classes[number] if decimal else str(number) for number in numbers]


def read_folder(
    folder: ClassFolder, labels: Sequence[str], config: DataConfig,
    *, transform: Callable[[Any], Tensor], rank: int, world_size: int, batch: int,
) -> Iterator[HeldoutBatch]:  # fmt: skip
    """This rank's share of the images, without captions, in batches of at most ``batch``.

    Args:
        labels: of each sub-folder, see :meth:`ClassFolder.labels`.
        config: how many loader processes, which images are taken; those that cannot be read are counted in ``faults``
            and named on the console.
        transform: RGB image → (3, H, W) float32; picklable when there are workers.
    """
    rules = ImageRules(config.max_pixels, background=ImageColor.getrgb(config.background)[:3])
    folder.loader = functools.partial(_load, transform, rules)
    share = range(rank, len(folder), world_size)
    options: dict[str, Any] = {"batch_size": batch, "num_workers": config.workers, "collate_fn": list}
    if config.workers:
        options = {**loader_options(), "persistent_workers": False, **options}
    numbers, named = iter(share), 0
    for rows in DataLoader(Subset(folder, share), **options):
        good: list[tuple[int, Tensor]] = []
        faults = Counter[str]()
        for image, _ in rows:
            number = next(numbers)
            if isinstance(image, Tensor):
                good.append((number, image))
                continue
            faults[f"folder/{image[0]}"] += 1
            named += 1
            if named <= NAMED_FAULTS:
                log.warning("dropped from the held-out images: %s: %s", *image)
        files = [folder.samples[number] for number, _ in good]
        yield HeldoutBatch(
            images=torch.stack([image for _, image in good]) if good else torch.empty(0),
            texts=torch.zeros(len(good), 1, dtype=torch.int64),
            captions=[[] for _ in good],
            keys=[os.path.relpath(path, folder.root) for path, _ in files],
            labels=[labels[number] for _, number in files],
            index=torch.tensor([number for number, _ in good], dtype=torch.int64),
            faults=dict(faults),
        )


def _load(transform: Callable[[Any], Tensor], rules: ImageRules, path: str) -> Tensor | tuple[str, str]:
    """An image's pixels, or the reason why there are none and where."""
    try:
        return transform(open_rgb(Path(path).read_bytes(), rules))
    except SampleFault as fault:
        return fault.reason, f"{path}: {fault}"
    except OSError:
        return "unreadable_file", path
