"""report.png: it is made from whatever a run's folder holds, nothing in it overlaps, and it shows what is there."""

from __future__ import annotations

import itertools
import json
import math
import random
import sys

import numpy as np
import pytest
from PIL import Image

from disco_ds.evaluation.result import EvalResult, RankedCaption, RankedImage

mpl = pytest.importorskip("matplotlib")

from disco_ds.report.curves import GREEN, column, global_batch, smoothed  # noqa: E402
from disco_ds.report.picture import draw_report, write_report  # noqa: E402
from disco_ds.report.words import fit, printable  # noqa: E402

ODD_CAPTIONS = [
    "", "ok", "very " * 60 + "long", "x" * 300, "$x_1$ costs $5 \\frac{", "日本語の説明 mixed 😀🎉",
    "tab\tline\nzero\u200bwidth",
    "مرحبا بالعالم", "👩‍🚀 woman astronaut", "\x00\x07 control \ud800", "एक दो", "🫠 🏳️‍🌈",
]  # fmt: skip


def make_run(folder, *, steps=300, every=10, evals=(100, 200, 300), classes=True, null_at=(), config=None):
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(every, steps + 1, every):
            loss = None if step in null_at else 5.5 * math.exp(-step / steps)
            line = {
                "step": step,
                "samples_seen": 256 * step,
                "loss": loss,
                "lr": 1e-3 * (1 - step / steps),
                "logit_scale": 14,
            }
            file.write(json.dumps(line) + "\n")
    with (folder / "eval.jsonl").open("w") as file:
        for step in evals:
            line = {"step": step}
            for direction, k in itertools.product(("image_to_text", "text_to_image"), (1, 5, 10)):
                line[f"val/{direction}_R@{k}"], line[f"val/{direction}_R@{k}_chance"] = step / steps * k / 20, k / 190
            if classes:
                line |= {
                    "val/zero_shot_top1": 0.3, "val/zero_shot_top1_chance": 0.1, "val/zero_shot_top5": 0.8,
                    "val/zero_shot_mean_per_class": 0.25,
                }  # fmt: skip
            file.write(json.dumps(line) + "\n")
    if config is not None:
        (folder / "config.yaml").write_text(config)
    return folder


def make_samples(count, captions):
    pick = itertools.cycle(captions)
    return [
        RankedImage(
            index=number,
            key=f"a.tar#{number}",
            pixels=np.full((40 + 60 * (number % 2), 100 - 60 * (number % 3 == 1), 3), 20 * number, dtype=np.uint8),
            captions=[next(pick)],
            rank=rank,
            top=[RankedCaption(next(pick), 0.9 - 0.1 * place, place + 1 == rank) for place in range(5)],
        )
        for number, rank in zip(range(count), itertools.cycle([1, 3, 99999, 5, 2]), strict=False)
    ]


def texts_of(figure):
    """Every text that is drawn, with its box in pixels: titles, captions, legends, tick labels inside their axis."""
    with mpl.rc_context({"font.family": ["DejaVu Sans"]}):
        figure.canvas.draw()
    texts = list(figure.texts)
    for axes in figure.axes:
        texts += [*axes.texts, *(axes.get_legend().findobj(mpl.text.Text) if axes.get_legend() else [])]
        texts += [axes.title, axes._left_title, axes.xaxis.label]
        for axis in (axes.xaxis, axes.yaxis):
            low, high = axis.get_view_interval()
            texts += [
                tick.label1
                for tick in axis.get_major_ticks()
                if low <= tick.get_loc() <= high and tick.label1.get_visible()
            ]
    return [(text.get_text(), text.get_window_extent()) for text in texts if text.get_text().strip()]


def assert_readable(figure):
    """All texts lie inside the picture and none runs into another."""
    shown = texts_of(figure)
    width, height = figure.canvas.get_width_height()
    outside = [text for text, box in shown if box.x0 < 0 or box.y0 < 0 or box.x1 > width or box.y1 > height]
    assert outside == []
    clashes = [
        (one, two)
        for (one, a), (two, b) in itertools.combinations(shown, 2)
        if min(a.x1, b.x1) - max(a.x0, b.x0) > 1 and min(a.y1, b.y1) - max(a.y0, b.y0) > 3.5
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
    "long name": {"config": f"name: {'a-very-long-name' * 20}\nmodel: {{name: {'m' * 150}}}\n"},
}


@pytest.mark.parametrize("case", RUNS)
def test_nothing_overlaps(tmp_path, case):
    folder = make_run(tmp_path / "run", **RUNS[case])
    count = {"demo": 12, "long": 12, "one evaluation": 2}.get(case, 1)
    captions = ["long " * 60] if case == "long" else ODD_CAPTIONS
    samples = make_samples(count, captions) if RUNS[case].get("evals") != () else []
    assert_readable(draw_report(folder, samples))


def test_the_check_for_overlaps_finds_one(tmp_path):
    figure = draw_report(make_run(tmp_path / "run"), [])
    figure.text(0.05, 0.5, "one text")
    figure.text(0.06, 0.5, "and another")
    with pytest.raises(AssertionError, match="and another"):
        assert_readable(figure)


def test_the_picture_is_written_whole_and_replaces_the_old_one(tmp_path):
    folder = make_run(tmp_path / "run")
    (folder / "report.png").write_bytes(b"old")
    samples = make_samples(12, ["a red heart", "a flag"])
    path = write_report(folder, EvalResult({}, samples=samples))
    assert path == folder / "report.png"
    with Image.open(path) as picture:
        picture.load()
        assert picture.width == 1600
        assert picture.height > 900
    assert {file.name for file in folder.iterdir()} == {"metrics.jsonl", "eval.jsonl", "report.png"}
    assert write_report(folder) == path  # without images, and over the one just made
    with Image.open(path) as smaller:
        assert smaller.height < 700


def test_a_users_matplotlibrc_does_not_reach_it(tmp_path):
    folder = make_run(tmp_path / "run")
    plain = write_report(folder).read_bytes()
    with mpl.rc_context({"font.size": 30, "text.usetex": True, "savefig.dpi": 20, "axes.facecolor": "black"}):
        assert write_report(folder).read_bytes() == plain
        assert mpl.rcParams["font.size"] == 30


def test_without_matplotlib_it_says_which_extra_and_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert write_report(make_run(tmp_path / "run")) is None
    assert "pip install 'disco-ds[demo]'" in capsys.readouterr().out
    assert not (tmp_path / "run" / "report.png").exists()


def test_the_right_caption_is_green_wherever_it_ranks(tmp_path):
    samples = make_samples(3, [f"caption {number}" for number in range(18)])
    figure = draw_report(make_run(tmp_path / "run"), samples)
    green = [text.get_text() for text in figure.texts if text.get_color() == GREEN and text.get_weight() == "bold"]
    first, third, last = samples
    assert green == [first.top[0].text, third.top[2].text, last.captions[0]]
    drawn = {text.get_text() for text in figure.texts}
    assert {"right one: rank 1", "right one: rank 3", "right one: rank 99,999"} <= drawn
    assert {caption.text for sample in samples for caption in sample.top} <= drawn


def test_chance_lines(tmp_path):
    def legends(folder):
        figure = draw_report(folder, [])
        return [entry.get_text() for axes in figure.axes if axes.get_legend() for entry in axes.get_legend().texts]

    text = legends(make_run(tmp_path / "a"))
    assert "chance ln(256) = 5.545" in text
    assert "R@10 by chance 0.053" in text
    assert "top-1 by chance 0.100" in text
    assert "R@10   0.500 / 0.500" in text
    sigmoid = legends(make_run(tmp_path / "b", config="loss: {kind: sigmoid}\n"))
    assert not any("ln(" in entry for entry in sigmoid)  # its loss of no knowledge is another


def test_smoothing_equals_a_plain_loop_and_passes_over_gaps():
    values = [random.random() for _ in range(200)]
    values[20] = values[150] = math.nan
    values[199] = math.inf
    for position, mean in enumerate(smoothed(values)):
        near = [v for v in values[max(0, position - 3) : position + 4] if math.isfinite(v)]
        assert mean == pytest.approx(sum(near) / len(near))
    assert all(math.isnan(value) for value in smoothed([math.nan] * 5))
    assert smoothed([]) == []


def test_columns_and_batch():
    lines = [
        {"step": 10, "loss": None, "samples_seen": 640},
        {"step": 20},
        {"step": 30, "loss": 1.5, "samples_seen": 1920},
    ]
    steps, values = column(lines, "loss")
    assert steps == [10, 30]
    assert math.isnan(values[0])
    assert values[1] == 1.5
    assert global_batch(lines) == 64
    assert global_batch([]) is None


class TestWords:
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

    def test_what_no_font_draws_is_said_in_words(self, monkeypatch):
        from disco_ds.report import words

        monkeypatch.setattr(words, "_drawable", lambda: frozenset(range(32, 127)))
        assert printable("crab 🦀, ok") == "crab [crab], ok"
        assert printable("日本の説明") == "[cjk] [hiragana] [cjk]"
        assert printable("a\tb\n c\u200b\x07") == "a b c"
        assert printable("") == printable("\ud800\x00") == "(no text)"

    def test_every_character_left_can_be_drawn(self):
        from disco_ds.report.words import _drawable

        for caption in ODD_CAPTIONS:
            assert all(ord(character) in _drawable() or character == " " for character in printable(caption))
