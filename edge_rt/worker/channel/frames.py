"""Frames: two little-endian lengths, msgpack, and what is attached to the message.

A frame holds one message. Senders coalesce the frames of one moment into one write, and a reader decodes all the
frames of one read, so that a step of eight streams wakes the front process once. Tensors' bytes are attached to their
message rather than put in it: they leave from where they are, and are read to where they stay.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec

from edge_rt.tensor_types import Data
from edge_rt.worker.channel.messages import FromWorker, Infer, ToWorker, WithTensors

# The largest honest frame holds a tensor request's inputs; anything near the cap is a bug or a broken peer.
MAX_FRAME_BYTES = 256 * 2**20

_LENGTHS = struct.Struct("<II")  # of the message and of what is attached
_READ_BYTES = 64 * 1024  # what is longer is read to where it stays

M = TypeVar("M")


class ChannelError(Exception):
    """The peer broke the framing or the message types; the connection cannot go on."""


def encode(message: ToWorker | FromWorker, attached: Sequence[Data] = ()) -> bytearray:
    """Make one frame but for what is attached, which must follow it.

    Raises ChannelError for more than MAX_FRAME_BYTES.
    """
    frame = bytearray(_LENGTHS.size)
    _ENCODER.encode_into(message, frame, _LENGTHS.size)
    size, n_attached = len(frame) - _LENGTHS.size, sum(map(len, attached))
    if size + n_attached > MAX_FRAME_BYTES:
        raise ChannelError(f"a message of {size + n_attached} bytes is over the limit of {MAX_FRAME_BYTES}")
    _LENGTHS.pack_into(frame, 0, size, n_attached)
    return frame


_ENCODER = msgspec.msgpack.Encoder()


class FrameReader(Generic[M]):
    """Cut a byte stream into messages of one type. Bytes are read into room, then received is told how many.

    A frame that is longer than what is read at once gets memory of its own, which its tensors go on using.
    """

    __slots__ = ("_decoder", "_frame", "_n_bytes", "_n_message", "_read")

    def __init__(self, message_type: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(message_type)
        self._read = memoryview(bytearray(_READ_BYTES))
        self._frame: memoryview | None = None  # of a long frame, behind its lengths
        self._n_message = 0  # bytes of a long frame that are its message
        self._n_bytes = 0  # in _frame, or in _read if there is none

    @property
    def is_empty(self) -> bool:
        """Say whether no part of a message is here that is not whole yet."""
        return self._frame is None and not self._n_bytes

    @property
    def is_in_long_frame(self) -> bool:
        """Say whether room ends where a message does."""
        return self._frame is not None

    def room(self) -> memoryview:
        """Give where the next bytes go; never empty."""
        return (self._read if self._frame is None else self._frame)[self._n_bytes :]

    def received(self, n_bytes: int) -> list[M]:
        """Give the messages that are whole, with so many more bytes in room. Raises ChannelError."""
        self._n_bytes += n_bytes
        if (frame := self._frame) is not None:
            if self._n_bytes < len(frame):
                return []
            self._frame, self._n_bytes = None, 0
            return [self._message(frame[: self._n_message], frame[self._n_message :].toreadonly())]
        messages: list[M] = []
        start, end, view = 0, self._n_bytes, self._read
        while end - start >= _LENGTHS.size:
            n_message, n_attached = _LENGTHS.unpack_from(view, start)
            size = n_message + n_attached
            if size > MAX_FRAME_BYTES:
                raise ChannelError(f"a frame of {size} bytes is over the limit of {MAX_FRAME_BYTES}")
            begin = start + _LENGTHS.size
            if end - begin < size:
                if begin + size > len(view):
                    self._frame, self._n_message = memoryview(bytearray(size)), n_message
                    self._n_bytes = end - begin
                    self._frame[: self._n_bytes] = view[begin:end]
                    return messages
                break
            start = begin + size
            messages.append(self._message(view[begin : begin + n_message], bytes(view[begin + n_message : start])))
        if start:
            self._n_bytes = end - start
            view[: self._n_bytes] = bytes(view[start:end])
        return messages

    def feed(self, data: Data) -> list[M]:
        """Take bytes as they come and give the messages that are whole. Raises ChannelError."""
        messages: list[M] = []
        while data:
            room = self.room()
            n_bytes = min(len(room), len(data))
            room[:n_bytes] = data[:n_bytes]
            messages += self.received(n_bytes)
            data = data[n_bytes:]
        return messages

    def _message(self, view: memoryview, attached: Data) -> M:
        try:
            message = self._decoder.decode(view)
        except msgspec.DecodeError as exc:
            raise ChannelError(f"a message cannot be decoded: {exc}") from exc
        if isinstance(message, WithTensors):
            message.attached = attached
            is_elsewhere = isinstance(message, Infer) and message.memory is not None
            n_bytes = 0 if is_elsewhere else sum([sent.size_bytes for sent in message.sent])
        else:
            n_bytes = 0
        if n_bytes != len(attached):
            raise ChannelError(f"{len(attached)} bytes are attached to a message that has {n_bytes}")
        return message
