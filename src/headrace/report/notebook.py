"""A run in a notebook: it shows itself as a small HTML fragment, and as text where there is no HTML.

The fragment is plain HTML and SVG without scripts, so that it works in Jupyter, Colab and VS Code, in saved and in
untrusted notebooks; ``save("x.html")`` writes the full report with its charts.
"""

from __future__ import annotations

from pathlib import Path

from headrace.core import units
from headrace.errors import UsageError
from headrace.records.run import Finding, Run, Series
from headrace.report import tables, text

#: Bars of the little picture; each shows the longest of its steps.
_MAX_BARS = 240


class Report:
    """What ``headrace.observe()`` saw. ``run`` is the record, ``finding`` its verdict or ``None``."""

    def __init__(self, run: Run) -> None:
        self.run = run

    @property
    def finding(self) -> Finding | None:
        """The finding about the loader that costs most."""
        return text.finding_of(self.run)

    def save(self, path: str | Path) -> None:
        """Writes the run; the name's end says how: ``.html``, ``.trace.json`` (Perfetto) or ``.json``.

        Raises:
            UsageError: another end.
            RecordError: the place cannot be written to.
        """
        from headrace.report import files

        writers = {".html": files.write_html, ".trace.json": files.write_trace, ".json": files.write_json}
        for suffix, write in writers.items():
            if str(path).endswith(suffix):
                return write(self.run, Path(path))
        raise UsageError(f"{path}: the name should end in {', '.join(writers)}")

    def __str__(self) -> str:
        from headrace.report.terminal import render

        return render(self.run, color=False)

    def __repr__(self) -> str:
        return f"<headrace report: {text.headline(self.run)}>"

    def _repr_html_(self) -> str:
        from headrace.report.html import fragment

        found = text.subject(self.run)
        series = found[1].series if found else None
        return fragment(
            run=self.run,
            finding=self.finding,
            subject=found,
            bars=_bars(series) if series is not None and series.step_idx else [],
            columns=tables.COLUMNS,
            rows=tables.rows(self.run)[:20],
            text=text,
            units=units,
        )


def _bars(series: Series) -> list[tuple[float, float, str]]:
    """Height of step and stall (0..1 of the picture) and words; several steps share a bar where there are many."""
    num, per_bar = len(series.step_ns), -(-len(series.step_ns) // _MAX_BARS)
    worst = [max(range(i, min(i + per_bar, num)), key=series.step_ns.__getitem__) for i in range(0, num, per_bar)]
    # As in the HTML: an epoch's start may leave the picture, the sawtooth may not.
    typical = sorted(series.step_ns[i] for i in worst)[int(len(worst) * 0.97) - 1]
    top = max(min(1.3 * typical, max(series.step_ns)), 1)
    return [(_height(series.step_ns[i], top), _height(series.stall_ns[i], top), _words(series, i)) for i in worst]


def _height(ns: int, top: float) -> float:
    return round(min(ns / top, 1.0), 4)


def _words(series: Series, i: int) -> str:
    return f"step {series.step_idx[i]}: {units.duration(series.step_ns[i])}, stall {units.duration(series.stall_ns[i])}"
