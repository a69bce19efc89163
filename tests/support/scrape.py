"""The metrics of a service, as Prometheus reads them."""

from support.clients import Browser


def samples(page: str) -> dict[str, float]:
    """The values of a page of metrics, by name with labels, as they are on the page."""
    lines = (line.rpartition(" ") for line in page.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


async def scrape(browser: Browser) -> dict[str, float]:
    """The values that the service reports now."""
    return samples((await browser.request("GET", "/metrics")).body.decode())
