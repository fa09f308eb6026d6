from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import stamina

from edge_rt.catalog.pull import SPACE_MARGIN_BYTES
from edge_rt.catalog.store import Store
from edge_rt.errors import (
    BackendLoadError,
    DiskFullError,
    ModelChecksumError,
    ModelFormatError,
    ModelNotFoundError,
    OfflineError,
    PullError,
    StoreError,
)
from tests.file_server import FileServer, cut, stall
from tests.gguf_files import tiny_llama
from tests.unit.catalog.conftest import CONTENT, DERIVED, Shop

# A pull in a process of its own, which says where it stands.
CHILD = """
import sys
from pathlib import Path
from edge_rt.catalog.manifest import load_manifest
from edge_rt.catalog.store import Store
store = Store(Path(sys.argv[2]), (load_manifest(Path(sys.argv[1])),))
show = lambda p: print(p.phase, p.done_bytes, flush=True)
store.pull("tiny", progress=show, offline=False, derive=lambda *_: sys.exit("not to be derived"))
"""


def start_child(shop: Shop) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(shop.manifest_path), str(shop.root)], stdout=subprocess.PIPE, text=True
    )


def test_file_appears_complete_with_nothing_beside_it(shop: Shop) -> None:
    assert shop.path() is None
    path = shop.pull()
    assert path == shop.path()
    assert path.read_bytes() == CONTENT
    assert path.stat().st_mode & 0o777 == 0o644
    assert shop.files() == [".tiny.Q8_0.gguf.json", "tiny.Q8_0.gguf"]
    assert shop.phases() == ["q8_0:fetch", "q8_0:done"]


def test_second_pull_fetches_nothing(shop: Shop) -> None:
    path = shop.pull()
    shop.source_file.unlink()
    shop.steps.clear()
    assert shop.pull() == path
    assert shop.phases() == ["q8_0:done"]


def test_unknown_names(shop: Shop) -> None:
    with pytest.raises(ModelNotFoundError):
        shop.store.pull("big", progress=shop.steps.append, offline=False, derive=shop.derive)
    with pytest.raises(ModelNotFoundError):
        shop.pull("q2_k")


def test_offline(shop: Shop) -> None:
    with pytest.raises(OfflineError, match="tiny:q8_0"):
        shop.pull(offline=True)
    with pytest.raises(OfflineError, match="tiny:q8_0"):
        shop.pull("q4_0", offline=True)
    path = shop.pull()
    assert shop.pull(offline=True) == path
    assert shop.pull("q4_0", offline=True).read_bytes() == DERIVED


def test_no_room(shop: Shop) -> None:
    shop.free = len(CONTENT) + SPACE_MARGIN_BYTES - 1
    with pytest.raises(DiskFullError) as caught:
        shop.pull()
    assert (caught.value.need_bytes, caught.value.have_bytes) == (shop.free + 1, shop.free)
    assert shop.path() is None
    assert shop.store.state(shop.manifest, shop.variant()) == ("absent", 0)
    shop.free += 1
    assert shop.pull().exists()


def test_a_partial_file_needs_room_for_the_rest_only(shop: Shop) -> None:
    with FileServer(CONTENT, cut(len(CONTENT) // 2)) as server:
        shop.use(f"{server.url}/m.gguf")
        server.script.append(lambda handler: handler.head(404, {"Content-Length": "0"}))
        with stamina.set_testing(True, attempts=3), pytest.raises(PullError, match="404"):
            shop.pull()
        shop.free = len(CONTENT) - len(CONTENT) // 2 + SPACE_MARGIN_BYTES - 1
        with pytest.raises(DiskFullError):
            shop.pull()
        shop.free += 1
        assert shop.pull().read_bytes() == CONTENT
        assert server.ranges()[-1] == f"bytes={len(CONTENT) // 2}-"


def test_disk_that_fills_up_on_the_way_is_given_back(shop: Shop, small_disk: Path) -> None:
    shop.root = small_disk
    shop.use(f"file:{shop.source_file}")
    with pytest.raises(DiskFullError) as caught:
        shop.pull()
    assert caught.value.path == str(small_disk / "models" / "tiny")
    assert isinstance(caught.value.__cause__, OSError)
    assert shop.files() == []


def test_wrong_content_never_appears(shop: Shop) -> None:
    shop.source_file.write_bytes(CONTENT[:-1] + b"x")
    with pytest.raises(ModelChecksumError) as caught:
        shop.pull()
    assert caught.value.expected == shop.variant().sha256
    assert shop.path() is None
    assert shop.files() == []


def test_a_damaged_partial_file_is_fetched_anew(shop: Shop) -> None:
    with FileServer(CONTENT, cut(100_000)) as server:
        shop.use(f"{server.url}/m.gguf")
        server.script.append(lambda handler: handler.head(404, {"Content-Length": "0"}))
        with stamina.set_testing(True, attempts=3), pytest.raises(PullError):
            shop.pull()
        part = shop.beside("part")
        raw = bytearray(part.read_bytes())
        raw[500] ^= 0xFF
        part.write_bytes(raw)
        assert shop.pull().read_bytes() == CONTENT
        assert server.ranges()[-2:] == ["bytes=100000-", ""]


def test_a_partial_file_of_another_version_is_dropped(shop: Shop) -> None:
    other = bytes(len(CONTENT))
    with FileServer(other, cut(100_000), etag="") as server:
        shop.use(f"{server.url}/m.gguf", other)
        server.script.append(lambda handler: handler.head(404, {"Content-Length": "0"}))
        with stamina.set_testing(True, attempts=3), pytest.raises(PullError):
            shop.pull()
        server.content = CONTENT
        shop.use(f"{server.url}/m.gguf")
        assert shop.pull().read_bytes() == CONTENT
        assert server.ranges()[-1] == ""


def test_a_new_manifest_replaces_the_file(shop: Shop) -> None:
    shop.pull()
    newer = tiny_llama(linear="Q8_0", n_layers=17).encode()
    shop.source_file.write_bytes(newer)
    shop.use(f"file:{shop.source_file}", newer)
    assert shop.path() is None
    assert shop.pull().read_bytes() == newer


def test_complete_part_without_its_rename_is_taken_up(shop: Shop) -> None:
    path = shop.pull()
    path.rename(shop.beside("part"))
    shop.beside("part.json").write_text(f'{{"source": "{shop.variant().source}", "sha256": "{shop.variant().sha256}"}}')
    shop.source_file.unlink()
    shop.steps.clear()
    assert shop.pull().read_bytes() == CONTENT
    assert shop.phases() == ["q8_0:check", "q8_0:done"]


def test_store_that_cannot_be_written(shop: Shop) -> None:
    shop.root.write_text("a file where the directory should be")
    with pytest.raises(StoreError, match=r"cannot be written.*catalog\.store_dir"):
        shop.pull()


def test_killed_pull_goes_on_where_it_was(shop: Shop) -> None:
    half = len(CONTENT) // 2
    until = threading.Event()
    with FileServer(CONTENT, stall(half, until)) as server:
        shop.use(f"{server.url}/m.gguf")
        with start_child(shop) as child:
            assert child.stdout is not None
            while child.stdout.readline() != f"fetch {half}\n":
                assert child.poll() is None
            child.kill()
            assert child.wait() == -signal.SIGKILL
        until.set()
        assert shop.pull().read_bytes() == CONTENT
    assert server.ranges() == ["", f"bytes={half}-"]
    assert shop.phases() == ["q8_0:check", "q8_0:fetch", "q8_0:done"]


def test_second_process_waits_and_finds_it_done(shop: Shop) -> None:
    until = threading.Event()

    def slow(handler: object) -> None:
        stall(1000, until)(handler)  # type: ignore[arg-type]
        handler.wfile.write(CONTENT[1000:])  # type: ignore[attr-defined]

    with FileServer(CONTENT, slow) as server:
        shop.use(f"{server.url}/m.gguf")
        with start_child(shop) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == "fetch 1000\n"
            # The second pull itself lets the first go on, and does so only once it waits.
            store = Store(shop.root, (shop.manifest,))
            phases: list[str] = []

            def progress(step: object) -> None:
                phases.append(step.phase)  # type: ignore[attr-defined]
                until.set()

            path = store.pull("tiny", progress=progress, offline=False, derive=shop.derive)
            assert child.wait() == 0
    assert phases == ["wait", "done"]
    assert path.read_bytes() == CONTENT
    assert len(server.seen) == 1


def test_derived_variant_brings_its_parent_and_is_kept(shop: Shop) -> None:
    path = shop.pull("q4_0")
    assert path == shop.path("q4_0")
    assert path.read_bytes() == DERIVED
    assert shop.path("q8_0") is not None
    assert shop.phases() == [
        "q8_0:fetch",
        "q8_0:done",
        "q4_0:derive",
        "q4_0:check",
        "q4_0:done",
    ]
    record = shop.store.record(shop.manifest, shop.variant("q4_0"))
    assert record is not None
    assert (record.parent_sha256, record.tool, record.size_bytes) == (
        shop.variant("q8_0").sha256,
        "quantiser 1",
        len(DERIVED),
    )
    assert shop.pull("q4_0") == path
    assert shop.n_derived == 1


def test_derived_again_when_the_tool_changes(shop: Shop) -> None:
    shop.pull("q4_0")
    shop.tool = "quantiser 2"
    assert shop.path("q4_0") is not None  # what is there stays usable until the next pull
    shop.pull("q4_0")
    assert shop.n_derived == 2


def test_derived_again_when_the_parent_changes(shop: Shop) -> None:
    shop.pull("q4_0")
    newer = tiny_llama(linear="Q8_0", n_layers=17).encode()
    shop.source_file.write_bytes(newer)
    shop.use(f"file:{shop.source_file}", newer)
    assert shop.path("q4_0") is None
    shop.pull("q4_0")
    assert shop.n_derived == 2


def test_derived_file_outlives_its_parent(shop: Shop) -> None:
    path = shop.pull("q4_0")
    shop.store.remove("tiny", "q8_0")
    assert shop.path("q4_0") == path
    shop.tool = "quantiser 2"
    assert shop.pull("q4_0", offline=True) == path
    assert shop.n_derived == 1
    assert shop.path("q8_0") is None


def test_quantiser_that_fails_leaves_nothing(shop: Shop) -> None:
    def fail(src: Path, dst: Path, how: object) -> None:
        dst.write_bytes(b"half")
        raise BackendLoadError(model=src.name, reason="no")

    with pytest.raises(BackendLoadError):
        shop.store.pull("tiny", "q4_0", progress=shop.steps.append, offline=False, derive=fail)
    assert shop.files() == [".tiny.Q8_0.gguf.json", "tiny.Q8_0.gguf"]


def test_quantiser_that_falls_back_to_another_type_is_caught(shop: Shop) -> None:
    shop.derived = tiny_llama(linear="Q8_0").encode()
    with pytest.raises(ModelFormatError, match="most are Q8_0, not Q4_0"):
        shop.pull("q4_0")
    assert shop.path("q4_0") is None


def test_no_room_to_derive(shop: Shop) -> None:
    shop.pull()
    shop.free = SPACE_MARGIN_BYTES
    with pytest.raises(DiskFullError):
        shop.pull("q4_0")
    assert shop.n_derived == 0


def test_disk_that_fills_up_while_quantising(shop: Shop) -> None:
    def fail(src: Path, dst: Path, how: object) -> None:
        dst.write_bytes(b"half")
        shop.free = 4096
        raise BackendLoadError(model=src.name, reason="iostream error")

    with pytest.raises(DiskFullError):
        shop.store.pull("tiny", "q4_0", progress=shop.steps.append, offline=False, derive=fail)
    assert shop.files() == [".tiny.Q8_0.gguf.json", "tiny.Q8_0.gguf"]


def test_nothing_is_written_through_a_planted_link(shop: Shop, tmp_path: Path) -> None:
    """Only files below the store change, whatever stands where the file should go."""
    outside = tmp_path / "outside"
    outside.write_text("precious")
    target = shop.root / "models" / "tiny" / "tiny.Q8_0.gguf"
    target.parent.mkdir(parents=True)
    target.symlink_to(outside)
    shop.pull()
    assert outside.read_text() == "precious"
    assert not target.is_symlink()
    assert target.read_bytes() == CONTENT
