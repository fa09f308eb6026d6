"""llama.cpp as a library: loaded once per process, its messages kept, and its tokenizer.

The tokenizer is all that the native engine uses of it, so that token ids are equal by construction.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib.metadata
import os
import re
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

from edge_rt.backends.base import Vocab
from edge_rt.catalog.gguf import GgufHeader
from edge_rt.errors import BackendStepError, BackendUnavailableError, InvalidRequestError

_MAX_BLOCK_CHARS = 16 * 1024  # shorter texts go to llama_tokenize as they are
_MAX_BLOCK_CONTROL = 256


class Log:
    """Keeps llama.cpp's last warnings and errors for our error texts and keeps its chatter off the terminal."""

    def __init__(self, lib: Any) -> None:
        self.lines: deque[str] = deque(maxlen=8)
        self._callback = lib.llama_log_callback(self._take)  # llama.cpp holds the bare pointer: keep it alive
        lib.llama_log_set(self._callback, ctypes.c_void_p(0))

    def _take(self, level: int, text: bytes, _data: object) -> None:
        if level >= 3:  # GGML_LOG_LEVEL_WARN, ERROR and CONT of them
            line = text.decode("utf-8", "replace").strip(" .\n")
            if line:
                self.lines.append(line)

    def reason(self) -> str:
        return "; ".join(self.lines) or "llama.cpp gave no reason"


_lib: Any = None
_log: Log | None = None


def load_library() -> tuple[Any, Log]:
    """Import llama.cpp once per process. Raises BackendUnavailableError."""
    global _lib, _log  # noqa: PLW0603 - a shared library is per process, whoever asks
    if _lib is None or _log is None:
        try:
            from llama_cpp import llama_cpp as lib
        except ImportError as exc:
            raise BackendUnavailableError(
                backend="llama_cpu", reason=f"llama-cpp-python cannot be imported ({exc})", extra="llama"
            ) from exc
        # Before it aborts, ggml would run a debugger on itself; that takes seconds and buries the message.
        os.environ.setdefault("GGML_NO_BACKTRACE", "1")
        _log = Log(lib)
        lib.llama_backend_init()
        _lib = lib
        _close_at_exit()
    return _lib, _log


def _close_at_exit() -> None:
    """Close what the package opens on import and leaves to the garbage collector, which warns of it."""
    from llama_cpp import _utils

    for file in (_utils.outnull_file, _utils.errnull_file):
        atexit.register(file.close)


def system_info() -> str:
    """Give the instruction sets llama.cpp was compiled for, as it prints them."""
    lib, _ = load_library()
    return str(lib.llama_print_system_info().decode())


def version() -> str:
    return importlib.metadata.version("llama-cpp-python")


class LlamaVocab:
    """The tokenizer of a model that llama.cpp has loaded, whole or vocab-only; any thread may call it.

    close before the model is freed: what comes after it raises BackendStepError.
    """

    def __init__(self, lib: Any, model: Any, header: GgufHeader) -> None:
        self._lib = lib
        self._vocab = lib.llama_model_get_vocab(model)
        self.n_vocab = int(lib.llama_vocab_n_tokens(self._vocab))
        self._pieces: dict[int, bytes] = {}
        self._writable = self._read_writable(header)
        self.facts = self._read_facts(header)

    def _read_facts(self, header: GgufHeader) -> Vocab:
        lib, n_vocab = self._lib, self.n_vocab
        bos, eos = lib.llama_vocab_bos(self._vocab), lib.llama_vocab_eos(self._vocab)
        # What llama_tokenize finds in a text with parse_special only.
        control = lib.LLAMA_TOKEN_ATTR_CONTROL | lib.LLAMA_TOKEN_ATTR_UNKNOWN
        control_texts = {self._text(i) for i in range(n_vocab) if lib.llama_vocab_get_attr(self._vocab, i) & control}
        return Vocab(
            n_vocab=n_vocab,
            bos_id=bos,
            eos_id=eos,
            eog_ids=frozenset(i for i in range(n_vocab) if lib.llama_vocab_is_eog(self._vocab, i)),
            add_bos=bool(lib.llama_vocab_get_add_bos(self._vocab)),
            chat_template=header.chat_template,
            bos_text=self._text(bos),
            eos_text=self._text(eos),
            control_texts=frozenset(control_texts - {""}),
        )

    def _read_writable(self, header: GgufHeader) -> frozenset[str] | None:
        """Give the characters that have a token, of a vocabulary that has no token for some byte; None for any other.

        llama.cpp writes a character without a token byte by byte, and ends the process where a byte has none.
        """
        if header.metadata.get("tokenizer.ggml.model") != "llama":
            return None
        texts = {bytes(self._lib.llama_vocab_get_text(self._vocab, i) or b"") for i in range(self.n_vocab)}
        if all(b"<0x%02X>" % byte in texts or bytes([byte]) in texts for byte in range(256)):
            return None
        return frozenset(text.decode() for text in texts if len(text) <= 4 and _is_character(text))

    def _check_writable(self, text: str, control_texts: frozenset[str]) -> None:
        """Raise InvalidRequestError for a text that would end the process; control tokens are not written."""
        if self._writable is None:
            return
        for control in sorted(control_texts, key=len, reverse=True):
            text = text.replace(control, "")
        # A blank is one token of its own kind, and stands before a text too.
        for character in "\u2581" + text.replace(" ", "\u2581") if text else "":
            if character not in self._writable:
                problem = f"this model's vocabulary has no token for {character!r}, nor for its bytes"
                raise InvalidRequestError(param="prompt", problem=problem)

    def _text(self, token_id: int) -> str:
        return self.piece(token_id, special=True).decode("utf-8", "replace") if token_id >= 0 else ""

    def tokenize(self, text: str, *, special: bool, add_bos: bool = False) -> list[int]:
        self._check_open()
        add_special = add_bos and self.facts.add_bos
        if not special:
            return self._tokenize(text, special=False, add_special=add_special)
        ids: list[int] = []
        for i, block in enumerate(blocks(text, self.facts.control_texts)):
            ids += self._tokenize(block, special=True, add_special=add_special and i == 0)
        return ids

    def _tokenize(self, text: str, *, special: bool, add_special: bool) -> list[int]:
        self._check_writable(text, self.facts.control_texts if special else frozenset())
        raw = text.encode("utf-8")
        n_max = len(raw) + 2
        while True:
            ids = (ctypes.c_int32 * n_max)()
            n = self._lib.llama_tokenize(self._vocab, raw, len(raw), ids, n_max, add_special, special)
            if n >= 0:
                return list(ids[:n])
            n_max = -n  # the size it needs

    def piece(self, token_id: int, *, special: bool = False) -> bytes:
        key = token_id * 2 + special
        found = self._pieces.get(key)
        if found is None:
            if not 0 <= token_id < self.n_vocab:
                raise InvalidRequestError(
                    param="token", problem=f"id {token_id} is outside the vocabulary of {self.n_vocab}"
                )
            found = self._pieces[key] = self._read_piece(token_id, special)
        return found

    def _read_piece(self, token_id: int, special: bool) -> bytes:
        self._check_open()
        size = 64
        while True:
            buffer = ctypes.create_string_buffer(size)
            n = self._lib.llama_token_to_piece(self._vocab, token_id, buffer, size, 0, special)
            if n >= 0:
                return buffer.raw[:n]
            size = -n

    def _check_open(self) -> None:
        if self._vocab is None:
            raise BackendStepError(reason="the session is closed")

    def close(self) -> None:
        self._vocab = None


def _is_character(text: bytes) -> bool:
    try:
        return len(text.decode()) == 1
    except UnicodeDecodeError:
        return False


def blocks(text: str, control_texts: frozenset[str]) -> Iterator[str]:
    """Cut a long text behind control tokens into blocks with a bounded number of them.

    llama_tokenize takes time in the square of that number: 2 MiB of nothing else would keep it for minutes.
    """
    start = 0
    if len(text) > _MAX_BLOCK_CHARS and control_texts:
        longest_first = sorted(control_texts, key=len, reverse=True)
        found = re.finditer("|".join(map(re.escape, longest_first)), text)
        for match in islice(found, _MAX_BLOCK_CONTROL - 1, None, _MAX_BLOCK_CONTROL):
            yield text[start : match.end()]
            start = match.end()
    yield text[start:]
