"""Fixtures: `target` runs a test on every framework, device and kernel row present."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

from targets import available_targets

settings.register_profile(
    "gdn", deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None
)
settings.load_profile("gdn")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--examples", type=int, default=None,
        help="property-test examples per test and target (default 40); also draws new ones",
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    examples = config.getoption("--examples")
    settings.register_profile(
        "run", settings.get_profile("gdn"), max_examples=examples or 40, derandomize=not examples
    )
    settings.load_profile("run")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "target" in metafunc.fixturenames:
        metafunc.parametrize("target", available_targets(), ids=str, scope="session")
    if "cpu_target" in metafunc.fixturenames:
        found = [t for t in available_targets() if t.device == "cpu"]
        metafunc.parametrize("cpu_target", found, ids=str, scope="session")
