"""Pages in a real browser."""

from pathlib import Path


def opened(browser, path: Path, width: int, **options):
    """(the page once its charts are drawn, what it logged or asked the network for)"""
    tab = browser.new_page(viewport={"width": width, "height": 900}, **options)
    said = []
    tab.on("console", lambda m: said.append(m.text) if m.type in ("error", "warning") else None)
    tab.on("pageerror", lambda e: said.append(str(e)))
    tab.on("request", lambda r: said.append(r.url) if not r.url.startswith("file://") else None)
    tab.goto(path.as_uri())
    tab.wait_for_selector("body[data-drawn=yes]", timeout=30_000)
    return tab, said
