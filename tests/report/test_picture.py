"""report.png: nothing in it overlaps, it shows what is there, and text in any script finds its place."""

from __future__ import annotations

import base64
import io
import itertools
import random

import numpy as np
import pytest
from PIL import Image, ImageDraw

from tests.helpers.report_runs import make_run, write_lines

mpl = pytest.importorskip("matplotlib")

from disco_ds.report import picture  # noqa: E402
from disco_ds.report.curves import smoothed  # noqa: E402
from disco_ds.report.page import render  # noqa: E402
from disco_ds.report.run_folder import read_runs  # noqa: E402
from disco_ds.report.style import chart_settings  # noqa: E402
from disco_ds.report.text import drawable, fit, printable  # noqa: E402

ODD_CAPTIONS = [
    "", "ok", "very " * 60 + "long", "x" * 300, "$x_1$ costs $5 \\frac{", "日本語の説明 mixed 😀🎉",
    "tab\tline\nzero\u200bwidth",
    "مرحبا بالعالم", "👩‍🚀 woman astronaut", "\x00\x07 control \ud800", "एक दो", "🫠 🏳️‍🌈",
]  # fmt: skip


def held_out(count, captions):
    """Images of several shapes whose right caption is ranked first, third, far behind, fifth, second."""
    pick, images = itertools.cycle(captions), []
    for number, rank in zip(range(count), itertools.cycle([1, 3, 99999, 5, 2]), strict=False):
        buffer = io.BytesIO()
        size = (100 - 60 * (number % 3 == 1), 40 + 60 * (number % 2))
        Image.new("RGB", size, (20 * number,) * 3).save(buffer, "PNG")
        top = [{"text": next(pick), "similarity": 0.9 - 0.1 * place, "right": place + 1 == rank} for place in range(5)]
        images.append({
            "key": f"a.tar#{number}", "rank": rank, "captions": [next(pick)], "top": top, "width": size[0],
            "height": size[1], "src": "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode(),
        })  # fmt: skip
    return {"step": 300, "images": images}


@pytest.fixture
def written(monkeypatch):
    """What is written with Pillow: (canvas, box, text, colour, weight)."""
    found, plain = [], ImageDraw.ImageDraw.text

    def text(self, xy, text, **how):
        found.append((self.im, self.textbbox(xy, text, font=how["font"]), text, how["fill"], how["font"].getname()[1]))
        plain(self, xy, text, **how)

    monkeypatch.setattr(ImageDraw.ImageDraw, "text", text)
    return found


def texts_of(figure):
    """Every text of a chart with its box in pixels: title, legend, names of axes, tick labels inside their axis."""
    with chart_settings():
        figure.canvas.draw()
    texts = [*figure.texts, figure._suptitle, *(t for legend in figure.legends for t in legend.findobj(mpl.text.Text))]
    for axes in figure.axes:
        texts += [*axes.texts, axes.xaxis.label, axes.yaxis.label]
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            texts += [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
    texts = [text for text in texts if text is not None and text.get_visible()]
    return [(text.get_text(), text.get_window_extent().extents) for text in dict.fromkeys(texts) if text.get_text()]


def assert_readable(shown, width, height):
    """All texts lie inside the picture and none runs into another."""
    assert [text for text, box in shown if min(box[:2]) < -1 or box[2] > width + 1 or box[3] > height + 1] == []
    clashes = [
        (one, two)
        for (one, a), (two, b) in itertools.combinations(shown, 2)
        if min(a[2], b[2]) - max(a[0], b[0]) > 1 and min(a[3], b[3]) - max(a[1], b[1]) > 3.5
    ]
    assert clashes == []


RUNS = {
    "demo": {},
    "one evaluation": {"evals": (300,), "classes": False},
    "one step": {"steps": 1, "every": 1, "evals": (1,)},
    "no evaluation": {"evals": ()},
    "nothing logged": {"steps": 0, "evals": ()},
    "long": {"steps": 3_000_000, "every": 1000, "evals": tuple(range(10_000, 3_000_001, 10_000))},
    "not finite": {"null_at": (50, 60, 300), "evals": (300,)},
    "never finite": {"null_at": tuple(range(10, 301, 10))},
    "long name": {"model": {"name": "m" * 150}, "faults": {f"{'s' * 50}/{'r' * 60}": 3}},
    "compared": {},
}


@pytest.mark.parametrize("case", RUNS)
def test_nothing_overlaps(tmp_path, case, written):
    captions = ["long " * 60] if case == "long" else ODD_CAPTIONS
    images = held_out({"demo": 12, "long": 12}.get(case, 2), captions) if case != "no evaluation" else {}
    name = "a-very-long-name" * (12 if case == "long name" else 1)
    folders = [make_run(tmp_path / name, **RUNS[case], shown=images)]
    if case == "compared":
        folders += [make_run(tmp_path / f"日本{number}" / ("x" * 200), batch=1024) for number in range(3)]
    runs = read_runs(folders)
    _, parts = render(runs)
    picture.save(tmp_path / "report.png", runs, parts)
    for chart in (chart for part in parts for chart in part.charts):
        assert_readable(texts_of(chart.figure), *chart.figure.bbox.size)
    for _, texts in itertools.groupby(written, lambda each: id(each[0])):
        shown = list(texts)
        assert_readable([(text, box) for _, box, text, *_ in shown], shown[0][0].size[0], shown[0][0].size[1])


def test_the_check_for_overlaps_finds_one(tmp_path):
    _, parts = render(read_runs([make_run(tmp_path / "run")]))
    figure = parts[0].charts[0].figure
    figure.text(0.05, 0.5, "one text")
    figure.text(0.06, 0.5, "and another")
    with pytest.raises(AssertionError, match="and another"):
        assert_readable(texts_of(figure), *figure.bbox.size)


def test_the_right_caption_is_green_wherever_it_ranks(tmp_path, written):
    images = held_out(3, [f"caption {number}" for number in range(18)])
    runs = read_runs([make_run(tmp_path / "run", shown=images)])
    picture.save(tmp_path / "x.png", runs, render(runs)[1])
    green = [text for *_, text, colour, weight in written if colour == picture.GREEN and weight == "Bold"]
    first, third, last = images["images"]
    assert green == [first["top"][0]["text"], third["top"][2]["text"], last["captions"][0]]
    drawn = {text for _, _, text, *_ in written}
    assert {"right one: rank 1", "right one: rank 3", "right one: rank 99,999"} <= drawn
    assert {caption["text"] for image in images["images"] for caption in image["top"]} <= drawn


def test_head_and_what_is_missing_are_said(tmp_path, written):
    runs = read_runs([make_run(tmp_path / "run", evals=(), shown={}, faults={})])
    picture.save(tmp_path / "x.png", runs, render(runs)[1])
    text = " ".join(each[2] for each in written)
    for words in ("finished after 300 steps", "ViT-B-32", "1 step skipped", "Evaluation: No evaluation", "Data: No"):
        assert words in text, words


def test_smoothing_equals_a_plain_loop_and_passes_over_gaps():
    values = np.array([random.random() for _ in range(200)])
    values[[20, 150]], values[199] = np.nan, np.inf
    for position, mean in enumerate(smoothed(values)):
        near = values[max(0, position - 3) : position + 4]
        assert mean == pytest.approx(near[np.isfinite(near)].mean())
    assert np.isnan(smoothed(np.full(5, np.nan))).all()
    assert len(smoothed(np.array([]))) == 0


def test_series_and_batch(tmp_path):
    lines = [{"step": 10, "loss": None, "samples_seen": 640}, {"step": 20}]
    write_lines(tmp_path / "metrics.jsonl", [*lines, {"step": 30, "loss": 1.5, "samples_seen": 1920}])
    [run] = read_runs([tmp_path])
    steps, values = run.series("loss")
    assert steps.tolist() == [10, 30]
    assert np.array_equal(values, [np.nan, 1.5], equal_nan=True)
    assert run.global_batch == 64
    run.metrics = []
    assert run.global_batch is None


class TestText:
    @pytest.mark.parametrize("width", [1, 3, 7, 20])
    @pytest.mark.parametrize("lines", [1, 2, 5])
    @pytest.mark.parametrize("text", ["", "word", "some words of text", "x" * 50, "a " * 40, "one  wide   gap"])
    def test_fits_and_loses_nothing_without_saying_so(self, text, lines, width):
        fitted = fit(text, width, lines, len)
        assert len(fitted) <= lines
        assert all(len(line) <= max(width, 2) for line in fitted)
        whole = "".join(text.split())
        found = "".join("".join(fitted).split())
        assert found == whole or (found.endswith("…") and whole.startswith(found[:-1]))
        if len(whole) > lines * width:
            assert found.endswith("…")

    def test_breaks_between_words(self):
        assert fit("red heart on a card", 9, 3, len) == ["red heart", "on a card"]
        assert fit("red hearts on a card", 9, 3, len) == ["red", "hearts on", "a card"]

    def test_what_the_font_does_not_have_is_said_in_words(self, monkeypatch):
        assert printable("日本の説明") == "[cjk] [hiragana] [cjk]"
        monkeypatch.setattr("disco_ds.report.text.drawable", lambda: frozenset(range(32, 127)))
        assert printable("crab 🦀, ok") == "crab [crab], ok"
        assert printable("a\tb\n c\u200b\x07") == "a b c"
        assert printable("") == printable("\ud800\x00") == "(no text)"

    def test_every_character_left_can_be_drawn(self):
        for caption in ODD_CAPTIONS:
            assert all(ord(character) in drawable() or character == " " for character in printable(caption))
