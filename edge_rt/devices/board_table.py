"""Which of a board's rails is its whole power, which are its chip's: one TOML file a board, in boards/.

Files in /etc/edge_rt/boards come first and have the same form, for boards of one's own; docs/power.md describes it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from edge_rt.devices.sysfs import SysfsRoot
from edge_rt.errors import ConfigError
from edge_rt.regular import read_regular

SHIPPED = Path(__file__).with_name("boards")
OWN = "etc/edge_rt/boards"

_MAX_BYTES = 2**16
_MAX_ITEMS = 64

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rail:
    """One supply of the board.

    name       the label the driver shows; where it shows none, device and number tell the rail
    chip       hwmon's name of the chip, "ina3221"; "" fits any
    device     the chip's address on its bus: "1-0040"
    number     the driver's channel, from 1
    shunt_ohm  on the board, by its schematic or device tree
    """

    name: str
    chip: str = ""
    device: str = ""
    number: int | None = None
    shunt_ohm: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pmic:
    """How the Raspberry Pi 5's rails become the board's power: slope · sum + offset_w."""

    slope: float
    offset_w: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """What a file says.

    source  who says so
    note    what the numbers leave out
    board, soc  the rails that add up to each; empty: no rail tells it
    absent  why the board measures nothing and what helps; "" where it does
    file    where this stands
    """

    name: str
    source: str
    note: str
    rails: tuple[Rail, ...]
    board: tuple[str, ...]
    soc: tuple[str, ...]
    pmic: Pmic | None
    absent: str
    compatible: tuple[str, ...]
    model: tuple[str, ...]
    dmi: tuple[str, ...]
    file: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What firmware says the machine is: the device tree's compatible names, most special first; model; DMI."""

    compatible: tuple[str, ...]
    model: str
    dmi: str


def identity(root: SysfsRoot) -> Identity:
    """Read what the machine is; empty where it does not say."""
    compatible = (root.text("proc/device-tree/compatible").value or "").split("\0")
    parts = [root.name(f"sys/class/dmi/id/{file}").value for file in ("sys_vendor", "product_name")]
    return Identity(
        compatible=tuple(name for name in compatible[:_MAX_ITEMS] if name),
        model=root.name("proc/device-tree/model").value or "",
        dmi=" ".join(part for part in parts if part),
    )


def find(root: SysfsRoot, shipped: Path = SHIPPED) -> Board | None:
    """Find the file for this machine, None where there is none. Raises ConfigError for a file that breaks the form."""
    machine = identity(root)
    for boards in (own(root), load(shipped)):
        ranked = [(rank, board) for board in boards if (rank := _rank(board, machine)) is not None]
        if ranked:
            return min(ranked, key=lambda pair: pair[0])[1]
    return None


def load(folder: Path = SHIPPED) -> tuple[Board, ...]:
    """Read all files of a folder. Raises ConfigError."""
    return tuple(parse(path.read_text(), str(path)) for path in sorted(folder.glob("*.toml")))


def own(root: SysfsRoot) -> tuple[Board, ...]:
    """Read the files of this machine's owner. Raises ConfigError."""
    boards = []
    for path in root.paths(f"{OWN}/*.toml"):
        try:
            text = read_regular(root.path(path), _MAX_BYTES).decode("utf-8")
        except (OSError, UnicodeDecodeError) as exc:
            problem = exc.strerror if isinstance(exc, OSError) else str(exc)
            raise ConfigError(key="board", problem=f"cannot be read: {problem}", origin=f"/{path}") from exc
        boards.append(parse(text, f"/{path}"))
    return tuple(boards)


def parse(text: str, file: str) -> Board:
    """Read one file strictly. Raises ConfigError, which names the key."""
    if len(text) > _MAX_BYTES:
        raise ConfigError(
            key="board", problem=f"has {len(text)} characters, at most {_MAX_BYTES} are allowed", origin=file
        )
    try:
        table = _Table(tomllib.loads(text), "", file)
    except tomllib.TOMLDecodeError as exc:
        raise ConfigError(key="board", problem=f"is no TOML: {exc}", origin=file) from None
    match = table.table("match")
    board = Board(
        name=table.text("name", required=True),
        source=table.text("source", required=True),
        note=table.text("note"),
        rails=tuple(_rail(entry) for entry in table.tables("rail")),
        board=table.texts("board"),
        soc=table.texts("soc"),
        pmic=_pmic(table.table("pmic")) if "pmic" in table else None,
        absent=table.text("absent"),
        compatible=match.texts("compatible"),
        model=match.texts("model"),
        dmi=match.texts("dmi"),
        file=file,
    )
    match.close()
    table.close()
    _check(board)
    return board


def _rail(table: _Table) -> Rail:
    rail = Rail(
        name=table.text("name", required=True),
        chip=table.text("chip"),
        device=table.text("device"),
        number=table.number("number", int, 1, 64),
        shunt_ohm=table.number("shunt_ohm", float, 1e-4, 1.0),
    )
    table.close()
    return rail


def _pmic(table: _Table) -> Pmic:
    slope, offset_w = table.number("slope", float, 0.5, 2.0), table.number("offset_w", float, 0.0, 10.0)
    table.close()
    if slope is None or offset_w is None:
        raise table.error("slope and offset_w", "both are wanted")
    return Pmic(slope=slope, offset_w=offset_w)


def _check(board: Board) -> None:
    def wrong(key: str, problem: str) -> ConfigError:
        return ConfigError(key=key, problem=problem, origin=board.file)

    names = [rail.name for rail in board.rails]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise wrong("rail", f"{', '.join(sorted(repeated))} stands there more than once")
    for key, rails in (("board", board.board), ("soc", board.soc)):
        for name in rails:
            if name not in names:
                raise wrong(key, f"{name} is no [[rail]] of this file; there are {', '.join(names) or 'none'}")
        if len(set(rails)) < len(rails):
            raise wrong(key, "a rail would be added twice")
    if not (board.compatible or board.model or board.dmi):
        raise wrong("match", "compatible, model or dmi is wanted, or no machine is meant")
    if board.absent and (board.board or board.pmic):
        raise wrong("absent", "the board has a meter, by `board` or [pmic]: leave one of them out")


def _rank(board: Board, machine: Identity) -> tuple[int, int] | None:
    """Tell how closely a file fits, smallest first; None where it does not."""
    places = [machine.compatible.index(name) for name in board.compatible if name in machine.compatible]
    if places:
        return 0, min(places)
    if lengths := [len(model) for model in board.model if machine.model.startswith(model)]:
        return 1, -max(lengths)
    fits = [len(dmi) for dmi in board.dmi if machine.dmi and (dmi == "*" or machine.dmi.startswith(dmi))]
    return (2, -max(fits)) if fits else None


class _Table:
    """A TOML table that is taken apart key by key; close() refuses what is left."""

    def __init__(self, values: Mapping[str, Any], place: str, file: str) -> None:
        self._values = dict(values)
        self._place = place
        self._file = file

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def error(self, key: str, problem: str) -> ConfigError:
        return ConfigError(key=f"{self._place}{key}", problem=problem, origin=self._file)

    def text(self, key: str, *, required: bool = False) -> str:
        value = self._take(key, lambda v: isinstance(v, str) and v.isprintable() and len(v) <= 400, "one line of text")
        if required and not value:
            raise self.error(key, "is missing")
        return value or ""

    def texts(self, key: str) -> tuple[str, ...]:
        def fits(value: Any) -> bool:
            return (
                isinstance(value, list)
                and len(value) <= _MAX_ITEMS
                and all(isinstance(v, str) and v and v.isprintable() for v in value)
            )

        return tuple(self._take(key, fits, f"a list of at most {_MAX_ITEMS} texts") or ())

    def number(self, key: str, kind: type[T], least: float, most: float) -> T | None:
        def fits(value: Any) -> bool:
            is_number = isinstance(value, int | float if kind is float else int) and not isinstance(value, bool)
            return is_number and least <= value <= most

        value = self._take(key, fits, f"a number from {least:g} to {most:g}")
        return None if value is None else kind(value)  # type: ignore[call-arg]

    def table(self, key: str) -> _Table:
        value = self._take(key, lambda v: isinstance(v, dict), "a table")
        return _Table(value or {}, f"{self._place}{key}.", self._file)

    def tables(self, key: str) -> tuple[_Table, ...]:
        def fits(value: Any) -> bool:
            return isinstance(value, list) and len(value) <= _MAX_ITEMS and all(isinstance(v, dict) for v in value)

        found = self._take(key, fits, f"at most {_MAX_ITEMS} tables") or ()
        return tuple(_Table(value, f"{self._place}{key}[{i}].", self._file) for i, value in enumerate(found, 1))

    def close(self) -> None:
        if self._values:
            raise self.error(next(iter(self._values)), "is no key of a board file")

    def _take(self, key: str, fits: Callable[[Any], bool], wanted: str) -> Any:
        value = self._values.pop(key, None)
        if value is not None and not fits(value):
            raise self.error(key, f"must be {wanted}, not {str(value)[:60]!r}")
        return value
