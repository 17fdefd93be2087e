"""Table 2: forecasts and outliers of STanHop-Net with four kinds of Hopfield layers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import isnan
from pathlib import Path
from statistics import mean
from typing import Any

from outeffhop.lab.paper import drawing, published
from outeffhop.lab.paper.experiment import (
    Cell,
    Experiment,
    Figure,
    Result,
    Settings,
    Table,
    Values,
    Verdict,
    VerdictWord,
    chosen,
    group_by,
)
from outeffhop.lab.paper.ranking import entry_text, mean_std, places, surplus
from outeffhop.lab.paper.trained_models import measured
from outeffhop.lab.paper.training_runs import finished, folders_of, run_config, seeds_measured, steps_of, steps_said
from outeffhop.lab.training import Result as RunResult
from outeffhop.lab.training import RunConfig
from outeffhop.lab.training.recipes import resolve

__all__ = ["EXPERIMENT", "config_of", "cut", "cut_verdict", "top_two", "top_two_verdict"]

FIELDS = {"mse": "MSE", "mae": "MAE", "kurtosis": "avg kurtosis", "inf_norm": "max inf norm"}
FILES = {"ETTh1": "ett/ETTh1.csv", "ETTm1": "ett/ETTm1.csv", "WTH": "wth/WTH.csv", "synthetic": "builtin:series"}
# data, rows given, rows forecast, rows of a segment, the paper's learning rate
WINDOWS = (
    ("ETTh1", 168, 24, 6, 1e-4),
    ("ETTh1", 168, 48, 6, 1e-4),
    ("ETTh1", 720, 168, 24, 1e-5),
    ("ETTh1", 720, 336, 24, 1e-5),
    ("ETTh1", 720, 720, 24, 1e-5),
    ("ETTm1", 288, 24, 12, 1e-4),
    ("ETTm1", 288, 48, 6, 1e-4),
    ("ETTm1", 672, 96, 12, 1e-4),
    ("ETTm1", 672, 288, 24, 1e-5),
    ("ETTm1", 672, 672, 12, 1e-5),
    ("WTH", 48, 24, 4, 1e-4),
    ("WTH", 48, 48, 4, 1e-4),
    ("WTH", 336, 168, 24, 1e-5),
    ("WTH", 336, 336, 24, 1e-5),
    ("WTH", 720, 720, 24, 1e-5),
)
_TINY = (("synthetic", 48, 24, 6, 1e-3), ("synthetic", 48, 48, 6, 1e-3))

# how the kept cells were measured that have no best step
_EARLIER = "† by an earlier stopping rule: the last weights, patience in evaluations of 1,024 windows every 22 steps."

Numbers = Mapping[tuple[str, int, str], Mapping[str, float]]  # (data, horizon, method) → field → mean over seeds
Seeds = Mapping[tuple[str, int, str], Sequence[Mapping[str, float]]]  # the same, a list over seeds


def cells(settings: Settings) -> list[Cell]:
    small = settings.scale == "tiny" or settings.quick
    recipe = resolve(RunConfig(model="stanhop", preset=settings.scale, data="any")).train
    length = {"steps": steps_of("stanhop", settings)} if small else {"epochs": recipe.epochs}
    found = []
    for seed in range(settings.seeds):  # the first seed of everything first, for a complete table early
        for data, in_len, out_len, seg_len, lr in _TINY if settings.scale == "tiny" else WINDOWS:
            for method in published.FORECASTERS:
                asked: Values = {"data": data, "in_len": in_len, "out_len": out_len, "seg_len": seg_len}
                asked |= {"method": method, "seed": seed, "lr": lr if settings.scale == "paper" else None}
                earlier = asked | {"steps": 455} if settings.scale == "small" and not small else None
                found.append(Cell(f"{data}-{out_len}-{method}-{seed}", asked | length, earlier))
    return found


def config_of(cell: Cell, settings: Settings) -> RunConfig:
    """The run of a cell."""
    asked = cell.values
    lengths = {name: asked[name] for name in ("in_len", "out_len")}
    batch = {"batch_size": 64} if settings.scale == "paper" and asked["data"] != "ETTh1" else {}
    return run_config(
        settings,
        "stanhop",
        asked["method"],
        asked["seed"],
        group="table2",
        data=FILES[asked["data"]],
        name=f"{asked['data']}-{asked['out_len']}",
        train={"max_steps": asked.get("steps"), "epochs": asked.get("epochs"), "lr": asked["lr"], **batch},
        changes={**lengths, "seg_len": asked["seg_len"]},
        samples=lengths,
    )


def measure(cell: Cell, settings: Settings) -> Values:
    config = config_of(cell, settings)
    run = finished(config, settings)
    ended = RunResult.load(run.path / "result.json")
    return {**measured(config, settings, "test"), "best_step": ended.best_step, "patience": config.train.patience}


def conclude(found: dict[str, Values], settings: Settings, folder: Path) -> Result:
    runs = _comparable(group_by(cells(settings), found, "data", "out_len", "method"))
    every = [run for several in runs.values() for run in several]
    seeds: Seeds = {key: [_numbers(run) for run in several] for key, several in runs.items()}
    means = {key: {f: mean(v[f] for v in values) for f in FIELDS} for key, values in seeds.items()}
    fewest = min((len(values) for values in seeds.values()), default=0)
    earlier = {key[:2] for key, several in runs.items() if not all(map(_is_current, several))}
    _draw(means, folder)
    return EXPERIMENT.result(
        [_table(seeds, earlier), _counts(means, earlier)],
        [
            Figure(
                "horizons",
                "Forecasts and outliers over the horizon",
                "Solid: ours; dotted, with hollow marks: the paper's, at its scale.",
            )
        ],
        [top_two_verdict(*top_two(means), fewest), *(cut_verdict(seeds, field) for field in ("kurtosis", "inf_norm"))],
        {"data": ", ".join(dict.fromkeys(d for d, _, _ in seeds))}
        | {"split": f"test, {_each(every, 'samples')} windows evenly spread over it"}
        | {"seeds": seeds_measured(seeds.values()), "steps": steps_said([run["steps"] for run in every])}
        | {"stopping": _stopping(every)}
        | {"batch": _each(every, "batch"), "learning rate": _each(every, "lr"), "precision": _each(every, "precision")},
    )


def _numbers(run: Values) -> dict[str, float]:
    return {**run["metrics"], "kurtosis": run["kurtosis"], "inf_norm": run["inf_norm"]}


def _is_current(run: Values) -> bool:
    return "best_step" in run


def _comparable(runs: Mapping[tuple[str, int, str], list[Values]]) -> dict[tuple[str, int, str], list[Values]]:
    """Without the runs of the earlier rule where a forecast has been measured by the present one."""
    current = {key[:2] for key, several in runs.items() if any(map(_is_current, several))}
    kept = {
        key: [run for run in several if _is_current(run) or key[:2] not in current] for key, several in runs.items()
    }
    return {key: several for key, several in kept.items() if several}


def _stopping(runs: Sequence[Values]) -> str:
    patience = sorted({run["patience"] for run in runs if _is_current(run)})
    rules = [f"weights of the best epoch on the whole validation set, patience {epochs} epochs" for epochs in patience]
    return "; ".join([*rules, *([] if all(map(_is_current, runs)) else [_EARLIER.removesuffix(".")])])


def _each(runs: Sequence[Values], field: str) -> str:
    return ", ".join(map(str, sorted({run[field] for run in runs})))


def _place(data: str, horizon: int, earlier: Collection[tuple[str, int]]) -> str:
    return f"{data}, {horizon}{' †' if (data, horizon) in earlier else ''}"


def _table(seeds: Seeds, earlier: Collection[tuple[str, int]]) -> Table:
    papers = {f: f"paper: {name}" for f, name in FIELDS.items()}
    rows = []
    for (data, horizon, method), values in seeds.items():
        printed = published.TABLE2.get((data, horizon, method))
        rows.append(
            [_place(data, horizon, earlier), "dense" if method == "vanilla" else method]
            + [mean_std([v[f] for v in values]) for f in FIELDS]
            + [None if printed is None else getattr(printed, f) for f in FIELDS]
        )
    columns = [*FIELDS.values(), *papers.values()]
    better = dict.fromkeys(columns, "low")
    note = _EARLIER if earlier else ""
    return Table("Forecasts", ["data, horizon", "layers", *columns], rows, better, "data, horizon", note)


def _draw(means: Numbers, folder: Path) -> None:
    """A row of panels for each data set: MSE, kurtosis, inf norm over the rows forecast; a line for each kind."""
    data_sets = list(dict.fromkeys(data for data, _, _ in means))
    fields = ("mse", "kurtosis", "inf_norm")
    figure, _ = drawing.new(9, 0.8 + 2.7 * len(data_sets), columns=len(fields), rows=len(data_sets))
    marks: dict[str, Any] = {}
    panels = [(data, field) for data in data_sets for field in fields]
    for axis, (data, field) in zip(figure.axes, panels, strict=True):
        for method in published.FORECASTERS:
            kind = "dense" if method == "vanilla" else method
            look = {"color": drawing.colour(kind), "marker": drawing.marker(kind), "markersize": 5}
            ours = {h: v[field] for (d, h, m), v in means.items() if (d, m) == (data, method)}
            theirs = {h: getattr(v, field) for (d, h, m), v in published.TABLE2.items() if (d, m) == (data, method)}
            marks[kind] = axis.plot([*ours], [*ours.values()], **look)[0]
            axis.plot([*theirs], [*theirs.values()], ":", markerfacecolor="none", alpha=0.6, linewidth=1, **look)
        axis.set_title(f"{data}, {FIELDS[field]}", fontsize=10)
        axis.set_xlabel("rows forecast")
        if field == "inf_norm":
            drawing.logarithmic(axis, "y")
    marks["solid: ours"] = {"color": "#888888"}
    marks["dotted: the paper's, at its scale"] = {"color": "#888888", "ls": ":", "marker": "o", "mfc": "none"}
    drawing.legend(figure, marks, 3)
    drawing.save(figure, folder, "horizons")


def rank(means: Numbers, data: str, horizon: int, field: str) -> int | None:
    """The place of OutEffHop, 1 to 4, shared with numbers that look equal; None if one is missing or NaN."""
    try:
        numbers = {kind: means[data, horizon, kind][field] for kind in published.FORECASTERS}
    except KeyError:
        return None
    if any(map(isnan, numbers.values())):
        return None
    return dict(zip(numbers, places([entry_text(n) for n in numbers.values()]), strict=True))["outeffhop"]


def top_two(means: Numbers) -> tuple[int, int]:
    """In how many settings OutEffHop is first or second, and their number. A setting is a forecast and a metric."""
    places = dict.fromkeys((data, horizon) for data, horizon, _ in means)
    ranks = [rank(means, *place, field) for place in places for field in ("kurtosis", "inf_norm")]
    known = [r for r in ranks if r is not None]
    return sum(r <= 2 for r in known), len(known)


def _counts(means: Numbers, earlier: Collection[tuple[str, int]]) -> Table:
    places = dict.fromkeys((data, horizon) for data, horizon, _ in means)
    rows = [[_place(d, h, earlier), *(rank(means, d, h, field) for field in FIELDS)] for d, h in places]
    return Table("OutEffHop's rank among the four", ["data, horizon", *FIELDS.values()], rows)


def top_two_verdict(good: int, of: int, seeds: int) -> Verdict:
    """Chance would give half: two of four ranks are the top two. One seed decides nothing."""
    claimed, settings = published.CLAIMED_TOP_TWO
    claim = f"OutEffHop is first or second by outliers in {claimed} of {settings} settings"
    if not of:
        return Verdict(claim, "not measured", "no setting is measured with all four layers")
    share = good / of
    printed = "{} of {}".format(*published.top_two())
    numbers = f"{good} of {of} (chance: {of / 2:g}); the numbers the paper prints make it {printed}"
    if seeds < 2:
        return Verdict(claim, "not seen", numbers, seeds)
    if share >= claimed / settings:
        return Verdict(claim, "confirmed", numbers, seeds)
    return Verdict(claim, "not seen" if share > 0.5 else "contradicted", numbers, seeds)


def cut(numbers: Numbers, field: str) -> float | None:
    """The share by which OutEffHop is below the other three layers, averaged over forecasts and layers.

    None if no forecast is measured with all four.
    """
    shares = []
    for place in dict.fromkeys((data, horizon) for data, horizon, _ in numbers):
        if all((*place, kind) in numbers for kind in published.FORECASTERS):
            own, *others = (numbers[*place, kind][field] for kind in ("outeffhop", "vanilla", "sparse", "gsh"))
            shares += [1 - own / other for other in others]
    return mean(shares) if shares else None


def cut_verdict(seeds: Seeds, field: str) -> Verdict:
    """Each seed gives an average; one that is within two standard errors of 0 does not count."""
    low, high = published.CLAIMED_FORECAST_CUT
    claim = f"OutEffHop's {FIELDS[field]} is {100 * low:.0f} to {100 * high:.0f} % below the other layers', on average"
    of_seed = [
        {key: values[i] for key, values in seeds.items() if i < len(values)}
        for i in range(max(map(len, seeds.values()), default=0))
    ]
    cuts = [share for numbers in of_seed if (share := cut(numbers, field)) is not None]
    if not cuts:
        return Verdict(claim, "not measured", "no forecast is measured with all four layers")
    printed = {key: value._asdict() for key, value in published.TABLE2.items()}
    theirs = cut(printed, field) or 0.0
    numbers = f"{-mean(cuts):+.1%}; the numbers the paper prints make it {-theirs:+.1%}"
    gain = surplus(cuts, [0.0])
    if len(cuts) == 1:
        return Verdict(claim, "not seen", numbers, 1)
    word: VerdictWord = "confirmed" if gain >= low else "contradicted" if gain < 0 else "not seen"
    return Verdict(claim, word, numbers, len(cuts))


def needs(settings: Settings) -> list[str]:
    return folders_of(FILES[cell.values["data"]] for cell in chosen(cells(settings), settings))


EXPERIMENT = Experiment(
    "table2",
    "Table 2",
    "STanHop-Net with dense, sparse, generalized sparse and outlier-efficient Hopfield layers: forecasts and outliers.",
    cells,
    measure,
    conclude,
    needs,
    partial=True,
)
