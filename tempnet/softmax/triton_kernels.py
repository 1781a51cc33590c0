"""The Triton kernels of `tempnet.softmax.kernels`, which process tiles of logits.

Importing this file imports Triton, which reads TRITON_INTERPRET at that moment; `kernels.py` imports it on first use.

A program processes BLOCK_TOKENS rows, and computes the logits of BLOCK_VOCAB columns at a time, in float32 and in
registers. It writes only sums over the vocabulary (statistics), or the gradient in the precision of the inputs.
Programs are numbered so that those that run at the same time share GROUP row blocks: the hidden states of one group
and the weight tiles that it reads then fit into the L2 cache together.

Shapes: N tokens, d hidden size, V vocabulary; all matrices are contiguous. Sizes need not be multiples of the blocks.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Replaces −∞ in columns beyond the vocabulary: its exponential is exactly 0, and 0·FLOOR is 0, not NaN.
FLOOR = tl.constexpr(-1e30)


@triton.jit
def _group_programs(program: tl.tensor, num_rows: tl.tensor, num_columns: tl.tensor, GROUP: tl.constexpr) -> tl.tuple:
    """Return the (row, column) of a program; programs visit GROUP rows at a time, column by column."""
    first_row = program // (GROUP * num_columns) * GROUP
    num_rows_here = tl.minimum(num_rows - first_row, GROUP)
    within = program % (GROUP * num_columns)
    return first_row + within % num_rows_here, within // num_rows_here


@triton.jit
def _logits_tile(
    layer: tl.tuple,
    sizes: tl.tuple,
    rows: tl.tensor,
    columns: tl.tensor,
    BLOCK_HIDDEN: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
) -> tl.tensor:
    """Return L (BLOCK_TOKENS, BLOCK_VOCAB) in float32, after bias and soft-cap, of the tokens `rows` and entries `columns`.

    The layer is (hidden, weight, bias, soft-cap), the last two or None, and the sizes are N, V and d. Entries beyond the
    number of tokens or the vocabulary have no meaning.
    """
    hidden, weight, bias, soft_cap = layer
    num_tokens, vocab_size, num_hidden = sizes
    # Offsets are int64, because N·d and V·d may exceed 2³¹.
    hidden_rows = hidden + rows.to(tl.int64)[:, None] * num_hidden
    weight_columns = weight + columns.to(tl.int64)[None, :] * num_hidden
    logits = tl.zeros((rows.shape[0], columns.shape[0]), dtype=tl.float32)
    for start in range(0, num_hidden, BLOCK_HIDDEN):
        k = start + tl.arange(0, BLOCK_HIDDEN)
        left_mask = (rows < num_tokens)[:, None] & (k < num_hidden)[None, :]
        right_mask = (k < num_hidden)[:, None] & (columns < vocab_size)[None, :]
        left = tl.load(hidden_rows + k[None, :], mask=left_mask, other=0.0)
        right = tl.load(weight_columns + k[:, None], mask=right_mask, other=0.0)
        if WIDEN:
            left, right = left.to(tl.float32), right.to(tl.float32)
        logits = tl.dot(left, right, logits, input_precision=PRECISION)
    if bias is not None:
        logits += tl.load(bias + columns, mask=columns < vocab_size, other=0.0).to(tl.float32)[None, :]
    if soft_cap is not None:
        # tanh(x) = 1 − 2/(e²ˣ + 1) is correct at both infinities; its absolute error is that of float32 at 1.
        logits = soft_cap * (1.0 - 2.0 / (tl.exp(logits * (2.0 / soft_cap)) + 1.0))
    return logits


@triton.jit
def _add_tile(
    partition: tl.tensor, moment: tl.tensor, centred: tl.tensor, shift: tl.tensor, inverse_tau: tl.tensor
) -> tl.tuple:
    """Return Σ eˣ and Σ eˣ (L − m) of all columns so far, with those of one more tile of logits.

    `centred` is L − m of the tile, where m is the maximum with the tile; `shift` is the maximum before it, to which both sums
    are relative, minus m. 1/τ of the rows is None for τ = 1.
    """
    if inverse_tau is None:
        weights = tl.exp(centred)
        decay = tl.exp(shift)
    else:
        weights = tl.exp(centred * inverse_tau[:, None])
        decay = tl.exp(shift * inverse_tau)
    moment = decay * (moment + shift * partition) + tl.sum(weights * centred, 1)
    partition = decay * partition + tl.sum(weights, 1)
    return partition, moment


@triton.jit
def statistics_kernel(
    hidden: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    soft_cap: tl.tensor,
    targets: tl.tensor,
    tau: tl.tensor,
    partials: tl.tensor,
    num_tokens: tl.tensor,
    vocab_size: tl.tensor,
    num_hidden: tl.tensor,
    num_splits: tl.tensor,
    num_tiles_per_split: tl.tensor,
    WITH_UNIT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_VOCAB: tl.constexpr,
    BLOCK_HIDDEN: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
) -> None:
    """Compute sums over one split of the vocabulary for one block of tokens, relative to a running maximum.

    With m the maximum of L over the split and x = (L − m)/τ, the kernel writes to partials (4 or 6, num_splits, N):
    m, Σ eˣ, Σ eˣ (L − m), L at the target (0 if the target is not in the split), and with WITH_UNIT both sums at τ = 1.
    The moment is taken about m because the losses need E_p[L] − m at small τ, whose digits would be lost in a sum of
    large L.
    """
    num_row_blocks = tl.cdiv(num_tokens, BLOCK_TOKENS)
    row_block, split = _group_programs(tl.program_id(0), num_row_blocks, num_splits, GROUP)
    rows = row_block * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    in_rows = rows < num_tokens
    target = tl.load(targets + rows, mask=in_rows, other=-1)
    inverse_tau = 1.0 / tl.load(tau + rows, mask=in_rows, other=1.0)

    first = split * num_tiles_per_split
    last = tl.minimum(first + num_tiles_per_split, tl.cdiv(vocab_size, BLOCK_VOCAB))
    layer, sizes = (hidden, weight, bias, soft_cap), (num_tokens, vocab_size, num_hidden)
    maximum = tl.full((BLOCK_TOKENS,), FLOOR, dtype=tl.float32)
    partition = tl.zeros((BLOCK_TOKENS,), dtype=tl.float32)
    moment = tl.zeros((BLOCK_TOKENS,), dtype=tl.float32)
    positive = tl.zeros((BLOCK_TOKENS,), dtype=tl.float32)
    partition_unit = tl.zeros((BLOCK_TOKENS,), dtype=tl.float32)
    moment_unit = tl.zeros((BLOCK_TOKENS,), dtype=tl.float32)
    for tile in range(first, last):
        columns = tile * BLOCK_VOCAB + tl.arange(0, BLOCK_VOCAB)
        logits = _logits_tile(layer, sizes, rows, columns, BLOCK_HIDDEN, PRECISION, WIDEN)
        logits = tl.where((columns < vocab_size)[None, :], logits, FLOOR)
        positive += tl.sum(tl.where(columns[None, :] == target[:, None], logits, 0.0), 1)
        raised = tl.maximum(maximum, tl.max(logits, 1))
        shift = maximum - raised
        maximum = raised
        centred = logits - raised[:, None]
        partition, moment = _add_tile(partition, moment, centred, shift, inverse_tau)
        if WITH_UNIT:
            partition_unit, moment_unit = _add_tile(partition_unit, moment_unit, centred, shift, None)

    output = partials + split * num_tokens + rows
    stride = num_splits * num_tokens
    tl.store(output, maximum, mask=in_rows)
    tl.store(output + stride, partition, mask=in_rows)
    tl.store(output + 2 * stride, moment, mask=in_rows)
    tl.store(output + 3 * stride, positive, mask=in_rows)
    if WITH_UNIT:
        tl.store(output + 4 * stride, partition_unit, mask=in_rows)
        tl.store(output + 5 * stride, moment_unit, mask=in_rows)


@triton.jit
def logits_gradient_kernel(
    hidden: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    soft_cap: tl.tensor,
    targets: tl.tensor,
    tau: tl.tensor,
    maximum: tl.tensor,
    log_sum: tl.tensor,
    row_scale: tl.tensor,
    gradient: tl.tensor,
    num_tokens: tl.tensor,
    vocab_size: tl.tensor,
    num_hidden: tl.tensor,
    gradient_stride: tl.tensor,
    GROUP: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_VOCAB: tl.constexpr,
    BLOCK_HIDDEN: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
) -> None:
    """Write one tile of row_scale·(softmax(L/τ) − onehot)·slope to `gradient` (N, ≥ V), in its precision.

    `weight` and `bias` are those of one section of the vocabulary with vocab_size rows, and `targets` are relative to
    its start. The softmax is exp((L − maximum)/τ − log_sum): the maximum is subtracted before the division, because
    L/τ would lose the digits of small differences at small τ.
    """
    num_row_blocks = tl.cdiv(num_tokens, BLOCK_TOKENS)
    num_tiles = tl.cdiv(vocab_size, BLOCK_VOCAB)
    row_block, tile = _group_programs(tl.program_id(0), num_row_blocks, num_tiles, GROUP)
    rows = row_block * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    columns = tile * BLOCK_VOCAB + tl.arange(0, BLOCK_VOCAB)
    layer, sizes = (hidden, weight, bias, soft_cap), (num_tokens, vocab_size, num_hidden)
    logits = _logits_tile(layer, sizes, rows, columns, BLOCK_HIDDEN, PRECISION, WIDEN)
    in_rows = rows < num_tokens
    target = tl.load(targets + rows, mask=in_rows, other=-1)
    inverse_tau = 1.0 / tl.load(tau + rows, mask=in_rows, other=1.0)
    centred = logits - tl.load(maximum + rows, mask=in_rows, other=0.0)[:, None]
    offset = tl.load(log_sum + rows, mask=in_rows, other=0.0)
    scale = tl.load(row_scale + rows, mask=in_rows, other=0.0)
    values = tl.exp(centred * inverse_tau[:, None] - offset[:, None])
    values -= tl.where(columns[None, :] == target[:, None], 1.0, 0.0)
    values *= scale[:, None]
    if soft_cap is not None:
        capped = logits / soft_cap
        values *= 1.0 - capped * capped
    pointers = gradient + rows.to(tl.int64)[:, None] * gradient_stride + columns[None, :]
    tl.store(pointers, values.to(gradient.dtype.element_ty), mask=in_rows[:, None] & (columns < vocab_size)[None, :])
