"""A changed configuration taken up by a running daemon. No request is dropped: what has begun goes on as it began.

Everything that may be wrong with the new configuration is found before anything of it is used: then all of it is, in
one turn of the event loop, or nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from edge_rt import logs, telemetry
from edge_rt.api.app import build_app
from edge_rt.api.callers import ApiKeys
from edge_rt.api.context import Api
from edge_rt.api.server import Server
from edge_rt.api.short_way import ShortWay
from edge_rt.assembly import Assembled, Hedging, Parts, assemble, prior, with_cloud, with_scorer
from edge_rt.cloud.credential import is_credential
from edge_rt.config import Config, Loaded
from edge_rt.config_change import Plan, plan
from edge_rt.errors import EdgeRtError
from edge_rt.router.chooser import Chooser
from edge_rt.router.confidence import Judge
from edge_rt.runtime import Runtime

_log = logging.getLogger(__name__)


class Reports(Protocol):
    """Where systemd hears of it; liveness.Reporter is one."""

    def reloading(self, monotonic_us: int) -> None: ...

    def reloaded(self, note: str) -> None: ...


class ApiUser(Protocol):
    """A server beside the HTTP one that answers by the same configuration; api.grpc_server.GrpcServer is one."""

    def use(self, api: Api) -> None: ...


@dataclass(slots=True, kw_only=True)
class Running:
    """The daemon as it runs; what a reload replaces is replaced here. grpc is None where none is configured."""

    config: Config
    runtime: Runtime
    parts: Parts
    assembled: Assembled
    api: Api
    server: Server
    metrics: telemetry.Telemetry
    grpc: ApiUser | None = None


class Reloader:
    """Reads the configuration again when asked. Belongs to one event loop.

    read      gives the configuration as it is now; raises ConfigError
    api_keys  gives the keys it names; raises ConfigError
    """

    def __init__(
        self,
        running: Running,
        reports: Reports,
        *,
        read: Callable[[], Loaded],
        api_keys: Callable[[Loaded], ApiKeys | None],
    ) -> None:
        self._running, self._reports = running, reports
        self._read, self._api_keys = read, api_keys
        self._one_by_one = asyncio.Lock()

    async def reload(self) -> None:
        """Take up what has changed, or say why nothing of it is. Never raises what edge_rt raises on purpose."""
        async with self._one_by_one:
            self._reports.reloading(time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000)
            note = "the last reload failed, see the log"
            try:
                note = await self._take_up()
            except EdgeRtError as exc:
                _log.error("the new configuration is not used, the daemon goes on with the old one: %s", exc)
                note = f"the new configuration is not used: {exc}"
            except OSError as exc:
                where = f"{exc.filename}: " if exc.filename else ""
                _log.error("the new configuration is not used: %s%s", where, exc.strerror or exc)
                note = f"the new configuration is not used: {where}{exc.strerror or exc}"
            finally:
                self._reports.reloaded(note)

    async def _take_up(self) -> str:
        now = self._running
        loaded = self._read()
        found = plan(now.config, loaded.config, fixed_models=now.runtime.fixed_models(loaded.config))
        effective = Loaded(config=found.config, origins=loaded.origins)
        now.runtime.check(loaded)
        keys = self._api_keys(effective)
        parts, assembled, begin = await _prepared(now, found.config)
        # From here on nothing can fail, and nothing else runs in between.
        begin()
        former = now.parts.teacher
        now.config, now.parts, now.assembled = found.config, parts, assembled
        now.runtime.configure(found.config, assembled.answering)
        now.api = replace(now.api, config=found.config)
        app = build_app(now.runtime, found.config, now.metrics, api_keys=keys, api=now.api)
        now.server.use(app, ShortWay(now.api, access_log=found.config.server.access_log))
        if now.grpc is not None:
            now.grpc.use(now.api)
        logs.configure(found.config.log.level, found.config.log.format)
        if former is not None and former is not parts.teacher:
            await former.close()  # its labels are kept, for when it is asked again
        _tell(found)
        restart = found.keys("restart")
        return f"needs a restart: {', '.join(restart)}" if restart else ""


def _tell(found: Plan) -> None:
    for line in found.lines() or ("nothing has changed; keys were read again",):
        _log.info("configuration: %s", line)
    held = [name for name, endpoint in found.config.cloud.items() if is_credential(endpoint.api_key_file)]
    if held:
        _log.info(
            "keys of %s are credentials, as systemd has handed them over: mostly it does so at a start only, and a new "
            "one needs a restart",
            ", ".join(f"cloud.{name}" for name in held),
        )


async def _prepared(now: Running, config: Config) -> tuple[Parts, Assembled, Callable[[], None]]:
    """Make ready what answers; the last one given makes it so."""
    parts, assembled = now.parts, now.assembled
    if parts.cloud is None and config.cloud:  # the first endpoint
        parts = await asyncio.to_thread(with_cloud, parts, config, now.metrics)
        assembled = assemble(config, now.runtime, now.metrics, parts)
        if parts.teacher is not None:
            parts.teacher.begin()
        return parts, assembled, lambda: _configure_cache(parts, config)
    commits: list[Callable[[], None]] = [lambda: _configure_cache(parts, config)]
    if parts.cloud is not None and assembled.chooser is not None and assembled.surroundings is not None:
        if config.router.scorer != now.config.router.scorer:
            parts = await asyncio.to_thread(with_scorer, parts, config)
            commits.append(_judging_by(parts, config, assembled.chooser))
        assert parts.cloud is not None
        surroundings, hold_back = assembled.surroundings, config.router.hold_back_tokens
        judge = Judge.load() if hold_back else None
        commits += [parts.cloud.prepare(config.cloud), assembled.chooser.prepare(config.router, judge)]

        def configure() -> None:
            assembled.endpoints.clear()
            assembled.endpoints.update(config.cloud)
            hedging = Hedging(surroundings) if config.router.hedge else None
            assembled.answering.configure(hedging=hedging, hold_back_tokens=hold_back)
            surroundings.max_device_c = config.placement.max_device_c

        commits.append(configure)

    def begin() -> None:
        for commit in commits:
            commit()

    return parts, assembled, begin


def _judging_by(parts: Parts, config: Config, chooser: Chooser) -> Callable[[], None]:
    def commit() -> None:
        chooser.judge_by(parts.scorer, parts.teacher, prior(config.router))
        if parts.teacher is not None:
            parts.teacher.begin()

    return commit


def _configure_cache(parts: Parts, config: Config) -> None:
    if parts.tier is not None:
        parts.tier.configure(config.cache)
    if parts.tensor_results is not None:
        parts.tensor_results.configure(config.cache)
