"""What a thread of this process is blocked on: read from the kernel, in words.

``/proc/self/task/TID/syscall`` names the system call and its arguments; its first argument is often a descriptor, which
``/proc/self/fd`` resolves. Numbers: arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h.
"""

import os
import platform

_X86 = {
    0: "fd", 1: "fd", 17: "fd", 18: "fd", 19: "fd", 20: "fd", 74: "fd", 75: "fd", 257: "open", 2: "open", 4: "open",
    262: "open", 332: "open", 42: "fd", 43: "fd", 44: "fd", 45: "fd", 46: "fd", 47: "fd", 7: "poll", 23: "poll",
    270: "poll", 271: "poll", 232: "fd", 281: "fd", 35: "sleep", 230: "sleep", 202: "futex", 73: "flock", 72: "flock",
    61: "child", 247: "child",
}  # fmt: skip
_ARM = {
    63: "fd", 64: "fd", 65: "fd", 66: "fd", 67: "fd", 68: "fd", 82: "fd", 83: "fd", 56: "open", 79: "open", 291: "open",
    203: "fd", 202: "fd", 206: "fd", 207: "fd", 211: "fd", 212: "fd", 72: "poll", 73: "poll", 22: "fd", 101: "sleep",
    115: "sleep", 98: "futex", 32: "flock", 25: "flock", 260: "child", 95: "child",
}  # fmt: skip
_TABLE = {"x86_64": _X86, "aarch64": _ARM}.get(platform.machine(), {})
_mounts: list[tuple[str, str]] | None = None  # (mount point, file system)


def blocked_on(tid):
    """One of ``running unknown lock sleep child poll socket pipe``, or ``file PATH (FSTYPE)``."""
    try:
        with open("/proc/self/task/%d/syscall" % tid, encoding="ascii") as text:
            fields = text.read().split()
    except OSError:
        return "unknown"
    if not fields or fields[0] == "running":
        return "running"
    if not fields[0].isdigit():
        return "file (page fault)"
    word = _TABLE.get(int(fields[0]), "unknown")
    if word == "fd":
        return _descriptor(int(fields[1], 16))
    if word == "flock":
        return "lock " + _descriptor(int(fields[1], 16))
    return {"open": "file (open or stat)", "futex": "lock"}.get(word, word)


def _descriptor(fd):
    try:
        target = os.readlink("/proc/self/fd/%d" % (fd & 0xFFFFFFFF))
    except OSError:
        return "unknown"
    if target.startswith("socket:"):
        return "socket"
    if target.startswith("pipe:"):
        return "pipe"
    if target.startswith("anon_inode:"):
        return "poll"
    return "file %s (%s)" % (target, _fs_type(target))


def _fs_type(path):
    global _mounts
    if _mounts is None:
        _mounts = []
        try:
            with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as lines:
                for line in lines:
                    left, right = line.split(" - ", 1)
                    _mounts.append((left.split()[4], right.split()[0]))
        except (OSError, ValueError, IndexError):
            pass
    best = ("", "unknown")
    for point, kind in _mounts:
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best[0]):
            best = (point, kind)
    return best[1]
