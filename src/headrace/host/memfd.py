"""Anonymous shared memory: segments of memfd, mapped with their pages in place, handed over as descriptors.

A segment has no name and no place in ``/dev/shm``: it ends with the last process that maps it or holds its descriptor.
Pages are faulted in when a process maps the segment, never again while it is used.

The mapping is made by libc and not by the ``mmap`` module, which keeps a second descriptor for each map (before 3.13),
and which refuses to unmap while a view lives. Here the map belongs to one ctypes array, ``Segment.root``: every view is
made from it and keeps it alive, and the pages are unmapped when the array dies, in whatever thread that happens.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import weakref
from array import array
from collections.abc import Sequence
from typing import Any

_MAP_FAILED = ctypes.c_void_p(-1).value
_PAGE_BYTES = mmap.PAGESIZE
_FD_BYTES = array("i").itemsize

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.restype = ctypes.c_int
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Segment:
    """One memfd, mapped readable and writable in this process.

    Attributes:
        fd: The descriptor, owned by the segment; -1 when it was given up.
        size_bytes: Size of the map, whole pages.
        address: Where the map starts.
        root: ctypes array over the whole map; whoever makes views of the memory makes them from it.
        buf: The same memory as a writable memoryview of bytes.
        scratch: A place for what the process that writes keeps per segment (views that it uses again).
    """

    __slots__ = ("__weakref__", "address", "buf", "fd", "root", "scratch", "size_bytes")

    def __init__(self, fd: int, size_bytes: int) -> None:
        self.fd = fd
        self.size_bytes = size_bytes
        self.scratch: Any = None
        self.root: Any = _map(fd, size_bytes)
        self.address = ctypes.addressof(self.root)
        self.buf = memoryview(self.root).cast("B")

    @classmethod
    def create(cls, size_bytes: int) -> Segment:
        """Makes a segment and touches all its pages (about 0.25 ms per MiB). The caller has made sure of the room.

        Args:
            size_bytes: At least 1; rounded up to whole pages.

        Raises:
            OSError: No descriptor or no address space is left.
        """
        size_bytes = -(-max(size_bytes, 1) // _PAGE_BYTES) * _PAGE_BYTES
        fd = os.memfd_create("headrace", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, size_bytes)
            return cls(fd, size_bytes)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int, size_bytes: int) -> Segment:
        """Maps a segment that another process made and owns the descriptor from then on.

        Raises:
            OSError: The descriptor is smaller than ``size_bytes`` or cannot be mapped; it stays the caller's.
        """
        if os.fstat(fd).st_size < size_bytes:  # touching what lies beyond the end would be a SIGBUS
            raise OSError(f"memfd of {os.fstat(fd).st_size} bytes is smaller than its segment of {size_bytes} bytes")
        return cls(fd, size_bytes)

    def close_fd(self) -> None:
        """Gives the descriptor back and keeps the map. May be called again."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def close(self) -> None:
        """Lets go of descriptor and map; the pages stay until the last view of them dies. May be called again."""
        self.close_fd()
        self.scratch = None
        self.buf = memoryview(b"")
        self.root = None


#: Keeps the references that unmap, by address: a weak reference fires only while it lives itself.
_maps: dict[int, _Map] = {}


class _Map(weakref.ref[Any]):
    """Unmaps when the array over the map dies."""

    __slots__ = ("address", "size_bytes")
    address: int
    size_bytes: int


def _map(fd: int, size_bytes: int) -> Any:
    # Shared pages of a memfd: with MAP_POPULATE the kernel allocates and maps all of them before it returns.
    prot, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | mmap.MAP_POPULATE
    address = _libc.mmap(None, size_bytes, prot, flags, fd, 0)
    if address is None or address == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"mapping {size_bytes} bytes of shared memory failed: {os.strerror(code)}")
    root = (ctypes.c_char * size_bytes).from_address(address)
    ref = _Map(root, _unmap)
    ref.address, ref.size_bytes = address, size_bytes
    _maps[address] = ref
    return root


def _unmap(ref: Any, maps: dict[int, _Map] = _maps, munmap: Any = _libc.munmap) -> None:
    # No global names: a view may outlive them when the interpreter ends.
    del maps[ref.address]
    munmap(ref.address, ref.size_bytes)


# Not socket.send_fds and recv_fds: they ignore their flags (in 3.11), and received descriptors stayed inheritable.


def send_with_fds(
    sock: socket.socket, message: bytes | bytearray | memoryview, fds: Sequence[int], flags: int = 0
) -> int:
    """Sends one message with descriptors; blocks as the socket and the flags say."""
    return sock.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))], flags)


def recv_with_fds(sock: socket.socket, max_bytes: int, max_fds: int, flags: int = 0) -> tuple[bytes, list[int]]:
    """Receives one message with its descriptors, which this process owns and does not pass on when it executes.

    Raises:
        OSError: The message or its descriptors did not fit, or this process may open no more descriptors.
    """
    room = socket.CMSG_LEN(max_fds * _FD_BYTES)
    message, ancillary, got_flags, _ = sock.recvmsg(max_bytes, room, flags | socket.MSG_CMSG_CLOEXEC)
    fds = descriptors_of(ancillary)
    if got_flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        for fd in fds:
            os.close(fd)
        raise OSError(f"a message of more than {max_bytes} bytes or {max_fds} descriptors was cut off")
    return message, fds


def descriptors_of(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    """The descriptors that came with a message, as ``recvmsg`` gives them; they are this process's from now on."""
    fds = array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % _FD_BYTES])
    return list(fds)
