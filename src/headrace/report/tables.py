"""The table of loaders and ranks, which terminal, HTML and notebook share. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from headrace.core import units
from headrace.records.run import Loader, Process, Run
from headrace.report import text

COLUMNS = ("where", "loader", "role", "workers", "steps", "step", "stall", "rate", "cause")


class Row(msgspec.Struct, frozen=True):
    """One loader of one process, or all ranks of one site together (``merged``). ``cells`` follow ``COLUMNS``."""

    cells: tuple[str, ...]
    merged: bool = False
    subject: bool = False


def rows(run: Run) -> list[Row]:
    """Loaders of all processes, the costliest first; a site with several ranks begins with all of them merged."""
    found = text.subject(run)
    chosen = found[1] if found else None
    result: list[Row] = []
    for site, pairs in _by_site(run).items():
        if sum(process.rank is not None for process, _ in pairs) > 1:
            result.append(_merged(site, pairs))
        result += [_single(process, loader, loader is chosen) for process, loader in pairs]
    return result


def _by_site(run: Run) -> dict[tuple[str, str], list[tuple[Process, Loader]]]:
    """Sites with their loaders; sites and loaders in order of cost."""
    sites: dict[tuple[str, str], list[tuple[Process, Loader]]] = {}
    for process, loader in sorted(text.loaders(run), key=lambda pair: -text.cost_ns(pair[1])):
        sites.setdefault((loader.site, loader.role), []).append((process, loader))
    return sites


def _single(process: Process, loader: Loader, subject: bool) -> Row:
    cells = (
        text.who(process),
        text.clean(loader.site) + (" (simulated device)" if loader.simulated else ""),
        loader.role,
        "" if loader.num_workers is None else str(loader.num_workers),
        units.MISSING if loader.kind == "proc" and not loader.num_steps else f"{loader.num_steps:,}",
        units.duration(loader.step_ns.mean if loader.step_ns else None),
        units.percent(loader.stall_frac),
        units.rate(loader.samples_per_s, "samples"),
        loader.finding.cause if loader.finding else "",
    )
    return Row(cells, subject=subject)


def _merged(site: tuple[str, str], pairs: Sequence[tuple[Process, Loader]]) -> Row:
    """All ranks of a site: rates add up, times and stalls are means over the ranks that have them."""
    found = [loader for _, loader in pairs]
    causes = sorted({loader.finding.cause for loader in found if loader.finding})
    workers = [loader.num_workers for loader in found if loader.num_workers is not None]
    rates = [loader.samples_per_s for loader in found if loader.samples_per_s is not None]
    cells = (
        f"{len(found)} ranks",
        text.clean(site[0]),
        site[1],
        str(sum(workers)) if workers else "",
        f"{max(loader.num_steps for loader in found):,}",
        units.duration(_mean([loader.step_ns.mean for loader in found if loader.step_ns])),
        units.percent(_mean([loader.stall_frac for loader in found if loader.stall_frac is not None])),
        units.rate(sum(rates) if len(rates) == len(found) else None, "samples"),
        ", ".join(causes),
    )
    return Row(cells, merged=True)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
