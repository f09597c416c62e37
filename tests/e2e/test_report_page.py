"""The report's page in a real browser: nothing loaded, nothing executed, seen at any width."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from unit.results.report.made import MIB, Run, make_run, make_sweep

from eke.cli import main

pytestmark = pytest.mark.slow  # a browser takes seconds to start

HOSTILE = (
    "<img src=x onerror=\"document.title='owned'\"></script><script>document.title='owned'</script>"
)


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
        *(
            Run({"precision": "fp16", "optimizer": o}, outcome="refused", reason=HOSTILE)
            for o in ("adamw", "lion", "sgd", "muon", "adafactor")
        ),
        Run({"precision": HOSTILE}, outcome="crashed", reason=HOSTILE, speed=None, loss=None),
        Run({"precision": "e5m2"}, outcome="crashed", reason="x" * 300, speed=None, loss=None),
    ]
    make_sweep(folder, runs, name=HOSTILE, curve=[3.0, 2.5, 2.2, 2.1])
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


def column(browser, title, table=".main"):
    """Texts of one column, from the top."""
    titles = script(
        browser, f"[...document.querySelectorAll('{table} th')].map(e => e.textContent)"
    )
    at = titles.index(title) + 1
    cells = f"[...document.querySelectorAll('{table} tbody td:nth-child({at})')]"
    return script(browser, f"{cells}.map(e => e.textContent)")


def click(browser, title, table=".main"):
    heads = f"[...document.querySelectorAll('{table} th button')]"
    browser.execute_script(f"{heads}.find(e => e.textContent === '{title}').click()")


def test_page_sends_no_request_and_logs_no_error(browser, page):
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
    assert script(browser, "document.images.length") == 0
    assert script(browser, "document.scripts.length") == 3
    assert HOSTILE in script(browser, "document.body.innerText")


def test_every_picture_is_drawn(browser, page):
    opened(browser, page)
    marks = (
        "[...document.querySelectorAll('.picture')].map(e => e.querySelectorAll('svg path').length)"
    )
    counts = script(browser, marks)
    assert len(counts) == 4
    assert all(count > 3 for count in counts), counts


def test_table_sorts_numerically_with_missing_values_last(browser, page):
    opened(browser, page)
    click(browser, "samples/s", ".all")
    falling = column(browser, "samples/s", ".all")
    numbers = [float(text) for text in falling if text]
    assert numbers == sorted(numbers, reverse=True)
    assert len(numbers) > 3
    assert falling[-2:] == ["", ""]
    click(browser, "samples/s", ".all")
    rising = column(browser, "samples/s", ".all")
    assert rising[: len(numbers)] == falling[: len(numbers)][::-1]
    assert rising[-2:] == ["", ""]
    sorted_by = "document.querySelector('.all th[aria-sort]').textContent"
    assert script(browser, sorted_by) == "samples/s"
    click(browser, "decision")
    shown = column(browser, "decision")
    assert shown == sorted(shown, key=lambda text: (text == "", text))


def test_table_can_be_searched(browser, page):
    opened(browser, page)
    search = browser.find_element("css selector", ".table:not(.all) input")
    search.send_keys("lion bf16")
    assert len(column(browser, "repeats")) == 1
    search.clear()
    search.send_keys("nothing at all")
    assert column(browser, "repeats") == []


MEASURE = r"""
const top = e => e.getBoundingClientRect().top + scrollY;
const bottom = e => e.getBoundingClientRect().bottom + scrollY;
const cut = [], broken = [];
for (const svg of document.querySelectorAll('.picture svg')) {
  const box = svg.getBoundingClientRect();
  for (const text of svg.querySelectorAll('text')) {
    const own = text.getBoundingClientRect();
    const out = own.left < box.left - 1 || own.right > box.right + 1 || own.bottom > box.bottom + 1;
    if (own.width && (out || text.textContent.includes('\u2026'))) cut.push(text.textContent);
  }
}
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const node = walker.currentNode;
  if (node.parentElement.closest('script, style, svg, noscript')) continue;
  for (const word of node.textContent.matchAll(/[\p{L}\p{N}_]+/gu)) {
    const range = document.createRange();
    range.setStart(node, word.index);
    range.setEnd(node, word.index + word[0].length);
    const lines = [...range.getClientRects()].filter(each => each.width).map(each => each.top);
    if (Math.max(...lines) - Math.min(...lines) > 5) broken.push(word[0]);
  }
}
const table = document.querySelector('.main');
const narrow = each => each.scrollWidth > each.clientWidth + 1;
return {
  width: document.scrollingElement.scrollWidth,
  verdict: bottom(document.querySelector('.verdict')),
  table: table.scrollWidth - table.parentElement.clientWidth,
  cut, broken, chart: top(document.querySelector('.picture svg')),
  legends: [...document.querySelectorAll('.legend')].filter(narrow).map(each => each.textContent),
};
"""
WIDTHS = [(1400, False), (1400, True), (400, False), (400, True)]


@pytest.fixture(scope="module")
def plain_page(tmp_path_factory) -> Path:
    """The report of four configurations with seeds, as a person makes them first."""
    runs = [
        Run({"optimizer": o, "memory": m}, repeat=r, seed=r, speed=s * (1 + (r * k % 5) / 50),
            peak=p * MIB, loss=4.5 + r / 100)
        for r in range(3)
        for k, (o, m, s, p) in enumerate((
            ("adamw", "none", 200, 33), ("adamw", "checkpointing", 150, 19),
            ("adafactor", "none", 172, 27), ("adafactor", "checkpointing", 148, 13)), 1)
    ]  # fmt: skip
    folder = tmp_path_factory.mktemp("plain")
    make_sweep(folder / "runs", runs, curve=[5.5 - n**0.5 / 3 for n in range(50)])
    assert main(["report", str(folder / "runs"), "--quiet"]) == 0
    return folder / "runs" / "report.html"


@pytest.mark.parametrize(("width", "dark"), WIDTHS)
def test_first_screen_has_verdict_table_and_chart(browser, plain_page, width, dark):
    opened(browser, plain_page, width, dark)
    found = browser.execute_script(MEASURE)
    assert found["width"] <= width
    assert found["table"] <= 0, "the table does not scroll"
    assert found["verdict"] <= 320
    assert found["chart"] <= (900 if width > 1000 else 1700)
    assert found["cut"] == found["broken"] == found["legends"] == []
    texts = "[...document.querySelectorAll('figure')].map(e => e.textContent)"
    charts = script(browser, texts)
    for name in ("adamw", "checkpointing", "adafactor", "adafactor + checkpointing"):
        assert all(name in chart for chart in charts), "each point and line has its name"
    first = script(browser, "document.querySelector('header').innerText")
    for text in ("tiny", "python_source", "1 x GPU", "4 configurations x 3", "0.39x", "(0."):
        assert text in first
    assert plain_page.stat().st_size < 1_200_000


def test_printed_page_fits_the_paper(browser, plain_page):
    opened(browser, plain_page, width=700, dark=True)
    browser.execute_script("window.dispatchEvent(new Event('beforeprint'))")
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    found = browser.execute_script(MEASURE)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    assert found["width"] <= 700
    assert found["cut"] == []
    assert script(browser, "document.querySelectorAll('details:not([open])').length") == 0
    ink = "getComputedStyle(document.documentElement).getPropertyValue('--ink')"
    assert script(browser, ink).strip() == "#1d2330"


@pytest.mark.parametrize(("width", "dark"), [(1400, False), (400, True)])
def test_page_has_no_accessibility_violation(browser, plain_page, page, width, dark):
    axe = axe_script()
    for each in (plain_page, page):
        opened(browser, each, width, dark)
        browser.execute_script(
            "document.querySelectorAll('details').forEach(e => { e.open = true; })"
        )
        browser.execute_script(axe)
        found = browser.execute_async_script("const done = arguments[0]; axe.run().then(done)")
        assert [(v["id"], v["nodes"][0]["html"][:200]) for v in found["violations"]] == []


def axe_script() -> str:
    """axe-core of npm, https://github.com/dequelabs/axe-core."""
    root = subprocess.run(["npm", "root", "-g"], capture_output=True, text=True, check=False).stdout
    file = Path(root.strip()) / "axe-core" / "axe.min.js"
    if not file.exists():
        if os.environ.get("EKE_CI"):
            pytest.fail("CI installs axe-core")
        pytest.skip("needs axe-core: npm install --global axe-core")
    return file.read_text()


@pytest.mark.parametrize("width", [390, 1400])
def test_long_words_do_not_widen_the_page(browser, page, width):
    opened(browser, page, width=width)
    assert script(browser, "document.scrollingElement.scrollWidth") <= width
    pictures = "[...document.querySelectorAll('.picture svg')]"
    widths = script(browser, f"{pictures}.map(e => e.getBoundingClientRect().width)")
    assert max(widths) <= width


@pytest.mark.parametrize("dark", [False, True])
def test_text_has_sufficient_contrast(browser, page, dark):
    """Contrast of 4.5 at least (WCAG 2.1, 1.4.3), for body, quiet text and table cells."""
    opened(browser, page, dark=dark)
    for selector in ("body", ".quiet", ".main tbody td", "td.good > span", "tr.bad td"):
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
    assert browser.execute_script(MEASURE)["chart"] <= 900, "below eight rows"
    more = browser.find_element("css selector", ".table:not(.all) button:not(th button)")
    for count in (8, 200, 1200):
        assert len(column(browser, "repeats")) == count
        browser.execute_script("arguments[0].click()", more)
