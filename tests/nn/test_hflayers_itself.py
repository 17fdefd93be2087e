"""Against the package itself, where it is installed: pip install git+https://github.com/ml-jku/hopfield-layers"""

import pytest
import torch
from theirs import D, drawn

from outeffhop.nn import hflayers as ours

theirs = pytest.importorskip("hflayers")


@pytest.fixture(autouse=True)
def _in_float64():
    torch.set_default_dtype(D)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("kind", ["Hopfield", "HopfieldPooling", "HopfieldLayer"])
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"num_heads": 2, "scaling": 0.7, "update_steps_max": 2, "update_steps_eps": 1e-30},
        {"num_heads": 2, "hidden_size": 3, "output_size": 5, "pattern_size": 6, "batch_first": False},
        {"num_heads": 2, "pattern_projection_as_connected": True, "add_zero_association": True},
        {"state_pattern_as_static": True, "association_activation": "tanh"},
        {"stored_pattern_as_static": True, "pattern_projection_as_static": True, "disable_out_projection": True},
    ],
    ids=str,
)
def test_the_same(kind, arguments):
    torch.manual_seed(0)
    quantity = {} if kind == "Hopfield" else {"quantity": 6}
    one, two = (getattr(package, kind)(8, **arguments, **quantity) for package in (theirs, ours))
    with torch.no_grad():
        for parameter in one.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    two.load_state_dict(one.state_dict())
    x = drawn(3, 6, 8) if arguments.get("batch_first", True) else drawn(6, 3, 8)
    padding = torch.zeros(3, 6, dtype=torch.bool)
    padding[1, 4:] = True
    for name in ("__call__", "get_association_matrix", "get_projected_pattern_matrix"):
        expected = getattr(one, name)(x, stored_pattern_padding_mask=padding)
        torch.testing.assert_close(getattr(two, name)(x, stored_pattern_padding_mask=padding), expected)
