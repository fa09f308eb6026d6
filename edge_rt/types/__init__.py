"""Frozen value types that cross module and process borders.

Standard library only. Every quantity is SI and carries its unit in its name. The worker channel
encodes these types as msgpack, so a field is a plain scalar, a tuple, a mapping or another type here.
"""

from __future__ import annotations

from edge_rt.types.answers import (
    CacheState,
    Choice,
    Chunk,
    FinishReason,
    Hypothesis,
    Origin,
    Timings,
    TokenLogprob,
    TokenSignal,
    ToolCallDelta,
    Usage,
)
from edge_rt.types.energy import (
    Energy,
)
from edge_rt.types.models import (
    AdapterFile,
    Capabilities,
    EngineStats,
    Evidence,
    ModelInfo,
    PinAction,
    PinnedPrefix,
)
from edge_rt.types.requests import (
    CHAT_SAMPLING,
    CLOUD_FORMATS,
    Adapter,
    Beams,
    CacheWishes,
    GenerateRequest,
    Message,
    Priority,
    ResponseFormat,
    Route,
    Sampling,
    Tool,
    ToolCall,
    goes_on,
)

__all__ = [
    "CHAT_SAMPLING",
    "CLOUD_FORMATS",
    "Adapter",
    "AdapterFile",
    "Beams",
    "CacheState",
    "CacheWishes",
    "Capabilities",
    "Choice",
    "Chunk",
    "Energy",
    "EngineStats",
    "Evidence",
    "FinishReason",
    "GenerateRequest",
    "Hypothesis",
    "Message",
    "ModelInfo",
    "Origin",
    "PinAction",
    "PinnedPrefix",
    "Priority",
    "ResponseFormat",
    "Route",
    "Sampling",
    "Timings",
    "TokenLogprob",
    "TokenSignal",
    "Tool",
    "ToolCall",
    "ToolCallDelta",
    "Usage",
    "goes_on",
]
