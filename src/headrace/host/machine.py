"""The machine as data: what a speed was measured on. A missing value is None with its reason in ``unavailable``."""

from __future__ import annotations

import hashlib
import os
import platform

from headrace.host import cpus, procfs
from headrace.host.cgroup import Cgroups
from headrace.host.nvml import Gpus
from headrace.records.rundir import Machine

_CONTAINER_FILES = ("/.dockerenv", "/run/.containerenv")
_GONE = "the process had ended"


def read_machine(pid: int, gpus: Gpus | None = None) -> Machine:
    """Describe the machine as this process may use it (affinity, quota, limit).

    Args:
        pid: The root of the program.
        gpus: Where to ask for GPUs; None leaves them out.

    Returns:
        A machine without any name of it: the host's name only as a hash, to tell two machines apart.
    """
    machine = Machine(
        hostname_hash=hashlib.sha256(platform.node().encode()).hexdigest()[:12],
        kernel=platform.release(),
        cpu_model=_cpu_model(),
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        shm_bytes=_shm_bytes(),
        in_container=_in_container(),
    )
    machine.unavailable = {}
    _read_cpus(machine, pid)
    _read_limits(machine, pid)
    _read_gpus(machine, gpus)
    return machine


def _read_cpus(machine: Machine, pid: int) -> None:
    machine.num_cpus = os.cpu_count()
    allowed = cpus.read_affinity(pid)
    if allowed is None:
        machine.unavailable["num_allowed_cpus"] = _GONE
        return
    machine.num_allowed_cpus = len(allowed)
    machine.threads_per_core = cpus.read_threads_per_core(min(allowed))
    if machine.threads_per_core is None:
        machine.unavailable["threads_per_core"] = "the kernel shows no CPU topology"


def _read_limits(machine: Machine, pid: int) -> None:
    limits = Cgroups(pid).limits()
    machine.cgroup_version = limits.version
    machine.cpu_quota_cores = limits.cpu_quota_cores
    machine.memory_limit_bytes = limits.memory_bytes
    if limits.version is None:
        machine.unavailable["cgroup_version"] = "no cgroup file system is mounted here"
    reason = "no limit is set" if limits.version else "no cgroup file system is mounted here"
    for name in ("cpu_quota_cores", "memory_limit_bytes"):
        if getattr(machine, name) is None:
            machine.unavailable[name] = reason


def _read_gpus(machine: Machine, gpus: Gpus | None) -> None:
    reason = "not asked for" if gpus is None else gpus.unavailable()
    if gpus is None or reason is not None:
        machine.unavailable["gpus"] = machine.unavailable["driver"] = str(reason)
        return
    machine.gpus = gpus.describe()
    machine.driver = gpus.driver()


def parse_cpu_model(text: str) -> str | None:
    """The model's name from ``/proc/cpuinfo``; ARM kernels write none."""
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model", "cpu model"):
            return value.strip()
    return None


def _cpu_model() -> str | None:
    return parse_cpu_model(procfs.read_text("/proc/cpuinfo") or "") or platform.processor() or None


def _shm_bytes() -> int | None:
    try:
        stat = os.statvfs("/dev/shm")
    except OSError:
        return None
    return stat.f_blocks * stat.f_frsize


def _in_container() -> bool:
    if any(os.path.exists(path) for path in _CONTAINER_FILES):
        return True
    memberships = procfs.read_text("/proc/1/cgroup") or ""
    return any(word in memberships for word in ("docker", "kubepods", "containerd", "lxc", "podman"))
