"""What is known of a run from its folder, whatever of it is there: a killed run leaves less than a finished one."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from disco_ds.errors import ConfigError
from disco_ds.run_layout import CONFIG, EVALS, HELDOUT, MEMORY, METRICS, RESULT, SKIPPED, STARTS
from disco_ds.telemetry.jsonlines import read_lines

Lines = list[dict[str, Any]]

_MARKS = (CONFIG, METRICS, EVALS, RESULT, STARTS)
"""A folder with one of these is a run's."""
_LARGEST = 1e300


class RunFolder:
    """One run, as its folder tells; a part that is missing or unreadable is empty.

    Attributes:
        label: short name, unique among the runs of one report.
        starts: every start of the run, oldest first.
        heldout: ``step`` of an evaluation and ``images``, those in it that are well formed; {} without any.
        unreadable: names of files that are there and could not be read.
    """

    def __init__(self, path: Path, label: str) -> None:
        self.path, self.label = path, label
        self.unreadable: list[str] = []
        self.metrics, self.evals, self.starts = (self._lines(name) for name in (METRICS, EVALS, STARTS))
        self.config, self.memory, self.result = (self._mapping(name) for name in (CONFIG, MEMORY, RESULT))
        if not self.config and self.starts and isinstance(self.starts[-1].get("config"), dict):
            self.config = self.starts[-1]["config"]
        # steps that a resumed run has made again are in the file twice
        self.skipped = list({line["step"]: line for line in self._lines(SKIPPED)}.values())
        heldout = self._mapping(HELDOUT)
        images = heldout["images"] if isinstance(heldout.get("images"), list) else []
        whole = [image for image in images if _well_formed(image)]
        self.heldout = {"step": heldout.get("step"), "images": whole} if whole else {}
        self._series: dict[str, tuple[np.ndarray, np.ndarray]] = {}

    def _mapping(self, name: str) -> dict[str, Any]:
        try:
            text = (self.path / name).read_text(encoding="utf-8")
            content = yaml.safe_load(text) if name.endswith(".yaml") else json.loads(text)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError, yaml.YAMLError):
            content = None
        if isinstance(content, dict):
            return content
        self.unreadable.append(name)
        return {}

    def _lines(self, name: str) -> Lines:
        try:
            return [line for line in read_lines(self.path / name) if 0 <= line["step"] < _LARGEST]
        except OSError:
            self.unreadable.append(name)
            return []

    def series(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values of a metric, of evaluations if it is ``val/…``; what is no finite number is NaN."""
        if name not in self._series:  # a long run has hundreds of thousands of lines
            lines = [line for line in (self.evals if name.startswith("val/") else self.metrics) if name in line]
            values = np.array([number(line[name]) for line in lines], dtype=float)
            self._series[name] = np.array([line["step"] for line in lines], dtype=float), values
        return self._series[name]

    def last(self, name: str) -> float | None:
        """The newest finite value of a metric."""
        values = self.series(name)[1]
        finite = values[np.isfinite(values)]
        return float(finite[-1]) if len(finite) else None

    @property
    def step(self) -> int:
        """The last step that anything is known of."""
        steps = [lines[-1]["step"] for lines in (self.metrics, self.evals) if lines]
        return max([*steps, int(number(self.result.get("steps"), 0))])

    @property
    def global_batch(self) -> int | None:
        """Pairs a step."""
        last = self.metrics[-1] if self.metrics else {}
        seen, batch = last.get("samples_seen"), self.config.get("global_batch")
        if self.starts and isinstance(self.starts[-1].get("global_batch"), int):
            return self.starts[-1]["global_batch"]
        if isinstance(seen, int) and seen and last["step"]:
            return round(seen / last["step"])
        return batch if isinstance(batch, int) else None

    @property
    def total_steps(self) -> int | None:
        """Length of the run."""
        for found in (self.starts[-1].get("total_steps") if self.starts else None, self.config.get("steps")):
            if isinstance(found, int):
                return found
        samples, batch = self.config.get("samples"), self.global_batch
        return -(-samples // batch) if isinstance(samples, int) and batch else None

    @property
    def finished(self) -> bool:
        """Whether the run has reached its end (a finished run that was made longer has not)."""
        ended = int(number(self.result.get("steps"), -1))
        return ended >= 0 and ended >= self.step and (self.total_steps is None or ended >= self.total_steps)

    def faults(self) -> Counter[str]:
        """Data faults over all logged steps, by "source/reason"."""
        total: Counter[str] = Counter()
        for line in self.metrics:
            total.update(faults_of(line))
        return total

    def option(self, dotted: str, default: Any = None) -> Any:
        """A field of the configuration: ``option("optimizer.lr")``."""
        found: Any = self.config
        for part in dotted.split("."):
            if not isinstance(found, dict) or part not in found:
                return default
            found = found[part]
        return found


def number(value: Any, default: float = math.nan) -> float:
    """A finite number as float, anything else as ``default``."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return default
    return float(value) if abs(value) < _LARGEST else default  # NaN is not below it


def faults_of(line: dict[str, Any]) -> dict[str, int]:
    """The data faults of one logged step, those that are counts."""
    found = line.get("bad_samples")
    return {str(k): v for k, v in found.items() if isinstance(v, int)} if isinstance(found, dict) else {}


def read_runs(paths: list[Path]) -> list[RunFolder]:
    """Read the folders of one or more runs.

    Raises:
        ConfigError: a path is no run's folder, or is given twice.
    """
    whole = [_checked(path) for path in paths]
    twice = [str(path) for path, count in Counter(whole).items() if count > 1]
    if twice:
        raise ConfigError(f"{twice[0]} is given twice; give each run once")
    return [RunFolder(path, label) for path, label in zip(whole, _labels(whole), strict=True)]


def _checked(path: Path) -> Path:
    try:
        whole = path.resolve()
        if not whole.exists():
            raise ConfigError(f"{path} does not exist; give a run's folder, runs/NAME")
        if not whole.is_dir():
            raise ConfigError(f"{path} is a file; give the run's folder that it is in")
        if any((whole / name).is_file() for name in _MARKS):
            return whole
        inside = sorted(child.name for child in whole.iterdir() if any((child / name).is_file() for name in _MARKS))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    if inside:
        some = ", ".join(str(path / name) for name in inside[:5]) + (", …" if len(inside) > 5 else "")
        raise ConfigError(f"{path} holds runs and is none itself; give one or more of them: {some}")
    raise ConfigError(f"{path} is no run's folder: it has none of {', '.join(_MARKS)}")


def _labels(paths: list[Path]) -> list[str]:
    """The folders' names, with as many folders above them as it takes to tell them apart."""
    for depth in range(1, 1 + max(len(path.parts) for path in paths)):
        labels = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(labels)) == len(labels):
            return labels
    return [str(path) for path in paths]


def _well_formed(image: Any) -> bool:
    kinds = {"src": str, "rank": int, "width": int, "height": int, "captions": list, "top": list}
    return (
        isinstance(image, dict)
        and all(isinstance(image.get(name), kind) for name, kind in kinds.items())
        and image["src"].startswith("data:image/")
        and all(isinstance(c, dict) and {"text", "similarity", "right"} <= c.keys() for c in image["top"])
        and all(isinstance(c["similarity"], (int, float)) for c in image["top"])
    )
