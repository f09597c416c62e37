"""The report's page in a real browser: nothing loaded, nothing executed, seen at any width."""

import json
import os
import shutil
from pathlib import Path

import pytest
from unit.results.report.made import MIB, Run, make_run, make_sweep

from eke.cli import main

pytestmark = pytest.mark.slow  # a browser takes seconds to start

HOSTILE = (
    "<img src=x onerror=\"document.title='owned'\"></script><script>document.title='owned'</script>"
)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip


@pytest.fixture(scope="module")
def browser():
    """Debian's chromium, driven through its own driver."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (chromium and driver):
        if os.environ.get("EKE_CI"):
            pytest.fail("CI installs chromium and chromium-driver")
        pytest.skip("needs chromium and its driver: apt install chromium chromium-driver")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    for flag in FLAGS:
        options.add_argument(flag)
    options.binary_location = chromium
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    started = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield started
    started.quit()


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    """The report of a sweep with repeats, refusals, failures, and names that want to be markup."""
    folder = tmp_path_factory.mktemp("report") / "runs"
    runs = [
        Run({"precision": p, "optimizer": o}, repeat=r, speed=s * (1 + r / 100), peak=m * MIB)
        for r in range(3)
        for p, o, s, m in (
            ("fp32", "adamw", 1000, 100),
            ("bf16", "adamw", 200, 70),
            ("fp32", "lion", 90, 80),
            ("bf16", "lion", 2050, 50),
        )
    ]
    runs += [
        Run({"precision": "fp16"}, outcome="refused", reason=HOSTILE),
        Run({"precision": HOSTILE}, outcome="crashed", reason=HOSTILE, speed=None, loss=None),
    ]
    make_sweep(folder, runs, name=HOSTILE)
    for name in ("fp8", "tf32"):
        make_run(folder / name, Run({"precision": name}), [3.0, 2.5, 2.0])
    assert main(["report", str(folder), "--quiet"]) == 0
    return folder / "report.html"


def opened(browser, page, width=1280, dark=False):
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600},
    )
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    browser.get_log("browser")
    browser.get_log("performance")
    browser.get(page.as_uri())
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(browser, 60).until(
        lambda b: b.execute_script("return document.body.dataset.painted") == "yes"
    )
    return browser


def script(browser, text):
    return browser.execute_script(f"return {text}")


def column(browser, title):
    """Texts of one column, from the top."""
    titles = script(browser, "[...document.querySelectorAll('#main th')].map(e => e.textContent)")
    at = titles.index(title) + 1
    cells = f"[...document.querySelectorAll('#main tbody td:nth-child({at})')]"
    return script(browser, f"{cells}.map(e => e.textContent)")


def click(browser, title):
    heads = (
        f"[...document.querySelectorAll('#main th button')].find(e => e.textContent === '{title}')"
    )
    browser.execute_script(f"{heads}.click()")


def test_no_request_leaves_it_and_the_console_is_silent(browser, page):
    opened(browser, page)
    asked = []
    for entry in browser.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            asked.append(message["params"]["request"]["url"])
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
    assert [url for url in asked if url.startswith("file:")] == [page.as_uri()]
    assert browser.get_log("browser") == []


def test_names_and_errors_are_shown_and_never_executed(browser, page):
    opened(browser, page)
    assert browser.title.startswith("eke report: <img src=x")
    assert script(browser, "document.images.length") == 0
    assert script(browser, "document.scripts.length") == 3
    assert HOSTILE in script(browser, "document.body.innerText")


def test_every_picture_is_drawn(browser, page):
    opened(browser, page)
    marks = (
        "[...document.querySelectorAll('.picture')].map(e => e.querySelectorAll('svg path').length)"
    )
    counts = script(browser, marks)
    assert len(counts) == 7
    assert all(count > 3 for count in counts), counts


def test_the_table_sorts_by_number_absent_ones_last(browser, page):
    opened(browser, page)
    click(browser, "samples/s")
    falling = column(browser, "samples/s")
    numbers = [float(text) for text in falling if text]
    assert numbers == sorted(numbers, reverse=True)
    assert len(numbers) > 3
    assert falling[-2:] == ["", ""]
    click(browser, "samples/s")
    rising = column(browser, "samples/s")
    assert rising == [*reversed(falling[: len(numbers)]), "", ""]
    assert (
        script(browser, "document.querySelector('#main th[aria-sort]').textContent") == "samples/s"
    )
    click(browser, "outcome")
    assert column(browser, "outcome") == sorted(column(browser, "outcome"))


def test_the_table_can_be_searched(browser, page):
    opened(browser, page)
    search = browser.find_element("id", "search")
    search.send_keys("lion bf16")
    assert len(column(browser, "outcome")) == 1
    assert "1 of 8 rows" in script(browser, "document.getElementById('count').textContent")
    search.clear()
    search.send_keys("nothing at all")
    assert column(browser, "outcome") == []


@pytest.mark.parametrize("dark", [False, True])
def test_a_phone_scrolls_down_and_not_sideways(browser, page, dark):
    opened(browser, page, width=390, dark=dark)
    assert script(browser, "document.scrollingElement.scrollWidth") <= 390
    pictures = "[...document.querySelectorAll('.picture svg')]"
    widths = script(browser, f"{pictures}.map(e => e.getBoundingClientRect().width)")
    assert max(widths) <= 390


@pytest.mark.parametrize("dark", [False, True])
def test_text_stands_out_from_its_ground(browser, page, dark):
    """Contrast of 4.5 at least (WCAG 2.1, 1.4.3), for body, quiet text and table cells."""
    opened(browser, page, dark=dark)
    for selector in ("body", ".quiet", "#main tbody td", "tr.front td"):
        ink = script(browser, f"getComputedStyle(document.querySelector('{selector}')).color")
        ground = script(browser, "getComputedStyle(document.body).backgroundColor")
        assert contrast(ink, ground) >= 4.5, (selector, ink, ground)


def contrast(first: str, second: str) -> float:
    """Of two CSS colours, as WCAG defines it."""
    bright, dim = sorted((luminance(first), luminance(second)), reverse=True)
    return (bright + 0.05) / (dim + 0.05)


def luminance(color: str) -> float:
    parts = [int(part) / 255 for part in color[color.index("(") + 1 : -1].split(",")[:3]]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_ten_thousand_rows_stay_usable(browser, tmp_path):
    """One record for all of them would be quicker to make; here each is a run of its own."""
    runs = [
        Run({"precision": "fp32"}, keys={"optimizer.lr": n}, outcome="refused", reason="no",
            overrides=(f"optimizer.lr={n}",))
        for n in range(10_000)
    ]  # fmt: skip
    runs[:300] = [Run({"precision": "fp32"}, keys={"optimizer.lr": n}, speed=n + 1.0)
                  for n in range(300)]  # fmt: skip
    sweep = make_sweep(tmp_path / "many", runs)
    assert main(["report", str(sweep), "--quiet", "--formats", "html"]) == 0
    page = sweep / "report.html"
    assert page.stat().st_size < 5_000_000
    opened(browser, page)
    assert len(column(browser, "outcome")) == 200
    browser.find_element("id", "more").click()
    assert len(column(browser, "outcome")) == 1200
