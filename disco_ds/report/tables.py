"""The tables of the page."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from disco_ds.report.bars import GIB
from disco_ds.report.curves import smoothed
from disco_ds.report.run_folder import RunFolder, number
from disco_ds.run_layout import SKIPPED

DIRECTIONS = {"image_to_text": "image → text", "text_to_image": "text → image"}
ABSENT = "–"
_ENGINE = ("ranks", "device", "zero_stage", "precision", "global_batch", "micro_batch")
_NO_SETTING = ("name", "runs_dir", "resume")
"""Fields that say where a run lies and not what it is."""
_FILLED = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
"""Keys of a ds_config that repeat what the run's own settings say."""
_ROWS = 50  # of skipped steps; more are counted


@dataclass
class Table:
    """Rows of text under a head; ``best`` are (row, column) of the cells to mark."""

    head: list[str]
    rows: list[list[str]]
    title: str = ""
    note: str = ""
    best: frozenset[tuple[int, int]] = frozenset()
    folded: bool = False
    """Folded away behind its title."""


def _final_loss(run: RunFolder) -> float | None:
    values = smoothed(run.series("loss")[1])  # as in its chart
    finite = values[np.isfinite(values)]
    return float(finite[-1]) if len(finite) else None


def _median(run: RunFolder, name: str) -> float | None:
    values = run.series(name)[1]
    return float(np.nanmedian(values)) if np.isfinite(values).any() else None


_LOSS = "loss at the end"
_Row = tuple[str, Callable[[RunFolder], float | None], str, int]
_RESULTS: list[_Row] = [
    ("steps", lambda run: run.step, ",.0f", 0),
    ("pairs seen", lambda run: run.last("samples_seen"), ",.0f", 0),
    (_LOSS, _final_loss, ".4f", -1),
    *(
        (f"{words} R@{k}", lambda run, key=key, k=k: run.last(f"val/{key}_R@{k}"), ".3f", 1)  # type: ignore[misc]
        for key, words in DIRECTIONS.items()
        for k in (1, 5, 10)
    ),
    ("zero-shot top-1", lambda run: run.last("val/zero_shot_top1"), ".3f", 1),
    ("logit_scale", lambda run: run.last("logit_scale"), ".2f", 0),
    ("pairs / s (median)", lambda run: _median(run, "samples_per_s"), ",.0f", 1),
    ("s / step (median)", lambda run: _median(run, "step_s"), ".3g", 0),
    ("peak memory (GiB)", lambda run: (run.last("peak_memory_bytes") or math.nan) / GIB, ".2f", -1),
    ("skipped steps", lambda run: run.last("skipped_steps"), ",.0f", 0),
    ("failed saves", lambda run: run.last("failed_saves"), ",.0f", 0),
    ("data faults", lambda run: run.faults().total() if run.metrics else None, ",.0f", 0),
]
"""Name, value of a run, its format, and whether higher (1) or lower (-1) is better."""


def results(runs: Sequence[RunFolder]) -> Table:
    """Final metrics of several runs beside each other, the best of a row marked."""
    rows: list[list[str]] = []
    best: set[tuple[int, int]] = set()
    for name, value_of, pattern, better in _RESULTS:
        values = [math.nan if (value := value_of(run)) is None else value for run in runs]
        if not any(map(math.isfinite, values)):
            continue
        texts = [format(value, pattern) if math.isfinite(value) else ABSENT for value in values]
        # losses of other batches or kinds are other quantities
        alike = name != _LOSS or len({(run.global_batch, run.option("loss.kind") == "sigmoid") for run in runs}) == 1
        if better and alike and len(set(texts) - {ABSENT}) > 1:
            top = max(better * value for value in values if math.isfinite(value))
            best |= {(len(rows), place + 1) for place, value in enumerate(values) if better * value == top}
        rows.append([name, *texts])
    return Table(["", *(run.label for run in runs)], rows, best=frozenset(best))


def last_evaluation(run: RunFolder) -> Table | None:
    """The newest evaluation's numbers, each beside chance."""
    if not run.evals:
        return None
    last = {name.removeprefix("val/"): value for name, value in run.evals[-1].items() if name != "step"}
    rows = []
    for name, value in last.items():
        if not name.endswith("_chance"):
            chance = number(last.get(f"{name}_chance"))
            rows.append([name, _plain(value), f"{chance:.4g}" if math.isfinite(chance) else ""])
    title = f"All numbers of the evaluation at step {run.evals[-1]['step']:,}"
    return Table(["metric", "value", "by chance"], rows, title=title, folded=True)


def _plain(value: Any) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.5g}" if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


def faults(runs: Sequence[RunFolder]) -> Table | None:
    """Counts of all faults, by source and reason."""
    counts = [run.faults() for run in runs]
    names = sorted(set().union(*counts), key=lambda name: -sum(count[name] for count in counts))
    if not names:
        return None
    rows = []
    for name in names[:_ROWS]:
        source, _, reason = name.rpartition("/")
        rows.append([source or "all data", reason, *(f"{count[name]:,}" for count in counts)])
    more = f"{len(names) - _ROWS} more kinds are not shown." if len(names) > _ROWS else ""
    columns = [run.label for run in runs] if len(runs) > 1 else ["count"]
    return Table(["source", "reason", *columns], rows, note=more)


def skipped_steps(run: RunFolder) -> Table | None:
    """Each step that was left out, with the samples whose features were not finite."""
    if not run.skipped:
        return None
    rows = []
    for line in run.skipped[-_ROWS:]:
        by_rank = line.get("samples")
        ranks = by_rank.items() if isinstance(by_rank, dict) else ()
        found = [f"{key} (rank {rank})" for rank, keys in ranks if isinstance(keys, list) for key in keys]
        words = ", ".join(found[:6]) + (f" and {len(found) - 6:,} more" if len(found) > 6 else "")
        rows.append([f"{line['step']:,}", words or "all features finite, the gradient not"])
    earlier = len(run.skipped) - len(rows)
    note = f"The last {len(rows)}; {earlier:,} earlier ones are in {SKIPPED}." if earlier else ""
    return Table(["step", "samples with features that are not finite"], rows, title=run.label, note=note)


def starts(run: RunFolder) -> Table | None:
    """Each start of the run, and what was changed from the one before."""
    if not run.starts:
        return None
    rows = []
    settings = [settings_of_start(start) for start in run.starts]
    for number_of, start in enumerate(run.starts):
        changes = differences(settings[number_of - 1 : number_of + 1]) if number_of else []
        words = "; ".join(f"{name}: {old} → {new}" for name, (old, new) in changes)
        time, ranks = str(start.get("time", ""))[:16].replace("T", " "), f"{start.get('ranks')} × {start.get('device')}"
        rows.append([time, f"{start['step']:,}", ranks, words or ("nothing" if number_of else "first start")])
    return Table(["time", "after step", "ranks", "changed"], rows, title=run.label)


def different_settings(runs: Sequence[RunFolder]) -> Table | None:
    """Settings that are not the same in all runs."""
    whole = all(run.starts for run in runs)  # what only some of them kept would be no difference
    compared = [settings_of_start(run.starts[-1] if whole else {"config": run.config}) for run in runs]
    table = [[name, *values] for name, values in differences(compared)]
    return Table(["setting", *(run.label for run in runs)], table) if table else None


def flat(content: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted names: ``{"optimizer": {"lr": 1e-3}}`` is ``{"optimizer.lr": 1e-3}``."""
    found: dict[str, Any] = {}
    for name, value in content.items():
        if isinstance(value, dict) and value:
            found.update(flat(value, f"{prefix}{name}."))
        else:
            found[f"{prefix}{name}"] = value
    return found


def settings_of_start(start: dict[str, Any]) -> dict[str, Any]:
    """Everything that a start was made with: ranks and precision, the run's fields, the ds_config, versions."""
    found = {name: start[name] for name in _ENGINE if name in start}
    parts = (start.get(name) for name in ("config", "ds_config", "versions"))
    config, ds_config, versions = (part if isinstance(part, dict) else {} for part in parts)
    # the run's own "auto" and None give way to what they became, which stands above
    found |= {k: v for k, v in flat(config).items() if k not in (*_NO_SETTING, *found)}
    found |= {f"ds_config: {k}": v for k, v in flat(ds_config).items() if k not in _FILLED}
    found |= {f"version of {k}": v for k, v in versions.items()}
    return found


def differences(several: list[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    """Names that do not have the same value everywhere, in the order of the first ones, and their values as text."""
    rows = []
    for name in dict.fromkeys(name for one in several for name in one):
        values = [_shown(one[name]) if name in one else ABSENT for one in several]
        if len(set(values)) > 1:
            rows.append((name, values))
    return rows


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
