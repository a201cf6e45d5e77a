"""The report as text: what a person reads in the terminal when the job is over. The verdict comes first."""

from __future__ import annotations

import io
import os
import sys

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from headrace.core import units
from headrace.records.run import Change, Finding, Loader, Run
from headrace.report import tables, text

_MAX_WIDTH = 120
_MAX_ROWS = 17
_MAX_EVIDENCE = 16
_MAX_HOTSPOTS = 5
_LABEL_WIDTH = 10
_NUMBERS = ("steps", "step", "stall", "rate")
#: Columns of the table of loaders that a narrow terminal leaves out.
_WIDE_ONLY = ("role", "workers", "rate")

#: How a part of the time is drawn: glyph (parts must differ without colour), its form for a plain ASCII stream, colour.
_GLYPHS = {
    "step": ("\u2588", "#", "green"),
    "stall": ("\u2591", ".", "red"),
    "epoch": ("\u2592", ":", "yellow"),
    "other_loader": ("w", "w", "magenta"),
    "copy": ("c", "c", "cyan"),
    "sync": ("s", "s", "blue"),
    "launch": ("l", "l", "bright_blue"),
    "rank": ("r", "r", "bright_magenta"),
    "outside": ("o", "o", "bright_black"),
}


def render(run: Run, width: int | None = None, color: bool | None = None) -> str:
    """Returns the report as text that ends with a newline.

    Args:
        run: The record.
        width: Columns; by default those of the terminal behind stderr, at most 120, and 80 where it is no terminal.
        color: Whether to write ANSI colours; by default to a terminal that has them, or where ``FORCE_COLOR`` asks for
            them, and never with ``NO_COLOR``.
    """
    probe = Console(stderr=True, force_jupyter=False)
    if color is None:
        color = not probe.no_color and (_forced() or (probe.is_terminal and not probe.is_dumb_terminal))
    out = Console(
        file=io.StringIO(),
        width=width or min(probe.width, _MAX_WIDTH),
        force_terminal=color,
        color_system="standard" if color else None,
        no_color=not color,
        force_jupyter=False,
        highlight=False,
        legacy_windows=False,
    )
    _Report(run, out, unicode=_speaks_unicode()).write()
    assert isinstance(out.file, io.StringIO)
    return "\n".join(line.rstrip() for line in out.file.getvalue().splitlines()) + "\n"


def _forced() -> bool:
    """``FORCE_COLOR`` is stronger than a terminal that calls itself dumb, as CI's do (force-color.org)."""
    return os.environ.get("FORCE_COLOR", "") not in ("", "0")


def _speaks_unicode() -> bool:
    return "utf" in (getattr(sys.stderr, "encoding", None) or "utf-8").lower()


class _Report:
    """Writes the parts in order; each part knows when it has nothing to say."""

    def __init__(self, run: Run, out: Console, *, unicode: bool) -> None:
        self.run, self.out, self.unicode = run, out, unicode
        self.finding = text.finding_of(run)
        self.subject = text.subject(run)

    def write(self) -> None:
        self._verdict()
        if self.subject:
            self._loader(self.subject[1])
        if self.finding:
            self._evidence(self.finding)
        if self.subject:
            self._rows("hotspots", [text.hotspot(s) for s in self.subject[1].hotspots[:_MAX_HOTSPOTS]])
        if self.finding:
            self._changes(self.finding)
            self._doubt(self.finding)
        self._all_loaders()
        self._rows("unseen", text.unreported(self.run))
        self._rows("missing", text.missing(self.run))
        self._rows("notes", [text.clean(note) for note in self.run.notes])
        self._row("program", text.ended(self.run))
        self._row("headrace", f"{text.clean(self.run.headrace)}; overhead {text.overhead(self.run.overhead)}")

    def _verdict(self) -> None:
        good = self.finding is not None and self.finding.cause == "compute"
        style = "bold green" if good else "bold red" if self.finding else "bold yellow"
        self.out.print(Text.assemble(("headrace: ", "bold"), (text.headline(self.run), style)))
        if self.finding:
            self.out.print(Padding(Text(text.reason(self.finding)), (0, 0, 0, _LABEL_WIDTH)))
            self.out.print(Padding(Text(text.certainty(self.run), "dim"), (0, 0, 0, _LABEL_WIDTH)))
        self.out.print()

    def _loader(self, loader: Loader) -> None:
        self._row("loader", Text.assemble((text.clean(loader.site), "bold"), f"  {text.settings(loader)}"))
        self._row("", text.seen(loader) + ("" if not loader.simulated else "; simulated device"))
        if loader.dataset:
            self._row("dataset", text.clean(loader.dataset))
        if loader.step_ns:
            times = {"mean": loader.step_ns.mean, "median": loader.step_ns.p50, "p95": loader.step_ns.p95}
            self._row("step", ", ".join(f"{units.duration(ns)} {name}" for name, ns in times.items()))
        self._row("speed", text.speed(loader))
        self._time(loader)

    def _time(self, loader: Loader) -> None:
        if loader.time_frac is not None:
            parts = text.parts(loader.time_frac, text.TIME_WORDS)
            self._row("time", Group(self._bar(parts), self._legend(parts)))
        if loader.wait_frac is not None:
            waits = sorted(text.parts(loader.wait_frac, text.WAIT_WORDS), key=lambda part: -part[2])
            self._row("waits for", ", ".join(f"{words} {units.percent(frac)}" for _, words, frac in waits))

    def _glyph(self, key: str) -> tuple[str, str]:
        fancy, plain, style = _GLYPHS[key]
        return (fancy if self.unicode else plain), style

    def _bar(self, parts: list[tuple[str, str, float]]) -> Text:
        """One line whose lengths are the parts; what is there at all gets one cell."""
        cells = max(self.out.width - _LABEL_WIDTH - 2, 10)
        lengths = [max(round(frac * cells), 1) for _, _, frac in parts]
        if lengths:
            lengths[lengths.index(max(lengths))] += cells - sum(lengths)
        bar = Text(no_wrap=True, overflow="crop")
        for (key, _, _), length in zip(parts, lengths, strict=True):
            glyph, style = self._glyph(key)
            bar.append(glyph * length, style)
        return bar

    def _legend(self, parts: list[tuple[str, str, float]]) -> Text:
        """Glyph, words and percent of each part; a line breaks only between parts."""
        legend, column = Text(), 0
        for key, words, frac in parts:
            entry = f" {words} {units.percent(frac)}"
            if column and column + 4 + len(entry) > self.out.width - _LABEL_WIDTH:
                legend.append("\n")
                column = 0
            legend.append("   " if column else "")
            legend.append(*self._glyph(key)).append(entry)
            column += 4 + len(entry)
        return legend

    def _evidence(self, finding: Finding) -> None:
        grid = Table.grid(padding=(0, 2))
        for row in finding.evidence[:_MAX_EVIDENCE]:
            name, value = text.evidence(row)
            grid.add_row(name, value)
        if finding.evidence:
            self._row("evidence", grid)

    def _changes(self, finding: Finding) -> None:
        if finding.changes:
            self.out.print()
        for index, change in enumerate(finding.changes):
            self._change("change" if index == 0 else "or", change)

    def _change(self, label: str, change: Change) -> None:
        arrow = text.from_to(change)
        what = Text(text.clean(change.what) + (f": {arrow}" if arrow else ""), "bold")
        self._row(label, Text.assemble(what, "  ", (text.gain(change), "green")))
        for line in (change.line or "").splitlines():
            # Never wrapped: the line is there to be copied.
            self.out.print(Text(" " * (_LABEL_WIDTH + 4) + text.clean(line), "cyan"), soft_wrap=True)

    def _doubt(self, finding: Finding) -> None:
        if finding.changes:
            self.out.print()
        if finding.runner_up is not None:
            runner = finding.runner_up
            self._row("runner-up", f"{runner.cause}, {units.percent(runner.share_frac)} of the time")
        if finding.between is not None:
            first, second = finding.between
            self._row("either", f"{first}: {text.CAUSE_WORDS[first]}; or {second}: {text.CAUSE_WORDS[second]}")
        if finding.separate_with:
            self._row("to decide", text.clean(finding.separate_with))

    def _all_loaders(self) -> None:
        rows = tables.rows(self.run)
        if len(rows) < 2:
            return
        grid = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
        names = [name for name in tables.COLUMNS if self.out.width >= 100 or name not in _WIDE_ONLY]
        for name in names:
            grid.add_column(name, justify="right" if name in _NUMBERS else "left", overflow="fold")
        for row in rows[:_MAX_ROWS]:
            cells = [row.cells[tables.COLUMNS.index(name)] for name in names]
            grid.add_row(*map(Text, cells), style="bold" if row.merged else "")
        parts: list[RenderableType] = [grid]
        if len(rows) > _MAX_ROWS:
            parts.append(Text(f"... and {len(rows) - _MAX_ROWS} more", "dim"))
        self._row("all", Group(*parts))

    def _rows(self, label: str, lines: list[str]) -> None:
        for index, line in enumerate(lines):
            self._row(label if index == 0 else "", line)

    def _row(self, label: str, content: RenderableType) -> None:
        if content == "":
            return
        grid = Table.grid(padding=(0, 0))
        grid.add_column(width=_LABEL_WIDTH, no_wrap=True)
        grid.add_column(overflow="fold")
        grid.add_row(Text(label, "dim"), Text(content) if isinstance(content, str) else content)
        self.out.print(grid)
