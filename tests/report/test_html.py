"""The HTML report is one file without network, right in a real browser, and safe whatever the user's strings are."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from headrace.report import files
from headrace.report.html import embed, make_html
from tests.report import report_builders as builders

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
    "--v=0",
    "--virtual-time-budget=3000",
    "--window-size=1200,1000",
    "--dump-dom",
]


class Elements(HTMLParser):
    """Counts elements and collects what could reach the network."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.links: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]


@pytest.mark.parametrize("name", builders.ALL)
def test_one_file_without_network(name: str) -> None:
    """Nothing in the file points outside, the browser is told to forbid it, and plotly is there once or not at all."""
    html = make_html(builders.ALL[name]())
    found = Elements(html)
    assert all(link.startswith("#") for link in found.links)
    assert "default-src 'none'" in html
    drawn = name not in ("unknown", "attached", "nothing")
    assert found.names.count("script") == (3 if drawn else 0)
    assert len(html) < (6_000_000 if drawn else 30_000)


def test_order() -> None:
    """Verdict, steps, lanes, split, evidence, changes, hotspots, machine: in this order."""
    html = make_html(builders.storage(40))
    marks = ["<h1>", *re.findall(r"<h2>.*?</h2>", html)]
    assert [re.sub("<.*?>", "", mark) for mark in marks] == [
        "",
        "Steps over time",
        "Lanes",
        "The split of a step",
        "Evidence",
        "Time per batch in each stage",
        "What to change",
        "Where dataset code spends its time",
        "Machine",
        "This run",
    ]
    assert html.index("<h1>") < html.index("<h2>")


def test_users_strings_stay_text() -> None:
    """Markup in paths, arguments and names is shown, never read."""
    found = Elements(make_html(builders.hostile()))
    assert found.names.count("script") == 3
    assert "{{ 7*7 }}" in make_html(builders.hostile())
    assert "<" not in embed({"a": "</script><!--"})


def chromium() -> str:
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None and os.environ.get("HEADRACE_REQUIRE_CHROMIUM") != "1":
        pytest.skip("no chromium on PATH (HEADRACE_REQUIRE_CHROMIUM=1 makes this a failure)")
    assert found is not None, "HEADRACE_REQUIRE_CHROMIUM=1, but no chromium is on PATH"
    return found


def browse(path: Path) -> subprocess.CompletedProcess[str]:
    """Opens a file in Chromium; returns the drawn page (stdout) and the console (stderr)."""
    command = [chromium(), *FLAGS, f"--user-data-dir={path.parent / 'profile'}", path.as_uri()]
    # 5 s on two quiet cores, 52 s was seen with 15 other processes on them.
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"chromium ended with {done.returncode}: {done.stderr[-2000:]}"
    return done


@pytest.mark.slow
@pytest.mark.parametrize("name", ["storage", "compute", "hostile", "unknown", "largest"])
def test_in_a_real_browser(name: str, tmp_path: Path) -> None:
    """Chromium draws steps and lanes, at most 3,000 rectangles, and writes nothing to its console."""
    path = tmp_path / "report.html"
    files.write_html({**builders.ALL, "largest": builders.largest}[name](), path)
    done = browse(path)
    # Errors of scripts, forbidden network access (the policy reports it) and warnings all arrive as CONSOLE lines.
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    charts = 0 if name == "unknown" else 2
    assert len(re.findall(r'<div class="chart js-plotly-plot"', done.stdout)) == charts
    assert len(re.findall(r'class="point"', done.stdout)) in range(50 * (charts > 0), 3001)
    assert "<title>headrace: " in done.stdout


CLICKS = """<script>
const count = document.getElementById("lanes-count"), at = document.getElementById("lanes-at"), seen = [];
const look = () => seen.push(document.getElementById("lanes").layout.xaxis.range.map((t) => t.toFixed(3)).join("-"));
look();
document.getElementById("lanes-on").click(); look();
document.getElementById("lanes-back").click(); look();
count.value = "100"; count.dispatchEvent(new Event("change")); look();
at.value = "99999"; at.dispatchEvent(new Event("input")); look();
document.getElementById("lanes-worst").click(); look();
Plotly.Fx.hover("steps", [{ curveNumber: 3, pointNumber: 400 }]);
document.title = JSON.stringify(seen);
</script>"""


@pytest.mark.slow
def test_controls_in_a_real_browser(tmp_path: Path) -> None:
    """The lanes' buttons, slider and choice move the picture, and hovering a step says its times."""
    path = tmp_path / "report.html"
    path.write_text(make_html(builders.storage()).replace("</body>", CLICKS + "</body>"), encoding="utf-8")
    done = browse(path)
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    first, later, back, wide, last, worst = json.loads(re.findall("<title>(.*?)</title>", done.stdout)[0])
    assert first == back
    assert len({first, later, wide, last, worst}) == 5
    assert re.search(r"step 400: 1\.0\d s, stall 9\d\d ms, starts an epoch", done.stdout)
