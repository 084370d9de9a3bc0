"""What ``disco-data make`` reads: a folder of images with their captions beside them or in its names, or a table."""

from __future__ import annotations

import csv
import hashlib
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from disco_ds.errors import DataError

IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif")
BESIDE = ("json", "cls")
"""Files that are taken along when they lie beside an image, as its caption does."""
TABLES = (".csv", ".tsv", ".parquet")
IMAGE_COLUMNS = (
    "image", "image_path", "img_path", "img", "image_file", "filepath", "file_path", "filename", "file_name", "file",
    "path"
)  # fmt: skip
CAPTION_COLUMNS = ("caption", "text", "title", "sentence", "description", "alt_text", "alt")


@dataclass(frozen=True)
class Entry:
    """One sample to be written, or the reason why it cannot be."""

    name: str
    """How the sample is called in the list of what is missing: its path or row."""
    key: str = ""
    image: str | bytes = b""
    """Path, or the encoded image itself."""
    files: tuple[tuple[str, str], ...] = ()
    """(extension, path) of files that are copied: captions and what else lies beside the image."""
    texts: tuple[tuple[str, str], ...] = ()
    """(extension, text) of files that are written."""
    group: str = ""
    """By what the split is drawn: samples of one group stand on one side of it."""
    fault: str | None = None


@dataclass(frozen=True)
class Options:
    """What decides the content of the shards, beside the source."""

    captions: str = "beside"
    """"beside": a .txt of the same name; "folder": the name of the folder is the class."""
    template: str = "a photo of a {}."
    image_column: str | None = None
    caption_column: str | None = None
    image_root: str | None = None
    """Folder that a table's paths start from; None: the table's own."""
    samples_per_shard: int = 1000
    val_fraction: float = 0.0


@dataclass
class Listing:
    """A source that was looked through. ``entries`` may be called again and gives the same each time."""

    fingerprint: str
    """Changes when files come, go or change their size."""
    total: int | None
    """Entries, where that is known before reading."""
    classes: list[str] = field(default_factory=list)
    _source: Any = None

    def entries(self) -> Iterator[Entry]:
        """Every entry in an order that depends on the source alone."""
        return iter(self._source())


def list_entries(source: Path, options: Options) -> Listing:
    """Look through a source.

    Raises:
        DataError: it does not exist, holds no images, or lacks the columns.
    """
    if source.is_dir():
        return _folder(source, options)
    if not source.is_file():
        raise DataError(f"SOURCE {source} does not exist; expected a folder of images or a .csv, .tsv or .parquet file")
    if source.suffix.lower() not in TABLES:
        raise DataError(f"SOURCE {source}: expected a folder of images or a file that ends in {', '.join(TABLES)}")
    state = source.stat()
    root = Path(options.image_root).expanduser() if options.image_root else source.parent
    table = _Parquet(source, options) if source.suffix.lower() == ".parquet" else _Csv(source, options)
    return Listing(
        _hash([source.name, state.st_size, state.st_mtime_ns]), table.total, _source=lambda: _rows(table, root)
    )


def _hash(what: object) -> str:
    return hashlib.sha256(repr(what).encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _folder(source: Path, options: Options) -> Listing:
    sizes = dict(_files(source, ""))
    images = [name for name in sizes if name.lower().endswith(IMAGES)]
    if not images:
        endings = sorted({PurePosixPath(name).suffix or name for name in sizes})[:8]
        held = f"it holds {', '.join(endings)}" if endings else "it is empty"
        raise DataError(f"SOURCE {source}: no image ({', '.join(IMAGES)}) in or below this folder; {held}")
    images.sort(key=_hash)  # mixed, so that a shard does not hold one folder alone
    keys = _keys(images)
    # Endings in any case; where several files differ only in that, the first by name.
    stems = {_stem(name): name for name in sorted(sizes, reverse=True)}

    def entries() -> Iterator[Entry]:
        for name in images:
            yield _of_folder(source, name, keys[name], stems, options)
        if options.captions == "beside":
            pictured = {os.path.splitext(name)[0] for name in images}
            for name in sorted(sizes):
                if name.lower().endswith(".txt") and os.path.splitext(name)[0] not in pictured:
                    yield Entry(name, fault="no image of this name")

    classes = sorted({_class(name) for name in images} - {""}) if options.captions == "folder" else []
    return Listing(_hash(sorted(sizes.items())), len(images), classes, _source=entries)


def _files(folder: Path, under: str) -> Iterator[tuple[str, int]]:
    """Path below the source and bytes of every file that is not hidden."""
    try:
        with os.scandir(folder) as found:
            for item in found:
                if item.name.startswith("."):
                    continue
                if item.is_dir():
                    yield from _files(folder / item.name, f"{under}{item.name}/")
                elif item.is_file():
                    yield f"{under}{item.name}", item.stat().st_size
                elif item.is_symlink():  # to nothing: it is listed as missing
                    yield f"{under}{item.name}", -1
    except OSError as error:
        raise DataError(f"SOURCE {folder} cannot be read: {error.strerror}") from error


def _stem(name: str) -> str:
    base, ending = os.path.splitext(name)
    return base + ending.lower()


def _class(name: str) -> str:
    return PurePosixPath(name).parent.name.replace("_", " ")


def _keys(images: Sequence[str]) -> dict[str, str]:
    """A key for each image: its path without the ending, no dots in its last part, no two alike."""
    taken: set[str] = set()
    keys: dict[str, str] = {}
    for name in sorted(images):
        folder, _, base = os.path.splitext(name)[0].rpartition("/")
        plain = re.sub(r"^__", "_", (f"{folder}/" if folder else "") + base.replace(".", "_"))
        key, number = plain, 2
        while key in taken:
            key, number = f"{plain}-{number}", number + 1
        taken.add(key)
        keys[name] = key
    return keys


def _of_folder(source: Path, name: str, key: str, stems: dict[str, str], options: Options) -> Entry:
    base = os.path.splitext(name)[0]
    beside = [(end, str(source / stems[f"{base}.{end}"])) for end in BESIDE if f"{base}.{end}" in stems]
    image = str(source / name)
    if options.captions == "folder":
        label = _class(name)
        if not label:
            return Entry(name, fault="lies in no class folder")
        files = [item for item in beside if item[0] != "cls"]
        texts = (("txt", options.template.replace("{}", label)), ("cls", label))
        return Entry(name, key, image, tuple(files), texts, group=key)
    if f"{base}.txt" not in stems:
        return Entry(name, fault="no .txt of this name")
    return Entry(name, key, image, (("txt", str(source / stems[f"{base}.txt"])), *beside), group=key)


class _Csv:
    """Rows of a .csv or .tsv file with a line of column names."""

    def __init__(self, path: Path, options: Options) -> None:
        csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
        self.path = path
        self.total = None
        self.delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
        with self._open() as file:
            names = next(csv.reader(file, delimiter=self.delimiter), [])
        self.image, self.caption = _columns(names, path, options)

    def _open(self) -> Any:
        return open(self.path, newline="", encoding="utf-8-sig", errors="replace")

    def rows(self) -> Iterator[tuple[Any, Any]]:
        """(image, caption) of each row."""
        with self._open() as file:
            reader = csv.DictReader(file, delimiter=self.delimiter)
            try:
                for row in reader:
                    yield row[self.image], row[self.caption]
            except csv.Error as error:
                raise DataError(f"SOURCE {self.path}, line {reader.line_num}: {error}") from error


class _Parquet:
    """Rows of a .parquet file; images may be paths, bytes, or Hugging Face's {"bytes": …, "path": …}."""

    def __init__(self, path: Path, options: Options) -> None:
        try:
            from pyarrow import ArrowException, parquet
        except ImportError as error:
            raise DataError(f'{path}: reading it needs pyarrow: pip install "disco-ds[parquet]"') from error
        self.path = path
        try:
            self.file = parquet.ParquetFile(path)
        except (ArrowException, OSError) as error:
            raise DataError(f"SOURCE {path} is not a parquet file: {error}") from error
        self.image, self.caption = _columns(self.file.schema_arrow.names, path, options)
        self.total = self.file.metadata.num_rows

    def rows(self) -> Iterator[tuple[Any, Any]]:
        """(image, caption) of each row."""
        from pyarrow import ArrowException

        try:
            for batch in self.file.iter_batches(batch_size=256, columns=[self.image, self.caption]):
                rows = batch.to_pydict()
                yield from zip(rows[self.image], rows[self.caption], strict=True)
        except (ArrowException, OSError) as error:
            raise DataError(f"SOURCE {self.path} cannot be read to its end: {error}") from error


def _columns(names: Sequence[str], path: Path, options: Options) -> tuple[str, str]:
    there = ", ".join(map(repr, names)) or "none"
    found = []
    for flag, given, common in (
        ("--image-column", options.image_column, IMAGE_COLUMNS),
        ("--caption-column", options.caption_column, CAPTION_COLUMNS),
    ):
        lower = {name.lower(): name for name in reversed(names)}
        if given is not None and given not in names:
            raise DataError(f"{flag} {given!r}: {path} has no such column; its columns are {there}")
        name = given or next((lower[word] for word in common if word in lower), None)
        if name is None:
            usual = ", ".join(common[:4])
            raise DataError(f"{path}: no column is called {usual}, …; its columns are {there}. Give {flag} NAME")
        found.append(name)
    return found[0], found[1]


def _rows(table: _Csv | _Parquet, root: Path) -> Iterator[Entry]:
    for number, (image, caption) in enumerate(table.rows()):
        name = f"row {number}"
        if isinstance(image, dict):
            image = image.get("bytes") or image.get("path")
        if not image:
            yield Entry(name, fault=f"nothing in column {table.image!r}")
            continue
        group = str(number)
        if isinstance(image, str):
            if re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", image):
                raise DataError(
                    f"{table.path} {name}: {image!r} is a URL; download the images first (img2dataset does, and writes "
                    "shards itself)"
                )
            name, group, image = f"{name}: {image}", image, str(root / image)
        text = "" if caption is None else str(caption)
        yield Entry(name, f"{number:09d}", image, texts=(("txt", text),), group=group)
