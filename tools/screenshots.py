"""Photograph every screen of a terminal and every page of the site into notes/screenshots/.

    python tools/screenshots.py            # all of them: some minutes
    python tools/screenshots.py how-to     # pages whose names contain a word; `screen`: no pages

A site's picture has the top of its pages in four views: 1,400 and 400 pixels wide, light and dark.
Needs chromium, its driver and pillow.
"""

import base64
import io
import os
import shutil
import subprocess
import sys
import tempfile
from html import escape
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw
from rich.console import Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME, SVG_EXPORT_THEME
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "notes" / "screenshots"
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "src")]

# Width in pixels, and whether dark.
VIEWS = ((1400, False), (1400, True), (400, False), (400, True))
HEIGHT = 1000
SCALE, PAGES_PER_SHEET, QUALITY = 0.42, 10, 18
SCREEN_SCALES = {1400: 0.75, 400: 1}
COLUMNS = {1400: 120, 400: 60}


def open_browser() -> Any:
    """Return headless chromium, which closes at the end of a `with` block."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    for flag in ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(flag)
    options.binary_location = shutil.which("chromium") or ""
    service = webdriver.ChromeService(shutil.which("chromedriver"))
    return webdriver.Chrome(options=options, service=service)


def photograph(browser: Any, url: str, width: int, dark: bool, height: int = 0) -> Image.Image:
    """Return a page's picture: its top of `height` pixels, or all of it."""
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    size = {"width": width, "height": height or HEIGHT, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(url)
    high = height or browser.execute_script("return document.documentElement.scrollHeight")
    clip = {"x": 0, "y": 0, "width": width, "height": high, "scale": 1}
    shot = browser.execute_cdp_cmd(
        "Page.captureScreenshot", {"clip": clip, "captureBeyondViewport": not height}
    )
    return Image.open(io.BytesIO(base64.b64decode(shot["data"]))).convert("RGB")


def site_sheets(browser: Any, word: str) -> None:
    """Photograph the pages, ten in a sheet."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", folder],
            cwd=ROOT, check=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        )  # fmt: skip
        found = [p for p in Path(folder).rglob("*.html") if p.name != "404.html"]
        found = sorted(path for path in found if word in str(path.relative_to(folder)))
        for first in range(0, len(found), PAGES_PER_SHEET):
            rows = []
            for page in found[first : first + PAGES_PER_SHEET]:
                views = [photograph(browser, page.as_uri(), *view, HEIGHT) for view in VIEWS]
                rows.append((str(page.relative_to(folder)), views))
            save(f"site-{first // PAGES_PER_SHEET + 1}", sheet(rows))


def sheet(rows: list[tuple[str, list[Image.Image]]]) -> Image.Image:
    """Return rows of reduced pictures below their names."""
    lines, title, gap = [], 22, 8
    for name, views in rows:
        small = [v.resize([round(n * SCALE) for n in v.size]) for v in views]
        wide = sum(each.width + gap for each in small)
        line = Image.new("RGB", (wide, small[0].height + title), "#888888")
        ImageDraw.Draw(line).text((6, 5), name, "white")
        for number, each in enumerate(small):
            line.paste(each, (sum(one.width + gap for one in small[:number]), title))
        lines.append(line)
    whole = Image.new("RGB", (lines[0].width, lines[0].height * len(lines)))
    for number, line in enumerate(lines):
        whole.paste(line, (0, number * line.height))
    return whole


def save(name: str, picture: Image.Image) -> None:
    """Write a picture as WebP."""
    OUT.mkdir(exist_ok=True)
    picture.save(OUT / f"{name}.webp", quality=QUALITY, method=6)
    print(f"{name}: {picture.size}, {(OUT / f'{name}.webp').stat().st_size // 1024} KiB")


def screens() -> dict[int, dict[str, str]]:
    """Return columns -> name -> text with colours, of the screens that tests check."""
    from terminals import shown
    from unit.cli.test_screens import SCREENS, write_runs

    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        write_runs(Path("runs"))
        seen = {name: shown(call, [*COLUMNS.values()]) for name, call in SCREENS.items()}
        os.chdir(ROOT)
    return {count: {name: each[count] for name, each in seen.items()} for count in COLUMNS.values()}


def screen_sheets(browser: Any) -> None:
    """Photograph all screens of a width and a theme in one picture."""
    seen = screens()
    for width, dark in VIEWS:
        theme = SVG_EXPORT_THEME if dark else DEFAULT_TERMINAL_THEME
        parts = []
        for name, text in seen[COLUMNS[width]].items():
            console = Console(record=True, file=io.StringIO(), width=COLUMNS[width])
            console.print(Text.from_ansi(text), end="")
            shown = console.export_html(theme=theme, inline_styles=True, code_format="{code}")
            parts.append(f"<h4>{escape(name)}</h4><pre>{shown}</pre>")
        front, back = (f"rgb{tuple(c)}" for c in (theme.foreground_color, theme.background_color))
        style = (
            f"body{{margin:8px;background:{back};color:{front}}} h4{{font:bold 13px sans-serif;"
            "background:#8885;margin:14px -8px 4px;padding:3px 8px} pre{margin:0;line-height:1.25;"
            f"font:{'10.2px' if width == 400 else '14px'} 'DejaVu Sans Mono',monospace}}"
        )
        with tempfile.NamedTemporaryFile("w", suffix=".html") as file:
            file.write(f"<meta charset=utf-8><style>{style}</style>{''.join(parts)}")
            file.flush()
            picture = photograph(browser, Path(file.name).as_uri(), width, dark)
        picture = picture.resize([round(n * SCREEN_SCALES[width]) for n in picture.size])
        save(f"screens-{width}-{'dark' if dark else 'light'}", picture)


if __name__ == "__main__":
    asked = "".join(sys.argv[1:])
    with open_browser() as started:
        if asked in ("", "screen"):
            screen_sheets(started)
        if asked != "screen":
            site_sheets(started, asked)
