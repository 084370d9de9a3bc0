"""Every option as JSON Schema has it, from the fields of the schema: for flags, ``--help`` and docs/options.md."""

from __future__ import annotations

import json
from typing import Any

from disco_ds.config.schema import LaunchConfig, RunConfig

_WORDS = {"boolean": "true|false", "integer": "INT", "number": "FLOAT", "object": "JSON", "string": "TEXT"}
_RUN = RunConfig.model_json_schema()

LAUNCH: dict[str, dict[str, Any]] = LaunchConfig.model_json_schema()["properties"]
"""Options of the command line alone, by name."""
SECTIONS: dict[str, dict[str, Any]] = {"run": _RUN} | {
    name: _RUN["$defs"][option["$ref"].rpartition("/")[2]]
    for name, option in _RUN["properties"].items()
    if "$ref" in option
}
"""The groups of a run's options; "run" has those that are in no group."""
OPTIONS: dict[str, dict[str, Any]] = {
    f"{section}.{name}".removeprefix("run."): option
    for section, schema in SECTIONS.items()
    for name, option in schema["properties"].items()
    if "$ref" not in option
}
"""Every option of a run by its dotted name (``optimizer.lr``): anyOf or type, default, description."""


def kinds(option: dict[str, Any]) -> list[dict[str, Any]]:
    """The types that a value may have."""
    return option.get("anyOf", [option])


def takes(option: dict[str, Any], kind: str) -> bool:
    """Whether a value may be of this type of JSON Schema: "array", "null"."""
    return any(other["type"] == kind for other in kinds(option))


def type_words(option: dict[str, Any]) -> str:
    """What one value looks like: ``INT``, ``none|image|text``."""
    words: list[str] = []
    for kind in kinds(option):
        if kind["type"] == "array":
            words.append(type_words(kind["prefixItems"][0] if "prefixItems" in kind else kind["items"]))
        elif "enum" in kind or "const" in kind:
            words += kind.get("enum") or [kind["const"]]
        elif kind["type"] != "null" and "contentSchema" not in kind:  # (a text that holds JSON is an object)
            words.append("PATH" if kind.get("format") == "path" else _WORDS[kind["type"]])
    return "|".join(dict.fromkeys(words))


def default_words(option: dict[str, Any]) -> str:
    """The default as it is typed."""
    default = option.get("default", "required")
    words = default if isinstance(default, list) else [default]
    return " ".join(word if isinstance(word, str) else json.dumps(word) for word in words)


def page() -> str:
    """docs/options.md, which ``python -m disco_ds.config.options`` prints."""
    lines = [
        "# Options\n",
        "What `disco-train --help` says, as a page. `optimizer.lr` is `--optimizer.lr 1e-3` on the command line, and",
        "`lr: 1.0e-3` under `optimizer:` in a run file (`--config run.yaml`). `null` means: not given.",
    ]
    for title, schema in {"command line": LaunchConfig.model_json_schema(), **SECTIONS}.items():
        lines += [
            f"\n## {title}\n",
            f"{schema['description']}\n",
            "| option | value | default | |",
            "|---|---|---|---|",
        ]
        for name, option in schema["properties"].items():
            if "$ref" not in option:
                dotted = f"{title}.{name}" if f"{title}.{name}" in OPTIONS else name
                value = type_words(option).replace("|", ", ") + (" …" if takes(option, "array") else "")
                lines.append(f"| `{dotted}` | {value} | `{default_words(option)}` | {option['description']} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
