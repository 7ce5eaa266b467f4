"""Many clients of all kinds at once: nobody gets an error that is not their own, every answer is right."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from kvbench.server_guests import GUESTS
from kvbench.server_load import Load, LoadError
from serving_helpers import LiveServer

StartServer = Callable[..., LiveServer]


@pytest.mark.slow
async def test_a_crowd(start_server: StartServer):
    server = start_server(max_requests=256)
    load = Load(server.url, "tiny", streams=16, least=15)
    await load.run(1.0)
    assert set(load.visits) == {guest.__name__ for guest in GUESTS}
    reused = re.search(r"^kvboost_reused_tokens_total (\S+)", server.get("/metrics").text, re.MULTILINE)
    assert reused is not None
    assert float(reused.group(1)) > 0


async def test_a_wrong_answer_is_found(start_server: StartServer):
    server = start_server(max_requests=256)
    load = Load(server.url, "tiny", streams=4)
    await load.run(0.0)
    load.least = 10
    load.known = [replace(ask, answer=ask.answer + "?") for ask in load.known]
    with pytest.raises(LoadError, match="alone it was"):
        await load.run(0.0)


async def test_a_busy_server_is_found(start_server: StartServer):
    server = start_server(max_requests=2)
    with pytest.raises(LoadError, match="429"):
        await Load(server.url, "tiny", streams=16, least=4).run(0.0)


def test_growth_is_found():
    load = Load("", "", 1, rss=[(float(second), (500 + second) * 2**20) for second in range(300)])
    load.check_memory()
    assert load.faults == ["memory grew from 612 to 770 MiB"]
