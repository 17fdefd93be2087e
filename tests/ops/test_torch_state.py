"""Every private fact about PyTorch's state that ops/torch_state.py asks for, held to what PyTorch does."""

import warnings

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from outeffhop.ops import torch_state

X = torch.ones(3)


class Spy(nn.Module):
    """Notes what a function says while PyTorch runs or traces the module."""

    def __init__(self, ask):
        super().__init__()
        self.ask, self.said = ask, []

    def forward(self, x):
        self.said.append(self.ask())
        return x + 1


def test_exporting_is_not_compiling():
    class Asks(nn.Module):
        def forward(self, x):
            return x + (1 if torch_state.is_exporting() else 2)

    assert torch.equal(Asks()(X), X + 2)
    assert torch.equal(torch.compile(Asks(), backend="eager", fullgraph=True)(X), X + 2)
    assert torch.equal(torch.export.export(Asks(), (X,)).module()(X), X + 1)


def test_the_older_onnx_export_counts_as_well(tmp_path):
    spy = Spy(torch_state.is_exporting)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(spy, (X,), str(tmp_path / "x.onnx"), dynamo=False)
    assert True in spy.said


def test_transforms():
    assert not torch_state.is_transformed()
    seen = []

    def note(x):
        seen.append(torch_state.is_transformed())
        return x.sum()

    torch.func.grad(note)(X)
    torch.func.vmap(note)(X[None])
    with forward_ad.dual_level():
        note(forward_ad.make_dual(X, X))
    assert seen == [True, True, True]
    assert not torch_state.is_transformed()


def test_concrete_tensors_can_be_read():
    assert torch_state.is_concrete(X)
    with torch._subclasses.FakeTensorMode() as mode:
        assert not torch_state.is_concrete(mode.from_tensor(X))
    seen = []
    torch.func.vmap(lambda x: seen.append(torch_state.is_concrete(x)) or x)(X)
    assert seen == [False]


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Subclass(torch.Tensor):
    pass


def test_plain_calls():
    assert torch_state.is_plain(X, nn.Parameter(X))
    assert not torch_state.is_plain(X.as_subclass(Subclass))
    with Watching():
        assert not torch_state.is_plain(X)
    said = []
    torch.jit.trace(lambda x: said.append(torch_state.is_plain(x)) or x + 1, X, check_trace=False)
    assert said == [False]


def test_below_autograd_nothing_is_recorded():
    x = X.clone().requires_grad_()
    assert (x * 2).requires_grad
    assert not torch_state.below_autograd(torch.ops.aten.mul.Tensor, (x, x)).requires_grad


def test_a_constant_is_marked_as_torch_compile_marks_it():
    def ours():
        return 1

    def theirs():
        return 1

    torch_state.constant(ours)
    torch.compiler.assume_constant_result(theirs)
    assert vars(ours) == vars(theirs)


def test_what_autograd_saves():
    assert torch_state.saves_unchanged()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        assert not torch_state.saves_unchanged()
    with torch.autograd.graph.save_on_cpu():
        assert not torch_state.saves_unchanged()

    def note(x):
        said.append(torch_state.saves_unchanged())
        return x.sin()

    said = []
    checkpoint(note, X.clone().requires_grad_(), use_reentrant=False).sum().backward()
    assert said == [False, False]
    assert torch_state.saves_unchanged()


def test_autocast_of_any_device():
    assert not torch_state.is_autocast_anywhere()
    for device in ("cpu", "cuda"):
        with torch.autocast(device, torch.bfloat16), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # no such device
            assert torch_state.is_autocast_anywhere() == torch.is_autocast_enabled(device)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch_state.is_autocast_anywhere()
    assert not torch_state.is_autocast_anywhere()
