"""What a language model's worker keeps of prompts from one start to the next."""

from __future__ import annotations

import logging
from pathlib import Path

from edge_rt.backends.base import TokenSession
from edge_rt.catalog.lora import same_file
from edge_rt.catalog.place import Place
from edge_rt.catalog.store import free_bytes
from edge_rt.engine.pinning import system_ids
from edge_rt.engine.prefix_disk import PrefixDisk, state_key
from edge_rt.engine.tokens import TokenEngine
from edge_rt.errors import EdgeRtError
from edge_rt.worker.channel import Load

_log = logging.getLogger(__name__)

CONFIGURED = "config:"  # before the names of pins of the configuration


def open_disk(load: Load, session: TokenSession) -> PrefixDisk | None:
    """Find the folder of prefixes beside a model of the store; None for another file, and where none shall be kept."""
    path = Path(load.path)
    if not load.max_prefix_disk_bytes or not load.path or (record := Place(path).read_record()) is None:
        return None
    info, caps, stat = session.info, session.caps, path.stat()
    # isolate_prefixes too: what users shared before must not be found by all once they are kept apart.
    key = state_key(
        (
            *(record.sha256, stat.st_size, stat.st_mtime_ns),
            *(info.arch, info.quant, info.n_params, info.backend, info.build),
            *map(same_file, load.adapters),
            *(load.kv_type, caps.n_ctx, caps.n_cell_block, caps.can_save_ranges, load.isolate_prefixes),
        )
    )
    return PrefixDisk(Place(path).prefixes, key, load.max_prefix_disk_bytes, free_bytes=free_bytes)


def pin_configured(load: Load, engine: TokenEngine) -> None:
    """Pin what the configuration has, and no longer what it has had; before the engine runs."""
    names = {CONFIGURED + name for name in load.pins}
    for pin in engine.warm.pins(frozenset({""})):
        if pin.name.startswith(CONFIGURED) and pin.name not in names:
            engine.warm.unpin(pin.name, "")
    for name, text in load.pins.items():
        try:
            token_ids = system_ids(engine, text)
        except EdgeRtError as exc:
            problem = str(exc)
        else:
            problem = engine.warm.pin(CONFIGURED + name, "", token_ids)
        if problem:
            _log.warning("pin %s of %s is left out: %s", name, load.model, problem)
            engine.warm.left_out[CONFIGURED + name] = problem
