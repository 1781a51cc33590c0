"""Tests of the playground over HTTP: what it streams is what the model and the TempNet say, and nothing leaves loopback."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import queue
import shlex
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import aiohttp
import pytest
import torch
from readme_support import PYTHON, lines_like
from support import wait_for
from transformers import GPT2LMHeadModel, PreTrainedTokenizerFast

from jobs.playground import main
from jobs.scoring.generation.config import PlaygroundConfig
from jobs.scoring.playground import server as server_module
from jobs.scoring.playground.server import Playground, Settings, make_server
from tempnet import TempNet, TempNetConfig
from tests.jobs.scoring.generation_support import VOCABULARY, make_model

QUERY = {"prompt": "the cat", "num_tokens": 12, "tau_max": 1.3, "constant": 0.6, "min_p": 0.3, "seed": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a random model with its tokenizer and TempNet where the README's command looks for one."""
    return make_model(tmp_path_factory.mktemp("home") / "runs" / "gpt2-scratch-small" / "export", "gpt2", 32)


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[ThreadingHTTPServer]:
    config = PlaygroundConfig(model=str(model), port=0, max_new_tokens=20, device="cpu")
    with make_server(config, Playground(config)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def get(server: ThreadingHTTPServer, path: str, **headers: str) -> tuple[int, str, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=120)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    return answer.status, answer.headers.get("Content-Security-Policy", ""), answer.read().decode()


def events(server: ThreadingHTTPServer, **changes: Any) -> list[tuple[str, Any]]:
    _, _, body = get(server, "/generate?" + urlencode(QUERY | changes))
    parts = [dict(line.split(": ", 1) for line in block.splitlines()) for block in body.split("\n\n") if block]
    return [(part["event"], json.loads(part["data"])) for part in parts]


def reference(model: Path, name: str) -> list[dict[str, Any]]:
    """Return id, τ and probabilities of the tokens of one text, from forward passes over the whole text so far."""
    base = GPT2LMHeadModel.from_pretrained(model).eval()
    network = TempNet.from_pretrained(model / "tempnet")
    network.set_tau_max_eval(QUERY["tau_max"])
    ids = [0, *PreTrainedTokenizerFast.from_pretrained(model)(QUERY["prompt"]).input_ids]
    generator = torch.Generator().manual_seed(QUERY["seed"])
    made = []
    with torch.no_grad():
        for _ in range(QUERY["num_tokens"]):
            logits = base(torch.tensor([ids])).logits[0, -1, :VOCABULARY]
            tau = {"tempnet": float(network(logits)), "constant": 0.6, "min_p": 1.0}[name]
            probabilities = torch.softmax(logits / tau, -1)
            if name == "min_p":
                probabilities = probabilities * (probabilities >= 0.3 * probabilities.max())
                probabilities /= probabilities.sum()
            ids.append(int(torch.multinomial(probabilities, 1, generator=generator)))
            if ids[-1] == base.config.eos_token_id:
                break
            made.append({"id": ids[-1], "tau": tau, "probabilities": probabilities})
    return made


@pytest.mark.parametrize("name", ["tempnet", "constant", "min_p"])
def test_the_streamed_tokens_are_those_of_the_model(server: ThreadingHTTPServer, model: Path, name: str) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    *steps, last = events(server)
    assert last == ("end", {})
    assert all(event == "tokens" for event, _ in steps)
    tokens = [data[name] for _, data in steps if name in data]
    expected = reference(model, name)
    assert len(tokens) == len(expected) >= 4
    text = tokenizer.decode([one["id"] for one in expected])
    assert "".join(token["text"] for token in tokens) == text.rstrip("\ufffd")
    ids, before = [], ""
    for token, one in zip(tokens, expected, strict=True):
        assert token["tau"] == pytest.approx(one["tau"], abs=1e-5)
        assert token["entropy"] == pytest.approx(float(torch.special.entr(one["probabilities"]).sum()), abs=1e-4)
        top = one["probabilities"].topk(8)
        for (shown, probability), value, index in zip(token["alternatives"], *top, strict=False):
            assert probability == pytest.approx(float(value), abs=1e-5)
            written = tokenizer.decode([*ids, int(index)])  # a character that is not complete adds no text yet
            assert (before + shown == written) or shown == tokenizer.decode([int(index)])
        ids.append(one["id"])
        before += token["text"]
        assert len(token["alternatives"]) == min(8, int((one["probabilities"] > 0).sum()))


def test_a_tempnet_may_read_hidden_states(model: Path, tmp_path: Path) -> None:
    base, tokenizer = GPT2LMHeadModel.from_pretrained(model), PreTrainedTokenizerFast.from_pretrained(model)
    sizes = {"rho": 1.5, "hidden_size": 16, "num_prototypes": 8}
    network = TempNet(TempNetConfig.for_hidden(VOCABULARY, 32, with_logits=True, **sizes))
    network.save_pretrained(tmp_path)
    playground = Playground(PlaygroundConfig(model=str(model), tempnet=str(tmp_path), device="cpu"))
    *_, step = playground.generate(Settings(**QUERY | {"num_tokens": 1}))
    network.eval().set_tau_max_eval(QUERY["tau_max"])
    with torch.no_grad():
        output = base(torch.tensor([[0, *tokenizer(QUERY["prompt"]).input_ids]]), output_hidden_states=True)
        expected = network(output.logits[:, -1, :VOCABULARY], output.hidden_states[-1][:, -1])
    assert step["tempnet"]["tau"] == pytest.approx(expected.item(), abs=1e-5)


def test_an_empty_prompt_begins_a_document(server: ThreadingHTTPServer) -> None:
    assert events(server, prompt="")[-1] == ("end", {})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_tokens": 0}, "num_tokens = 0 must be at least 1"),
        ({"num_tokens": 21}, "num_tokens = 21 is more than the 20"),
        ({"tau_max": "wide"}, "tau_max = 'wide' is no number"),
        ({"tau_max": "nan"}, "tau_max = nan must lie in"),
        ({"min_p": 1}, "min_p = 1 must lie in"),
        ({"prompt": "the cat " * 20}, "do not fit into the context of 32 tokens"),
    ],
    ids=str,
)
def test_what_cannot_be_generated_is_said(server: ThreadingHTTPServer, changes: dict[str, Any], message: str) -> None:
    ((event, said),) = events(server, **changes)
    assert event == "refused"
    assert message in said


def test_pages_of_others_and_half_requests_cost_nothing(
    server: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for site, status in (("cross-site", 403), ("same-site", 403), ("none", 200), ("same-origin", 200)):
        assert get(server, "/about", **{"Sec-Fetch-Site": site})[0] == status
    monkeypatch.setattr(server_module._Handler, "timeout", 0.2)
    before = threading.active_count()
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=20) as half:
        half.sendall(b"GET /about HTTP/1.1\r\nHost: 127.0")
        assert half.recv(100) == b""  # The server has closed the connection.
    assert threading.active_count() <= before + 1
    with pytest.raises(OSError, match=rf"port = {server.server_port} cannot be used .*another --port"):
        make_server(PlaygroundConfig(model="x", port=server.server_port), None)  # type: ignore[arg-type]


def test_the_page_asks_nobody_else(server: ThreadingHTTPServer) -> None:
    assert server.server_address[0] == "127.0.0.1"
    status, policy, page = get(server, "/")
    assert status == 200
    assert "default-src 'none'" in policy
    assert "//" not in page.replace("<!doctype", "")
    assert all(f'"{name}"' in page for name in Settings.__dataclass_fields__)
    assert json.loads(get(server, "/about")[2])["tau_max"] == 2.0
    assert get(server, "/else")[0] == 404
    assert get(server, "/about", Host="example.org")[0] == 403


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


Evaluate = Callable[[str], Awaitable[Any]]


@asynccontextmanager
async def open_page(url: str, profile: Path) -> AsyncIterator[Evaluate]:
    """Open a page in headless Chromium with an empty profile; yield a function that returns the value of JavaScript."""
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless", "--disable-gpu", "--remote-debugging-port=0", f"--user-data-dir={profile}", url]
    if os.getuid() == 0:
        command.insert(1, "--no-sandbox")
    browser, note = subprocess.Popen(command, stderr=subprocess.DEVNULL), profile / "DevToolsActivePort"
    try:
        wait_for(lambda: note.is_file() and "\n" in note.read_text(), seconds=60)
        address = f"http://127.0.0.1:{note.read_text().splitlines()[0]}/json"
        async with aiohttp.ClientSession() as session:
            (page,) = [one for one in await (await session.get(address)).json() if one["type"] == "page"]
            async with session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0) as socket:

                async def run(script: str) -> Any:
                    asked = {"expression": script, "awaitPromise": True, "returnByValue": True}
                    await socket.send_json({"id": 1, "method": "Runtime.evaluate", "params": asked})
                    answer = (await socket.receive_json(timeout=60))["result"]
                    assert "exceptionDetails" not in answer, answer
                    return answer["result"].get("value")

                yield run
    finally:
        browser.terminate()
        browser.wait(timeout=60)


async def becomes_true(run: Evaluate, script: str) -> None:
    async with asyncio.timeout(60):
        while not await run(script):
            await asyncio.sleep(0.1)


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_in_a_browser(server: ThreadingHTTPServer, tmp_path: Path) -> None:
    """Tokens appear one after the other, a hovered one shows what it was drawn from, and moving τ_max generates again."""
    home = f"http://127.0.0.1:{server.server_port}/"
    taus = "[...document.querySelectorAll('#tempnet span')].map(span => Number(span.dataset.tau))"
    has_ended = f"source === null && {taus}.length > 0"

    async def visit() -> None:
        async with open_page(home, tmp_path / "profile") as run:
            await becomes_true(
                run, "location.port && document.readyState === 'complete' && at('tau_max_value').textContent !== ''"
            )
            assert await run("document.querySelectorAll('#texts span').length") == 0
            for field in ("prompt", "num_tokens", "constant", "min_p", "seed"):
                await run(f"at('{field}').value = {json.dumps(QUERY[field])}")
            await run("at('start').click()")
            await becomes_true(run, has_ended)
            tau_max = float(await run("at('tau_max').value"))
            streamed = [data["tempnet"] for name, data in events(server, tau_max=tau_max) if name == "tokens"]
            assert await run(taus) == pytest.approx([token["tau"] for token in streamed], abs=1e-4)
            assert await run("document.querySelectorAll('#texts section').length") == 3
            assert f"{len(streamed)} tokens, mean τ " in await run("at('mean_tempnet').textContent")
            await run("document.querySelector('#tempnet span').dispatchEvent(new Event('mouseenter'))")
            cells = "[...document.querySelectorAll('#hover td:nth-child(2)')].map(cell => Number(cell.textContent))"
            assert await run(cells) == pytest.approx([share for _, share in streamed[0]["alternatives"]], abs=1e-4)
            await run("at('tau_max').value = 0.5; at('tau_max').dispatchEvent(new Event('change'))")
            await becomes_true(run, has_ended)
            assert max(await run(taus)) <= 0.5
            asked = await run("performance.getEntriesByType('resource').map(entry => entry.name)")
            assert [url for url in asked if not url.startswith(home)] == []

    asyncio.run(visit())


def test_the_command_serves_until_ctrl_c(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs in this process; that Ctrl-C ends every job with status 130 is shown in `tests/jobs/test_exit_status.py`."""
    printed: queue.Queue[str] = queue.Queue()
    pages: list[bytes] = []

    def visit() -> None:
        address = printed.get(timeout=120).split()[0].removeprefix("http://")
        connection = http.client.HTTPConnection(address, timeout=120)
        try:
            connection.request("GET", "/")
            pages.append(connection.getresponse().read())
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    (line,) = lines_like("jobs.playground *")
    _, *words = shlex.split(line.removeprefix(PYTHON))
    monkeypatch.chdir(model.parents[2])
    monkeypatch.setattr("jobs.playground.print", lambda text, **_: printed.put(text), raising=False)
    visitor = threading.Thread(target=visit, daemon=True)
    visitor.start()
    with pytest.raises(KeyboardInterrupt):
        main([*words, "--port", "0"])
    visitor.join()
    assert b"playground" in pages[0]
