"""Raw samples out of a tar shard, with the position of every sample known.

webdataset opens shards and splits names into key and extension. Its tar iterator is not used: it hides the number of
each sample, reads the bytes of samples that are passed over, and takes a damaged header for the end.
"""

from __future__ import annotations

import logging
import os
import random
import re
import tarfile
import time
import zlib
from array import array
from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import IO, Any
from urllib.parse import urlparse

from webdataset.gopen import Pipe, gopen, gopen_schemes
from webdataset.tariterators import base_plus_ext

from disco_ds.data.sources import base_name, is_remote
from disco_ds.errors import DataError

log = logging.getLogger("disco_ds.data")

_META = re.compile(r"__[^/]*__($|/)")  # what webdataset skips: "__worker__" and the like
_spread = random.SystemRandom()  # not the generators of augmentation, which a retry must leave as they are
_READ_ERRORS = (tarfile.TarError, OSError, EOFError, zlib.error)


class ShardFault(Exception):
    """A shard could not be read, or not to its end. ``reason`` is one of missing_shard, unreadable_shard, not_a_tar,
    truncated_shard, damaged_shard.
    """

    def __init__(self, reason: str, shard: str, detail: object, final: bool = False) -> None:
        super().__init__(f"{shard}: {detail}")
        self.reason = reason
        self.final = final
        """Reading again cannot help: every sample was given, or there is no such shard."""
        self.last: RawSample | None = None
        """The sample before an end without an end mark: it is whole, or lacks what was to come."""


@dataclass
class RawSample:
    """The files of a shard that share one key, as bytes."""

    shard: str
    number: int
    """Position in the shard, counted from 0 over all keys, good or bad."""
    key: str
    files: dict[str, bytes] = field(default_factory=dict)
    """Contents by extension (lower case, no dot); only the wanted ones."""
    extensions: list[str] = field(default_factory=list)
    """Every extension of this key, in the archive's order."""
    duplicates: int = 0
    """Files that were left out because their key and extension were there already."""

    @property
    def name(self) -> str:
        """``shard.tar#key``, for messages and logs."""
        return f"{base_name(self.shard)}#{self.key}"


@dataclass(frozen=True)
class Access:
    """What is done when a shard cannot be read."""

    retries: int = 0
    """Attempts after a remote shard failed, in a row without a new sample."""
    retry_s: float = 1.0
    """Seconds before the first further attempt, give or take half; doubled for each one after it."""


ONCE = Access()


def read_shard(
    shard: str, wanted: Collection[str] | None, first: int = 0, step: int = 1, access: Access = ONCE
) -> Generator[RawSample, None, None]:
    """Samples number ``first``, ``first + step``, … of a shard, in order; the bytes of others are not kept.

    A remote shard that fails is opened again, and what it gave before is passed over: no sample comes twice.

    Args:
        shard: a path, URL or ``pipe:`` command.
        wanted: extensions to read (lower case, no dot); None: all.

    Raises:
        ShardFault: after the samples before the fault were given. A sample that the fault cuts is not given.
    """
    attempt, place = 0, first
    before: str | None = None
    while True:
        try:
            with closing(_read_once(shard, wanted, place, step)) as raws:
                for raw in raws:
                    attempt, place, before = 0, raw.number + step, None
                    yield raw
            return
        except ShardFault as fault:
            # Short or damaged at one place twice: it is the shard that is so, and not the way to it.
            same = fault.reason != "unreadable_shard" and before == fault.reason
            if attempt >= access.retries or same or fault.final or not is_remote(shard):
                if fault.last is not None:
                    yield fault.last
                raise
            wait_s = access.retry_s * 2**attempt * _spread.uniform(0.5, 1.5)
            attempt, before = attempt + 1, fault.reason
            log.warning("%s; attempt %d of %d in %.1f s", fault, attempt, access.retries, wait_s)
            time.sleep(wait_s)


def _read_once(shard: str, wanted: Collection[str] | None, first: int, step: int) -> Generator[RawSample, None, None]:
    stream = _open(shard)
    clean = False
    try:
        yield from _samples(shard, stream, wanted, first, step)
        clean = True
    finally:
        try:
            stream.close()
        except Exception as error:  # a pipe says only now that its command failed
            if clean:
                raise ShardFault("unreadable_shard", shard, error, final=True) from error


def _open(shard: str) -> IO[bytes]:
    try:
        scheme = urlparse(shard).scheme if is_remote(shard) else ""
        if scheme in ("", "file") or scheme in gopen_schemes or shard.startswith("pipe:"):
            return gopen(shard, "rb")
        try:
            import fsspec
        except ImportError as error:
            raise DataError(f"{shard}: webdataset cannot open {scheme}://, and fsspec is not installed") from error
        return fsspec.open(shard, "rb").open()
    except FileNotFoundError as error:
        raise ShardFault("missing_shard", shard, error, final=True) from error
    except DataError:
        raise
    except Exception as error:  # fsspec's file systems raise what they like
        raise ShardFault("unreadable_shard", shard, error) from error


def _samples(
    shard: str, stream: IO[bytes], wanted: Collection[str] | None, first: int, step: int
) -> Iterator[RawSample]:
    started = False
    sample: RawSample | None = None
    offsets = None
    try:
        if step > 1 and not is_remote(shard):
            state = os.fstat(stream.fileno())  # what was known of another file of this name does not hold
            offsets = _sample_offsets(shard, state.st_size, state.st_mtime_ns)
        archive = _open_tar(stream)
        started = True
        members = _members(archive) if offsets is None else _members_of(archive, offsets, first, step)
        for number, key, extension, member in members:
            if sample is not None and number != sample.number:
                yield sample
                sample = None
            if number < first or (number - first) % step:
                continue
            if sample is None:
                sample = RawSample(shard, number, key)
            if extension in sample.extensions:
                sample.duplicates += 1
                continue
            sample.extensions.append(extension)
            if wanted is None or extension in wanted:
                content = archive.extractfile(member)
                assert content is not None  # it is a regular file
                sample.files[extension] = content.read()
                if len(sample.files[extension]) != member.size:
                    raise tarfile.ReadError(f"unexpected end of data in {member.name}")
    except _READ_ERRORS as error:
        fault = _classified(shard, stream, error, started)
        fault.last = sample if isinstance(error, _NoEndMark) and fault.reason == "truncated_shard" else None
        raise fault from error
    if sample is not None:
        yield sample


_Member = tuple[int, str, str, tarfile.TarInfo]
"""Number and key of a sample, and one of its files: extension and header."""


def _members(archive: tarfile.TarFile) -> Iterator[_Member]:
    """Every file that is part of a sample."""
    number, before = -1, None
    while (member := archive.next()) is not None:
        archive.members = []  # type: ignore[attr-defined]  # tarfile keeps every header, which for a large shard is memory
        key, extension = _named(member)
        if key is not None:
            number, before = number + (key != before), key
            yield number, key, extension, member


def _members_of(archive: tarfile.TarFile, offsets: Sequence[int], first: int, step: int) -> Iterator[_Member]:
    """The files of samples ``first``, ``first + step``, …, by seeking to them."""
    file: Any = archive.fileobj
    for number in range(first, len(offsets) - 1, step):
        place = offsets[number]
        while place < offsets[number + 1]:
            file.seek(place)
            member = _StrictInfo.fromtarfile(archive)
            place = archive.offset  # type: ignore[attr-defined]
            key, extension = _named(member)
            if key is not None:
                yield number, key, extension, member


@lru_cache(maxsize=256)
def _sample_offsets(shard: str, size: int, changed_ns: int) -> Sequence[int] | None:
    """Where each sample of a local shard begins, in bytes, and where the last one ends, for a shard that is read in
    slices: else each of them would go through all headers. None: it is compressed, or cannot be read to its end.
    """
    offsets = array("Q")
    try:
        with tarfile.open(shard, "r:", tarinfo=_StrictInfo, errors="replace") as archive:
            for number, _, _, member in _members(archive):
                if number == len(offsets):
                    offsets.append(member.offset)
            offsets.append(archive.offset)  # type: ignore[attr-defined]
    except _READ_ERRORS:  # who reads the samples meets it too, and says so
        return None
    return offsets


def _named(member: tarfile.TarInfo) -> tuple[str | None, str]:
    """Key and extension of a member; None for what is not part of a sample."""
    if not member.isreg() or _META.match(member.name):
        return None, ""
    key, extension = base_plus_ext(member.name)
    return key, extension.lower() if key is not None else ""


def _open_tar(stream: IO[bytes]) -> tarfile.TarFile:
    """Seekable and plain if possible, since seeking over a member is free; else as a stream, unpacked on the way."""
    options: dict[str, Any] = {"tarinfo": _StrictInfo, "errors": "replace"}
    if getattr(stream, "seekable", lambda: False)():
        with suppress(tarfile.ReadError):
            return tarfile.open(fileobj=stream, mode="r:", **options)
        stream.seek(0)  # compressed perhaps
    return tarfile.open(fileobj=stream, mode="r|*", **options)


class _NoEndMark(tarfile.ReadError):
    """The archive stops between two members, without the blocks of zeros that end one."""


class _StrictInfo(tarfile.TarInfo):
    """Headers that say what is wrong: tarfile takes a damaged or missing header after the first for the end."""

    @classmethod
    def fromtarfile(cls, tarfile_: tarfile.TarFile) -> _StrictInfo:
        try:
            return super().fromtarfile(tarfile_)  # type: ignore[return-value]
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            raise
        except tarfile.EmptyHeaderError as error:  # type: ignore[attr-defined]
            if tarfile_.offset:  # type: ignore[attr-defined]
                raise _NoEndMark("the archive ends without its end mark") from error
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(f"{error} at byte {tarfile_.offset}") from error  # type: ignore[attr-defined]


def _classified(shard: str, stream: IO[bytes], error: BaseException, started: bool) -> ShardFault:
    """The fault behind a failed read. A pipe whose command failed looks like a short archive until it is closed."""
    if isinstance(stream, Pipe):
        try:
            stream.close()
        except Exception as failed:
            return ShardFault("unreadable_shard", shard, failed)
    if isinstance(error, OSError) and not isinstance(error, tarfile.TarError):
        return ShardFault("unreadable_shard", shard, error)
    if not started:
        return ShardFault("not_a_tar", shard, error)
    ended = isinstance(error, (EOFError, _NoEndMark)) or "unexpected end" in str(error) or "truncated" in str(error)
    return ShardFault("truncated_shard" if ended else "damaged_shard", shard, error)
