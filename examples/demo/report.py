"""What came out: the table, the claims and whether they were seen, and the page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape
from statistics import fmean, stdev

import pictures
from recall import Recall
from training import MENDED, METHODS, TASK, Found, Settings

from outeffhop.lab.report import Section, page, picture, table

NAMES = (*METHODS, MENDED)
COLUMNS = ("model", "largest |x|", "kurtosis", "loss", "loss in 8 bits", "copies right, %", "right in 8 bits, %")


@dataclass(frozen=True)
class Claim:
    """A sentence, whether each seed bears it out, and the numbers."""

    text: str
    holds: tuple[bool, ...]
    numbers: str

    @property
    def verdict(self) -> str:
        if all(self.holds):
            return "seen"
        return f"seen in {sum(self.holds)} of {len(self.holds)} seeds" if any(self.holds) else "not seen"


def rows(found: Sequence[Found]) -> list[tuple[str, ...]]:
    """A row for each model: the mean over its seeds, and the standard deviation if there are several."""
    fields = {"largest": 1, "kurtosis": 1, "loss": 3, "loss8": 3, "copies": 1, "copies8": 1}
    return [
        (
            name,
            *(spread([getattr(each, field) for each in of(found, name)], digits) for field, digits in fields.items()),
        )
        for name in NAMES
    ]


def numbers(found: Sequence[Found], settings: Settings) -> str:
    """Everything but the attention maps, as JSON."""
    models = [{k: v for k, v in asdict(each).items() if k not in ("maps", "ids")} for each in found]
    return json.dumps({"settings": asdict(settings), "models": models}, indent=1) + "\n"


def of(found: Sequence[Found], name: str) -> list[Found]:
    """The models of a name, by seed."""
    return sorted((each for each in found if each.name == name), key=lambda each: each.seed)


def spread(values: Sequence[float], digits: int) -> str:
    about = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{fmean(values):.{digits}f}{about}"


def claims(found: Sequence[Found], answers: Recall) -> list[Claim]:
    """What the method promises, and whether the models of each seed bear it out."""
    models = {name: of(found, name) for name in NAMES}
    pairs = list(zip(*models.values(), strict=True))  # softmax, softmax1, gated and mended, of one seed each

    def told(field: str, digits: int = 1) -> str:
        return ", ".join(
            f"{name} {fmean(getattr(each, field) for each in some):.{digits}f}" for name, some in models.items()
        )

    nothing = zip(answers.names, answers.nothing, answers.known, strict=True)
    return [
        Claim(
            "With softmax1 and gates outliers stay smaller than with softmax.",
            tuple(gated.largest < softmax.largest for softmax, _, gated, _ in pairs),
            f"largest |x|: {told('largest')}",
        ),
        Claim(
            "In 8 bits the model with softmax loses part of what it learned, the one with softmax1 and gates does not.",
            tuple(_lost(softmax) > 2 and _lost(gated) < 1 for softmax, _, gated, _ in pairs),
            f"copies right in 8 bits, of 100: {told('copies8')}",
        ),
        Claim(
            "Softmax1 alone, without gates, loses less than softmax.",
            tuple(_lost(softmax1) < _lost(softmax) for softmax, softmax1, *_ in pairs),
            f"copies right in 8 bits, of 100: {told('copies8')}",
        ),
        Claim(
            "Mended for seconds, with its outliers in the loss, the model with softmax stays right in 8 bits.",
            tuple(
                mended.largest < softmax.largest and _lost(mended) < _lost(softmax) / 4 for softmax, *_, mended in pairs
            ),
            f"copies right in 8 bits, of 100: {told('copies8')}",
        ),
        Claim(
            "None of this costs loss: it stays within 0.03 of that with softmax.",
            tuple(max(each.loss for each in others) < softmax.loss + 0.03 for softmax, *others in pairs),
            f"loss: {told('loss', 3)}",
        ),
        Claim(
            "A memory with softmax1 finds what it has stored, and answers “nothing” to what it has not.",
            (all((share < 0.5) == known for share, known in zip(answers.nothing, answers.known, strict=True)),),
            "share of nothing in the answer: " + ", ".join(f"{name} {share:.0%}" for name, share, _ in nothing),
        ),
    ]


def _lost(model: Found) -> float:
    """Percentage points of right copies that 8 bits cost."""
    return model.copies - model.copies8


def html(found: Sequence[Found], answers: Recall, settings: Settings, seconds: float, *, quick: bool = False) -> str:
    """The whole page."""
    first = [of(found, name)[0] for name in NAMES]
    judged = "\n".join(
        f'<li><span class="{_class(claim)}">{escape(claim.verdict)}</span> {escape(claim.text)}'
        f"<small>{escape(claim.numbers)}</small></li>"
        for claim in claims(found, answers)
    )
    warning = '<p class="warning">A trial run of a few steps: these numbers mean nothing.</p>' if quick else ""
    sections = [
        Section("What came out", f'<ul class="claims">{judged}</ul>' + table(COLUMNS, rows(found)), _legend(found)),
        Section(
            "Outliers over training",
            picture(pictures.growth(found), "largest |x| over training steps"),
            "The largest activation of each model as it learns. After the dotted line the softmax models are mended: "
            "trained on for seconds with the tail of their activations in the loss.",
        ),
        Section(
            "What 8 bits cost",
            picture(pictures.copies(found), "copies that are right in floating point and in 8 bits"),
            "Everything in 8 bits, weights and activations, each tensor with one range: an outlier widens the range, "
            "and all other values share the few steps that are left.",
        ),
        Section(
            "Where the weight is parked",
            picture(pictures.attention(first, TASK.triggers), "attention maps of the four models"),
            "One head of each model on the same sequence: the head that looks back. Each row is a symbol, dark is much "
            "attention. It has work at the triggers (orange), where it looks one symbol back. Elsewhere softmax must "
            "leave its attention somewhere: on the start symbol, or spread thin. Softmax1 can leave it on nothing.",
        ),
        Section(
            "A memory that can say nothing",
            picture(pictures.memory(answers), "queries and answers of two memories"),
            "The same equation as a memory of a hundred digits. Softmax answers every question with digits. "
            "Softmax1 returns nothing for what is unlike anything stored.",
        ),
    ]
    return page(
        "Outliers, 8 bits, and the attention that can do nothing", sections, warning + _head(found, settings, seconds)
    )


def _class(claim: Claim) -> str:
    return {"seen": "confirmed", "not seen": "contradicted"}.get(claim.verdict, "open")


def _legend(found: Sequence[Found]) -> str:
    count = len(of(found, NAMES[0]))
    seeds = "one seed" if count == 1 else f"mean ± standard deviation over {count} seeds"
    return (
        f"{seeds[0].upper()}{seeds[1:]}. Copies right: how often the symbol after a trigger is predicted. "
        "A Gaussian has kurtosis 3."
    )


def _head(found: Sequence[Found], settings: Settings, seconds: float) -> str:
    said = (
        "Three small language models (Llama, 3 layers, 64 wide) learn the same task. Most symbols follow at random "
        f"from the one before; after {TASK.triggers} of them, the triggers, the symbol before comes again. A head that "
        "looks back has work after a trigger and none elsewhere. With softmax its attention must go somewhere all the "
        "same; with softmax1, the attention of the Outlier-Efficient Hopfield model, it can go nowhere."
    )
    how = (
        f"{settings.steps:,} steps of {settings.batch} × {found[0].ids.size} symbols, learning rate {settings.lr:g}, "
        "no weight decay: settings chosen so that outliers grow within a minute. Mending: "
        f"{settings.mending_steps} steps at {settings.mending_lr:g}. {seconds / 60:.1f} minutes on this machine."
    )
    return f'<p>{escape(said)}</p><p class="conditions">{escape(how)}</p>'
