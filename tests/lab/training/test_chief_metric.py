"""Which evaluation of a log history was best, and whether the metric still improves."""

import pytest

from outeffhop.lab.training.chief_metric import CHIEF_METRICS, ChiefMetric
from outeffhop.metrics import TASKS

LOSS, ACCURACY = ChiefMetric("loss", False), ChiefMetric("accuracy", True)


def history(name, *values):
    lines = [{name: value, "step": 10 * at} for at, value in enumerate(values, 1)]
    return [line for one in lines for line in ({"learning_rate": 1.0, "step": one["step"]}, one)]


@pytest.mark.parametrize(
    ("values", "lowest", "highest"),
    [((3, 1, 2), 20, 10), ((1, 1, 1), 10, 10), ((float("nan"), 2, 3), 20, 30), ((float("inf"),), None, None)],
)
def test_the_best_step(values, lowest, highest):
    assert LOSS.best_step(history("loss", *values)) == lowest
    assert ACCURACY.best_step(history("accuracy", *values)) == highest


def test_earlier_steps_may_not_count():
    assert LOSS.best_step(history("loss", 1, 3, 2), since=11) == 30
    assert LOSS.best_step(history("loss", 1, 3, 2), since=31) is None
    assert LOSS.best_step([]) is None


@pytest.mark.parametrize(("values", "ended"), [((3, 2), False), ((3, 2, 2), False), ((3, 2, 2, 2), True)])
def test_patience_of_two(values, ended):
    assert LOSS.stagnant(history("loss", *values), 2) == ended
    assert ACCURACY.stagnant(history("accuracy", *(-value for value in values)), 2) == ended


def test_every_task_has_one():
    assert CHIEF_METRICS.keys() == TASKS.keys()
