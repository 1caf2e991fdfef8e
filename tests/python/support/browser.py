"""A headless Chromium that reaches only this machine, and a record of its requests and errors."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
DRIVER = "chromedriver"
INSTALL = "apt-get install chromium chromium-driver"

_CONTRASTS = """
const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
function rgba(color) {
  canvas.clearRect(0, 0, 1, 1);
  canvas.fillStyle = color;
  canvas.fillRect(0, 0, 1, 1);
  return canvas.getImageData(0, 0, 1, 1).data;
}
function luminance(color) {
  const [r, g, b] = [...color].slice(0, 3).map((v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}
function ground(element) {
  for (; element; element = element.parentElement) {
    const color = rgba(getComputedStyle(element).backgroundColor);
    if (color[3] === 255) return color;
  }
  return rgba("white");
}
const found = {};
for (const element of document.querySelectorAll("body *")) {
  const hasText = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
  if (!hasText || !element.checkVisibility() || element.matches(":disabled, .visually-hidden, script, style")) continue;
  const [a, b] = [luminance(rgba(getComputedStyle(element).color)), luminance(ground(element))];
  found[`${element.tagName} ${element.className} ${element.textContent.slice(0, 30)}`] =
    (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
}
return found;
"""


def missing() -> str | None:
    """Returns why there is no browser to test with; None if there is one."""
    for names in (BROWSERS, (DRIVER,)):
        if not any(shutil.which(name) for name in names):
            return f"there is no {' or '.join(names)} on PATH ({INSTALL})"
    return None


class Browser:
    """A window of a separate Chromium process."""

    def __init__(self, driver: Chrome) -> None:
        self.driver = driver

    def resize(self, width: int, height: int = 900, scheme: str = "light") -> None:
        """Resizes the window to any size. scheme: the user's preference, light or dark."""
        self.driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False},
        )
        preference = {"name": "prefers-color-scheme", "value": scheme}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [preference]})

    def requested(self) -> list[str]:
        """Returns the addresses of all requests since the last call, from the network layer, without data: URLs."""
        addresses = []
        for entry in self.driver.get_log("performance"):
            event = json.loads(entry["message"])["message"]
            if event["method"] == "Network.requestWillBeSent":
                addresses.append(event["params"]["request"]["url"])
        return [address for address in addresses if urlsplit(address).scheme != "data"]

    def complaints(self) -> list[str]:
        """Returns the console's messages since the last call: errors, and actions that a policy blocked."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def contrasts(self) -> dict[str, float]:
        """Returns WCAG's contrast of every visible text with its background."""
        contrasts: dict[str, float] = self.driver.execute_script(_CONTRASTS)
        return contrasts

    def run(self, script: str, *arguments: Any) -> Any:
        """Runs the body of a JavaScript function and returns its result."""
        return self.driver.execute_script(script, *arguments)

    def save_screenshot(self, path: Path) -> None:
        """Saves the whole page as PNG."""
        self.driver.save_screenshot(str(path))


@contextlib.contextmanager
def open_browser(profile: Path) -> Iterator[Browser]:
    """Opens a new browser with its profile in the directory `profile`."""
    options = ChromeOptions()
    options.binary_location = next(path for name in BROWSERS if (path := shutil.which(name)))
    for argument in (
        "--headless=new",
        "--no-sandbox",  # containers in CI run as root, and Chromium's sandbox does not start there
        "--disable-dev-shm-usage",
        "--disable-gpu",
        "--disable-background-networking",
        "--disable-component-update",
        "--no-first-run",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
        "--force-prefers-reduced-motion",
        f"--user-data-dir={profile}",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = Chrome(options=options, service=Service(executable_path=shutil.which(DRIVER)))
    try:
        yield Browser(driver)
    finally:
        driver.quit()
