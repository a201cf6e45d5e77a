"""One end of a socket pair between trainer, helper and worker: whole messages with their descriptors.

A message that is larger than ``MAX_INLINE_BYTES`` lies in a memfd that is sent with it. Descriptors travel with the
message that names them, in the order in which it names them; a memfd with the body comes last.
"""

from __future__ import annotations

import errno
import os
import pickle
import socket
import struct
from collections.abc import Sequence
from typing import Any

from headrace.host.memfd import descriptors_of, send_with_fds
from headrace.loader.messages import Answer, Kind, Task, no_extras

#: Datagrams up to this size are sent as they are. The default socket buffer takes three of them.
MAX_INLINE_BYTES = 60_000
#: The most descriptors in one message: a slot for each part of a batch, one for its own, one for the body.
MAX_FDS = 64
_BUFFER_BYTES = MAX_INLINE_BYTES + 4096
_ANCILLARY_BYTES = socket.CMSG_SPACE(MAX_FDS * 4)


_TASK = struct.Struct("<BBHqQQQQQqq")
_ANSWER = struct.Struct("<BBHIQQQQ")
#: Flags of both: the body lies in a memfd that comes last; a task is a part; a task has extras.
_SPILLED, _PART, _EXTRAS = 1, 2, 4


class Channel:
    """One end of a socket pair. Not thread-safe: whoever owns the end holds its lock.

    Trainer's ends do not block (``send`` returns False, ``receive`` None when the call would); a worker's and the
    helper's end of their own pair do.
    """

    def __init__(self, sock: socket.socket, *, is_blocking: bool) -> None:
        self.sock = sock
        sock.setblocking(is_blocking)
        self._buffer = bytearray(_BUFFER_BYTES)

    @staticmethod
    def pair() -> tuple[socket.socket, socket.socket]:
        """Two connected ends: the trainer's and the other one."""
        return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def fileno(self) -> int:
        """The descriptor, for ``poll``."""
        return self.sock.fileno()

    def send(self, message: Any, body: bytes = b"", fds: Sequence[int] = ()) -> bool:
        """Send a message; ``fds`` stay the caller's.

        Args:
            message: Any of the classes above.
            body: The body of an ``Answer``.
            fds: Descriptors that the message names.

        Returns:
            False when the other end's buffer is full (never for an end that blocks).

        Raises:
            OSError: The other end is closed.
        """
        if type(message) is Answer:
            head = _encode_answer(message)
        elif type(message) is Task:
            head, body = _encode_task(message)
        else:
            head, body = b"\0\0", pickle.dumps(message, 5)
        if len(head) + len(body) > MAX_INLINE_BYTES:
            return self._send_spilled(head, body, fds)
        return self._send(head + body, fds)

    def _send_spilled(self, head: bytes, body: bytes, fds: Sequence[int]) -> bool:
        """Send the body in a memfd of its own."""
        head = bytes((head[0], head[1] | _SPILLED)) + head[2:]
        fd = os.memfd_create("headrace-message", os.MFD_CLOEXEC)
        try:
            with open(fd, "wb", closefd=False) as file:
                file.write(body)
            return self._send(head, [*fds, fd])
        finally:
            os.close(fd)

    def _send(self, data: bytes, fds: Sequence[int]) -> bool:
        try:
            if fds:
                send_with_fds(self.sock, data, fds)
            else:
                self.sock.send(data)
        except BlockingIOError:
            return False
        return True

    def receive(self) -> tuple[Any, bytes, list[int]] | None:
        """The next message, its body (of an ``Answer``) and its descriptors, which are the caller's from now on.

        Returns:
            None when there is no message (an end that does not block only).

        Raises:
            EOFError: The other end is closed.
            OSError: This process has no descriptor left for those of the message.
        """
        try:
            num_bytes, ancillary, flags, _ = self.sock.recvmsg_into(
                [self._buffer], _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return None
        if num_bytes == 0:
            raise EOFError("the other end is closed")
        fds = descriptors_of(ancillary) if ancillary else []
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            for fd in fds:
                os.close(fd)
            raise OSError(errno.EMFILE, "a message was cut off: no file descriptor is left (see ulimit -n)")
        return self._decode(num_bytes, fds)

    def _decode(self, num_bytes: int, fds: list[int]) -> tuple[Any, bytes, list[int]]:
        buffer = self._buffer
        kind, flags = buffer[0], buffer[1]
        size = _ANSWER.size if kind > Kind.TASK else _TASK.size if kind == Kind.TASK else 2
        if flags & _SPILLED:
            with open(fds.pop(), "rb") as file:
                file.seek(0)
                body = file.read()
        else:
            body = bytes(memoryview(buffer)[size:num_bytes])
        if kind > Kind.TASK:
            return _decode_answer(buffer), body, fds
        if kind == Kind.TASK:
            return _decode_task(buffer, flags, body), b"", fds
        return pickle.loads(body), b"", fds

    def close(self) -> None:
        """Close this end. Idempotent."""
        self.sock.close()


def _encode_task(task: Task) -> tuple[bytes, bytes]:
    has_extras = task.extras is not no_extras()
    head = _TASK.pack(
        Kind.TASK,
        (_PART if task.is_part else 0) | (_EXTRAS if has_extras else 0),
        0,
        -1 if task.slot_id is None else task.slot_id,
        task.task_id,
        task.epoch,
        task.batch,
        task.begin_row,
        task.end_row,
        task.min_new_bytes,
        -1 if task.max_new_bytes is None else task.max_new_bytes,
    )
    return head, pickle.dumps((task.index, task.extras) if has_extras else task.index, 5)


def _decode_task(buffer: bytearray, flags: int, body: bytes) -> Task:
    _, _, _, slot_id, task_id, epoch, batch, begin, end, min_new, max_new = _TASK.unpack_from(buffer)
    index = pickle.loads(body)
    extras = no_extras()
    if flags & _EXTRAS:
        index, extras = index
    return Task(
        task_id=task_id,
        epoch=epoch,
        batch=batch,
        begin_row=begin,
        end_row=end,
        is_part=bool(flags & _PART),
        slot_id=None if slot_id < 0 else slot_id,
        min_new_bytes=min_new,
        max_new_bytes=None if max_new < 0 else max_new,
        index=index,
        extras=extras,
    )


def _encode_answer(answer: Answer) -> bytes:
    return _ANSWER.pack(
        answer.kind,
        0,
        answer.layout_no,
        answer.num_leaf_bytes,
        answer.task_id,
        answer.used_bytes,
        answer.new_bytes,
        answer.busy_ns,
    )


def _decode_answer(buffer: bytearray) -> Answer:
    kind, _, layout_no, num_leaf_bytes, task_id, used_bytes, new_bytes, busy_ns = _ANSWER.unpack_from(buffer)
    return Answer(Kind(kind), task_id, layout_no, used_bytes, new_bytes, num_leaf_bytes, busy_ns)
