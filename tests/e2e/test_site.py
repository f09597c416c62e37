"""The documentation's site in a real browser: search and colours, from disk and over HTTP."""

import functools
import http.server
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from support import REPO

pytestmark = pytest.mark.slow  # the site is built, and a browser starts


FIRST = {
    "24 GB": ("what-to-type",),
    "7B rtx4090": ("what-to-type",),
    "hardware=rtx4090": ("what-to-type",),
    "24gb": ("what-to-type",),
    "out of memory": ("troubleshooting", "how-to/"),
    "axolotl": ("coming-from",),
    "default": ("how-to/", "tutorial/", "what-to-type", "coming-from", "troubleshooting"),
    "resume": ("how-to/interrupt", "troubleshooting"),
    "faq": ("troubleshooting",),
    "optimizer.lr": ("reference/configuration/optimizer",),
    "train.keep_best": ("reference/configuration/train",),
    "precision=bf16": ("how-to/", "what-to-type", "reference/techniques", "reference/config"),
}
"""Words typed into the search -> pages of which one is to be the first result."""


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The built site."""
    folder = tmp_path_factory.mktemp("site")
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", folder],
        cwd=REPO, check=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    return folder


class Silent(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture(scope="module", params=["disk", "http"])
def address(request, site):
    """Where the site begins."""
    if request.param == "disk":
        yield site.as_uri()
        return
    handler = functools.partial(Silent, directory=site)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def opened(browser, url: str, width: int = 1400) -> None:
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600},
    )
    browser.get(url)


def until(browser, script: str):
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(browser, 60).until(lambda b: b.execute_script(f"return {script}"))


def requests(browser) -> list[str]:
    found = []
    for entry in browser.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            found.append(message["params"]["request"]["url"])
    return found


RESULTS = "[...document.querySelectorAll('.md-search-result__link')].map(e => e.href)"


def search(browser, address: str, words: str) -> list[str]:
    """Pages and sections that the site finds, the first first."""
    opened(browser, f"{address}/index.html")
    until(browser, "document.querySelector('.md-search__input') !== null")
    browser.execute_script(
        "document.querySelector('#__search').checked = true;"
        "document.querySelector('#__search').dispatchEvent(new Event('change'));"
        "const input = document.querySelector('.md-search__input'); input.focus();"
        "input.value = arguments[0]; input.dispatchEvent(new Event('keyup', {bubbles: true}));"
        "input.dispatchEvent(new Event('input', {bubbles: true}))",
        words,
    )
    until(browser, f"{RESULTS}.length > 0")
    found = browser.execute_script(f"return {RESULTS}")
    return [link.removeprefix(f"{address}/") for link in found]


@pytest.mark.parametrize("words", FIRST)
def test_search_finds_a_guide_first(browser, address, words):
    first, *_ = search(browser, address, words)
    assert first.startswith(FIRST[words]), first


def test_rules_are_not_found(browser, address):
    assert not [link for link in search(browser, address, "rotary width") if "/rules" in link]


PAGES = ("index", "what-to-type", "architecture", "reference/configuration/optimizer")


@pytest.mark.parametrize("page", PAGES)
def test_page_asks_no_network(browser, address, page):
    browser.get_log("browser")
    browser.get_log("performance")
    opened(browser, f"{address}/{page}.html")
    until(browser, "document.documentElement.classList.contains('js')")
    own = (address, "data:", "blob:", "about:")
    assert [url for url in requests(browser) if not url.startswith(own)] == []
    errors = [entry for entry in browser.get_log("browser") if "favicon" not in entry["message"]]
    assert errors == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_colours_follow_the_system_and_the_switch(browser, address, dark):
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    opened(browser, f"{address}/index.html")
    browser.execute_script("localStorage.clear()")
    opened(browser, f"{address}/index.html")
    name = "document.body.getAttribute('data-md-color-scheme')"
    until(browser, f"{name} === '{'slate' if dark else 'default'}'")
    seen = set()
    for _ in range(3):
        browser.execute_script(
            "[...document.querySelectorAll('[data-md-component=palette] label')]"
            ".find(e => !e.hidden).click()"
        )
        seen.add(browser.execute_script(f"return {name}"))
    assert seen == {"slate", "default"}


def test_flowchart_is_drawn(browser, address):
    opened(browser, f"{address}/architecture.html")
    assert browser.execute_script("return document.querySelectorAll('svg.diagram rect').length") > 9
    boxes = browser.execute_script(
        "return [...document.querySelectorAll('svg.diagram rect')]"
        ".map(e => e.getBoundingClientRect()).map(r => [r.left, r.top, r.right, r.bottom])"
    )
    for i, one in enumerate(boxes):
        for other in boxes[i + 1 :]:
            apart = one[2] < other[0] or other[2] < one[0] or one[3] < other[1] or other[3] < one[1]
            assert apart, "two boxes overlap"


@pytest.mark.parametrize("page", [*PAGES, "reference/rules", "coming-from"])
def test_page_fits_a_phone(browser, site, page):
    opened(browser, f"{site.as_uri()}/{page}.html", width=400)
    wide = browser.execute_script("return document.documentElement.scrollWidth")
    assert wide <= 400, "only tables and code scroll sideways"
