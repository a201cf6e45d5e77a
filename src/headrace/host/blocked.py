"""What a thread of another process waits for, in words: a file and its file system, a peer, a pipe, a lock.

Read from ``/proc/PID/task/TID/syscall`` (the system call it sits in, with its arguments) and the descriptors behind it.
Nothing touches the process. The kernel shows these files to the same user only, and under Yama's ``ptrace_scope=1``
to ancestors only; otherwise the name of the kernel function it sleeps in (``wchan``) gives a coarser answer.
"""

from __future__ import annotations

import os
import platform
import struct
from dataclasses import dataclass

from headrace.host import procfs


def _table(text: str) -> dict[int, str]:
    """``name:number,number ...`` -> number -> name."""
    rows = (entry.partition(":") for entry in text.split())
    return {int(number): name for name, _, numbers in rows for number in numbers.split(",")}


# System calls in which a thread can wait, grouped by what their first argument is.
_TABLES = {
    "x86_64": _table(
        "accept:43,288 aio:208 connect:42 epoll:232,281 fcntl:72 flock:73 fsync:74,75 futex:202,449 "
        "io_uring:426 ioctl:16 madvise:28 mmap:9 msync:26 open:2 openat:257 poll:7,271 read:0,17,19,295 "
        "readdir:78,217 recv:45,47,299 seek:8 select:23,270 semop:220 send:44,46 sendfile:40 sleep:35,230 "
        "stat:4,6,21 fstat:5 statat:262,269,332 wait:61,247 write:1,18,20 "
    ),
    "aarch64": _table(
        "accept:202,242 aio:4 connect:203 epoll:22 fcntl:25 flock:32 fsync:82,83 futex:98,449 io_uring:426 "
        "ioctl:29 madvise:233 mmap:222 msync:227 openat:56 poll:73 read:63,65,67,69 readdir:61 "
        "recv:207,212,243 seek:62 select:72 semop:193 send:206,211 sendfile:71 sleep:101,115 fstat:80 "
        "statat:48,79,291 wait:95,260 write:64,66,68 "
    ),
}
#: Those whose first argument is a descriptor.
_ON_DESCRIPTOR = frozenset(
    ("accept", "connect", "fcntl", "flock", "fstat", "fsync", "ioctl", "read", "readdir", "recv", "seek", "send",
     "sendfile", "write")
)  # fmt: skip
_WORDS = {"futex": "lock", "semop": "lock", "aio": "read file", "io_uring": "io_uring", "wait": "child process"}
_MAX_POLLED = 16
_MAX_PATH_BYTES = 4096
_PAGE_FAULT = "page fault"

#: Parts of kernel function names, for when the system call may not be read.
_WCHAN_WORDS = (
    ("futex", "lock"),
    ("nanosleep", "sleep"),
    ("pipe_", "read pipe"),
    ("unix_stream", "read unix socket"),
    ("inet_", "recv socket"),
    ("sk_wait", "recv socket"),
    ("skb", "recv socket"),
    ("tcp_", "recv socket"),
    ("poll", "poll"),
    ("do_select", "select"),
    ("ep_", "epoll"),
    ("do_wait", "child process"),
    ("nfs", "read file (nfs)"),
    ("rpc_", "read file (nfs)"),
    ("fuse_", "read file (fuse)"),
    ("request_wait_answer", "read file (fuse)"),
    ("folio_wait", "read file"),
    ("wait_on_page", "read file"),
    ("io_schedule", "read file"),
    ("flock", "lock file"),
)


@dataclass(frozen=True, slots=True)
class Syscall:
    """A system call in progress: its number and its six arguments as unsigned 64-bit values."""

    number: int
    args: tuple[int, ...]


def parse_syscall(text: str) -> Syscall | None:
    """Parse ``/proc/PID/task/TID/syscall``; None for ``running``. Number -1: a page fault."""
    fields = text.split()
    if not fields or fields[0] == "running":
        return None
    return Syscall(int(fields[0]), tuple(int(arg, 16) for arg in fields[1:7]))


def parse_pollfds(data: bytes) -> list[int]:
    """The descriptors in an array of ``struct pollfd`` (int fd, short events, short revents)."""
    usable = len(data) - len(data) % 8
    return [fd for fd, _, _ in struct.iter_unpack("<ihh", data[:usable]) if fd >= 0]


def parse_epoll_targets(text: str) -> list[int]:
    """The descriptors that an epoll instance watches, from its ``fdinfo``."""
    return [int(line.split()[1]) for line in text.splitlines() if line.startswith("tfd:")]


def parse_inet_peers(text: str) -> dict[int, str]:
    """Inode -> ``address:port`` of the other side, from ``/proc/PID/net/tcp`` or ``tcp6``."""
    peers = {}
    for line in text.splitlines()[1:]:
        fields = line.split()
        if len(fields) > 9 and int(fields[9]):
            peers[int(fields[9])] = _address(fields[2])
    return peers


def parse_unix_paths(text: str) -> dict[int, str]:
    """Inode -> path of the named sockets in ``/proc/PID/net/unix``."""
    rows = (line.split() for line in text.splitlines()[1:])
    return {int(row[6]): row[7] for row in rows if len(row) > 7}


def fs_type_of(path: str, mounts: list[procfs.Mount]) -> str | None:
    """The type of the file system that holds ``path``: that of the deepest mount above it, the last one made there."""
    best: procfs.Mount | None = None
    for mount in mounts:
        point = mount.point.rstrip("/")
        inside = path == point or path.startswith(point + "/")
        if inside and (best is None or len(mount.point) >= len(best.point)):
            best = mount
    return best.fs_type if best else None


def blocked_on(pid: int, tid: int) -> str | None:
    """What a thread waits for at this moment.

    Args:
        pid: The process.
        tid: One of its threads; the main thread's is the pid.

    Returns:
        Words such as ``read file /data/a.bin (nfs4)``, ``recv socket 10.0.0.3:443``, ``poll pipe``, ``lock``, ``sleep``
        or ``page fault``; None when it runs, is gone, or may not be seen.
    """
    text = procfs.read_text(f"/proc/{pid}/task/{tid}/syscall")
    if text is None:
        return _from_wchan(pid, tid)
    call = parse_syscall(text)
    if call is None:
        return None
    if call.number < 0:
        return _PAGE_FAULT
    name = _TABLES.get(platform.machine(), {}).get(call.number)
    return f"system call {call.number}" if name is None else _describe(pid, name, call)


def _describe(pid: int, name: str, call: Syscall) -> str:
    if name in _ON_DESCRIPTOR:
        return f"{name} {_descriptor(pid, call.args[0])}"
    if name in ("open", "stat", "openat", "statat"):
        return f"{name.removesuffix('at')} {_path_argument(pid, call.args[name.endswith('at') or 0])}"
    if name == "poll":
        return _several("poll", pid, parse_pollfds(_memory(pid, call.args[0], 8 * min(call.args[1], _MAX_POLLED))))
    if name == "epoll":
        targets = parse_epoll_targets(procfs.read_text(f"/proc/{pid}/fdinfo/{call.args[0]}") or "")
        return _several("epoll", pid, targets[:_MAX_POLLED])
    return _WORDS.get(name, name)


def _several(name: str, pid: int, fds: list[int]) -> str:
    things = sorted({_descriptor(pid, fd) for fd in fds})
    return f"{name} {', '.join(things)}" if things else name


def _descriptor(pid: int, fd: int) -> str:
    try:
        target = os.readlink(f"/proc/{pid}/fd/{fd & 0xFFFFFFFF}")
    except OSError:
        return "descriptor"
    if target.startswith("socket:["):
        return _socket(pid, int(target[8:-1]))
    if target.startswith("pipe:["):
        return "pipe"
    if target.startswith("/dev/"):
        return f"device {target}"
    return _file(pid, target) if target.startswith("/") else target.removeprefix("anon_inode:").strip("[]")


def _file(pid: int, path: str) -> str:
    fs_type = fs_type_of(path, procfs.read_mounts(pid))
    return f"file {path} ({fs_type})" if fs_type else f"file {path}"


def _path_argument(pid: int, address: int) -> str:
    path = _memory(pid, address, _MAX_PATH_BYTES).split(b"\0", 1)[0].decode("utf-8", "replace")
    if not path:
        return "file"
    return _file(pid, path) if path.startswith("/") else f"file {path}"


def _socket(pid: int, inode: int) -> str:
    for table in ("tcp", "tcp6"):
        peer = parse_inet_peers(procfs.read_text(f"/proc/{pid}/net/{table}") or "").get(inode)
        if peer is not None:
            return f"socket {peer}"
    unix = procfs.read_text(f"/proc/{pid}/net/unix") or ""
    if f" {inode}" not in unix:
        return "socket"
    path = parse_unix_paths(unix).get(inode)
    return f"unix socket {path}" if path else "unix socket"


def _memory(pid: int, address: int, num_bytes: int) -> bytes:
    """Some bytes of another process's memory, for the arguments that are pointers; empty when not permitted."""
    try:
        fd = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.pread(fd, num_bytes, address)
    except (OSError, OverflowError):
        return b""
    finally:
        os.close(fd)


def _from_wchan(pid: int, tid: int) -> str | None:
    wchan = procfs.read_text(f"/proc/{pid}/task/{tid}/wchan") or "0"
    return next((words for part, words in _WCHAN_WORDS if part in wchan), None)


def _address(field: str) -> str:
    """``0100007F:1F90`` -> ``127.0.0.1:8080``; words of 4 bytes in the byte order of the machine."""
    host, _, port = field.partition(":")
    words = [struct.pack("=I", int(host[i : i + 8], 16)) for i in range(0, len(host), 8)]
    raw = b"".join(words)
    if len(raw) == 16 and raw[:12] == bytes(10) + b"\xff\xff":
        raw = raw[12:]
    if len(raw) == 4:
        return f"{'.'.join(str(b) for b in raw)}:{int(port, 16)}"
    groups = ":".join(f"{raw[i] << 8 | raw[i + 1]:x}" for i in range(0, 16, 2))
    return f"[{groups}]:{int(port, 16)}"
