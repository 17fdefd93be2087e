"""What flows through one block of a language model, before and after: |x| by token and channel, for a picture.

    python benchmarks/activations.py --before FOLDER --after FOLDER --how WORDS --data TEXT --model NAME [--layer 20]

Both checkpoints read the same tokens, the first of the validation text. Neighbouring channels are joined to their
largest, so that the file stays small. ``docs/pictures/make.py`` draws it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from measure import environment, keep

from outeffhop.lab.data import prepare
from outeffhop.models import load_checkpoint

_JOINED = 6  # channels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True)
    parser.add_argument("--after", type=Path, required=True)
    parser.add_argument("--data", required=True, help="text, as for outeffhop data")
    parser.add_argument("--layer", type=int, default=20, help="whose output is shown (default 20)")
    parser.add_argument("--tokens", type=int, default=48, help="(default 48)")
    parser.add_argument("--model", required=True, help="its name, for the picture")
    parser.add_argument("--how", required=True, help="how the second was made, kept with the numbers")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "activations.json")
    given = parser.parse_args()
    data = prepare(given.data, "clm", tokenizer=given.before, length=given.tokens)
    batch = data.eval_collate([data.validation[0]])
    shown = {
        when: stream(folder, batch, given.layer) for when, folder in (("before", given.before), ("after", given.after))
    }
    about = {"model": given.model, "after_is": given.how, "layer": given.layer, "channels_joined": _JOINED}
    keep(given.out, {"question": __doc__.splitlines()[0], **environment("cpu"), **about, **shown})
    for when, rows in shown.items():
        print(f"{when:7} largest |x| {max(map(max, rows)):10.1f}")
    print(f"written to {given.out}")


@torch.no_grad()
def stream(folder: Path, batch: dict[str, Any], layer: int) -> list[list[float]]:
    """|x| after a block, [tokens][channels joined]."""
    model: Any = load_checkpoint(folder)
    states = model(input_ids=batch["input_ids"], output_hidden_states=True).hidden_states
    size = states[layer + 1][0].abs()  # the first are the embeddings
    pooled = size.unflatten(-1, (-1, _JOINED)).amax(-1)
    return [[float(f"{value:.3g}") for value in row] for row in pooled.tolist()]


if __name__ == "__main__":
    main()
