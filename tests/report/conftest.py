"""The made-up run and its report, which tests only read."""

from pathlib import Path

import pytest

from specextend.report import build_report
from tests.report.made_up import PRICE, write_run


@pytest.fixture(scope="session")
def made_up(tmp_path_factory):
    """The folder of a run with two starts, errors and restarts."""
    return Path(write_run(tmp_path_factory.mktemp("made-up") / "run", price_per_worker_hour=PRICE))


@pytest.fixture(scope="session")
def report(made_up):
    return build_report(str(made_up))
