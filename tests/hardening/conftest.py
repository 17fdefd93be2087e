"""What the tests of faults share."""

import faults
import pytest


@pytest.fixture(scope="session")
def server():
    with faults.Server() as running:
        yield running


@pytest.fixture(scope="session")
def mounts():
    if not faults.mounts_are_allowed():
        pytest.skip("this user may not mount, not even in a namespace of its own")
