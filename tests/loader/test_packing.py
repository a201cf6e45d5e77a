"""Batches of every kind arrive as they were made, through worker's and trainer's side of a slot in one process."""

import collections
import io
import warnings

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch.utils.data import _utils, default_collate, default_convert

from headrace.core.layout import LEASED_BYTES
from tests.loader.batches import DTYPES, Image, Pair, Record, assert_same, random_batch, random_samples, rngs, tensor_of
from tests.loader.packing import Channel

PROPERTY = settings(
    deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def keep(batch):
    return batch


def sent(batch, **options):
    with Channel(keep) as channel:
        return channel.send(batch, **options)


@PROPERTY
@given(rngs)
def test_any_batch_arrives_as_its_collate_function_made_it(rng):
    batch = random_batch(rng)
    with Channel(keep) as channel:
        assert_same(channel.send(batch), batch)
        assert_same(channel.send(batch, copy_all=True), batch)


@PROPERTY
@given(rngs)
def test_default_collate_gives_what_torch_gives_in_a_new_slot_and_in_a_used_one(rng):
    some = random_samples(rng)
    want = default_collate(some)
    with Channel() as channel:
        assert_same(channel.send(some), want)
        assert_same(channel.send(some), want)
        assert channel.num_segments <= 1


def test_default_collate_writes_into_the_slot_and_copies_nothing():
    rows = [(torch.randn(3, 100, 100), at) for at in range(4)]
    with Channel() as channel:
        channel.send(rows)
        images, labels = channel.send(rows)
        offset = images.data_ptr() - channel.mapping.segment.address
        assert 0 <= offset < channel.segment.size_bytes
        assert images.untyped_storage().nbytes() == images.nbytes == 4 * 3 * 100 * 100 * 4
        assert labels.untyped_storage().nbytes() == labels.nbytes == 32
        assert torch.equal(images, torch.stack([row for row, _ in rows]))
        del images, labels


def test_a_saved_tensor_of_a_batch_takes_its_own_bytes_only():
    with Channel() as channel:
        images, labels = channel.send([(torch.randn(3, 100, 100), at) for at in range(4)])
        for tensor in (images, labels):
            file = io.BytesIO()
            torch.save(tensor, file)
            assert file.tell() < tensor.nbytes + 3000
            file.seek(0)
            assert torch.equal(torch.load(file), tensor)
        del images, labels, tensor


def test_a_larger_batch_gets_a_larger_segment_and_a_smaller_one_stays():
    with Channel() as channel:
        for num, segments in ((10, 1), (100, 2), (3, 2), (101, 2), (1000, 3)):
            rows = [torch.full((1000,), float(at)) for at in range(num)]
            assert torch.equal(channel.send(rows), torch.stack(rows))
            assert channel.num_segments == segments


def test_a_batch_without_tensors_needs_no_slot():
    for batch in (None, [], {}, "text", ["a", 3, None], torch.zeros(2, 0), [torch.zeros(0)], (torch.zeros(0, 4), "x")):
        with Channel(keep) as channel:
            assert_same(channel.send(batch), batch)
            assert channel.num_segments == 0


def test_a_large_skeleton_goes_through_the_slot():
    batch = [f"path/{at}" for at in range(20000)] + [torch.ones(3), torch.ones(30000)]
    with Channel(keep) as channel:
        packed = channel.pack(batch)
        assert len(packed.skeleton) + len(packed.leaves) < 100
        assert_same(channel.receive(), batch)
        assert_same(channel.send(batch), batch)


@pytest.mark.parametrize("num_bytes", [100, LEASED_BYTES])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_element_type_keeps_its_bits(dtype, num_bytes):
    tensor = tensor_of(dtype, (num_bytes // dtype.itemsize,), 3)
    assert_same(sent([tensor, "x"]), [tensor, "x"])


def test_memory_format_strides_and_repeated_elements_are_kept():
    images = torch.arange(2 * 3 * 4 * 5.0).view(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    turned, repeated = torch.arange(6).view(2, 3).t(), torch.ones(1).expand(1000, 1000)
    with Channel(keep) as channel:
        got = channel.send({"images": images, "turned": turned, "repeated": repeated})
        assert got["images"].is_contiguous(memory_format=torch.channels_last)
        assert got["turned"].stride() == (1, 3)
        assert got["repeated"].stride() == (0, 0)
        assert channel.packed.used_bytes < 4096  # and not 4 MB


def test_one_column_of_a_wide_table_travels_without_the_table():
    column = torch.randn(1000, 1000)[:, 3]
    with Channel(keep) as channel:
        got = channel.send([column])
        assert torch.equal(got[0], column)
        assert channel.packed.used_bytes < 5000


def test_tensors_that_overlap_do_so_afterwards():
    for num in (40, 40000):
        tokens = torch.arange(3 * num).view(3, num)
        batch = (tokens[:, :-1], tokens[:, 1:], tokens[0], torch.ones(3))
        for options in ({}, {"copy_all": True}):
            got = sent(batch, **options)
            assert_same(got, batch)
            got[0][0, 1] = -7
            assert got[1][0, 0] == -7
            assert got[2][1] == -7


def test_a_tensor_that_is_met_twice_is_one_tensor():
    one, array = torch.ones(3), np.ones(3)
    got = sent([one, {"again": one}, array, array])
    assert got[0] is got[1]["again"]
    assert got[2] is got[3]
    first, second = sent([one, one])
    assert first is second
    got = sent({"a": one, "b": one})
    assert got["a"] is got["b"]


def test_chunks_of_one_tensor_do_not_hold_each_other():
    chunks = list(torch.arange(100.0).split(10))
    got = sent(chunks)
    assert_same(got, chunks)
    assert all(chunk.untyped_storage().nbytes() == 40 for chunk in got)


def test_classes_and_attributes_are_kept():
    image = torch.ones(3).as_subclass(Image)
    image.size_before = (4, 5)
    noted = torch.ones(3)
    noted.note = "kept"
    parameter = torch.nn.Parameter(torch.ones(2))
    got = sent(Record(Pair(image, [noted, parameter])))
    assert type(got.value.left) is Image
    assert got.value.left.size_before == (4, 5)
    assert got.value.right[0].note == "kept"
    assert type(got.value.right[1]) is torch.nn.Parameter
    assert got.value.right[1].requires_grad
    got = sent([noted])
    assert got[0].note == "kept"


def test_torchvision_types_are_kept():
    tv_tensors = pytest.importorskip("torchvision.tv_tensors")
    boxes = tv_tensors.BoundingBoxes(torch.ones(3, 4), format="XYXY", canvas_size=(8, 9))
    image = tv_tensors.Image(torch.zeros(3, 200, 200))
    got = sent({"boxes": boxes, "image": image})
    assert type(got["boxes"]) is type(boxes)
    assert got["boxes"].canvas_size == (8, 9)
    assert got["boxes"].format == boxes.format
    assert type(got["image"]) is type(image)
    rows = [{"image": image, "boxes": boxes}] * 2
    with Channel() as channel:
        assert_same(channel.send(rows), default_collate(rows))


def test_sparse_nested_quantised_and_meta_tensors_arrive():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that these are young, or old
        coo = torch.eye(3).to_sparse()
        batch = {
            "coo": coo,
            "csr": torch.eye(3).to_sparse_csr(),
            "csc": torch.eye(3).to_sparse_csc(),
            "bsr": torch.eye(4).to_sparse_bsr((2, 2)),
            "nested": torch.nested.nested_tensor([torch.ones(1), torch.zeros(2)]),
            "jagged": torch.nested.nested_tensor([torch.ones(1), torch.zeros(2)], layout=torch.jagged),
            "quantised": torch.quantize_per_tensor(torch.randn(3, 4), 0.1, 2, torch.qint8),
            "channels": torch.quantize_per_channel(
                torch.randn(2, 3), torch.tensor([0.1, 0.2]), torch.tensor([0, 1]), 0, torch.quint8
            ),
            "meta": torch.empty(3, 4, device="meta"),
        }
        got = sent(batch)
        assert not torch._utils._sparse_tensors_to_validate  # a list that would keep every batch for ever
        assert torch.equal(got["coo"].to_dense(), torch.eye(3))
        assert got["coo"].is_coalesced() == coo.is_coalesced()
        assert got["csr"].layout is torch.sparse_csr
        assert got["bsr"].layout is torch.sparse_bsr
        assert torch.equal(got["bsr"].to_dense(), torch.eye(4))
        for name in ("nested", "jagged"):
            assert got[name].layout == batch[name].layout
            assert [part.tolist() for part in got[name].unbind()] == [[1.0], [0.0, 0.0]]
        for name in ("quantised", "channels"):
            assert torch.equal(got[name].int_repr(), batch[name].int_repr())
            assert torch.equal(got[name].dequantize(), batch[name].dequantize())
        assert got["meta"].is_meta
        assert got["meta"].shape == (3, 4)


def test_storages_arrive():
    storage = torch.arange(5, dtype=torch.uint8).untyped_storage()
    got = sent(["x", storage])
    assert list(got[1]) == [0, 1, 2, 3, 4]


def test_conjugated_and_negated_views_have_their_values():
    values = torch.tensor([1 + 2j, 3 - 4j])
    got = sent([values.conj(), values.conj().imag, "x"])
    assert got[0].tolist() == [1 - 2j, 3 + 4j]
    assert got[1].tolist() == [-2.0, 4.0]


def test_a_leaf_keeps_requires_grad_and_another_tensor_is_refused_as_torch_does():
    got = sent([torch.ones(2, requires_grad=True), torch.ones(40000, requires_grad=True)])
    assert all(tensor.requires_grad and tensor.is_leaf for tensor in got)
    (got[0].sum() + got[1].sum()).backward()
    for batch in ([torch.ones(2, requires_grad=True) * 2], ["x", torch.ones(2, requires_grad=True) * 2]):
        with pytest.raises(RuntimeError, match="non-leaf tensor which requires_grad"):
            sent(batch)


def test_images_arrive():
    Image = pytest.importorskip("PIL.Image")
    images = [Image.new("RGB", (40, 30), (1, 2, 3)), Image.new("L", (3, 3), 9), Image.new("P", (2, 2))]
    got = sent(images)
    assert [image.mode for image in got] == ["RGB", "L", "P"]
    assert [image.tobytes() for image in got] == [image.tobytes() for image in images]


def test_arrays_of_every_kind_arrive_writable():
    wide = np.arange(40000.0).reshape(200, 200)
    read_only = np.arange(3)
    read_only.flags.writeable = False
    batch = [wide, wide.T, wide[::2, ::-1], read_only, np.array(3), np.zeros((0, 3)), np.zeros((0, 2), ">i4")]
    batch += [np.broadcast_to(np.float32(3), (4, 5)), np.array([1, 2], ">i2"), np.array(["ab", None], object)]
    batch += [
        np.array([(1, 2.0)], [("a", "i4"), ("b", "f8")]),
        np.array(["ab", "c"]),
        np.array(["2020-01-01"], "M8[D]"),
    ]
    batch += [np.rec.array([(1, 2)])]
    got = sent(batch)
    for one, other in zip(got, batch, strict=True):
        assert type(one) is type(other)
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert one.tolist() == other.tolist()
        assert one.flags.writeable
    assert got[1].flags.f_contiguous
    masked = sent(["x", np.ma.masked_array([1, 2], [True, False])])[1]
    assert masked.mask.tolist() == [True, False]


def test_an_array_of_tensors_arrives():
    array = np.empty(2, object)
    array[0], array[1] = torch.ones(3), "x"
    got = sent([array])[0]
    assert torch.equal(got[0], torch.ones(3))


def test_default_convert_arrives():
    sample = {"a": np.arange(3), "b": [1, "x"], "c": torch.ones(2)}
    with Channel(default_convert) as channel:
        assert_same(channel.send(sample), default_convert(sample))


def test_packed_sequences_arrive():
    parts = [torch.arange(float(size)) for size in (3, 1, 2)]
    packed = torch.nn.utils.rnn.pack_sequence(parts, enforce_sorted=False)
    got = sent({"p": packed})["p"]
    assert type(got) is type(packed)
    assert torch.equal(got.data, packed.data)
    assert torch.equal(got.batch_sizes, packed.batch_sizes)


@pytest.mark.parametrize(
    ("rows", "error", "words"),
    [
        ([torch.zeros(3, 224), torch.zeros(3, 144)], RuntimeError, r"\[3, 224\] at entry 0 and \[3, 144\] at entry 1"),
        ([None, None], TypeError, "NoneType"),
        ([np.array(["a"]), np.array(["b"])], TypeError, "<U1"),
        ([np.zeros(3), np.zeros(4)], RuntimeError, r"\[3\] at entry 0 and \[4\] at entry 1"),
        ([[1, 2], [1]], RuntimeError, "each element in list of batch should be of equal size"),
        (
            [torch.eye(2).to_sparse()] * 2,
            RuntimeError,
            "sparse tensors are not currently supported by the default collate_fn",
        ),
        ([torch.ones(2, requires_grad=True)] * 2, RuntimeError, "requires grad"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_torch_refuses_is_refused_in_its_words_and_the_slot_goes_on(rows, error, words):
    good = [torch.zeros(3, 5), torch.ones(3, 5)]
    with Channel() as channel:
        channel.send(good)
        for _ in range(2):
            with pytest.raises(error, match=words):
                channel.send(rows)
            assert torch.equal(channel.send(good), torch.stack(good))


def test_users_additions_to_torchs_collate_functions_count(monkeypatch):
    functions = _utils.collate.default_collate_fn_map
    monkeypatch.setitem(functions, Pair, lambda batch, *, collate_fn_map: [pair.left for pair in batch])
    with Channel() as channel:
        assert channel.send([(Pair(1, 2), 5), (Pair(3, 4), 6)])[0] == [1, 3]
        monkeypatch.setitem(functions, torch.Tensor, lambda batch, *, collate_fn_map: "mine")
        assert channel.send([torch.ones(2)] * 2) == "mine"
        assert channel.send([np.ones(2)] * 2) == "mine"


class Grad(dict):
    def update(self, other):
        super().update({key: value.requires_grad_() for key, value in other.items()})


def test_a_view_of_the_slot_that_somebody_changed_is_not_used_again():
    rows = [Grad(), Grad()]
    for row in rows:
        dict.update(row, x=torch.ones(3))
    with Channel() as channel:
        for _ in range(3):
            got = channel.send(rows)
            assert type(got) is Grad
            assert got["x"].requires_grad


def test_a_collate_function_that_keeps_its_result_does_not_keep_the_slot():
    kept = []

    def collate(rows):
        kept.append(torch.stack(rows))
        return kept[-1]

    with Channel(collate) as channel:
        for at in range(3):
            channel.send([torch.full((20000,), float(at))] * 2)
    assert [batch[0, 0].item() for batch in kept] == [0.0, 1.0, 2.0]


def test_an_object_that_cannot_be_unpickled_frees_the_slot():
    with Channel(keep) as channel:
        channel.pack([Unwilling(), torch.ones(40000)])
        with pytest.raises(ZeroDivisionError):
            channel.receive()
        assert len(channel.freed) == 1
        assert channel.mapping.num_leases == 0


class Unwilling:
    def __reduce__(self):
        return divmod, (1, 0)


def test_a_counter_and_other_containers_keep_their_class():
    batch = [collections.Counter("aab"), collections.deque([torch.ones(1)]), frozenset({1}), range(3), slice(1, 2)]
    got = sent(batch)
    assert [type(part) for part in got] == [type(part) for part in batch]
    assert got[0] == batch[0]
