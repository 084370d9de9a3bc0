"""``--config run.yaml`` plus dotted flags → one checked :class:`~disco_ds.config.schema.RunConfig`.

The flags are made from the fields of RunConfig, so there is one list of options and one place that explains them. A
value given as a flag wins over the file, the file over the default. Lists take several words or the flag several
times; a word is never split, since shard names may hold commas (``'{00,07}.tar'``).
"""

from __future__ import annotations

import argparse
import json
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from disco_ds.config.schema import RunConfig
from disco_ds.errors import ConfigError, nearest


def leaf_fields(model: type[BaseModel] = RunConfig, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every option as (dotted name, field), groups opened: ``("optimizer.lr", …)``."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from leaf_fields(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name, field


def _members(annotation: Any) -> list[Any]:
    """The alternatives of a type: unions opened, ``Annotated`` reduced to what it annotates."""
    if get_origin(annotation) is Annotated:
        return _members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [member for part in get_args(annotation) for member in _members(part)]
    return [annotation]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def _describe(field: FieldInfo) -> str:
    text = " ".join((field.description or "").split()).replace("%", "%%")
    if field.default is PydanticUndefined:
        return f"{text} (required)"
    default = field.default
    if isinstance(default, (list, tuple)):
        default = " ".join(map(str, default))
    return f"{text} (default: {str(default).replace('%', '%%')})"


def _metavar(field: FieldInfo) -> str:
    names = []
    for member in _members(field.annotation):
        if get_origin(member) is Literal:
            names += [str(value) for value in get_args(member)]
        elif member is not type(None) and not _is_list(member):
            names.append(_WORDS.get(get_origin(member) or member, "VALUE"))
    return "|".join(dict.fromkeys(names)) or "VALUE"


def _is_list(member: Any) -> bool:
    return get_origin(member) in (list, tuple)


_WORDS = {str: "TEXT", dict: "JSON", bool: "true|false", int: "INT", float: "FLOAT", Path: "PATH"}


def build_parser(prog: str) -> argparse.ArgumentParser:
    """The parser of ``launch/train.py``: the three flags of the launch itself, then every field of RunConfig."""
    parser = _Parser(
        prog=prog,
        allow_abbrev=False,
        usage=f"{prog} [--config FILE] [--ds_config FILE] [--FIELD VALUE ...]",
        description="Train a CLIP-like model with the exact distributed contrastive loss on DeepSpeed.",
        epilog="example: deepspeed launch/train.py --ds_config ds_configs/zero2.json --model.name ViT-B-32 "
        "--data.train '/data/{00000..00099}.tar' --global_batch 32768 --samples 50000000",
    )
    parser.add_argument("--config", metavar="FILE", help="run file, YAML or JSON, with the fields below; flags win")
    parser.add_argument("--ds_config", metavar="FILE", help="DeepSpeed config (default: ds_configs/zero2.json)")
    parser.add_argument(
        "--plan", choices=["auto"], help="let the planner fill what is left open, for the device it finds"
    )
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # added by the deepspeed launcher
    groups: dict[str, Any] = {}
    for dotted, field in leaf_fields():
        section = dotted.rpartition(".")[0]
        if section not in groups:
            groups[section] = parser.add_argument_group(section or "run")
        extra: dict[str, Any] = {}
        names = [f"--{dotted}"]
        if dotted == "logging.profile_steps":
            names.append("--profile")
            extra = {"nargs": "?", "const": "3"}
        if any(_is_list(member) for member in _members(field.annotation)):
            extra = {"nargs": "+", "action": "extend"}
        elif field.annotation is bool:
            extra = {"nargs": "?", "const": "true"}
        groups[section].add_argument(
            *names, dest=dotted, default=None, metavar=_metavar(field), help=_describe(field), **extra
        )
    return parser


def _flag_value(dotted: str, field: FieldInfo, words: str | list[str]) -> Any:
    """The words behind one flag as the value that pydantic then checks."""
    members = _members(field.annotation)
    if isinstance(words, list):
        scalar = any(not _is_list(member) and member is not type(None) for member in members)
        if len(words) > 1 or not scalar:
            return None if words in (["null"], ["None"]) and type(None) in members else words
        words = words[0]
    if type(None) in members and words in ("null", "None"):
        return None
    if any(get_origin(member) is dict for member in members):
        try:
            return json.loads(words)
        except json.JSONDecodeError as error:
            raise ConfigError(f"--{dotted} expects a JSON object: {error}; found {words!r}") from None
    return words


def read_file(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML or JSON file.

    Raises:
        ConfigError: the file is missing, does not parse, or holds something else than a mapping.
    """
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: cannot be read ({error.strerror})") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: not valid YAML or JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path}: expected a mapping of fields, found {type(content).__name__}")
    return content


def _set(target: dict[str, Any], dotted: str, value: Any, source: str) -> None:
    *groups, leaf = dotted.split(".")
    for group in groups:
        target = target.setdefault(group, {})
        if not isinstance(target, dict):
            raise ConfigError(f"{source}: {group} must be a group of fields, found {target!r}")
    target[leaf] = value


def _tuple_length(field: FieldInfo) -> int | None:
    """How many values the field takes, where that is a fixed number."""
    return len(get_args(field.annotation)) if get_origin(field.annotation) is tuple else None


def _explain(error: ValidationError, flags: set[str], source: str) -> str:
    fields = dict(leaf_fields())
    known = list(fields)
    groups = sorted({name.rpartition(".")[0] for name in known if "." in name})
    lines = []
    for item in error.errors():
        path = [str(part) for part in item["loc"]]
        # a union adds its branch to the path (data.train.str): cut back to the field itself
        name = next((d for n in range(len(path), 0, -1) if (d := ".".join(path[:n])) in known), ".".join(path))
        if item["type"] == "missing" and name in groups:  # a section without which there is no run: its first field
            name = next(leaf for leaf, field in fields.items() if leaf.startswith(f"{name}.") and field.is_required())
        where = f"--{name}" if name in flags else f"{source}: {name}" if name else source
        found = item["input"]
        length = _tuple_length(fields[name]) if name in fields else None
        if length is not None and item["type"] in ("missing", "too_long", "tuple_type"):
            given = list(found) if isinstance(found, (list, tuple)) else [found]
            lines.append(f"{where}: expected {length} values, found {len(given)}: {' '.join(map(str, given))}")
        elif item["type"] == "extra_forbidden":
            lines.append(f"{where}: there is no such field.{nearest(name, known + groups)}")
        elif item["type"] == "missing":
            lines.append(f"{where}: required and not given (--{name} VALUE, or {name} in the file of --config)")
        elif item["type"] == "value_error":
            lines.append(f"{where}: {item['ctx']['error']}" if path else str(item["ctx"]["error"]))
        else:
            lines.append(f"{where}: {item['msg']}; found {found!r}")
    return "\n".join(dict.fromkeys(lines))


@dataclass(frozen=True)
class Launch:
    """What the command line says beside the run's fields."""

    ds_config: str | None
    """Path given as ``--ds_config``."""
    plan: bool
    """Whether ``--plan auto`` was given."""


def parse(argv: Sequence[str], *, prog: str, demo: Path) -> tuple[RunConfig, Launch]:
    """Read the command line and the file that it names.

    Args:
        argv: arguments without the program's name.
        demo: run file that is used when neither ``--config`` nor ``--data.train`` is given.

    Returns:
        The checked configuration, and the flags of the launch itself.

    Raises:
        ConfigError: anything wrong with flags or file; the message names each faulty field.
        SystemExit: ``--help`` was asked for.
    """
    parser = build_parser(prog)
    arguments, unknown = parser.parse_known_args(list(argv))
    options = [option.lstrip("-") for action in parser._actions for option in action.option_strings]
    if unknown:
        flag = unknown[0].split("=")[0]
        raise ConfigError(
            f"{flag}: there is no such flag.{nearest(flag.lstrip('-'), options)} `{prog} --help` lists all of them."
            if flag.startswith("-")
            else f"{flag!r}: an argument that no flag takes; fields are given as --field value"
        )
    given = vars(arguments)
    config_file = given.pop("config")
    launch = Launch(given.pop("ds_config"), given.pop("plan") is not None)
    if config_file is None and given["data.train"] is None:
        config_file = demo
    content = read_file(config_file) if config_file is not None else {}
    source = str(config_file) if config_file is not None else "command line"
    fields = dict(leaf_fields())
    flags = {dotted for dotted, words in given.items() if dotted in fields and words is not None}
    for pair in (("steps", "samples"),):  # a length on the command line replaces the file's, whatever its unit
        if flags & set(pair):
            for name in pair:
                content.pop(name, None)
    for dotted in flags:
        _set(content, dotted, _flag_value(dotted, fields[dotted], given[dotted]), source)
    try:
        return RunConfig.model_validate(content), launch
    except ValidationError as error:
        raise ConfigError(_explain(error, flags, source)) from None
