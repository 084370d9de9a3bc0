"""Published measurements against the planner, each with the tolerance that its conditions allow."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from disco_ds.loss.memory import loss_bytes
from disco_ds.planner.coefficients import shipped
from disco_ds.planner.devices import DEVICES, GIB
from disco_ds.planner.memory import Setup, predict

PUBLISHED = json.loads((Path(__file__).parent / "published.json").read_text())
GB = 1000 * 2**20
"""The Inf-CL paper's GB: thousands of MiB."""


def rows(kind):
    return [
        pytest.param(row, id=f"{row['source']}, {row.get('model', row.get('kind'))} {row.get('batch', '')}")
        for row in PUBLISHED[kind]
    ]


def setup(row, policy=None, zero=0, precision="amp"):
    device = DEVICES[row.get("device", "A100-40G")]
    return Setup(
        gpus=row["gpus"], zero=zero, precision=precision, checkpointing=policy or row["checkpointing"],
        loss=row["kind"], attention=row.get("attention", "flash"), runtime_bytes=device.runtime_bytes(row["gpus"]),
        images_on_device=True,  # the loops of these trainers keep a name for the batch
    )  # fmt: skip


@pytest.mark.parametrize("row", rows("loss"))
def test_loss_cells(row):
    planned = loss_bytes(row["batch"], row["batch"] * row["gpus"], 768, kind=row["kind"]) / GB
    # half a percent, or the last digit that was printed
    assert planned == pytest.approx(row["gb"], rel=0.005, abs=0.006)


@pytest.mark.parametrize("row", rows("peak"))
def test_peaks_of_l14_with_cached_gradients(row):
    """DDP keeps every gradient a second time, in its buckets (4P); the batch's images lie on the device."""
    model = shipped("ViT-L-14")
    own = Setup(gpus=row["gpus"], zero=0, precision="amp", loss=row["kind"], images_on_device=True)
    planned = (predict(model, own, row["batch"], 128).peak_bytes + 4 * model.parameters) / GB
    # the first CLIP row is 2.4 above the local loss on the same batch, and no term of either explains it
    tolerance = 0.08 if (row["kind"], row["batch"]) == ("clip", 4096) else 0.04
    assert planned == pytest.approx(row["gb"], rel=tolerance)


@pytest.mark.parametrize("row", rows("fits"))
def test_what_was_trained_fits(row):
    prediction = predict(shipped(row["model"]), setup(row), row["batch"])
    assert prediction.peak_bytes * 1.1 <= DEVICES[row["device"]].usable_bytes


@pytest.mark.parametrize("row", rows("seen"))
def test_what_nvidia_smi_showed(row):
    """A process holds 1.1 to 1.4 of what is allocated, most with checkpointing; DDP has 4P in buckets."""
    model = shipped(row["model"])
    ddp = 4 * model.parameters if row["gpus"] > 1 else 0
    allocated = (predict(model, setup(row), row["batch"]).peak_bytes + ddp) / 1e9
    assert 1.05 * allocated <= row["low_gb"]
    assert row["high_gb"] <= 1.4 * allocated


@pytest.mark.parametrize("row", rows("largest"))
def test_the_largest_batch_that_was_found(row):
    model, limit = shipped(row["model"]), DEVICES[row["device"]].usable_bytes
    own = Setup(**{**vars(setup(row)), "fragmentation": 1.1})
    assert predict(model, own, row["fits"]).peak_bytes <= limit
    assert predict(model, own, row["too_many"]).peak_bytes > limit


@pytest.mark.parametrize("row", rows("headline")[:2])
@pytest.mark.parametrize("precision", ["amp", "bf16"])
def test_the_headline_batches_need_checkpointing_or_cached_gradients(row, precision):
    model, limit = shipped("ViT-B-32"), DEVICES["A100-40G"].usable_bytes
    for zero in (0, 2):
        whole = predict(model, setup(row, "none", zero, precision), row["batch"])
        assert whole.peak_bytes > 2.5 * limit
        assert predict(model, setup(row, "full", zero, precision), row["batch"]).peak_bytes < 0.75 * limit
        cached = predict(model, setup(row, "none", zero, precision), row["batch"], 256)
        assert cached.peak_bytes < 0.8 * limit


def test_original_clip_fits_on_128_gpus_without_checkpointing():
    """So 128 against 8 compares two checkpointing settings, and not the loss alone."""
    row = PUBLISHED["headline"][2]
    peak = predict(shipped("ViT-B-32"), setup(row, "none"), row["batch"]).peak_bytes / GIB
    assert peak == pytest.approx(29.3, rel=0.06)


REFERENCE = [  # memory in GiB without fragmentation: gpus, batch, loss, checkpointing, precision, zero
    (64, 3072, "disco", "none", "amp", 0, 118), (64, 3072, "disco", "full", "amp", 0, 26.7),
    (64, 3072, "disco", "full", "bf16", 2, 19.1), (8, 4096, "disco", "none", "amp", 0, 144),
    (8, 4096, "disco", "full", "amp", 0, 27.2), (8, 4096, "disco", "full", "bf16", 2, 17.6),
]  # fmt: skip


@pytest.mark.parametrize(("gpus", "batch", "loss", "policy", "precision", "zero", "gib"), REFERENCE)
def test_an_earlier_prediction_of_the_headline_cases(gpus, batch, loss, policy, precision, zero, gib):
    """By another program with DDP's states (20P) and a bf16 batch: the differences are those, 1 to 2 GiB."""
    row = {"gpus": gpus, "kind": loss, "checkpointing": policy}
    peak = predict(shipped("ViT-B-32"), setup(row, policy, zero, precision), batch).peak_bytes / GIB
    assert peak == pytest.approx(gib, abs=2.6)
