"""Data in the form that a model takes, whatever its architecture."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from outeffhop._naming import known
from outeffhop.lab.data import Prepared, prepare
from outeffhop.lab.data.image_settings import image_fields
from outeffhop.lab.data.preparing import kind_of
from outeffhop.lab.data.specs import parse
from outeffhop.lab.diagnosis.model_inputs import both, ending_once, has_two_inputs, with_decoder_inputs
from outeffhop.lab.training.checks import misfit
from outeffhop.metrics import TASKS, evaluating, main_output, metric_for, task_of, to_device
from outeffhop.models.gguf import is_gguf
from outeffhop.models.positions import positions_of

__all__ = ["check_runs", "prepared_for"]

_TAKES = {"input_ids": "text", "pixel_values": "images"}


def prepared_for(
    model: PreTrainedModel,
    checkpoint: str,
    data: str | None,
    samples: dict[str, Any],
    tokenizer: Any = None,
    task: str | None = None,
) -> Prepared:
    """The data in the form a model takes.

    Args:
        checkpoint: where the model comes from: its tokenizer and the settings of its images lie there.
        data: a spec; None for built-in data that fits the model.
        samples: how the data is cut into samples, as for ``prepare``.
        tokenizer: of a text model, or its folder; by default that of the checkpoint.
        task: by default that of the architecture.
    """
    given, chosen = data, _task(model, task, data)
    kind = _kind(model, chosen)
    data = data or f"builtin:{kind}"

    def of(spec: str, wanted: str, as_task: str) -> Prepared:
        return prepare(spec, as_task, **_fields(model, wanted, checkpoint, samples, tokenizer))

    if has_two_inputs(model) and chosen == "embedding":
        only = None if given is None else kind_of(parse(given), ("text", "images"))
        texts = of(data if only in (None, "text") else "builtin:text", "text", chosen)
        images = of(data if only == "images" else "builtin:images", "images", chosen)
        prepared = both(texts, images)
    elif kind == "text" and chosen == "embedding" and getattr(model.config, "is_encoder_decoder", False):
        if model.base_model is model:
            prepared = with_decoder_inputs(of(data, kind, "seq2seq"), model.config)
        else:
            prepared = ending_once(of(data, kind, chosen), model.config)
    else:
        prepared = of(data, kind, chosen)
    _check_fits(model, checkpoint, data, samples, prepared)
    _give_padding(model, prepared)
    return prepared


def _task(model: PreTrainedModel, task: str | None, data: str | None) -> str:
    if task is not None:
        takes = _TAKES.get(model.main_input_name, "series")
        if takes not in TASKS[known("task", task, TASKS)][0]:
            fitting = ", ".join(name for name, (kinds, _) in TASKS.items() if takes in kinds)
            raise ValueError(
                f"task={task!r} needs {' or '.join(TASKS[task][0])}, but {type(model).__name__} takes {takes}: "
                f"give one of {fitting}"
            )
        return task
    own = task_of(model)
    # what built-in images show are not the classes that the model was trained for
    return "embedding" if own == "classification" and data is None else own


def _kind(model: PreTrainedModel, task: str) -> str:
    return "series" if task == "forecasting" else _TAKES.get(model.main_input_name, "text")


def _fields(
    model: PreTrainedModel, kind: str, checkpoint: str, samples: dict[str, Any], tokenizer: Any
) -> dict[str, Any]:
    """The arguments of ``prepare`` that follow from the model."""
    config: Any = model.config
    fields = dict(samples)
    if kind == "series":
        return fields | {"in_len": config.in_len, "out_len": config.out_len}
    if kind == "images":
        return fields | image_fields(config, checkpoint)
    length, longest = fields.get("length", 128), positions_of(model)
    if longest is not None and fields.get("length", 0) > longest:
        # cut silently, the numbers would be those of another length
        raise ValueError(f"length={length}: the model of {checkpoint!r} has {longest} positions")
    fields["tokenizer"] = _tokenizer(checkpoint, tokenizer)
    fields["length"] = length if longest is None else min(length, longest)
    return fields


def _tokenizer(checkpoint: str, tokenizer: Any) -> Any:
    if tokenizer is not None and not isinstance(tokenizer, str | Path):
        return tokenizer
    place = Path(tokenizer or checkpoint).expanduser()
    if is_gguf(place) or (place / "tokenizer.json").is_file() or (place / "tokenizer_config.json").is_file():
        return str(place)
    if tokenizer is not None:
        raise ValueError(f"tokenizer={str(tokenizer)!r} is not a folder with a tokenizer.json")
    if not checkpoint:
        raise ValueError("tokenizer is missing: give the tokenizer of the model, or the folder of one")
    raise ValueError(f"checkpoint {checkpoint!r} has no tokenizer: give its folder by --tokenizer FOLDER")


def _check_fits(
    model: PreTrainedModel, checkpoint: str, data: str, samples: dict[str, Any], prepared: Prepared
) -> None:
    if model.main_input_name not in prepared.eval_collate([prepared.validation[0]]):
        raise ValueError(
            f"data={data!r} has {prepared.about['kind']}, but {type(model).__name__} takes "
            f"{model.main_input_name}: give other data"
        )
    # what was prepared as the model asks for fits
    asked = {"image_size", "num_channels", "mean", "std", "in_len", "out_len", *samples}
    rest = {name: value for name, value in prepared.changes.items() if name not in asked}
    unfit = misfit(replace(prepared, changes=rest), model.config.get_text_config())
    if unfit is not None:
        name, wanted, has = unfit
        remedy = "; --task embedding compares the outputs alone" if name == "num_labels" else ""
        raise ValueError(
            f"data={data!r} has {name}={wanted}, the model of {checkpoint!r} {has}: they do not fit{remedy}"
        )


def _give_padding(model: PreTrainedModel, prepared: Prepared) -> None:
    """A classifier of texts without a token of padding takes them one by one: it cannot tell where a text ends.

    Ours have no padding, so any token will do; that of the tokenizer, as its own documentation recommends.
    """
    config: Any = model.config.get_text_config()
    tokenizer: Any = prepared.tokenizer
    lacks_it = tokenizer is not None and getattr(config, "pad_token_id", None) is None
    if lacks_it and "ForSequenceClassification" in type(model).__name__:
        found = (getattr(tokenizer, name) for name in ("pad_token_id", "eos_token_id", "sep_token_id"))
        config.pad_token_id = next((i for i in found if i is not None), None)


@torch.no_grad()
def check_runs(model: PreTrainedModel, checkpoint: str, prepared: Prepared) -> None:
    """Runs two samples as they will be measured. A model may need inputs that no data here has, such as sound."""
    if not len(prepared.validation):
        raise ValueError(f"data={prepared.about.get('source')!r} has no samples to measure on")
    batch = prepared.eval_collate([prepared.validation[i] for i in range(min(2, len(prepared.validation)))])
    try:
        with evaluating(model):
            if prepared.task == "embedding":
                main_output(model(**to_device(batch, model)))
            else:
                metric_for(prepared.task)(model, [batch])
    except Exception as error:  # each architecture has its own way to say what it lacks
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        remedy = "" if prepared.task == "embedding" else "; --task embedding compares its outputs alone"
        where = f" of {checkpoint!r}" if checkpoint else ""
        raise ValueError(
            f"{type(model).__name__}{where} does not run on {', '.join(batch)} alone: {said}{remedy}"
        ) from error
