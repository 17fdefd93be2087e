"""What is said of a name that nobody knows."""

import re

import pytest

from outeffhop._naming import did_you_mean, known

NAMES = ("vanilla", "outeffhop", "clipped")


def test_a_known_name_comes_back():
    assert known("method", "clipped", NAMES) == "clipped"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("vanila", "method='vanila' is unknown; did you mean 'vanilla'? There are: vanilla, outeffhop, clipped"),
        ("xyz", "method='xyz' is unknown. There are: vanilla, outeffhop, clipped"),
        (3, "method=3 is unknown. There are: vanilla, outeffhop, clipped"),
    ],
)
def test_an_unknown_name_is_refused_as_a_sentence(value, said):
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        known("method", value, NAMES)


def test_several_may_be_near():
    assert did_you_mean("gated-outefhop", ["gated", "gated-outeffhop", "sparse"], n=2) == (
        "; did you mean 'gated-outeffhop' or 'gated'?"
    )
