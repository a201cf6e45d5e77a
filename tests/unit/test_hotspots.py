"""Sampled stacks become the lines where the dataset spends its time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.hotspots import hotspots

USER = "*train.py:31|Photos.__getitem__"
DECODE = "site-packages/PIL/ImageFile.py:300|ImageFile.load"


def line(*rows):
    return {"k": "stacks", "rows": [list(row) for row in rows]}


def test_the_users_own_line_is_named_with_what_it_called():
    """The site is the user's innermost line, the rest says what ran there."""
    (spot,) = hotspots([line((9, "running", [DECODE, USER, "*train.py:80|main"]))], mostly_blocked=False)
    assert (spot.site, spot.function) == ("train.py:31", "Photos.__getitem__")
    assert spot.what == "PIL image decode (ImageFile.load)"
    assert spot.share_frac == 1.0


def test_samples_of_all_workers_are_one_picture():
    """Counts of several lines and processes add up; the hottest comes first."""
    spots = hotspots(
        [line((1, "running", [USER]), (3, "running", [DECODE, USER])), line((4, "running", [DECODE, USER]))], False
    )
    assert [spot.share_frac for spot in spots] == [0.875, 0.125]
    assert spots[1].what is None


@pytest.mark.parametrize(
    ("state", "inner", "blocked", "expected"),
    [
        ("lock", "train.py:3|f", False, "running"),
        ("lock", "train.py:3|f", True, "lock"),
        ("lock", "/usr/lib/python3.12/threading.py:300|wait", False, "lock"),
        ("unknown", "train.py:3|f", False, "running"),
        ("unknown", "train.py:3|f", True, "unknown"),
        ("file:nfs /data/a.jpg", "train.py:3|f", False, "file:nfs /data/a.jpg"),
    ],
)
def test_a_bare_futex_is_a_lock_only_where_the_fetch_is_blocked(state, inner, blocked, expected):
    """The look itself makes threads wait for the interpreter: that is no lock of the user's."""
    (spot,) = hotspots([line((5, state, [inner, USER]))], blocked)
    assert spot.state == expected


def test_stacks_without_a_line_of_the_user_name_the_innermost():
    """Where all frames are of packages, or none is known, something is said still."""
    (spot,) = hotspots([line((5, "running", ["a/torch/x.py:1|f", "a/b.py:2|g"]))], False)
    assert spot.site == "a/torch/x.py:1"
    (spot,) = hotspots([line((5, "running", []))], False)
    assert spot.site == "?"
    assert hotspots([], False) == hotspots([{"k": "stacks"}], True) == []


frames = st.lists(st.sampled_from([USER, DECODE, "", "*", "|", "a:1", "*a|", "\\torch\\x.py:3|f"]), max_size=3)
row = st.tuples(st.integers(1, 50), st.sampled_from(["running", "lock", "file", "unknown"]), frames)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.lists(row, max_size=6), max_size=3), st.booleans())
def test_shares_are_shares(rows, blocked):
    """Whatever frames look like: shares fall, are above 0, and sum to at most 1."""
    spots = hotspots([line(*group) for group in rows], blocked)
    shares = [spot.share_frac for spot in spots]
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) <= 1 + 1e-3
    assert len(spots) <= 6
