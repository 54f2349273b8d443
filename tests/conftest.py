"""Fixtures: `target` runs a test on every framework, device and kernel row present."""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest
from hypothesis import HealthCheck, settings

from cases import Defaults
from targets import available_targets, is_unserved

# JAX would take most of a GPU for itself, and other processes test on it too.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

settings.register_profile(
    "gdn", deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None
)
settings.load_profile("gdn")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--examples",
        type=int,
        default=None,
        help="property-test examples per test and target (default 40); also draws new ones",
    )
    parser.addoption(
        "--targets", default="", help="run on the targets whose name holds this, such as cuda"
    )


def pytest_configure(config: pytest.Config) -> None:
    examples = config.getoption("--examples")
    settings.register_profile(
        "run", settings.get_profile("gdn"), max_examples=examples or 40, derandomize=not examples
    )
    settings.load_profile("run")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    wanted = metafunc.config.getoption("--targets")
    found = [t for t in available_targets() if wanted in str(t)]
    choices = {
        "target": found,
        "cpu_target": [t for t in found if t.device == "cpu"],
        "torch_cuda": [t for t in found if str(t).startswith("torch-cuda")],
    }
    for name, targets in choices.items():
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, targets, ids=str, scope="session")


@pytest.fixture(autouse=True)
def head_size(request: pytest.FixtureRequest) -> None:
    """Calls of a test have the head size that its target serves, or HEAD_SIZE of the module."""
    names = {"target", "torch_cuda"} & set(request.fixturenames)
    served = request.getfixturevalue(names.pop()).head_size if names else 64
    Defaults.head_size = getattr(request.module, "HEAD_SIZE", served)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """A row that does not serve a test's head size skips it, wherever the test makes its call."""
    try:
        return (yield)
    except NotImplementedError as error:
        if is_unserved(error):
            pytest.skip(str(error))
        raise
