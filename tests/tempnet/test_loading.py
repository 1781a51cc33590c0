"""Loading our own directories, published heads from every kind of file, exports that refer to a base, and refusals."""

from __future__ import annotations

import contextlib
import json
import math
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel

from tempnet import TempNet, TempNetConfig
from tempnet.base_model import BASE_FILE, BaseReference, base_digest, find_base, load_base
from tempnet.decoders.autodeco import AutoDecoHeads
from tempnet.loading import load_causal_lm, load_tempnet, released_tempnet
from tempnet.models.towers import load_tower
from tempnet.weights import check_weight_files, check_weights, load_fitting

# The published networks are for 32 000 tokens; ρ = 10 is only possible above e¹⁰ of them.
VOCABULARY, WIDTH, PROTOTYPES = 32_000, 6, 5


def published_state() -> dict[str, Tensor]:
    """Return tensors with the published names and shapes."""
    torch.manual_seed(0)
    return {
        "proj.0.weight": torch.randn(WIDTH, VOCABULARY),
        "proj.0.bias": torch.randn(WIDTH),
        "proj.3.weight": torch.randn(PROTOTYPES, WIDTH),
        "proj.3.bias": torch.randn(PROTOTYPES),
        "scaler": torch.tensor([math.log(0.6)]),
        "last.weight": torch.randn(1, PROTOTYPES) * 2,
        "last.bias": torch.tensor([-3.0]),  # τ in the middle of its range
    }


def published_tau(state: dict[str, Tensor], logits: Tensor, head: str = "llama2") -> Tensor:
    """Compute the authors' formula in float64: τ = (τ_max − τ₀)·σ(last((softmax(u/φ) − 1/d2) ∘ u)) + τ₀."""
    low, high, shifts = {"llama2": (0.01, 1.2, True), "llama1": (0.01, 2.0, False), "gpt2": (0.5, 5.0, False)}[head]
    state = {name: value.double() for name, value in state.items()}
    x = logits.double()
    x = x - x.max(dim=-1, keepdim=True).values if shifts else x
    x = x / x.norm(dim=-1, keepdim=True)
    v = 1 / (1 + torch.exp(-(x @ state["proj.0.weight"].T + state["proj.0.bias"])))
    u = v @ state["proj.3.weight"].T + state["proj.3.bias"]
    phi = state["scaler"].exp()
    weights = (u / phi).exp() / (u / phi).exp().sum(-1, keepdim=True) - 1 / PROTOTYPES
    score = ((weights * u) @ state["last.weight"].T + state["last.bias"]).squeeze(-1)
    return (high - low) / (1 + torch.exp(-score)) + low


def prefixed(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"tempnet.{name}": value for name, value in state.items()}


def write_sharded(directory: Path, extension: str) -> None:
    """Write a whole model in two shards, whose index also names the network, which is split between them."""
    state = prefixed(published_state())
    names = list(state)
    stem = "model" if extension == "safetensors" else "pytorch_model"
    shards = {
        f"{stem}-00001-of-00002.{extension}": {"model.norm.weight": torch.ones(4)} | {n: state[n] for n in names[:3]},
        f"{stem}-00002-of-00002.{extension}": {"lm_head.weight": torch.ones(4, 4)} | {n: state[n] for n in names[3:]},
    }
    for file, tensors in shards.items():
        if extension == "safetensors":
            save_file(tensors, directory / file)
        else:
            torch.save(tensors, directory / file)
    where = {name: file for file, tensors in shards.items() for name in tensors}
    (directory / f"{stem}.{extension}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


def write(directory: Path, layout: str) -> Path:
    """Write the network in one of the layouts, and return the path to load it from."""
    state, model = published_state(), {"lm_head.weight": torch.ones(4, 4)}
    save = torch.save if layout.endswith(".bin") else save_file
    if layout.startswith("shards"):
        write_sharded(directory, layout.rsplit(".", 1)[1])
    elif layout.startswith("tempnet"):
        save(state, directory / layout)
    else:
        save(model | prefixed(state), directory / layout)
    return directory / layout if layout.startswith("anything") else directory


LAYOUTS = [
    "tempnet.safetensors", "tempnet.bin", "anything.safetensors", "model.safetensors", "pytorch_model.bin",
    "shards.safetensors", "shards.bin",
]  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_published_head_gives_the_published_tau(layout: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    network = load_tempnet(write(tmp_path, layout))
    assert not network.training
    assert (network.config.input_size, network.config.hidden_size) == (VOCABULARY, WIDTH)
    assert (network.config.tau_min, network.config.tau_max) == (0.01, 1.2)
    # Rows whose maximum is nearer to or further from the rest: their direction is another once the maximum is subtracted.
    logits = torch.randn(7, VOCABULARY).abs() ** torch.tensor([0.1, 1, 2, 3, 4, 5, 6]).unsqueeze(-1)
    expected = published_tau(published_state(), logits).float()
    assert expected.std() > 0.01
    with torch.no_grad():
        torch.testing.assert_close(network(logits), expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(network(logits), network(logits), rtol=0, atol=0)
        network.train()
        assert not torch.equal(network(logits), network(logits)), "dropout belongs to training"


@pytest.mark.parametrize("vocabulary", [5, VOCABULARY])
def test_the_heads_of_the_authors_differ_in_range_and_input(vocabulary: int) -> None:
    """ρ of the paper is infeasible for the small vocabulary; the published head takes it all the same."""
    state = published_state() | {"proj.0.weight": torch.randn(WIDTH, vocabulary)}
    half = {name: value.bfloat16() for name, value in state.items()}
    logits = torch.randn(4, vocabulary) * 2 + 3
    for head in ("llama2", "llama1", "gpt2"):
        for tensors in (state, half):
            network = released_tempnet(tensors, head=head)
            assert {parameter.dtype for parameter in network.parameters()} == {torch.float32}
            expected = published_tau(tensors, logits, head)
            torch.testing.assert_close(network(logits).double(), expected, rtol=1e-5, atol=1e-6)


def test_what_the_files_show_decides_which_head_it_is(tmp_path: Path) -> None:
    state = published_state()
    assert released_tempnet(state).config == TempNetConfig.released(
        VOCABULARY, head="llama2", hidden_size=WIDTH, num_prototypes=PROTOTYPES
    )
    for vocabulary in (50_257, 50_304):
        gpt2 = state | {"proj.0.weight": torch.randn(WIDTH, vocabulary), "scaler": torch.tensor(0.1)}
        network = released_tempnet(gpt2)
        logits = torch.randn(3, vocabulary)
        torch.testing.assert_close(network(logits).double(), published_tau(gpt2, logits, "gpt2"), rtol=1e-5, atol=1e-6)
    # The networks of LLaMA-1 have a scaler without a dimension, but so has a LLaMA-2 checkpoint that was never exported.
    unclear = {
        "V 32 000": state | {"scaler": torch.tensor(0.1)},
        "V 100": state | {"proj.0.weight": torch.randn(WIDTH, 100)},
    }
    for tensors in unclear.values():
        save_file(tensors, tmp_path / "tempnet.safetensors")
        with pytest.raises(ValueError, match=r"do not show which head it has: name it by head='llama2'"):
            load_tempnet(tmp_path)
        assert load_tempnet(tmp_path, head="llama1").config.tau_max == 2.0
        assert load_tempnet(tmp_path, head="llama2").config.input_shift == "max"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scaler": None}, r"missing keys \['scaler'\], unknown keys \[\]"),
        ({"proj.9.weight": torch.ones(2)}, r"unknown keys \['proj\.9\.weight'\]"),
        ({"last.weight": torch.ones(1, PROTOTYPES + 1)}, "size mismatch for pool_weight"),
    ],
    ids=["missing", "unknown", "size"],
)
def test_wrong_keys_and_sizes_are_named(changes: dict, message: str, tmp_path: Path) -> None:
    state = {name: value for name, value in (published_state() | changes).items() if value is not None}
    save_file(state, tmp_path / "tempnet.safetensors")
    for source in (tmp_path, tmp_path / "tempnet.safetensors"):
        with pytest.raises(ValueError, match=message):
            load_tempnet(source)


@pytest.mark.parametrize("layout", ["heads", "heads and base", "older"])
def test_the_temperature_head_of_autodeco(layout: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The layouts that their code writes: heads alone, merged with the base model, and their first format."""
    heads = AutoDecoHeads(16, width=256)
    names = {"tau_head": "temp_head.mlp", "share_head": "top_p_head.mlp"}
    state = {f"{names[part]}.{rest}": value for part, rest, value in
             ((*name.split(".", 1), value) for name, value in heads.state_dict().items())}  # fmt: skip
    config = {
        "model_type": "autodeco",
        "base_model_type": "qwen2",
        "base_model_name_or_path": "Qwen/Q",
        "vocab_size": 90,
    }
    (tmp_path / "config.json").write_text(json.dumps({**config, "hidden_size": 16, "enable_temperature_head": True}))
    if layout == "heads":
        save_file(state, tmp_path / "model.safetensors")
    elif layout == "older":
        save_file(state, tmp_path / "autodeco_heads.safetensors")
    else:
        whole = {"llm.model.embed_tokens.weight": torch.zeros(90, 16), **state}
        save_file(whole, tmp_path / "model.safetensors")
    network, hidden = load_tempnet(tmp_path), 3 * torch.randn(50, 16)
    assert (network.config.kind, network.config.input_size, network.config.state_size) == ("hidden", 90, 16)
    torch.testing.assert_close(
        network(torch.zeros(50, 90), hidden), heads(torch.zeros(50, 90), hidden).tau, rtol=0, atol=3e-6
    )
    assert "its top-p head is not" in caplog.text
    network.save_pretrained(tmp_path / "tempnet")
    assert load_tempnet(tmp_path / "tempnet").config == network.config
    (tmp_path / "config.json").write_text(json.dumps({**config, "enable_temperature_head": False}))
    with pytest.raises(ValueError, match="AutoDeco trained no temperature head there"):
        load_tempnet(
            Path(shutil.copytree(tmp_path, tmp_path / "other", ignore=shutil.ignore_patterns("tempnet", "other")))
        )


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="neither a directory, nor a file, nor the hub name"):
        load_tempnet(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match="holds no TempNet"):
        load_tempnet(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"holds no TempNet.* on the hub it may need a login"):
        load_tempnet("nobody/nothing-of-this-name")
    (tmp_path / "config.json").write_text('{"kind": "logi')
    for load in (load_tempnet, TempNet.from_pretrained):
        (tmp_path / "model.safetensors").touch()
        with pytest.raises(ValueError, match=r"config\.json is no JSON object: Unterminated string"):
            load(tmp_path)
    (tmp_path / "config.json").unlink()
    save_file({"lm_head.weight": torch.ones(4, 4)}, tmp_path / "model.safetensors")
    with pytest.raises(FileNotFoundError, match="holds no TempNet"):
        load_tempnet(tmp_path)
    write_sharded(tmp_path, "bin")
    (tmp_path / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"index\.json names pytorch_model-00002-of-00002\.bin"):
        load_tempnet(tmp_path)


@pytest.mark.parametrize("name", ["tempnet.safetensors", "tempnet.bin"])
def test_files_that_hold_no_tensors_are_refused(name: str, tmp_path: Path) -> None:
    for content in (b"", b"hello, I am a text", b"\x80\x02cos\nsystem\n."):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match="holds no tensors by name"):
            load_tempnet(tmp_path)
    if name.endswith("bin"):
        torch.save([1, 2], tmp_path / name)
        with pytest.raises(ValueError, match="holds no tensors by name"):
            load_tempnet(tmp_path)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Write a base model with its TempNet."""
    torch.manual_seed(0)
    base = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=32))
    base.save_pretrained(tmp_path / "model")
    make_tempnet().save_pretrained(tmp_path / "model" / "tempnet")
    return tmp_path / "model"


def make_tempnet(size: int = 61, kind: str = "logits") -> TempNet:
    make = TempNetConfig.for_logits if kind == "logits" else TempNetConfig.for_embeddings
    return TempNet(make(size, rho=1.5, hidden_size=8, num_prototypes=4))


def test_a_model_and_its_network(model: Path, tmp_path: Path) -> None:
    loaded, tempnet = load_causal_lm(model, dtype=torch.bfloat16)
    assert (loaded.training, tempnet.training) == (False, False)
    assert loaded.dtype == torch.bfloat16
    assert next(tempnet.parameters()).dtype == torch.float32
    assert tempnet.config == make_tempnet().config
    for network, message in (
        (make_tempnet(65), "vocabulary of 65, the base model has 64 logits"),
        (make_tempnet(8, "embeddings"), "reads embeddings, not the logits"),
    ):
        network.save_pretrained(tmp_path / "other")
        with pytest.raises(ValueError, match=message):
            load_causal_lm(model, tmp_path / "other")


def test_weights_that_hold_nan_are_said_to(model: Path, tmp_path: Path) -> None:
    base, network = GPT2LMHeadModel.from_pretrained(model), make_tempnet()
    with torch.no_grad():
        base.transformer.h[0].mlp.c_fc.weight[3, :2] = math.nan
        network.pool_weight[1] = math.nan
    base.save_pretrained(model)
    network.save_pretrained(tmp_path / "damaged")
    with pytest.raises(
        ValueError, match=rf"weights of {model} hold NaN: 2 of the 1024 numbers of .*h\.0\.mlp\.c_fc\.weight"
    ):
        load_causal_lm(model)
    with pytest.raises(ValueError, match=r"weights of .*damaged hold NaN: 1 of the 4 numbers of pool_weight"):
        load_tempnet(tmp_path / "damaged")
    layer = torch.nn.Linear(3, 2, bias=False)
    for value in (1.0, math.nan):  # float8, as some models are published in
        weight = torch.tensor([[value] * 3, [0.5] * 3]).to(torch.float8_e4m3fn)
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        with pytest.raises(ValueError, match="hold NaN: 3 of the 6") if math.isnan(value) else contextlib.nullcontext():
            check_weights(layer, "model")
    with pytest.raises(ValueError, match=r"hold NaN: 6 of the 6 numbers of transform\.0\.bias"):
        released_tempnet(published_state() | {"proj.0.bias": torch.full((WIDTH,), math.nan)})


@pytest.mark.parametrize("num_bytes", [0, 5, 100, -1])
def test_weights_that_are_cut_are_refused_in_one_line(model: Path, num_bytes: int) -> None:
    check_weight_files(model)
    check_weight_files("owner/name")  # a hub name is passed over
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:num_bytes])
    for load in (check_weight_files, load_causal_lm, lambda path: load_tower(path, "text")):
        with pytest.raises(
            ValueError, match=r"model\.safetensors \(\d+ bytes\) is cut or corrupt: .*; copy or"
        ) as error:
            load(model)
        assert "\n" not in str(error.value)
    file = model / "tempnet" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(ValueError, match=r"tempnet/model\.safetensors \(\d+ bytes\) is cut"):
        load_tempnet(model)


@pytest.fixture
def export(model: Path, tmp_path: Path) -> Path:
    """Write an export that refers to the base model beside it."""
    make_tempnet().save_pretrained(tmp_path / "export" / "tempnet")
    BaseReference(path=str(model), digest=base_digest(str(model))).save(tmp_path / "export")
    return tmp_path / "export"


def test_the_base_is_loaded_from_where_the_export_says_and_no_other(export: Path, model: Path) -> None:
    (model / "tokenizer.json").write_text("{}")  # changes no weight
    base, network = load_causal_lm(export)
    whole = GPT2LMHeadModel.from_pretrained(model)
    assert all(torch.equal(base.state_dict()[name], value) for name, value in whole.state_dict().items())
    assert network.config.input_size == 61
    assert find_base(model) == (str(model), None)
    assert sum(file.stat().st_size for file in export.rglob("*")) < 20_000
    with torch.no_grad():
        whole.lm_head.weight[0, 0] += 1.0
    whole.save_pretrained(model)
    with pytest.raises(ValueError, match="is not the one that its TempNet was trained on"):
        load_causal_lm(export)


def test_a_missing_base_and_a_damaged_reference_are_refused(export: Path, model: Path) -> None:
    model.rename(model.with_name("elsewhere"))
    with pytest.raises(FileNotFoundError, match=f"write its new place into .*{BASE_FILE}"):
        load_base(export)
    # A caller may know where it is.
    assert load_base(export, fetch=lambda path: path.replace("/model", "/elsewhere")).config.vocab_size == 64
    for content in ("", "[]", '{"path": "a"}'):
        (export / BASE_FILE).write_text(content)
        with pytest.raises(ValueError, match="is damaged: it must hold path and digest"):
            load_base(export)


def rewrite(model: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    """Change the weights of a model's file."""
    save_file(change(load_file(model / "model.safetensors")), model / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("wrapper", ["_orig_mod.", "module."])
def test_the_prefix_of_a_wrapper_is_taken_off(model: Path, wrapper: str, caplog: pytest.LogCaptureFixture) -> None:
    expected = load_base(model).state_dict()
    rewrite(model, lambda weights: {f"{wrapper}{name}": value for name, value in weights.items()})
    found = load_base(model).state_dict()
    assert f"begin with '{wrapper}'" in caplog.text
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            lambda w: {n: v for n, v in w.items() if n != "transformer.h.1.mlp.c_fc.bias"},
            "transformer.h.1.mlp.c_fc.bias",
        ),
        (lambda w: w | {"transformer.ln_f.weight": torch.ones(9)}, "transformer.ln_f.weight"),
        (lambda w: {f"mine.{n}": v for n, v in w.items()}, "it has mine."),
        (lambda w: {n: v for n, v in w.items() if "wte" not in n}, "transformer.wte.weight"),
    ],
    ids=["missing", "shape", "names", "vocabulary"],
)
def test_weights_that_do_not_fit_are_refused_and_never_random(
    model: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]], named: str
) -> None:
    rewrite(model, change)
    with pytest.raises(ValueError, match=re.escape(str(model))) as refused:
        load_base(model)
    assert named in str(refused.value)


def test_a_new_head_may_replace_one_but_the_body_must_fit(model: Path) -> None:
    options = {"may_replace_head": True, "num_labels": 3, "pad_token_id": 0}
    assert load_fitting(GPT2ForSequenceClassification, model, **options).score.weight.shape == (3, 16)
    rewrite(model, lambda weights: {n: v for n, v in weights.items() if "h.1.ln_1" not in n})
    with pytest.raises(ValueError, match=r"transformer\.h\.1\.ln_1\.bias"):
        load_fitting(GPT2ForSequenceClassification, model, **options)


def test_a_shard_that_the_index_names_must_be_there(model: Path) -> None:
    GPT2LMHeadModel.from_pretrained(model).save_pretrained(model / "sharded", max_shard_size="3KB")
    shards = sorted((model / "sharded").glob("model-*.safetensors"))
    check_weight_files(model / "sharded")
    shards[1].unlink()
    with pytest.raises(ValueError, match=f"lacks {shards[1].name}, which model.safetensors.index.json names"):
        check_weight_files(model / "sharded")


def test_a_tempnet_without_its_weights_is_no_model_without_a_tempnet(model: Path) -> None:
    (model / "tempnet" / "model.safetensors").unlink()
    for load in (load_tempnet, load_causal_lm):
        with pytest.raises(FileNotFoundError, match=r"tempnet holds config\.json of a TempNet, but not its model"):
            load(model)


class Malicious:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.file,)


def test_pickled_weights_are_refused_in_one_line_and_run_nothing(tmp_path: Path) -> None:
    GPT2Config(vocab_size=16, n_embd=8, n_layer=1, n_head=2).save_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Malicious(tmp_path / "ran")))
    with pytest.raises(ValueError, match="pytorch_model") as caught:
        load_base(tmp_path)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "ran").exists()
