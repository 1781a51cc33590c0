"""Serve a page that generates three texts side by side, one token at a time: at predicted temperatures, at a constant one,
and by min-p. It is served on the loopback interface only.

    GET /                the page
    GET /about           JSON: the name of the model, its τ_max and the maximum number of tokens
    GET /generate?…      server-sent events: `tokens` for every step, then `end`; or `refused` with a message

The standard library is enough for one person. A request that names another host is refused, so that no website can
read the model through a name that leads to this machine; and so is one that another site's page has made, which could not
read the answer, but would have the model compute. A connection that sends nothing is closed.

Shapes: 3 texts, V effective vocabulary.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import torch
from torch import Tensor

from jobs.scoring.config import check_least
from jobs.scoring.generation.config import PlaygroundConfig
from jobs.scoring.generation.sampling import load_model
from jobs.tasks.base import naming_field
from pipelines.local_copy import local_copy
from pipelines.text.tokenization import added_text, encode_prompt, load_tokenizer
from tempnet.devices import input_device
from tempnet.inference import check_prompts, end_ids, record_hidden_states
from tempnet.loading import check_vocabulary, load_tempnet
from tempnet.serving.batch import BatchTemperatures

HOST = "127.0.0.1"
_PAGE = Path(__file__).with_name("page.html")
# The page loads nothing from anywhere: its styles and its script are in it.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
TEXTS = ("tempnet", "constant", "min_p")
NUM_ALTERNATIVES = 8
"""Number of most likely next tokens that the page shows for every token."""
Token = dict[str, Any]
"""What a token adds to the text, the τ that it was drawn at (1 for min-p), and the entropy in nats and the most likely tokens
of the distribution that it was drawn from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What one click on the page asks for; three texts are generated from it, which use the same random numbers."""

    prompt: str
    num_tokens: int
    """Number of new tokens."""
    tau_max: float
    """τ_max of the TempNet, for the text at predicted temperatures."""
    constant: float
    """Temperature of the text at a constant temperature."""
    min_p: float
    """For the text of min-p at τ = 1: only tokens whose probability is at least this share of the largest are drawn."""
    seed: int

    def __post_init__(self) -> None:
        check_least(self, num_tokens=1)
        for name in ("tau_max", "constant"):
            value = getattr(self, name)
            if not (0.0 < value <= 100.0 and math.isfinite(value)):
                raise ValueError(f"{name} = {value:g} must lie in (0, 100]")
        if not 0.0 <= self.min_p < 1.0:
            raise ValueError(f"min_p = {self.min_p:g} must lie in [0, 1)")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed = {self.seed} must lie in [0, 2⁶³)")

    @classmethod
    def parse(cls, values: Mapping[str, str], *, max_new_tokens: int) -> Settings:
        """Read the settings from the query of a request; ValueError names one that is missing or not legal."""
        kinds = {"int": int, "float": float, "str": str}
        parsed = {}
        for field in fields(cls):
            if field.name not in values:
                raise ValueError(f"{field.name} is missing")
            try:
                parsed[field.name] = kinds[str(field.type)](values[field.name])
            except ValueError:
                raise ValueError(f"{field.name} = {values[field.name]!r} is no number") from None
        settings = cls(**parsed)
        if settings.num_tokens > max_new_tokens:
            raise ValueError(
                f"num_tokens = {settings.num_tokens} is more than the {max_new_tokens} that the server allows"
            )
        return settings


class Playground:
    """A model and its TempNet, which serve one request at a time."""

    def __init__(self, config: PlaygroundConfig) -> None:
        with naming_field("tempnet = " if config.tempnet else "model = "):
            tempnet = load_tempnet(local_copy(config.tempnet or config.model))
        self.base, self.tokenizer = load_model(config), load_tokenizer(config.model, needs_eos=False)
        check_vocabulary(self.base, tempnet)
        self.temperatures = BatchTemperatures(tempnet, input_device(self.base))
        self._ends = set(end_ids(self.base, self.tokenizer))
        self._lock = threading.Lock()

    def generate(self, settings: Settings) -> Iterator[dict[str, Token]]:
        """Yield the next token of every text that has not ended, by the name of the text (`TEXTS`)."""
        ids = encode_prompt(self.tokenizer, settings.prompt)
        tokens = torch.tensor([ids] * len(TEXTS), device=self.temperatures.device)
        check_prompts(self.base, tokens, None, settings.num_tokens)
        return self._steps(tokens, settings)

    def _steps(self, tokens: Tensor, settings: Settings) -> Iterator[dict[str, Token]]:
        generators = [torch.Generator().manual_seed(settings.seed) for _ in TEXTS]
        running, written = set(range(len(TEXTS))), tokens.tolist()
        cache: Any = None
        # One request at a time: a second one would only make both slow. A page that is closed ends its generator.
        with self._lock:
            for _ in range(settings.num_tokens):
                with torch.inference_mode(), record_hidden_states(self.base) as seen:
                    output = self.base(input_ids=tokens, past_key_values=cache, use_cache=True)
                cache = output.past_key_values
                log_probabilities, tau = self._distributions(output.logits[:, -1], seen[-1][:1, -1], settings)
                drawn = [
                    int(torch.multinomial(row.exp(), 1, generator=generator))
                    for row, generator in zip(log_probabilities, generators, strict=True)
                ]
                tokens = torch.tensor(drawn, device=self.temperatures.device).unsqueeze(-1)
                running -= {text for text in running if drawn[text] in self._ends}
                if not running:
                    return
                made = {}
                for text in sorted(running):
                    written[text].append(drawn[text])
                    made[TEXTS[text]] = self._token(written[text], log_probabilities[text], float(tau[text]))
                yield made

    @torch.inference_mode()
    def _distributions(self, logits: Tensor, state: Tensor, settings: Settings) -> tuple[Tensor, Tensor]:
        """Return log q (3, V) of the next tokens on the CPU, and τ (3,); `state` (1, d) is that of the first text."""
        logits = logits[:, : self.temperatures.vocab_size].float()
        tau_max = torch.tensor([settings.tau_max], device=logits.device)
        tau = self.temperatures.predict(logits[:1], tau_max, state)
        tau = torch.cat([tau, tau.new_tensor([settings.constant, 1.0])])
        made = torch.log_softmax(logits / tau.unsqueeze(-1), dim=-1)
        if settings.min_p > 0.0:
            too_small = made[2] < made[2].amax() + math.log(settings.min_p)
            made[2] = torch.log_softmax(made[2].masked_fill(too_small, -math.inf), dim=-1)
        return made.cpu(), tau.cpu()

    def _token(self, written: list[int], log_probabilities: Tensor, tau: float) -> Token:
        probabilities = log_probabilities.exp()
        top = probabilities.topk(min(NUM_ALTERNATIVES, len(probabilities)))
        alternatives = [(int(index), float(value)) for value, index in zip(*top, strict=True) if value > 0.0]
        return {
            "text": added_text(self.tokenizer, written[:-1], written[-1]),
            "tau": tau,
            "entropy": float(torch.special.entr(probabilities).sum()),
            "alternatives": [
                (
                    added_text(self.tokenizer, written[:-1], token) or str(self.tokenizer.decode([token])),
                    round(value, 6),
                )
                for token, value in alternatives
            ],
        }


def make_server(config: PlaygroundConfig, playground: Playground) -> ThreadingHTTPServer:
    """Return a server that is bound to its port and not started; `server_port` is the port."""
    try:
        return ThreadingHTTPServer((HOST, config.port), partial(_Handler, config, playground))
    except OSError as error:
        raise type(error)(
            f"port = {config.port} cannot be used ({error.strerror}): give another --port, or end what listens there"
        ) from error


class _Handler(BaseHTTPRequestHandler):
    # Seconds to wait for a request, or for the browser to take what it asked for. The base class reads this name.
    timeout = 10.0

    def __init__(self, config: PlaygroundConfig, playground: Playground, *arguments: Any) -> None:
        self.config, self.playground = config, playground
        super().__init__(*arguments)

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        host = (self.headers.get("Host") or "").rsplit(":", 1)[0]
        if host not in (HOST, "localhost"):
            self.send_error(HTTPStatus.FORBIDDEN, f"this server answers to {HOST} and localhost only")
        elif self.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):  # every browser says it
            self.send_error(HTTPStatus.FORBIDDEN, "this server answers to its own page only")
        elif address.path == "/":
            self._send("text/html; charset=utf-8", _PAGE.read_bytes())
        elif address.path == "/about":
            about = {
                "model": self.config.model,
                "tau_max": self.playground.temperatures.tau_max,
                "max_new_tokens": self.config.max_new_tokens,
            }
            self._send("application/json", json.dumps(about).encode())
        elif address.path == "/generate":
            self._stream(dict(parse_qsl(address.query, keep_blank_values=True)))
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def _send(self, kind: str, content: bytes) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Security-Policy", _POLICY)
        self.end_headers()
        self.wfile.write(content)

    def _stream(self, query: dict[str, str]) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        # The connection breaks when the page is closed or its reader presses Stop, and a page may take nothing any more.
        with (
            contextlib.suppress(ConnectionError, TimeoutError),
            contextlib.closing(self._events(query)) as events,
        ):
            for event, data in events:
                self.wfile.write(f"event: {event}\ndata: {json.dumps(data)}\n\n".encode())
                self.wfile.flush()

    def _events(self, query: dict[str, str]) -> Generator[tuple[str, Any]]:
        try:
            settings = Settings.parse(query, max_new_tokens=self.config.max_new_tokens)
            steps = self.playground.generate(settings)
        except ValueError as error:
            yield "refused", str(error)
            return
        for tokens in steps:
            yield "tokens", tokens
        yield "end", {}

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log nothing: the requests hold what a person has typed."""
