"""A headless Chromium for the tests of the page: starts it, bounds it, ends it with all its children."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from html.parser import HTMLParser
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
DEADLINE_S = 120
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--window-size=1440,2400",
)


def find_chromium() -> str | None:
    return next((path for path in map(shutil.which, NAMES) if path), None)


def dump_dom(page: Path, screenshot: Path, profile: Path) -> str:
    """The page's DOM once it has loaded; its picture goes to `screenshot`."""
    chromium = find_chromium()
    assert chromium is not None
    for what in ("--dump-dom", f"--screenshot={screenshot}"):
        command = [chromium, *FLAGS, f"--user-data-dir={profile}", what, page.resolve().as_uri()]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
        )
        try:
            output, _ = process.communicate(timeout=DEADLINE_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if what == "--dump-dom":
            dom = output
    return dom


class Elements(HTMLParser):
    """Every element of a page, as (tag, attributes)."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str]]] = []
        self.title = ""
        self._in_title = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, {name: value or "" for name, value in attrs}))
        self._in_title = tag == "title" and not self.title

    def handle_data(self, data: str) -> None:
        if self._in_title:
            self.title += data
            self._in_title = False

    def tagged(self, tag: str) -> list[dict[str, str]]:
        return [attrs for name, attrs in self.found if name == tag]

    def classed(self, name: str) -> list[dict[str, str]]:
        return [attrs for _, attrs in self.found if name in attrs.get("class", "").split()]

    def addresses(self) -> list[str]:
        """What a browser would fetch or follow."""
        names = ("src", "href", "srcset", "action", "data", "poster", "xlink:href")
        return [attrs[name] for _, attrs in self.found for name in names if name in attrs]
