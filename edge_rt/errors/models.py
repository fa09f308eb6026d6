"""Models, their files and where they come from."""

from __future__ import annotations

from dataclasses import dataclass

from edge_rt.errors.base import EdgeRtError


class ModelError(EdgeRtError):
    """Something about a model or its files."""

    code = "model_error"


@dataclass(eq=False)
class ModelNotFoundError(ModelError):
    code = "model_not_found"
    model: str
    known: tuple[str, ...] = ()

    def __str__(self) -> str:
        known = f"; known models: {', '.join(self.known)}" if self.known else ""
        return f"model {self.model!r} is not in the catalog{known}. `edge_rt models list` shows them all"


@dataclass(eq=False)
class ModelNotPulledError(ModelError):
    """In the catalog, but its file is not in the local store; the daemon never downloads on a request."""

    code = "model_not_pulled"
    model: str

    def __str__(self) -> str:
        return f"{self.model} is not in the local store. Fetch it with `edge_rt models pull {self.model}`"


@dataclass(eq=False)
class ModelFormatError(ModelError):
    """A model file or manifest breaks its format; field is the place in it."""

    code = "model_format"
    path: str
    field: str
    problem: str

    def __str__(self) -> str:
        return f"{self.path}: {self.field}: {self.problem}"


@dataclass(eq=False)
class ModelChecksumError(ModelError):
    code = "model_checksum"
    path: str
    expected: str
    actual: str

    def __str__(self) -> str:
        return (
            f"{self.path}: sha256 is {self.actual}, the manifest says {self.expected}. "
            "Remove the model and pull it again; if it stays so, the manifest or its source is wrong"
        )


@dataclass(eq=False)
class ModelTooLargeError(ModelError):
    code = "model_too_large"
    model: str
    need_bytes: int
    have_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.model} needs {self.need_bytes / 2**20:.0f} MiB, {self.have_bytes / 2**20:.0f} MiB are available. "
            "Lower n_ctx, unload another model, or load anyway with --force"
        )


@dataclass(eq=False)
class ContextBeyondTrainingError(ModelError):
    code = "context_beyond_training"
    model: str
    n_ctx: int
    n_ctx_train: int

    def __str__(self) -> str:
        return (
            f"{self.model} was trained on texts of {self.n_ctx_train} tokens and writes nonsense beyond, n_ctx is "
            f"{self.n_ctx}. Lower n_ctx, or load anyway with --force (worker.force)"
        )


@dataclass(eq=False)
class DraftVocabularyError(ModelError):
    code = "draft_vocabulary"
    model: str
    draft: str
    difference: str

    def __str__(self) -> str:
        return (
            f"{self.draft} cannot draft for {self.model}, its vocabulary is another: {self.difference}. "
            "Name a draft of the same family"
        )


@dataclass(eq=False)
class PullError(ModelError):
    """A download failed; what came so far is kept and resumed by the next pull."""

    code = "pull_failed"
    retryable = True
    source: str
    problem: str

    def __str__(self) -> str:
        return f"cannot fetch {self.source}: {self.problem}"


@dataclass(eq=False)
class OfflineError(ModelError):
    code = "offline"
    model: str

    def __str__(self) -> str:
        return f"{self.model} is not in the local store and --offline forbids fetching it. Pull it while online"


@dataclass(eq=False)
class DiskFullError(ModelError):
    code = "disk_full"
    path: str
    need_bytes: int
    have_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.path} has {self.have_bytes / 1e6:.1f} MB free, {self.need_bytes / 1e6:.1f} MB are needed. "
            "Free space or set catalog.store_dir to another disk"
        )


@dataclass(eq=False)
class StoreError(ModelError):
    """The store of model files cannot be changed by this user."""

    code = "store_error"
    path: str
    problem: str

    def __str__(self) -> str:
        return f"{self.path} cannot be written: {self.problem}; run it as the store's owner or set catalog.store_dir"
