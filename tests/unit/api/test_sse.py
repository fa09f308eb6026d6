from __future__ import annotations

import asyncio

import pytest
from starlette.types import Message

from edge_rt.api.schemas import Content
from edge_rt.api.sse import EventSender, HangUps, HungUpError, StopOnHangUp, error_event, event


def test_an_event_is_one_line_whatever_the_text() -> None:
    text = "a\n\ndata: b\r\u2028"
    escaped = "a\\n\\ndata: b\\r\u2028"
    expected = f'data: {{"content":"{escaped}","prompt":"{escaped}"}}\n\n'
    assert event(Content(content=text, prompt=text)) == expected.encode()
    assert error_event(b'{"error":1}') == b'data: {"error":1}\n\n'


def test_the_response_starts_with_the_first_event() -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def scenario() -> None:
        sender = EventSender(send)
        assert sent == []
        await sender.put(b"a")
        await sender.put(b"b", more=False)

    asyncio.run(scenario())
    assert [message["type"] for message in sent] == [
        "http.response.start",
        "http.response.body",
        "http.response.body",
    ]
    assert [message["more_body"] for message in sent[1:]] == [True, False]


class Client:
    """receive() of a client that hangs up when told to."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()

    async def __call__(self) -> Message:
        await self.gone.wait()
        return {"type": "http.disconnect"}


def test_a_hang_up_stops_the_work() -> None:
    async def scenario() -> None:
        client = Client()

        async def work() -> None:
            async with StopOnHangUp(client):
                client.gone.set()
                await asyncio.Event().wait()

        with pytest.raises(HungUpError):
            await work()
        # The task goes on as if it had never been cancelled.
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0
        await asyncio.sleep(0)

    asyncio.run(scenario())


@pytest.mark.parametrize("is_lost_before", [False, True])
def test_a_lost_connection_stops_the_work_that_listens_to_it(is_lost_before: bool) -> None:
    async def scenario() -> None:
        hang_ups, before, after = HangUps(), [False], [False]
        if is_lost_before:
            hang_ups.tell()

        async def work() -> None:
            async with StopOnHangUp(Client(), hang_ups):
                before[0] = True
                hang_ups.tell()
                await asyncio.Event().wait()
                after[0] = True

        with pytest.raises(HungUpError):
            await work()
        assert (before, after) == ([True], [False])
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0
        async with StopOnHangUp(Client(), other := HangUps()):
            await asyncio.sleep(0)
        other.tell()  # nobody listens any more
        await asyncio.sleep(0)
        assert task.cancelling() == 0

    asyncio.run(scenario())


def test_without_a_hang_up_nothing_happens() -> None:
    async def scenario() -> None:
        async with StopOnHangUp(Client()):
            await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) <= 2  # this one, and the watch that is just ending

    asyncio.run(scenario())


def test_an_error_of_the_work_stays_what_it_is() -> None:
    async def scenario() -> None:
        client = Client()

        async def work() -> None:
            async with StopOnHangUp(client):
                client.gone.set()
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await work()

    asyncio.run(scenario())


def test_another_cancellation_stays_one() -> None:
    async def scenario() -> None:
        client = Client()
        entered = asyncio.Event()

        async def work() -> None:
            async with StopOnHangUp(client):
                entered.set()
                await asyncio.Event().wait()

        for hangs_up in (False, True):
            task = asyncio.create_task(work())
            await entered.wait()
            task.cancel()
            if hangs_up:
                client.gone.set()
            with pytest.raises(asyncio.CancelledError):
                await task
            entered.clear()

    asyncio.run(scenario())
