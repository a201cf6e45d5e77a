"""The tightest limit around a process is found in both versions of cgroups, nested and from inside a container."""

import contextlib
import os
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headrace.host.cgroup import Cgroups, Level, Membership, locate, parse_cpu_max, parse_memberships
from headrace.host.procfs import Mount, parse_mountinfo

DATA = Path(__file__).parents[1] / "data" / "proc"


def write(directory, **files):
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name.replace("__", ".", 1)).write_text(text)


def cgroups(text, mounts):
    """The cgroups of a process whose ``/proc/PID/cgroup`` is ``text``; other files are the real ones under tmp_path."""

    def read(path):
        return text if path.startswith("/proc/") else Path(path).read_text()

    return Cgroups(1, read, mounts)


def version_1(root):
    names = ("cpu", "cpuacct", "memory")
    return [Mount("/", str(root / name), "cgroup", ("rw", name)) for name in names]


def test_recorded_memberships():
    """Named hierarchies, single controllers and the empty version 2 line are told apart."""
    members = parse_memberships((DATA / "cgroup1").read_text())
    assert Membership(4, ("memory",), "/job/one") in members
    assert members[-1] == Membership(0, (), "/")
    mounts = parse_mountinfo((DATA / "mountinfo_cgroup1").read_text())
    assert locate("cpu", members, mounts)[-1] == Level("/sys/fs/cgroup/cpu", 1)


def test_version_1_takes_the_smallest_quota_and_limit_of_all_levels(tmp_path):
    """An outer group's quota counts although the inner one has none, and unlimited is not a limit."""
    write(
        tmp_path / "cpu" / "a" / "b", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000", cpu__stat="nr_throttled 1\n"
    )
    stat = "nr_periods 9\nnr_throttled 7\nthrottled_time 123456789\n"
    write(tmp_path / "cpu" / "a", cpu__cfs_quota_us="150000", cpu__cfs_period_us="100000", cpu__stat=stat)
    write(tmp_path / "cpuacct" / "a" / "b", cpuacct__usage="42")
    memory = {"memory__usage_in_bytes": "900", "memory__failcnt": "3", "memory__stat": "total_inactive_file 100\n"}
    write(tmp_path / "memory" / "a" / "b", memory__limit_in_bytes="1000", **memory)
    write(tmp_path / "memory" / "a", memory__limit_in_bytes=str((1 << 63) - 4096), **memory)
    seen = cgroups("3:cpu:/a/b\n2:cpuacct:/a/b\n1:memory:/a/b\n0::/\n", version_1(tmp_path))
    limits = seen.limits()
    assert (limits.version, limits.cpu_quota_cores, limits.memory_bytes) == (1, 1.5, 1000)
    sample = seen.sample()
    assert (sample.num_throttled, sample.throttled_ns, sample.usage_ns) == (7, 123_456_789, 42)
    assert (sample.memory_bytes, sample.memory_file_bytes, sample.memory_limit_hits) == (900, 100, 3)


def test_version_2(tmp_path):
    """cpu.max, memory.max and their totals, in microseconds there and ns here; ``max`` is no limit."""
    inner, outer = tmp_path / "job" / "one", tmp_path / "job"
    stat = (DATA / "cpu_stat_cgroup2").read_text()
    write(inner, cpu__max="50000 100000\n", cpu__stat=stat, memory__max="max\n", memory__stat="inactive_file 7\n")
    write(inner, memory__current="11", memory__events="low 0\nhigh 0\nmax 5\noom 0\n")
    write(outer, cpu__max="max 100000\n", memory__max="2048", memory__current="99", memory__stat="inactive_file 8\n")
    write(outer, memory__events="max 6\n", cpu__stat=stat)
    seen = cgroups("0::/job/one\n", [Mount("/", str(tmp_path), "cgroup2", ("rw",))])
    limits = seen.limits()
    assert (limits.version, limits.cpu_quota_cores, limits.memory_bytes) == (2, 0.5, 2048)
    sample = seen.sample()
    assert (sample.num_throttled, sample.throttled_ns, sample.usage_ns) == (57, 3_210_987_000, 5_234_011_000)
    assert (sample.memory_bytes, sample.memory_file_bytes, sample.memory_limit_hits) == (99, 8, 6)


@pytest.mark.parametrize("path", ["/docker/abc", "/docker/abc/inner", "/../outside", "/elsewhere"])
def test_a_container_sees_only_its_part_of_the_hierarchy(tmp_path, path):
    """A path of the host is made relative to what is mounted here; one from outside falls back to the mount itself."""
    write(tmp_path, cpu__max="200000 100000", cpu__stat="usage_usec 1\n")
    write(tmp_path / "inner", cpu__max="max 100000", cpu__stat="usage_usec 2\n")
    mounts = [Mount("/docker/abc", str(tmp_path), "cgroup2", ("rw",))]
    levels = locate("cpu", [Membership(0, (), path)], mounts)
    assert levels[-1] == Level(str(tmp_path), 2)
    assert len(levels) == (2 if path.endswith("inner") else 1)
    assert cgroups(f"0::{path}\n", mounts).limits().cpu_quota_cores == 2.0


def test_without_any_cgroup_there_is_no_sample():
    """A machine without cgroups has no sample, not one of zeros."""
    seen = cgroups("", [])
    assert seen.sample() is None
    assert seen.limits().version is None


def test_a_process_that_moves_is_followed(tmp_path):
    """A program that puts itself into a group with a quota is seen there at the next look."""
    write(tmp_path, cpu__max="max 100000", cpu__stat="nr_throttled 0\n")
    write(tmp_path / "tight", cpu__max="10000 100000", cpu__stat="nr_throttled 4\n")
    now = ["0::/\n"]
    mounts = [Mount("/", str(tmp_path), "cgroup2", ())]
    seen = Cgroups(1, lambda path: now[0] if path.startswith("/proc/") else Path(path).read_text(), mounts)
    assert seen.sample(thorough=False).num_throttled == 0
    now[0] = "0::/tight\n"
    assert seen.sample(thorough=False).num_throttled == 4
    now[0] = ""
    assert seen.sample().num_throttled == 4


def test_quota_text():
    """A quota without a period means the usual tenth of a second."""
    assert (parse_cpu_max("max 100000"), parse_cpu_max("50000"), parse_cpu_max("300000 100000\n")) == (None, 0.5, 3.0)


@contextlib.contextmanager
def real_group(quota_us):
    """A real child group of version 1 or 2 with a quota; skips where that is not permitted."""
    base = next((p for p in ("/sys/fs/cgroup/cpu", "/sys/fs/cgroup") if os.path.exists(f"{p}/cgroup.procs")), None)
    group = Path(base or "/nonexistent") / f"headrace-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup may be made here: {error}")
    try:
        try:
            if (group / "cpu.cfs_quota_us").exists():
                (group / "cpu.cfs_quota_us").write_text(str(quota_us))
            else:
                (group / "cpu.max").write_text(f"{quota_us} 100000")
        except OSError as error:
            pytest.skip(f"no CPU quota may be set here: {error}")
        yield group
    finally:
        group.rmdir()


@pytest.mark.slow
def test_a_real_quota_is_seen_with_its_throttling():
    """A process that spins under a quota of a tenth of a core is seen being throttled, and the quota is read."""
    with real_group(10_000) as group, subprocess.Popen([sys.executable, "-c", "while True: pass"]) as spinner:
        try:
            (group / "cgroup.procs").write_text(str(spinner.pid))
            seen = Cgroups(spinner.pid)
            before, quota = seen.sample(), seen.limits().cpu_quota_cores
            end = time.monotonic() + 5
            # The kernel counts a throttling when it begins, and its time when it ends.
            while (after := seen.sample()).throttled_ns == before.throttled_ns and time.monotonic() < end:
                select.select([], [], [], 0.02)
        finally:
            spinner.kill()
            spinner.wait()
    assert quota == pytest.approx(0.1)
    assert after.num_throttled > before.num_throttled
    assert after.throttled_ns > before.throttled_ns
