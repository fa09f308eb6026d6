"""What a loaded language model is and can do, and what its engine has done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# What a device's answers show: a real one's, or those of a stand-in, which says nothing of speed, power or drivers.
Evidence = Literal["device", "simulator", "emulated", "stub"]
PinAction = Literal["list", "pin", "unpin"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFile:
    """A LoRA adapter in a GGUF file. base_sha256 is that of the model's file that it belongs to, "" if nobody says."""

    name: str
    path: str
    base_sha256: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What one loaded model on one device can do.

    can_save_ranges     a part of a sequence can be saved and restored, cut where blocks of n_cell_block cells end
    n_cell_block        cells that a sequence takes at once: its last block may be partly empty
    reads_own_cells     a row's attention reads the cells of its own sequence only: others cost it no time
    is_batch_invariant  a row's logits are the same, bit for bit, whatever else is in its batch
    copies_share        a copy of a sequence takes cells from where it differs on
    adapters            that rows may be computed with, by name; all rows of a step with the same
    """

    n_ctx: int
    n_seq_max: int
    n_vocab: int
    n_batch: int
    can_trim: bool
    can_copy: bool
    can_save: bool
    can_save_ranges: bool = False
    n_cell_block: int = 1
    reads_own_cells: bool = False
    is_batch_invariant: bool = False
    copies_share: bool = False
    adapters: tuple[str, ...] = ()

    def n_cells(self, n_tokens: int) -> int:
        """Count the cells of the blocks that so many tokens of one sequence take."""
        return -(-n_tokens // self.n_cell_block) * self.n_cell_block


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What a worker reports of the model it has loaded.

    backend_reason  why a back end that comes before this one did not take the model; "" if none came before, or if
                    the configuration names this one
    evidence        what computes it: a real device or a stand-in
    build           of the back end: another one's saved sequences are not used
    bos_text, eos_text  of the tokens that begin a text and end an answer, "" where there is none
    """

    model: str
    variant: str
    backend: str
    device: str
    arch: str
    quant: str
    n_params: int
    size_bytes: int
    n_ctx_train: int
    caps: Capabilities
    n_threads: int
    has_chat_template: bool
    backend_reason: str = ""
    evidence: Evidence = "device"
    build: str = ""
    bos_text: str = ""
    eos_text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedPrefix:
    """A prefix that stays. is_kept: it is computed, and in memory or on disk; is_on_disk: it outlasts the process.

    problem  why one of these is not so and will not be by itself, "" if nothing is wrong
    """

    name: str
    n_tokens: int
    is_kept: bool = False
    is_on_disk: bool = False
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Totals since load and momentary gauges of one engine; sent to the front process as metrics.

    cells_used   of running requests; idle prefixes are not counted, they leave when cells are wanted
    forced_tokens_total  of the completion tokens, those that an answer's form left no choice about: none was a step
    grammar_bytes  compiled grammars that are kept for other requests
    drafted_tokens_total, accepted_tokens_total  guessed by speculation, and those of them that were right
    model_drafted_tokens_total, model_accepted_tokens_total  of these, guessed by the drafting model draft_model, "" for
                 none, which takes draft_bytes and has taken drafting_s_total
    prefix_hits_total  requests that began with kept or shared rows; prefixes_lost_total kept ones that were of no use
    prefix_disk_bytes  prefixes kept on disk; restored_tokens_total taken from there; pinned_prefixes that stay,
                 pins_with_problem that cannot
    refused_total  requests whose deadline was out of reach when they came
    device_products_total  what the accelerator that a model runs on has computed, device_fallbacks_total what the CPU
                           did in its place, device_faults_total its failures, device_fault the last in words
    step_rows    steps by their number of rows: <= 1, 2, 4, … 512, and above (11 counts; their sum is steps_total)
    """

    waiting: int = 0
    running: int = 0
    cells_used: int = 0
    cells_total: int = 0
    prefix_bytes: int = 0
    n_threads: int = 0
    steps_total: int = 0
    rows_total: int = 0
    prompt_tokens_total: int = 0
    completion_tokens_total: int = 0
    forced_tokens_total: int = 0
    grammar_bytes: int = 0
    cached_tokens_total: int = 0
    prefix_hits_total: int = 0
    prefixes_lost_total: int = 0
    prefix_disk_bytes: int = 0
    pinned_prefixes: int = 0
    pins_with_problem: int = 0
    restored_tokens_total: int = 0
    preempted_total: int = 0
    refused_total: int = 0
    cancelled_total: int = 0
    drafted_tokens_total: int = 0
    accepted_tokens_total: int = 0
    model_drafted_tokens_total: int = 0
    model_accepted_tokens_total: int = 0
    draft_model: str = ""
    draft_bytes: int = 0
    drafting_s_total: float = 0.0
    rss_bytes: int = 0
    device_products_total: int = 0
    device_faults_total: int = 0
    device_fallbacks_total: int = 0
    device_fault: str = ""
    step_rows: tuple[int, ...] = ()
