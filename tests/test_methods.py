"""Methods as values: parse and print are inverse, wrong ones are refused with the nearest right ones."""

import pytest
import torch

from outeffhop.functional import clipped_softmax, entmax, softmax_n
from outeffhop.methods import METHODS, Clipped, Entmax, Entry, GateSpec, Method, SoftmaxN

SIX = ["vanilla", "outeffhop", "clipped", "clipped-outeffhop", "gated", "gated-outeffhop"]
WRITTEN = [
    *SIX,
    "sparse",
    "gsh",
    "polynomial",
    "outeffhop(n=4)",
    "outeffhop(sink=learned)",
    "outeffhop(n=0.5, sink=learned)",
    "clipped(gamma=-0.03)",
    "clipped(gamma=-1e-05, zeta=1.1)",
    "clipped(alpha=12)",
    "clipped-outeffhop(zeta=1.003, alpha=12, n=2)",
    "gated(predictor=mlp, init=0.5)",
    "gated-outeffhop(sink=learned, gate=head, predictor=features, init=0.9)",
    "gated(gate=element, predictor=features)",
    "gsh(alpha=1.7)",
    "polynomial(order=4)",
    "vanilla(qk_norm=rms)",
    "gsh(alpha=1.7, qk_norm=rms)",
    "gated-outeffhop(sink=learned, gate=element, init=0.5, qk_norm=rms)",
]


@pytest.mark.parametrize("text", WRITTEN)
def test_round_trip(text):
    method = Method.parse(text)
    assert str(method) == text
    assert Method.parse(str(method)) == method
    assert Method.parse(method) is method
    assert hash(method) == hash(Method.parse(text))


def test_spelling_is_forgiving():
    assert Method.parse(" Outeffhop( n = 4 ) ") == Method.parse("outeffhop(n=4)")
    assert Method.parse("gated_outeffhop") == Method.parse("gated-outeffhop")
    assert Method.parse("dense") == Method.parse("vanilla")
    assert str(Method.parse("outeffhop(n=1)")) == "outeffhop"


def test_the_papers_six_come_first():
    assert list(METHODS)[:6] == SIX


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("outefhop", ["'outefhop'", "'outeffhop'"]),
        ("zzz", ["vanilla", "gsh"]),
        ("clipped(gama=1)", ["'clipped'", "'gama'", "'gamma'"]),
        ("vanilla(n=2)", ["'vanilla'", "'n'", "qk_norm"]),
        ("vanilla(qk_norm=layer)", ["qk_norm='layer'", "none, rms"]),
        ("gated(gate=elementwise)", ["'elementwise'", "'element'"]),
        ("outeffhop(n=-1)", ["n=-1"]),
        ("outeffhop(n=many)", ["n='many'", "number"]),
        ("outeffhop(sink=lerned)", ["'lerned'", "'learned'"]),
        ("outeffhop(n=0, sink=learned)", ["n=0"]),
        ("outeffhop(4)", ["'4'", "parameter=value"]),
        ("outeffhop(n=1, n=2)", ["'n' is given twice"]),
        ("outeffhop(n=1", ["form"]),
        ("clipped(gamma=0.5)", ["gamma=0.5"]),
        ("clipped(zeta=0.5)", ["zeta=0.5"]),
        ("clipped(gamma=-0.1, alpha=12)", ["gamma=-0.1", "alpha=12"]),
        ("clipped(alpha=-1)", ["alpha=-1"]),
        ("gated(gate=per_token)", ["'per_token'", "'token'"]),
        ("gated(init=1)", ["init=1.0"]),
        ("gsh(alpha=0.5)", ["alpha=0.5"]),
        ("gsh(alpha=x)", ["alpha='x'", "number", "learned"]),
        ("polynomial(order=3)", ["order=3", "even"]),
        ("polynomial(order=2.5)", ["order='2.5'", "integer"]),
        ("", ["form"]),
    ],
)
def test_errors(text, words):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        Method.parse(text)
    for word in words:
        assert word in str(caught.value), f"{word!r} not in: {caught.value}"


def test_every_method_takes_qk_norm():
    for name, entry in METHODS.items():
        method = Method.parse(f"{name}(qk_norm=rms)")
        assert (method.qk_norm, method.normalizer, method.gate) == ("rms", entry.method.normalizer, entry.method.gate)
        assert Method.parse(f"{name}(qk_norm=none)") == entry.method


def test_choices_are_what_a_parameter_takes():
    for name, entry in METHODS.items():
        assert "qk_norm" in entry.choices
        for parameter, words in entry.choices.items():
            for word in words:
                assert entry.values(Method.parse(f"{name}({parameter}={word})"))[parameter] == word
    assert METHODS["gated"].choices["gate"] == ("token", "element", "head", "constant")


def test_a_method_without_parameters_says_so():
    entry = Entry(METHODS["vanilla"].method, (), "softmax")
    assert entry.choices == {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(METHODS, "vanilla", entry)
        with pytest.raises(ValueError, match="'qk_norm'; it has no parameters"):
            Method.parse("vanilla(qk_norm=rms)")


@pytest.mark.parametrize("name", ["my_method", "ReLU", "my-method"])
def test_a_method_of_ones_own_is_found_as_it_is_spelled(name):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(METHODS, name, Entry(Method(name, SoftmaxN(2.0)), ("n",), "mine"))
        assert Method.parse(f"{name}(n=3)") == Method(name, SoftmaxN(3.0))
        assert str(Method.parse(f"{name}(n=3)")) == f"{name}(n=3)"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SoftmaxN(noop="lerned"), "noop='lerned'.*'learned'"),
        (lambda: GateSpec(gate="per_token"), "gate='per_token'.*'token'"),
        (lambda: GateSpec(predictor="MLP"), "predictor='MLP'.*mlp"),
        (lambda: Method("vanilla", SoftmaxN(0.0), qk_norm="RMS"), "qk_norm='RMS'.*rms"),
        (lambda: Entmax("lerned"), "alpha=lerned.*learned"),
    ],
)
def test_values_made_by_hand_are_checked_as_well(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(
    "method",
    [
        Method("mine", SoftmaxN(2.0)),
        Method("vanilla", SoftmaxN(1.0)),  # was written "vanilla", and read again softmax
        Method("outeffhop", SoftmaxN(1.0), GateSpec()),
        Method("outeffhop", Clipped()),
        Method("gated", SoftmaxN(0.0)),
    ],
    ids=repr,
)
def test_what_no_name_means_is_not_written(method):
    with pytest.raises(ValueError, match=f"{method.name!r}.*METHODS"):
        str(method)


def test_normalizers_are_the_functions():
    x = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    expected = {
        "vanilla": softmax_n(x, 0.0),
        "outeffhop(n=4)": softmax_n(x, 4.0),
        "clipped": clipped_softmax(x, -0.025, 1.0),
        "clipped(alpha=1)": clipped_softmax(x, -0.2, 1.0),
        "clipped-outeffhop": clipped_softmax(x, -0.025, 1.0, n=1.0),
        "sparse": entmax(x, 2.0),
        "gsh": entmax(x, 1.5),
        "gsh(alpha=1.7)": entmax(x, 1.7),
    }
    for text, p in expected.items():
        torch.testing.assert_close(Method.parse(text).normalizer(x), p)


def test_learned_tensors():
    x = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    sink = torch.tensor([-1.0, 0.0, 40.0], dtype=torch.float64, requires_grad=True)
    learned = Method.parse("outeffhop(n=2, sink=learned)").normalizer
    assert learned.learns == "sink"
    assert learned.start == pytest.approx(0.6931, abs=1e-4)
    torch.testing.assert_close(learned(x, sink), softmax_n(x, sink.exp()[:, None, None]))
    gsh = Method.parse("gsh").normalizer
    assert (gsh.learns, gsh.start) == ("alpha", 1.5)
    alpha = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.grad(gsh(x, alpha)[..., 0].sum(), alpha)[0] != 0


def test_polynomial_weights():
    x = torch.tensor([[2.0, -1.0, 0.0, -torch.inf]], dtype=torch.float64)
    weights = Method.parse("polynomial(order=4)").normalizer(x)
    torch.testing.assert_close(weights, torch.tensor([[8 / 9, -1 / 9, 0.0, 0.0]], dtype=torch.float64))
    huge = Method.parse("polynomial").normalizer(x * 1e30)
    torch.testing.assert_close(huge, Method.parse("polynomial").normalizer(x))
    assert torch.equal(Method.parse("polynomial").normalizer(torch.zeros(1, 3)), torch.zeros(1, 3))
