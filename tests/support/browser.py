"""A real browser, where this machine has one."""

import importlib.util
import shutil
from contextlib import contextmanager

NAMES = ("chromium", "chromium-browser", "google-chrome")


def lacks():
    """Of what drives a browser, what is not here, and why."""
    return {
        "playwright": "" if importlib.util.find_spec("playwright") else "it is not installed here",
        "chromium": "" if any(map(shutil.which, NAMES)) else f"none of {', '.join(NAMES)} is installed here",
    }


@contextmanager
def opened():
    from playwright.sync_api import sync_playwright

    path = next(filter(None, map(shutil.which, NAMES)))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()
