"""The flags of each command with values for each, good and bad, and rows in which any two values meet.

A row is a command line: for each flag one value, or none. A bad value stands alone among good ones, so that its error
is the one that is seen. What Python takes for a value stands beside it, so that both can be compared.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

MODELS = ("llama", "bert", "vit")


@dataclass(frozen=True)
class Value:
    """A value of a flag.

    Attributes:
        words: what stands on the command line; names in braces are filled in for the model.
        says: what the error says, if the value is bad.
        given: the arguments in Python.
    """

    words: tuple[str, ...]
    says: str = ""
    given: dict[str, Any] = field(default_factory=dict, hash=False, compare=False)

    def __repr__(self) -> str:
        return " ".join(self.words) or "(none)"


def on(*words: str, **given: Any) -> Value:
    return Value(words, given=given)


def bad(*words: str, says: str) -> Value:
    return Value(words, says)


OFF = Value(())


def count(flag: str, *values: int, absent: bool = False) -> list[Value]:
    """A number of at least 1."""
    name = flag.strip("-").replace("-", "_")
    good = [on(flag, str(value), **{name: value}) for value in values]
    wrong = [
        bad(flag, "0", says=f"{flag.strip('-')}=0: must be at least 1"),
        bad(f"{flag}=-3", says=f"{flag.strip('-')}=-3: must be at least 1"),
        bad(flag, "two", says=f"{flag}='two': must be a whole number"),
    ]
    return [*([OFF] if absent else []), *good, *wrong]


JSON = [OFF, on("--json")]
WRONG_DATA = [
    bad("--data", "{wrong}", says="{wrong}"),
    bad("--data", "nowhere.txt", says="nowhere.txt"),
    bad("--data", "builtin:txt", says="builtin='txt' is unknown; did you mean 'text'"),
]
DATA = [on("--data", "{data}", data="{data}"), on("--data={own}", data="{own}"), *WRONG_DATA]
OUT = [on("--out", "new/out", out="new/out"), on("--out=there", out="there")]
WRONG_OUT = [bad("--out", "file", says="is a file"), bad("--out", "file/below", says="file")]

MEASURED = {
    "--length": count("--length", 16, absent=True),
    "--tokenizer": [
        OFF,
        on("--tokenizer", "{tokenizer}", tokenizer="{tokenizer}"),
        bad("--tokenizer", "nowhere", says="tokenizer='nowhere'"),
    ],
    "--task": [
        OFF,
        on("--task", "{task}", task="{task}"),
        on("--task=embedding", task="embedding"),
        bad("--task", "mln", says="task='mln' is unknown; did you mean 'mlm'"),
        bad("--task", "{wrong_task}", says="task='{wrong_task}' needs"),
    ],
    "--dtype": [
        OFF,
        on("--dtype", "bfloat16", dtype="bfloat16"),
        bad("--dtype", "float64", says="--dtype='float64' is unknown"),
    ],
    "--device": [
        OFF,
        on("--device", "cpu", device="cpu"),
        bad("--device", "cuda:99", says="device='cuda:99' cannot be used here"),
        bad("--device", "banana", says="device='banana' cannot be used here"),
        bad("--device", "meta", says="device='meta' holds shapes only"),
    ],
    "--trust-remote-code": [OFF, on("--trust-remote-code", trust_remote_code=True)],
    "--json": JSON,
    "--unknown": [OFF, bad("--jsn", says="unknown option: --jsn; did you mean --json?")],
}
TABLES: dict[str, dict[str, list[Value]]] = {
    "evaluate": MEASURED
    | {
        "--data": [*DATA, bad(says="data is missing")],
        "--batch-size": [OFF, *count("--batch-size", 3)],
        "--batches": count("--batches", 1, 2),
        "--split": [
            OFF,
            on("--split", "train", split="train"),
            on("--split", "test", split="test"),
            bad("--split", "dev", says="--split='dev' is unknown"),
        ],
        "--task": [
            *MEASURED["--task"][:2],
            bad("--task", "embedding", says="has no head with a metric"),
            *MEASURED["--task"][3:],
        ],
        "--out": [OFF, *OUT, *WRONG_OUT],
    },
    "outliers": MEASURED
    | {
        "--data": [*DATA, bad(says="data is missing")],
        "--batch-size": [OFF, *count("--batch-size", 3)],
        "--batches": count("--batches", 1, 2),
        "--tensors": [
            OFF,
            on("--tensors", "all", tensors="all"),
            bad("--tensors", "som", says="--tensors='som' is unknown"),
        ],
        "--out": [*OUT, *WRONG_OUT, bad(says="missing: --out FOLDER")],
    },
    "quantize": MEASURED
    | {
        "--data": [*DATA, bad(says="data is missing")],
        "--batch-size": count("--batch-size", 2, 3),
        "--batches": count("--batches", 1, 2),
        "--calibration-batches": count("--calibration-batches", 1, 2),
        "--seeds": count("--seeds", 1, 2),
        "--bits": [
            OFF,
            on("--bits", "W4A8", bits="W4A8"),
            on("--bits", "W8A8KV8", bits="W8A8KV8"),
            bad("--bits", "W99A8", says="bits=99"),
            bad("--bits", "W8", says="scheme='W8"),
        ],
        "--scheme": [
            OFF,
            on("--scheme", "linear", scheme="linear"),
            on("--scheme", "per-channel", scheme="per-channel"),
            on("--scheme", "smoothquant", scheme="smoothquant"),
            on("--scheme=fp8", scheme="fp8"),
            bad("--scheme", "papr", says="--scheme='papr' is unknown; did you mean 'paper'"),
        ],
        "--range": [
            OFF,
            on("--range", "mse", range="mse"),
            on("--range", "percentile", range="percentile"),
            bad("--range", "max", says="--range='max' is unknown"),
        ],
        "--exclude": [
            OFF,
            on("--exclude", "*layer*.0.*", "*[Nn]orm*", exclude=("*layer*.0.*", "*[Nn]orm*")),
            bad("--exclude", "*.none.*", says="exclude='*.none.*' matches no module"),
        ],
        "--fold-layernorm": [OFF, on("--fold-layernorm", fold=True)],
        "--save": [
            OFF,
            on("--save", "saved", save=True),
            bad("--save", "there", "--scheme", "linear", says="save='there' is not empty"),
            bad("--save=file", "--scheme", "linear", says="is a file"),
            bad("--save", "saved", "--scheme", "smoothquant", says="cannot hold"),
        ],
        "--out": [OFF, *OUT, *WRONG_OUT],
    },
    "diagnose": MEASURED
    | {
        "--data": [OFF, *DATA],
        "--batch-size": [OFF, *count("--batch-size", 2)],
        "--batches": count("--batches", 1, 2),
        "--calibration-batches": count("--calibration-batches", 1, absent=True),
        "--compare": [
            OFF,
            on("--compare", "{other}", compare="{other}"),
            on("--compare", "{diagnosis}", compare="{diagnosis}"),
            bad("--compare", "nowhere", says="nowhere"),
        ],
        "--out": [OFF, *OUT, *WRONG_OUT],
    },
    "mend": {
        "--data": [*DATA, bad(says="missing: --data SPEC")],
        "--out": [
            on("--out", "new/out", out="new/out"),
            on("--out=empty", out="empty"),
            bad("--out", "there", says="out='there' exists and is not empty"),
            bad("--out", "file", says="out='file'"),
            bad(says="missing: --out FOLDER"),
        ],
        "--method": [
            OFF,
            on("--method", "outeffhop(n=2)", method="outeffhop(n=2)"),
            on("--method", "auto", method="auto"),
            bad("--method", "outefhop", says="did you mean 'outeffhop'"),
        ],
        "--steps": count("--steps", 1, 2),
        "--minutes": [
            OFF,
            bad("--minutes", "5", says="exclude each other"),
            bad("--minutes", "soon", says="--minutes='soon': must be a number"),
        ],
        "--penalty": [
            OFF,
            on("--penalty", "0", penalty=0.0),
            on("--penalty=0.5", penalty=0.5),
            bad("--penalty=-1", says="penalty=-1"),
            bad("--penalty", "nan", says="penalty=nan"),
        ],
        "--penalty-kind": [
            OFF,
            on("--penalty-kind", "fourth_power", penalty_kind="fourth_power"),
            bad("--penalty-kind", "fifth", says="fifth"),
        ],
        "--weight-bound": [
            OFF,
            on("--weight-bound", "0", weight_bound=0.0),
            bad("--weight-bound=-2", says="weight_bound=-2"),
        ],
        "--lr": [
            OFF,
            on("--lr", "1e-3", lr=1e-3),
            bad("--lr=-1", says="lr=-1"),
            bad("--lr", "inf", says="lr=inf"),
        ],
        "--teacher": [
            OFF,
            on("--teacher", "{other}", teacher="{other}"),
            bad("--teacher", "nowhere", says="nowhere"),
        ],
        "--plain": [OFF, on("--plain", plain=True)],
        "--batch-size": count("--batch-size", 4),
        "--accumulate": [OFF, *count("--accumulate", 2), bad("--accumulate", "3", says="accumulate=3")],
        "--length": count("--length", 16),
        "--tokenizer": MEASURED["--tokenizer"],
        "--batches": count("--batches", 1),
        "--calibration-batches": count("--calibration-batches", 1),
        "--seeds": [OFF, *count("--seeds", 2)],
        "--seed": [OFF, on("--seed", "7", seed=7), bad("--seed", "x", says="--seed='x': must be a whole number")],
        "--precision": [
            OFF,
            on("--precision", "bf16", precision="bf16"),
            bad("--precision", "fp16", says="--precision='fp16' is unknown"),
        ],
        "--gradient-checkpointing": [OFF, on("--gradient-checkpointing", gradient_checkpointing=True)],
        "--device": [OFF, on("--device", "cpu", device="cpu"), bad("--device", "tpu", says="did you mean 'cpu'")],
        "--resume": [OFF, on("--resume", "auto"), bad("--resume", "always", says="--resume='always' is unknown")],
        "--json": JSON,
        "--unknown": MEASURED["--unknown"],
    },
    "train": {
        "--data": [*DATA, bad(says="data is missing")],
        "--out": [
            on("--out", "new/out", out="new/out"),
            on("--out=empty", out="empty"),
            bad("--out", "there", says="out='there' contains other files"),
            bad("--out", "file", says="out='file' is a file"),
            bad(says="out is missing"),
        ],
        "--init": [on("--init", "{checkpoint}", init="{checkpoint}"), bad("--init", "nowhere", says="nowhere")],
        "--method": [
            OFF,
            on("--method", "gated-outeffhop", method="gated-outeffhop"),
            on("--method", "vanilla", method="vanilla"),
            bad("--method", "outefhop", says="did you mean 'outeffhop'"),
        ],
        "--task": [
            OFF,
            on("--task", "{task}", task="{task}"),
            bad("--task", "mln", says="task='mln' is unknown"),
        ],
        "--teacher": [
            OFF,
            on("--teacher", "{other}", teacher="{other}"),
            bad("--teacher", "nowhere", says="nowhere"),
        ],
        "--changes": [
            OFF,
            bad("--changes", "hidden_size", "16", says="hidden_size"),
            bad("--changes", "hidden_size", says="--changes needs pairs of a name and a value"),
        ],
        "--config": [
            OFF,
            on("--config", "some.yaml", **{"train.lr": 2e-3}),
            bad("--config", "file", says="config='file'"),
            bad("--config=nowhere.yaml", says="config='nowhere.yaml' cannot be read"),
        ],
        "--resume": [OFF, on("--resume", "auto"), bad("--resume", "always", says="--resume='always' is unknown")],
        "--dry-run": [OFF],
        "--train.max-steps": [
            on("--train.max-steps", "2", **{"train.max_steps": 2}),
            bad("--train.max-steps", "0", says="train.max_steps=0"),
            bad("--train.max-steps", "2", "--train.epochs", "1", says="train.epochs=1"),
        ],
        "--train.batch-size": [
            on("--train.batch-size", "4", **{"train.batch_size": 4}),
            bad("--train.batch-size", "0", says="train.batch_size=0"),
            bad("--train.batch-size", "100000000", says="train.batch_size=100000000"),
        ],
        "--train.accumulate": [
            OFF,
            on("--train.accumulate", "2", **{"train.accumulate": 2}),
            bad("--train.accumulate", "3", says="train.accumulate=3"),
        ],
        "--train.lr": [
            OFF,
            on("--train.lr", "1e-3", **{"train.lr": 1e-3}),
            bad("--train.lr=-1", says="train.lr=-1"),
            bad("--train.lr", "nan", says="train.lr=nan"),
        ],
        "--train.optimizer": [
            OFF,
            on("--train.optimizer", "adam", **{"train.optimizer": "adam"}),
            bad("--train.optimizer", "sgd", says="--train.optimizer='sgd' is unknown"),
        ],
        "--train.schedule": [OFF, on("--train.schedule", "cosine", **{"train.schedule": "cosine"})],
        "--train.betas": [
            OFF,
            on("--train.betas", "0.8", "0.9", **{"train.betas": (0.8, 0.9)}),
            bad("--train.betas", "0.8", says="--train.betas='0.8': must be two numbers"),
            bad("--train.betas", "0.8", "2", says="train.betas"),
        ],
        "--train.penalty": [
            OFF,
            on("--train.penalty", "0.1", **{"train.penalty": 0.1}),
            bad("--train.penalty=-1", says="train.penalty=-1"),
        ],
        "--train.weight-bound": [
            OFF,
            on("--train.weight-bound", "8", **{"train.weight_bound": 8.0}),
            bad("--train.weight-bound=-1", says="train.weight_bound=-1"),
        ],
        "--train.eval-steps": [
            on("--train.eval-steps", "1", **{"train.eval_steps": 1}),
            bad("--train.eval-steps", "now", says="--train.eval-steps='now': must be a whole number or epoch"),
        ],
        "--train.eval-batches": [
            on("--train.eval-batches", "1", **{"train.eval_batches": 1}),
            bad("--train.eval-batches=0", says="train.eval_batches=0"),
        ],
        "--train.keep-best": [
            OFF,
            on("--train.keep-best", "True", **{"train.keep_best": True}),
            bad("--train.keep-best", "maybe", says="--train.keep-best='maybe' is unknown"),
        ],
        "--train.save-steps": [
            on("--train.save-steps", "1", **{"train.save_steps": 1}),
            bad("--train.save-steps", "0", says="train.save_steps=0"),
        ],
        "--train.outlier-batches": [on("--train.outlier-batches", "1", **{"train.outlier_batches": 1})],
        "--train.outlier-tensors": [
            OFF,
            on("--train.outlier-tensors", "all", **{"train.outlier_tensors": "all"}),
            bad("--train.outlier-tensors", "*.nothing", says="train.outlier_tensors='*.nothing'"),
        ],
        "--train.seed": [OFF, on("--train.seed", "3", **{"train.seed": 3})],
        "--train.precision": [
            OFF,
            on("--train.precision", "bf16", **{"train.precision": "bf16"}),
            bad("--train.precision", "fp8", says="--train.precision='fp8' is unknown"),
        ],
        "--train.device": [OFF, on("--train.device", "cpu", **{"train.device": "cpu"})],
        "--samples.length": [
            on("--samples.length", "16", **{"samples.length": 16}),
            bad("--samples.length", "0", says="length=0"),
            bad("--samples.length", "100000", says="samples.length=100000"),
        ],
        "--samples.tokenizer": [
            OFF,
            on("--samples.tokenizer", "{tokenizer}", **{"samples.tokenizer": "{tokenizer}"}),
        ],
        "--json": JSON,
        "--unknown": [OFF, bad("--metod", "x", says="unknown option: --metod; did you mean --method")],
    },
}
# Flags that stand in no table, and why.
LEFT_OUT = {
    "--help": "prints and ends: cli/test_options.py",
    "--int8": "exports for seconds: cli/test_diagnose_command.py, quantization/test_int8.py",
    "--no-int8": "given in every row of diagnose",
    "--model": "a checkpoint is given: cli/test_train_command.py",
    "--preset": "as --model",
    "--dry-run": "writes nothing: cli/test_train_command.py",
    "--train": "one that fine-tuning on a CPU needs, or lab/training/test_train_options.py",
    "--samples": "as --train",
}
ONLY_TEXT = {"--tokenizer", "--samples.length", "--samples.tokenizer", "--length"}  # says nothing about images


def goes(command: str, row: dict[str, Any]) -> bool:
    """Whether the values of a row, or of a part of one, may stand together."""
    model = row.get("model")
    values = [value for flag, value in row.items() if flag != "model"]
    if sum(bool(value.says) for value in values) > 1:
        return False
    if model == "vit" and any(row[flag].says and "must be" not in row[flag].says for flag in ONLY_TEXT & row.keys()):
        return False
    return command != "quantize" or _goes_in_quantize(row)


def _goes_in_quantize(row: dict[str, Any]) -> bool:
    """The errors of what does not go together are in cli/test_quantize_command.py."""
    chosen = {name: v for flag, each in row.items() if flag != "model" for name, v in each.given.items()}
    if row.get("--save", OFF).says and {"scheme", "bits", "fold", "range"} & chosen.keys():
        return False
    if "fold" in chosen and "dtype" in chosen and row.get("model") == "llama":
        return False  # rounding to bfloat16 shows too much in a model that looks trained
    scheme = chosen.get("scheme", "paper" if "--scheme" in row else None)
    if scheme == "fp8" and {"bits", "range"} & chosen.keys():
        return False
    if scheme == "smoothquant" and "range" in chosen:
        return False
    if chosen.get("bits") == "W8A8KV8" and (row.get("model", "llama") != "llama" or "save" in chosen):
        return False
    return "save" not in chosen or (scheme in (None, "linear") and not {"fold", "dtype"} & chosen.keys())


def cover(command: str, seed: int = 0) -> list[tuple[str, dict[str, Value]]]:
    """Rows in which any two values meet that may stand together: good ones in rows that are good as a whole."""
    table: dict[str, list[Any]] = {"model": list(MODELS)} | TABLES[command]
    good = {flag: [value for value in values if not _says(value)] for flag, values in table.items()}
    draw = random.Random(seed)
    rows = [*_cover(command, good, _pairs(command, good), draw)]
    rows += _cover(command, table, [p for p in _pairs(command, table) if _says(p[1]) or _says(p[3])], draw)
    return [(row["model"], {flag: row[flag] for flag in TABLES[command]}) for row in rows]


def _says(value: Any) -> str:
    return value.says if isinstance(value, Value) else ""


def _pairs(command: str, table: dict[str, list[Any]]) -> list[tuple[str, Any, str, Any]]:
    return [
        (flag, value, other, another)
        for i, flag in enumerate(table)
        for other in list(table)[i + 1 :]
        for value in table[flag]
        for another in table[other]
        if goes(command, {flag: value, other: another})
    ]


def _cover(
    command: str, table: dict[str, list[Any]], left: list[tuple[str, Any, str, Any]], draw: random.Random
) -> Iterator[dict[str, Any]]:
    while left:
        found = [row for _ in range(5) if (row := _drawn(command, table, left, draw))]
        if not found:
            left.pop(0)  # no row holds it
            continue
        best = max(found, key=lambda row: sum(_holds(row, pair) for pair in left))
        left = [pair for pair in left if not _holds(best, pair)]
        yield best


def _holds(row: dict[str, Any], pair: tuple[str, Any, str, Any]) -> bool:
    flag, value, other, another = pair
    return row[flag] == value and row[other] == another


def _drawn(command: str, table: dict[str, list[Any]], left: list[Any], draw: random.Random) -> dict[str, Any] | None:
    """A row with the first pair that is left, and as many others as it can have."""
    flag, value, other, another = left[0]
    row = {flag: value, other: another}
    wanted: dict[tuple[str, Any], set[tuple[str, Any]]] = {}
    for a, x, b, y in left:
        wanted.setdefault((a, x), set()).add((b, y))
        wanted.setdefault((b, y), set()).add((a, x))
    for each in draw.sample(list(table), len(table)):
        if each in row:
            continue
        fitting = [choice for choice in table[each] if goes(command, {**row, each: choice})]
        if not fitting:
            return None
        here = set(row.items())
        gains = [len(wanted.get((each, choice), set()) & here) for choice in fitting]
        row[each] = draw.choice([c for c, gain in zip(fitting, gains, strict=True) if gain == max(gains)])
    return row


def singles(command: str, seed: int = 0) -> list[tuple[str, dict[str, Value]]]:
    """Few rows in which each value is seen: all good ones in as few as that takes, each bad one in one of its own."""
    table: dict[str, list[Any]] = {"model": list(MODELS)} | TABLES[command]
    draw = random.Random(seed)
    left = [(flag, value) for flag, values in table.items() for value in values]
    rows = []
    while left:
        flag, value = left[0]
        row = {flag: value}
        for each in draw.sample(list(table), len(table)):
            if each in row:
                continue
            good = [choice for choice in table[each] if not _says(choice) and goes(command, {**row, each: choice})]
            new = [choice for choice in good if (each, choice) in left]
            row[each] = draw.choice(new if new and not _says(value) else good)
        left = [one for one in left if one not in ([(flag, value)] if _says(value) else row.items())]
        rows.append((row["model"], {flag: row[flag] for flag in TABLES[command]}))
    return rows


def is_bad(row: dict[str, Any]) -> bool:
    return any(_says(value) for value in row.values())


def words_of(row: dict[str, Value], names: dict[str, str]) -> list[str]:
    return [word.format(**names) for value in row.values() for word in value.words]


def given_of(row: dict[str, Value], names: dict[str, str]) -> dict[str, Any]:
    fill: Callable[[Any], Any] = lambda value: value.format(**names) if isinstance(value, str) else value  # noqa: E731
    return {name: fill(value) for each in row.values() for name, value in each.given.items()}
