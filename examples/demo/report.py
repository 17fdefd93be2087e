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
COLUMNS = ("model", "largest |x|", "kurtosis", "loss", "in 8 bits", "copies right, %", "in 8 bits")


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
    softmax, softmax1, gated, mended = (of(found, name) for name in NAMES)

    def mean(models: Sequence[Found], field: str, digits: int = 1) -> str:
        return f"{fmean(getattr(each, field) for each in models):.{digits}f}"

    def lost(each: Found) -> float:
        return each.copies - each.copies8

    def losing(models: Sequence[Found]) -> str:
        return f"{fmean(map(lost, models)):.1f}"

    pairs = list(zip(softmax, softmax1, gated, mended, strict=True))
    return [
        Claim(
            "Softmax grows outliers, softmax1 smaller ones, softmax1 with gates the smallest.",
            tuple(a.largest > b.largest > c.largest for a, b, c, _ in pairs),
            f"largest |x| {mean(softmax, 'largest')}, {mean(softmax1, 'largest')}, {mean(gated, 'largest')}",
        ),
        Claim(
            "In 8 bits softmax forgets part of what it learned, and softmax1 with gates keeps it.",
            tuple(lost(a) > 1 and lost(c) < lost(a) / 2 for a, _, c, _ in pairs),
            f"points lost, of 100: {losing(softmax)} with softmax, {losing(softmax1)} with softmax1, "
            f"{losing(gated)} with gates",
        ),
        Claim(
            "A model that was trained with softmax is mended in seconds, without changing its architecture.",
            tuple(d.largest < a.largest and lost(d) < max(lost(a) / 2, 1) for a, _, _, d in pairs),
            f"largest |x| {mean(softmax, 'largest')} → {mean(mended, 'largest')}; "
            f"right in 8 bits {mean(softmax, 'copies8')} → {mean(mended, 'copies8')} %",
        ),
        Claim(
            "None of this costs loss.",
            tuple(max(b.loss, c.loss, d.loss) < a.loss + 0.03 for a, b, c, d in pairs),
            ", ".join(
                f"{name} {mean(models, 'loss', 3)}"
                for name, models in zip(NAMES, (softmax, softmax1, gated, mended), strict=True)
            ),
        ),
        Claim(
            "A memory with softmax1 finds what it knows, and answers “nothing” to what it does not.",
            (all((share < 0.5) == known for share, known in zip(answers.nothing, answers.known, strict=True)),),
            "weight of nothing: "
            + ", ".join(
                f"{name} {100 * share:.0f} %" for name, share in zip(answers.names, answers.nothing, strict=True)
            ),
        ),
    ]


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
            "put the weight somewhere, and softmax1 can put it on nothing.",
        ),
        Section(
            "A memory that can say nothing",
            picture(pictures.memory(answers), "queries and answers of two memories"),
            "The same equation as a memory of a hundred digits. Softmax answers every question with some digit. "
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
        "from the one before; after four of them, the triggers, the symbol before comes again. So a head that looks "
        "back has work after a trigger and none elsewhere. With softmax its attention must go somewhere all the same; "
        "with softmax1, the attention of the Outlier-Efficient Hopfield model, it can go nowhere."
    )
    how = (
        f"{settings.steps:,} steps of {settings.batch} × {found[0].ids.size} symbols, learning rate {settings.lr:g}, "
        f"no weight decay; mending {settings.mending_steps} steps; {seconds / 60:.1f} minutes on this machine."
    )
    return f'<p>{escape(said)}</p><p class="conditions">{escape(how)}</p>'
