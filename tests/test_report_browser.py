"""The report in a real browser: headless Chromium opens it from disk, clicks, types, and must have nothing to complain of.

Where Chromium is missing the tests are skipped with the reason; in continuous integration (CI=true, or
LIPSCOPE_BROWSER=required, which .ci/run sets) they fail instead.
"""

from __future__ import annotations

import base64
import contextlib
import os
import re
import threading
import zlib
from pathlib import Path
from typing import Any

import pytest

from lipscope.report.html import write_report
from lipscope.report.server import ReportServer
from report_cases import HOSTILE, make_rows, make_view, write_run

WORDS = ["[CLS]", "alice", " was", " beginning", " to", " get", " tired"]


def show(browser: Any, address: str | Path, *, width: int = 1280, dark: bool = False, mark: str = "") -> None:
    """Open a page, wait until its first chart is drawn, and forget what the browser said before."""
    scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.get("about:blank")
    browser.get_log("browser")
    browser.get((address if isinstance(address, str) else address.resolve().as_uri()) + mark)
    until(browser, "return performance.getEntriesByName('lipscope-shown').length > 0")


def until(browser: Any, condition: str) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(browser, 60, poll_frequency=0.1).until(lambda window: window.execute_script(condition))


def draw_all(browser: Any) -> None:
    """Charts are drawn when they come near the screen: scroll to one after the other until all that are shown are."""
    until(
        browser,
        """
        const shown = [...document.querySelectorAll('[data-chart]')].filter((place) => place.offsetParent);
        const left = shown.filter((place) => !place.querySelector('svg.main-svg'));
        left[0]?.scrollIntoView();
        return left.length === 0;
    """,
    )


def complaints(browser: Any) -> list[str]:
    return [entry["message"] for entry in browser.get_log("browser")]


def curve(browser: Any) -> list[float]:
    """Heights of the median σ that the chart draws now."""
    script = """const place = document.querySelector('.setting:not([hidden]) [data-growth]');
    return place.data.find((trace) => trace.name === 'median σ').y"""
    return [float(y) for y in browser.execute_script(script)]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("report")
    run = write_run(directory / "run", make_rows(), views=[make_view(WORDS)])
    return write_report(run, directory / "report.html")


def test_it_opens_from_disk_without_a_complaint_and_draws_every_chart(browser: Any, page: Path) -> None:
    show(browser, page)
    draw_all(browser)
    assert complaints(browser) == []
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0
    assert "How smooth is toy?" in browser.find_element("css selector", "h1").text


def test_a_click_on_the_heat_map_changes_curve_bounds_and_tokens(browser: Any, page: Path) -> None:
    show(browser, page)
    detail = browser.find_element("css selector", "[data-detail]")
    assert detail.find_element("css selector", "[data-where]").text.startswith("Layer 2, head 3")
    # The view is of a shorter input than the curve's last point, and says so.
    assert "Worst tokens at n = 7: “[CLS]” 50%" in detail.text
    before = curve(browser)
    browser.find_element("css selector", '.heat button[aria-label^="layer 0, head 1"]').click()
    assert detail.find_element("css selector", "[data-where]").text.startswith("Layer 0, head 1")
    rows = [row for row in make_rows() if (row["layer"], row["head"]) == (0, 1)]
    medians = [sum(row["estimate"] for row in rows if row["n"] == n) / 2 for n in (8, 16, 32, 64)]
    assert curve(browser) == pytest.approx(medians, rel=1e-4)
    assert curve(browser) != before
    assert "refined bound, tokens of that norm" in detail.text
    assert "lipscope tokens toy --layer 0 --head 1 --text book --n 32" in detail.text
    assert "largest logit" in detail.text
    assert complaints(browser) == []


def test_the_first_screen_answers_how_smooth_and_where(browser: Any, tmp_path: Path) -> None:
    deep = make_rows(layers=30, heads=None, lengths=(16, 24, 32), model="deep")
    runs = write_run(tmp_path / "a", make_rows()), write_run(tmp_path / "b", deep)
    show(browser, write_report(runs[0], tmp_path / "report.html", compare=runs[1]))
    first = browser.execute_script("""
        const seen = (e) => e.getBoundingClientRect().bottom <= innerHeight;
        return [...document.querySelectorAll('h1, .answer li, .warning')].filter(seen).map((e) => e.innerText)""")
    assert first[0] == "How smooth are toy and deep?"
    assert first[1].startswith("toy on book: least smooth in layer 2, head 3, where a small change of its 64 tokens")
    assert first[2].startswith("deep on book: least smooth in layer 29, where a small change of its 32 tokens")
    assert len(first) == 3  # no warning
    browser.find_element("css selector", '[data-show="1"]').click()
    assert browser.find_element("css selector", ".setting:not([hidden])").get_attribute("data-setting") == "1"


def test_a_link_leads_to_a_place_and_a_choice_makes_one(browser: Any, page: Path, tmp_path: Path) -> None:
    where = lambda: browser.find_element("css selector", ".setting:not([hidden]) [data-where]").text  # noqa: E731
    show(browser, page, mark="#L1H2")
    assert where().startswith("Layer 1, head 2")
    assert in_view(browser, '.heat [aria-pressed="true"]')
    browser.find_element("css selector", '.heat button[aria-label^="layer 0, head 1"]').click()
    assert browser.execute_script("return location.hash") == "#L0H1"
    browser.execute_script("location.hash = '#L9H9'")  # no such place: nothing changes
    browser.execute_script("location.hash = '#L2H0'")
    until(browser, "return document.querySelector('[data-where]').textContent.startsWith('Layer 2, head 0')")
    rows = make_rows(heads=None) + make_rows(heads=None, scope="block")
    show(browser, write_report(write_run(tmp_path / "run", rows), tmp_path / "report.html"), mark="#s2L1")
    assert browser.find_element("css selector", ".setting:not([hidden])").get_attribute("data-setting") == "1"
    assert where().startswith("Layer 1:")
    assert complaints(browser) == []


def in_view(browser: Any, selector: str) -> bool:
    script = """const box = document.querySelector(arguments[0]).getBoundingClientRect();
    return box.height > 0 && box.top >= 0 && box.bottom <= innerHeight"""
    return bool(browser.execute_script(script, selector))


@pytest.mark.parametrize(("width", "what"), [(1400, "[data-where]"), (390, "[data-now]")])
def test_the_chosen_place_stays_in_sight_beside_thirty_layers(browser: Any, tmp_path: Path, width: int, what: str) -> None:
    run = write_run(tmp_path / "run", make_rows(layers=30, heads=None))
    show(browser, write_report(run, tmp_path / "report.html"), width=width)
    for layer in (2, 15, 27):
        button = browser.find_element("css selector", f'.heat button[aria-label^="layer {layer},"]')
        browser.execute_script("arguments[0].scrollIntoView({block: 'center'}); arguments[0].click()", button)
        assert browser.find_element("css selector", what).text.startswith(f"Layer {layer}:")
        assert in_view(browser, what)


@pytest.mark.parametrize("width", [1280, 390])
def test_paper_shows_every_chart_of_every_setting_and_view(browser: Any, tmp_path: Path, width: int) -> None:
    rows = make_rows() + make_rows(heads=None)
    views = [make_view(WORDS), make_view(WORDS, layer=1, head=1)]
    show(
        browser,
        write_report(write_run(tmp_path / "run", rows, views=views), tmp_path / "report.html"),
        width=width,
        dark=True,
    )
    browser.execute_script("""addEventListener('beforeprint', () => {
        const places = [...document.querySelectorAll('[data-chart], [data-growth]')];
        window.onPaper = { places: places.length, theme: document.documentElement.dataset.theme,
          widths: places.map((place) => Number(place.querySelector('svg.main-svg')?.getAttribute('width') ?? 0)),
          ink: getComputedStyle(document.body).color, hidden: document.querySelectorAll('main [hidden]').length,
          wide: Math.max(...places.map((place) => place.getBoundingClientRect().right)) };
    })""")
    pdf = browser.execute_cdp_cmd("Page.printToPDF", {"printBackground": True, "paperWidth": 8.27, "paperHeight": 11.69})
    assert len(pdf["data"]) > 50_000
    paper = browser.execute_script("return window.onPaper")
    assert paper["places"] == len(paper["widths"]) == 2 * (1 + 1 + 4) + 2  # growth, layers, four scatters; two views
    assert all(100 < width <= 700 for width in paper["widths"])
    # Scatter plots stand in two columns on paper, whatever the window: wider ones would shrink every page.
    assert sum(width <= 350 for width in paper["widths"]) == 2 * 4
    assert (paper["theme"], paper["hidden"], paper["ink"]) == ("light", 0, "rgb(27, 31, 36)")
    # On the screen everything is as it was.
    assert browser.execute_script("return document.documentElement.dataset.theme") == "auto"
    assert browser.execute_script("return document.querySelectorAll('.setting[hidden], .view[hidden]').length") == 2
    draw_all(browser)
    assert complaints(browser) == []


def test_colours_that_are_data_are_printed_without_being_asked_for(browser: Any, page: Path) -> None:
    show(browser, page)
    look = r"""return [...document.querySelectorAll('.heat button')].map(
        (cell) => getComputedStyle(cell).backgroundColor.match(/\d+/g).map(Number))"""
    wanted = {tuple(ink) for ink in browser.execute_script(look)}
    assert len(wanted) > 3
    printed = base64.b64decode(browser.execute_cdp_cmd("Page.printToPDF", {"printBackground": False})["data"])
    inks = set()
    for stream in re.findall(rb"stream\r?\n(.*?)endstream", printed, re.DOTALL):
        with contextlib.suppress(zlib.error):
            for ink in re.findall(rb"([\d.]+) ([\d.]+) ([\d.]+) rg\b", zlib.decompressobj().decompress(stream)):
                inks.add(tuple(round(255 * float(part)) for part in ink))
    assert inks.issuperset(wanted)


def test_a_token_view_takes_one_page_of_paper_and_advice_none(browser: Any, tmp_path: Path) -> None:
    words, pages = [f" word{k}" for k in range(32)], []
    for count in (1, 2, 3):
        views = [make_view(words, layer=0, head=head) for head in range(count)]
        run = write_run(tmp_path / f"run{count}", make_rows(heads=3), views=views)
        show(browser, write_report(run, tmp_path / f"report{count}.html"))
        printed = browser.execute_cdp_cmd("Page.printToPDF", {"paperWidth": 8.5, "paperHeight": 11})["data"]
        pages.append(len(re.findall(rb"/Type\s*/Page\b", base64.b64decode(printed))))
    assert [pages[1] - pages[0], pages[2] - pages[1]] == [1, 1]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    shown = browser.execute_script("return document.querySelector('main').innerText")
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    assert "lipscope sweep" not in shown


@pytest.mark.parametrize("width", [1400, 390])
def test_legends_cover_no_data_and_logarithmic_axes_have_numbers(browser: Any, page: Path, width: int) -> None:
    show(browser, page, width=width)
    draw_all(browser)
    found = browser.execute_script("""
        const charts = [...document.querySelectorAll('.js-plotly-plot')];
        return charts.filter((place) => place.layout.yaxis.type === 'log').map((place) => {
          const plot = place.querySelector('.cartesianlayer').getBoundingClientRect();
          const legend = place.querySelector('.legend')?.getBoundingClientRect();
          const { tickvals, range: [low, high] } = place._fullLayout.yaxis;
          const ticks = tickvals.map(Math.log10).filter((tick) => low <= tick && tick <= high).length;
          return { covered: legend ? Math.max(0, plot.bottom - legend.top) : 0, ticks,
                   ends: legend ? legend.bottom - place.getBoundingClientRect().bottom : 0 };
        })""")
    assert len(found) == 6
    for chart in found:
        assert chart["covered"] == 0
        assert chart["ends"] <= 1
        assert chart["ticks"] >= 2


def test_names_of_axes_fit_on_a_phone(browser: Any, tmp_path: Path) -> None:
    rows = [row | {"typical": 0.1 * row["estimate"], "stable_rank": 3.0 + row["layer"]} for row in make_rows()]
    show(browser, write_report(write_run(tmp_path / "run", rows), tmp_path / "report.html"), width=390)
    draw_all(browser)
    cut = browser.execute_script("""
        const over = (inner, outer) => Math.max(inner.right - outer.right, outer.left - inner.left);
        return [...document.querySelectorAll('.js-plotly-plot')].map((place) => {
          const title = place.querySelector('.xtitle');
          return title ? over(title.getBoundingClientRect(), place.getBoundingClientRect()) : 0;
        })""")
    assert len(cut) == 8  # growth, layers, six scatters
    assert max(cut) <= 0


def test_tables_of_a_comparison_break_no_words(browser: Any, tmp_path: Path) -> None:
    name = "sentence-transformers-all-minilm-l6-finetuned"
    rows, other = make_rows(model="all-minilm-l6-v2"), make_rows(model=name)
    runs = write_run(tmp_path / "a", rows), write_run(tmp_path / "b", [row | {"upper": 2 * row["upper"]} for row in other])
    show(browser, write_report(runs[0], tmp_path / "report.html", compare=runs[1]), width=1400)
    assert f"{name} on book against all-minilm-l6-v2 on book" in browser.find_element("id", "compare").text
    broken = browser.execute_script(r"""
        const broken = [], range = document.createRange();
        const walker = document.createTreeWalker(document.querySelector('#compare table'), NodeFilter.SHOW_TEXT);
        while (walker.nextNode()) for (const word of walker.currentNode.data.matchAll(/[^\s-]+/g)) {
          range.setStart(walker.currentNode, word.index);
          range.setEnd(walker.currentNode, word.index + word[0].length);
          if (range.getClientRects().length > 1) broken.push(word[0]);
        }
        return broken""")
    assert broken == []
    heights = "return [...document.querySelectorAll('#compare tbody tr')].map((row) => row.offsetHeight)"
    assert max(browser.execute_script(heights)) < 40  # a place and an interval stand on one line


def test_the_keyboard_reaches_every_cell(browser: Any, page: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    show(browser, page)
    stops = browser.find_elements("css selector", '.heat button[tabindex="0"]')
    assert len(stops) == 1  # one stop for the tab key, arrows inside
    browser.execute_script("arguments[0].focus()", stops[0])
    for key in (Keys.ARROW_UP, Keys.ARROW_UP, Keys.ARROW_LEFT, Keys.ENTER):
        browser.switch_to.active_element.send_keys(key)
    assert browser.find_element("css selector", "[data-where]").text.startswith("Layer 0, head 2")
    assert browser.switch_to.active_element.get_attribute("aria-pressed") == "true"


def test_scale_and_groups_can_be_switched(browser: Any, page: Path) -> None:
    show(browser, page)
    chart = "const place = document.querySelector('[data-growth]'); return "
    assert browser.execute_script(chart + "place.layout.yaxis.type") == "log"
    names = set(browser.execute_script(chart + "place.data.map((trace) => trace.name)"))
    assert {"median σ", "guide √n", "guide n^¼", "refined bound", "paper's bound", "fit levelling off"} <= names
    browser.find_element("css selector", "[data-scale]").click()
    browser.find_element("css selector", '[data-group="bound"]').click()
    assert browser.execute_script(chart + "place.layout.yaxis.type") == "linear"
    left = set(browser.execute_script(chart + "place.data.map((trace) => trace.name)"))
    assert names - left == {"certificate", "refined bound", "paper's bound", "refined, any input", "paper's, any input"}


def test_the_token_view_shows_the_text(browser: Any, page: Path) -> None:
    show(browser, page)
    text = browser.find_element("css selector", ".view .text")
    tokens = [token.get_attribute("textContent") for token in text.find_elements("css selector", ".token")]
    assert tokens == WORDS
    assert text.is_displayed()
    shades = browser.execute_script(
        "return [...document.querySelectorAll('.view .token')].map((t) => getComputedStyle(t).backgroundColor)"
    )
    assert shades[0] != shades[1] == shades[2]


def test_hostile_text_is_shown_and_not_executed(browser: Any, tmp_path: Path) -> None:
    name = HOSTILE[0]
    rows = make_rows(model=name, layers=2, heads=2, notes=HOSTILE[1])
    views = [make_view(list(HOSTILE), model=name, text=HOSTILE[2], layer=1, head=1)]
    run = write_run(tmp_path / "run", rows, views=views, text=HOSTILE[2])
    for width in (1280, 390):
        show(browser, write_report(run, tmp_path / "report.html"), width=width)
        browser.find_element("css selector", '.heat button[aria-label^="layer 0, head 1"]').click()
        browser.find_element("css selector", '.heat button[aria-label^="layer 1, head 1"]').click()
        draw_all(browser)
        tokens = browser.execute_script("return [...document.querySelectorAll('.view .token')].map((t) => t.textContent)")
        assert tokens == list(HOSTILE)
        assert name in browser.find_element("css selector", "h1").text
        assert browser.execute_script("return window.hacked === undefined")
        assert browser.execute_script("return document.querySelectorAll('main script, main img, main b').length") == 0
        assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")
        assert complaints(browser) == []
        csv = browser.execute_script("return lipscope.csv()")
        assert name in csv


def test_the_policy_stops_scripts_that_get_in(browser: Any, page: Path) -> None:
    show(browser, page)
    browser.execute_script("""
        const script = document.createElement('script');
        script.textContent = 'window.hacked = 1';
        document.body.append(script);
        const image = document.createElement('div');
        image.innerHTML = '<img src="x" onerror="window.hacked = 1">';
        document.body.append(image);
    """)
    assert browser.execute_script("return window.hacked === undefined")
    assert any("Content Security Policy" in line for line in complaints(browser))


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_phone_width_and_both_themes(browser: Any, page: Path, dark: bool) -> None:
    show(browser, page, width=390, dark=dark)
    width = browser.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
    assert width[0] <= width[1] == 390
    paper, ink = (brightness(browser, name) for name in ("background-color", "color"))
    assert (paper < 60 < 190 < ink) if dark else (paper > 190 > 60 > ink)
    line = "return document.querySelector('[data-growth]').data.find((t) => t.name === 'median σ').line.color"
    assert browser.execute_script(line) == ("#56B4E9" if dark else "#0072B2")
    # Two presses lead from the system's choice to dark, whatever that choice was.
    for _ in range(2):
        browser.find_element("id", "theme").click()
    assert brightness(browser, "background-color") < 60
    assert browser.execute_script(line) == "#56B4E9"
    browser.execute_script("localStorage.clear()")


def brightness(browser: Any, name: str) -> float:
    value = browser.find_element("css selector", "body").value_of_css_property(name)
    channels = [float(part) for part in value.split("(")[1].rstrip(")").split(",")[:3]]
    return sum(channels) / 3


def test_twenty_thousand_rows_open_in_three_seconds(browser: Any, tmp_path: Path) -> None:
    rows = make_rows(layers=12, heads=12, lengths=(8, 16, 24, 32, 48, 64, 96), inputs=20)
    assert len(rows) > 20_000
    page = write_report(write_run(tmp_path / "run", rows), tmp_path / "report.html")
    seconds, work = [], []
    for _ in range(5):
        browser.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
        show(browser, page)
        # From the start of the navigation until the first chart stands.
        seconds.append(browser.execute_script("return performance.getEntriesByName('lipscope-shown')[0].startTime") / 1000)
        metrics = browser.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
        work.append(next(metric["value"] for metric in metrics if metric["name"] == "TaskDuration"))
        browser.execute_cdp_cmd("Performance.disable", {})
        if seconds[-1] < 3:
            break
    # The clock on the wall decides. Where other programs keep the machine from the page, it is the processor's time.
    overloaded = os.getloadavg()[0] > (os.cpu_count() or 1)
    assert min(seconds) < 3 or (overloaded and min(work) < 3), (seconds, work, os.getloadavg())
    assert complaints(browser) == []
    csv = browser.execute_script("return lipscope.csv()").strip().split("\n")
    assert len(csv) == len(rows) + 1


def test_two_runs_and_a_choice_of_settings(browser: Any, tmp_path: Path) -> None:
    rows = make_rows(heads=None) + make_rows(heads=None, scope="norm+attention")
    other = [row | {"estimate": 2 * row["estimate"], "lower": 2 * row["lower"], "upper": 2 * row["upper"]} for row in rows]
    first, second = write_run(tmp_path / "before", rows), write_run(tmp_path / "after", other)
    show(browser, write_report(first, tmp_path / "report.html", compare=second))
    assert "toy on book (after) against toy on book (before)" in browser.find_element("id", "compare").text
    assert browser.find_element("css selector", ".setting:not([hidden])").get_attribute("data-setting") == "0"
    before = curve(browser)
    from selenium.webdriver.support.ui import Select

    choice = Select(browser.find_element("id", "setting"))
    assert len(choice.options) == 4
    choice.select_by_index(2)
    assert curve(browser) == pytest.approx([2 * y for y in before], rel=1e-4)
    assert complaints(browser) == []


def test_a_served_report_takes_over_new_rows(browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lipscope.report.server.LEAST_PAUSE", 0.0)
    run = write_run(tmp_path / "run", make_rows(lengths=(8, 16)))
    with ReportServer(run) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            show(browser, server.url)
            browser.find_element("css selector", '.heat button[aria-label^="layer 1, head 1"]').click()
            assert len(curve(browser)) == 2
            write_run(tmp_path / "run", make_rows(lengths=(8, 16, 32)))
            until(browser, "return document.querySelector('[data-growth]').data.some((t) => t.x.includes(32))")
            assert len(curve(browser)) == 3
            # What was chosen stays chosen.
            assert browser.find_element("css selector", "[data-where]").text.startswith("Layer 1, head 1")
            assert complaints(browser) == []
        finally:
            server.shutdown()
            thread.join()
