"""A checkpoint on its device, and data in the form its model takes. A run's folder names both."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from outeffhop._io import check_folder
from outeffhop.cli.options import Checkpoint, Evaluate, Outliers, Quantize
from outeffhop.lab.data import Prepared, prepare
from outeffhop.lab.data.image_settings import image_fields
from outeffhop.lab.training import RunFolder
from outeffhop.lab.training.checks import misfit
from outeffhop.metrics import task_of, to_device
from outeffhop.models.checkpoint import load_checkpoint
from outeffhop.models.positions import positions_of

__all__ = ["Source", "opened"]


@dataclass(frozen=True)
class Source:
    """Where a model and its data come from.

    Attributes:
        checkpoint: the folder of the model itself.
        data: a spec.
        samples: how the data is cut into samples, as for ``outeffhop.lab.data.prepare``.
    """

    checkpoint: str
    data: str
    samples: dict[str, Any]


def opened(options: Evaluate | Outliers | Quantize, **counts: int) -> tuple[PreTrainedModel, Source, Prepared]:
    """The model on its device, where it and its data come from, and the data.

    What would fail at the end is said first: a count below 1, a folder that cannot be written to, or a model that
    does not run on such data.
    """
    counted = {"batch_size": options.batch_size, "batches": options.batches, "length": options.length, **counts}
    for name, value in counted.items():
        if value is not None and value < 1:
            raise ValueError(f"{name.replace('_', '-')}={value}: must be at least 1")
    if options.out is not None:
        check_folder(options.out)
    model, source = _load(options)
    prepared = _prepared_for(model, source, options.tokenizer)
    _check_runs(model, source, prepared)
    return model, source, prepared


def _load(options: Checkpoint) -> tuple[PreTrainedModel, Source]:
    """The model, on the named device or else on a GPU if there is one; and its data, by default those of its run."""
    checkpoint, data, device = options.checkpoint, options.data, options.device
    run, samples = RunFolder(checkpoint), {}
    if run.exists:
        config = run.config()
        last = run.model if run.finished else run.last_checkpoint()
        if last is None:
            raise ValueError(f"the run in {checkpoint!r} has no checkpoint yet")
        checkpoint, data = str(last), data or config.data
        # the seed decides which tokens of the validation set are masked
        samples = {
            "length": config.samples.length,
            "cache_dir": config.samples.cache_dir,
            "seed": config.train.seed,
        }
    if not Path(checkpoint).is_dir():
        raise ValueError(f"checkpoint {checkpoint!r} is not a folder: give that of a run or of a saved model")
    if data is None:
        raise ValueError(f"data is missing, and {checkpoint!r} is not a run that names its own; try builtin:text")
    if options.length is not None:
        samples["length"] = options.length
    logging.disable_progress_bar()  # loading takes a moment only
    model: Any = load_checkpoint(checkpoint, trust_remote_code=options.trust_remote_code)
    try:
        model = model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except (RuntimeError, AssertionError) as error:
        first = str(error).splitlines()[0]
        raise ValueError(f"device={device!r} cannot be used here: {first}; use cpu") from error
    if model.device.type == "meta":
        raise ValueError(f"device={device!r} holds shapes only, so nothing can be measured there: use cpu")
    return model, Source(checkpoint, data, {k: v for k, v in samples.items() if v is not None})


def _prepared_for(model: PreTrainedModel, source: Source, tokenizer: str | None) -> Prepared:
    """The data in the form this model takes."""
    config: Any = model.config
    task = task_of(model)
    fields = dict(source.samples)
    if task == "forecasting":
        fields |= {"in_len": config.in_len, "out_len": config.out_len}
    elif model.main_input_name == "pixel_values":
        fields |= image_fields(config, source.checkpoint)
    else:
        length, longest = fields.get("length", 128), positions_of(model)
        if longest is not None and fields.get("length", 0) > longest:
            # cut silently, the numbers would be those of another length
            raise ValueError(f"length={length}: the model of {source.checkpoint!r} has {longest} positions")
        fields["tokenizer"] = _tokenizer_folder(source.checkpoint, tokenizer)
        fields["length"] = length if longest is None else min(length, longest)
    prepared = prepare(source.data, task, **fields)
    if model.main_input_name not in prepared.validation[0]:
        raise ValueError(
            f"data={source.data!r} has {prepared.about['kind']}, but {type(model).__name__} takes "
            f"{model.main_input_name}: give other data"
        )
    # what was prepared as the model asks for fits
    rest = {name: value for name, value in prepared.changes.items() if name not in fields}
    unfit = misfit(replace(prepared, changes=rest), config.get_text_config())
    if unfit is not None:
        name, wanted, has = unfit
        raise ValueError(
            f"data={source.data!r} has {name}={wanted}, the model of {source.checkpoint!r} {has}: they do not fit"
        )
    return prepared


def _check_runs(model: PreTrainedModel, source: Source, prepared: Prepared) -> None:
    """Runs one sample. A model may need inputs that no data here has, such as text and an image at once."""
    batch = prepared.eval_collate([prepared.validation[0]])
    try:
        with torch.no_grad():
            model(**to_device(batch, model))
    except Exception as error:  # each architecture has its own way to say what it lacks
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"{type(model).__name__} of {source.checkpoint!r} does not run on {', '.join(batch)} alone: {said}"
        ) from error


def _tokenizer_folder(checkpoint: str, tokenizer: str | None) -> str:
    folder = Path(tokenizer or checkpoint)
    if (folder / "tokenizer.json").is_file() or (folder / "tokenizer_config.json").is_file():
        return str(folder)
    if tokenizer is not None:
        raise ValueError(f"tokenizer={tokenizer!r} is not a folder with a tokenizer.json")
    raise ValueError(f"checkpoint {checkpoint!r} has no tokenizer: give its folder by --tokenizer FOLDER")
