"""The generation job, from prompts to files: inputs are checked before the model is loaded, and no text is redone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerFast

from jobs.engine.export import model_digest, tempnet_digest
from jobs.engine.fields import absolute_path
from jobs.scoring.generation.config import GenerateConfig
from jobs.scoring.generation.formats import FORMATS, Prompt, PromptFormat, read_prompts
from jobs.scoring.generation.records import Key, RecordFile, settings_hash
from jobs.scoring.generation.sampling import Generated, Request, Sampler
from jobs.tasks.base import naming_field
from pipelines.local_copy import local_copy
from pipelines.storage import exists, write_bytes
from pipelines.text.tokenization import encode_prompt, load_tokenizer, token_pieces
from tempnet.base_model import read_config
from tempnet.loading import load_tempnet
from tempnet.network import TempNet

# Fields that do not change any text: where texts are computed and written, and how many there are.
_NOT_SETTINGS = ("prompts", "output", "num_samples", "batch_size", "limit", "device", "device_map", "html", "generator")


@dataclass(slots=True, kw_only=True)
class Outcome:
    """The outcome of a run of the job."""

    prompts: list[Prompt]
    """All prompts of this run."""
    file: RecordFile
    """All records, including those of earlier runs of the job."""
    num_kept: int
    """Number of texts of this run that earlier runs had already generated."""
    lost: list[Key] = field(default_factory=list)
    """Texts that were not generated because the prompt does not fit into the context; later turns of such a prompt
    are lost too."""
    room: int | None = None
    """Maximum number of tokens of a prompt; None: no limit."""
    num_tokens: int = 0
    """Number of tokens generated in this run."""
    seconds: float = 0.0
    """Time spent on generating, in seconds, without loading the model."""

    def texts(self, prompt: Prompt, num_samples: int) -> list[list[str]] | None:
        """Returns, for every sample of a prompt, the texts of its turns, or None if any of them is missing."""
        keys = [[(prompt.id, sample, turn) for turn in range(len(prompt.turns))] for sample in range(num_samples)]
        records = self.file.records
        if not all(key in records for sample in keys for key in sample):
            return None
        return [[records[key]["text"] for key in sample] for sample in keys]


def run(config: GenerateConfig) -> Outcome:
    """Generate the missing texts, and write the file that the format expects.

    Raises:
        OSError: if an input file does not exist.
        ValueError: if an input is invalid. It is raised before the model is loaded, except when the loaded model's
            vocabulary does not fit.
    """
    prompts, prompt_format = read_prompts(config.prompts, config.format, config.limit), FORMATS[config.format]
    room = room_for_prompts(config)
    tokenizer = load_tokenizer(config.model)
    if config.chat == "on" and tokenizer.chat_template is None:
        raise ValueError(f"chat = on: the tokenizer of {config.model} has no chat template")
    is_chat = config.chat != "off" and tokenizer.chat_template is not None
    temperature = choose_temperature(config, tokenizer)
    settings = settings_of(config, temperature, is_chat)
    path = records_path(config, prompt_format)
    if prompt_format.export is not None and exists(config.output) and not exists(path):
        raise ValueError(f"{config.output} exists, and no {path} beside it: this job did not write it")
    _check_that_all_is_not_lost(prompts, tokenizer, is_chat, room, config)
    file = RecordFile(path, settings)
    keys = [
        (p.id, sample, turn) for p in prompts for sample in range(config.num_samples) for turn in range(len(p.turns))
    ]
    outcome = Outcome(prompts=prompts, file=file, room=room, num_kept=sum(key in file.records for key in keys))
    sampler: Sampler | None = None
    try:
        for turn in range(max(len(prompt.turns) for prompt in prompts)):
            requests = _requests(outcome, turn, config, tokenizer, is_chat)
            if requests and sampler is None:
                sampler = Sampler(config, tokenizer, temperature, () if is_chat else prompt_format.stop)
            by_id = {prompt.id: prompt for prompt in prompts}
            for start in range(0, len(requests), config.batch_size):
                assert sampler is not None
                batch = requests[start : start + config.batch_size]
                started = time.monotonic()
                generated = sampler(batch)
                outcome.seconds += time.monotonic() - started
                outcome.num_tokens += sum(len(text.ids) for text in generated)
                file.append(
                    _record(request, text, tokenizer) | dict(prompt_format.grade(by_id[request.key[0]], text.text))
                    for request, text in zip(batch, generated, strict=True)
                )
                print(f"turn {turn + 1}: {start + len(batch)} of {len(requests)} texts", flush=True)
    finally:
        file.save()
    if prompt_format.export is not None:
        answered = [(p, texts) for p in prompts if (texts := outcome.texts(p, config.num_samples)) is not None]
        content = prompt_format.export(answered, config.generator or config.model, settings_hash(settings))
        write_bytes(config.output, content.encode())
    return outcome


def records_path(config: GenerateConfig, prompt_format: PromptFormat) -> str:
    """Returns the path or URI of the records: the output, or a file beside it if the format exports another file."""
    return config.output if prompt_format.export is None else f"{config.output}.records.jsonl"


def choose_temperature(config: GenerateConfig, tokenizer: PreTrainedTokenizerFast) -> TempNet | float | None:
    """Returns the TempNet, a constant temperature, or None for greedy decoding.

    Raises:
        FileNotFoundError: if a TempNet is requested and there is none.
        ValueError: if the TempNet was made for another vocabulary, or `tau_max_eval` is not above its τ₀.
    """
    if config.temperature == "greedy":
        return None
    if config.fixed_temperature is not None:
        return config.fixed_temperature
    with naming_field("tempnet = " if config.tempnet else "model = "):
        place = local_copy(config.tempnet or config.model)
    try:
        network = load_tempnet(place)
    except FileNotFoundError as error:
        if config.temperature == "auto" and not config.tempnet and config.tau_max_eval is None:
            return 1.0
        raise FileNotFoundError(f"temperature = {config.temperature}: {error}") from error
    if network.config.kind == "embeddings" or network.config.input_size != len(tokenizer):
        raise ValueError(
            f"the tokenizer of {config.model} has {len(tokenizer)} tokens, the TempNet was built for "
            f"{network.config.input_size} {network.config.kind}"
        )
    if config.tau_max_eval is not None:
        network.set_tau_max_eval(config.tau_max_eval)
    return network


def room_for_prompts(config: GenerateConfig) -> int | None:
    """Returns the maximum number of tokens of a prompt, or None for a model without a maximum context length.

    Raises:
        ValueError: if `max_new_tokens` leaves no room for a prompt.
    """
    with naming_field("model = "):
        place = local_copy(config.model, with_weights=False)
        model = read_config(place, trust_remote_code=config.trust_remote_code).get_text_config()
    context: int | None = getattr(model, "max_position_embeddings", None)
    if context is None:
        return None
    if config.max_new_tokens >= context:
        raise ValueError(
            f"max_new_tokens = {config.max_new_tokens} leaves no room for a prompt: "
            f"the context of {config.model} is {context}"
        )
    return context - config.max_new_tokens


def settings_of(config: GenerateConfig, temperature: TempNet | float | None, is_chat: bool) -> dict[str, Any]:
    """Returns everything besides the prompt that decides a text, including digests of the weights."""
    settings = {name: getattr(config, name) for name in GenerateConfig.__slots__ if name not in _NOT_SETTINGS}
    settings["model"] = absolute_path(config.model)
    settings["weights"] = model_digest(config.model, trust_remote_code=config.trust_remote_code)
    if isinstance(temperature, TempNet):
        settings |= {"temperature": "tempnet", "tempnet": tempnet_digest(temperature)}
        settings["tau_max_eval"] = temperature.config.tau_max_eval
    else:
        settings["temperature"] = "greedy" if temperature is None else temperature
    return settings | {"chat": is_chat, "document_start": not is_chat}


def prompt_text(
    turns: Sequence[str], answers: Sequence[str], tokenizer: PreTrainedTokenizerFast, is_chat: bool
) -> tuple[str, list[int]]:
    """Returns the text that the model reads before it answers the last of these turns, and its token ids.

    Without a chat template, turns and answers are joined as paragraphs of one document, which begins as in training.

    Args:
        turns: the user's messages.
        answers: the model's answers to all of them but the last.
        tokenizer: the model's tokenizer.
        is_chat: whether to use its chat template.
    """
    if is_chat:
        messages = [{"role": "user", "content": turns[0]}]
        for answer, turn in zip(answers, turns[1:], strict=True):
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": turn}]
        text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        return text, tokenizer(text, add_special_tokens=False).input_ids
    parts = [turns[0]]
    for answer, turn in zip(answers, turns[1:], strict=True):
        parts += [answer, turn]
    text = "\n\n".join(parts)
    return text, encode_prompt(tokenizer, text)


def _requests(
    outcome: Outcome, turn: int, config: GenerateConfig, tokenizer: PreTrainedTokenizerFast, is_chat: bool
) -> list[Request]:
    """Returns the requests of one turn that are still missing; texts whose prompt is too long are recorded as lost."""
    records, requests = outcome.file.records, []
    for prompt in outcome.prompts:
        for sample in range(config.num_samples if turn < len(prompt.turns) else 0):
            key = (prompt.id, sample, turn)
            before = [(prompt.id, sample, earlier) for earlier in range(turn)]
            if not all(earlier in records for earlier in before):
                outcome.lost.append(key)
                continue
            answers = [records[earlier]["text"] for earlier in before]
            text, ids = prompt_text(prompt.turns[: turn + 1], answers, tokenizer, is_chat)
            if key in records:
                if records[key]["prompt"] != text:
                    raise ValueError(f"{outcome.file.path}: the text of id {prompt.id!r} belongs to another prompt")
            elif outcome.room is not None and len(ids) > outcome.room:
                outcome.lost.append(key)
            else:
                requests.append(Request(key=key, prompt=text, ids=ids))
    return requests


def _check_that_all_is_not_lost(
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerFast,
    is_chat: bool,
    room: int | None,
    config: GenerateConfig,
) -> None:
    shortest = min(len(prompt_text(prompt.turns[:1], [], tokenizer, is_chat)[1]) for prompt in prompts)
    if room is not None and shortest > room:
        raise ValueError(
            f"the shortest prompt has {shortest} tokens, and the context of {config.model} leaves room for {room} beside "
            f"max_new_tokens = {config.max_new_tokens}"
        )


def _record(request: Request, generated: Generated, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    identity, sample, turn = request.key
    return {
        "id": identity,
        "sample": sample,
        "turn": turn,
        "prompt": request.prompt,
        "text": generated.text,
        "tokens": token_pieces(tokenizer, generated.ids),
        "token_ids": generated.ids,
        "tau": generated.tau,
        "entropy": generated.entropy,
        "finish_reason": generated.finish_reason,
    }
