"""Heteroassociative memories: what is retrieved is the value of a pattern, and nothing's value is 0."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from outeffhop.memory import HopfieldMemory, NoOp, hopfield_memory

MODELS = ("vanilla", "outeffhop", "outeffhop(n=4)", "sparse", "gsh", "polynomial", "clipped-outeffhop")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def rows(size: int = 9) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 4, dtype=torch.float64), torch.randn(size, 3, dtype=torch.float64)


@pytest.mark.parametrize("name", MODELS)
def test_a_value_is_read_with_the_weights_of_the_last_update(name: str) -> None:
    keys, values = rows()
    memory, x = HopfieldMemory(keys, 2.0, name, values=values), torch.randn(2, 5, 4, dtype=torch.float64)
    plain = HopfieldMemory(keys, 2.0, name)
    for steps in (1, 3):
        result = memory.retrieve(x, steps)
        before = plain.retrieve(x, steps - 1).state if steps > 1 else x
        assert torch.equal(result.state, plain.retrieve(x, steps).state)
        torch.testing.assert_close(result.value, memory.association(before) @ values)
    rest = memory.retrieve(x, None, tol=1e-2)
    assert len(rest.steps.unique()) > 1, "all stop at once: this would test nothing"
    alone = [memory.retrieve(query, None, tol=1e-2).value for query in x.flatten(0, 1)]
    torch.testing.assert_close(rest.value, torch.stack(alone).reshape(2, 5, 3))


@pytest.mark.parametrize("name", ["outeffhop", "gsh"])
def test_patterns_as_values_are_the_state_and_the_gradient_goes_through(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, values = rows()
    monkeypatch.setattr(hopfield_memory, "_BLOCK", 20)  # several blocks of queries
    own = HopfieldMemory(keys, 2.0, name, values=keys).retrieve(torch.randn(6, 4, dtype=torch.float64), 2)
    torch.testing.assert_close(own.value, own.state)
    x = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    memory = HopfieldMemory(keys, 2.0, name, values=values)
    assert torch.autograd.gradcheck(lambda q: memory.retrieve(q, 2).value, x)
    assert memory.retrieve(torch.randn(2, 0, 4, dtype=torch.float64)).value.shape == (2, 0, 3)


def test_memory_of_x_retrieves() -> None:
    keys, values = rows()
    memory, x = HopfieldMemory(keys, values=values), torch.randn(5, 4, dtype=torch.float64)
    called, retrieved = memory(x, 2, trace=True), memory.retrieve(x, 2, trace=True)
    for name in ("state", "steps", "energy", "no_op", "value"):
        assert torch.equal(getattr(called, name), getattr(retrieved, name))
    assert HopfieldMemory(keys)(x).value is None


def test_nothing_has_the_value_zero() -> None:
    memory = HopfieldMemory(torch.eye(3), beta=30.0, values=torch.full((3, 2), 7.0))
    answer = memory(torch.tensor([[1.0, 0.0, 0.0], [-1.0, -1.0, -1.0]]))
    torch.testing.assert_close(answer.value, torch.tensor([[7.0, 7.0], [0.0, 0.0]]))
    torch.testing.assert_close(answer.no_op, torch.tensor([0.0, 1.0]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["outeffhop", "sparse"])
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    keys, values = (t.to(dtype) for t in rows())
    x = torch.randn(5, 4).to(dtype)
    found = HopfieldMemory(keys, 0.7, name, values=values)(x).value
    exact = HopfieldMemory(keys.double(), 0.7, name, values=values.double())(x.double()).value
    assert found is not None
    assert found.dtype == dtype
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), exact, rtol=8 * eps, atol=8 * eps)


def test_values_go_where_their_patterns_go(tmp_path: Path) -> None:
    keys, values = rows()
    given, mask = values.clone(), NoOp.assign(6, [1, 4])
    memory = HopfieldMemory(keys[:6], no_op=mask, values=given[:6])
    given.zero_()
    assert torch.equal(memory.stored_values, values[:6])
    assert torch.equal(memory.values, values[[0, 2, 3, 5]])
    assert "6 patterns of size 4 with values of size 3, 2 of them outliers" in repr(memory)

    memory.add(keys[6:], outliers=[False, True, False], values=values[6:]).remove([0, 4])
    left = [1, 2, 3, 5, 6, 7, 8]
    assert torch.equal(memory.stored_values, values[left])
    assert torch.equal(memory.values, values[[2, 3, 5, 6, 8]])

    memory.save(tmp_path / "memory.safetensors")
    back, x = HopfieldMemory.load(tmp_path / "memory.safetensors"), torch.randn(5, 4, dtype=torch.float64)
    assert torch.equal(back.stored_values, memory.stored_values)
    assert torch.equal(back(x).value, memory(x).value)
    assert back.to(torch.float32).values.dtype == torch.float32


@pytest.mark.parametrize(
    ("values", "kind", "message"),
    [
        ([[1.0]], TypeError, r"values is a list: expected a tensor \[3, d_v\]"),
        (torch.ones(2, 2), ValueError, r"values has shape \(2, 2\): expected \[3, d_v\]"),
        (torch.ones(3), ValueError, r"values has shape \(3,\)"),
        (torch.ones(3, 0), ValueError, r"values has shape \(3, 0\)"),
        (torch.ones(3, 2).long(), TypeError, r"values has dtype torch\.int64 and patterns torch\.float32"),
        (torch.ones(3, 2, device="meta"), ValueError, "values is on meta and patterns on cpu"),
        (torch.full((3, 2), math.inf), ValueError, "values: 3 of 3 rows hold NaN or infinity"),
    ],
)
def test_bad_values(values: object, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        HopfieldMemory(torch.ones(3, 2), values=values)


def test_what_cannot_be_done_leaves_the_memory_as_it_was(tmp_path: Path) -> None:
    keys, values = rows()
    memory = HopfieldMemory(keys, values=1e30 * values)
    with pytest.raises(ValueError, match=r"values=None: this memory has values of size 3"):
        memory.add(keys)
    with pytest.raises(ValueError, match="values have size 2 and the memory's 3"):
        memory.add(keys, values=values[:, :2])
    with pytest.raises(ValueError, match=r"values: this memory has none"):
        HopfieldMemory(keys).add(keys, values=values)
    with pytest.raises(ValueError, match=r"values: 9 of 9 rows hold NaN or infinity"):
        memory.to(torch.float16)
    assert memory.stored.dtype == memory.stored_values.dtype == torch.float64
    assert len(memory) == 9
