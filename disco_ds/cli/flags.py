"""The options of a run as flags of a command."""

from __future__ import annotations

import argparse
from typing import Any

from disco_ds.config.options import OPTIONS, default_words, kinds, takes, type_words


def add_option(parser: Any, name: str, option: dict[str, Any], **keywords: Any) -> None:
    """Add the flag ``--name`` of an option; keywords replace what argparse is told. What is not given has no value."""
    if takes(option, "array"):  # words are not split: a brace list of shards may hold commas
        more: dict[str, Any] = {"nargs": "+", "action": "extend"}
    elif option.get("type") == "boolean" or "without_value" in option:
        more = {"nargs": "?", "const": option.get("without_value", "true")}
    else:
        more = {}
    more |= {
        "metavar": type_words(option),
        "help": f"{option['description']} ({default_words(option)})".replace("%", "%%"),
    }
    names = [f"--{name}", option.get("flag", f"--{name}")]
    parser.add_argument(*dict.fromkeys(names), **{"dest": name, "default": argparse.SUPPRESS, **more, **keywords})


def given_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options of a run that were given as flags, by dotted name, for :func:`disco_ds.config.read.read_run`."""
    return {name: _value(OPTIONS[name], words) for name, words in vars(arguments).items() if name in OPTIONS}


def _value(option: dict[str, Any], words: Any) -> Any:
    scalar = any(kind["type"] not in ("array", "null") for kind in kinds(option))
    if isinstance(words, list) and len(words) == 1 and scalar:
        words = words[0]  # one shard, a file of class names
    return None if words in ("null", "None", ["null"], ["None"]) and takes(option, "null") else words
