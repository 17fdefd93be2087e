"""The penalty on outliers: its value and gradient, and how it gets into a model's loss."""

import math

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    FalconConfig,
    FalconForCausalLM,
    LlamaConfig,
    Trainer,
    TrainingArguments,
)

from outeffhop.outliers import measure, tails
from outeffhop.outliers.penalty import OutlierPenalty
from outeffhop.outliers.tails import excess_range, excess_size, fourth_power, log_kurtosis, log_tail


def plain(x, keep=None):
    """By the definition, sample by sample."""
    found = []
    for i, sample in enumerate(x):
        sample = sample if keep is None else sample[keep[i]]
        c = sample - sample.mean()
        found.append(torch.log((c**4).mean() / (c**2).mean() ** 2))
    return torch.stack(found).mean()


def plain_tail(x, keep=None):
    found = []
    for i, sample in enumerate(x):
        sample = sample if keep is None else sample[keep[i]]
        found.append(torch.log((sample**4).mean() / sample.abs().mean() ** 4))
    return torch.stack(found).mean()


def plain_range(x, keep=None, free=1.0):
    found = []
    for i, sample in enumerate(x):
        sample = sample if keep is None else sample[keep[i]]
        r = torch.log((sample**8).mean() / sample.abs().mean() ** 8) / 2
        found.append((r - free).clamp(min=0) ** 2)
    return torch.stack(found).mean()


def ranges(x, keep=None):
    """So low that the small tensors here are not free."""
    return excess_range(x, keep, free=1.0)


def plain_size(x, keep=None, free=1.0, size=1.5):
    found = []
    for i, sample in enumerate(x):
        sample = sample if keep is None else sample[keep[i]]
        r = torch.log((sample**8).mean() / sample.abs().mean().clamp(max=size) ** 8) / 2
        found.append((r - free).clamp(min=0) ** 2)
    return torch.stack(found).mean()


def sizes(x, keep=None):
    """Of the samples below, some are larger on average and some are not."""
    return excess_size(x, keep, free=1.0, size=1.5)


def plain_fourth(x, keep=None, scale=3.0):
    return ((x if keep is None else x[keep]) / scale).pow(4).mean()


MASK = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [0, 0, 1, 1, 0]], dtype=torch.bool)


@pytest.mark.parametrize(
    ("function", "truth"),
    [
        (log_kurtosis, plain),
        (log_tail, plain_tail),
        (ranges, plain_range),
        (sizes, plain_size),
        (fourth_power, plain_fourth),
    ],
)
@pytest.mark.parametrize("keep", [None, MASK])
def test_value_and_gradient_are_those_of_the_definition(function, truth, keep):
    torch.manual_seed(0)
    x = (torch.randn(3, 5, 7, dtype=torch.float64) ** 3 + 0.5).requires_grad_()
    ours, theirs = function(x, keep), truth(x, keep)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(torch.autograd.grad(ours, x), torch.autograd.grad(theirs, x))


@pytest.mark.parametrize("keep", [None, MASK])
def test_compiled_by_itself_as_on_a_gpu(keep, monkeypatch):
    monkeypatch.setattr(tails, "_fused", lambda function, _: torch.compile(function, dynamic=True))
    torch.manual_seed(0)
    for length in (5, 5, 7):  # the second length compiles for any
        x = (torch.randn(3, length, 7) ** 3 + 0.5).requires_grad_()
        mask = None if keep is None else torch.nn.functional.pad(keep, (0, length - 5))
        ours, theirs = log_tail(x, mask), plain_tail(x, mask)
        torch.testing.assert_close(ours, theirs)
        torch.testing.assert_close(torch.autograd.grad(ours, x), torch.autograd.grad(theirs, x))


@pytest.mark.parametrize("function", [log_kurtosis, log_tail, ranges, sizes, fourth_power])
def test_gradcheck(function):
    torch.manual_seed(0)
    x = torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: function(x, MASK[:2]), x)


def test_log_tail_has_a_gradient_where_log_kurtosis_is_at_its_maximum():
    """Beside one value that outweighs all others together, as in the first token of many language models."""
    torch.manual_seed(0)
    x = torch.randn(1, 8, 16, dtype=torch.float64)
    x[0, 0, 3] = 1e4
    slopes = {}
    for function in (log_kurtosis, log_tail):
        given = x.clone().requires_grad_()
        function(given).backward()
        slopes[function] = given.grad[0, 0, 3].item() * 1e4  # by how much it falls with a small share of the value
    assert slopes[log_kurtosis] < 1e-3
    assert slopes[log_tail] == pytest.approx(4 * (1 - 1e4 / x.abs().sum().item()), rel=1e-6)
    largest = x.numel() - 2 + 1 / (x.numel() - 1)  # of one value beside equal ones
    assert log_kurtosis(x).item() == pytest.approx(math.log(largest), abs=1e-4)


def test_a_gaussian_has_log_7_4():
    torch.manual_seed(0)
    assert log_tail(torch.randn(4, 256, 256)).item() == pytest.approx(math.log(3 * (math.pi / 2) ** 2), abs=0.01)


def test_what_is_free():
    torch.manual_seed(0)
    x = torch.randn(2, 8, 64, dtype=torch.float64)
    x[0, 0, 0], x[1, 0, 0] = 14.0, 1e3  # far enough out that both samples cost
    torch.testing.assert_close(excess_range(x), plain_range(x, free=5.0))
    assert excess_range(x[:1]) > 0


def test_a_size_costs_only_beyond_a_mean_of_ten():
    torch.manual_seed(0)
    x = torch.randn(2, 8, 64, dtype=torch.float64)
    x[0, 0, 0], x[1, 0, 0] = 14.0, 1e3
    torch.testing.assert_close(excess_size(x), excess_range(x))
    gaussian = torch.randn(1, 64, 64)
    assert excess_size(10 * gaussian) == 0  # a mean size of 8
    large = (200 * gaussian).requires_grad_()
    assert excess_range(large) == 0
    excess_size(large).backward()
    assert (large.grad * large > 0).all()  # every value is pressed towards 0, as its power is


@pytest.mark.parametrize("function", [log_kurtosis, log_tail])
def test_a_gradient_of_the_gradient_is_refused_since_it_would_be_wrong(function):
    x = torch.randn(2, 5, 3, requires_grad=True)
    (gradient,) = torch.autograd.grad(function(x), x, create_graph=True)
    with pytest.raises(RuntimeError, match="does not require grad"):
        gradient.sum().backward()


def test_a_gaussian_is_free_and_one_value_in_300_000_is_not():
    torch.manual_seed(0)
    x = torch.randn(1, 512, 586)
    assert (excess_range(x, free=0.0).sqrt()).item() == pytest.approx(3.23, abs=0.1)
    x[0, 0, 0] = 17 * x.abs().mean()
    assert (excess_range(x, free=0.0).sqrt()).item() == pytest.approx(5, abs=0.1)
    assert excess_range(x) < 0.01
    x[0, 0, 0] *= 10
    x.requires_grad_()
    excess_range(x).backward()
    assert x.grad.abs().argmax() == 0
    assert x.grad[0, 0, 0] > 0


@pytest.mark.parametrize("function", [log_kurtosis, log_tail, excess_range])
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_no_scale_matters_and_none_overflows(function, scale):
    torch.manual_seed(0)
    x = torch.randn(2, 9, 16)
    x[0, 3, 5] = 100_000.0
    scaled = (x * scale).requires_grad_()
    value = function(scaled)
    assert value.item() == pytest.approx(function(x.double()).item(), rel=1e-5)
    (gradient,) = torch.autograd.grad(value, scaled)
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("keep", [None, torch.arange(100).expand(3, 100) < torch.tensor([[100], [63], [9]])])
@pytest.mark.parametrize("mean", [0.0, 300.0])
def test_float32_holds_beside_large_outliers(keep, mean):
    """A few values of 26,000 beside 1, as trained language models have them."""
    torch.manual_seed(0)
    x = torch.randn(3, 100, 63) + mean
    x[:, 0, 5], x[1, 7, 40] = 26_000.0, -18_000.0
    x.requires_grad_()
    exact = x.detach().double().requires_grad_()
    ours, theirs = log_kurtosis(x, keep), plain(exact, keep)
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-6, atol=0.0)
    (found,), (truth,) = torch.autograd.grad(ours, x), torch.autograd.grad(theirs, exact)
    for i, sample in enumerate(exact.detach()):
        counted = torch.ones(100, dtype=torch.bool) if keep is None else keep[i]
        sample = sample[counted]
        c = sample - sample.mean()
        m2, m3, m4 = ((c**power).mean() for power in (2, 3, 4))
        # the terms cancel in the outliers themselves, so their size is the measure of rounding
        terms = (c.abs() ** 3 + m3.abs()) / m4 + (c.abs() + sample.mean().abs()) / m2
        bound = 1e-6 * 4 / (3 * c.numel()) * terms
        assert ((found[i][counted] - truth[i][counted]).abs() <= bound).all()
        assert not found[i][~counted].any()


def test_backward_keeps_the_tensor_itself_and_numbers_per_sample():
    x, kept = torch.randn(3, 5, 7, requires_grad=True), []

    def keep(tensor):
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        log_kurtosis(x, MASK)
    assert sum(tensor.data_ptr() == x.data_ptr() for tensor in kept) == 1
    assert all(tensor.numel() in (len(x), MASK.numel()) for tensor in kept if tensor.data_ptr() != x.data_ptr())


def test_half_precision_gets_its_own_gradient_dtype():
    x = torch.randn(2, 9, 16).bfloat16().requires_grad_()
    value = log_kurtosis(x)
    assert value.dtype == torch.float32
    value.backward()
    assert x.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("constant", [0.0, 5.0])
def test_a_constant_sample_adds_nothing(constant):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 4)
    x[1] = constant
    x.requires_grad_()
    value = log_kurtosis(x)
    torch.testing.assert_close(value, log_kurtosis(x[:1]) / 2)
    value.backward()
    assert torch.equal(x.grad[1], torch.zeros(3, 4))
    assert x.grad[0].abs().min() > 0


def test_a_sample_of_padding_alone_adds_nothing():
    x = torch.randn(2, 5, 4, requires_grad=True)
    keep = torch.tensor([[True] * 5, [False] * 5])
    value = log_kurtosis(x, keep)
    torch.testing.assert_close(value, log_kurtosis(x[:1]) / 2)
    value.backward()
    assert torch.equal(x.grad[1], torch.zeros(5, 4))


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, vocab_size=50
    )
    return AutoModelForCausalLM.from_config(config).train()


IDS = torch.randint(50, (4, 12), generator=torch.Generator().manual_seed(0))


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return [p.grad.clone() for p in model.parameters()]


def by_hand(model, weight, kind=plain):
    """The loss with the penalty, from outputs collected apart."""
    seen = {}
    chosen = [t.name for t in measure(model, [{"input_ids": IDS}]).tensors]
    handles = [
        m.register_forward_hook(
            lambda _, args, out, n=n: seen.__setitem__(n, out[0] if isinstance(out, tuple) else out)
        )
        for n, m in model.named_modules()
        if n in chosen
    ]
    loss = model(input_ids=IDS, labels=IDS).loss
    for handle in handles:
        handle.remove()
    assert set(seen) == set(chosen)
    return loss + weight * torch.stack([kind(x) for x in seen.values()]).mean()


@pytest.mark.parametrize(("kind", "truth"), [("log_kurtosis", plain), ("fourth_power", plain_fourth)])
def test_the_loss_contains_the_mean_over_what_measure_watches(model, kind, truth):
    expected = by_hand(model, 0.3, truth)
    wanted = gradients(model, expected)
    penalty = OutlierPenalty(model, 0.3, kind=kind)
    loss = model(input_ids=IDS, labels=IDS).loss
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradients(model, loss), wanted, rtol=1e-4, atol=1e-6)
    assert penalty.value == pytest.approx(penalty.term().item() / 0.3)


def test_evaluation_and_removal_leave_the_model_as_it_was(model):
    before = model(input_ids=IDS, labels=IDS).loss
    penalty = OutlierPenalty(model, 0.3)
    model.eval()
    assert torch.equal(model(input_ids=IDS, labels=IDS).loss, before)
    assert math.isnan(penalty.value)
    model.train()
    assert model(input_ids=IDS, labels=IDS).loss > before
    penalty.remove()
    assert torch.equal(model(input_ids=IDS, labels=IDS).loss, before)


def test_gradient_checkpointing_changes_nothing(model):
    OutlierPenalty(model, 0.3)
    plainly = gradients(model, model(input_ids=IDS, labels=IDS).loss)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    torch.testing.assert_close(gradients(model, model(input_ids=IDS, labels=IDS, use_cache=False).loss), plainly)


def test_compiled_whole(model):
    OutlierPenalty(model, 0.3)
    loss = model(input_ids=IDS, labels=IDS).loss
    eager = gradients(model, loss)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    again = compiled(input_ids=IDS, labels=IDS).loss
    torch.testing.assert_close(again, loss)
    torch.testing.assert_close(gradients(model, again), eager)


def test_autocast(model):
    OutlierPenalty(model, 0.3)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(input_ids=IDS, labels=IDS).loss
    assert all(torch.isfinite(g).all() for g in gradients(model, loss))


def test_parts_of_a_step_add_up_to_the_whole(model):
    """As Trainer does it: each part's loss is divided by the tokens of the whole step."""
    OutlierPenalty(model, 0.3)
    whole = gradients(model, model(input_ids=IDS, labels=IDS).loss)
    model.zero_grad()
    for half in IDS.chunk(2):
        model(input_ids=half, labels=half, num_items_in_batch=torch.tensor(IDS[:, 1:].numel())).loss.backward()
    parts = [p.grad for p in model.parameters()]
    # a sample's kurtosis is its own, so that halves of equal size average to the whole
    torch.testing.assert_close(parts, whole)


def test_of_several_tensors_the_first_counts():
    class Pair(nn.Linear):
        def forward(self, x):
            return super().forward(x), torch.ones(3, 5, 7)

    class Model(nn.Sequential):
        def forward(self, x):
            return {"loss": self[0](x)[0].sum()}

    torch.manual_seed(0)
    model, x = Model(Pair(4, 7)).train(), torch.randn(3, 5, 4)
    penalty = OutlierPenalty(model, 0.5, tensors=["0"])
    model(x)
    assert penalty.value == pytest.approx(plain_tail(model[0](x)[0]).item(), rel=1e-5)


def test_padding_is_left_out():
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, vocab_size=50,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = AutoModelForMaskedLM.from_config(config).train()
    penalty = OutlierPenalty(model, 0.3)
    model(input_ids=IDS[:1, :7])
    alone = penalty.value
    padded = nn.functional.pad(IDS[:1, :7], (0, 5))
    model(input_ids=padded, attention_mask=(torch.arange(12) < 7).long()[None])
    assert penalty.value == pytest.approx(alone, rel=1e-4)
    model(input_ids=padded)
    assert penalty.value != pytest.approx(alone, rel=1e-4)


@pytest.mark.parametrize("tensors", ["paper", "all"])
def test_an_encoder_and_a_decoder_have_padding_of_their_own(tensors):
    torch.manual_seed(0)
    sizes = dict(d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2)
    more = dict(encoder_ffn_dim=16, decoder_ffn_dim=16, vocab_size=60, max_position_embeddings=16, dropout=0.0)
    model = BartForConditionalGeneration(BartConfig(**sizes, **more)).train()
    if tensors == "all":
        tensors = ["model.*coder.layers.*"]  # with what cross attention reads
    penalty = OutlierPenalty(model, 0.3, tensors=tensors)
    whole = {"input_ids": IDS[:1, :4], "decoder_input_ids": IDS[:1, 4:7]}
    model(**whole)
    alone = penalty.value
    padded = {k: nn.functional.pad(v, (0, 6 - v.shape[1])) for k, v in whole.items()}  # equally long
    for name, ids in whole.items():
        mask = nn.functional.pad(torch.ones_like(ids), (0, 6 - ids.shape[1]))
        padded[name.replace("input_ids", "attention_mask")] = mask
    model(**padded)
    assert penalty.value == pytest.approx(alone, rel=1e-5)


def test_a_model_that_changes_its_tensors_in_place(monkeypatch):
    """Falcon adds the output of its attention to that of its MLP in place."""
    torch.manual_seed(0)
    config = FalconConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=50)
    model = FalconForCausalLM(config).train()
    tensors = [name for name, _ in model.named_modules() if name.endswith(".mlp")]
    kept = []

    def keep(module, args, out):
        kept.append(out.clone())
        return kept[-1].clone()

    hooks = [model.get_submodule(name).register_forward_hook(keep) for name in tensors]
    model(input_ids=IDS)
    torch.stack([plain_tail(x) for x in kept]).mean().backward()
    truth = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    for hook in hooks:
        hook.remove()
    penalty = OutlierPenalty(model, 1.0, tensors=tensors)
    for _ in range(2):  # it finds out in the first forward
        model.zero_grad()
        model(input_ids=IDS)
        penalty.term().backward()
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        torch.testing.assert_close(found, truth, rtol=1e-3, atol=1e-5)


class Repeated(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        ids = IDS[index % len(IDS)]
        return {"input_ids": ids, "labels": ids}


def test_a_trainer_removes_planted_outliers(model, tmp_path):
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[5] *= 200
    found = {}
    for weight in (0.0, 0.3):
        torch.manual_seed(0)
        copy = AutoModelForCausalLM.from_config(model.config).train()
        copy.load_state_dict(model.state_dict())
        penalty = OutlierPenalty(copy, weight, warmup_steps=3)
        arguments = TrainingArguments(
            str(tmp_path / str(weight)), max_steps=40, per_device_train_batch_size=4, learning_rate=3e-3,
            report_to=[], logging_steps=1, use_cpu=True, disable_tqdm=True, save_strategy="no",
        )  # fmt: skip
        trainer = Trainer(copy, arguments, train_dataset=Repeated(), callbacks=[penalty.callback()])
        trainer.train()
        assert penalty.weight == weight
        assert all("outlier_penalty" in line for line in trainer.state.log_history if "loss" in line)
        penalty.remove()
        found[weight] = measure(copy.eval(), [{"input_ids": IDS}]).avg_kurtosis
    assert found[0.3] < 0.5 * found[0.0]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"weight": -1.0}, "weight=-1.0"),
        ({"weight": math.inf}, "weight=inf"),
        ({"kind": "kurtosis"}, "kind='kurtosis'.*log_kurtosis"),
        ({"warmup_steps": -1}, "warmup_steps=-1"),
        ({"tensors": ["nothing"]}, "'nothing'"),
    ],
)
def test_wrong_arguments_are_refused_by_name(model, given, words):
    with pytest.raises(ValueError, match=words):
        OutlierPenalty(model, **given)
    assert not model._forward_pre_hooks
