"""Errors whose message is written for the person who runs the training, not for the one who wrote it."""

from __future__ import annotations

import difflib
from collections.abc import Sequence


class ConfigError(ValueError):
    """The user's configuration is wrong; the message names the field or flag, what was found and what is expected."""


class DataError(RuntimeError):
    """The data cannot be trained on; the message names the shard, what was looked for and what was seen."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be used; the message names it and says why. Nothing on disk has been changed."""


class DivergedError(RuntimeError):
    """Too many steps in a row had a loss or gradient that is not finite; the message says where to look."""


def nearest(word: str, known: Sequence[str]) -> str:
    """`` Did you mean 'X'?`` for the known word nearest to ``word``, or an empty string when none is near."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if not close:  # the last part may be right and the group forgotten: --lr for --optimizer.lr
        close = [k for k in known if k.rpartition(".")[2] == word.rpartition(".")[2]][:1]
    return f" Did you mean {close[0]!r}?" if close else ""
