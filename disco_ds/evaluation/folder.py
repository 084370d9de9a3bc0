"""Held-out images as a folder for each class, as many data sets come: ``DIR/tabby cat/0001.jpg``."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from disco_ds.data.decode import Pictures, SampleFault, open_rgb
from disco_ds.data.heldout import HeldoutBatch
from disco_ds.data.workers import loader_options
from disco_ds.errors import DataError

log = logging.getLogger("disco_ds.data")

ENDINGS = frozenset(ending for ending, kind in Image.registered_extensions().items() if kind in Image.OPEN)
NOTES = 5
"""Images that cannot be read and are named on the console."""


@dataclass(frozen=True)
class ClassFolder:
    """The images of a folder with one sub-folder a class."""

    root: Path
    names: list[str]
    """The classes' folders, sorted."""
    images: list[tuple[Path, int]]
    """Every image and the number of its folder, in the order of the names."""

    def labels(self, classes: Sequence[str]) -> list[str]:
        """For each sub-folder the label that its images get: a number that counts ``classes``, or a name.

        By name where every sub-folder is called as a class is (case set aside); else by order, where there are as many
        sub-folders as classes: the n-th in sorted order is the n-th class, as ImageNet's n01440764, … are.

        Raises:
            DataError: neither.
        """
        by_name = {name.strip().casefold(): number for number, name in reversed(list(enumerate(classes)))}
        strange = [name for name in self.names if name.casefold() not in by_name]
        if not strange:
            numbers = [by_name[name.casefold()] for name in self.names]
        elif len(self.names) == len(classes):
            numbers = list(range(len(classes)))
        else:
            raise DataError(
                f"--folder {self.root}: {len(strange)} of its {len(self.names)} sub-folders are called as no class is, "
                f"such as {strange[0]!r}, and there are {len(classes)} classes: name folders as the classes, or have "
                "one for each class, in the same order when sorted"
            )
        decimal = any(name.strip().isdecimal() for name in classes)  # "7" would then be the class of that name
        return [classes[number] if decimal else str(number) for number in numbers]


def find_classes(root: Path) -> ClassFolder:
    """The classes and images of a folder.

    Raises:
        DataError: it does not exist, or is not a folder for each class.
    """
    if not root.is_dir():
        raise DataError(
            f"--folder {root} does not exist, or is no folder; expected one with a sub-folder for each class"
        )
    names = sorted(path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    images = [
        (path, number)
        for number, name in enumerate(names)
        for path in sorted((root / name).rglob("*"))
        if path.suffix.lower() in ENDINGS
    ]
    if not images:
        raise DataError(f"--folder {root}: no image in its {len(names)} sub-folders; expected one for each class")
    return ClassFolder(root, names, images)


def read_folder(
    folder: ClassFolder,
    labels: Sequence[str],
    *,
    transform: Callable[[Any], Tensor],
    pictures: Pictures,
    rank: int,
    world_size: int,
    batch: int,
    workers: int,
) -> Iterator[HeldoutBatch]:
    """This rank's share of the images, without captions, in batches of at most ``batch``.

    Args:
        labels: of each sub-folder, see :meth:`ClassFolder.labels`.
        transform: RGB image → (3, H, W) float32; picklable when there are workers.
        pictures: which images are taken; what cannot be read is counted in ``faults`` and named on the console.
        workers: loader processes.
    """
    share = _Share(folder, transform, pictures, range(rank, len(folder.images), world_size))
    options: dict[str, Any] = {"batch_size": batch, "num_workers": workers, "collate_fn": list}
    if workers:
        options = {**loader_options(), "persistent_workers": False, **options}
    loader = DataLoader(share, **options)
    named, faults = 0, Counter[str]()
    for rows in loader:
        good = [(number, image) for number, image, _, _ in rows if image is not None]
        for _, _, reason, detail in rows:
            faults.update([f"folder/{reason}"] if reason else [])
            if reason and named < NOTES:
                named += 1
                log.warning("dropped from the held-out images: %s: %s", reason, detail)
        if not good:
            continue
        paths = [folder.images[number] for number, _ in good]
        yield HeldoutBatch(
            images=torch.stack([image for _, image in good]),
            texts=torch.zeros(len(good), 1, dtype=torch.int64),
            captions=[[] for _ in good],
            keys=[str(path.relative_to(folder.root)) for path, _ in paths],
            labels=[labels[number] for _, number in paths],
            index=torch.tensor([number for number, _ in good], dtype=torch.int64),
            faults=dict(faults),
        )
        faults.clear()


class _Share(Dataset):
    """(number, pixels or None, reason, detail) of one rank's images."""

    def __init__(
        self, folder: ClassFolder, transform: Callable[[Any], Tensor], pictures: Pictures, rows: range
    ) -> None:
        self.folder, self.transform, self.pictures, self.rows = folder, transform, pictures, rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> tuple[int, Tensor | None, str, str]:
        number = self.rows[row]
        path = self.folder.images[number][0]
        data = None
        with contextlib.suppress(OSError):
            data = path.read_bytes()
        if data is None:
            return number, None, "unreadable_file", str(path)
        try:
            return number, self.transform(open_rgb(data, self.pictures)), "", ""
        except SampleFault as fault:
            return number, None, fault.reason, f"{path}: {fault}"
