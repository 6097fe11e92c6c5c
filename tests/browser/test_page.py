"""The page in headless Chromium: no error in the console, nothing that axe-core finds, and what a reader does works.

Needs Chromium, its driver, and axe-core from npm: `make programs` installs them.
SHOTS=FOLDER keeps a screenshot of each page that is looked at.
"""

import os
import re
import shutil
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import programs
import pytest
from page_points import profile, sweep_points

from selfspec_cli.record import folder
from selfspec_cli.report import make

CHROMIUM, DRIVER = programs.chromium(), shutil.which("chromedriver")
pytestmark = programs.needs("chromium", "chromedriver", "axe-core")

QUIET = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage")
LOOKS = [(1400, "light"), (1400, "dark"), (800, "light"), (420, "light"), (420, "dark")]
PATIENCE = 120  # seconds, on a machine that is busy


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for word in (*QUIET, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    made = webdriver.Chrome(options=options, service=Service(DRIVER))
    made.set_script_timeout(PATIENCE)
    made.execute_cdp_cmd("Network.enable", {})
    made.execute_cdp_cmd(
        "Network.emulateNetworkConditions",
        {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0},
    )
    yield made
    made.quit()


def shown(driver, page, width=1280, scheme="light"):
    """Open a page, as wide and as light as is asked for, and wait until it has drawn everything."""
    resize(driver, width, 900)
    media = [{"name": "prefers-color-scheme", "value": scheme}, {"name": "prefers-reduced-motion", "value": "reduce"}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})
    driver.get_log("browser")
    driver.get(page.as_uri())

    def ready():
        problem = driver.execute_script("return document.getElementById('problem')?.textContent")
        assert not problem, problem
        return driver.execute_script("return document.documentElement.dataset.ready") == "true"

    wait_for(ready, "the page is not ready")


def wait_for(done, otherwise):
    until = time.monotonic() + PATIENCE
    while not done():
        assert time.monotonic() < until, otherwise
        time.sleep(0.1)


def violations(driver):
    """What axe-core finds, as rule and elements."""
    driver.execute_script(programs.AXE.read_text(encoding="utf-8"))
    script = "const done = arguments[0]; axe.run().then((found) => done(found.violations))"
    return [
        (rule["id"], [node["html"][:200] for node in rule["nodes"]]) for rule in driver.execute_async_script(script)
    ]


def console_messages(driver):
    return [entry["message"] for entry in driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


def resize(driver, width, height):
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def keep_picture(driver, name):
    if where := os.environ.get("SHOTS"):
        tall = driver.execute_script("return Math.min(document.documentElement.scrollHeight, 9000)")
        resize(driver, driver.execute_script("return innerWidth"), tall)
        Path(where).mkdir(parents=True, exist_ok=True)
        driver.save_screenshot(str(Path(where) / f"{name}.png"))


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A page of points with everything in it, and the pages of the published results."""
    place = tmp_path_factory.mktemp("pages")
    for number, point in enumerate(sweep_points()):
        folder.save(place / "made_up", point)
        if number < 2:
            parts = {"verify": 0.6, "sampler": 0.1, "host": 0.04, "idle": 0.06}
            drafting = {"trunk": 0.1, "head": 0.05, "gate": 0.02, "draft": 0.03} if number else {}
            folder.save_profile(place / "made_up", profile(point, parts | drafting), b"")
    published = programs.ROOT / "results" / "published"
    sources = {"made_up": place / "made_up", "cpu": published / "cpu.jsonl.xz", "published": published}

    class Pages(dict):
        def __missing__(self, name):
            self[name] = make.run(sources[name], place / "pages" / name)[1]
            return self[name]

    return Pages()


@pytest.mark.parametrize(("width", "scheme"), LOOKS)
@pytest.mark.parametrize("name", ["made_up", "cpu", "published"])
def test_no_error_no_violation_and_nothing_wider_than_the_screen(driver, pages, name, width, scheme):
    shown(driver, pages[name], width, scheme)
    assert console_messages(driver) == []
    assert driver.execute_script("return document.documentElement.scrollWidth") <= width
    script = "return [...document.querySelectorAll('.chart')].map((chart) => !!chart.querySelector('svg path'))"
    charts = driver.execute_script(script)
    assert charts and all(charts)
    found = violations(driver)
    keep_picture(driver, f"{name}_{width}_{scheme}")
    assert found == []


def test_a_row_opens_what_is_kept_of_it(driver, pages):
    shown(driver, pages["made_up"])
    driver.execute_script("document.querySelectorAll('#all td.open button')[1].click()")
    opened = driver.execute_script("return document.querySelector('#all .opened').textContent")
    for text in ("selfspec sweep", "runs/", "git revision", "Configuration", "Tokens a second of each repeat"):
        assert text in opened
    button = "document.querySelectorAll('#all td.open button')[1]"
    assert driver.execute_script(f"return {button}.getAttribute('aria-expanded')") == "true"
    assert violations(driver) == []
    keep_picture(driver, "made_up_opened")
    driver.execute_script(f"{button}.click()")
    assert driver.execute_script("return document.querySelector('#all .opened')") is None


def column(driver, title):
    """The cells of a column by its title, as they stand; None where the column is hidden."""
    script = """
      const at = window.selfspecTable.columns().titles().toArray().indexOf(arguments[0]);
      const column = window.selfspecTable.column(at, { search: "applied", page: "current" });
      return column.visible() ? column.nodes().toArray().map((cell) => cell.textContent) : null"""
    return driver.execute_script(script, title)


def test_the_table_sorts_filters_and_hides_columns(driver, pages):
    shown(driver, pages["made_up"])
    table = "window.selfspecTable"
    at = driver.execute_script(f"return {table}.columns().titles().toArray().indexOf('speedup')")
    driver.execute_script(f"{table}.order([{at}, 'desc']).draw()")
    speeds = [float(cell) for cell in column(driver, "speedup") if cell]
    assert speeds == sorted(speeds, reverse=True) and len(set(speeds)) > 3
    everything = driver.execute_script(f"return {table}.rows().count()")
    driver.execute_script(f"{table}.search('varH').draw()")
    found = column(driver, "arm")
    assert 0 < len(found) < everything and all("varH" in cell for cell in found)
    driver.execute_script(f"{table}.search('').column({at}).visible(false).draw()")
    assert column(driver, "speedup") is None
    # The button is how a reader does it.
    driver.execute_script("document.querySelector('.dt-buttons button').click()")
    assert driver.execute_script("return document.querySelectorAll('.dt-button-collection button').length") > 20
    assert violations(driver) == []


def test_a_figure_shows_another_panel_and_its_points(driver, pages):
    shown(driver, pages["made_up"])
    drawn = "return document.querySelector('#latency .chart svg').outerHTML"
    before = driver.execute_script(drawn)
    driver.execute_script("""
      const select = document.getElementById('latency-panel');
      select.value = '1';
      select.dispatchEvent(new Event('change'))""")
    wait_for(lambda: driver.execute_script(drawn) != before, "the figure did not change")
    driver.execute_script("document.querySelector('#by_threshold figcaption button').click()")
    hint = driver.execute_script("return document.getElementById('only').textContent")
    assert "points of one figure" in hint
    assert all("varH" in cell for cell in column(driver, "arm"))
    driver.execute_script("document.querySelector('#only button').click()")
    assert driver.execute_script("return document.getElementById('only').hidden")


def test_text_of_points_is_text(driver, tmp_path):
    bad = "<img src=x onerror=window.hurt=1>"
    for point in sweep_points():
        named = replace(point, device=bad, command=[bad], arm=point.arm | {"model": bad}, status="failed", reason=bad)
        folder.save(tmp_path, named)
    shown(driver, make.run(tmp_path, tmp_path)[1])
    driver.execute_script("document.querySelector('#all td.open button').click()")
    assert driver.execute_script("return [window.hurt ?? null, document.querySelectorAll('img').length]") == [None, 0]


OVERLAPS = """
  const boxes = (query) => [...document.querySelectorAll(query)].map((one) => one.getBoundingClientRect());
  const meet = (a, b) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 3 && b.top < a.bottom - 3;
  return Object.fromEntries(arguments[0].map((name) => {
    const chart = document.querySelector(`#${name} .chart svg`).getBoundingClientRect();
    const titles = boxes(`#${name} .mark-text.role-mark text`);
    const bars = boxes(`#${name} .mark-rect.role-mark path`);
    const rules = boxes(`#${name} .mark-rule.role-mark line`).filter((rule) => rule.height > 2 * rule.width);
    return [name, {
      titles: titles.length,
      outside: titles.filter((title) => title.right > chart.right + 1).length,
      on_bars: titles.filter((title) => bars.some((bar) => meet(title, bar))).length,
      on_rules: titles.filter((title) => rules.some((rule) => meet(title, rule))).length,
      on_titles: titles.filter((title, at) => titles.some((other, place) => place > at && meet(title, other))).length,
    }];
  }))"""


@pytest.mark.parametrize("width", [420, 800, 1400])
def test_titles_of_bars_run_into_nothing(driver, tmp_path, width):
    """On a phone names ran into the numbers at the other end of their line."""
    for point in sweep_points():
        copies = {"draft_weights": "int4", "draft_context": "blocks:1024"} if point.arm["arm"] == "layer_skip" else {}
        if point.arm.get("k") == 9:
            copies = {"arm": "vllm", "speculative": "ngram prompt_lookup_max=4 prompt_lookup_min=1"}
        folder.save(tmp_path, replace(point, arm=point.arm | copies))
    shown(driver, make.run(tmp_path, tmp_path)[1], width)
    for found in driver.execute_script(OVERLAPS, ["speedup", "identical", "latency"]).values():
        assert found["titles"] >= 8
        assert (found["outside"], found["on_bars"], found["on_rules"], found["on_titles"]) == (0, 0, 0, 0)
    keep_picture(driver, f"long_names_{width}")


@pytest.mark.parametrize("width", [420, 1400])
def test_categories_have_a_row_each(driver, pages, width):
    """All of them were drawn in the height of one."""
    shown(driver, pages["made_up"], width)
    script = """return [...document.querySelectorAll('#categories .role-axis-label text')]
      .filter((label) => !/%|x$/.test(label.textContent))
      .map((label) => [label.textContent, label.getBoundingClientRect().top])"""
    labels = driver.execute_script(script)
    assert len(labels) == 2 * 4  # of speedup, and of acceptance
    tops = sorted(top for _, top in labels)
    assert all(later - earlier > 15 for earlier, later in pairwise(tops))
    dots = "[...document.querySelectorAll('#categories .role-mark path')]"
    colours = driver.execute_script(f"return new Set({dots}.map((dot) => dot.getAttribute('fill'))).size")
    assert colours >= 2  # one for each arm


def test_a_printed_page_is_light_and_has_the_figures_alone(driver, pages):
    shown(driver, pages["made_up"], 800, "dark")
    ink = "return getComputedStyle(document.querySelector('#by_load .chart text')).fill"
    on_screen = driver.execute_script(ink)
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    assert driver.execute_script("return matchMedia('print').matches")
    printed = driver.execute_script(ink)
    levels = [sum(map(int, re.findall(r"\d+", colour))) for colour in (on_screen, printed)]
    assert levels[0] > 384 > levels[1]  # light on dark, dark on light
    assert driver.execute_script("return document.getElementById('points').getClientRects().length") == 0
    keep_picture(driver, "printed")
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
