"""What is put together from the configuration, and goes on after a restart."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from edge_rt.assembly import Parts, assemble
from edge_rt.catalog.manifest import Manifest
from edge_rt.cloud.endpoints import CloudModels
from edge_rt.config import CloudEndpoint, Config, Router
from edge_rt.scheduler.forms import Placement
from edge_rt.telemetry import Telemetry
from edge_rt.types import Chunk, GenerateRequest, Message
from tests import virtual_time

ASKED = GenerateRequest(id="r", model="m", messages=(Message(role="user", content="why?"),), route="cloud")


class NoModels:
    def generate_here(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        raise NotImplementedError

    def form(self, model: str) -> tuple[Placement, Manifest | None]:
        placement = Placement(
            model=model, backend="null", variant="", quant="", path="", n_ctx=64, n_seq_max=1, chat_template=None
        )
        return placement, None


def reason(ledger: Path) -> str:
    """Tell why a request that asks for the cloud goes where it goes, with a budget for a day."""

    async def main() -> str:
        endpoint = CloudEndpoint(base_url="unix:/nowhere", model="big", price_in=1.0, price_out=1.0)
        router = Router(scorer=False, hold_back_tokens=0, max_cost_per_day=1.0)
        config, telemetry = Config(cloud={"c": endpoint}, router=router), Telemetry()
        cloud = CloudModels(config.cloud, telemetry)
        try:
            assembled = assemble(config, NoModels(), telemetry, Parts(cloud=cloud, ledger=ledger))
            return assembled.answering.explain(ASKED).reason
        finally:
            await cloud.close()

    return virtual_time.run(main())


def test_a_day_without_a_ledger_has_its_budget(tmp_path: Path) -> None:
    assert reason(tmp_path / "router.json") == "asked-cloud"


@pytest.mark.parametrize("content", [b'{"broken', b"{}", b'{"day": "x", "spent": 0}', b'{"day": 3, "spent": -1}'])
def test_a_damaged_ledger_counts_as_a_spent_day(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = tmp_path / "router.json"
    ledger.write_bytes(content)
    assert reason(ledger) == "cost"
    assert "counts as spent" in caplog.text


def test_what_was_spent_today_stays_spent(tmp_path: Path) -> None:
    ledger, found, day = tmp_path / "router.json", "", -1
    while day != int(time.time() // 86_400):  # once more where midnight came between
        day = int(time.time() // 86_400)
        ledger.write_text(json.dumps({"day": day, "spent": 1.5}))
        found = reason(ledger)
    assert found == "cost"
