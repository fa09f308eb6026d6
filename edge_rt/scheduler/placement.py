"""Where a model runs: its forms on this machine's devices, in order, and those refused, each with its reason. Pure.

A candidate costs time and energy. The policy weighs them: the order is by latency^a × energy^b, and where a wait is to
be weighed against a slower device, `choose` takes the same weights at the first candidate's time and energy.

What was not measured is guessed: its time from the precision and the kind of device (_SPEED, relative to float on a
CPU), scaled by those candidates of the model that were measured, else by PRIOR_S; its energy as time × _POWER_W. A
guess is told as one in the reason, and gives way to what the running model shows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from statistics import median
from typing import Literal

from edge_rt.catalog.manifest import Variant
from edge_rt.errors import ModelNotFoundError
from edge_rt.tensor_types import DeviceState

PolicyName = Literal["latency", "energy", "balanced"]

# Exponents of latency and energy. A little of the other breaks ties and keeps `energy` from queueing without end.
WEIGHTS: dict[PolicyName, tuple[float, float]] = {
    "latency": (1.0, 0.0),
    "energy": (0.1, 1.0),
    "balanced": (1.0, 1.0),
}

# What runs a file where its variant names no back end; others are tried only where a manifest or a setting names them.
_BACKENDS = {".onnx": ("onnx_cpu",), ".gguf": ("native", "llama_cpu")}

PRIOR_S = 0.02
_SPEED = {"FP32": 1.0, "FP16": 1.0, "INT8": 2.2, "INT4": 2.2}  # on a CPU with integer dot products
_DOT_PRODUCTS = frozenset({"avx512_vnni", "avx_vnni", "dotprod", "i8mm", "asimddp"})
_SPEED_WITHOUT = 1.2  # of INT8 and INT4 on a CPU without them
_KIND_SPEED = {"npu": 4.0, "fpga": 2.0}  # relative to a CPU
_POWER_W = {"cpu": 5.0, "npu": 2.0, "fpga": 3.0}
_MEMORY_FACTOR = 1.5  # of the file's size; plus the process around it
_PROCESS_BYTES = 80 * 2**20

_SOUND, _FULL, _HOT = 0, 1, 2  # tiers

# A form that lost more of the best form's measured accuracy is only taken by name.
MAX_ACCURACY_LOSS = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A form on a device; place is "back end:device"."""

    variant: str
    quant: str
    backend: str
    device: str
    kind: str

    @property
    def place(self) -> str:
        return f"{self.backend}:{self.device}"

    def place_of(self, told: str) -> str:
        """Give the place of an answer of which the worker told told: another one where a back end stood in for it."""
        backend = told.partition(":")[0]
        return told if backend and backend != self.backend else self.place

    def name_of(self, told: str) -> str:
        """Name what has answered, as __str__ does a candidate."""
        return f"{self.variant} on {self.place_of(told)}"

    def __str__(self) -> str:
        return f"{self.variant} on {self.place}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a profile says of a candidate, for each request; None was not measured."""

    latency_s: float
    energy_j: float | None = None
    memory_bytes: int | None = None
    is_profiled: bool = True  # else the running model has shown it


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """A candidate that may be used. tier 0 is sound; a higher one (full, hot) is used when no lower one can be.

    is_measured  latency_s is, and energy_j where has_energy; guessed otherwise. is_profiled: it stands in the profile
    """

    candidate: Candidate
    latency_s: float
    energy_j: float
    memory_bytes: int
    is_measured: bool
    is_profiled: bool
    has_energy: bool
    tier: int
    reason: str

    @property
    def is_hot(self) -> bool:
        return self.tier == _HOT


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    what: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """Candidates, best first, and what is none."""

    policy: PolicyName
    ranked: tuple[Ranked, ...]
    refused: tuple[Refused, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What counts; variant and backend "" (or "auto") leave the choice open, a name pins it."""

    name: PolicyName = "balanced"
    variant: str = ""
    backend: str = ""
    max_device_c: float = 85.0
    cool_by_c: float = 5.0

    @property
    def pins_backend(self) -> bool:
        return self.backend not in {"", "auto"}


def reference(ranking: Ranking, candidate: Candidate) -> Candidate | None:
    """Name the candidate whose answers count as right: the CPU's of the same form, else of its first form there.

    None for one on the CPU, and where the CPU runs no form.
    """
    on_cpu = [row.candidate for row in ranking.ranked if row.candidate.kind == "cpu"]
    if candidate.kind == "cpu":
        return None
    return next((c for c in on_cpu if c.variant == candidate.variant), on_cpu[0] if on_cpu else None)


def backends_of(variant: Variant, policy: Policy) -> tuple[str, ...]:
    """List the back ends that shall run a form, preferred first."""
    if policy.pins_backend:
        is_meant = variant.requires is None or policy.backend in variant.backends
        return (policy.backend,) if is_meant else ()
    return variant.backends or _BACKENDS.get(PurePath(variant.file).suffix.lower(), ())


def rank(
    model: str,
    variants: Sequence[Variant],
    devices: Iterable[DeviceState],
    policy: Policy,
    *,
    pulled: Collection[str],
    measured: Callable[[Candidate], Measured | None] = lambda _: None,
) -> Ranking:
    """Order a model's candidates.

    pulled    variants whose files are here
    measured  a candidate's profile, None where it has none that can be believed
    Raises ModelNotFoundError when the policy pins a variant that is not there.
    """
    if policy.variant and policy.variant not in {variant.id for variant in variants}:
        raise ModelNotFoundError(
            model=f"{model}:{policy.variant}", known=tuple(f"{model}:{variant.id}" for variant in variants)
        )
    by_backend: dict[str, list[DeviceState]] = {}
    for device in sorted(devices, key=lambda d: d.id):
        by_backend.setdefault(device.backend, []).append(device)
    refused: list[Refused] = []
    pairs: list[tuple[Variant, DeviceState]] = []
    for variant in variants:
        if (reason := _variant_refusal(model, variant, variants, policy, pulled)) is not None:
            refused.append(Refused(what=variant.id, reason=reason))
            continue
        for backend in backends_of(variant, policy):
            for device in by_backend.get(backend, ()):
                if (reason := _device_refusal(variant, device, policy)) is None:
                    pairs.append((variant, device))
                else:
                    refused.append(Refused(what=f"{variant.id} on {device.place}", reason=reason))
            if backend not in by_backend:
                refused.append(Refused(what=f"{variant.id} on {backend}", reason="no such device was found here"))
    found, full = _described(pairs, policy, measured)
    return Ranking(policy=policy.name, ranked=_sorted(found, policy.name), refused=(*refused, *full))


def rank_scripts(
    scripts: Sequence[str], policy: PolicyName, shown_s: Callable[[Candidate], float | None] = lambda _: None
) -> Ranking:
    """Order null devices, each of which plays a script of backends/null_tensor.py; the first stands for the CPU.

    Their time and power are what run_s, row_s and power_w say. Raises ValueError for a value that is no number.
    """
    rows: list[Ranked] = []
    for at, script in enumerate(scripts):
        told = dict(part.partition("=")[::2] for part in script.split(","))
        latency_s = max(float(told.get("run_s", 0)) + float(told.get("row_s", 0)), 1e-4)
        energy_j = max(float(told.get("power_w", 1)), 1e-3) * latency_s
        device = f"null{at}" if len(scripts) > 1 else "null"
        kind = "null" if at else "cpu"
        candidate = Candidate(variant=script, quant="none", backend="null", device=device, kind=kind)
        shown = shown_s(candidate)
        rows.append(
            Ranked(
                candidate=candidate,
                latency_s=shown if shown is not None else latency_s,
                energy_j=energy_j,
                memory_bytes=0,
                is_measured=True,
                is_profiled=True,
                has_energy=True,
                tier=_SOUND,
                reason=f"{latency_s * 1e3:.3g} ms, {energy_j:.3g} J scripted; simulated",
            )
        )
    return Ranking(policy=policy, ranked=_sorted(rows, policy), refused=())


def _sorted(rows: Sequence[Ranked], policy: PolicyName) -> tuple[Ranked, ...]:
    """Order by tier and cost; sorting is stable, so that of equals the first stays first."""
    time_weight, energy_weight = WEIGHTS[policy]
    return tuple(sorted(rows, key=lambda row: (row.tier, row.latency_s**time_weight * row.energy_j**energy_weight)))


def _variant_refusal(
    model: str, variant: Variant, variants: Sequence[Variant], policy: Policy, pulled: Collection[str]
) -> str | None:
    if policy.variant and variant.id != policy.variant:
        return f"the configuration names {policy.variant}"
    if variant.id not in pulled:
        return f"not pulled; edge_rt models pull {model}:{variant.id}"
    own = variant.accuracy
    if own is None or policy.variant:
        return None
    rivals = (v.accuracy for v in variants if v.id in pulled and v.accuracy is not None)
    best = max(a.value for a in rivals if (a.metric, a.data) == (own.metric, own.data))
    if own.value < best * (1 - MAX_ACCURACY_LOSS):
        return f"{own.metric} {own.value:g} against {best:g}: more than {MAX_ACCURACY_LOSS:.0%} lost; name it to use it"
    return None


def _device_refusal(variant: Variant, device: DeviceState, policy: Policy) -> str | None:
    # An NPU that is named and fails is taken all the same: its worker has the CPU behind it, and waits for its return.
    if device.fault and not (policy.pins_backend and device.kind == "npu"):
        return device.fault
    is_named = policy.pins_backend or policy.variant == variant.id
    if variant.requires is not None and device.kind == "cpu" and not is_named:
        return "a form for accelerators; name it, or the back end, to run it on a CPU"
    if device.reference and not policy.pins_backend:
        return f"right but slow ({device.detail}); name the back end to use it"
    return None


def _described(
    pairs: Sequence[tuple[Variant, DeviceState]], policy: Policy, measured: Callable[[Candidate], Measured | None]
) -> tuple[list[Ranked], list[Refused]]:
    rows: list[tuple[Candidate, Variant, DeviceState, Measured | None]] = []
    for variant, device in pairs:
        candidate = Candidate(
            variant=variant.id, quant=variant.quant, backend=device.backend, device=device.id, kind=device.kind
        )
        rows.append((candidate, variant, device, measured(candidate)))
    scale_s = median(
        [known.latency_s * _speed(candidate, device) for candidate, _, device, known in rows if known is not None]
        or [PRIOR_S]
    )
    ranked: list[Ranked] = []
    refused: list[Refused] = []
    for candidate, variant, device, known in rows:
        latency_s = known.latency_s if known is not None else scale_s / _speed(candidate, device)
        energy_j = known.energy_j if known is not None else None
        power_w = _POWER_W.get(device.kind, _POWER_W["cpu"])
        memory_bytes = (known.memory_bytes if known is not None else None) or (
            int(variant.size_bytes * _MEMORY_FACTOR) + _PROCESS_BYTES
        )
        tier, state = _tier(device, memory_bytes, policy)
        if tier < 0:
            refused.append(Refused(what=str(candidate), reason=state))
            continue
        reason = f"{latency_s * 1e3:.3g} ms {'measured' if known is not None else 'guessed'}"
        reason += f", {energy_j:.3g} J measured" if energy_j is not None else f", energy guessed at {power_w:g} W"
        ranked.append(
            Ranked(
                candidate=candidate,
                latency_s=latency_s,
                energy_j=energy_j if energy_j is not None else power_w * latency_s,
                memory_bytes=memory_bytes,
                is_measured=known is not None,
                is_profiled=known is not None and known.is_profiled,
                has_energy=energy_j is not None,
                tier=tier,
                reason="; ".join(filter(None, (reason, device.evidence if device.simulated else "", state))),
            )
        )
    return ranked, refused


def _speed(candidate: Candidate, device: DeviceState) -> float:
    speed = _SPEED.get(candidate.quant, 1.0)
    if device.kind == "cpu" and speed > _SPEED_WITHOUT and not device.features & _DOT_PRODUCTS:
        speed = _SPEED_WITHOUT
    return speed * _KIND_SPEED.get(device.kind, 1.0)


def is_hot(temp_c: float | None, *, was_hot: bool, max_device_c: float, cool_by_c: float) -> bool:
    """Say whether a device is too hot: from max_device_c on, and until it has cooled by cool_by_c below that.

    Without the margin a device would be left and come back with every reading around the limit. One whose temperature
    nobody tells is not hot. Pure.
    """
    return temp_c is not None and temp_c >= max_device_c - (cool_by_c if was_hot else 0.0)


def _tier(device: DeviceState, memory_bytes: int, policy: Policy) -> tuple[int, str]:
    """Say how far back a device's state puts it, -1 is out, and why."""
    limit_c, cool_by_c = policy.max_device_c, policy.cool_by_c
    if is_hot(device.temp_c, was_hot=device.is_hot, max_device_c=limit_c, cool_by_c=cool_by_c):
        until = f", until it is below {limit_c - cool_by_c:.0f} °C" if cool_by_c else ""
        return _HOT, f"last: {device.temp_c:.0f} °C, the limit is {limit_c:.0f} °C{until}"
    if device.free_bytes is not None and memory_bytes > device.free_bytes:
        need = f"needs {memory_bytes / 2**20:.0f} MiB, {device.free_bytes / 2**20:.0f} MiB are free"
        # In the machine's own memory other models can make room; of a device's nobody here knows who holds it.
        return (_FULL, f"behind: {need}") if device.kind == "cpu" else (-1, need)
    return _SOUND, ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A place that could take a request now.

    latency_s, energy_j  of the request there, once it is its turn
    wait_s               until then
    """

    latency_s: float
    energy_j: float
    wait_s: float


def wait_s(*, n_ahead: int, service_s: float, load_s: float = 0.0) -> float:
    """Expect how long a request waits behind n_ahead others of service_s each, after load_s more of loading."""
    return load_s + n_ahead * service_s


def choose(options: Sequence[Option], policy: PolicyName, unit: Option | None = None) -> int:
    """Give the index of the option that costs least, waiting included; the first of equals.

    options  in rank's order, at least one
    unit     says what a second and a joule are worth; else the first does
    """
    unit = unit or options[0]
    time_weight, energy_weight = WEIGHTS[policy]
    time_worth = time_weight / max(unit.latency_s, 1e-9)
    energy_worth = energy_weight / max(unit.energy_j, 1e-12)

    def cost(i: int) -> tuple[float, int]:
        option = options[i]
        return (option.wait_s + option.latency_s) * time_worth + option.energy_j * energy_worth, i

    return min(range(len(options)), key=cost)
