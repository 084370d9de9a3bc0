"""disco-report: one file with everything, from whatever a run's folder holds, or one line that says what is wrong."""

from __future__ import annotations

import json
import re
import shutil
import sys
from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.helpers.report_runs import heldout, make_run, start

pytest.importorskip("matplotlib")

from disco_ds.cli.report import main
from disco_ds.files import append_line
from disco_ds.report.curves import thinned
from disco_ds.report.page import write_report
from disco_ds.report.run_folder import number, read_runs
from disco_ds.report.style import chart_settings
from disco_ds.report.tables import differences, flat
from disco_ds.report.text import short
from disco_ds.telemetry.jsonlines import read_lines


class Page(HTMLParser):
    """Text, tags and whatever an attribute could fetch."""

    def __init__(self, text):
        super().__init__()
        self.words, self.tags, self.links, self.ids, self.open = [], [], [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag not in ("meta", "link", "img", "use", "path"):
            self.open.append(tag)
        fetching = ("src", "href", "xlink:href", "action", "data", "srcset", "poster")
        self.links += [value for name, value in attrs if name in fetching]
        self.ids += [value for name, value in attrs if name == "id"]

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag):
        if self.open and self.open[-1] == tag:
            self.open.pop()

    def handle_data(self, data):
        if "style" not in self.open:
            self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


def report(capsys, *arguments, code=0):
    assert main([str(argument) for argument in arguments]) == code
    said = capsys.readouterr()
    if code:
        assert said.err.startswith("disco-report: ")
        assert said.err.count("\n") == 1
        return said.err
    return said.out


def page_of(path):
    return Page(path.read_text(encoding="utf-8"))


def test_everything_that_a_run_leaves_is_on_the_page(tmp_path, capsys):
    run = make_run(tmp_path / "clip")
    said = report(capsys, run, "--png", tmp_path / "png")
    assert str(run / "report.html") in said
    page = page_of(run / "report.html")
    for words in (
        "finished after 300 steps", "ViT-B-32", "4 × H100, ZeRO 2, bf16", "76,800", "1 step skipped",
        "chance ln(256) = 5.545", "learning rate", "logit_scale (1 / temperature)", "clipped above", "pairs / s",
        "backward 40%", "allocated memory is +3.3% from the plan", "planned", "measured", "activations",
        "cc12m", "broken_image", "R@10 0.500 / 0.500", "R@10 by chance 0.053", "top-1 0.300", "top-1 by chance 0.100",
        "a red heart", "<b>&",
        "right one: rank 2", "all features finite", "ranks: 8 → 4; micro_batch: 32 → 64",
        "optimizer.lr: 0.001 → 0.0005", "clip_norm: 1.0", '"stage": 2', "the run was resumed there",
    ):  # fmt: skip
        assert words in page.text, words
    assert page.tags.count("svg") + 1 == len(list((tmp_path / "png").iterdir())) == 12
    assert page.tags.count("img") == 3
    report(capsys, run, "--png", tmp_path / "one.png")
    for picture in [*(tmp_path / "png").iterdir(), tmp_path / "one.png"]:
        with Image.open(picture) as image:
            image.load()
            assert image.width >= 700


def test_the_page_is_alone_and_small(tmp_path, capsys):
    runs = [make_run(tmp_path / name, steps=300_000, every=10) for name in ("a", "b")]
    out = tmp_path / "new" / "both.html"
    report(capsys, *runs, "--out", out)
    text, page = out.read_text(encoding="utf-8"), page_of(out)
    assert out.stat().st_size < 2e6
    assert all(link.startswith(("data:", "#")) for link in page.links)
    assert not {"script", "iframe", "object", "embed", "form"} & set(page.tags)
    assert not re.search(r"@import|@font-face|url\((?!#)|javascript:|\son\w+=", text)
    assert len(set(page.ids)) == len(page.ids)
    assert {link[1:] for link in page.links if link.startswith("#")} <= set(page.ids)
    assert set(re.findall(r"url\(#([^)]+)\)", text)) <= set(page.ids)


def test_runs_are_compared(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "a" / "clip")
    make_run(tmp_path / "b" / "clip", loss={"kind": "sigmoid"}, faults={})
    report(capsys, "a/clip", "b/clip")
    text = page_of(tmp_path / "comparison.html").text
    assert "setting a/clip b/clip loss.kind one_block sigmoid " in text
    assert "a/clip: smoothed" in text
    assert "b/clip: R@1 0.050 / 0.050" in text
    assert "image → text R@5 0.250 0.250" in text
    assert "data faults 45 0" in text
    report(capsys, "b/clip")  # the sigmoid loss has another level of chance
    assert "ln(" not in page_of(tmp_path / "b" / "clip" / "report.html").text


def test_other_batches_are_compared_by_pairs_seen(tmp_path, capsys):
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / "b", batch=1024, steps=150)]
    report(capsys, *runs, "--out", tmp_path / "x.html")
    text = page_of(tmp_path / "x.html").text
    assert "pairs seen" in text
    assert "chance ln(256) = 5.545" in text
    assert "chance ln(1,024) = 6.931" in text
    assert 'class="best">5' not in (tmp_path / "x.html").read_text()  # losses of other batches do not compare


@pytest.mark.parametrize("left", [
    (), ("config.yaml",), ("starts.jsonl",), ("eval.jsonl", "result.json"), ("metrics.jsonl", "config.yaml"),
    ("metrics.jsonl", "starts.jsonl", "config.yaml"),
])  # fmt: skip
def test_a_run_that_was_killed_has_a_report_that_says_so(tmp_path, capsys, left):
    whole, run = make_run(tmp_path / "whole"), tmp_path / "run"
    run.mkdir()
    for name in left:
        shutil.copy(whole / name, run / name)
    if not left:
        (run / "metrics.jsonl").touch()
    report(capsys, run)
    text = page_of(run / "report.html").text
    expected = {
        "metrics.jsonl": ("No step is logged", "chance ln(256)"),
        "eval.jsonl": ("No evaluation", "R@10 0.500"),
        "starts.jsonl": ("Starts were not kept", "first start"),
        "config.yaml": ("config.yaml is missing", "clip_norm: 1.0"),
    }
    known = {*left, *(["config.yaml"] if "starts.jsonl" in left else [])}  # a start keeps its configuration
    for name, (missing, there) in expected.items():
        assert (there if name in known else missing) in text, name
        assert (missing if name in known else there) not in text, name
    if len(left) < 2:
        report(capsys, run, whole, "--out", tmp_path / "both.html")


def test_torn_and_damaged_files(tmp_path, capsys):
    run = make_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 310, "loss": null, "non_finite": {"loss": "nan"}}\n{"step": 320, "lo')
    (run / "eval.jsonl").write_bytes(b"\xff\xfe\n[1]\n{}\n")
    (run / "memory.json").write_text("{")
    (run / "config.yaml").write_text("a: [")
    (run / "heldout.json").write_text(json.dumps({"images": [{"src": "https://example.org/x.png"}, 3, None]}))
    report(capsys, run)
    page = page_of(run / "report.html")
    assert "the last logged loss (step 310) is not finite" in page.text
    assert "config.yaml could not be read" in page.text
    assert "memory.json could not be read" in page.text
    assert "img" not in page.tags


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
NAMES = st.sampled_from([
    "loss", "lr", "grad_norm", "step_s", "time_in_data", "samples_seen", "bad_samples", "skipped_steps", "config",
    "versions", "ds_config", "global_batch", "total_steps", "planned", "counted", "allocated", "images", "steps",
    "samples", "model", "val/image_to_text_R@10", "val/zero_shot_top1", "peak_memory_bytes", "device", "name",
])  # fmt: skip


# a smaller example is not worth the minutes that it takes to find
@settings(
    max_examples=25, deadline=None, phases=[Phase.generate], suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_no_content_is_a_traceback(tmp_path, capsys, data):
    run = tmp_path / "run"
    run.mkdir(exist_ok=True)
    odd = st.dictionaries(NAMES, JSON, max_size=6)
    for name in ("metrics.jsonl", "eval.jsonl", "starts.jsonl", "skipped.jsonl"):
        several = data.draw(st.lists(odd, max_size=3))
        (run / name).write_text("".join(json.dumps({**each, "step": at}) + "\n" for at, each in enumerate(several)))
    for name in ("config.yaml", "memory.json", "heldout.json", "result.json"):
        (run / name).write_text(json.dumps(data.draw(odd)))
    report(capsys, run)
    page_of(run / "report.html")


@pytest.mark.parametrize(("make", "arguments", "words"), [
    (lambda folder: None, ["none"], "does not exist"),
    (lambda folder: (folder / "f").write_text(""), ["f"], "is a file"),
    (lambda folder: (folder / "e").mkdir(), ["e"], "no run's folder"),
    (lambda folder: make_run(folder / "runs" / "clip"), ["runs"], "give one or more of them: runs/clip"),
    (lambda folder: make_run(folder / "clip"), ["clip", "./clip"], "given twice"),
    (lambda folder: make_run(folder / "clip"), ["clip", "--out", "x.pdf"], "ends in .html"),
    (lambda folder: make_run(folder / "clip"), ["clip", "--out", "clip/config.yaml/x.html"], "cannot be written"),
    (lambda folder: make_run(folder / "clip"), ["clip", "--png", "clip/config.yaml"], "cannot be written"),
    (lambda folder: (folder / "d.html").mkdir() or make_run(folder / "c"), ["c", "--out", "d.html"], "be written"),
    (lambda folder: None, [], "RUN"),
    (lambda folder: None, ["x", "--ou", "y"], "unrecognized"),
])  # fmt: skip
def test_mistakes_are_one_line_and_status_2(tmp_path, capsys, monkeypatch, make, arguments, words):
    monkeypatch.chdir(tmp_path)
    make(tmp_path)
    assert words in report(capsys, *arguments, code=2)


def test_help_fits_a_screen(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert len(text.splitlines()) <= 24
    assert "disco-report runs/clip" in text


def test_without_matplotlib_it_says_which_extra(tmp_path, capsys, monkeypatch):
    run = make_run(tmp_path / "run")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install 'disco-ds[demo]'" in report(capsys, run, code=2)
    assert write_report(run) == {}  # and the run that asks goes on
    assert "pip install 'disco-ds[demo]'" in capsys.readouterr().out
    assert not list(run.glob("report.*"))


def test_a_run_writes_its_own_report_and_outlives_it(tmp_path, capsys, monkeypatch):
    run = make_run(tmp_path / "run")
    files = {path.name for path in run.iterdir()}
    (run / "report.png").write_bytes(b"old")
    assert write_report(run) == {"picture": run / "report.png", "report": run / "report.html"}
    assert {path.name for path in run.iterdir()} == files | {"report.png", "report.html"}
    with Image.open(run / "report.png") as picture:
        picture.load()
        assert picture.width == 1600
        assert picture.height > 900
    (run / "heldout.json").unlink()
    write_report(run)  # without images, and over the one just made
    with Image.open(run / "report.png") as smaller:
        assert smaller.height < picture.height - 100
    (run / "report.html").unlink()
    monkeypatch.setattr("disco_ds.report.picture.save", lambda *_: 1 / 0)
    assert write_report(run) == {"report": run / "report.html"}
    assert "no report.png: ZeroDivisionError" in capsys.readouterr().out
    monkeypatch.setattr("disco_ds.report.page.sections", lambda runs: 1 / 0)
    assert write_report(run) == {}
    assert "no report.html: ZeroDivisionError" in capsys.readouterr().out


def test_captions_that_no_file_can_hold(tmp_path, capsys):
    run = make_run(tmp_path / "run")
    (run / "heldout.json").write_text(json.dumps(heldout("half \ud800 and <script>alert(1)</script> 日本")))
    report(capsys, run)
    page = page_of(run / "report.html")
    assert "half ? and <script>alert(1)</script> 日本" in page.text
    assert "script" not in page.tags


class TestParts:
    def test_thinned_keeps_every_peak(self):
        x = np.arange(100_000.0)
        y = np.sin(x / 9000)
        y[54_321], y[77], y[500:900] = 9, -9, np.nan
        short_x, short_y = thinned(x, y)
        assert len(short_x) <= 800
        assert (np.diff(short_x) > 0).all()
        assert np.nanmax(short_y) == 9
        assert np.nanmin(short_y) == -9
        assert np.isnan(short_y).any()  # the gap stays one
        assert (short_y == y[short_x.astype(int)])[np.isfinite(short_y)].all()

    def test_differences(self):
        one, two = flat({"a": {"b": 1, "c": {}}, "d": [1]}), flat({"a": {"b": 2.5}, "d": [1], "e": None})
        assert differences([one, two]) == [("a.b", ["1", "2.5"]), ("a.c", ["{}", "–"]), ("e", ["–", "null"])]
        assert differences([one, dict(one)]) == []

    def test_numbers(self):
        given = (1, 2.5, True, None, "3", float("nan"), 10**400)
        assert [number(value, -1) for value in given] == [1, 2.5, -1, -1, -1, -1, -1]
        words = {"0": 0, "2": 2, "0.25": 0.25, "5e-4": 5e-4, "12.5K": 12_500, "3M": 3e6, "1.5B": 1.5e9, "-20K": -20_000}
        assert {word: short(value) for word, value in words.items()} == {word: word for word in words}

    def test_a_longer_run_is_not_finished(self, tmp_path):
        run = make_run(tmp_path / "run")
        assert read_runs([run])[0].finished
        with (run / "starts.jsonl").open("a") as file:
            file.write(json.dumps({**start(300), "total_steps": 600}) + "\n")
        assert not read_runs([run])[0].finished

    def test_a_users_matplotlibrc_does_not_reach_it(self, tmp_path):
        import matplotlib as mpl

        run = make_run(tmp_path / "run")

        def made():
            write_report(run)
            return (run / "report.html").read_text().partition("<footer>")[0], (run / "report.png").read_bytes()

        before = made()
        others = {"font.size": 30, "text.usetex": True, "axes.facecolor": "black", "savefig.dpi": 20}
        with mpl.rc_context(others):
            assert made() == before
            assert mpl.rcParams["font.size"] == 30
        with chart_settings():
            assert mpl.rcParams["font.size"] == 10


def test_a_start_that_a_kill_has_torn_does_not_take_the_next_one_with_it(tmp_path):
    path = tmp_path / "starts.jsonl"
    for line in ('{"step": 0}', '{"step": 5}'):
        append_line(path, line)
    path.write_bytes(path.read_bytes() + b'{"step": 9, "con')
    append_line(path, '{"step": 8}')
    assert [each["step"] for each in read_lines(path)] == [0, 5, 8]


def test_the_comparison_of_memory_as_a_run_writes_it(tmp_path, capsys):
    from contextlib import nullcontext
    from types import SimpleNamespace

    from disco_ds.planner.coefficients import shipped
    from disco_ds.planner.compare import Measured
    from disco_ds.planner.memory import Setup, predict
    from disco_ds.report.bars import memory_parts
    from disco_ds.run.recorder import record_memory

    prediction = predict(shipped("ViT-B-32"), Setup(gpus=8, zero=2, runtime_bytes=1 << 30, fragmentation=1.1), 256)
    planned = prediction.peak_bytes - (1 << 30) - prediction.peak.bytes["fragmentation"]
    measured = Measured(int(planned * 1.08), int(planned * 1.2), {"parameters": 303 << 20, "optimizer": 1 << 28})
    run = make_run(tmp_path / "run")
    (run / "memory.json").unlink()
    telemetry = SimpleNamespace(log_and_continue=lambda what: nullcontext())
    record_memory(SimpleNamespace(folder=run, state=SimpleNamespace(step=3), telemetry=telemetry), prediction, measured)
    parts = memory_parts(read_runs([run])[0])
    assert sum(parts["planned"].values()) == prediction.peak_bytes - (1 << 30)
    assert sum(parts["measured"].values()) == measured.reserved
    report(capsys, run)
    text = page_of(run / "report.html").text
    assert "allocated memory is +8.0% from the plan" in text
    assert "memory: 8.0% more allocated than planned" in text
