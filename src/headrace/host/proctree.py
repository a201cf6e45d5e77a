"""Which processes belong to a program: the root, all that it started, and those whose parent died since."""

from __future__ import annotations

import os

from headrace.host.procfs import Reader, Stat, list_numbers, read_stat, read_text


def descendants(root_pid: int) -> list[int]:
    """The root (when alive) and everything below it, from one pass over ``/proc``; see `ProcessTree`."""
    return ProcessTree(root_pid).refresh()


class ProcessTree:
    """Keeps track of a process and of all that it started, also of those whose parent died since.

    A process belongs to the tree when (a) its parent does, (b) it was seen in the tree before, (c) it sits in a process
    group or session that a member leads or led, or (d) it was orphaned (its parent is init or, in another session, a
    reaper above the root), shares the root's process group and started after the root. The caller does as a root only.
    One thread owns an instance.
    """

    def __init__(self, root_pid: int, read: Reader = read_text) -> None:
        """Look at the root once, so that its group is known even when it is gone at the first `refresh`.

        Args:
            root_pid: Where the tree begins.
            read: How members are read each time.
        """
        self._root_pid, self._read = root_pid, read
        self._root = read_stat(root_pid)
        self._reapers = _reapers_above(self._root)
        #: pid -> start_ticks of every member ever seen and not yet gone.
        self._members = {root_pid: self._root.start_ticks} if self._root else {}
        self._led: set[int] = set()
        self._strangers: set[int] = set()
        #: What `refresh` read of each member.
        self.stats: dict[int, Stat] = {}

    def refresh(self, thorough: bool = True) -> list[int]:
        """Look again. Returns the pids alive now, the root first; zombies are included.

        A process found to be a stranger is not read again (it can not become a descendant), which keeps a pass cheap on
        a machine with thousands of processes: a directory listing and one file per member.

        Args:
            thorough: Also look for new members. Without, only those known are read, and ``/proc`` is not listed (which
                is half of the cost: the kernel makes an entry for every process of the machine).
        """
        if thorough:
            pids = set(list_numbers("/proc"))
            self._strangers &= pids
            candidates = pids - self._strangers
        else:
            candidates = set(self._members)
        stats = {pid: s for pid in candidates if (s := self._stat(pid)) is not None}
        self._members = {p: t for p, t in self._members.items() if p in stats and stats[p].start_ticks == t}
        if thorough:
            self._adopt(stats)
        self.stats = {pid: stats[pid] for pid in self._members}
        return sorted(self._members, key=lambda p: (p != self._root_pid, p))

    def _adopt(self, stats: dict[int, Stat]) -> None:
        """Take in the new members among the processes read, and note the rest as strangers."""
        grown = True
        while grown:
            grown = False
            for pid, stat in stats.items():
                if pid not in self._members and self._belongs(stat):
                    self._members[pid] = stat.start_ticks
                    grown = True
        self._led |= {p for p in self._members if stats[p].pgrp == p or stats[p].session == p}
        self._strangers |= stats.keys() - self._members.keys()

    def _stat(self, pid: int) -> Stat | None:
        return read_stat(pid, self._read if pid in self._members else read_text)

    def _belongs(self, stat: Stat) -> bool:
        if stat.pid == os.getpid():
            return False
        if stat.ppid in self._members or stat.pgrp in self._led or stat.session in self._led:
            return True
        root = self._root
        return (
            root is not None
            and stat.ppid in self._reapers
            and stat.pgrp == root.pgrp
            and stat.session == root.session
            and stat.start_ticks >= root.start_ticks
            and stat.pid != root.ppid
        )


def _reapers_above(root: Stat | None) -> set[int]:
    """Who may adopt an orphan of the root: init, and ancestors in another session (``systemd --user``, a shim)."""
    reapers = {1}
    above = read_stat(root.ppid) if root else None
    while root is not None and above is not None and above.pid > 1:
        if above.session != root.session:
            reapers.add(above.pid)
        above = read_stat(above.ppid)
    return reapers
