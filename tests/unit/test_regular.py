from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from edge_rt import assembly, config
from edge_rt.api.callers import ApiKeys
from edge_rt.catalog import fetch
from edge_rt.catalog.chains import load_chain
from edge_rt.catalog.gguf import read_header
from edge_rt.catalog.manifest import load_manifest
from edge_rt.cloud import address, credential
from edge_rt.devices import board_table
from edge_rt.devices.sysfs import SysfsRoot
from edge_rt.errors import ConfigError, ModelFormatError
from edge_rt.power import calibration, settings
from edge_rt.regular import open_regular, read_regular
from edge_rt.router import confidence, learning, weights
from edge_rt.scheduler import profile

HUGE_BYTES = 2**30


def own_board(path: Path) -> object:
    folder = path.parent / "root" / board_table.OWN
    folder.mkdir(parents=True)
    (folder / "own.toml").symlink_to(path)
    return board_table.own(SysfsRoot(path.parent / "root"))


def raise_first(problems: tuple[str, ...]) -> None:
    """A profile is left out with a reason; here that counts as an error like the others."""
    raise ConfigError(key="placement.profile_file", problem=problems[0], origin="")


# Everything that reads a file which somebody else has named or may have put there.
READERS: dict[str, Callable[[Path], object]] = {
    "the daemon's configuration": lambda path: config.load(path, environ={}),
    "powerd's configuration": lambda path: settings.load(str(path)),
    "server.api_keys_file": ApiKeys.load,
    "catalog.hub_token_file": lambda path: fetch.read_token(str(path)),
    "cloud.*.api_key_file": lambda path: credential.load_key("cloud.a.api_key_file", str(path)),
    "a systemd credential": lambda path: credential.load_key(
        "cloud.a.api_key_file", f"credential:{path.name}", {"CREDENTIALS_DIRECTORY": str(path.parent)}
    ),
    "cloud.*.ca_file": lambda path: address.tls_context(str(path)),
    "power.model_file": calibration.read,
    "placement.profile_file": lambda path: raise_first(profile.read(path)[1]),
    "the owner's board": own_board,
    "a manifest": load_manifest,
    "a chain": load_chain,
    "the judge's table": confidence.Judge.load,
    "the router's labels": learning.Labels.load,
    "the router's weights": weights.load,
}


@pytest.fixture(params=["pipe", "device", "directory", "huge"])
def wrong(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "named.toml"
    if request.param == "pipe":
        os.mkfifo(path, 0o600)
    elif request.param == "device":
        path.symlink_to("/dev/zero")
    elif request.param == "directory":
        path.mkdir()
    else:
        with path.open("wb") as file:
            path.chmod(0o600)
            file.truncate(HUGE_BYTES)  # takes no place on the disk
    return path


@pytest.mark.parametrize("read", READERS.values(), ids=READERS.keys())
def test_what_is_no_file_of_that_kind_is_refused_at_once(read: Callable[[Path], object], wrong: Path) -> None:
    """A pipe would be waited for, a device read for ever, and a large file would take all memory."""
    with pytest.raises((ConfigError, ModelFormatError, OSError)) as caught:
        read(wrong)
    said = str(caught.value)
    assert any(word in said for word in ("regular file", "Is a directory", "bytes", "characters")), said


def test_a_ledger_that_is_a_pipe_counts_as_spent(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "ledger")
    budget = assembly._budget(config.Router(max_cost_per_day=5.0), tmp_path / "ledger")
    assert budget.spent == 5.0


def test_models_are_opened_so_too(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ModelFormatError, match="not a regular file"):
        read_header(tmp_path / "pipe")


def test_a_regular_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"content")
    with open_regular(path) as file:
        assert file.read() == b"content"
    assert read_regular(path, 7) == b"content"
    with pytest.raises(OSError, match="more than 6 bytes"):
        read_regular(path, 6)


def test_a_file_that_tells_no_size_is_read_whole() -> None:
    assert read_regular(Path("/proc/self/status"), 2**16).startswith(b"Name:")
