"""Opens pages in Chromium through Playwright, to read them as a person sees them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ARGUMENTS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
PAGE_MS = 30_000
# On the first visit, MLflow 3.17 opens its assistant, which hides a quarter of the page.
_NO_ASSISTANT = """
localStorage.setItem('mlflow.assistant.fab.autoOpenedOnFirstLoad_v1', 'true');
localStorage.setItem('mlflow.assistant.panelOpen_v1', 'false');
"""


def browser_page(profile: Path) -> Iterator[Any]:
    """Yields a page of a new browser; skips the test if there is no browser."""
    if CHROMIUM is None:
        pytest.skip("no chromium, so what a browser shows of the trials is not tested (apt-get install chromium)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            str(profile), executable_path=CHROMIUM, args=ARGUMENTS, viewport={"width": 1600, "height": 1000}
        )
        context.add_init_script(_NO_ASSISTANT)
        page = context.new_page()
        page.set_default_timeout(PAGE_MS)
        yield page
        context.close()
