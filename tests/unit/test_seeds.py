"""Each place has a key of its own, of one length, whatever its parts."""

from hypothesis import given
from hypothesis import strategies as st

from headrace.core.seeds import ROW_OF_BATCH, ROW_OF_COLLATE, Stream, batch_key, row_key

PLACES = st.tuples(
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**48 - 1),
    st.integers(0, 2**48 - 1),
    st.one_of(st.integers(0, 2**32 - 3), st.sampled_from([ROW_OF_BATCH, ROW_OF_COLLATE])),
    st.sampled_from(list(Stream)),
)


def key(place):
    base_seed, epoch, batch, row, stream = place
    return row_key(batch_key(base_seed, epoch, batch), row, stream)


@given(PLACES, PLACES)
def test_distinct_places_have_distinct_keys(a, b):
    assert (key(a) == key(b)) == (a == b)


@given(PLACES)
def test_a_key_holds_its_place_and_fits_the_generators(place):
    number = key(place)
    parts = (number & (2**64 - 1), number >> 64 & (2**48 - 1), number >> 112 & (2**48 - 1), number >> 160 & (2**32 - 1))
    assert (*parts, number >> 192) == place
    assert number.bit_length() <= 256


def test_keys_are_part_of_the_results_and_never_change():
    assert row_key(batch_key(1, 2, 3), 4, Stream.TORCH) == 3 << 192 | 4 << 160 | 3 << 112 | 2 << 64 | 1
    assert [int(stream) for stream in Stream] == [1, 2, 3, 4, 5, 6]
