from __future__ import annotations

import copy
import pickle
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from edge_rt.cloud.credential import Key, KeyFile, load_key
from edge_rt.errors import ConfigError

KEY = "sk-abcdefghijklmnop"


def key_file(tmp_path: Path, text: str | bytes = KEY, mode: int = 0o600) -> str:
    file = tmp_path / "key"
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    file.chmod(mode)
    return str(file)


def problem(value: str, environ: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_key("cloud.big.api_key_file", value, environ or {})
    assert KEY not in str(caught.value)
    return caught.value.problem


def test_a_key_is_read_from_its_file(tmp_path: Path) -> None:
    key = load_key("k", key_file(tmp_path, f"  {KEY}\n"))
    assert key is not None
    assert key.authorization() == f"Bearer {KEY}".encode()
    assert load_key("k", "") is None


@pytest.mark.parametrize("mode", [0o604, 0o644, 0o620, 0o666, 0o602])
def test_a_file_others_may_use_is_refused(tmp_path: Path, mode: int) -> None:
    assert f"mode {mode:04o}" in problem(key_file(tmp_path, mode=mode))


def test_a_file_the_group_may_read_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert load_key("k", key_file(tmp_path, mode=0o640)) is not None
    assert "its group may read a key" in caplog.text


@pytest.mark.parametrize("text", ["", "\n\n", f"{KEY}\nanother", "with blank", "schlüssel", "x" * 9000, b"\x00\xff"])
def test_a_file_without_one_key_is_refused(tmp_path: Path, text: str | bytes) -> None:
    assert "must hold one key" in problem(key_file(tmp_path, text))


def test_a_directory_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    assert "cannot be read" in problem(str(tmp_path))
    assert "cannot be read" in problem(str(tmp_path / "none"))


def test_a_credential_of_systemd_is_read_by_name(tmp_path: Path) -> None:
    key_file(tmp_path, mode=0o440)
    found = load_key("k", "credential:key", {"CREDENTIALS_DIRECTORY": str(tmp_path)})
    assert found is not None
    assert found.authorization().endswith(KEY.encode())
    assert "LoadCredential" in problem("credential:key")
    for name in ("../key", "a/b", "", ".."):
        assert "no name of a credential" in problem(f"credential:{name}", {"CREDENTIALS_DIRECTORY": str(tmp_path)})


def test_a_key_shows_itself_nowhere() -> None:
    key = Key(KEY)
    assert KEY not in f"{key} {key!r} {key!s} {vars(Key)}"
    with pytest.raises(TypeError):
        pickle.dumps(key)
    with pytest.raises(TypeError):
        copy.deepcopy(key)


def test_a_key_is_taken_out_of_what_a_server_says() -> None:
    key = Key(KEY)
    assert key.censored(f"bad key '{KEY}', begins {KEY[:10]}...") == "bad key '***', begins ***"
    assert key.censored(f"bad key {KEY[:10]}, sorry") == "bad key ***, sorry"
    assert key.censored("sk-ab is short") == "sk-ab is short"
    assert key.censored(f"{KEY.lower()} and {KEY.upper()}") == "*** and ***"
    assert key.censored(f"?key={KEY[:12]}&x, [{KEY[3:]}] Ü{KEY[:-1]}ß") == "?key=***&x, [***] Ü***ß"
    assert key.censored(f"{KEY}{KEY}") == "***"
    assert Key("pass").censored("a pass, a PASS word") == "a ***, a *** word"


def test_memory_with_a_key_is_not_dumped() -> None:
    code = (
        "import ctypes, resource; from edge_rt.cloud.credential import hide_memory; hide_memory();"
        "print(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0), resource.getrlimit(resource.RLIMIT_CORE)[0])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "0"]
    assert resource.getrlimit(resource.RLIMIT_CORE) is not None


def test_a_file_that_was_replaced_is_read_again(tmp_path: Path) -> None:
    keys = KeyFile("k", key_file(tmp_path), {})
    first = keys.current()
    assert keys.current() is first is keys.key
    other = tmp_path / "other"
    other.write_text("sk-another-key-of-all")
    other.chmod(0o600)
    other.rename(tmp_path / "key")
    assert keys.key is first
    found = keys.current()
    assert found is not None
    assert found.authorization() == b"Bearer sk-another-key-of-all"


@pytest.mark.parametrize(("text", "mode"), [("", 0o600), ("two keys", 0o600), (None, 0), ("sk-readable-by-all", 0o644)])
def test_a_file_that_became_none_is_told_once_and_the_last_key_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str | None, mode: int
) -> None:
    keys = KeyFile("k", key_file(tmp_path), {})
    first = keys.current()
    if text is None:
        (tmp_path / "key").unlink()
    else:
        key_file(tmp_path, text, mode)
    assert keys.current() is keys.current() is first
    assert caplog.text.count("the key that was read before stays in use") == 1
    assert KEY not in caplog.text
    key_file(tmp_path, "sk-another-key-of-all")
    assert keys.current() is not first


def test_a_key_that_was_refused_is_read_again_though_its_file_looks_the_same(tmp_path: Path) -> None:
    same = Path(key_file(tmp_path)).stat()
    keys = KeyFile("k", str(tmp_path / "key"), {}, status=lambda _: same)  # as where times are whole seconds
    first = keys.current()
    keys.doubt()
    assert keys.current() is first
    key_file(tmp_path, "sk-another-key-of-all")
    assert keys.current() is first
    keys.doubt()
    assert keys.current() is not first
