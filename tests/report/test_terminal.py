"""The text report says the verdict first, fits the terminal, and never shows 0 for what was not measured."""

from __future__ import annotations

import io
import sys
import time
from pathlib import Path

import pytest

from headrace.report.terminal import render
from tests.report import report_builders as builders

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("name", ["storage", "compute", "unknown", "ranks", "attached", "nothing"])
def test_text_is_as_agreed(name: str) -> None:
    """Each report is, word for word, the one in ``golden`` (renew: ``python -m tests.report.test_terminal``)."""
    assert render(builders.ALL[name](), 80, color=False) == (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("width", [40, 80, 120, 200])
@pytest.mark.parametrize("name", builders.ALL)
def test_lines_fit(name: str, width: int) -> None:
    """No line is wider than the terminal, except a line of code, which is there to be copied."""
    run = builders.ALL[name]()
    code = {line.strip() for c in (run.finding.changes if run.finding else []) for line in (c.line or "").split("\n")}
    for line in render(run, width, color=False).splitlines():
        assert len(line) <= width or line.startswith(" " * 14), line
        assert line == line.rstrip()
    assert name == "hostile" or all(line in render(run, width, color=False) for line in code)


def test_the_verdict_is_the_first_line() -> None:
    """The first line holds what was found, also when there is nothing to gain."""
    first = {name: render(make(), 100, color=False).splitlines()[0] for name, make in builders.ALL.items()}
    assert first["storage"] == "headrace: the device waits for data 61 % of the time; cause: storage"
    assert first["compute"].startswith("headrace: Nothing to gain from data: the device is the limit")
    assert first["unknown"].endswith("cause: unknown, storage or preprocess")
    assert first["attached"].startswith("headrace: how long the device waits for data was not measured")
    assert first["nothing"] == "headrace: no finding: no training loop was seen"


def test_a_simulated_device_is_called_so() -> None:
    """Nobody can take a simulated device for a real one."""
    text = render(builders.compute(simulated=True), 100, color=False)
    assert "the simulated device is the limit" in text.splitlines()[0]


def test_what_was_not_measured_is_not_zero() -> None:
    """A missing value is absent or said in words, with its reason."""
    text = render(builders.attached(), 80, color=False).replace("exit code 0", "")
    assert " 0 " not in text
    assert "0 %" not in text
    assert "stall: unavailable: the program was not started under headrace" in text
    assert "major faults per batch  not measured" in render(builders.storage(), 80, color=False)
    assert text.count("unavailable") == 1


def test_reasons_are_collapsed() -> None:
    """Parts that are missing for one reason take one line; so do processes that never reported."""
    assert "GPU, driver: unavailable: no NVIDIA driver" in render(builders.unknown(), 80, color=False)
    assert "3 processes (6000, 6001, 6002): started with -I" in render(builders.ranks(), 80, color=False)


def test_users_strings_cannot_control_the_terminal() -> None:
    """Neither escapes nor rich's markup in a path or a command act."""
    for color in (False, True):
        text = render(builders.hostile(), 100, color=color)
        assert "\x1b[31m " not in text.replace("\x1b[1;31m", "")
        assert "[bold]x[/bold]" in text


@pytest.mark.parametrize("term", ["xterm-256color", "dumb"])
def test_colour_only_where_it_is_wanted(term: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No escapes by default when stderr is no terminal, and none with NO_COLOR."""
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setenv("TERM", term)
    for name in ("NO_COLOR", "FORCE_COLOR"):  # CI sets one of them
        monkeypatch.delenv(name, raising=False)
    assert "\x1b" not in render(builders.storage(40))
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b" in render(builders.storage(40))
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in render(builders.storage(40))


def test_a_plain_stream_gets_plain_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where stderr cannot write Unicode, the bar is drawn in ASCII."""
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    text = render(builders.storage(40), 80, color=False)
    assert text.isascii()
    assert "####" in text
    assert "...." in text


@pytest.mark.slow
def test_the_largest_record_is_fast() -> None:
    """5,000 steps, 50,000 events and 64 ranks are written in under 0.3 s."""
    run = builders.largest()
    times = []
    for _ in range(3):
        start = time.perf_counter()
        render(run, 80, color=False)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.3


if __name__ == "__main__":
    for path in GOLDEN.glob("*.txt"):
        path.write_text(render(builders.ALL[path.stem](), 80, color=False), encoding="utf-8")
