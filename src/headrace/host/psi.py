"""Pressure stall information of the machine (``/proc/pressure``): time in which some task waited for a resource."""

from __future__ import annotations

from headrace.host.procfs import Reader, read_text


def parse_pressure(text: str) -> int | None:
    """The total of the ``some`` line in ns; None when there is no such line."""
    for line in text.splitlines():
        if line.startswith("some "):
            _, _, total = line.partition("total=")
            return int(total) * 1000
    return None


def read_pressure(resource: str, read: Reader = read_text) -> int | None:
    """Total stall of ``cpu``, ``io`` or ``memory`` in ns; None where the kernel was built or started without PSI."""
    text = read(f"/proc/pressure/{resource}")
    return None if text is None else parse_pressure(text)
