"""The penalty over two processes, copied (DDP) or sharded (FSDP): the gradients of one process on the whole batch."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, LlamaConfig

from outeffhop.lab.training.sharding import shard
from outeffhop.outliers.penalty import OutlierPenalty

IDS = torch.randint(50, (8, 12), generator=torch.Generator().manual_seed(0))
TOKENS = torch.tensor(IDS[:, 1:].numel())
WORLD = 2


def built():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, vocab_size=50
    )
    model = AutoModelForCausalLM.from_config(config).double().train()
    with torch.no_grad():  # an outlier, so that the penalty has something to say
        model.model.layers[0].mlp.down_proj.weight[5] *= 30
    return model


def gradients(model):
    full = [(name, p.grad) for name, p in model.named_parameters()]
    return {name: (g.full_tensor() if hasattr(g, "full_tensor") else g).clone() for name, g in full}


def copied(checkpointing, parts):
    """The gradients of one rank's share with DDP; Trainer's way of adding up parts of a step."""
    model = built()
    OutlierPenalty(model, 0.3)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    wrapped = DistributedDataParallel(model)
    share = list(IDS.chunk(WORLD)[dist.get_rank()].chunk(parts))
    for part in share[:-1]:
        with wrapped.no_sync():
            backward(wrapped, part)
    backward(wrapped, share[-1])
    return gradients(model)


def backward(model, part):
    # the loss of all tokens of the step; DDP divides by the number of processes
    (model(input_ids=part, labels=part, num_items_in_batch=TOKENS, use_cache=False).loss * WORLD).backward()


def sharded(checkpointing):
    model = built()
    OutlierPenalty(model, 0.3)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    shard(model, torch.device("cpu"), "fp32")
    part = IDS.chunk(WORLD)[dist.get_rank()]
    model(input_ids=part, labels=part, use_cache=False).loss.backward()
    return gradients(model)


def work(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=WORLD)
    found = {
        "copied": copied(False, 1),
        "copied, in two parts": copied(False, 2),
        "copied, checkpointing": copied(True, 1),
        "sharded": sharded(False),
        "sharded, checkpointing": sharded(True),
    }
    if rank == 0:
        torch.save(found, f"{folder}/found.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    mp.spawn(work, (str(folder),), nprocs=WORLD)
    return torch.load(folder / "found.pt", weights_only=True)


@pytest.fixture(scope="module")
def whole():
    """The gradients of one process, with the penalty and without it."""
    both = []
    for weight in (0.3, 0.0):
        model = built()
        OutlierPenalty(model, weight)
        model(input_ids=IDS, labels=IDS).loss.backward()
        both.append(gradients(model))
    return both


def test_the_penalty_is_seen_at_all(whole):
    with_it, without = (gradients["model.layers.0.mlp.down_proj.weight"][5] for gradients in whole)
    assert (with_it - without).abs().max() > 1e-3


@pytest.mark.parametrize(
    "how", ["copied", "copied, in two parts", "copied, checkpointing", "sharded", "sharded, checkpointing"]
)
def test_two_processes_have_the_gradients_of_one(found, whole, how):
    assert found[how].keys() == whole[0].keys()
    for name, expected in whole[0].items():
        torch.testing.assert_close(found[how][name], expected, rtol=1e-7, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")
