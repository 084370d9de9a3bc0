"""A run file, and values given by name → one checked :class:`~disco_ds.config.schema.RunConfig`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from disco_ds.config.options import OPTIONS, SECTIONS
from disco_ds.config.schema import RunConfig
from disco_ds.errors import ConfigError, nearest

DEMO = Path(__file__).with_name("demo.yaml")
"""The run that is made when none is described."""
DS_CONFIGS = Path(__file__).parent.parent / "ds_configs"
"""Folder of the ds_configs that can be named without their path."""

Model = TypeVar("Model", bound=BaseModel)


def read_run(file: str | Path | None, given: Mapping[str, Any], flags: Mapping[str, str] | None = None) -> RunConfig:
    """The run that a file describes, with the given fields in place of the file's.

    Args:
        file: YAML or JSON with the fields of RunConfig; None: everything is given.
        given: values by dotted name, as YAML or the command line has them.
        flags: what messages call a given field, where that is not ``--name``, and what the file ("config").

    Raises:
        ConfigError: the file cannot be read, or a field is wrong; the message has a line for each, with flag or file.
    """
    flags = {name: f"--{name}" for name in given} | dict(flags or {})
    content = _read_mapping(file, flags.get("config", "")) if file is not None else {}
    source = str(file) if file is not None else "command line"
    if given.keys() & {"steps", "samples"}:  # a length that is given replaces the file's, whatever its unit
        content = {name: value for name, value in content.items() if name not in ("steps", "samples")}
    content.setdefault("data", {})  # so that what is missing is data.train
    for name, value in given.items():
        section, _, leaf = name.rpartition(".")
        target = content.setdefault(section, {}) if section else content
        if not isinstance(target, dict):
            raise ConfigError(f"{source}: {section}: expected a group of fields; found {target!r}")
        target[leaf] = value
    return checked(RunConfig, content, {name: flags[name] for name in given}, source)


def checked(model: type[Model], content: Mapping[str, Any], flags: Mapping[str, str], source: str) -> Model:
    """The model of the content; ``flags`` are the fields that were given as flags, and how those are called.

    Raises:
        ConfigError: fields are wrong; each is told in a line of its own.
    """
    try:
        return model.model_validate(content)
    except ValidationError as error:
        problems: dict[tuple[str, str], list[str]] = {}
        for item in error.errors():
            path = [str(part) for part in item["loc"]]
            # a union adds its branch to the path (data.train.str): cut back to the field itself
            heads = [".".join(path[:length]) for length in range(len(path), 0, -1)]
            name = next((head for head in heads if head in OPTIONS), ".".join(path))
            where = flags.get(name, f"{source}: {name}") + ": " if name else ""
            expected, found = _problem(item, name)
            problems.setdefault((where, found), []).append(expected)
        lines = [where + " or ".join(dict.fromkeys(those)) + found for (where, found), those in problems.items()]
        raise ConfigError("\n".join(lines)) from None


def find_ds_config(name: str | Path, flag: str = "--ds_config") -> Path:
    """The file that is meant by a path, or by the name of a shipped ds_config (``zero2``).

    Raises:
        ConfigError: it is neither.
    """
    shipped = {path.stem: path for path in sorted(DS_CONFIGS.glob("*.json"))}
    path = Path(name) if Path(name).is_file() else shipped.get(str(name))
    if path is None:
        hint = nearest(Path(name).stem, list(shipped))
        raise ConfigError(f"{flag} {name}: neither a file nor one of those shipped: {', '.join(shipped)}.{hint}")
    return path


def _read_mapping(path: str | Path, flag: str) -> dict[str, Any]:
    where = f"{flag} {path}".strip()
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{where}: cannot be read ({error.strerror})") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: not valid YAML or JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{where}: expected a mapping of fields, found {type(content).__name__}")
    return content


def _problem(item: Any, name: str) -> tuple[str, str]:
    """One of pydantic's errors in words: what is expected, what was found."""
    kind, found = item["type"], item["input"]
    length = OPTIONS.get(name, {}).get("maxItems")
    if length is not None and kind in ("missing", "too_long", "tuple_type"):
        values = list(found) if isinstance(found, (list, tuple)) else [found]
        return f"expected {length} values", f", found {len(values)}: {' '.join(map(str, values))}"
    if kind == "extra_forbidden":
        return f"there is no such field.{nearest(name, [*OPTIONS, *SECTIONS])}", ""
    if kind == "missing":
        return f"required and not given (--{name} VALUE, or {name} in the run file)", ""
    return (str(item["ctx"]["error"]), "") if kind == "value_error" else (item["msg"], f"; found {found!r}")
