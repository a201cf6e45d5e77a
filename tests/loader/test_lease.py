"""A slot is written again only when nothing of its batch lives: no view, no thread, no forked child."""

import copy
import gc
import io
import multiprocessing
import os
import pickle
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.host.memfd import Segment, recv_with_fds, send_with_fds
from headrace.loader.lease import Freed
from tests.loader.packing import Channel

LARGE = (4, 100, 100)  # 160 KB: handed out in place


def keep(batch):
    return batch


@pytest.fixture
def channel():
    with Channel(keep) as channel:
        yield channel


VIEWS = {
    "the tensor": lambda tensor: tensor,
    "a slice": lambda tensor: tensor[1],
    "a detached tensor": lambda tensor: tensor.detach(),
    "its data": lambda tensor: tensor.data,
    "its storage": lambda tensor: tensor.untyped_storage(),
    "a numpy array": lambda tensor: tensor.numpy(),
    "a slice of a numpy array": lambda tensor: tensor.numpy()[1:, 3],
    "a tensor over a numpy array": lambda tensor: torch.from_numpy(tensor.numpy())[0],
    "a memoryview": lambda tensor: memoryview(tensor.numpy()),
    "a slice of a memoryview": lambda tensor: memoryview(memoryview(tensor.numpy()).cast("B"))[5:],
    "a DLPack copy": lambda tensor: torch.from_dlpack(tensor),
    "another type's view": lambda tensor: tensor.view(torch.int32),
    "a parameter": lambda tensor: torch.nn.Parameter(tensor),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_every_view_holds_the_slot_and_its_end_frees_it_once(channel, view):
    held = view(channel.send([torch.ones(LARGE), torch.ones(LARGE)])[0])
    gc.collect()
    assert channel.mapping.num_leases == 1
    assert not channel.freed
    del held
    gc.collect()
    assert channel.mapping.num_leases == 0
    assert list(channel.freed) == [Freed(1, 1, True)]


def test_an_array_of_the_batch_and_a_view_of_it_hold_the_slot(channel):
    for view in (lambda array: array, lambda array: array[3:], memoryview, torch.from_numpy):
        held = view(channel.send({"x": np.ones(LARGE)})["x"])
        assert channel.mapping.num_leases == 1
        del held
        assert channel.mapping.num_leases == 0
    assert [entry.generation for entry in channel.freed] == [1, 2, 3, 4]


def test_small_tensors_hold_no_slot_and_do_not_see_the_next_batch(channel):
    kept = [channel.send([torch.full((100,), float(at)), torch.tensor(at)]) for at in range(5)]
    assert [entry.generation for entry in channel.freed] == [1, 2, 3, 4, 5]
    for at, (values, number) in enumerate(kept):
        assert values.tolist() == [at] * 100
        assert number.item() == at


def test_keeping_the_labels_does_not_keep_the_images(channel):
    images, labels = channel.send([torch.ones(LARGE), torch.arange(64)])
    del images
    assert len(channel.freed) == 1
    assert labels.tolist() == list(range(64))


def test_each_generation_is_freed_once(channel):
    for generation in range(1, 6):
        batch = channel.send([torch.full(LARGE, float(generation))] * 2)
        assert len(channel.freed) == generation - 1
        del batch
        assert channel.freed[-1] == Freed(1, generation, True)


@settings(deadline=None, max_examples=50)
@given(st.permutations(range(6)))
def test_the_last_of_a_batch_frees_it_whatever_the_order(order):
    with Channel(keep) as channel:
        batch = channel.send([torch.ones(LARGE) for _ in range(3)] + [np.ones(LARGE) for _ in range(3)])
        for num, at in enumerate(order):
            assert not channel.freed
            batch[at] = None
            assert channel.mapping.num_leases == (num < 5)
        assert len(channel.freed) == 1


def test_a_batch_may_die_in_another_thread_and_in_a_collection(channel):
    batch = channel.send([torch.ones(LARGE)])
    thread = threading.Thread(target=batch.clear)
    thread.start()
    thread.join()
    assert len(channel.freed) == 1
    batch = channel.send([torch.ones(LARGE)])
    batch.append(batch)  # a cycle
    del batch
    assert len(channel.freed) == 1
    gc.collect()
    assert len(channel.freed) == 2


def test_batches_that_die_in_many_threads_are_each_freed_once():
    channels = [Channel(keep) for _ in range(8)]
    barrier = threading.Barrier(len(channels))
    batches = [channel.send([torch.ones(LARGE)]) for channel in channels]

    def drop(batch):
        barrier.wait(10)
        batch.clear()

    threads = [threading.Thread(target=drop, args=(batch,)) for batch in batches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for channel in channels:
        assert len(channel.freed) == 1
        channel.close_slot()


def test_a_batch_outlives_its_slot_and_then_lets_go_of_the_memory():
    with Channel(keep) as channel:
        batch = channel.send([torch.full(LARGE, 3.0)])
    assert batch[0].eq(3.0).all()
    batch[0].mul_(2)
    assert batch[0].eq(6.0).all()
    del batch
    assert "memfd:headrace" not in Path("/proc/self/maps").read_text()


def test_the_training_loop_may_write_into_a_batch(channel):
    batch = channel.send([torch.ones(LARGE)])
    batch[0].sub_(3).div_(2)
    batch[0].requires_grad_()
    batch[0].detach_()
    batch[0].unsqueeze_(0)
    assert batch[0].eq(-1).all()


def test_saving_pickling_copying_and_sharing_a_batch_give_its_values(channel):
    images = channel.send([torch.arange(40000.0).view(LARGE)])[0]
    file = io.BytesIO()
    torch.save(images, file)
    file.seek(0)
    copies = [torch.load(file), pickle.loads(pickle.dumps(images)), copy.deepcopy(images), images.clone()]
    before = images.clone()
    images.share_memory_()  # moves it to a segment of torch's own
    assert images.is_shared()
    assert len(channel.freed) == 1
    for other in [*copies, images]:
        assert torch.equal(other, before)


def test_a_forked_child_reads_the_batch_and_its_slot_is_never_written_again(channel):
    batch = channel.send([torch.full(LARGE, 3.0)])
    ready, answer = multiprocessing.get_context("fork").SimpleQueue(), multiprocessing.get_context("fork").SimpleQueue()

    def child():
        ready.get()
        answer.put(bool((batch[0].numpy() == 3.0).all()))  # torch's threads are not there after a fork

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    batch.clear()
    assert list(channel.freed) == [Freed(1, 1, False)]
    ready.put(None)
    assert answer.get() is True
    process.join()
    process.close()
    for queue in (ready, answer):
        queue.close()
    batch = channel.send([torch.ones(LARGE)])
    batch.clear()
    assert channel.freed[-1] == Freed(1, 2, True)  # what was handed out after the fork is the trainer's alone


def test_everything_is_copied_out_when_asked(channel):
    batch = channel.send(
        [torch.full(LARGE, 3.0), np.full(LARGE, 4.0), torch.ones(3, 1).expand(3, 40000)], copy_all=True
    )
    assert list(channel.freed) == [Freed(1, 1, True)]
    channel.segment.buf[:] = bytes(channel.segment.size_bytes)
    assert batch[0].eq(3.0).all()
    assert (batch[1] == 4.0).all()
    assert batch[2].stride() == (1, 0)
    assert batch[0].untyped_storage().nbytes() == batch[0].nbytes


def test_reading_a_slot_faults_in_no_page_after_its_first_use(channel):
    resource = pytest.importorskip("resource")
    large = [torch.ones(1000, 1000), torch.arange(64)]
    for _ in range(3):
        channel.send(large)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for _ in range(100):
        batch = channel.receive()
        batch[0][::64, ::16].sum()
        del batch
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before < 50


def test_a_segment_has_one_descriptor_and_no_name():
    before = len(os.listdir("/proc/self/fd"))
    segment = Segment.create(100_000)
    assert segment.size_bytes == 102_400
    assert len(os.listdir("/proc/self/fd")) == before + 1
    segment.close_fd()
    segment.close_fd()
    segment.buf[5] = 7
    view = segment.buf
    segment.close()
    segment.close()
    assert view[5] == 7
    del view


def test_a_segment_goes_through_a_socket_and_is_the_same_memory():
    import socket

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    segment = Segment.create(4096)
    send_with_fds(ours, b"here", [segment.fd])
    message, fds = recv_with_fds(theirs, 100, 4)
    assert message == b"here"
    assert not os.get_inheritable(fds[0])
    other = Segment.attach(fds[0], 4096)
    segment.buf[10] = 42
    assert other.buf[10] == 42
    send_with_fds(ours, b"too long", [segment.fd, segment.fd])
    with pytest.raises(OSError, match="cut off"):
        recv_with_fds(theirs, 3, 4)
    for thing in (ours, theirs, segment, other):
        thing.close()


def test_a_descriptor_that_is_too_short_is_refused():
    fd = os.memfd_create("short")
    with pytest.raises(OSError, match="smaller than its segment"):
        Segment.attach(fd, 4096)
    os.close(fd)


def test_memory_is_unmapped_when_the_last_view_dies():
    segment = Segment.create(4096)
    ref, view = weakref.ref(segment.root), segment.buf[3:]
    segment.close()
    assert ref() is not None
    del view
    assert ref() is None
