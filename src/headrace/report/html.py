"""The report as one HTML file that needs no network: verdict, steps, lanes, split, evidence, changes, machine.

Words and tables are written here, so they are there before any script runs; ``templates/report.js`` draws the two
charts with plotly.js, which is part of the file, from the run's own columns, which are too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jinja2
import msgspec
from markupsafe import Markup

from headrace.core import units
from headrace.records.run import Lanes, Loader, Run, Series
from headrace.report import tables, text

#: Rows of the table of loaders and bars of the split; more are counted, not drawn.
_MAX_ROWS = 600
_MAX_BARS = 32


def make_html(run: Run) -> str:
    """Returns the whole file.

    About 4.9 MB of it are plotly.js (the Python package ships no smaller bundle); a run without steps carries none.
    """
    charts = _charts(run)
    return (
        _environment()
        .get_template("report.html.j2")
        .render(
            run=run,
            text=text,
            units=units,
            finding=text.finding_of(run),
            subject=text.subject(run),
            tone=_tone(run),
            tiles=_tiles(run),
            bars=_bars(run),
            num_loaders=sum(loader.time_frac is not None for _, loader in text.loaders(run)),
            stages=_stages(run),
            columns=tables.COLUMNS,
            rows=tables.rows(run)[:_MAX_ROWS],
            num_rows=len(tables.rows(run)),
            machine=list(_flat(run.fingerprint)),
            command=" ".join(text.clean(word) for word in run.command),
            charts=charts,
            lane_kinds=_drawn_kinds(charts["lanes"]),
            data=Markup(embed(charts)),
            css=Markup(_source("report.css")),
            js=Markup(_source("report.js")),
            drawn=any(charts.values()),
            plotly=Markup(_plotly() if any(charts.values()) else ""),
        )
    )


def fragment(**values: Any) -> str:
    """Returns the notebook's fragment (see ``notebook.py``)."""
    return _environment().get_template("notebook.html.j2").render(**values)


def embed(value: Any) -> str:
    """Returns JSON that may stand inside ``<script>``: no ``<`` in it, so neither ``</script>`` nor ``<!--``."""
    return msgspec.json.encode(value).decode().replace("<", "\\u003c")


def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.PackageLoader("headrace.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _source(name: str) -> str:
    environment = _environment()
    assert environment.loader is not None
    return environment.loader.get_source(environment, name)[0]


def _plotly() -> str:
    from plotly.offline import get_plotlyjs  # 0.2 s, and only this file needs it

    return str(get_plotlyjs())


def _tone(run: Run) -> str:
    """How the verdict is coloured: ``good``, ``bad``, or ``unsure``."""
    finding = text.finding_of(run)
    if finding is None or finding.cause == "unknown":
        return "unsure"
    return "good" if finding.cause == "compute" else "bad"


def _tiles(run: Run) -> list[tuple[str, str, str]]:
    """Key numbers as (label, value, small print); what was not measured gets no tile."""
    finding, found = text.finding_of(run), text.subject(run)
    tiles: list[tuple[str, str, str]] = []
    if finding is not None and finding.stall_frac is not None:
        steady = found[1].steady_stall_frac if found else None
        small = "" if steady is None else f"{units.percent(steady)} without epoch starts"
        tiles.append(("stall fraction", units.percent(finding.stall_frac), small))
    if found:
        tiles += _loader_tiles(found[1])
    if finding is not None and finding.changes and finding.changes[0].speedup is not None:
        ci = finding.changes[0].speedup_ci
        interval = f"{units.speedup(ci[0])} to {units.speedup(ci[1])}" if ci else ""
        tiles.append(("predicted gain", units.speedup(finding.changes[0].speedup), interval))
    return tiles


def _loader_tiles(loader: Loader) -> list[tuple[str, str, str]]:
    tiles = []
    if loader.step_ns is not None:
        tiles.append(("step time", units.duration(loader.step_ns.mean), f"p95 {units.duration(loader.step_ns.p95)}"))
    if loader.samples_per_s is not None:
        ceiling = loader.ceiling_samples_per_s
        small = "samples/s" if ceiling is None else f"samples/s; ceiling {units.number(ceiling)}"
        tiles.append(("rate now", units.number(loader.samples_per_s), small))
    return tiles


def _bars(run: Run) -> list[tuple[str, list[tuple[str, str, float]], list[tuple[str, str, float]]]]:
    """Stacked bars as (name, parts of the time, parts of the wait), the subject's first."""
    found = text.subject(run)
    pairs = sorted(text.loaders(run), key=lambda pair: -text.cost_ns(pair[1]))
    pairs.sort(key=lambda pair: found is None or pair[1] is not found[1])
    bars = []
    for process, loader in pairs[:_MAX_BARS]:
        if loader.time_frac is not None:
            waits = text.parts(loader.wait_frac, text.WAIT_WORDS) if loader.wait_frac else []
            name = f"{text.clean(loader.site)}, {loader.role}, {text.who(process)}"
            bars.append((name, text.parts(loader.time_frac, text.TIME_WORDS), waits))
    return bars


def _stages(run: Run) -> list[tuple[str, str]]:
    """Mean time per batch in each stage of the subject that was measured."""
    found = text.subject(run)
    if not found or found[1].service_ns is None:
        return []
    stages = msgspec.structs.asdict(found[1].service_ns)
    return [(key.replace("_", " "), units.duration(value)) for key, value in stages.items() if value is not None]


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """A fingerprint as rows of name and value; nested names are joined."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(inner, f"{name} {key}".strip())
    elif isinstance(value, list) and any(isinstance(inner, (dict, list)) for inner in value):
        for index, inner in enumerate(value):
            yield from _flat(inner, f"{name} {index}")
    elif isinstance(value, list):
        yield text.clean(name).replace("_", " "), text.clean(", ".join(map(str, value)))
    else:
        unit = next((unit for unit in ("bytes", "frac", "ns", "cores") if name.endswith(f"_{unit}")), "text")
        shown = str(value) if unit == "text" and not isinstance(value, bool) else units.quantity(value, unit)
        shown = units.MISSING if value is None else shown
        yield text.clean(name).removesuffix(f"_{unit}").replace("_", " ").replace("cpu", "CPU"), text.clean(shown)


def _charts(run: Run) -> dict[str, Any]:
    """The subject's columns for ``report.js``; ``None`` where there is nothing to draw."""
    found = text.subject(run)
    charts: dict[str, Any] = {"series": None, "lanes": None}
    if found and found[1].series is not None and found[1].series.step_idx:
        charts["series"] = _series(found[1].series)
    if found and found[1].lanes is not None and found[1].lanes.lane:
        charts["lanes"] = _lanes(found[1].lanes)
    return charts


def _drawn_kinds(lanes: dict[str, Any] | None) -> list[str]:
    """Kinds of events that occur, for the legend."""
    return [] if lanes is None else [lanes["kinds"][index] for index in sorted(set(lanes["kind"]))]


def _series(series: Series) -> dict[str, Any]:
    """Times in us: 1/1000 of what a pixel can show, at half the bytes."""
    return {
        "idx": series.step_idx,
        "start": [t // 1000 for t in series.start_ns],
        "step": [t // 1000 for t in series.step_ns],
        "stall": [t // 1000 for t in series.stall_ns],
        "epoch": [int(first) for first in series.epoch_start],
        "seen": series.num_steps_seen,
    }


def _lanes(lanes: Lanes) -> dict[str, Any]:
    """Events in order of their start, which is written as the distance from the event before: half the bytes."""
    order = sorted(range(len(lanes.lane)), key=lanes.start_ns.__getitem__)
    starts = [lanes.start_ns[i] // 1000 for i in order]
    return {
        "names": [text.clean(lane.name) + f" ({lane.pid})" for lane in lanes.lanes],
        "kinds": lanes.kinds,
        "gap": [now - before for before, now in zip([0, *starts[:-1]], starts, strict=True)],
        "dur": [lanes.dur_ns[i] // 1000 for i in order],
        "lane": [lanes.lane[i] for i in order],
        "kind": [lanes.kind[i] for i in order],
        "batch": [lanes.batch[i] for i in order],
    }
