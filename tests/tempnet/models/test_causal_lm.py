"""The causal-LM module: packed documents, frozen bases, precision, and what is refused."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, modeling_flash_attention_utils

from tempnet import TempNet, TempNetConfig
from tempnet.models import packing
from tempnet.models.causal_lm import TemperatureCausalLM
from tempnet.models.packing import FLEX, block_mask, document_mask, takes_document_mask
from tempnet.softmax.config import TemperatureLossConfig
from tests.tempnet.tiny_language_models import make_composite

VOCABULARY = 61
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}


def make_base(architecture: str = "gpt2", attention: str = "sdpa", **extra: object) -> PreTrainedModel:
    torch.manual_seed(0)
    if architecture != "gpt2":
        extra = {"intermediate_size": 64, "num_key_value_heads": 2} | extra
    config = AutoConfig.for_model(architecture, vocab_size=64, bos_token_id=0, eos_token_id=0, **(SIZES | extra))
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def make_module(base: PreTrainedModel, loss: str = "dro", **options: object) -> TemperatureCausalLM:
    torch.manual_seed(1)
    network = TempNet(TempNetConfig.for_logits(VOCABULARY, rho=1.5, hidden_size=16, num_prototypes=8))
    return TemperatureCausalLM(
        base, network, TemperatureLossConfig(name=loss, rho=1.5), vocab_size=VOCABULARY, **options
    )


def packed(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(2)
    ids = torch.randint(VOCABULARY, (1, sum(lengths)))
    return ids, torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0)


WINDOW = {"sliding_window": 4}


# Windows are right only without a mask, OPT only with one, the others either way.
@pytest.mark.parametrize(
    ("architecture", "extra", "attention"),
    [
        ("gpt2", {}, "sdpa"),
        ("gpt2", {}, "eager"),
        ("llama", {}, "sdpa"),
        ("gpt_neox", {}, "eager"),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 1, **WINDOW}, "sdpa"),
        ("mistral", WINDOW, "sdpa"),
        ("mistral", WINDOW, "eager"),
        ("gemma3_text", {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention"], **WINDOW}, "eager"),
        ("phi3", {"pad_token_id": 0, **WINDOW}, "sdpa"),
        ("opt", {"ffn_dim": 64, "word_embed_proj_dim": 32, "init_std": 0.2}, "sdpa"),
        ("opt", {"ffn_dim": 64, "word_embed_proj_dim": 32, "init_std": 0.2}, "eager"),
    ],
    ids=str,
)
def test_packed_documents_do_not_see_each_other(architecture: str, extra: dict[str, object], attention: str) -> None:
    module = make_module(make_base(architecture, attention, initializer_range=0.2, **extra)).eval()
    lengths = [5, 11, 1, 7]
    ids, positions = packed(lengths)
    together = module.logits(ids, positions)
    start = 0
    for length in lengths:
        part = slice(start, start + length)
        alone = module.base(input_ids=ids[:, part]).logits[..., :VOCABULARY]
        torch.testing.assert_close(together[:, part], alone, rtol=1e-4, atol=1e-5)
        start += length
    open_module = make_module(module.base, attend_across_documents=True).eval()
    plain = module.base(input_ids=ids).logits[..., :VOCABULARY]
    torch.testing.assert_close(open_module.logits(ids, positions), plain, rtol=1e-4, atol=1e-5)


DOCUMENTS = [[300], [5, 123, 172], [150, 149, 1]]


@pytest.mark.parametrize(
    ("architecture", "extra"), [("gpt2", {}), ("llama", {}), ("mistral", {"sliding_window": 40})], ids=str
)
@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_attention_keeps_documents_apart_as_separate_runs_in_float64_do(
    architecture: str, extra: dict[str, object]
) -> None:
    extra = {"max_position_embeddings": 512, "initializer_range": 0.2} | extra
    base = make_base(architecture, FLEX, **extra)
    exact = make_base(architecture, "sdpa", **extra).double().eval()
    exact.load_state_dict(base.state_dict())
    module = make_module(base).eval()
    assert module.takes_mask == (architecture != "mistral")
    ids, positions = (torch.cat(parts) for parts in zip(*map(packed, DOCUMENTS), strict=True))
    masks: list[BlockMask] = []
    for layer in base.modules():
        if type(layer).__name__.endswith("Attention"):
            layer.register_forward_pre_hook(
                lambda _, args, kwargs: masks.extend(
                    part for part in (*args, *kwargs.values()) if isinstance(part, BlockMask)
                ),
                with_kwargs=True,
            )
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        together = module.logits(ids, positions)
        for row, lengths in enumerate(DOCUMENTS):
            for part, logits in zip(ids[row].split(lengths), together[row].split(lengths), strict=True):
                alone = exact(input_ids=part.unsqueeze(0)).logits[0, :, :VOCABULARY]
                torch.testing.assert_close(logits.double(), alone, rtol=1e-3, atol=1e-4)
    assert len(masks) == 2
    for mask in masks:
        assert max(part.numel() for part in mask.as_tuple() if isinstance(part, torch.Tensor)) <= 3 * 3 * 3


def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    dropout_p: float = 0.0,
    window_size: tuple[int, int] = (-1, -1),
) -> torch.Tensor:
    """Return what `flash_attn_varlen_func` of the package flash_attn is documented to, for (tokens, heads, width)."""
    assert causal
    assert dropout_p == 0.0
    assert torch.equal(cu_seqlens_q, cu_seqlens_k)
    assert max_seqlen_q == max_seqlen_k >= int(cu_seqlens_q.diff().max())
    k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], 1) for part in (k, v))
    parts = []
    for start, stop in itertools.pairwise(cu_seqlens_q.tolist()):
        own = slice(start, stop)
        back = torch.arange(stop - start)[:, None] - torch.arange(stop - start)
        is_seen = (back >= 0) & ((back <= window_size[0]) if window_size[0] >= 0 else True)
        scores = softmax_scale * torch.einsum("qhd,khd->hqk", q[own], k[own])
        parts.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~is_seen, -torch.inf).softmax(-1), v[own]))
    return torch.cat(parts)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    """Return what `flash_attn_func` is documented to, for (rows, tokens, heads, width)."""
    num_tokens = q.shape[1]
    bounds = num_tokens * torch.arange(len(q) + 1)
    lengths = {"max_seqlen_q": num_tokens, "max_seqlen_k": num_tokens}
    flat = (part.flatten(0, 1) for part in (q, k, v))
    return varlen_attention(*flat, cu_seqlens_q=bounds, cu_seqlens_k=bounds, **lengths, **options).view_as(q)


@pytest.fixture
def flash_attention(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In place of the package, which needs a GPU, functions that do what its documentation says; models are in float64,
    because Transformers looks for the precision of products in float32, and finds none in GPT-2."""
    functions = attention, varlen_attention, None, None, None
    monkeypatch.setattr(modeling_flash_attention_utils, "_lazy_imports", lambda *_, **__: functions)
    monkeypatch.setattr(modeling_flash_attention_utils, "_loaded_implementation", None)
    monkeypatch.setattr(PreTrainedModel, "_flash_attn_can_dispatch", lambda *_, **__: True)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("flash_attention")
@pytest.mark.parametrize(
    ("architecture", "extra"),
    [("gpt2", {}), ("llama", {"num_key_value_heads": 1}), ("mistral", {"sliding_window": 40})],
    ids=str,
)
def test_flash_attention_is_told_where_documents_begin(architecture: str, extra: dict[str, object]) -> None:
    extra = {"max_position_embeddings": 512, "initializer_range": 0.2} | extra
    module = make_module(make_base(architecture, "flash_attention_2", **extra)).eval()
    exact = make_base(architecture, "sdpa", **extra).eval()
    ids, positions = (torch.cat(parts) for parts in zip(*map(packed, DOCUMENTS), strict=True))
    together = module.logits(ids, positions)
    for row, lengths in enumerate(DOCUMENTS):
        for part, logits in zip(ids[row].split(lengths), together[row].split(lengths), strict=True):
            alone = exact(input_ids=part.unsqueeze(0)).logits[0, :, :VOCABULARY]
            torch.testing.assert_close(logits, alone, rtol=1e-9, atol=1e-9)


@pytest.mark.usefixtures("flash_attention")
def test_a_model_that_is_not_told_where_documents_begin_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    base = make_base("llama", "flash_attention_2")
    monkeypatch.setattr(packing, "packed_inputs", lambda *_, **__: {"attention_mask": None})
    with pytest.raises(ValueError, match="packed documents cannot be kept apart"):
        make_module(base)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("attention", ["sdpa", FLEX])
def test_on_a_gpu_the_host_waits_for_nothing_in_a_step(attention: str) -> None:
    module = make_module(make_base(attention=attention, max_position_embeddings=512, hidden_size=64)).cuda()
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    ids, positions = (tensor.cuda() for tensor in packed(DOCUMENTS[0]))
    num_targets = ids.numel()
    for mode in ("default", "error"):  # what is compiled or allocated once is not counted
        torch.cuda.set_sync_debug_mode(mode)
        try:
            module(ids, positions, ids, num_targets=num_targets)["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
        finally:
            torch.cuda.set_sync_debug_mode("default")


class Sizes(TorchDispatchMode):
    """Notes the largest number of elements of a tensor that is made inside the block."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for part in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(part, torch.Tensor):
                self.largest = max(self.largest, part.untyped_storage().nbytes() // part.element_size())
        return made


def test_a_block_mask_needs_no_memory_that_grows_with_the_square_of_the_length() -> None:
    positions = torch.arange(4096).expand(2, -1) % 1000
    with Sizes() as sizes:
        block_mask(positions)
    assert sizes.largest == positions.numel()


@pytest.mark.parametrize("num_tokens", [1, 128, 300, 1024])
def test_a_block_mask_lists_what_the_dense_mask_allows(num_tokens: int) -> None:
    torch.manual_seed(num_tokens)
    starts = torch.rand(4, num_tokens) < torch.tensor([0.0, 0.003, 0.01, 0.5]).unsqueeze(-1)
    places = torch.arange(num_tokens).expand(4, -1)
    positions = places - (starts * places).cummax(-1).values
    mask, dense = block_mask(positions), document_mask(positions)[:, 0]
    expected = create_block_mask(lambda b, h, q, k: dense[b, q, k], 4, None, num_tokens, num_tokens, device="cpu")
    torch.testing.assert_close(mask.to_dense(), expected.to_dense())
    if num_tokens % 128 == 0:  # PyTorch takes no padded block as whole.
        torch.testing.assert_close(mask.full_kv_num_blocks, expected.full_kv_num_blocks)
    for row in range(4):
        for block, count in enumerate(mask.full_kv_num_blocks[row, 0].tolist()):
            for whole in mask.full_kv_indices[row, 0, block, :count].tolist():
                assert dense[row, 128 * block : 128 * (block + 1), 128 * whole : 128 * (whole + 1)].all()


@pytest.mark.parametrize(
    ("architecture", "extra"),
    [
        ("bloom", {}),  # ALiBi from a 2-D mask
        ("falcon", {"alibi": True}),
        (
            "gpt_oss",  # windows, and masks that do not look at positions
            {"sliding_window": 4, "head_dim": 8, "num_local_experts": 4, "rope_parameters": {"rope_type": "default"}},
        ),
        ("falcon_h1", {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_expand": 1}),  # a recurrence
        ("mamba", {"state_size": 4}),  # no attention at all
    ],
)
def test_a_model_that_cannot_keep_documents_apart_is_refused(architecture: str, extra: dict[str, object]) -> None:
    base = make_base(architecture, "eager", **extra)
    with pytest.raises(ValueError, match=f"'{architecture}'.*: set attend_across_documents = True"):
        make_module(base)
    module = make_module(base, attend_across_documents=True).eval()
    ids, positions = packed([5, 11])
    assert torch.equal(module.logits(ids, positions), base(input_ids=ids).logits[..., :VOCABULARY])


def test_finding_the_way_leaves_no_trace_and_depends_on_having_windows_not_on_their_length() -> None:
    base = make_base("mistral", sliding_window=4096)
    config, state = base.config.to_dict(), torch.get_rng_state()
    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(base.config)
    assert not takes_document_mask(shapes)
    assert not takes_document_mask(base)
    assert base.config.to_dict() == config
    assert torch.equal(torch.get_rng_state(), state)
    assert takes_document_mask(make_base("mistral", sliding_window=None))
    with pytest.raises(ValueError, match="'bert' sees later tokens: it is no causal language model"):
        takes_document_mask(make_base("bert", "eager"))
    # A model of text and images is tried by its language model.
    composite, positions = make_composite(), torch.tensor([[0, 1, 2, 0, 1]])
    ids = torch.tensor([[5, 9, 11, 23, 42]])
    assert not takes_document_mask(composite)
    apart = torch.cat([composite(input_ids=part).logits for part in ids.split((3, 2), 1)], 1)
    torch.testing.assert_close(composite(input_ids=ids, position_ids=positions).logits, apart, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("architecture", "extra", "loss"),
    [
        ("gpt2", {}, "ce"),
        ("gpt2", {}, "dro"),
        ("gpt2", {"tie_word_embeddings": False}, "dro"),
        ("llama", {}, "dro"),
        ("gemma2", {"final_logit_softcapping": 1.5, "head_dim": 8}, "dro"),
        ("cohere", {"logit_scale": 0.0625}, "dro"),
        ("granite", {"logits_scaling": 4.0}, "dro"),
        ("phi", {}, "dro"),  # an output bias
    ],
)
def test_the_loss_without_logits_is_the_loss_with_them(architecture: str, extra: dict[str, object], loss: str) -> None:
    base = make_base(architecture, "eager", **extra)
    module = make_module(base, loss)
    assert module.head is not None
    reference = make_module(base, loss, materialize=True)
    ids, positions = packed([9, 14, 30])
    targets = ids.clone()
    targets[0, 3:8] = -100
    rows = (targets != -100) & (ids % 3 == 0)
    results = []
    for form in (module, reference):
        form.eval().zero_grad()
        output = form(ids, positions, targets, with_statistics=True, oracle_rows=rows, num_profile_nodes=15)
        output["loss"].backward()
        results.append((output, {name: parameter.grad for name, parameter in form.named_parameters()}))
        values, target, top, _ = output["profiles"]
        output["profiles"] = torch.cat([values.flatten(1), target[:, None], top], dim=1)
        assert output["profiles"].shape == ((targets != -100).sum(), 15 * 3 + 1 + 3)
    (ours, our_grads), (theirs, their_grads) = results
    for output in (ours, theirs):
        output["statistics"] = output["statistics"][:9]  # beyond lie ranks and bins, which rounding may tip
    for name in ("loss", "tau", "statistics", "entropy", "cross_entropy_tau", "profiles"):
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-5, msg=name)
    for name, gradient in their_grads.items():
        if gradient is None:
            assert our_grads[name] is None, name
        else:
            assert (our_grads[name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-7, name


def test_a_head_of_another_kind_takes_the_logits() -> None:
    base = make_base()
    base.lm_head.register_forward_hook(lambda head, inputs, logits: logits + torch.sin(logits))
    module, reference = make_module(base).eval(), make_module(base, materialize=True).eval()
    assert module.head is None
    ids, positions = packed([20])
    assert module(ids, positions, ids)["loss"] == reference(ids, positions, ids)["loss"]


def test_a_frozen_base_has_no_graph_no_gradients_and_no_dropout() -> None:
    config = AutoConfig.for_model("gpt2", vocab_size=64, resid_pdrop=0.5, embd_pdrop=0.5, **SIZES)
    module = make_module(AutoModelForCausalLM.from_config(config), freeze_base=True).train()
    ids, positions = packed([20])
    first, second = module(ids, positions, ids), module(ids, positions, ids)
    assert first["loss"].item() == second["loss"].item()
    first["loss"].backward()
    assert all(parameter.grad is None for parameter in module.base.parameters())
    assert all(parameter.grad is not None for parameter in module.tempnet.parameters())


def test_what_does_not_fit_is_refused() -> None:
    base = make_base()
    config = TemperatureLossConfig(name="dro", rho=1.5)
    network = TempNet(TempNetConfig.for_logits(60, rho=1.5))
    with pytest.raises(ValueError, match="tokenizer has 65 tokens, more than the 64 logits"):
        TemperatureCausalLM(base, None, config, vocab_size=65)
    with pytest.raises(ValueError, match="built for a vocabulary of 60"):
        TemperatureCausalLM(base, network, config, vocab_size=61)
    with pytest.raises(ValueError, match="'dro' needs a TempNet"):
        TemperatureCausalLM(base, None, config, vocab_size=61)


class Copies(TorchDispatchMode):
    """Remembers tensors in bfloat16 that were made of others, without keeping them."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[weakref.ref[torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and out.dtype == torch.bfloat16:
            self.made.append(weakref.ref(out))
        return out

    def count(self, shape: tuple[int, ...]) -> int:
        return sum((tensor := ref()) is not None and tensor.shape == shape for ref in self.made)


def test_checkpointing_keeps_no_copies_of_weights_in_bfloat16() -> None:
    """Without checkpointing the backward pass needs them; each layer of this LLaMA has two weights of this shape."""
    ids, positions = packed([7, 9])
    found = {}
    for checkpointing in (False, True):
        module = make_module(make_base("llama"), autocast_dtype=torch.bfloat16)
        if checkpointing:
            module.base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        copies, counts = Copies(), []
        module.base.model.norm.register_forward_hook(lambda *_, c=copies, n=counts: n.append(c.count((64, 32))))
        with copies:
            output = module(ids, positions, ids.roll(-1, 1))
            output["loss"].backward()
        assert copies.made
        assert output["loss"].dtype == torch.float32
        found[checkpointing] = counts[0], output["loss"].item()
    assert found[False][0] == 2 * 2, "gate and up projection of two layers"
    assert found[True][0] == 0
    assert found[True][1] == found[False][1]
