"""What tests of HTML pages do in a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def opened(browser: Any, page: Path) -> Any:
    """Open a page, and wait until it says that it is on the screen."""
    from selenium.webdriver.support.ui import WebDriverWait

    browser.get_log("browser")
    browser.get(page.as_uri())
    WebDriverWait(browser, 60).until(
        lambda _: browser.execute_script("return document.documentElement.dataset.ready")
    )
    return browser


def colours(browser: Any, chart: str) -> int:
    """How many different colours a chart's canvas shows: a blank one has one."""
    return browser.execute_script(
        """const canvas = document.querySelector(`#${CSS.escape(arguments[0])} canvas`);
        const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        return new Set(new Uint32Array(pixels.data.buffer)).size""",
        chart,
    )


def hover(browser: Any, chart: str, across: float, down: float) -> str:
    """Move the pointer to a place in a chart, and read the tooltip."""
    from selenium.webdriver import ActionChains
    from selenium.webdriver.support.ui import WebDriverWait

    element = browser.find_element("id", chart)
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
    size = element.size
    at = (round((across - 0.5) * size["width"]), round((down - 0.5) * size["height"]))
    for x, y in ((at[0] - 3, at[1]), at):
        ActionChains(browser, duration=20).move_to_element_with_offset(element, x, y).perform()
    tip = f"return document.querySelector('#{chart} > div:last-child')?.innerText ?? ''"
    return WebDriverWait(browser, 10).until(lambda _: browser.execute_script(tip))
