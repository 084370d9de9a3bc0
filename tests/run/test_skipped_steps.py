"""The bookkeeping around steps whose update was left out."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.ranks


def counted(folder):
    """Five steps, all but the second left out, where two in a row are allowed."""
    from disco_ds.checkpoint.save import RunState
    from disco_ds.errors import DivergedError
    from disco_ds.run.skipped_steps import count_skipped
    from disco_ds.telemetry.sinks import Telemetry

    messages, rank = [], dist.get_rank()
    telemetry = Telemetry(Path(folder), rank=rank)
    telemetry.message = messages.append
    optimizer = SimpleNamespace(max_skipped=2)
    run = SimpleNamespace(
        state=RunState(0, 0, None), config=SimpleNamespace(optimizer=optimizer), control=None, telemetry=telemetry,
        folder=Path(folder),
    )  # fmt: skip
    keys = [f"s.tar#{rank}a", f"s.tar#{rank}b"]
    bad_rows = torch.tensor([False, rank == 1])
    for run.state.step in (1, 2, 3, 4):
        count_skipped(run, SimpleNamespace(skipped=run.state.step != 2, bad_rows=bad_rows), keys)
    run.state.step = 5
    with pytest.raises(DivergedError) as caught:
        count_skipped(run, SimpleNamespace(skipped=True, bad_rows=torch.zeros(2, dtype=torch.bool)), keys)
    return messages, str(caught.value), run.state


def test_skipped_steps_are_named_counted_and_limited(tmp_path):
    for messages, reason, state in run_ranks(counted, 2, str(tmp_path)):
        said = "step {} was left out on all ranks: features of 1 samples are not finite: s.tar#1b (rank 1)"
        assert [message.partition("; see ")[0] for message in messages] == [said.format(step) for step in (1, 3, 4)]
        assert "3 steps in a row" in reason
        assert "all features are finite, the gradient is not" in reason
        assert (state.skipped, state.skipped_in_a_row) == (4, 3)
    lines = [json.loads(line) for line in (tmp_path / "skipped.jsonl").read_text().splitlines()]
    assert lines[0] == {"step": 1, "samples": {"1": ["s.tar#1b"]}}
    assert [line["step"] for line in lines] == [1, 3, 4, 5]
