"""Figures: axes on a logarithmic scale."""

import math

import pytest

from outeffhop.lab.paper import drawing


@pytest.mark.parametrize(("values", "scale"), [([1.0, 50.0], "log"), ([-1.0, -2.0], "linear"), ([math.nan], "linear")])
@pytest.mark.parametrize("side", ["x", "y"])
def test_only_what_has_a_logarithm_gets_one(values, scale, side, tmp_path):
    figure, axis = drawing.new()
    axis.scatter(values, values)
    drawing.logarithmic(axis, side)
    assert getattr(axis, f"get_{side}scale")() == scale
    drawing.save(figure, tmp_path, "drawn")
    assert (tmp_path / "drawn.png").is_file()


def test_ticks_are_plain_numbers():
    figure, axis = drawing.new()
    axis.plot([1, 100], [1, 200_000])
    for side in "xy":
        drawing.logarithmic(axis, side)
    figure.canvas.draw()
    assert {"1", "2", "5", "10", "100"} <= {label.get_text() for label in axis.get_xticklabels()}
    shown = {label.get_text() for label in axis.get_yticklabels()}
    assert {"1", "1000"} <= shown
    assert "2" not in shown
