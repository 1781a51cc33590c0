"""A real vLLM on the CPU: log-probabilities of its answers are those of Transformers at the τ of the true hidden state.

`make test-serving` makes its environment, `.venv-vllm`, and the wheel; without them these tests are skipped.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
import torch
from server_support import free_port, wait_for_ports
from support import ROOT
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from tempnet import TempNet, TempNetConfig

BIN = ROOT / ".venv-vllm/bin"
WHEELS = sorted((ROOT / "dist").glob("tempnet-*.whl"))
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.long,
    pytest.mark.skipif(not (BIN / "vllm").exists() or not WHEELS, reason="`make test-serving` makes the environment"),
]

VOCABULARY, NUM_LOGITS, WIDTH, THINK, NUM_NEW = 1000, 1024, 128, 500, 24
# Largest error of the log-probabilities and of τ under load, and of τ where the server's own logits are known, too. In
# bfloat16 those of Transformers are rounded otherwise.
BOUNDS = {"float32": (1e-4, 1e-5, 1e-5), "bfloat16": (0.3, 0.05, 1e-3)}
PREFIX = list(range(10, 80))  # more than a step may hold, so that it is read in chunks
# Arguments of a request; the settings before and after its switch, as `tempnet.serving.settings` writes them; what switches.
REQUESTS: list[tuple[dict[str, Any] | None, float, float]] = [
    (None, 0.0, 0.0), ({"tempnet": 1}, 2.0, 2.0), ({"tempnet_tau_max": 1.2}, 1.2, 1.2), ({"tempnet": "off"}, 0.0, 0.0),
    ({"tempnet_tau": 0.6}, -0.6, -0.6),
    ({"tempnet_then": 0.5, "tempnet_then_at": "</think>", "tempnet_then_after": 9}, 2.0, -0.5),
]  # fmt: skip


# Without the path of this checkout, from which the wheel would not be told.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}


def run_python(*arguments: str) -> str:
    """Run the Python of vLLM's environment and return what it prints."""
    done = subprocess.run([str(BIN / "python"), *arguments], capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    """Install the wheel into the environment of vLLM, of which it changes no package."""
    pip = ("-m", "pip", "--disable-pip-version-check")
    run_python(*pip, "uninstall", "--quiet", "--yes", "tempnet", "scipy")
    before = set(run_python(*pip, "freeze").split("\n"))
    run_python(*pip, "install", "--quiet", str(WHEELS[-1]))
    after = set(run_python(*pip, "freeze").split("\n"))
    assert before <= after
    assert {re.split("[ =]", line)[0] for line in after - before} == {"tempnet", "scipy"}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a base model with padding in its vocabulary, and a tokenizer with one token to a word."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama", vocab_size=NUM_LOGITS, hidden_size=WIDTH, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
            layer.weight.normal_(0.0, 0.15)
        model.get_output_embeddings().weight[VOCABULARY:] = 0.0  # padding is never drawn, also without a TempNet
    path = tmp_path_factory.mktemp("served") / "base"
    model.save_pretrained(path)
    words = Tokenizer(WordLevel({"</think>" if i == THINK else f"t{i}": i for i in range(VOCABULARY)}, unk_token="t0"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0").save_pretrained(path)
    return path


def make_tempnet(kind: str) -> TempNet:
    torch.manual_seed(1)
    sizes: dict[str, Any] = {"rho": 1.5, "hidden_size": 32, "num_prototypes": 16}
    if kind == "logits":
        network = TempNet(TempNetConfig.for_logits(VOCABULARY, **sizes))
    else:
        network = TempNet(TempNetConfig.for_hidden(VOCABULARY, WIDTH, with_logits=kind == "both", **sizes))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return network.eval()


@dataclass(frozen=True, kw_only=True)
class Server:
    """A vLLM that runs."""

    url: str
    model: str

    def post(self, prompt: list[int], arguments: dict[str, Any] | None = None, **options: Any) -> Any:
        """Return the answer of `/v1/completions`; of a stream, the answer that its pieces make.

        No request has a seed: vLLM 0.32 on the CPU ends at one whose prompt it reads in chunks.
        """
        body = {"model": self.model, "prompt": prompt, "max_tokens": NUM_NEW, "temperature": 1, "logprobs": 20}
        body |= {"return_tokens_as_token_ids": True, "vllm_xargs": arguments, **options}
        data = json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}/v1/completions", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=300) as answer:
            if not options.get("stream"):
                return json.load(answer)
            lines = [line.decode().removeprefix("data: ").strip() for line in answer]
        parts = [json.loads(line)["choices"][0]["logprobs"] for line in lines if line and line != "[DONE]"]
        whole = {name: [one for part in parts if part for one in part[name]] for name in ("tokens", "top_logprobs")}
        return {"choices": [{"logprobs": whole}]}

    def metric(self, name: str) -> float:
        """Return the sum of a counter."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as answer:
            return sum(float(line.split()[-1]) for line in answer.read().decode().splitlines() if line.startswith(name))


@contextmanager
def serve(base: Path, tempnet: Path, dtype: str, log: Path) -> Iterator[Server]:
    """Start `vllm serve` on loopback with room for few requests, and end it."""
    port = free_port()
    environment = ENVIRONMENT | {
        "PATH": f"{BIN}:{os.environ['PATH']}", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1", "TEMPNET_PATH": str(tempnet),
    }  # fmt: skip
    command = [
        str(BIN / "vllm"), "serve", str(base), "--host=127.0.0.1", f"--port={port}", f"--dtype={dtype}", "--enforce-eager",
        "--max-model-len=256", "--max-num-batched-tokens=64", "--max-num-seqs=32", "--block-size=32",
        "--num-gpu-blocks-override=40", "--logprobs-mode=processed_logprobs",
    ]  # fmt: skip
    with log.open("a") as file:
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT, cwd=log.parent)
    try:
        wait_for_ports(process, port)
        yield Server(url=f"http://127.0.0.1:{port}", model=str(base))
    finally:
        process.terminate()
        process.wait(timeout=60)


def test_the_service_of_vllm_is_one_that_ray_serve_takes() -> None:
    code = """
import sys, yaml
from ray.serve.llm import LLMServingArgs
from ray.serve.schema import ServeDeploySchema
service, _ = yaml.safe_load_all(open(sys.argv[1]))
config = ServeDeploySchema.model_validate(yaml.safe_load(service["spec"]["serveConfigV2"]))
(application,) = config.applications
(model,) = LLMServingArgs.model_validate(application.args).llm_configs
print(model.get_engine_config().get_initialization_kwargs()["logprobs_mode"])
"""
    printed = run_python("-c", code, str(ROOT / "infra/serving/ray-service.yaml"))
    assert printed.splitlines()[-1] == "processed_logprobs"


def answer_of(answer: Any) -> tuple[list[int], list[dict[int, float]]]:
    """Return the tokens of an answer, and for each the log-probabilities of the likeliest ones."""
    logprobs = answer["choices"][0]["logprobs"]
    top = [{int(key.split(":")[1]): value for key, value in one.items()} for one in logprobs["top_logprobs"]]
    return [int(key.split(":")[1]) for key in logprobs["tokens"]], top


@torch.no_grad()
def reference(
    model: PreTrainedModel, network: TempNet, prompt: list[int], new: list[int], first: float, then: float
) -> tuple[Tensor, Tensor]:
    """Return the logits of Transformers before each new token, (T, V or more), and τ (T,) of the true hidden states."""
    output = model(torch.tensor([prompt + new]), output_hidden_states=True)
    part = slice(len(prompt) - 1, len(prompt) - 1 + len(new))
    logits, hidden = output.logits[0, part].float(), output.hidden_states[-1][0, part].float()
    tau = []
    for place in range(len(new)):
        setting = then if THINK in new[:place] or place >= 9 else first
        network.set_tau_max_eval(setting if setting > 0.0 else None)
        predicted = network(logits[place : place + 1, :VOCABULARY], hidden[place : place + 1])
        tau.append(predicted if setting > 0.0 else torch.tensor([-setting or 1.0]))
    return logits, torch.cat(tau)


def tau_of(raw: Tensor, divided: Tensor) -> float:
    """Return τ from logits (or log-probabilities) of some tokens, and their log-probabilities at τ: log p = z/τ + const."""
    raw, divided = raw.double() - raw.double().mean(), divided.double() - divided.double().mean()
    return float((raw @ raw) / (raw @ divided))


def tau_seen(raw: dict[int, float], divided: dict[int, float]) -> float:
    """Return the τ that a client sees who knows the log-probabilities of the likeliest tokens without and with it."""
    both = sorted(raw.keys() & divided.keys())
    return tau_of(torch.tensor([raw[one] for one in both]), torch.tensor([divided[one] for one in both]))


def ask(server: Server, asked: list[Any]) -> tuple[list[Any], list[tuple[list[int], int, float]]]:
    """Return the answers to all requests at once, and what a client sees of τ: tokens, number of them before it, and τ."""
    with ThreadPoolExecutor(len(asked)) as pool:
        numbered = list(enumerate(asked))
        answers = list(pool.map(lambda one: answer_of(server.post(*one[1][:2], stream=one[0] % 4 == 3)), numbered))
    assert server.metric("vllm:num_preemptions_total") > 0
    assert server.metric("vllm:prefix_cache_hits_total") > 0
    seen = []
    for prompt, *_ in asked[:12]:  # the same token with and without a TempNet, after one that fills the cache
        tokens = [*prompt, 7]
        _, off, on = (answer_of(server.post(tokens, one, max_tokens=1)) for one in (None, None, {"tempnet": 1}))
        seen.append((tokens, len(tokens), tau_seen(off[1][0], on[1][0])))
    # All tokens of an answer, by asking for their raw log-probabilities afterwards.
    (prompt, *_), (new, top) = asked[1], answers[1]
    again = server.post(prompt + new, max_tokens=1, prompt_logprobs=20, logprobs=None)["choices"][0]["prompt_logprobs"]
    for place, one in enumerate(again[len(prompt) :]):
        raw = {int(key): value["logprob"] for key, value in one.items()}
        seen.append((prompt + new, len(prompt) + place, tau_seen(raw, top[place])))
    return answers, seen


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("kind", ["logits", "hidden", "both"])
def test_log_probabilities_are_those_of_transformers(base: Path, tmp_path: Path, kind: str, dtype: str) -> None:
    """64 requests at once, which share a prefix and do not fit into the cache together; a quarter are streams."""
    network, log = make_tempnet(kind), tmp_path / "log"
    network.save_pretrained(tmp_path / "tempnet")
    draw = torch.Generator().manual_seed(0)
    ends = [torch.randint(1, VOCABULARY, (3 + number % 17,), generator=draw).tolist() for number in range(64)]
    asked = [(PREFIX + end, *REQUESTS[number % len(REQUESTS)]) for number, end in enumerate(ends)]
    rounds = []
    for _ in range(2 if (kind, dtype) == ("both", "float32") else 1):  # the second time after a restart
        with serve(base, tmp_path / "tempnet", dtype, log) as server:
            rounds.append(ask(server, asked))
            for arguments, options, message in (
                ({"tempnet": 1}, {"temperature": 0.7}, "temperature = 0.7 changes the logits"),
                ({"tempnet_tau_max": -1}, {}, "tempnet_tau_max = -1 must be a finite number above 0"),
            ):
                with pytest.raises(HTTPError) as refusal:
                    server.post(PREFIX, arguments, **options)
                assert refusal.value.code == 400
                assert message in refusal.value.read().decode()
    assert "hidden states from logits: from " in log.read_text()
    model = AutoModelForCausalLM.from_pretrained(base, dtype=getattr(torch, dtype)).eval()
    of_logs, of_tau, of_seen, tau_all = [], [], [], []
    for answers, seen in rounds:
        for (prompt, _, first, then), (new, top) in zip(asked, answers, strict=True):
            assert len(new) == len(top) == NUM_NEW
            logits, tau = reference(model, network, prompt, new, first, then)
            logits = logits[:, : VOCABULARY if first or then else NUM_LOGITS]
            expected = (logits / tau.unsqueeze(-1)).log_softmax(-1)
            for place, one in enumerate(top):
                ids, values = list(one), torch.tensor(list(one.values()))
                of_logs.append(float((values - expected[place, ids]).abs().max()))
                of_tau.append(abs(tau_of(logits[place, ids], values) / float(tau[place]) - 1.0))
            tau_all.append(tau)
        for tokens, before, read in seen:
            _, tau = reference(model, network, tokens[:before], [0], 2.0, 2.0)
            of_seen.append(abs(read / float(tau) - 1.0))
    figures = [max(of_logs), max(of_tau), max(of_seen)]
    spread = float(torch.cat(tau_all).std())
    print(
        f"{kind}, {dtype}: {len(of_tau)} tokens, std of τ {spread:.2f}, largest errors",
        *(f"{one:.1e}" for one in figures),
    )
    assert all(one < bound for one, bound in zip(figures, BOUNDS[dtype], strict=True))
