"""Layouts of batches by number: a steady loader's message names the number and carries no table and no skeleton.

    worker: LayoutNumbers.number(leaves, skeleton) --number, body--> trainer: LayoutMemory.find(answer, body)

Both sides count alike, so that a number means the same; when all are in use the oldest is given anew.
"""

from __future__ import annotations

from headrace.loader.messages import Answer

#: Layouts that both sides keep.
NUM_LAYOUTS = 64
#: A layout of more bytes is sent each time: keeping many of them would take memory.
_MAX_LAYOUT_BYTES = 16_384


class LayoutNumbers:
    """The worker's side."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[bytes, bytes], int] = {}
        self._at: dict[int, tuple[bytes, bytes]] = {}
        self._next = 0

    def number(self, leaves: bytes, skeleton: bytes) -> tuple[int, bytes]:
        """Number of a layout, from 1 (0: it is not kept), and the body to send: empty when the trainer knows it."""
        layout = (leaves, skeleton)
        known = self._numbers.get(layout)
        if known is not None:
            return known, b""
        body = leaves + skeleton
        if len(body) > _MAX_LAYOUT_BYTES:
            return 0, body
        number = self._next + 1
        self._next = number % NUM_LAYOUTS
        old = self._at.pop(number, None)
        if old is not None:
            del self._numbers[old]
        self._numbers[layout], self._at[number] = number, layout
        return number, body


class LayoutMemory:
    """The trainer's side, one per worker."""

    def __init__(self) -> None:
        self._at: dict[int, tuple[bytes, bytes]] = {}

    def find(self, answer: Answer, body: bytes) -> tuple[bytes, bytes]:
        """Leaves and skeleton of a batch."""
        number = answer.layout_no
        if not body and number:
            return self._at[number]
        layout = body[: answer.num_leaf_bytes], body[answer.num_leaf_bytes :]
        if number:
            self._at[number] = layout
        return layout
