"""`/proc` text of real processes becomes numbers, and a process that is gone becomes None."""

import fcntl
import os
import socket
import struct
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.host import blocked, cpus, machine, procfs, psi
from headrace.host.blocked import blocked_on
from headrace.host.procreader import Files, ProcReader

DATA = Path(__file__).parents[1] / "data" / "proc"
#: Larger than any pid that Linux gives (2**22).
NO_PID = 2**22 + 1


def recorded(name):
    return (DATA / name).read_text()


def test_a_name_with_blanks_and_parentheses_is_read_whole():
    """A process may name itself anything: the fields after the name stay in their places."""
    stat = procfs.parse_stat(recorded("stat_named_with_parentheses"))
    assert (stat.comm, stat.state, stat.num_threads) == ("(a b) c", "S", 2)
    assert (stat.user_ns, stat.system_ns) == (40_000_000, 90_000_000)
    assert stat.rss_bytes == 5595 * os.sysconf("SC_PAGE_SIZE")


@settings(deadline=None)  # a busy machine is no failure
@given(st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\0"), max_size=15))
def test_any_name_is_read_whole(name):
    """No name of a process can shift the fields behind it."""
    text = recorded("stat_zombie").replace("((a b) c)", f"({name})")
    stat = procfs.parse_stat(text)
    assert (stat.comm, stat.state) == (name, "Z")


def test_kernel_thread_and_zombie_are_read_like_others():
    """Processes without memory have zero pages, not a failure."""
    assert procfs.parse_stat(recorded("stat_kernel_thread")).comm == "kthreadd"
    assert procfs.parse_stat(recorded("stat_zombie")).rss_bytes == 0


def test_counters_of_a_process():
    """schedstat, io, status and smaps_rollup give the numbers that stand there, in ns and bytes."""
    assert procfs.parse_schedstat(recorded("schedstat")) == procfs.Schedstat(135_920_710, 41_636)
    assert procfs.parse_io(recorded("io")) == procfs.Io(rchar_bytes=1_466_500, read_bytes=0, write_bytes=0)
    assert procfs.parse_status(recorded("status")) == procfs.Status(3, 5, 2, "(a b) c")
    rollup = procfs.parse_smaps_rollup(recorded("smaps_rollup"))
    assert rollup.private_dirty_bytes > 8 << 20
    assert rollup.swap_bytes == 0


@pytest.mark.parametrize(
    ("text", "cpus_"), [("0-1\n", {0, 1}), ("0,2-4,9", {0, 2, 3, 4, 9}), ("\n", set()), ("7", {7})]
)
def test_sets_of_cpus(text, cpus_):
    """The kernel's notation for CPUs is read with ranges, single ones and none."""
    assert procfs.parse_cpu_list(text) == cpus_


def test_pressure_machine_and_cpu_model():
    """PSI is microseconds there and ns here; /proc/stat counts ticks; waiting for a disk is idle."""
    assert psi.parse_pressure(recorded("pressure_cpu")) == 263_545_497_000
    assert psi.parse_pressure("") is None
    times = cpus.parse_cpu_times(recorded("proc_stat"))
    assert set(times) == {0, 1}
    assert cpus.total(times, {0, 1, 5}).busy_ns == times[0].busy_ns + times[1].busy_ns
    assert cpus.total(times, {5}) is None
    assert cpus.parse_cpu_times("cpu  9 9\ncpu0 1 2 3 4 5 6 7 8 9 10\n")[0] == cpus.CpuTimes(270_000_000, 90_000_000)
    assert machine.parse_cpu_model(recorded("cpuinfo")) == "Intel(R) Xeon(R) Processor"


def test_a_mount_point_with_a_blank_names_its_file_system():
    """A file's system is that of the deepest mount above it."""
    mounts = procfs.parse_mountinfo(recorded("mountinfo_cgroup1"))
    assert blocked.fs_type_of("/data/training set/a.bin", mounts) == "nfs4"
    assert blocked.fs_type_of("/data/other", mounts) == "ext4"
    assert blocked.fs_type_of("/sys/fs/cgroup/cpu/x", mounts) == "cgroup"


def test_what_stands_behind_a_system_call():
    """Calls, polled descriptors, watched ones and peers are read from the kernel's text and from memory."""
    assert blocked.parse_syscall("running\n") is None
    assert blocked.parse_syscall(recorded("syscall_read")).number == 0
    assert blocked.parse_syscall(recorded("syscall_sleep")).args[:2] == (1, 1)
    assert blocked.parse_syscall("-1 0x7ffd 0x7f12").number == -1
    assert blocked.parse_pollfds(struct.pack("<ihhihhi", 5, 1, 0, -1, 1, 0, 9)) == [5]
    assert blocked.parse_epoll_targets(recorded("fdinfo_epoll")) == [6]
    assert blocked.parse_inet_peers(recorded("net_tcp"))[367906] == "127.0.0.1:46393"
    assert blocked.parse_unix_paths(recorded("net_unix")) == {}


def test_a_process_that_is_gone_is_none():
    """Every reader answers None for a pid that nobody has, and the lists are empty."""
    readers = (procfs.read_stat, procfs.read_io, procfs.read_status, procfs.read_smaps_rollup, procfs.read_proc)
    assert [read(NO_PID) for read in (*readers, procfs.read_cmdline, procfs.read_environ)] == [None] * 7
    assert blocked_on(NO_PID, NO_PID) is None
    assert cpus.read_affinity(NO_PID) is None
    assert procfs.read_mounts(NO_PID) == procfs.list_numbers(f"/proc/{NO_PID}/task") == []


def test_own_process_is_seen_with_its_threads():
    """The main thread is counted apart from the others, and totals never go back."""
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        first, second = procfs.read_proc(os.getpid(), memory=True), procfs.read_proc(os.getpid())
    finally:
        stop.set()
        thread.join()
    assert first.num_threads >= 2
    assert 0 < first.on_cpu_ns <= second.on_cpu_ns
    assert first.others_on_cpu_ns is not None
    assert first.private_dirty_bytes > 0
    assert second.private_dirty_bytes is None
    assert first.num_allowed_cpus == len(os.sched_getaffinity(0))


def test_repeated_reading_agrees_with_reading_once():
    """Descriptors that stay open show the process as it is now, and none is open after close."""
    reader = ProcReader(os.getppid())
    before = set(os.listdir("/proc/self/fd"))
    try:
        first = reader.read()
        again = reader.read(memory=True)
        assert first[0].pid == again[0].pid == os.getppid()
        assert again[0].on_cpu_ns >= first[0].on_cpu_ns
        assert len(os.listdir("/proc/self/fd")) > len(before)
    finally:
        reader.close()
        reader.close()
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_file_longer_than_one_read_is_read_whole(tmp_path):
    """The table of CPUs of a large machine is not cut."""
    path, files = tmp_path / "stat", Files()
    path.write_text("cpu0 1 2 3 4\n" * 5000)
    try:
        assert files.read(str(path)) == path.read_text()
        path.write_text("short")
        assert files.read(str(path)) == "short"
        assert files.read(str(tmp_path / "none")) is None
    finally:
        files.close()


@pytest.mark.parametrize(("call", "words"), [("read", "read pipe"), ("poll", "poll pipe"), ("lock", "lock")])
def test_what_a_thread_waits_for(call, words):
    """A thread that waits is told by what it waits for: a pipe to read, a pipe to poll, a lock."""
    import select

    read_end, write_end = os.pipe()
    lock = threading.Lock()
    lock.acquire()
    poll = select.poll()
    poll.register(read_end, select.POLLIN)
    waits = {"read": lambda: os.read(read_end, 1), "poll": poll.poll, "lock": lock.acquire}
    thread = threading.Thread(target=waits[call])
    thread.start()
    try:
        assert until(lambda: blocked_on(os.getpid(), thread.native_id), words) == words
    finally:
        os.write(write_end, b"x")
        lock.release()
        thread.join()
        os.close(read_end)
        os.close(write_end)


def test_a_peer_and_a_file_are_named(tmp_path):
    """A thread that receives names its peer; one that waits for a file lock or opens a slow file names the file."""
    os.mkfifo(tmp_path / "slow")
    server = socket.create_server(("127.0.0.1", 0))
    with server, open(tmp_path / "a b", "w") as first, open(tmp_path / "a b", "w") as second:
        fcntl.flock(first, fcntl.LOCK_EX)
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            waits = {
                f"recv socket 127.0.0.1:{port}": lambda: client.recv(1),
                f"flock file {tmp_path}/a b (": lambda: fcntl.flock(second, fcntl.LOCK_EX),
                f"open file {tmp_path}/slow (": lambda: os.close(os.open(tmp_path / "slow", os.O_RDONLY)),
            }
            threads = {words: threading.Thread(target=wait) for words, wait in waits.items()}
            for thread in threads.values():
                thread.start()
            seen = {words: waits_for(thread, words) for words, thread in threads.items()}
            with server.accept()[0] as peer:
                peer.send(b"x")
                fcntl.flock(first, fcntl.LOCK_UN)
                os.close(os.open(tmp_path / "slow", os.O_WRONLY))
                for thread in threads.values():
                    thread.join()
    assert seen == {words: words for words in threads}


def waits_for(thread, words):
    return until(lambda: starts(blocked_on(os.getpid(), thread.native_id), words), words)


def starts(text, words):
    """The words when the text starts with them, else the text."""
    return words if text is not None and text.startswith(words) else text


def until(look, wanted, seconds=5.0):
    """What is seen when it is the wanted, or the last that was seen in time."""
    end = time.monotonic() + seconds
    while (seen := look()) != wanted and time.monotonic() < end:
        pass
    return seen


def test_machine_has_a_reason_for_all_that_is_missing():
    """A value that could not be had is None with its reason beside it, and no name of the machine is kept."""
    seen = machine.read_machine(os.getpid())
    assert seen.num_cpus >= seen.num_allowed_cpus >= 1
    assert seen.unavailable["gpus"] == "not asked for"
    missing = {name for name in ("cpu_quota_cores", "memory_limit_bytes") if getattr(seen, name) is None}
    assert missing <= set(seen.unavailable)
    assert os.uname().nodename not in repr(seen)
