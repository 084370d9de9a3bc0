"""disco-report's page in a real browser: no script error, no request to anywhere, nothing wider than the window."""

from __future__ import annotations

import shutil

import pytest

from tests.helpers.report_runs import make_run

pytest.importorskip("matplotlib")
playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install 'disco-ds[dev]'")

from disco_ds.cli.report import main  # noqa: E402

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        found = next(filter(None, map(shutil.which, NAMES)), None)
        try:
            started = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        except playwright.Error as error:
            pytest.skip(f"no browser: none of {', '.join(NAMES)} on the PATH (make browser): {str(error)[:200]}")
        yield started
        started.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    one = make_run(folder / "clip", steps=3000)
    other = make_run(folder / "clip-with-a-rather-long-name-of-its-own", batch=1024)
    assert main([str(one)]) == 0
    assert main([str(one), str(other), "--out", str(folder / "both.html")]) == 0
    return {"one": one / "report.html", "both": folder / "both.html"}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("name", ["one", "both"])
def test_a_page_opens(browser, pages, name, width, scheme):
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    requests, complaints = [], []
    page.on("request", lambda request: requests.append(request.url))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda message: complaints.append(message.text))
    page.goto(pages[name].as_uri())
    page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    page.evaluate("Promise.all([...document.images].map(image => image.decode()))")
    assert [url for url in requests if not url.startswith("data:")] == [pages[name].as_uri()]
    assert complaints == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    drawn = page.evaluate("[...document.querySelectorAll('figure svg')].map(svg => svg.getBoundingClientRect().width)")
    assert len(drawn) >= 10
    assert min(drawn) > 300
    # letters of a chart are no smaller than a phone shows legibly
    heights = page.evaluate(
        "[...document.querySelectorAll('figure svg text')].map(t => t.getBoundingClientRect().height)"
    )
    assert min(height for height in heights if height) >= 8
    ink, paper = page.evaluate(
        "[getComputedStyle(document.querySelector('figure svg text')).fill, "
        "getComputedStyle(document.body).backgroundColor]"
    )
    assert (brightness(ink) > 180) == (brightness(paper) < 60) == (scheme == "dark")
    page.close()


def brightness(colour):
    return sum(map(int, colour.removeprefix("rgb(").removesuffix(")").split(","))) / 3
