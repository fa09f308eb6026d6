"""What a running daemon's metrics tell of its load: read at two times, and put into what `edge_rt top` shows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from prometheus_client.parser import text_string_to_metric_families

_STATES = ("closed", "half open", "open", "wrong")

Buckets = tuple[tuple[float, float], ...]  # upper bound, cumulative count


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerLoad:
    """What the daemon's meter tells now."""

    power_w: float
    source: str
    boundary: str
    quality: str


@dataclass(frozen=True, slots=True)
class Scrape:
    """The daemon's metrics at one time.

    values  (name, model) → value; places: (name, model, place) → value
    ttft    the histogram's buckets by model; durations: by model and place
    energies  joules by model and phase; stand_ins: what computes in a device's place, by model and place
    priorities  requests by model, priority, and whether they run or wait
    """

    time_s: float
    values: Mapping[tuple[str, str], float]
    ttft: Mapping[str, Buckets]
    places: Mapping[tuple[str, str, str], float]
    durations: Mapping[tuple[str, str], Buckets]
    energies: Mapping[tuple[str, str], float] = field(default_factory=dict)
    power: PowerLoad | None = None
    stand_ins: Mapping[tuple[str, str], str] = field(default_factory=dict)
    priorities: Mapping[tuple[str, str, str], int] = field(default_factory=dict)

    @classmethod
    def of(cls, text: str, time_s: float) -> Scrape:
        """Read Prometheus' text format."""
        values: dict[tuple[str, str], float] = {}
        ttft: dict[str, list[tuple[float, float]]] = {}
        places: dict[tuple[str, str, str], float] = {}
        durations: dict[tuple[str, str], list[tuple[float, float]]] = {}
        energies: dict[tuple[str, str], float] = {}
        stand_ins: dict[tuple[str, str], str] = {}
        priorities: dict[tuple[str, str, str], int] = {}
        power: PowerLoad | None = None
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                model = sample.labels.get("model", "")
                if sample.name == "edge_rt_ttft_seconds_bucket":
                    ttft.setdefault(model, []).append((float(sample.labels["le"]), sample.value))
                elif sample.name == "edge_rt_place_duration_seconds_bucket":
                    key = model, sample.labels["place"]
                    durations.setdefault(key, []).append((float(sample.labels["le"]), sample.value))
                elif sample.name == "edge_rt_energy_joules_total":
                    energies[model, sample.labels["phase"]] = sample.value
                elif sample.name == "edge_rt_stand_in":
                    stand_ins[model, sample.labels["place"]] = sample.labels["evidence"]
                elif sample.name == "edge_rt_priority_requests":
                    priorities[model, sample.labels["priority"], sample.labels["state"]] = round(sample.value)
                elif sample.name == "edge_rt_power_watts":
                    power = PowerLoad(power_w=sample.value, **sample.labels)
                elif set(sample.labels) == {"model", "place"}:
                    places[sample.name, model, sample.labels["place"]] = sample.value
                elif set(sample.labels) <= {"model"}:
                    values[sample.name, model] = sample.value
        return cls(
            time_s,
            values,
            {model: tuple(buckets) for model, buckets in ttft.items()},
            places,
            {key: tuple(buckets) for key, buckets in durations.items()},
            energies,
            power,
            stand_ins,
            priorities,
        )

    def models(self) -> list[str]:
        """Name the language models, and models of both kinds."""
        tensors = {model for model, _ in self.tensor_places()}
        names = {model for _, model in self.values if model}
        slots = {name for name in names for model in tensors if name == model or name.startswith(f"{model} ")}
        return sorted(names - {slot for slot in slots if self.count("completion_tokens_total", slot) in {None, 0}})

    def tensor_places(self) -> list[tuple[str, str]]:
        return sorted({(model, place) for _, model, place in self.places})

    def rss_bytes(self, model: str) -> int | None:
        """Add up what the workers of a tensor model hold; a place's name follows the model's."""
        found = [
            value
            for (name, slot), value in self.values.items()
            if name == "edge_rt_worker_resident_memory_bytes" and (slot == model or slot.startswith(f"{model} "))
        ]
        return round(sum(found)) if found else None

    def stand_in(self, model: str, place: str = "") -> str | None:
        """Say what stands in for a device of the model there, "" on any of its places; a slot's name begins with its
        model's.
        """
        for (slot, where), kind in self.stand_ins.items():
            if (slot == model or slot.startswith(f"{model} ")) and place in ("", where):
                return kind
        return None

    def count(self, name: str, model: str = "") -> int | None:
        value = self.values.get((f"edge_rt_{name}", model))
        return None if value is None else round(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLoad:
    """One model's line. None where the model is not loaded, has answered nothing yet, or nothing is measured.

    stand_in  simulator, emulated or stub where such a one has computed since the daemon started: no figure is a speed
    """

    model: str
    loaded: bool
    running: int
    waiting: int
    decode_tps: float
    prefill_tps: float
    ttft_p50_s: float | None
    threads: int | None
    kv_cells: int | None
    kv_cells_used: int | None
    rss_bytes: int | None
    restarts: int
    decode_j_per_token: float | None
    stand_in: str | None = None
    prefix_bytes: int | None = None
    prefix_hits: int = 0
    preempted: int = 0
    refused: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceLoad:
    """One place of a tensor model: its line. None where it has answered nothing in the interval.

    joined      requests a run of the model had in the interval, on average
    p50_s, p95_s  request to answer, of those in the interval
    failed      requests since the daemon started that failed there and went on
    running, waiting, rss_bytes  of the model, on the first of its places; None on the others
    stand_in    as ModelLoad has it, on this place
    """

    model: str
    place: str
    breaker: str
    running: int | None
    waiting: int | None
    requests_hz: float
    joined: float | None
    p50_s: float | None
    p95_s: float | None
    failed: int
    rss_bytes: int | None
    stand_in: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLoss:
    """A model's accelerator that has failed since the daemon started.

    n_fallbacks  what the CPU has computed in its place; n_now: of it, in the interval
    """

    model: str
    n_faults: int
    n_fallbacks: int
    n_now: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The whole view. rss_bytes is the front process' own; power None: no meter is here, or it tells nothing."""

    time_s: float
    rss_bytes: int | None
    models: tuple[ModelLoad, ...]
    places: tuple[PlaceLoad, ...] = ()
    power: PowerLoad | None = None
    losses: tuple[DeviceLoss, ...] = ()

    @classmethod
    def between(cls, before: Scrape, now: Scrape) -> Load:
        """Take rates over the time between two scrapes, everything else as it stands."""
        return cls(
            time_s=now.time_s,
            rss_bytes=now.count("process_resident_memory_bytes"),
            models=tuple(_model(model, before, now) for model in now.models()),
            places=_places(before, now),
            power=now.power,
            losses=tuple(_losses(before, now)),
        )


def _model(model: str, before: Scrape, now: Scrape) -> ModelLoad:
    def rate(name: str) -> float:
        gained = (now.count(name, model) or 0) - (before.count(name, model) or 0)
        return max(0, gained) / max(1e-3, now.time_s - before.time_s)  # less than before: another daemon

    return ModelLoad(
        model=model,
        loaded=now.count("threads", model) is not None,
        running=now.count("requests_running", model) or 0,
        waiting=now.count("requests_waiting", model) or 0,
        decode_tps=rate("completion_tokens_total"),
        prefill_tps=max(0.0, rate("prompt_tokens_total") - rate("cached_tokens_total")),
        ttft_p50_s=median(now.ttft.get(model, ())),
        threads=now.count("threads", model),
        kv_cells=now.count("kv_cells", model),
        kv_cells_used=now.count("kv_cells_used", model),
        prefix_bytes=now.count("prefix_bytes", model),
        prefix_hits=now.count("prefix_hits_total", model) or 0,
        preempted=now.count("preempted_total", model) or 0,
        refused=now.count("refused_total", model) or 0,
        rss_bytes=now.count("worker_resident_memory_bytes", model),
        restarts=now.count("worker_restarts_total", model) or 0,
        decode_j_per_token=_ratio(now.energies.get((model, "decode")), now.count("completion_tokens_total", model)),
        stand_in=now.stand_in(model),
    )


def _losses(before: Scrape, now: Scrape) -> Iterator[DeviceLoss]:
    for slot in sorted(slot for name, slot in now.values if name == "edge_rt_device_faults_total"):
        if n_faults := now.count("device_faults_total", slot):
            n_fallbacks, n_then = (each.count("device_fallbacks_total", slot) or 0 for each in (now, before))
            n_now = max(0, n_fallbacks - n_then)
            yield DeviceLoss(model=slot, n_faults=n_faults, n_fallbacks=n_fallbacks, n_now=n_now)


def _ratio(amount: float | None, n: int | None) -> float | None:
    return amount / n if amount and n else None


def _places(before: Scrape, now: Scrape) -> tuple[PlaceLoad, ...]:
    rows: list[PlaceLoad] = []
    for model, place in now.tensor_places():
        is_first = not rows or rows[-1].model != model

        def gained(name: str, key: tuple[str, str] = (model, place)) -> float:
            return max(0.0, now.places.get((name, *key), 0.0) - before.places.get((name, *key), 0.0))

        n_requests, n_runs = gained("edge_rt_place_requests_total"), gained("edge_rt_place_batches_total")
        old = before.durations.get((model, place), ())
        buckets = tuple(
            (bound, count - (old[at][1] if old else 0.0))
            for at, (bound, count) in enumerate(now.durations.get((model, place), ()))
        )
        rows.append(
            PlaceLoad(
                model=model,
                place=place,
                breaker=_STATES[round(now.places.get(("edge_rt_place_state", model, place), 0.0))],
                running=(now.count("requests_running", model) or 0) if is_first else None,
                waiting=(now.count("requests_waiting", model) or 0) if is_first else None,
                requests_hz=n_requests / max(1e-3, now.time_s - before.time_s),
                joined=n_requests / n_runs if n_runs else None,
                p50_s=quantile(buckets, 0.5),
                p95_s=quantile(buckets, 0.95),
                failed=round(now.places.get(("edge_rt_place_failures_total", model, place), 0.0)),
                rss_bytes=now.rss_bytes(model) if is_first else None,
                stand_in=now.stand_in(model, place),
            )
        )
    return tuple(rows)


def median(buckets: Buckets) -> float | None:
    return quantile(buckets, 0.5)


def quantile(buckets: Buckets, share: float) -> float | None:
    """Estimate a histogram's quantile from (upper bound, cumulative count), straight inside a bucket, as PromQL does.

    In the last bucket, which has no upper bound, it is that bucket's lower one. None for an empty histogram.
    """
    if not buckets or buckets[-1][1] <= 0:  # below 0: another daemon
        return None
    wanted = buckets[-1][1] * share
    for (low, below), (high, upto) in pairwise(((0.0, 0.0), *buckets)):
        if upto >= wanted:
            return low if high == float("inf") else low + (high - low) * (wanted - below) / (upto - below)
    return None
