"""The checks of `edge_rt doctor` for NPUs: do the stacks answer, and do compiled models belong to them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path

from edge_rt.backends import registry
from edge_rt.backends.base import Absent
from edge_rt.backends.npu.artifacts import Found, artifacts
from edge_rt.backends.npu.backend import NpuBackend
from edge_rt.backends.npu.vendor import Versions
from edge_rt.cli.checks import Check, Patient, fail, ok, warn

_MAX_NAMED = 5


def backends() -> Sequence[NpuBackend]:
    """Make every NPU's back end, which runs nothing of its vendor's."""
    found = (registry.get(name) for name in registry.names() if name.startswith("npu_"))
    return [backend for backend in found if isinstance(backend, NpuBackend)]


def npu(patient: Patient, *, every: Sequence[NpuBackend] | None = None) -> Check | None:
    """Say which NPUs are here, and what ails them; nothing where no stack is installed and none is wanted."""
    wanted = {own.backend for own in patient.config.models.values()} | {patient.config.engine.backend}
    here, broken, missing, skewed = [], [], [], []
    for backend in backends() if every is None else every:
        found = backend.probe()
        if isinstance(found, Absent):
            if backend.name in wanted:
                extra = f": pip install 'edge_rt[{found.extra}]'" if found.extra else ""
                missing.append(f"{backend.name}: {found.reason}{extra}")
            continue
        here += [f"{backend.name}: {device.detail}" for device in found if not device.fault]
        broken += [f"{backend.name}: {device.fault}" for device in found if device.fault]
        skewed += [f"{backend.name}: {device.skew}" for device in found if device.skew]
    if broken or missing:
        remedy = "docs/npu.md says what each needs; without it the CPU answers, unless npu.require is npu"
        return fail("npu", "; ".join([*missing, *broken, *here]), remedy)
    if skewed:
        return warn(
            "npu", "; ".join([*skewed, *here]), "a stack whose parts differ may refuse models, or compute wrongly"
        )
    return ok("npu", "; ".join(here)) if here else None


def compiled_models(patient: Patient, *, every: Sequence[NpuBackend] | None = None) -> Check | None:
    """Name compiled models that other versions have made than are here: the next load will not use them."""
    kept = [found for folder in _folders(patient.store().root) for found in artifacts(folder)]
    if not kept:
        return None
    wanted = {found.description.target.vendor for found in kept}
    here = {b.name: _versions(b) for b in (backends() if every is None else every) if b.name in wanted}
    skewed = [f"{_name(found)} {words}" for found in kept if (words := _problem(found, here))]
    n_bytes = sum(found.size_bytes for found in kept)
    if not skewed:
        return ok("compiled models", f"{len(kept)} for NPUs, {n_bytes / 1e6:.1f} MB, all by the versions that are here")
    more = f"; and {len(skewed) - _MAX_NAMED} more" if len(skewed) > _MAX_NAMED else ""
    return warn(
        "compiled models",
        f"{'; '.join(skewed[:_MAX_NAMED])}{more}",
        "the next load compiles them anew, which takes a while; one that cannot be compiled here must come from where "
        "its compiler is, made with the versions that are here",
    )


def _versions(backend: NpuBackend) -> Versions | Absent:
    """Ask a stack for its versions; only a look at the device tells its driver's."""
    found = backend.probe()
    return found if isinstance(found, Absent) else backend.vendor.versions()


def _problem(found: Found, here: Mapping[str, Versions | Absent]) -> str:
    target = found.description.target
    now = here.get(target.vendor)
    if now is None:
        return "was compiled for a back end that this edge_rt does not have"
    if isinstance(now, Absent):
        extra = f": pip install 'edge_rt[{now.extra}]'" if now.extra else ""
        return f"waits for a stack that is not here: {now.reason}{extra}"
    words = skew(target.versions, now)
    return f"was compiled with {words}" if words else ""


def skew(then: Versions, now: Versions) -> str:
    """Tell in which parts two sets of versions differ; a part that one of them does not tell is the same. Pure."""
    parts = ((field.name, getattr(then, field.name), getattr(now, field.name)) for field in fields(Versions))
    return ", ".join(f"{name} {old}, here is {new}" for name, old, new in parts if old and new and old != new)


def _folders(root: Path) -> Iterator[Path]:
    yield from sorted((root / "models").glob("*/.*.npu"))


def _name(found: Found) -> str:
    told = found.description
    return f"{told.model}:{told.variant} for {told.target.vendor}" if told.variant else told.model


NPU_CHECKS = (npu, compiled_models)
