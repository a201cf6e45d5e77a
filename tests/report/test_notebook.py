"""In a notebook a report shows itself without scripts, and can be saved in every form."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from headrace.errors import UsageError
from headrace.report.notebook import Report
from headrace.report.terminal import render
from tests.report import report_builders as builders


@pytest.mark.parametrize("name", builders.ALL)
def test_the_fragment_is_safe_and_balanced(name: str) -> None:
    """The fragment has no script, ends every element that it begins, and is small."""
    html = Report(builders.ALL[name]())._repr_html_()
    assert "<script" not in html
    assert len(html) < 90_000
    for tag in ("div", "table", "tr", "td", "th", "details", "svg", "g", "pre", "code", "style"):
        assert len(re.findall(rf"<{tag}[ >]", html)) == html.count(f"</{tag}>"), tag


def test_styles_stay_inside() -> None:
    """No rule of the fragment can touch the notebook around it."""
    style = re.findall(r"<style>(.*?)</style>", Report(builders.storage(40))._repr_html_(), re.S)[0]
    selectors = [one for rule in style.split("}") if "{" in rule for one in rule.split("{")[0].split(",")]
    assert selectors
    assert all(one.strip().startswith(".headrace-report ") for one in selectors)


def test_text_and_words() -> None:
    """As text a report is the terminal's; its repr is the verdict; ``finding`` is the run's."""
    run = builders.storage(40)
    report = Report(run)
    assert str(report) == render(run, color=False)
    assert repr(report) == "<headrace report: the device waits for data 61 % of the time; cause: storage>"
    assert report.finding is run.finding


def test_save_goes_by_the_name(tmp_path: Path) -> None:
    """The end of the name chooses the form; another end is refused with the ends that there are."""
    report = Report(builders.storage(40))
    for name, start in {"a.html": "<!doctype", "a.trace.json": '{"traceEvents"', "a.json": '{"format"'}.items():
        report.save(tmp_path / name)
        assert (tmp_path / name).read_text().startswith(start)
    with pytest.raises(UsageError, match=r"\.html"):
        report.save(tmp_path / "a.pdf")
