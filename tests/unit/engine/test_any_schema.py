"""Any answer to any schema validates, of a model that knows nothing: its logits are drawn anew for each token."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import jsonschema
import numpy as np
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from edge_rt.backends.base import SeqRows
from edge_rt.backends.null import EOS
from edge_rt.errors import InvalidRequestError, UnsupportedFeatureError
from edge_rt.types import ResponseFormat, Sampling
from tests.beam_reference import random_logits
from tests.unit.engine.null_engine import Bench, Recorder, complete

_DRAWN = random_logits(264, 11)
_LIKED = [EOS, *b'",:]}{[0123456789abc']  # or most texts would be noise without an end


class Clueless(Recorder):
    """A null session whose logits mean nothing."""

    def decode(self, batch: Sequence[SeqRows]) -> list[NDArray[np.float32]]:
        super().decode(batch)
        outputs = []
        for rows in batch:
            contexts = [self.kv[rows.seq_id][: rows.start + i + 1] for i in range(len(rows.token_ids))]
            drawn = [_DRAWN(context) for context in (contexts if rows.want_all else contexts[-1:])]
            for row in drawn:
                row[_LIKED] += 2.0
            if rows.want_all:
                outputs.append(np.stack(drawn))
            elif rows.want_logits:
                outputs.append(drawn[0])
        return outputs


# Schemas of the supported keywords, small enough that most answers end.
LEAVES = st.one_of(
    st.builds(
        lambda a, b: {"type": "integer", "minimum": min(a, b), "maximum": max(a, b)}, *[st.integers(-999, 999)] * 2
    ),
    st.builds(
        lambda a, b: {"type": "number", "exclusiveMinimum": min(a, b), "maximum": max(a, b)},
        *[st.floats(-1e6, 1e6, allow_nan=False).map(lambda value: round(value, 3))] * 2,
    ),
    st.builds(lambda n, m: {"type": "string", "minLength": n, "maxLength": n + m}, *[st.integers(0, 4)] * 2),
    st.lists(
        st.one_of(st.none(), st.booleans(), st.integers(-(2**53), 2**53), st.text(max_size=4)), min_size=1, max_size=4
    ).map(lambda values: {"enum": values}),
    st.sampled_from(
        [
            True,
            {"type": "boolean"},
            {"type": ["null", "boolean"]},
            {"type": "string", "format": "date"},
            {"type": "string", "format": "time"},
            {"type": "string", "format": "ipv4"},
            {"type": "string", "format": "uuid"},
            {"type": "string", "pattern": "^[a-c]{1,3}$"},
            {"type": "string", "pattern": "b"},
            {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.25},
            {"type": "integer", "minimum": 3, "maximum": 60, "multipleOf": 7},
            {"not": {"type": ["string", "array", "object"]}},
        ]
    ),
)
NAMES = st.sampled_from(["a", "b", "c d", "é", 'q"', "a/b"])


def containers(schemas: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def as_object(parts: dict[str, Any], n_required: int, closed: str | None) -> Any:
        made = {"type": "object", "properties": parts, "required": sorted(parts)[:n_required]}
        return made if closed is None else {**made, closed: False}

    def depending(parts: dict[str, Any], names: list[str]) -> Any:
        made = {"type": "object", "properties": parts, "additionalProperties": False}
        return {**made, "dependentRequired": {names[0]: [name for name in names[1:] if name in parts]}}

    def as_record(names: dict[str, Any], value: Any, n: int) -> Any:
        return {"type": "object", "propertyNames": names, "additionalProperties": value, "maxProperties": n}

    closings = st.sampled_from(["additionalProperties", "unevaluatedProperties", None])
    names = st.sampled_from([{"pattern": "^[ab]"}, {"enum": ["a", "é"]}, {"minLength": 1, "maxLength": 3}])
    return st.one_of(
        st.builds(as_object, st.dictionaries(NAMES, schemas, max_size=3), st.integers(0, 3), closings),
        st.builds(
            depending,
            st.dictionaries(NAMES, schemas, min_size=1, max_size=3),
            st.lists(NAMES, min_size=1, max_size=3, unique=True),
        ),
        st.builds(as_record, names, schemas, st.integers(0, 2)),
        st.builds(
            lambda item, n, m: {"type": "array", "items": item, "minItems": n, "maxItems": n + m},
            schemas,
            *[st.integers(0, 2)] * 2,
        ),
        st.lists(schemas, min_size=1, max_size=3).map(lambda parts: {"anyOf": parts}),
        st.lists(schemas, min_size=1, max_size=2).map(lambda parts: {"allOf": parts}),
        st.lists(schemas, min_size=1, max_size=2).map(
            lambda parts: {"type": "array", "prefixItems": parts, "unevaluatedItems": False}
        ),
        schemas.map(lambda part: {"$ref": "#/$defs/p", "$defs": {"p": part}} if "$defs" not in str(part) else part),
    )


@settings(
    max_examples=int(os.environ.get("EDGE_RT_N_SCHEMAS", "150")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(schema=st.recursive(LEAVES, containers, max_leaves=5), seed=st.integers(0, 2**32))
def test_any_answer_to_any_schema_validates(schema: Any, seed: int) -> None:
    bench = Bench(session_type=Clueless, n_ctx=1024)
    form = ResponseFormat(kind="json_schema", text=json.dumps(schema))
    sampling = Sampling(temperature=1.0, seed=seed)
    answer = bench.ask(complete("x", max_tokens=300, response_format=form, sampling=sampling))
    if answer.error is not None:  # its parts cannot be met together, or not by this library
        assert isinstance(answer.error, InvalidRequestError | UnsupportedFeatureError)
        event(f"refused: {str(answer.error)[:60]}")
        return
    bench.run(answer)
    if answer.error is not None:
        assert isinstance(answer.error, InvalidRequestError)
        event(f"ended: {str(answer.error)[:90]}")
        return
    event(str(answer.last.finish_reason))
    if answer.last.finish_reason == "stop":
        formats = jsonschema.FormatChecker(["date", "ipv4", "uuid"])  # its time is draft 3's
        jsonschema.Draft202012Validator(schema, format_checker=formats).validate(json.loads(answer.text))
    bench.assert_idle()
