"""One folder of tokens for all of these tests, and one whole run of each model to hold others against."""

import pytest
from runs import config

from outeffhop.lab.training import train


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("tokens")


@pytest.fixture(scope="session")
def whole_run(cache, tmp_path_factory):
    """The folder of a run of a model that nothing interrupted; trained once."""
    root, made = tmp_path_factory.mktemp("whole"), {}

    def of(model):
        if model not in made:
            train(config(model, root / model, cache), quiet=True)
            made[model] = root / model
        return made[model]

    return of
