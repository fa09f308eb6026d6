"""Fixtures for every test: a clean environment, a clock, stores, and the real model where it has been pulled."""

from __future__ import annotations

import os
import re
import shutil
import signal
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from edge_rt import config
from tests.fakes import FakeClock

# How fast examples are made and run says more about the machine's load than about the code. In CI the examples are the
# same each time, so that a red run means a change; everywhere else new ones are drawn.
settings.register_profile(
    "edge_rt",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=bool(os.environ.get("CI")),
    print_blob=True,
)
settings.load_profile("edge_rt")

# A Unix socket's path may have 107 bytes, of which a long TMPDIR would leave too few.
if len(tempfile.gettempdir()) > 40:
    tempfile.tempdir = os.environ["TMPDIR"] = "/tmp"


# Who was started in the background, or by nohup, ignores these signals, and so do all processes that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGTERM, signal.SIG_DFL)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--models-are-here", action="store_true", help="Fail where a model or llama-server is missing: no skip."
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with files of slow tests where processes share the tests, so that none works on alone at the end."""
    if hasattr(config, "workerinput"):
        slow = {item.path for item in items if item.get_closest_marker("slow")}
        items.sort(key=lambda item: item.path not in slow)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fail what would be skipped for want of a model that `make test` forgot to pull, or what it could not compile."""
    report = yield
    if report.skipped and item.config.getoption("models_are_here") and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2]
        if re.search(r"is not in the (local )?store|there is no llama-server", reason):
            report.outcome, report.longrepr = "failed", reason
    return report


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the developer's own settings, so that a test sees the defaults."""
    for name in [name for name in os.environ if name.startswith("EDGE_RT")]:
        monkeypatch.delenv(name)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def store_dir(tmp_path: Path) -> Path:
    """An empty store of this test's own."""
    path = tmp_path / "store"
    path.mkdir()
    return path


@pytest.fixture
def socket_dir() -> Iterator[Path]:
    """A directory with a short name: a Unix socket's path may have 107 bytes, and tmp_path is often longer."""
    path = Path(tempfile.mkdtemp(prefix="ert-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="session")
def model_forms() -> dict[str, Path]:
    """The files of the default model in this machine's own store, by form; session-wide as model_store."""
    from edge_rt.catalog.store import Store

    settings = config.load().config.catalog
    store = Store.open(settings, os.environ)
    manifest = store.get(settings.default_model)
    found = {variant.id: store.path(manifest, variant) for variant in manifest.variants}
    return {name: path for name, path in found.items() if path is not None}


@pytest.fixture(scope="session")
def model_store() -> Path:
    """The file of the default model in this machine's own store, in the form that runs here.

    Session-wide, so it reads the environment before _clean_environment has emptied it: EDGE_RT__CATALOG__STORE_DIR
    chooses another store for a whole test run.
    """
    from edge_rt.catalog.store import Store, pick_variant
    from edge_rt.devices import cpu

    settings = config.load().config.catalog
    store = Store.open(settings, os.environ)
    manifest = store.get(settings.default_model)
    if (path := store.path(manifest, pick_variant(manifest, cpu.features()))) is None:
        pytest.skip(f"{manifest.id} is not in the store; `edge_rt models pull` fetches it")
    return path
