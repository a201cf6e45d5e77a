"""Worker's and trainer's side of a batch in one process."""

import os
from collections import deque

from torch.utils.data import default_collate

from headrace.host.memfd import Segment
from headrace.loader.lease import SlotMapping
from headrace.loader.packing import Packer
from headrace.loader.unpacking import Unpacker


class Channel:
    """Packs samples and unpacks them again, with one slot, through two maps of the same memory, as two processes do."""

    def __init__(self, collate_fn=default_collate):
        self.packer = Packer(collate_fn, self._make_segment)
        self.unpacker = Unpacker()
        self.freed = deque()
        self.segment = self.mapping = self.packed = None
        self.num_segments = 0

    def _make_segment(self, num_bytes):
        self.num_segments += 1
        return Segment.create(num_bytes)

    def send(self, samples, **options):
        """The batch as the trainer gets it."""
        self.pack(samples)
        return self.receive(**options)

    def pack(self, samples):
        self.packed = packed = self.packer.pack(samples, self.segment)
        if packed.is_new:
            self.close_slot()
            self.segment = packed.segment
            theirs = Segment.attach(os.dup(packed.segment.fd), packed.segment.size_bytes)
            self.mapping = SlotMapping(theirs, self.num_segments, self.freed)
        return packed

    def receive(self, **options):
        mapping = self.mapping if self.packed.segment is not None else None
        return self.unpacker.unpack(self.packed.skeleton, self.packed.leaves, mapping, **options)

    def close_slot(self):
        if self.segment is not None:
            self.segment.close()
            self.mapping.close()
            self.segment = self.mapping = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close_slot()
