from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any, get_type_hints

import msgspec
import pytest

from edge_rt import errors
from edge_rt.errors import BackendStepError, EdgeRtError, InvalidRequestError, ModelNotFoundError, from_wire, subclasses

EXAMPLES: dict[Any, Any] = {str: "seven", int: 70_000_000_007, float: 7.5, tuple[str, ...]: ("seven", "eight")}


def example(cls: type[EdgeRtError]) -> EdgeRtError:
    hints = get_type_hints(cls)
    return cls(**{field.name: EXAMPLES[hints[field.name]] for field in dataclasses.fields(cls)})


def raised() -> list[type[EdgeRtError]]:
    """The leaves of the tree: what is raised."""
    return [cls for cls in subclasses() if not cls.__subclasses__()]


def test_codes_are_unique_and_stable_words() -> None:
    assert [code for code, n in Counter(cls.code for cls in subclasses()).items() if n > 1] == []
    assert all(cls.code.replace("_", "").isalpha() and cls.code.islower() for cls in subclasses())


def test_every_class_has_a_code_of_its_own() -> None:
    assert [cls.__name__ for cls in subclasses() if "code" not in vars(cls)] == []


def test_every_error_of_the_module_is_in_the_tree() -> None:
    defined = {cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, Exception)}
    assert defined == set(subclasses())


def test_the_drawing_at_the_top_shows_the_tree() -> None:
    drawn = errors.__doc__ or ""
    assert [cls.__name__ for cls in subclasses() if cls.__name__ not in drawn] == []


@pytest.mark.parametrize("cls", raised(), ids=lambda cls: cls.__name__)
def test_the_sentence_holds_every_field(cls: type[EdgeRtError]) -> None:
    error = example(cls)
    sentence = str(error)
    assert sentence
    assert cls.__name__ not in sentence
    for field in dataclasses.fields(cls):
        changed = EXAMPLES[get_type_hints(cls)[field.name]]
        other = {str: "nine", int: 90_000_000_009, float: 9.5, tuple: ("nine",)}[type(changed)]
        assert str(dataclasses.replace(error, **{field.name: other})) != sentence, field.name


@pytest.mark.parametrize("cls", raised(), ids=lambda cls: cls.__name__)
def test_an_error_crosses_the_channel_whole(cls: type[EdgeRtError]) -> None:
    error = example(cls)
    code, fields = msgspec.msgpack.decode(msgspec.msgpack.encode(error.to_wire()))
    there = from_wire(code, fields)
    assert type(there) is cls
    assert dataclasses.asdict(there) == dataclasses.asdict(error)
    assert str(there) == str(error)


@pytest.mark.parametrize(
    ("code", "fields"),
    [
        ("of_another_version", {"a": 1}),
        ("model_not_found", {"model": "m"}),
        ("queue_full", {"waiting": 1, "limit": 1, "retry_after_s": 1.0, "more": 2}),
    ],
)
def test_an_error_of_another_version_is_not_hidden(code: str, fields: dict[str, Any]) -> None:
    error = from_wire(code, fields)
    assert type(error) is BackendStepError
    assert code in str(error)
    assert str(fields) in str(error)


def test_an_error_keeps_its_cause_and_can_be_compared_by_identity() -> None:
    error = InvalidRequestError(param="stop", problem="too long")
    assert error != InvalidRequestError(param="stop", problem="too long")
    with pytest.raises(InvalidRequestError) as caught:
        raise error from KeyError("x")
    assert isinstance(caught.value.__cause__, KeyError)
    assert hash(error)


def test_unknown_models_are_told_which_there_are() -> None:
    assert "known models: a, b" in str(ModelNotFoundError(model="c", known=("a", "b")))
    assert "known models" not in str(ModelNotFoundError(model="c"))
