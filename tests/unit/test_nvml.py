"""GPUs are described where there are any; what a GPU or a driver does not offer is None, never 0."""

import types

import pytest

from headrace.host.nvml import FakeGpus, Nvml
from headrace.records.rundir import GpuSample


class DriverError(Exception):
    def __init__(self, value):
        super().__init__(f"error {value}")
        self.value = value


class FakeLibrary:
    """Stands in for the module ``pynvml``: one GPU; every name in ``missing`` fails as the driver does."""

    def __init__(self, missing=(), init_error=None, count=1):
        self.missing, self.init_error, self.count = set(missing), init_error, count
        self.utilisation = [(100, 30), (200, 50)]
        self.shut_down = 0

    def __getattr__(self, name):
        if not name.startswith("nvml"):
            raise AttributeError(name)
        if name in self.missing:
            raise AttributeError(name)
        return lambda *args: self.answer(name, *args)

    def answer(self, name, *args):
        if f"!{name}" in self.missing:
            raise DriverError(3)
        if name == "nvmlInit" and self.init_error is not None:
            raise DriverError(self.init_error)
        if name == "nvmlShutdown":
            self.shut_down += 1
        if name == "nvmlDeviceGetSamples":
            return 1, [self.sample(*row) for row in self.utilisation if row[0] > args[2]]
        values = {
            "nvmlDeviceGetCount": self.count,
            "nvmlDeviceGetHandleByIndex": "handle",
            "nvmlSystemGetDriverVersion": b"555.1",
            "nvmlDeviceGetName": "GPU X",
            "nvmlDeviceGetMemoryInfo": types.SimpleNamespace(total=1 << 30),
            "nvmlDeviceGetCurrPcieLinkGeneration": 1,
            "nvmlDeviceGetCurrPcieLinkWidth": 4,
            "nvmlDeviceGetMaxPcieLinkGeneration": 4,
            "nvmlDeviceGetMaxPcieLinkWidth": 16,
            "nvmlDeviceGetPowerUsage": 250_500,
            "nvmlDeviceGetEnforcedPowerLimit": 300_000,
            "nvmlDeviceGetCurrentClocksEventReasons": 4,
            "nvmlDeviceGetCurrentClocksThrottleReasons": 8,
            "nvmlDeviceGetUtilizationRates": types.SimpleNamespace(gpu=77),
            "nvmlDeviceGetSamples": (
                1,
                [self.sample(*row) for row in self.utilisation if row[0] > (args[2:] or [0])[0]],
            ),
            "nvmlDeviceGetFieldValues": [
                self.field(74, 7),
                self.field(75, 9),
                self.field(269, 1, 3),
                self.field(271, 2),
            ],
        }
        return values.get(name)

    @staticmethod
    def sample(time_us, percent):
        return types.SimpleNamespace(timeStamp=time_us, sampleValue=types.SimpleNamespace(uiVal=percent))

    @staticmethod
    def field(number, ns, code=0):
        value = types.SimpleNamespace(ullVal=ns)
        return types.SimpleNamespace(fieldId=number, nvmlReturn=code, valueType=3, value=value)


def test_all_of_a_gpu():
    """Fractions, watts and ns; a field that the board does not have is left out of the sums."""
    gpus = Nvml(FakeLibrary())
    assert gpus.unavailable() is None
    assert gpus.driver() == "555.1"
    assert gpus.describe()[0] == {
        "index": 0, "name": "GPU X", "memory_bytes": 1 << 30, "pcie_gen_max": 4, "pcie_width_max": 16,
    }  # fmt: skip
    assert gpus.sample() == [
        GpuSample(
            index=0, util_frac=0.5, pcie_gen=1, pcie_width=4, pcie_gen_max=4, pcie_width_max=16, power_w=250.5,
            power_limit_w=300.0, throttle_reasons=4, throttled_power_ns=9, throttled_thermal_ns=9,
        )
    ]  # fmt: skip


def test_utilisation_is_the_mean_since_the_last_look():
    """The driver's buffer is read from where the last look ended; when it has nothing new its latest value is taken."""
    library = FakeLibrary()
    gpus = Nvml(library)
    gpus.sample()
    library.utilisation += [(300, 10), (400, 20)]
    assert gpus.sample()[0].util_frac == pytest.approx(0.15)
    assert gpus.sample()[0].util_frac == pytest.approx(0.77)


def test_what_is_not_offered_is_none():
    """A GPU in MIG mode has no utilisation, an old driver has old names, an old board no fields."""
    gone = ["!nvmlDeviceGetSamples", "!nvmlDeviceGetUtilizationRates", "!nvmlDeviceGetPowerUsage"]
    gone += ["nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetFieldValues"]
    sample = Nvml(FakeLibrary(gone)).sample()[0]
    assert (sample.util_frac, sample.power_w, sample.throttled_power_ns) == (None, None, None)
    assert sample.throttle_reasons == 8


@pytest.mark.parametrize(
    ("library", "reason"),
    [
        (FakeLibrary(init_error=12), "no NVIDIA driver"),
        (FakeLibrary(init_error=9), "no NVIDIA driver"),
        (FakeLibrary(init_error=4), "NVML: error 4"),
        (FakeLibrary(count=0), "no NVIDIA GPU"),
    ],
)
def test_without_gpus_there_is_a_reason(library, reason):
    """No driver, no GPU and a driver that fails are reasons in words, and every other question has an answer."""
    gpus = Nvml(library)
    assert gpus.unavailable() == reason
    assert gpus.describe() == gpus.sample() == []
    gpus.close()
    gpus.close()


def test_the_driver_is_let_go():
    """Close shuts the library down once."""
    library = FakeLibrary()
    gpus = Nvml(library)
    gpus.close()
    gpus.close()
    assert library.shut_down == 1
    assert gpus.sample() == []


def test_the_fake_refuses_use_after_close():
    """The public fake plays its samples, the last one for ever, and detects misuse."""
    first, last = [GpuSample(index=0, util_frac=0.1)], [GpuSample(index=0, util_frac=0.9)]
    gpus = FakeGpus([first, last])
    assert [gpus.sample(), gpus.sample(), gpus.sample()] == [first, last, last]
    gpus.close()
    with pytest.raises(AssertionError, match="after close"):
        gpus.sample()
    assert FakeGpus().unavailable() == "no NVIDIA driver"


@pytest.mark.gpu
def test_a_real_gpu():
    """On a machine with a driver the real library gives a link, a name and a power."""
    gpus = Nvml()
    try:
        assert gpus.unavailable() is None
        sample = gpus.sample()[0]
        assert sample.power_w > 0
        assert sample.pcie_gen <= sample.pcie_gen_max
    finally:
        gpus.close()
