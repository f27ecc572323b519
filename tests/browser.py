"""A real browser, where this machine has one."""

import importlib.util
import shutil
from contextlib import contextmanager

NAMES = ("chromium", "chromium-browser", "google-chrome")


def unavailable():
    """Why no browser can be driven here; empty if one can."""
    if importlib.util.find_spec("playwright") is None:
        return "playwright is not installed here"
    if not any(map(shutil.which, NAMES)):
        return f"none of {', '.join(NAMES)} is installed here"
    return ""


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
