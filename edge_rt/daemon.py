"""The composition root: configuration → store → runtime → API on its sockets, and how it all ends."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
import socket
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from edge_rt import held_signals, logs, telemetry
from edge_rt.answering import Answering
from edge_rt.api import listen
from edge_rt.api.app import build_app
from edge_rt.api.callers import ApiKeys
from edge_rt.api.context import Api
from edge_rt.api.loans import MAX_LOANS
from edge_rt.api.read_buffers import MAX_LENT_BUFFERS
from edge_rt.api.regions import Regions, RegionServer
from edge_rt.api.server import Server
from edge_rt.api.short_way import ShortWay
from edge_rt.assembly import Assembled, LocalModels, Parts, assemble, open_parts
from edge_rt.catalog.store import Store
from edge_rt.config import Loaded
from edge_rt.devices import memory
from edge_rt.errors import ConfigError
from edge_rt.liveness import Reporter
from edge_rt.ports import make_worker
from edge_rt.power.client import HintSender
from edge_rt.power.meter import Chosen, LateMeter, open_meter
from edge_rt.power.monitor import EnergyMonitor
from edge_rt.power.taker import AdviceTaker, advised, own_limits
from edge_rt.power.workload import LoopWatch, Workload
from edge_rt.reload import Reloader, Running
from edge_rt.runtime import Runtime
from edge_rt.scheduler.profile import Profile, profile_path
from edge_rt.sd_notify import notify, watchdog_interval_s

_log = logging.getLogger("edge_rt.daemon")

_LAST_WORDS_S: Final = 0.5  # after drain_s, for refusals to reach their clients
_STOPPING_S: Final = 10.0  # beyond both, for workers to end and files to be written
_KEPT_BYTES: Final = 8 * 2**20  # of freed memory; a picture's tensor goes through three buffers of its size
_OTHER_DESCRIPTORS: Final = 128  # listeners, workers' channels and outputs, files


@dataclass(frozen=True, slots=True)
class Listening:
    """Where the daemon listens. inode is that of the socket file it made itself, None if it was inherited."""

    sockets: tuple[socket.socket, ...]
    path: Path | None
    inode: tuple[int, int] | None
    tcp: tuple[str, int] | None


def run(
    loaded: Loaded,
    *,
    environ: Mapping[str, str] | None = None,
    ready: Callable[[Listening], None] = lambda _: None,
    read: Callable[[], Loaded] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT. ready is called when requests are taken.

    A second signal ends without waiting for running answers. SIGHUP lets the configuration be read again, by read;
    where that is None, and from a terminal that hangs up, it ends the daemon too. Raises ConfigError before anything
    has been started.
    """
    environ = os.environ if environ is None else environ
    config = loaded.config
    logs.configure(config.log.level, config.log.format)
    _allow_descriptors(loaded)
    memory.keep_freed(_KEPT_BYTES)
    api_keys = _api_keys(loaded)
    listening = _listen(loaded, environ)
    started = ExitStack()
    try:
        metrics = telemetry.Telemetry()
        store = Store.open(config.catalog, environ)
        profile = Profile(profile_path(config.placement, store.root), warn=_log.warning)
        parts = open_parts(config, metrics, store.root)
        started.callback(parts.close_store)
        power = config.power
        assembled: list[Assembled] = []

        def answer_by(models: LocalModels) -> Answering:
            assembled.append(assemble(config, models, metrics, parts))
            return assembled[0].answering

        taker = AdviceTaker(own_limits(config))
        metrics.watch_advice(lambda: (taker.told, taker.told == taker.in_force))
        sender = HintSender(power.socket_path, taker=taker, watch=LoopWatch()) if power.socket_path else None
        runtime = Runtime(
            loaded,
            store,
            metrics,
            make_worker=advised(make_worker, taker),
            profile=profile,
            tensor_results=parts.tensor_results,
            workload=Workload(sender, ttft_slo_s=power.ttft_slo_s),
            taker=taker,
            energy=_energy(loaded, metrics, started),
            answer_by=answer_by,
        )
        metrics.watch_queues(runtime.by_priority)
        regions = None
        if config.server.shm_socket_path:
            regions = Regions(max_regions=config.server.max_regions, max_bytes=config.server.max_regions_bytes)
        api = Api(runtime=runtime, config=config, telemetry=metrics, answer_store=parts.store, regions=regions)
        server = Server(
            build_app(runtime, config, metrics, api_keys=api_keys, api=api),
            max_connections=config.server.max_connections,
            short_way=ShortWay(api, access_log=config.server.access_log),
        )
        running = Running(
            config=config,
            runtime=runtime,
            parts=parts,
            assembled=assembled[0],
            api=api,
            server=server,
            metrics=metrics,
        )
        asyncio.run(_serve(loaded, running, listening, environ, ready, read))
    finally:
        started.close()
        for sock in listening.sockets:
            sock.close()
        if listening.path is not None and listening.inode is not None:
            listen.remove(listening.path, listening.inode)


def _energy(loaded: Loaded, metrics: telemetry.Telemetry, started: ExitStack) -> EnergyMonitor | None:
    """Begin to read the meter that tells what answers take; None without one. Raises ConfigError."""
    config = loaded.config
    chosen = open_meter(config.power, origin=loaded.origins.get("power.meter", "default"))
    if chosen.meter is None:
        _log.info("answers do not tell what they took: %s", chosen.reason)
        if config.router.max_energy_j_per_day > 0:
            _log.warning("router.max_energy_j_per_day is not reached: nothing is measured")
        if chosen.may_come:
            chosen = Chosen(LateMeter(lambda: open_meter(config.power), chosen.reason))
    monitor = chosen.monitor()
    if monitor is None:
        return None
    started.callback(monitor.close)
    if not isinstance(chosen.meter, LateMeter):
        now = monitor.now()
        _log.info("answers tell what they took, by %s (%s, %s)", now.source, now.boundary, now.quality)
    metrics.watch_power(monitor.now)
    return monitor


def _allow_descriptors(loaded: Loaded) -> None:
    """Raise the soft limit of open files to what max_connections takes; without one left no worker could be started."""
    server = loaded.config.server
    n_regions = 2 * server.max_regions if server.shm_socket_path else 0  # and as many connections that bring them
    n_lent = MAX_LOANS + 2 * MAX_LENT_BUFFERS
    needed = server.max_connections + n_regions + n_lent + _OTHER_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < needed:
        raise ConfigError(
            key="server.max_connections",
            problem=f"takes {needed} file descriptors, this process may have {hard} (ulimit -Hn)",
            origin=loaded.origins.get("server.max_connections", "default"),
        )
    if 0 <= soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _api_keys(loaded: Loaded) -> ApiKeys | None:
    server = loaded.config.server
    if server.api_keys_file:
        return ApiKeys.load(Path(server.api_keys_file))
    if server.tcp_host:
        raise ConfigError(
            key="server.api_keys_file",
            problem="is required with server.tcp_host: without keys everybody on the network could ask",
            origin=loaded.origins.get("server.tcp_host", "default"),
        )
    return None


def _listen(loaded: Loaded, environ: Mapping[str, str]) -> Listening:
    server = loaded.config.server
    path, inode = None, None
    sockets = listen.inherited(environ)
    try:
        if not sockets:
            path = listen.socket_path(server, environ)
            sockets.append(listen.bind_unix(path, mode=int(server.socket_mode, 8), group=server.socket_group))
            inode = listen.inode(path)
        elif isinstance(name := sockets[0].getsockname(), str):
            path = Path(name)
        if not server.tcp_host:
            return Listening(tuple(sockets), path, inode, None)
        tcp = listen.bind_tcp(server.tcp_host, server.tcp_port)
        host, port = tcp.getsockname()[:2]
        return Listening((*sockets, tcp), path, inode, (host, port))
    except ConfigError:
        for sock in sockets:
            sock.close()
        if path is not None and inode is not None:
            listen.remove(path, inode)
        raise


class SideServer(Protocol):
    """A server beside the HTTP one: start once, then stop once."""

    async def start(self) -> None:
        """Raises ConfigError where its socket cannot be had."""
        ...

    async def stop(self, grace_s: float) -> None: ...


def _side_servers(loaded: Loaded, running: Running) -> list[SideServer]:
    server, api = loaded.config.server, running.api
    found: list[SideServer] = []
    if api.regions is not None:
        found.append(RegionServer(api.regions, Path(server.shm_socket_path), server))
    if server.grpc_socket_path:
        try:
            from edge_rt.api.grpc_server import GrpcServer  # 14 MiB that few need
        except ImportError as exc:
            raise ConfigError(
                key="server.grpc_socket_path",
                problem=f"needs gRPC ({exc}); install it with `pip install 'edge_rt[grpc]'`",
                origin=loaded.origins.get("server.grpc_socket_path", "default"),
            ) from exc
        running.grpc = GrpcServer(api, Path(server.grpc_socket_path))
        found.append(running.grpc)
    return found


async def _serve(
    loaded: Loaded,
    running: Running,
    listening: Listening,
    environ: Mapping[str, str],
    ready: Callable[[Listening], None],
    read: Callable[[], Loaded] | None,
) -> None:
    loop = asyncio.get_running_loop()
    runtime, server = running.runtime, running.server
    stop, hurry = asyncio.Event(), asyncio.Event()
    sides = _side_servers(loaded, running)
    async with AsyncExitStack() as started:
        for side in sides:
            await side.start()
            started.push_async_callback(side.stop, 0.0)
        started.pop_all()

    def on_signal(number: signal.Signals) -> None:
        _log.info("%s: %s", number.name, "ending at once" if stop.is_set() else "finishing running answers")
        (hurry if stop.is_set() else stop).set()

    hung_up = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    if read is None or _is_of_a_terminal(environ):
        loop.add_signal_handler(signal.SIGHUP, on_signal, signal.SIGHUP)
    else:
        loop.add_signal_handler(signal.SIGHUP, hung_up.set)
    held_signals.release()
    # The API is up while models load, so that probes see a live daemon that is not ready yet.
    serving = loop.create_task(server.serve(sockets=list(listening.sockets)))
    reporter = Reporter(runtime, lambda message: _tell(message, environ), watchdog_s=watchdog_interval_s(environ))
    starting = loop.create_task(_start(runtime, running.parts, listening, reporter, ready))
    others: list[asyncio.Task[None]] = []
    if environ.get("NOTIFY_SOCKET"):
        others.append(loop.create_task(reporter.run()))
    if read is not None:
        reloader = Reloader(running, reporter, read=read, api_keys=_api_keys)
        others.append(loop.create_task(_reload(reloader, starting, hung_up)))
    stopping = loop.create_task(stop.wait())
    starting.add_done_callback(lambda task: stop.set() if not task.cancelled() and task.exception() else None)
    try:
        await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
    finally:
        drain_s = running.config.server.drain_s
        reporter.stopping(drain_s + _LAST_WORDS_S + _STOPPING_S)
        starting.cancel()
        stopping.cancel()
        server.stop(drain_s + _LAST_WORDS_S)
        closing = loop.create_task(_close(runtime, running.parts, drain_s, hurry))
        ending = [closing, serving, starting, *(side.stop(drain_s + _LAST_WORDS_S) for side in sides)]
        results = await asyncio.gather(*ending, return_exceptions=True)
        for task in others:
            task.cancel()
    for result in results:
        if isinstance(result, Exception):  # a cancelled start is none
            raise result


async def _start(
    runtime: Runtime, parts: Parts, listening: Listening, reporter: Reporter, ready: Callable[[Listening], None]
) -> None:
    await asyncio.gather(runtime.start(), parts.begin())
    gc.collect()
    gc.freeze()  # what is here now stays: a collection that looks at it all holds up a request for milliseconds
    reporter.started()
    ready(listening)


async def _reload(reloader: Reloader, starting: asyncio.Task[None], hung_up: asyncio.Event) -> None:
    """Read the configuration again whenever SIGHUP has come, but not before the start is through."""
    await asyncio.wait([starting])
    while True:
        await hung_up.wait()
        hung_up.clear()
        try:
            await reloader.reload()
        except Exception:  # noqa: BLE001  the daemon goes on as it was
            _log.exception("the configuration cannot be read again")


def _is_of_a_terminal(environ: Mapping[str, str]) -> bool:
    """Say whether SIGHUP means that the terminal is gone: not under systemd, nor by nohup, nor without a terminal."""
    if environ.get("NOTIFY_SOCKET") or signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return False
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


async def _close(runtime: Runtime, parts: Parts, drain_s: float, hurry: asyncio.Event) -> None:
    draining = asyncio.create_task(runtime.close(drain_s))
    hurrying = asyncio.create_task(hurry.wait())
    await asyncio.wait((draining, hurrying), return_when=asyncio.FIRST_COMPLETED)
    hurrying.cancel()
    if not draining.done():
        draining.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await draining
        await runtime.close(0.0)
    else:
        await draining
    await parts.hang_up()


def _tell(message: str, environ: Mapping[str, str]) -> None:
    if problem := notify(message, environ):
        _log.warning("%s", problem)
