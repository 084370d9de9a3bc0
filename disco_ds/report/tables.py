"""The tables and words of disco-report."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import yaml

from disco_ds.report.bars import HELD, memory_parts
from disco_ds.report.charts import SMOOTH_FROM
from disco_ds.report.curves import smoothed
from disco_ds.report.differences import ABSENT, differences, flat, settings, settings_of_start
from disco_ds.report.run_folder import RunFolder, number
from disco_ds.report.style import GIB
from disco_ds.telemetry.console import duration

_ROWS = 50  # of skipped steps; more are counted
_DIRECTIONS = (("image_to_text", "image → text"), ("text_to_image", "text → image"))


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


def head(run: RunFolder) -> dict[str, Any]:
    """What stands on top of the page for a run: name, how it stands, facts, and what a reader should know of."""
    name = str(run.config.get("name") or run.label)
    return {"name": name, "label": run.label, "state": state(run), "facts": _facts(run), "warnings": warnings(run)}


def state(run: RunFolder) -> str:
    """Finished, or how far it has come."""
    if run.finished:
        return f"finished after {run.step:,} steps"
    if not run.metrics and not run.evals:
        return "no step logged"
    of = f" of {run.total_steps:,}" if run.total_steps else ""
    return f"not finished: last logged step {run.step:,}{of}"


def _facts(run: RunFolder) -> list[tuple[str, str]]:
    start = run.starts[-1] if run.starts else {}
    facts = [("model", str(run.option("model.name") or "")), ("loss", str(run.option("loss.kind") or ""))]
    if run.global_batch:
        facts.append(("global batch", f"{run.global_batch:,} pairs"))
    if start:
        ranks = start.get("ranks")
        facts.append(
            ("ranks", f"{ranks} × {start.get('device')}, ZeRO {start.get('zero_stage')}, {start.get('precision')}")
        )
    seen = run.last("samples_seen")
    if seen:
        facts.append(("pairs seen", f"{seen:,.0f}"))
    if seconds_of_steps(run):
        facts.append(("time in steps", duration(seconds_of_steps(run))))
    for key, words in _DIRECTIONS:
        value, chance = (run.last(f"val/{key}_R@1{tail}", of_evals=True) for tail in ("", "_chance"))
        if value is not None:
            facts.append((f"{words} R@1", f"{value:.3f}" + (f" (chance {chance:.3f})" if chance is not None else "")))
    return [(name, value) for name, value in facts if value]


def warnings(run: RunFolder) -> list[str]:
    """What a reader should not miss."""
    found = []
    skipped, failed = int(run.last("skipped_steps") or 0), int(run.last("failed_saves") or 0)
    if skipped:
        found.append(f"{_count(skipped, 'step')} skipped for a loss or gradient that was not finite")
    if failed:
        found.append(f"{_count(failed, 'checkpoint')} could not be written")
    if run.metrics and not math.isfinite(number(run.metrics[-1].get("loss"))):
        found.append(f"the last logged loss (step {run.metrics[-1]['step']:,}) is not finite")
    error = memory_error(run)
    if error is not None and abs(error) > 0.05:
        found.append(f"memory: {abs(error):.1%} {'more' if error > 0 else 'less'} allocated than planned")
    seen, faulty = run.last("samples_seen") or 0, run.faults().total()
    if faulty > 0.01 * seen:
        found.append(f"{_count(faulty, 'data fault')} for {seen:,.0f} pairs seen")
    return found


def _count(number_of: int, what: str) -> str:
    return f"{number_of:,} {what}{'' if number_of == 1 else 's'}"


def seconds_of_steps(run: RunFolder) -> float:
    """Time in training steps, from the mean step of each logged window."""
    steps, seconds = run.series("step_s")
    before = [0, *steps[:-1]]
    each = [(step - last) * time_s for step, last, time_s in zip(steps, before, seconds, strict=False)]
    return sum(value for value in each if math.isfinite(value))


def final_loss(run: RunFolder) -> float | None:
    """The loss at the end, smoothed as in its chart."""
    values = run.series("loss")[1]
    finite = [value for value in (smoothed(values) if len(values) >= SMOOTH_FROM else values) if math.isfinite(value)]
    return finite[-1] if finite else None


def _median(run: RunFolder, name: str) -> float | None:
    values = [value for value in run.series(name)[1] if math.isfinite(value)]
    return float(np.median(values)) if values else None


_LOSS = "loss at the end"
_Row = tuple[str, Callable[[RunFolder], float | None], str, int]
_RESULTS: list[_Row] = [
    ("steps", lambda run: run.step, ",.0f", 0),
    ("pairs seen", lambda run: run.last("samples_seen"), ",.0f", 0),
    (_LOSS, final_loss, ".4f", -1),
    *(
        (f"{words} R@{k}", lambda run, key=key, k=k: run.last(f"val/{key}_R@{k}", of_evals=True), ".3f", 1)  # type: ignore[misc]
        for key, words in _DIRECTIONS
        for k in (1, 5, 10)
    ),
    ("zero-shot top-1", lambda run: run.last("val/zero_shot_top1", of_evals=True), ".3f", 1),
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
        if name.endswith("_chance"):
            continue
        chance = number(last.get(f"{name}_chance"))
        rows.append([name, _plain(value), f"{chance:.4g}" if math.isfinite(chance) else ""])
    return Table(
        ["metric", "value", "by chance"],
        rows,
        title=f"All numbers of the evaluation at step {run.evals[-1]['step']:,}",
        folded=True,
    )


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
    note = f"The last {len(rows)}; {earlier:,} earlier ones are in skipped.jsonl." if earlier else ""
    return Table(["step", "samples with features that are not finite"], rows, title=run.label, note=note)


def starts(run: RunFolder) -> Table | None:
    """Each start of the run, and what was changed from the one before."""
    if not run.starts:
        return None
    rows: list[list[str]] = []
    before: dict[str, Any] | None = None
    for start in run.starts:
        now = settings_of_start(start)
        changes = differences([before, now]) if before is not None else []
        words = [f"{name}: {old} → {new}" for name, (old, new) in changes]
        ranks = f"{start.get('ranks')} × {start.get('device')}"
        changed = "; ".join(words) or ("first start" if before is None else "nothing")
        rows.append([str(start.get("time", ""))[:16].replace("T", " "), f"{start['step']:,}", ranks, changed])
        before = now
    return Table(["time", "after step", "ranks", "changed"], rows, title=run.label)


def different_settings(runs: Sequence[RunFolder]) -> Table | None:
    """Settings that are not the same in all runs."""
    if all(run.starts for run in runs):
        rows = differences([settings(run) for run in runs])
    else:  # what only some of them kept would be no difference
        rows = differences(
            [flat({k: v for k, v in run.config.items() if k not in ("name", "runs_dir")}) for run in runs]
        )
    table = [[name, *values] for name, values in rows]
    return Table(["setting", *(run.label for run in runs)], table) if table else None


def setting_texts(run: RunFolder) -> list[tuple[str, str]]:
    """config.yaml and the resolved ds_config, as text."""
    found = []
    if run.config:
        text = yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True)
        found.append((f"{run.label}: config.yaml", text))
    ds_config = run.starts[-1].get("ds_config") if run.starts else None
    if ds_config:
        found.append((f"{run.label}: ds_config, as resolved", json.dumps(ds_config, indent=2)))
    return found


def memory_error(run: RunFolder) -> float | None:
    """How far what was allocated is from the plan, as a share of the plan."""
    parts = memory_parts(run)
    if not parts:
        return None
    planned, measured = (sum(v for k, v in parts[kind].items() if k != HELD) for kind in ("planned", "measured"))
    return measured / planned - 1 if planned else None


def memory_words(run: RunFolder) -> str:
    """What the comparison of planned and measured memory says, or why there is none."""
    error, start = memory_error(run), run.starts[-1] if run.starts else {}
    if error is not None:
        runtime = number((run.memory.get("planned") or {}).get("runtime"), 0) / GIB
        return (
            f"Measured after step {run.memory.get('step')}: allocated memory is {error:+.1%} from the plan at its "
            f"highest moment, “{run.memory.get('moment')}”. The CUDA context and NCCL, planned at {runtime:.2f} GiB, "
            f"are in neither bar."
        )
    if start.get("device") == "cpu":
        return (
            "Plan and measurement are not compared on a CPU: what is logged there is the highest resident memory of "
            "rank 0's process, with Python and all libraries in it. disco-plan says what a GPU would take."
        )
    return "No comparison of plan and measurement: the run makes it on GPUs, after its third step."


def shown_images(run: RunFolder) -> dict[str, Any]:
    """The run's held-out images with their captions, those that are well formed; {} without any."""
    images = run.shown.get("images")
    whole = [image for image in images if _well_formed(image)] if isinstance(images, list) else []
    return {"step": run.shown.get("step"), "images": whole} if whole else {}


def _well_formed(image: Any) -> bool:
    if not isinstance(image, dict) or not str(image.get("src", "")).startswith("data:image/"):
        return False
    top, captions = image.get("top"), image.get("captions")
    return (
        isinstance(image.get("rank"), int)
        and all(isinstance(image.get(side), int) for side in ("width", "height"))
        and isinstance(captions, list)
        and isinstance(top, list)
        and all(isinstance(c, dict) and {"text", "similarity", "right"} <= c.keys() for c in top)
        and all(isinstance(c["similarity"], (int, float)) for c in top)
    )
