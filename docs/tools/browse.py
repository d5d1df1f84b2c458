"""Opens every page of the built site in Chromium, narrow and wide, light and dark: `python docs/tools/browse.py site`.

Fails for an error on the console, a page wider than its window, a request to another server, a formula that is still
TeX, and a picture that does not show in its scheme of colors. `--screenshots FOLDER` keeps what was seen.
"""

import argparse
import functools as ft
import http.server
import os
import shutil
import sys
import threading
from pathlib import Path

from playwright.sync_api import sync_playwright


WIDTHS = {"wide": 1280, "narrow": 390}
# What a reader sees of a page: its text without code, and the pictures of each scheme of colors.
SEEN = """() => {
    const page = document.querySelector(".md-content").cloneNode(true);
    page.querySelectorAll("code, pre, math").forEach(e => e.remove());
    const formulas = page.textContent.match(/\\$[^$\\n]*[\\\\^_][^$\\n]*\\$/g) || [];
    const pictures = [...document.querySelectorAll(".md-content img")].filter(e => e.offsetWidth);
    const named = kind => pictures.filter(e => e.src.endsWith(`-${kind}.svg#gh-${kind}-mode-only`)).map(e => e.src);
    return {
        formulas,
        broken: pictures.filter(e => !e.complete || !e.naturalWidth).map(e => e.src),
        light: named("light"),
        dark: named("dark"),
    };
}"""


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        del format, args


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("site", type=Path)
    parser.add_argument("--screenshots", type=Path)
    given = parser.parse_args()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), ft.partial(_Quiet, directory=given.site))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    root = f"http://127.0.0.1:{server.server_port}/"
    pages = sorted(path.parent.relative_to(given.site).as_posix() for path in given.site.rglob("index.html"))
    wrong, seen, shown = [], 0, set()
    with sync_playwright() as playwright:
        # The Chromium of the system, where there is one, or the one that `playwright install chromium` brings.
        # Chromium refuses to run as root within its sandbox, as in most containers.
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=arguments)
        for scheme in ("light", "dark"):
            for width, pixels in WIDTHS.items():
                context = browser.new_context(color_scheme=scheme, viewport={"width": pixels, "height": 900})
                page = context.new_page()
                name = ""  # of the page that is open, for the functions below
                page.on("console", lambda m: m.type == "error" and wrong.append(f"{name}: console: {m.text}"))
                page.on("pageerror", lambda error: wrong.append(f"{name}: {error}"))
                page.on(
                    "request",
                    lambda r: r.url.startswith((root, "data:", "blob:")) or wrong.append(f"{name} asks for {r.url}"),
                )
                for path in pages:
                    name = f"{path} ({width}, {scheme})"
                    page.goto(root + path + "/")
                    seen += 1
                    if (wide := page.evaluate("document.documentElement.scrollWidth")) > pixels:
                        wrong.append(f"{name} is {wide} pixels wide, and its window {pixels}")
                    found = page.evaluate(SEEN)
                    wrong += [f"{name} shows the raw formula {formula}" for formula in found["formulas"]]
                    wrong += [f"{name} does not show {picture}" for picture in found["broken"]]
                    other = "dark" if scheme == "light" else "light"
                    wrong += [f"{name} shows {picture}" for picture in found[other]]
                    shown.update(found[scheme])
                    if given.screenshots:
                        given.screenshots.mkdir(parents=True, exist_ok=True)
                        file = f"{path.replace('/', '-').strip('.') or 'home'}-{width}-{scheme}.png"
                        page.screenshot(path=given.screenshots / file)
                context.close()
        browser.close()
    if wrong:
        sys.exit("\n".join(dict.fromkeys(wrong)))
    print(f"{seen} views of {len(pages)} pages, {len(shown)} pictures in their scheme: no error, no overflow,", end=" ")
    print("no raw formula, no other server.")


if __name__ == "__main__":
    main()
