"""Settings as flat names, and what differs between them: from one start of a run to the next, and between runs."""

from __future__ import annotations

import json
from typing import Any

from disco_ds.report.run_folder import RunFolder

ABSENT = "–"
_ENGINE = ("ranks", "device", "zero_stage", "precision", "global_batch", "micro_batch")
_NO_SETTING = ("name", "runs_dir", "resume")
"""Fields that say where a run lies and not what it is."""
_FILLED = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
"""Keys of a ds_config that repeat what the run's own settings say."""


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
    config, ds_config, versions = (_dict(start.get(name)) for name in ("config", "ds_config", "versions"))
    # the run's own "auto" and None give way to what they became, which stands above
    found |= {k: v for k, v in flat(config).items() if k not in (*_NO_SETTING, *_ENGINE)}
    found |= {f"ds_config: {k}": v for k, v in flat(ds_config).items() if k not in _FILLED}
    found |= {f"version of {k}": v for k, v in versions.items()}
    return found


def settings(run: RunFolder) -> dict[str, Any]:
    """The settings of a run's last start; of its config.yaml where no start is kept."""
    if run.starts:
        return settings_of_start(run.starts[-1])
    return {k: v for k, v in flat(run.config).items() if k not in _NO_SETTING}


def differences(several: list[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    """Names that do not have the same value everywhere, in the order of the first ones, and their values as text."""
    names = list(dict.fromkeys(name for one in several for name in one))
    rows = []
    for name in names:
        values = [shown(one[name]) if name in one else ABSENT for one in several]
        if len(set(values)) > 1:
            rows.append((name, values))
    return rows


def shown(value: Any) -> str:
    """A setting as a person writes it."""
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
