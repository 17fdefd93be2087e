"""OutEffHop where PyTorch's transformer layers had their attention; training in one and in two processes."""

import copy

import pytest
import torch
import torch.multiprocessing as mp
from torch import nn

from outeffhop.nn import OutEffHop, OutEffHopDecoderLayer, OutEffHopEncoderLayer


def _as_vanilla(ours, theirs):
    """Our layer with the weights of theirs."""
    for name, module in theirs.named_children():
        if isinstance(module, nn.MultiheadAttention):
            getattr(ours, name).load_state_dict(OutEffHop.from_multihead(module, "vanilla").state_dict())
        else:
            getattr(ours, name).load_state_dict(module.state_dict())
    return ours


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_vanilla_layers_are_pytorchs(norm_first, training):
    torch.manual_seed(0)
    options = dict(dim_feedforward=16, dropout=0.0, batch_first=True, norm_first=norm_first, dtype=torch.float64)
    x, memory = torch.randn(2, 5, 8, dtype=torch.float64), torch.randn(2, 7, 8, dtype=torch.float64)
    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[1, 3:] = True
    causal = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    theirs = nn.TransformerEncoderLayer(8, 2, **options).train(training)
    ours = _as_vanilla(OutEffHopEncoderLayer(8, 2, method="vanilla", **options), theirs).train(training)
    for arguments in ({}, {"src_key_padding_mask": padding}, {"src_mask": causal, "is_causal": True}):
        with torch.set_grad_enabled(training):  # eval without gradients is where PyTorch takes its fast path
            expected, found = theirs(x, **arguments), ours(x, **arguments)
        keep = ~padding if "src_key_padding_mask" in arguments else torch.ones_like(~padding)
        torch.testing.assert_close(found[keep], expected[keep])
    theirs_decoder = nn.TransformerDecoderLayer(8, 2, **options).train(training)
    ours_decoder = _as_vanilla(OutEffHopDecoderLayer(8, 2, method="vanilla", **options), theirs_decoder).train(training)
    found = ours_decoder(x, memory, tgt_mask=causal, tgt_is_causal=True, tgt_key_padding_mask=None)
    torch.testing.assert_close(found, theirs_decoder(x, memory, tgt_mask=causal, tgt_is_causal=True))


def test_the_fast_path_of_pytorch_does_not_bypass_the_method():
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(
        OutEffHopEncoderLayer(8, 2, 16, batch_first=True), 2, enable_nested_tensor=True
    ).eval()
    x = torch.randn(2, 5, 8)
    with torch.no_grad():
        fast = encoder(x)
    torch.testing.assert_close(fast, encoder(x))
    swapped = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    swapped.self_attn = OutEffHop(8, 2, batch_first=True)
    with torch.no_grad():
        fast = swapped(x)
    torch.testing.assert_close(fast, swapped(x))


@pytest.mark.parametrize("method", ["outeffhop", "gated-outeffhop", "clipped", "gsh", "outeffhop(sink=learned)"])
def test_an_encoder_learns(method):
    torch.manual_seed(0)
    layer = OutEffHopEncoderLayer(
        16, 4, 32, dropout=0.0, batch_first=True, method=method, hopfield={"learn_beta": True}
    )
    head = nn.Linear(16, 1)
    x = torch.randn(32, 6, 16)
    target = x[:, :, 0].amax(1, keepdim=True)  # which needs a look at all tokens
    optimizer = torch.optim.Adam([*layer.parameters(), *head.parameters()], lr=1e-2)
    losses = []
    for _ in range(40):
        loss = (head(layer(x).mean(1)) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]
    assert all(p.grad is not None for p in layer.parameters())


def _train(rank, world, address, out):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=world)
    torch.manual_seed(0)
    layer = OutEffHopEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, method="gated-outeffhop(sink=learned)")
    model = nn.parallel.DistributedDataParallel(layer.double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randn(8, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        optimizer.zero_grad()
        model(data.chunk(world)[rank]).square().mean().backward()
        optimizer.step()
    if rank == 0:
        torch.save(layer.state_dict(), out)
    # in this order: what communicates goes before the group it communicates in, and no rank leaves another waiting
    del model, optimizer
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def test_two_processes_train_as_one(tmp_path):
    states = []
    for world in (1, 2):
        out = tmp_path / f"{world}.pt"
        mp.spawn(_train, (world, f"file://{tmp_path}/meet{world}", out), nprocs=world)
        states.append(torch.load(out, weights_only=True))
    torch.manual_seed(0)
    fresh = (
        OutEffHopEncoderLayer(8, 2, 16, batch_first=True, method="gated-outeffhop(sink=learned)").double().state_dict()
    )
    for name, one in states[0].items():
        torch.testing.assert_close(states[1][name], one, atol=1e-10, rtol=1e-8)
    moved = [name for name in fresh if not torch.equal(fresh[name], states[0][name])]
    assert {"self_attn.state.gate.weight", "self_attn.state.sink", "self_attn.q_proj.weight"} <= set(moved)


def test_layers_can_be_copied_into_an_encoder():
    layer = OutEffHopEncoderLayer(8, 2, 16, batch_first=True, method="gated")
    encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    assert len(encoder.layers) == 3
    assert copy.deepcopy(encoder)(torch.randn(2, 5, 8)).shape == (2, 5, 8)
