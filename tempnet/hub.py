"""TempNets on the Hugging Face Hub: find, download, and publish them with a model card."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # huggingface_hub is imported where it is used, because `import tempnet` should be quick
    from tempnet.network import TempNet

HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
"""Pattern of the name of a repository (owner/name)."""


def download(repository: str, name: str) -> Path | None:
    """Download a file of a hub repository and return its local path, or None if it is not available."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(repository, name))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError):
        return None


def push(network: TempNet, repository: str, *, base_model: str = "", private: bool = True) -> str:
    """Upload a TempNet with a model card to a repository, which is made if necessary, and return its address.

    The login is that of `hf auth login` or $HF_TOKEN.

    Args:
        network: the network.
        repository: owner/name.
        base_model: hub name of the model whose logits, hidden states or embeddings it reads; the card names it.
        private: whether a new repository is private.
    """
    from huggingface_hub import HfApi

    hub = HfApi()
    with tempfile.TemporaryDirectory() as directory:
        network.save_pretrained(directory)
        (Path(directory) / "README.md").write_text(model_card(network, repository, base_model), encoding="utf-8")
        hub.create_repo(repository, private=private, exist_ok=True)
        return str(hub.upload_folder(repo_id=repository, folder_path=directory, commit_message="Upload TempNet"))


def model_card(network: TempNet, repository: str, base_model: str) -> str:
    """Return the model card of a network as Markdown with the header that the hub reads."""
    config = network.config
    header = ["---", "library_name: tempnet", "tags: [tempnet, temperature]"]
    if base_model:
        header.append(f"base_model: {base_model}")
    tau_max = config.tau_max if config.tau_max_eval is None else config.tau_max_eval
    base = base_model or "BASE_MODEL"
    usage = (
        "from tempnet import TempNet\n\n"
        f'network = TempNet.from_pretrained("{repository}")  # {config.kind} of {config.input_size} → a temperature each\n'
    )
    if config.kind != "embeddings":
        usage = (
            "from tempnet.inference import generate\nfrom tempnet.loading import load_causal_lm\n\n"
            f'model, network = load_causal_lm("{base}", "{repository}")\n'
            "result = generate(model, network, input_ids=input_ids, max_new_tokens=100)  # result.temperatures: τ per token\n"
        )
    return (
        "\n".join(header) + f"\n---\n\n# TempNet: a softmax temperature for every {_UNITS[config.kind]}\n\n"
        f"It reads {config.kind} and predicts τ between {config.tau_min:g} and {tau_max:g}"
        f"{f' (ρ = {config.rho:g} nats)' if config.rho else ''}; {sum(p.numel() for p in network.parameters()):,} parameters "
        f"(arXiv 2404.04575).\n\n```python\n{usage}```\n"
    )


_UNITS = {"logits": "token", "hidden": "token", "both": "token", "embeddings": "image or text"}
