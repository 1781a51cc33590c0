"""Measuring tokens with a model: the profile of every prediction, scalars of its logits, and its hidden state.

Shapes: B windows, T positions of the longest window, N new tokens of a batch, d hidden size, V effective vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from jobs.scoring.headroom.tables import measured_table
from jobs.scoring.headroom.texts.settings import HeadroomSettings
from jobs.scoring.temperatures.texts.parts import Part, token_arrays
from jobs.scoring.temperatures.texts.windows import Window, batches, windows_of
from pipelines.local_copy import local_copy
from tempnet.base_model import load_base
from tempnet.devices import DeviceMap, input_device, move_base
from tempnet.headroom.features import Tokens
from tempnet.headroom.profile import Profiles
from tempnet.models.output_head import find_output_head
from tempnet.precisions import loading_options

# Maximum number of logits held in float32 at a time (64 MiB); a profile needs four copies.
_NUM_LOGITS_AT_ONCE = 1 << 24


class Measurer:
    """Measures the tokens of parts, in a worker; the result does not depend on the batch."""

    def __init__(self, settings: HeadroomSettings, *, use_gpu: bool = False, device_map: DeviceMap = None) -> None:
        if use_gpu and not torch.cuda.is_available():
            raise ValueError("workers.use_gpu = True: torch finds no CUDA device here")
        self._settings = settings
        options = loading_options(settings.precision) | {"device_map": device_map}
        base = load_base(local_copy(settings.model), fetch=local_copy, **options).eval()
        self._base = move_base(base, "cuda" if use_gpu else "cpu")
        self._device = input_device(base)
        self._head = find_output_head(base)

    def __call__(self, part: Part) -> Part:
        """Returns the part with a table of one row per token in the place of one row per document."""
        ids = [values[: self._settings.tokens_per_document] for values in token_arrays(part.table["token_ids"])]
        tokens = self.measure(ids)
        documents = np.repeat(np.arange(len(ids)), [len(values) for values in ids])
        return Part(part.archive, part.number, measured_table(tokens, documents, num_documents=len(ids)))

    @torch.inference_mode()
    def measure(self, documents: Sequence[np.ndarray]) -> Tokens:
        """Returns what is known of all tokens of documents (n,), document after document, on the CPU."""
        settings = self._settings
        streams = [torch.from_numpy(np.concatenate([[settings.bos_id], ids]).astype(np.int64)) for ids in documents]
        starts = np.concatenate([[0], np.cumsum([len(ids) for ids in documents])])
        windows = [
            window
            for number, ids in enumerate(documents)
            for window in windows_of(number, len(ids), context_length=settings.context_length, stride=settings.stride)
        ]
        places: list[Tensor] = [torch.empty(0, dtype=torch.long)]
        found: list[Tokens] = []
        for batch in batches(windows, settings.batch_size):
            found += self._measure_batch(streams, batch)
            places += [torch.arange(window.first, window.stop) + int(starts[window.document]) for window in batch]
        order = torch.cat(places).argsort()
        return Tokens.join(found, order)

    def _measure_batch(self, streams: Sequence[Tensor], batch: Sequence[Window]) -> list[Tokens]:
        """Returns what is known of a batch's new tokens, window after window, in chunks."""
        num_positions = max(window.num_positions for window in batch)
        input_ids = torch.full((len(batch), num_positions), self._settings.bos_id)
        targets = torch.zeros((len(batch), num_positions), dtype=torch.long)
        is_new = torch.zeros((len(batch), num_positions), dtype=torch.bool)
        for row, window in enumerate(batch):
            stream, stop = streams[window.document], window.num_positions
            input_ids[row, :stop] = stream[window.start : window.stop]
            targets[row, :stop] = stream[window.start + 1 : window.stop + 1]
            is_new[row, window.first - window.start : stop] = True
        input_ids, is_new = input_ids.to(self._device), is_new.to(self._device)
        logits: Tensor | None = None
        # Padding is on the right, so that a causal model never attends to it.
        if self._head is None:
            output = self._base(input_ids=input_ids, use_cache=False, output_hidden_states=True)
            hidden, logits = output.hidden_states[-1][is_new], output.logits[is_new]
        else:
            hidden = self._base.base_model(input_ids=input_ids, use_cache=False)[0].to(self._device)[is_new]
        wanted = targets.to(self._device)[is_new]
        size = max(1, _NUM_LOGITS_AT_ONCE // self._settings.vocab_size)
        return [
            self._measure_chunk(hidden[at : at + size], wanted[at : at + size], logits, at)
            for at in range(0, len(hidden), size)
        ]

    def _measure_chunk(self, hidden: Tensor, targets: Tensor, logits: Tensor | None, at: int) -> Tokens:
        vocab_size = self._settings.vocab_size
        if logits is None:
            assert self._head is not None
            chunk = self._head.logits(self._base, hidden, vocab_size).to(self._device, torch.float32)
        else:
            chunk = logits[at : at + len(hidden), :vocab_size].float()
        profiles = Profiles.of_logits(chunk, targets)
        top = chunk.topk(2, dim=-1).values
        return Tokens(
            Profiles(profiles.values.cpu(), profiles.target.cpu()),
            (top[:, 0] - top[:, 1]).cpu(),
            top[:, 0].cpu(),
            hidden.float().cpu(),
        )
