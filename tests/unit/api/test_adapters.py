from __future__ import annotations

import pytest

from edge_rt.api.adapters import read_adapters
from edge_rt.api.schemas import WireAdapter
from edge_rt.config import Config
from edge_rt.config.tables import AdapterSettings, ModelSettings
from edge_rt.errors import InvalidRequestError
from edge_rt.types import Adapter

CONFIG = Config(
    models={"m": ModelSettings(adapters={"one": AdapterSettings(file="1"), "two": AdapterSettings(file="2")})}
)


def read(model: str, *lora: WireAdapter) -> tuple[str, tuple[Adapter, ...]]:
    return read_adapters(model, lora, lambda model: tuple(CONFIG.model(model).adapters))


def test_a_model_may_be_named_with_an_adapter() -> None:
    assert read("m:two") == ("m", (Adapter(name="two"),))
    assert read("m") == ("m", ())
    assert read("m:q4_0") == ("m:q4_0", ())  # no adapter: who looks models up says what is wrong
    assert read("other:one") == ("other:one", ())


def test_adapters_go_by_name_or_by_their_place() -> None:
    assert read("m", WireAdapter(id=1, scale=0.5), WireAdapter(id="one")) == (
        "m",
        (Adapter(name="two", scale=0.5), Adapter(name="one")),
    )
    assert read("m", WireAdapter(id=0, scale=0.0)) == ("m", ())
    assert read("m", WireAdapter(id="strange")) == ("m", (Adapter(name="strange"),))  # which the engine refuses


@pytest.mark.parametrize(
    ("model", "entry"), [("m", WireAdapter(id=2)), ("m", WireAdapter(id=-1)), ("x", WireAdapter(id=0))]
)
def test_a_place_that_is_none(model: str, entry: WireAdapter) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read(model, entry)
    assert caught.value.param == "lora[0].id"


def test_an_adapter_is_named_once() -> None:
    with pytest.raises(InvalidRequestError, match="both name adapters"):
        read("m:one", WireAdapter(id=1))
