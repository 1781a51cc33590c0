"""TempNet: a small network that predicts a temperature from logits or an embedding (arXiv 2404.04575 §5, Appendix D.1).

    shift       x ← x, x − mean x or x − max x      (logits only; the shift does not change the softmax)
    normalise   x ← x/‖x‖₂                                       (and h ← h/‖h‖₂ of a hidden state h)
    transform   v = sigmoid(W1 x + b1)                                W1 (d1, d0)
                v = sigmoid(W1 h + b1)              (hidden state)    W1 (d1, d)
                v = sigmoid(W1 x + S h + b1)        (both)            S (d1, d)
    project     u = W2 v                (language models)             W2 (d2, d1)
                u = columns(W2)ᵀ v      (embeddings, unit columns)    W2 (d1, d2): the columns are prototypes
    pool        s = (1/ρ)·[Σ_k (softmax(u/φ)_k − 1/d2)·w3_k·u_k − b]
    output      τ = (τ_max − τ₀)·sigmoid(s) + τ₀

The pooling has the form of the optimality condition of the robust loss (Lemma 5.1). The input is detached
(stop-gradient), so that TempNet influences the base model only through τ in the loss. Everything is computed in
float32, whatever dtype the base model uses.

Shapes: N rows, d0 input size, d hidden state of a language model, d1 hidden size, d2 prototypes.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tempnet.network_config import TempNetConfig, read_fields
from tempnet.weights import check_weight_files, check_weights

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
# Subdirectory for a TempNet inside the directory of the base model that it was trained with.
PAIRED_DIRECTORY = "tempnet"
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
"""Pattern of the name of a repository on the Hugging Face Hub (owner/name)."""


class TempNet(nn.Module):
    """Network that predicts τ(x) from logits or embeddings x; the formula is in the docstring of this module.

    It has d0·d1 + d1 + d1·d2 + d2 + 2 parameters with the default switches (TempNet Table 13).
    """

    def __init__(self, config: TempNetConfig) -> None:
        super().__init__()
        self.config = config
        width = config.state_size if config.kind == "hidden" else config.input_size
        self.transform: nn.Sequential | None = None
        if config.transform:
            widths = [width] + [config.hidden_size] * (config.depth - 2)
            self.transform = nn.Sequential()
            for size_in, size_out in itertools.pairwise(widths):
                linear = nn.Linear(size_in, size_out)
                nn.init.kaiming_uniform_(linear.weight)
                nn.init.zeros_(linear.bias)
                self.transform.extend([linear, nn.Sigmoid() if config.activation == "sigmoid" else nn.ReLU()])
            if config.dropout:
                self.transform.append(nn.Dropout(config.dropout))
            width = config.hidden_size
        self.state_layer: nn.Linear | None = None
        if config.kind == "both":
            self.state_layer = nn.Linear(config.state_size, config.hidden_size, bias=False)
            nn.init.kaiming_uniform_(self.state_layer.weight)
        self.projection: nn.Parameter | None = None
        if config.projection:
            shape = (width, config.num_prototypes) if config.kind == "embeddings" else (config.num_prototypes, width)
            self.projection = nn.Parameter(torch.empty(shape))
            nn.init.kaiming_uniform_(self.projection, mode="fan_out" if config.kind == "embeddings" else "fan_in")
            width = config.num_prototypes
        self.projection_bias = nn.Parameter(torch.zeros(width)) if config.projection_bias else None
        if config.pooling == "parametric":
            self.pool_weight = nn.Parameter(torch.ones(width))
            # Scalars are stored as one-element vectors, because DeepSpeed cannot broadcast zero-dimensional parameters.
            self.pool_bias = nn.Parameter(torch.zeros(1))
            self.log_phi = nn.Parameter(torch.full((1,), math.log(config.phi_init)))
        else:
            self.final = nn.Linear(width, 1)

    def forward(self, inputs: Tensor, state: Tensor | None = None, *, state_product: Tensor | None = None) -> Tensor:
        """Return temperatures (...,) in float32 for logits or embeddings (..., d0).

        They lie between τ₀ and τ_max, or τ_max_eval in eval mode. Networks of the kinds `hidden` and `both` read hidden
        states (..., d) or, in their place, what :meth:`state_product` returns for them, (..., d1); the first of these read
        nothing else. An input of another size than d0, and missing hidden states, raise ValueError.
        """
        if self.config.reads_state and state is None and state_product is None:
            raise ValueError(
                f"this TempNet reads hidden states (kind = {self.config.kind!r}), and only logits are known here: sample "
                "with tempnet.inference.generate or attach, which listen to the model's output layer, or recover them by "
                "tempnet.serving.hidden_from_logits"
            )
        if inputs.shape[-1] != self.config.input_size:
            raise ValueError(
                f"TempNet reads {self.config.input_size} {self.config.kind}, the input has {inputs.shape[-1]}: "
                f"the base model's effective vocabulary (or embedding) is not the one that this TempNet was built for"
            )
        with torch.autocast(inputs.device.type, enabled=False):
            if state is not None and self.config.reads_state:
                state_product = self.state_product(self.normalize_state(state))
            if state_product is not None and not self.config.reads_logits:
                return self.from_first_product(state_product)
            x = (inputs.detach() if self.config.stop_gradient else inputs).to(self._dtype)
            if (offset := self.input_offset(x)) is not None:
                x = x - offset
            if self.config.normalize_input:
                x = F.normalize(x, dim=-1)
            if state_product is not None:
                return self.from_first_product(state_product + F.linear(x, self.first_layer.weight))
            return self._temperature(self.hidden(x))

    def input_offset(self, logits: Tensor) -> Tensor | None:
        """Return the value (..., 1) that `input_shift` subtracts from logits (..., V), or None for no shift."""
        if self.config.input_shift == "none":
            return None
        return logits.mean(-1, keepdim=True) if self.config.input_shift == "mean" else logits.amax(-1, keepdim=True)

    @property
    def first_layer(self) -> nn.Linear:
        """First layer of the transform, with weight W1 and bias b1."""
        assert self.transform is not None
        layer = self.transform[0]
        assert isinstance(layer, nn.Linear)
        return layer

    @property
    def state_weight(self) -> Tensor:
        """Weight (d1, d) that reads hidden states: W1 of a network on hidden states alone, else S."""
        return self.first_layer.weight if self.state_layer is None else self.state_layer.weight

    def normalize_state(self, state: Tensor) -> Tensor:
        """Return hidden states (..., d) as the network reads them: detached, in its dtype, and normalised."""
        state = state.detach().to(self._dtype)
        return F.normalize(state, dim=-1) if self.config.normalize_input else state

    def state_product(self, state: Tensor) -> Tensor:
        """Return what normalised hidden states (..., d) add to the first layer's product: (..., d1)."""
        return F.linear(state, self.state_weight)

    def from_first_product(self, product: Tensor) -> Tensor:
        """Return τ for the product W1 x, W1 h or W1 x + S h, (..., d1), of the first layer."""
        assert self.transform is not None
        return self._temperature(self.transform[1:](product + self.first_layer.bias))

    @property
    def _dtype(self) -> torch.dtype:
        """Dtype of the parameters: float32, unless a test has converted the module to float64."""
        return next(self.parameters()).dtype

    def hidden(self, x: Tensor) -> Tensor:
        """Return the transformed input v (..., d1)."""
        return x if self.transform is None else self.transform(x)

    def _temperature(self, v: Tensor) -> Tensor:
        """Return τ (...,) for the transformed input v; in eval mode τ_max_eval takes the place of τ_max."""
        config, score = self.config, self._pool(self._project(v))
        tau_max = config.tau_max if self.training else config.inference_tau_max
        return (tau_max - config.tau_min) * torch.sigmoid(score) + config.tau_min

    def _project(self, v: Tensor) -> Tensor:
        if self.projection is None:
            return v
        if self.config.kind == "embeddings":
            return v @ F.normalize(self.projection, dim=0)
        return F.linear(v, self.projection, self.projection_bias)

    def _pool(self, u: Tensor) -> Tensor:
        if self.config.pooling == "linear":
            # Dividing by d2 gives a mean on the same scale as the parametric pooling. A sum over the prototypes, which all
            # change at once, would saturate the sigmoid after a single step.
            pooled = self.final(u / u.shape[-1]).squeeze(-1)
        else:
            attention = torch.softmax(u * torch.exp(-self.log_phi), dim=-1) - 1.0 / u.shape[-1]
            pooled = (attention * self.pool_weight * u).sum(-1) - self.pool_bias
        return pooled / self.config.rho if self.config.pool_by_rho and self.config.rho > 0 else pooled

    @torch.no_grad()
    def init_prototypes(self, embeddings: Tensor) -> None:
        """Set the prototypes (columns of W2) to the transformed embeddings of d2 training samples, the first ones given.

        The embeddings (d2 or more, d0) of random samples are unit vectors of this network's own modality (TempNet Appendix
        D.1). Fewer or others, and a network without a projection or on something else than embeddings, raise ValueError.
        """
        if self.config.kind != "embeddings" or self.projection is None:
            raise ValueError("init_prototypes is for a TempNet on embeddings with a projection layer")
        wanted, (num, size) = self.config.num_prototypes, embeddings.shape
        if num < wanted:
            raise ValueError(
                f"the TempNet has {wanted} prototypes, which are the embeddings of as many training samples, but there are "
                f"only {num}: choose num_prototypes of at most that"
            )
        if size != self.config.input_size:
            raise ValueError(f"the TempNet reads embeddings of {self.config.input_size} numbers, these have {size}")
        self.projection.copy_(self.hidden(embeddings[:wanted].float()).T)

    def set_tau_max_eval(self, tau_max_eval: float | None) -> None:
        """Set τ_max for inference; it is saved with the network. None restores the τ_max of training."""
        self.config = replace(self.config, tau_max_eval=tau_max_eval)

    def save_pretrained(self, directory: str | Path) -> None:
        """Write `config.json` and `model.safetensors` to the directory, which is created if necessary."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / CONFIG_FILE).write_text(json.dumps(asdict(self.config), indent=2) + "\n")
        save_file({name: value.contiguous() for name, value in self.state_dict().items()}, directory / WEIGHTS_FILE)

    def push_to_hub(self, repository: str, *, base_model: str = "", private: bool = True) -> str:
        """Upload the network with a model card to a repository (owner/name) of the Hugging Face Hub, and return its address.

        The login is that of `hf auth login` or $HF_TOKEN. A new repository is made if necessary. The card names
        `base_model`, the hub name of the model that the network belongs to.
        """
        from huggingface_hub import HfApi

        hub = HfApi()
        with tempfile.TemporaryDirectory() as directory:
            self.save_pretrained(directory)
            (Path(directory) / "README.md").write_text(model_card({"": self}, repository, base_model), encoding="utf-8")
            hub.create_repo(repository, private=private, exist_ok=True)
            return str(hub.upload_folder(repo_id=repository, folder_path=directory, commit_message="Upload TempNet"))

    @classmethod
    def from_pretrained(cls, directory: str | Path) -> TempNet:
        """Read a network that :meth:`save_pretrained` or :meth:`push_to_hub` wrote; it is returned in eval mode.

        It is in a local directory, or in the root of a repository (owner/name) on the hub; `tempnet.loading.load_tempnet`
        also finds others. A missing file raises FileNotFoundError, which names directory and file; unknown fields of the
        configuration, and weights that are truncated or contain NaN, ValueError.
        """
        name = str(directory)
        directory = Path(directory)
        if not directory.exists() and HUB_NAME.fullmatch(name):
            files = [download(name, file) for file in (CONFIG_FILE, WEIGHTS_FILE)]
            directory = files[-1].parent if files[-1] else directory
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            if not (directory / name).is_file():
                raise FileNotFoundError(f"{directory} holds no TempNet: {name} is missing")
        network = cls(read_fields(TempNetConfig, directory / CONFIG_FILE))
        check_weight_files(directory / WEIGHTS_FILE)
        network.load_state_dict(load_file(directory / WEIGHTS_FILE))
        check_weights(network, directory)
        return network.eval()


def check_embeddings(network: TempNet | None, size: int, name: str = "TempNet") -> None:
    """Raise ValueError for a TempNet on embeddings of another size than those of an encoder."""
    if network is not None and network.config.input_size != size:
        raise ValueError(
            f"the {name} was built for embeddings of {network.config.input_size}, the encoder's have {size}"
        )


def download(repository: str, name: str) -> Path | None:
    """Download a file of a hub repository and return its local path, or None if it is not available."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(repository, name))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError):
        return None


def model_card(
    networks: Mapping[str, TempNet], place: str, base_model: str = "", facts: Iterable[tuple[str, str]] = ()
) -> str:
    """Return a model card as Markdown with the header that the hub reads.

    Args:
        networks: subdirectory → network; the subdirectory is empty for a network that stands alone.
        place: repository or directory that the card lies in.
        base_model: hub name of the base model, or empty.
        facts: rows of a table: what it was trained on and how, and what was found.
    """
    header = ["---", "library_name: tempnet", "tags: [tempnet, temperature]"]
    if base_model:
        header.append(f"base_model: {base_model}")
    said, usage, unit = [], ["from tempnet import TempNet\n"], "image or text"
    for name, network in networks.items():
        config = network.config
        said.append(
            f"{f'The network in `{name}/`' if name else 'It'} reads {config.kind} and predicts τ between "
            f"{config.tau_min:g} and {config.inference_tau_max:g}{f' (ρ = {config.rho:g} nats)' if config.rho else ''}; "
            f"{sum(p.numel() for p in network.parameters()):,} parameters."
        )
        if config.kind == "embeddings":
            source = f"{place}/{name}".rstrip("/")
            usage.append(
                f'{name or "network"} = TempNet.from_pretrained("{source}")  # (N, {config.input_size}) → (N,)'
            )
            continue
        unit, sources = "token", f'"{place}"' if name else f'"{base_model or "BASE_MODEL"}", "{place}"'
        usage = [
            "from tempnet.inference import generate\nfrom tempnet.loading import load_causal_lm\n",
            f"model, network = load_causal_lm({sources})",
            "result = generate(model, network, input_ids=input_ids, max_new_tokens=100)  # result.temperatures: τ per token",
        ]
    rows = [f"| {name.strip()} | {value} |" for name, value in facts]
    table = "\n".join(["| | |", "|---|---|", *rows, "", ""]) if rows else ""
    return (
        "\n".join(header) + f"\n---\n\n# TempNet: a softmax temperature for every {unit}\n\n{' '.join(said)} "
        "The method is that of arXiv 2404.04575.\n\n" + table + "```python\n" + "\n".join(usage) + "\n```\n"
    )
