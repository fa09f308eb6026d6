"""Hold answers to a grammar: which tokens may come next, and which must.

The library llguidance does the parsing (docs/structured.md says why this one). It is an extra: without it a request
for structure is refused, and nothing else is touched. A grammar that is new is compiled on trial first, in a process
that can be ended (grammar_trial.py). A compiled one is kept for the next request that names the same; a request's own
state is a copy of it, and what all copies learn of the grammar's tokens lies in one place, which grows.
"""

from __future__ import annotations

import re
import time
import weakref
from collections.abc import Callable, Sequence
from functools import cached_property
from queue import SimpleQueue
from threading import Lock
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from edge_rt.backends.base import TokenSession, Vocab
from edge_rt.engine import grammar_trial
from edge_rt.engine.grammar_store import GrammarStore, Kept, key_of
from edge_rt.engine.grammar_trial import LIMITS, Trial, Trials
from edge_rt.errors import EdgeRtError, GrammarsFullError, InvalidRequestError, UnsupportedFeatureError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_GRAMMAR_BYTES: Final = 16 * 2**20  # of one, compiled
MAX_KEPT_BYTES: Final = 32 * 2**20  # of those that are kept for the next request
MAX_USED_BYTES: Final = 64 * 2**20  # of those that one tenant's unfinished requests have
# That a grammar grows by with each unit its lexer takes: measured were 4 to 85. A state took 5.6 units at the least,
# so one that is used up leaves before it has as many states as it may, after which each answer would fail.
_FUEL_BYTES: Final = 100
_FUEL: Final = re.compile(r'"lexer_cost": (\d+)')
_NO_TOKEN: Final = 2**31
# Tokens that the library allows or bans together: the library's own set, and lengths between. Near the end of a text
# of bounded length the worst mask of 152,064 tokens took 1.6 ms without these, and takes 0.2.
_CHAR: Final = r'[^"\\\x00-\x1F\x7F]'
_SLICES: Final = (r"[\x20\x0A\x0D\x09]+", *(f"{_CHAR}{{1,{n}}}" for n in (10, 20, 30, 60)), f"{_CHAR}+")
# The loop waits for a grammar. Ordinary ones take 0.05 ms a token; one that takes more than this is given up.
_FREE_S: Final = 0.5
_MAX_TOKEN_S: Final = 0.005


class Grammars:
    """The grammars of one session. Any thread may compile; what compile gives is one request's.

    clock   seconds of CPU time of the calling thread
    trials  where grammars are compiled first; None: in the child that all of this process share
    """

    def __init__(
        self,
        session: TokenSession,
        *,
        clock: Callable[[], float] = time.thread_time,
        trials: Trials | None = None,
        max_kept_bytes: int = MAX_KEPT_BYTES,
        max_used_bytes: int = MAX_USED_BYTES,
    ) -> None:
        self._session = session
        self._clock = clock
        self._trials = trials or grammar_trial.shared()
        self._tokenizer: LLTokenizer | None = None
        self._kept = GrammarStore(max_kept_bytes)
        self._max_used_bytes = max_used_bytes
        self._used_bytes: dict[str, int] = {}  # by tenant
        # Put by the collector, which may hold any lock.
        self._ended: SimpleQueue[tuple[str, Kept, LLMatcher]] = SimpleQueue()
        self._lock, self._compiling, self._reading = Lock(), Lock(), Lock()

    @property
    def kept_bytes(self) -> int:
        """Memory of compiled grammars that are kept for other requests."""
        with self._lock:
            self._settle_ended()
            return self._kept.n_bytes

    def compile(self, text: str, param: str, *, tenant: str = "", ignores_eos: bool = False) -> Constraint:
        """Compile a grammar.

        text    llguidance's Lark notation
        param   the request's field that it comes from, for errors
        tenant  who asks

        Raises InvalidRequestError for one that is wrong, allows nothing or takes too much, UnsupportedFeatureError
        where the library is missing, GrammarsFullError for a tenant whose other requests use as much as they may.
        """
        try:
            key = key_of(text.encode())
        except UnicodeEncodeError as exc:
            raise InvalidRequestError(param=param, problem="holds a lone surrogate") from exc
        with self._lock:
            self._settle_ended()
            kept = self._kept.get(tenant, key)
        if kept is None:
            with self._compiling:  # one at a time: grammars that take long shall not take every core
                with self._lock:
                    kept = self._kept.get(tenant, key)
                if kept is None:
                    kept = self._compile(text, key)
                    with self._lock:
                        self._kept.put(tenant, kept)
        if kept.problem:
            raise refusal(kept.problem, param)
        self._use(tenant, kept)
        matcher = kept.matcher.deep_copy()
        own = Constraint(matcher, param, self._session.vocab, ignores_eos=ignores_eos, clock=self._clock)
        weakref.finalize(own, self._ended.put, (tenant, kept, matcher)).atexit = False
        return own

    def check_present(self) -> None:
        """Raise UnsupportedFeatureError where the library is missing."""
        if self._tokenizer is None:
            check_library()
            self._trials.prepare()  # it starts while the vocabulary is read
        self._tokens()

    def token_ids(self, raw: bytes) -> list[int]:
        """Give tokens that make these bytes."""
        return list(self._tokens().tokenize_bytes(raw))

    def _use(self, tenant: str, kept: Kept) -> None:
        """Count what a request's grammar takes, once for all that have it. Raises GrammarsFullError."""
        with self._lock:
            used = self._used_bytes.get(tenant, 0)
            if not kept.n_users:
                if used + kept.n_bytes > self._max_used_bytes:
                    raise GrammarsFullError(
                        needed_bytes=kept.n_bytes, used_bytes=used, limit_bytes=self._max_used_bytes
                    )
                self._used_bytes[tenant] = used + kept.n_bytes
            kept.n_users += 1

    def _settle_ended(self) -> None:
        while not self._ended.empty():
            self._settle(*self._ended.get())

    def _settle(self, tenant: str, kept: Kept, matcher: LLMatcher) -> None:
        """Count a request that has ended, and what its answer has taught the grammar."""
        fuel = fuel_taken(matcher)
        n_grown = max(0, fuel - kept.fuel) * _FUEL_BYTES
        kept.fuel = max(kept.fuel, fuel)
        self._kept.grow(tenant, kept, n_grown)
        kept.n_users -= 1
        used = self._used_bytes.pop(tenant, 0) + n_grown - (0 if kept.n_users else kept.n_bytes)
        if used:
            self._used_bytes[tenant] = used

    def _compile(self, text: str, key: bytes) -> Kept:
        tokenizer = self._tokens()
        if problem := problem_of(trial := self._trials.compile(text)):
            return Kept(key, problem=problem)
        from llguidance import LLMatcher, LLParserLimits

        matcher = LLMatcher(tokenizer, text, log_level=0, limits=LLParserLimits(**LIMITS))
        if not matcher.is_error():
            matcher.compute_bitmask()  # some fail with the first token only
        if matcher.is_error():
            return Kept(key, problem=reason(matcher))
        return Kept(key, matcher, n_bytes=trial.n_bytes, fuel=fuel_taken(matcher))

    def _tokens(self) -> LLTokenizer:
        with self._reading:
            if self._tokenizer is None:
                self._tokenizer = read_vocabulary(self._session)
            return self._tokenizer


def fuel_taken(matcher: LLMatcher) -> int:
    """Give the fuel that a grammar's lexer has taken since it was compiled, with all answers up to this matcher's last
    token: they share the lexer. The library tells it in its errors alone.
    """
    probe = matcher.deep_copy()
    if not probe.is_error():
        probe.consume_token(_NO_TOKEN)
    found = _FUEL.search(probe.get_error())
    return int(found[1]) if found else 0


def problem_of(trial: Trial) -> str:
    """Say why a grammar that was compiled on trial is not compiled; "" if it is."""
    if trial.limit:
        return f"takes more than {trial.limit} to compile, which is the limit; simplify it"
    if trial.n_bytes > MAX_GRAMMAR_BYTES:
        limit = MAX_GRAMMAR_BYTES // 2**20
        return f"takes {trial.n_bytes / 2**20:.0f} MiB once it is compiled, the limit is {limit} MiB; simplify it"
    return plain_reason(trial.problem) if trial.problem else ""


def refusal(problem: str, param: str) -> EdgeRtError:
    """Give the error of a grammar with a problem."""
    if "oneOf constraints" in problem:
        feature = f"oneOf in {param} with branches that an instance may meet together"
        return UnsupportedFeatureError(feature=feature, remedy="use anyOf, or a const that tells them apart")
    return InvalidRequestError(param=param, problem=problem)


class Constraint:
    """One answer's place in its grammar: a Form. Made by Grammars."""

    __slots__ = (
        "__weakref__",
        "_address",
        "_bits",
        "_clock",
        "_eog_ids",
        "_ignores_eos",
        "_matcher",
        "_n_taken",
        "_n_vocab",
        "_param",
        "_spent_s",
    )

    def __init__(
        self,
        matcher: LLMatcher,
        param: str,
        vocab: Vocab,
        *,
        ignores_eos: bool,
        clock: Callable[[], float],
    ) -> None:
        self._matcher = matcher
        self._param = param
        self._n_vocab = vocab.n_vocab
        self._eog_ids = sorted(vocab.eog_ids)
        self._ignores_eos = ignores_eos
        self._clock = clock
        self._bits = np.empty(-(-vocab.n_vocab // 32) * 4, np.uint8)
        self._address = self._bits.ctypes.data
        self._n_taken = 0
        self._spent_s = 0.0

    @property
    def allowed(self) -> Constraint:
        return self

    @property
    def is_whole(self) -> bool:
        return bool(self._matcher.is_stopped())

    def allows(self, token_id: int) -> bool:
        """Say whether a token may come next; much faster than mask."""
        began_s = self._clock()
        may_come = self._may_come(token_id)
        self._account(began_s)
        return may_come

    def first(self, token_ids: Sequence[int], n: int) -> list[int]:
        """Give the first n of the tokens that may come next; fewer if the first of all show that many may not."""
        began_s = self._clock()
        found: list[int] = []
        for i, token_id in enumerate(token_ids, 1):
            if self._may_come(token_id):
                found.append(token_id)
                if len(found) == n:
                    break
            elif i - len(found) > max(2, i // 4):
                break
        self._account(began_s)
        return found

    def n_allowed(self, token_ids: Sequence[int]) -> int:
        """Count how many of the tokens may come next, one after the other."""
        return int(self._matcher.validate_tokens(list(token_ids)))

    def mask(self) -> NDArray[np.bool_]:
        """Say of every token whether it may come next: (n_vocab,)."""
        began_s = self._clock()
        self._matcher.unsafe_compute_mask_ptr(self._address, self._bits.nbytes)
        self._account(began_s)
        mask = np.unpackbits(self._bits, count=self._n_vocab, bitorder="little").view(np.bool_)
        if self._ignores_eos:
            mask[self._eog_ids] = False
        return mask

    def take(self, token_id: int, *, forces: bool) -> list[int]:
        """Move past a token that may come next.

        forces  also past those after it that leave the model no choice; they are given with it
        """
        self.skip([token_id])
        return [token_id, *self.force()] if forces else [token_id]

    def skip(self, token_ids: Sequence[int]) -> None:
        """Move past tokens that may come next."""
        began_s = self._clock()
        self._matcher.consume_tokens(list(token_ids))
        self._n_taken += len(token_ids)
        self._account(began_s)

    def force(self) -> list[int]:
        """Move past the tokens that leave no choice, and give them."""
        if self._matcher.is_stopped():
            return []
        began_s = self._clock()
        forced = list(self._matcher.compute_ff_tokens())
        if forced:
            self._matcher.consume_tokens(forced)
            self._n_taken += len(forced)
        self._account(began_s)
        return forced

    def _may_come(self, token_id: int) -> bool:
        if token_id in self._eog_ids:  # the library does not ask for it where nothing else is left
            return not self._ignores_eos and bool(self._matcher.is_accepting())
        return bool(self._matcher.validate_tokens([token_id]))

    def _account(self, began_s: float) -> None:
        self._spent_s += self._clock() - began_s
        if self._matcher.is_error():
            raise InvalidRequestError(
                param=self._param, problem=f"after {self._n_taken} tokens: {reason(self._matcher)}"
            )
        if self._spent_s > _FREE_S + _MAX_TOKEN_S * self._n_taken:
            problem = f"took {self._spent_s:.2g} s of computing for {self._n_taken} tokens; simplify it"
            raise InvalidRequestError(param=self._param, problem=problem)


def reason(matcher: LLMatcher) -> str:
    """Give the first line of a matcher's error; of a regular expression, what is wrong with it."""
    return plain_reason(str(matcher.get_error()))


def plain_reason(text: str) -> str:
    if "NoExtensionBias" in text:  # the library's word for it
        return "allows no answer at all, as what refers to itself without an end, or to nothing"
    text = text.replace("<non-verbose/>", "").replace("failed to compile JSON schema: ", "")
    if "regex parse error:" in text:  # the expression and an arrow stand in between
        found = re.search(r"^error: (.+)$", text, re.MULTILINE)
        return f"cannot be read as a regular expression: {found[1] if found else 'it is too long'}"[:300]
    return re.sub(r"^(at )?\d+\(\d+\): ", "", text).strip().partition("\n")[0][:300]


def check_library() -> None:
    """Raise UnsupportedFeatureError where the library is missing."""
    try:
        import llguidance  # noqa: F401
    except ImportError as exc:
        remedy = "install the library for it with `pip install 'edge_rt[structured]'`"
        raise UnsupportedFeatureError(feature="an answer in a given form", remedy=remedy) from exc


def read_vocabulary(session: TokenSession) -> LLTokenizer:
    """Tell the library what tokens there are. Raises UnsupportedFeatureError where it is missing.

    Takes half a second for 49 thousand tokens.
    """
    check_library()
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(
        TokenizerWrapper(_Words(session)),
        n_vocab=session.caps.n_vocab,
        eos_token=sorted(session.vocab.eog_ids),
        slices=list(_SLICES),
    )


class _Words:
    """A vocabulary as the library asks for it. Tokens without text of their own are special: no text makes them."""

    def __init__(self, session: TokenSession) -> None:
        self._session = session
        n_vocab = session.caps.n_vocab
        self.eos_token_id = min(session.vocab.eog_ids)
        self.bos_token_id = session.vocab.bos_id if session.vocab.bos_id >= 0 else None
        texts = [session.piece(i) for i in range(n_vocab)]
        self.special_token_ids = [i for i, text in enumerate(texts) if not text]
        self.tokens = [text or (session.piece(i, special=True) or b"<empty %d>" % i) for i, text in enumerate(texts)]
        self._texts = texts

    def __call__(self, text: str) -> list[int]:
        """Tokenise as the model would."""
        if isinstance(text, bytes):  # the library tries whether they are taken
            raise TypeError("text is a str")
        token_ids = self._session.tokenize(text, special=False)
        # Some vocabularies put a space before every text. The library wants the tokens of this text and no other.
        if token_ids and b"".join(self._texts[i] for i in token_ids) != text.encode("utf-8", "replace"):
            return self._longest(text.encode("utf-8", "replace"))
        return token_ids

    @cached_property
    def _by_text(self) -> dict[bytes, int]:
        return {text: i for i, text in reversed(list(enumerate(self._texts))) if text}

    @cached_property
    def _max_bytes(self) -> int:
        return max(map(len, self._texts))

    def _longest(self, raw: bytes) -> list[int]:
        token_ids: list[int] = []
        at = 0
        while at < len(raw):
            for n in range(min(self._max_bytes, len(raw) - at), 0, -1):
                if (token_id := self._by_text.get(raw[at : at + n])) is not None:
                    token_ids.append(token_id)
                    at += n
                    break
            else:  # a vocabulary without this byte: the library finds that the tokens make another text
                at += 1
        return token_ids
