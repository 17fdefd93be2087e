"""Methods and quantization schemes as text: parse and str are inverse, and garbage is a ValueError."""

import math

import pytest
import torch
from fuzzing import cases, outcome, refused
from hypothesis import example, given
from hypothesis import strategies as st

from outeffhop.methods import METHODS, Method
from outeffhop.quantization import Scheme
from outeffhop.quantization.schemes import SCHEMES

NUMBERS = st.floats(allow_nan=True, allow_infinity=True) | st.integers(-5, 5)
WORDS = st.sampled_from(
    ["learned", "fixed", "token", "element", "head", "constant", "linear", "mlp", "features", "none", "rms", ""]
)
PARAMETERS = st.sampled_from(
    ["n", "sink", "gamma", "zeta", "alpha", "gate", "predictor", "init", "order", "beta", "qk_norm"]
)


@st.composite
def written(draw):
    """A method as a user might write it, right or wrong."""
    given = draw(st.lists(st.tuples(PARAMETERS, NUMBERS | WORDS), max_size=3))
    inside = ", ".join(f"{name}={value}" for name, value in given)
    return draw(st.sampled_from([*METHODS, "dense", "softmax1", "OUTEFFHOP", "gated_outeffhop"])) + (
        f"({inside})" if inside or draw(st.booleans()) else ""
    )


@cases(100)
@given(written())
@example("clipped(gamma=nan)")
@example("clipped(zeta=inf)")
@example("clipped(alpha=inf)")
@example("clipped-outeffhop(n=-1)")
@example("clipped-outeffhop(n=nan)")
def test_parse_and_str_are_inverse(text):
    method = outcome(lambda: Method.parse(text))
    if refused(method):
        assert isinstance(method, ValueError)
        assert len(str(method).splitlines()) == 1
        return
    assert Method.parse(str(method)) == method
    assert str(Method.parse(str(method))) == str(method)
    weights = method.normalizer(torch.tensor([[1.0, -math.inf, -2.0, 3.0]], dtype=torch.float64))
    assert torch.isfinite(weights).all()
    assert weights[0, 1] == 0


@cases(50)
@given(
    st.text(max_size=30) | st.text(alphabet="outefhpclidga()=,.-0123456789 einf\n", max_size=30),
    st.sampled_from(["", "outeffhop(", "clipped(gamma=", "gsh(alpha=", "polynomial(order="]),
)
def test_garbage_is_a_value_error(garbage, before):
    method = outcome(lambda: Method.parse(before + garbage))
    if refused(method):
        assert isinstance(method, ValueError)
    else:
        assert Method.parse(str(method)) == method


@pytest.mark.parametrize("value", [None, 3, 1.5, b"outeffhop", ["outeffhop"], {"method": "outeffhop"}])
def test_what_is_no_text_is_refused_by_name(value):
    for parse in (Method.parse, Scheme.parse):
        with pytest.raises(TypeError, match=r"method|scheme"):
            parse(value)


@cases(50)
@given(
    st.text(max_size=20)
    | st.tuples(st.integers(-1, 40), st.integers(0, 40), st.sampled_from([*SCHEMES, "", "nothing"])).map(
        lambda t: f"W{t[0]}A{t[1]} {t[2]}"
    )
)
def test_schemes(text):
    scheme = outcome(lambda: Scheme.parse(text))
    if refused(scheme):
        assert isinstance(scheme, ValueError)
    else:
        assert Scheme.parse(str(scheme)) == scheme
