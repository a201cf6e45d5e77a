"""NVIDIA GPUs through NVML (``nvidia-ml-py``). All of it is optional: without a driver there is a reason, never a zero.

One thread owns an `Nvml`. Its calls block in the driver, from microseconds up to some tens of milliseconds.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Protocol

from headrace.records.rundir import GpuSample

NO_DRIVER = "no NVIDIA driver"

# Fields of nvml.h: violation times in ns since the driver was loaded.
_FIELD_POWER, _FIELD_THERMAL, _FIELD_SW_THERMAL, _FIELD_HW_THERMAL, _FIELD_POWER_BRAKE = 74, 75, 269, 270, 271
_THROTTLE_FIELDS = (_FIELD_POWER, _FIELD_THERMAL, _FIELD_SW_THERMAL, _FIELD_HW_THERMAL, _FIELD_POWER_BRAKE)
_GPU_UTILIZATION_SAMPLES = 1


class Gpus(Protocol):
    """What the sampler asks of the GPUs of a machine."""

    def unavailable(self) -> str | None:
        """Why there is nothing to see, or None when there is."""
        ...

    def describe(self) -> list[dict[str, Any]]:
        """What does not change of each: ``index``, ``name``, ``memory_bytes``, ``pcie_gen_max``, ..."""
        ...

    def driver(self) -> str | None:
        """The driver's version."""
        ...

    def sample(self) -> list[GpuSample]:
        """All GPUs now; ``util_frac`` is the mean since the last call."""
        ...

    def close(self) -> None:
        """Let go of the driver; may be called twice."""
        ...


class Nvml:
    """The real GPUs. Never raises: what a GPU does not offer (MIG, vGPU, an old board) is None."""

    def __init__(self, library: ModuleType | Any | None = None) -> None:
        """Load the driver's library; ``library`` stands in for the ``pynvml`` module in tests."""
        self._nvml: Any = None
        self._handles: list[Any] = []
        self._last_us: dict[int, int] = {}
        self._reason: str | None = None
        try:
            nvml: Any = library if library is not None else importlib.import_module("pynvml")
            nvml.nvmlInit()
            self._nvml = nvml
            self._handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        except Exception as error:  # noqa: BLE001 - boundary to the driver, which fails in ways of its own
            self._reason = _reason(error)
        else:
            self._reason = None if self._handles else "no NVIDIA GPU"

    def unavailable(self) -> str | None:
        """Why there is nothing to see, or None when there is."""
        return self._reason

    def driver(self) -> str | None:
        """The driver's version; None when it can not be had."""
        return None if self._nvml is None else _text(self._try("nvmlSystemGetDriverVersion"))

    def describe(self) -> list[dict[str, Any]]:
        """What does not change of each GPU; a missing value is None."""
        return [self._describe(index, handle) for index, handle in enumerate(self._handles)]

    def _describe(self, index: int, handle: Any) -> dict[str, Any]:
        memory = self._try("nvmlDeviceGetMemoryInfo", handle)
        return {
            "index": index,
            "name": _text(self._try("nvmlDeviceGetName", handle)),
            "memory_bytes": None if memory is None else int(memory.total),
            "pcie_gen_max": self._try("nvmlDeviceGetMaxPcieLinkGeneration", handle),
            "pcie_width_max": self._try("nvmlDeviceGetMaxPcieLinkWidth", handle),
        }

    def sample(self) -> list[GpuSample]:
        """All GPUs now; ``util_frac`` is the mean of the driver's own samples since the last call."""
        return [self._sample(index, handle) for index, handle in enumerate(self._handles)]

    def _sample(self, index: int, handle: Any) -> GpuSample:
        power, limit = (
            self._try("nvmlDeviceGetPowerUsage", handle),
            self._try("nvmlDeviceGetEnforcedPowerLimit", handle),
        )
        fields = self._fields(handle)
        return GpuSample(
            index=index,
            util_frac=self._utilisation(index, handle),
            pcie_gen=self._try("nvmlDeviceGetCurrPcieLinkGeneration", handle),
            pcie_width=self._try("nvmlDeviceGetCurrPcieLinkWidth", handle),
            pcie_gen_max=self._try("nvmlDeviceGetMaxPcieLinkGeneration", handle),
            pcie_width_max=self._try("nvmlDeviceGetMaxPcieLinkWidth", handle),
            power_w=None if power is None else power / 1000,
            power_limit_w=None if limit is None else limit / 1000,
            throttle_reasons=self._throttle_reasons(handle),
            throttled_power_ns=_sum(fields, _FIELD_POWER, _FIELD_POWER_BRAKE),
            throttled_thermal_ns=_thermal(fields),
        )

    def _throttle_reasons(self, handle: Any) -> int | None:
        reasons = self._try("nvmlDeviceGetCurrentClocksEventReasons", handle)
        if reasons is None:  # drivers before 535 know it under its old name
            reasons = self._try("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        return None if reasons is None else int(reasons)

    def _utilisation(self, index: int, handle: Any) -> float | None:
        """The mean of the driver's buffer (a value each 1/6 to 1 s) since the last call, else its latest value."""
        answer = self._try("nvmlDeviceGetSamples", handle, _GPU_UTILIZATION_SAMPLES, self._last_us.get(index, 0))
        if answer is not None:
            kind, samples = answer
            fresh = [s for s in samples if s.timeStamp > self._last_us.get(index, 0)]
            first = index not in self._last_us
            if fresh:
                self._last_us[index] = max(s.timeStamp for s in fresh)
                # The buffer reaches back for many seconds: the first call takes only its newest value.
                values = [_value(kind, s.sampleValue) for s in (fresh[-1:] if first else fresh)]
                return float(sum(values)) / len(values) / 100
        rates = self._try("nvmlDeviceGetUtilizationRates", handle)
        return None if rates is None else float(rates.gpu) / 100

    def _fields(self, handle: Any) -> dict[int, int]:
        values = self._try("nvmlDeviceGetFieldValues", handle, list(_THROTTLE_FIELDS)) or ()
        return {v.fieldId: _value(v.valueType, v.value) for v in values if v.nvmlReturn == 0}

    def _try(self, name: str, *args: Any) -> Any:
        """The driver's answer, or None when this GPU, driver or binding has none to this question."""
        call: Callable[..., Any] | None = getattr(self._nvml, name, None)
        if call is None:
            return None
        try:
            return call(*args)
        except Exception:  # noqa: BLE001 - NVMLError, and what ctypes makes of a missing symbol, mean "not offered"
            return None

    def close(self) -> None:
        """Let go of the driver; may be called twice."""
        if self._nvml is not None:
            self._try("nvmlShutdown")
        self._nvml, self._handles = None, []


class FakeGpus:
    """GPUs for tests: plays the samples that it was given, in order, the last one for ever."""

    def __init__(self, samples: Sequence[list[GpuSample]] = (), reason: str | None = None) -> None:
        """Args: ``samples``: one list per call; ``reason``: why there are none."""
        self._samples, self._reason, self._next = list(samples), reason, 0
        self.closed = False

    def unavailable(self) -> str | None:
        """The reason given, or that no samples were."""
        return self._reason or (None if self._samples else NO_DRIVER)

    def driver(self) -> str | None:
        """A made-up version where there are GPUs."""
        return "0.0-fake" if self._samples else None

    def describe(self) -> list[dict[str, Any]]:
        """The GPUs of the first sample."""
        return [{"index": gpu.index, "name": "fake"} for gpu in (self._samples[0] if self._samples else [])]

    def sample(self) -> list[GpuSample]:
        """The next list. Raises: AssertionError after `close`."""
        assert not self.closed, "sampled after close"
        self._next += 1
        return self._samples[min(self._next, len(self._samples)) - 1] if self._samples else []

    def close(self) -> None:
        """Remember it."""
        self.closed = True


def _reason(error: Exception) -> str:
    """NVML's errors in our words; its code 9 is "driver not loaded" and 12 "library not found"."""
    if isinstance(error, ImportError):
        return "the package nvidia-ml-py is not installed"
    code = getattr(error, "value", None)
    return NO_DRIVER if code in (9, 12) else f"NVML: {error}"


def _text(value: Any) -> str | None:
    return value.decode() if isinstance(value, bytes) else value


def _value(kind: int, union: Any) -> Any:
    """The member of an NVML value union that is set: 0 double, 1 and 2 unsigned, 3 and 4 64-bit, 5 signed."""
    names = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal"}
    return getattr(union, names.get(kind, "ullVal"))


def _sum(fields: dict[int, int], *wanted: int) -> int | None:
    found = [fields[f] for f in wanted if f in fields]
    return sum(found) if found else None


def _thermal(fields: dict[int, int]) -> int | None:
    """Newer boards tell software from hardware slowdown; older ones have the one violation counter."""
    split = _sum(fields, _FIELD_SW_THERMAL, _FIELD_HW_THERMAL)
    return split if split is not None else fields.get(_FIELD_THERMAL)
