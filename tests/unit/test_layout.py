"""The layout of a batch in bytes: the table of leaves, where they may lie, what overlaps, what is copied together."""

from hypothesis import given
from hypothesis import strategies as st

from headrace.core.layout import (
    ALIGN_BYTES,
    ARRAY,
    LEASED_BYTES,
    PAGE_BYTES,
    RUN_BYTES,
    TENSOR,
    Leaf,
    aligned,
    decode,
    encode,
    keeps_strides,
    overlaps,
    runs,
    segment_bytes,
    span,
)

sizes = st.integers(0, 2**40)
dims = st.lists(st.integers(0, 2**40), max_size=5).map(tuple)


@st.composite
def leaves(draw):
    shape = draw(dims)
    steps = st.lists(st.integers(-(2**40), 2**40), min_size=len(shape), max_size=len(shape)).map(tuple)
    strides = draw(st.none() | steps)
    numbers = [draw(st.integers(0, 255)) for _ in range(2)]
    return Leaf(draw(st.sampled_from([TENSOR, ARRAY])), *numbers, draw(sizes), draw(sizes), shape, strides, draw(sizes))


@given(st.lists(leaves(), max_size=8))
def test_a_table_gives_back_its_leaves(table):
    assert decode(b"".join(map(encode, table))) == table


def test_the_table_of_images_and_labels_is_small():
    table = [Leaf(TENSOR, 0, 0, 0, 9633792, (64, 3, 224, 224)), Leaf(TENSOR, 8, 0, 9633792, 512, (64,))]
    assert len(b"".join(map(encode, table))) <= 104


@given(st.lists(st.integers(1, 200_000), max_size=30))
def test_leaves_are_aligned_and_large_ones_start_on_a_page(sizes):
    top = 0
    for num_bytes in sizes:
        offset = aligned(top, num_bytes)
        assert offset >= top
        assert offset % (PAGE_BYTES if num_bytes >= LEASED_BYTES else ALIGN_BYTES) == 0
        assert offset - top < PAGE_BYTES
        top = offset + num_bytes


def test_the_span_of_a_tensor_is_from_its_first_to_its_last_element():
    assert span((2, 3), (3, 1)) == 6
    assert span((2, 3), (0, 0)) == 1
    assert span((2, 3), (10, 2)) == 15
    assert span((), ()) == 1
    assert span((4, 0), (1, 1)) == 0


def test_small_gaps_travel_and_large_ones_do_not():
    assert keeps_strides(60_000, 4)
    assert keeps_strides(2_000_000, 1_000_000)
    assert not keeps_strides(2_000_001, 1_000_000)
    assert keeps_strides(4, 4_000_000)  # an expanded tensor


@given(st.integers(0, 2**40), st.integers(0, 2**40))
def test_a_segment_is_whole_pages_and_leaves_room_only_where_batches_grow(needed, outgrown):
    size = segment_bytes(needed, outgrown)
    assert size % PAGE_BYTES == 0
    assert size >= max(needed, 1)
    assert size <= needed + (needed // 8 if outgrown else 0) + PAGE_BYTES


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)), max_size=12))
def test_spans_are_grouped_exactly_when_they_overlap(pairs):
    spans = [(start, start + length) for start, length in pairs]
    groups = overlaps(spans)
    of = {at: number for number, group in enumerate(groups) for at in group}
    assert sum(map(len, groups)) == len(of)  # none in two groups
    assert all(len(group) > 1 for group in groups)
    for one, (start, stop) in enumerate(spans):
        for other, (begin, end) in enumerate(spans):
            if one != other and max(start, begin) < min(stop, end):
                assert of[one] == of[other]
    for group in groups:
        reach = spans[group[0]][1]
        for at in group[1:]:  # in the order of addresses, each overlaps what lies before it
            assert spans[at][0] < reach
            reach = max(reach, spans[at][1])


@given(st.lists(st.integers(1, 10_000), max_size=30), st.randoms(use_true_random=False))
def test_runs_cover_each_leaf_once_and_stay_small(sizes, rng):
    table, top = [], 0
    for num_bytes in sizes:
        offset = aligned(top, num_bytes)
        table.append(Leaf(TENSOR, 0, 0, offset, num_bytes, (num_bytes,)))
        top = offset + num_bytes
    chosen = [at for at in range(len(table)) if rng.random() < 0.7]
    found = runs(table, chosen)
    assert sorted(at for run in found for at in run.members) == chosen
    for run in found:
        assert len(run.members) == 1 or run.stop - run.start <= RUN_BYTES
        for at in run.members:
            assert run.start <= table[at].offset_bytes
            assert table[at].offset_bytes + table[at].num_bytes <= run.stop
