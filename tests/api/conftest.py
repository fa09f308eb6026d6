"""A daemon with the null model, and clients of it. A module with a daemon of its own gives the clients that one."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import anthropic
import httpx
import ollama
import openai
import pytest

from edge_rt.api.client import no_authorities
from tests.api.daemon import Daemon


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with tempfile.TemporaryDirectory(prefix="ert-") as directory, Daemon(Path(directory)) as running:
        yield running


@pytest.fixture
def openai_sdk(daemon: Daemon) -> Iterator[openai.OpenAI]:
    with (
        daemon.client() as http,
        openai.OpenAI(base_url="http://edge_rt/v1", api_key="none", http_client=http, max_retries=0) as client,
    ):
        yield client


@pytest.fixture
def anthropic_sdk(daemon: Daemon) -> Iterator[anthropic.Anthropic]:
    with (
        daemon.client() as http,
        anthropic.Anthropic(base_url="http://edge_rt", api_key="none", http_client=http, max_retries=0) as client,
    ):
        yield client


@pytest.fixture
def ollama_sdk(daemon: Daemon) -> Iterator[ollama.Client]:
    with ollama.Client(
        host="http://edge_rt", transport=httpx.HTTPTransport(uds=str(daemon.socket), verify=no_authorities())
    ) as client:
        yield client
