"""A request that is answered by a beam search: one sequence to the loop, several in the KV."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as ListOf
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_rt.backends.base import SeqRows, TokenSession
from edge_rt.engine.beams import BeamSearch, max_answer, moves
from edge_rt.engine.drafts import PromptLookup
from edge_rt.engine.form import Form
from edge_rt.engine.prefix import Slot
from edge_rt.engine.sampling import Sampler
from edge_rt.engine.sequence import Sequence, Sink
from edge_rt.engine.text import TextStream
from edge_rt.errors import ContextLengthError, InvalidRequestError, UnsupportedFeatureError
from edge_rt.types import (
    Beams,
    Capabilities,
    Chunk,
    FinishReason,
    GenerateRequest,
    Hypothesis,
    Timings,
    Usage,
)


@dataclass(slots=True, eq=False, kw_only=True)
class BeamSequence(Sequence):
    """A sequence and its beams.

    token_ids and slot are the first beam's: the loop finds one token to compute, and its row stands for all of them.
    A search that is preempted goes on where it was, if what its beams held is kept; else it begins again at the end of
    the prompt: it has sent nothing, and finds the same.

    places  the slots of all beams; order  which of them each beam is in, in the search's order
    """

    search: BeamSearch
    places: list[Slot] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    found: tuple[Hypothesis, ...] = ()

    @property
    def n_places(self) -> int:
        return self.search.settings.n_beams

    @property
    def n_answer(self) -> int:
        return sum(hypothesis.n_tokens for hypothesis in self.found)

    def n_cells(self, caps: Capabilities, n_growth: int) -> int:
        n_answer = len(self.token_ids) - self.n_prompt + n_growth
        if caps.copies_share:
            return caps.n_cells(self.n_prompt) + self.n_places * caps.n_cells(n_answer)
        return self.n_places * caps.n_cells(self.n_prompt + n_answer)

    def rows(self, n: int, draft: ListOf[int]) -> list[SeqRows]:
        return [replace(own, shares=True) for own in self._rows(n, draft)]

    def _rows(self, n: int, draft: ListOf[int]) -> list[SeqRows]:
        if not self.order:  # the prompt
            return Sequence.rows(self, n, draft)
        missing = [(slot, ids[len(slot.token_ids) :]) for slot, ids in zip(self._slots, self._beam_ids(), strict=True)]
        if any(len(ids) > 1 for _, ids in missing):  # after a preemption: what was not kept, but for each last token
            share = max(1, n // len(missing))
            return [
                SeqRows(slot.seq_id, len(slot.token_ids), ids[: min(share, len(ids) - 1)], want_logits=False)
                for slot, ids in missing
                if len(ids) > 1
            ]
        return [SeqRows(slot.seq_id, len(slot.token_ids), ids, want_logits=True) for slot, ids in missing]

    def took(self, rows: ListOf[SeqRows]) -> None:
        held = {slot.seq_id: slot for slot in self.places}
        for own in rows:
            held[own.seq_id].token_ids += own.token_ids

    def begin_in(self, first: Slot, take: Callable[[list[int]], Slot], cut: Callable[[Slot, int], None]) -> None:
        """Take the places that it needs beside the first, with what is kept of each beam.

        take  gives a free slot that holds as much of a prompt as is known
        cut   forgets what a slot holds from a token on
        """
        further = self._beam_ids()[1:]
        self.places = [first, *map(take, further)]
        if all(len(slot.token_ids) >= self.n_prompt for slot in self.places) and self.search.beams[0].token_ids:
            self.order = list(range(len(self.places)))
        else:  # the prompt of each would have to be computed
            self.search.restart()
            del self.token_ids[self.n_prompt :]
            cut(first, self.n_prompt - 1)  # the row of the prompt's last token is asked for again
            for slot in self.places[1:]:
                cut(slot, 0)
        while len(self.places) < self.n_places:
            self.places.append(take(self.token_ids[:1]))

    def advance(self, logits: ListOf[NDArray[np.float32]]) -> list[tuple[Slot, Slot]] | None:
        """Take the logits after each beam and choose the next ones; give which slots must be copied, from and to.

        None once the search is over. Raises BackendStepError for broken logits.
        """
        parents = self.search.advance(logits)
        if not parents:
            self.found = self.search.best()
            return None
        old = self.order or [0]
        spare = [i for i in range(len(self.places)) if i not in old]
        held = [*old, *spare]
        order, copies = moves(parents, len(held))
        self.order = [held[i] for i in order]
        self.slot = self.places[self.order[0]]
        self.token_ids[self.n_prompt :] = self.search.beams[0].token_ids
        return [(self.places[held[src]], self.places[held[dst]]) for src, dst in copies]

    def give_back(self) -> list[Slot]:
        others = [slot for slot in self.places if slot is not self.slot]
        self.places, self.order = [], []
        return others

    def _beam_ids(self) -> list[list[int]]:
        prompt = self.token_ids[: self.n_prompt]
        return [[*prompt, *beam.token_ids] for beam in self.search.beams]

    @property
    def _slots(self) -> list[Slot]:
        return [self.places[i] for i in self.order]

    def _take(
        self, reason: FinishReason | None = None, usage: Usage | None = None, timings: Timings | None = None
    ) -> Chunk:
        best = self.found[0] if self.found else None
        return Chunk(
            text=best.text if best is not None else "",
            token_ids=best.token_ids if best is not None else (),
            logprobs=best.logprobs if best is not None else (),
            finish_reason=reason,
            usage=usage,
            timings=timings,
            hypotheses=self.found,
        )


def make_search(session: TokenSession, request: GenerateRequest, beams: Beams, n_prompt: int) -> BeamSearch:
    """Begin a search. Raises InvalidRequestError for more beams than sequences are decoded together, and
    ContextLengthError for a prompt that leaves no room for all of them.
    """
    caps = session.caps
    if not caps.can_copy:
        raise UnsupportedFeatureError(feature="beam search with this model", remedy="its sequences cannot be copied")
    if beams.n_beams > caps.n_seq_max:
        problem = f"must be at most {caps.n_seq_max}, the sequences decoded together (engine.n_parallel)"
        raise InvalidRequestError(param="num_beams", problem=f"{problem}, got {beams.n_beams}")
    longest = max_answer(caps, n_beams=beams.n_beams, n_prompt=n_prompt, max_tokens=request.max_tokens)
    if longest < 1:
        raise ContextLengthError(prompt_tokens=n_prompt, n_ctx=caps.n_ctx // beams.n_beams)
    return BeamSearch(
        settings=beams,
        n_vocab=caps.n_vocab,
        max_answer=longest,
        eog_ids=frozenset() if request.ignore_eos else session.vocab.eog_ids,
        stop=request.stop,
        piece=session.piece,
        top_logprobs=request.top_logprobs,
    )


def make_sequence(
    session: TokenSession,
    request: GenerateRequest,
    sink: Sink,
    token_ids: list[int],
    lookup: PromptLookup | None,
    form: Form | None,
    text: TextStream,
    submitted_s: float,
    entropy: Callable[[], int],
) -> Sequence:
    """Make a request's sequence, of the kind that it asks for. Raises InvalidRequestError, and as make_search does."""
    common: dict[str, Any] = {
        "request": request,
        "sink": sink,
        "token_ids": token_ids,
        "sampler": Sampler(request.sampling, session.caps.n_vocab, token_ids, entropy=entropy),
        "text": text,
        "submitted_s": submitted_s,
        "lookup": lookup,
        "form": form,
    }
    if request.beams is not None:
        if form is not None:
            raise UnsupportedFeatureError(
                feature="a form, or tools, beside a beam search", remedy="leave one of them out"
            )
        return BeamSequence(search=make_search(session, request, request.beams, len(token_ids)), **common)
    return Sequence(**common)
