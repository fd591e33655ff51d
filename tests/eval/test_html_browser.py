"""A report in a real browser: it asks nothing of the network, its tables sort by a click, and its pictures are seen."""

import os
import re
import shutil
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from draftsmith.eval.figures import save_grid
from draftsmith.eval.report import build, write
from draftsmith.eval.tables import Figure, ReportSection
from PIL import Image

from .rows import METHODS, measured_rows

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
# Hosts that Chrome asks by itself (its clock, its updates, its accounts), whatever page it shows.
_OF_THE_BROWSER = re.compile(r"^(https?://)?[\w.-]*\.?(google\.com|googleapis\.com|gvt1\.com)(:\d+)?(/|$)")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason=f"no browser: none of {', '.join(BROWSERS)} is installed"),
]


def browser(place: str, tmp_path: Path, *options: str) -> str:
    """What the browser prints of a page."""
    options = ("--headless", "--no-sandbox", "--hide-scrollbars", f"--user-data-dir={tmp_path}/browser", *options)
    environment = {**os.environ, "HOME": str(tmp_path)}
    result = subprocess.run(
        [str(BROWSER), *options, place], capture_output=True, text=True, timeout=300, env=environment, check=True
    )
    return result.stdout


@pytest.fixture
def folder(tmp_path):
    """A report with a grid of pictures."""
    red, blue = torch.tensor([200, 10, 10]), torch.tensor([10, 10, 200])
    pictures = torch.stack([red, blue, blue, red]).reshape(4, 3, 1, 1).expand(4, 3, 32, 32).to(torch.uint8)
    folder = tmp_path / "report"
    save_grid(folder / "grid.png", pictures, columns=2)
    grid = Figure("grid.png", "Pictures. Rows: plain decoding; <script>document.title=1")
    sections = [ReportSection("Pictures", (grid,))]
    report = build(measured_rows(), about={"seed": 1}, methods=METHODS, sections=sections)
    write(folder, report, measured_rows())
    return folder


def test_the_page_asks_for_itself_alone(folder, tmp_path):
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            body = (folder / "report.html").read_bytes() if self.path == "/report.html" else b""
            self.send_response(200 if body else 404)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(body)

        do_CONNECT = do_GET  # of a proxy: every other host is asked for here

        def log_message(self, *arguments):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        here = f"127.0.0.1:{server.server_port}"
        # All requests come here, those to other hosts by their whole address.
        shown = browser(
            f"http://{here}/report.html", tmp_path, "--dump-dom", f"--proxy-server={here}",
            "--proxy-bypass-list=127.0.0.1", "--disable-background-networking",
        )  # fmt: skip
        server.shutdown()
    asked = {path for path in asked if not _OF_THE_BROWSER.search(path)}
    assert "/report.html" in asked and asked <= {"/report.html", "/favicon.ico"}, asked
    assert "<title>Speculative decoding</title>" in shown, "and no text of it ran as a script"


def test_a_click_sorts_a_table(folder, tmp_path):
    page = (folder / "report.html").read_text()
    # The table of methods: M, T and EAGLE have tau 2.53, 2.44 and 2.67 on pictures.
    for clicks, order in ((0, ["M", "T", "EAGLE"]), (1, ["EAGLE", "M", "T"]), (2, ["T", "M", "EAGLE"])):
        click = 'document.querySelectorAll("table")[0].querySelectorAll("th button")[1].click();'
        (folder / "clicked.html").write_text(page.replace("</body>", f"<script>{click * clicks}</script></body>"))
        shown = browser(f"file://{folder}/clicked.html", tmp_path, "--dump-dom")
        table = shown[shown.index("<tbody>") : shown.index("</tbody>")]
        assert re.findall(r"<tr>\s*<td>(.*?)</td>", table) == order
        marked = re.findall(r'aria-sort="(\w+)"', shown[shown.index("<table>") : shown.index("</table>")])
        assert marked == [[], ["descending"], ["ascending"]][clicks]


@pytest.mark.parametrize("width", [1200, 390])
def test_what_is_seen(folder, tmp_path, width):
    """Ink on paper, and the colours of the grid's pictures; on a phone the page is no wider than the screen."""
    place = tmp_path / "page.png"
    browser(f"file://{folder}/report.html", tmp_path, f"--screenshot={place}", f"--window-size={width},5000")
    seen = Image.open(place).convert("RGB")
    assert seen.size == (width, 5000)
    counts = {color: count for count, color in seen.getcolors(maxcolors=2**24)}
    assert counts[(255, 255, 255)] > 0.5 * width * 5000 and len(counts) > 100, "text and plots on white"
    for color in ((200, 10, 10), (10, 10, 200)):
        assert counts.get(color, 0) > 10_000, f"two pictures of {color}, of 90 x 90 points or more each"
    assert counts.get((0, 114, 178), 0) > 500, "the first colour of the plots"
    # Some browsers open no window as narrow as asked for.
    script = "document.title = document.documentElement.scrollWidth + ' of ' + innerWidth"
    page = (folder / "report.html").read_text().replace("</body>", f"<script>{script}</script></body>")
    (folder / "wide.html").write_text(page)
    shown = browser(f"file://{folder}/wide.html", tmp_path, "--dump-dom", f"--window-size={width},800")
    needed, given = map(int, re.search(r"<title>(\d+) of (\d+)</title>", shown).groups())
    assert needed == given >= width
