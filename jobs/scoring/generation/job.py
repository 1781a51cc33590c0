"""The generation job, from prompts to files: inputs are checked before the model is loaded, and no text is redone."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from jobs.engine.export import model_digest, tempnet_digest
from jobs.engine.fields import absolute_path, differences, fixed_values
from jobs.scoring.generation.config import GenerateConfig
from jobs.scoring.generation.formats import FORMATS, Prompt, read_prompts
from jobs.scoring.generation.sampling import Generated, Key, Sampler
from jobs.tasks.base import naming_field
from pipelines.local_copy import local_copy
from pipelines.storage import compute_digest, exists, read_bytes, read_json, write_bytes, write_json
from pipelines.text.tokenization import encode_prompt, load_tokenizer, token_pieces
from tempnet.base_model import read_config
from tempnet.loading import load_tempnet
from tempnet.network import TempNet

_SECONDS_BETWEEN_UPLOADS = 30.0


class RecordFile:
    """The records of texts that were generated with one group of settings; only whole lines are added, except by `grade`.

    `<file>.settings.json` beside the file holds the settings whose hash is stored in every record. Lines are appended
    to a local file. Nothing can be appended to an object at a URI, so it is written anew, at most every 30 seconds, and
    by :meth:`save`. An incomplete last line, left by an interruption, is removed.
    """

    def __init__(self, path: str, settings: dict[str, Any]) -> None:
        self.path, self.settings_path = path, f"{path}.settings.json"
        self.settings = compute_digest(dict(sorted(settings.items())))
        self.records: dict[Key, dict[str, Any]] = {}
        self._is_local = "://" not in path
        if self._is_local:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
        content = read_bytes(path) if exists(path) else b""
        whole = content[: content.rfind(b"\n") + 1]
        for number, line in enumerate(whole.decode(errors="replace").split("\n")[:-1], 1):
            self._take(line, number, settings)
        if len(whole) < len(content):
            if not exists(self.settings_path):
                raise ValueError(f"{path} holds something else than records of this job: give another output")
            write_bytes(path, whole)
        # How many of the records a URI holds, and since when.
        self._num_saved, self._saved_at = len(self.records), time.monotonic()
        write_json(self.settings_path, {"hash": self.settings, "settings": settings})

    def _take(self, line: str, number: int, settings: dict[str, Any]) -> None:
        try:
            record = json.loads(line)
            key, its_settings = (record["id"], record["sample"], record["turn"]), record["settings"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{self.path} line {number} is no record of this job: give another output") from error
        if its_settings != self.settings:
            known = read_json(self.settings_path)
            changes = differences(known["settings"], settings) if known else [f"{self.settings_path} is missing"]
            raise ValueError(
                f"{self.path} holds texts of other settings ({'; '.join(changes)}): one file holds texts of one kind; give "
                "another output, or delete it"
            )
        self.records[key] = record

    def grade(self, grades: Mapping[Key, Mapping[str, Any]]) -> None:
        """Give records that are known the grades that they have now; the file is written anew if one is another."""
        graded = {key: self.records[key] | dict(grade) for key, grade in grades.items()}
        if any(self.records[key] != record for key, record in graded.items()):
            self.records |= graded
            self._write()

    def append(self, records: Iterable[Mapping[str, Any]]) -> None:
        lines = bytearray()
        for record in records:
            record = {**record, "settings": self.settings}
            self.records[record["id"], record["sample"], record["turn"]] = record
            lines += _line(record)
        if self._is_local:
            with Path(self.path).open("ab") as file:
                file.write(lines)
        elif time.monotonic() - self._saved_at > _SECONDS_BETWEEN_UPLOADS:
            self.save()

    def save(self) -> None:
        """Write what the object at a URI does not hold yet; a local file holds everything."""
        if not self._is_local and len(self.records) > self._num_saved:
            self._write()

    def _write(self) -> None:
        write_bytes(self.path, b"".join(map(_line, self.records.values())))
        self._num_saved, self._saved_at = len(self.records), time.monotonic()


def _line(record: Mapping[str, Any]) -> bytes:
    return (json.dumps(record, ensure_ascii=False) + "\n").encode()


@dataclass(slots=True, kw_only=True)
class Outcome:
    prompts: list[Prompt]
    num_samples: int
    file: RecordFile
    num_kept: int = 0
    lost: list[Key] = field(default_factory=list)
    """Texts that were not generated because the prompt does not fit into the context; later turns of such a prompt
    are lost too."""
    room: int | None = None
    num_tokens: int = 0
    seconds: float = 0.0
    """Time spent on generating, in seconds, without loading the model."""

    def _keys(self, prompt: Prompt) -> list[list[Key]]:
        return [[(prompt.id, sample, turn) for turn in range(len(prompt.turns))] for sample in range(self.num_samples)]

    def known(self) -> list[Key]:
        """Returns the keys of all requested records that exist."""
        keys = (key for prompt in self.prompts for sample in self._keys(prompt) for key in sample)
        return [key for key in keys if key in self.file.records]

    def texts(self, prompt: Prompt) -> list[list[str]] | None:
        """Returns, for every sample of a prompt, the texts of its turns, or None if any of them is missing."""
        keys, records = self._keys(prompt), self.file.records
        if not all(key in records for sample in keys for key in sample):
            return None
        return [[records[key]["text"] for key in sample] for sample in keys]


def run(config: GenerateConfig) -> Outcome:
    """Generate the missing texts, and write the file that the format expects."""
    prompts, prompt_format = read_prompts(config.prompts, config.format, config.limit), FORMATS[config.format]
    room = room_for_prompts(config.model, config.max_new_tokens, trust_remote_code=config.trust_remote_code)
    tokenizer = load_tokenizer(config.model)
    chat = is_chat(config.chat, tokenizer, config.model)
    temperature = choose_temperature(config, tokenizer)
    path = config.output if prompt_format.export is None else f"{config.output}.records.jsonl"
    if prompt_format.export is not None and exists(config.output) and not exists(path):
        raise ValueError(f"{config.output} exists, and no {path} beside it: this job did not write it")
    shortest = min(len(prompt_text(prompt.turns[:1], [], tokenizer, chat)[1]) for prompt in prompts)
    if room is not None and shortest > room:
        raise ValueError(
            f"the shortest prompt has {shortest} tokens, and the context of {config.model} leaves room for {room} beside "
            f"max_new_tokens = {config.max_new_tokens}"
        )
    file = RecordFile(path, settings_of(config, temperature, chat))
    outcome = Outcome(prompts=prompts, num_samples=config.num_samples, file=file, room=room)
    outcome.num_kept = len(outcome.known())
    by_id = {prompt.id: prompt for prompt in prompts}
    stop = () if chat else prompt_format.stop
    load_sampler = functools.cache(lambda: Sampler(config, tokenizer, temperature, stop))
    try:
        for turn in range(max(len(prompt.turns) for prompt in prompts)):
            requests = _requests(outcome, turn, config, tokenizer, chat)
            for start in range(0, len(requests), config.batch_size):
                keys, asked, ids = zip(*requests[start : start + config.batch_size], strict=True)
                sampler, started = load_sampler(), time.monotonic()
                generated = sampler(keys, ids)
                outcome.seconds += time.monotonic() - started
                outcome.num_tokens += sum(len(text.ids) for text in generated)
                file.append(
                    _record(key, text, made, tokenizer) | dict(prompt_format.grade(by_id[key[0]], made.text))
                    for key, text, made in zip(keys, asked, generated, strict=True)
                )
                print(f"turn {turn + 1}: {start + len(keys)} of {len(requests)} texts", flush=True)
    finally:
        file.save()
    if prompt_format.export is not None:
        answered = [(p, texts) for p in prompts if (texts := outcome.texts(p)) is not None]
        content = prompt_format.export(answered, config.generator or config.model, file.settings)
        write_bytes(config.output, content.encode())
    return outcome


def is_chat(chat: str, tokenizer: PreTrainedTokenizerFast, model: str) -> bool:
    if chat == "on" and tokenizer.chat_template is None:
        raise ValueError(f"chat = on: the tokenizer of {model} has no chat template")
    return chat != "off" and tokenizer.chat_template is not None


def choose_temperature(config: GenerateConfig, tokenizer: PreTrainedTokenizerFast) -> TempNet | float | None:
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


def room_for_prompts(model: str, max_new_tokens: int, *, trust_remote_code: bool) -> int | None:
    """Returns the maximum number of tokens of a prompt, or None for a model without a maximum context length."""
    with naming_field("model = "):
        place = local_copy(model, with_weights=False)
        config = read_config(place, trust_remote_code=trust_remote_code).get_text_config()
    context: int | None = getattr(config, "max_position_embeddings", None)
    if context is None:
        return None
    if max_new_tokens >= context:
        raise ValueError(
            f"max_new_tokens = {max_new_tokens} leaves no room for a prompt: the context of {model} is {context}"
        )
    return context - max_new_tokens


def settings_of(config: GenerateConfig, temperature: TempNet | float | None, chat: bool) -> dict[str, Any]:
    """Returns everything besides the prompt that decides a text, including digests of the weights."""
    settings = fixed_values(config) | {
        "model": absolute_path(config.model),
        "weights": model_digest(config.model, trust_remote_code=config.trust_remote_code),
    }
    if isinstance(temperature, TempNet):
        settings |= {"temperature": "tempnet", "tempnet": tempnet_digest(temperature)}
        settings["tau_max_eval"] = temperature.config.tau_max_eval
    else:
        settings["temperature"] = "greedy" if temperature is None else temperature
    return settings | {"chat": chat, "document_start": not chat}


def prompt_text(
    turns: Sequence[str], answers: Sequence[str], tokenizer: PreTrainedTokenizerFast, chat: bool
) -> tuple[str, list[int]]:
    """Returns the text that the model reads before it answers the last of the user's turns, and its token ids.

    `answers` are the model's answers to all turns but the last. Without a chat template, turns and answers are joined as
    paragraphs of one document, which begins as in training.
    """
    said = [text for pair in zip(turns, [*answers, ""], strict=True) for text in pair][:-1]
    if chat:
        messages = [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(said)]
        text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        return text, tokenizer(text, add_special_tokens=False).input_ids
    text = "\n\n".join(said)
    return text, encode_prompt(tokenizer, text)


def _requests(
    outcome: Outcome, turn: int, config: GenerateConfig, tokenizer: PreTrainedTokenizerFast, chat: bool
) -> list[tuple[Key, str, list[int]]]:
    """Returns key, prompt and its tokens of the missing texts of a turn; one whose prompt is too long is recorded as lost."""
    records, requests, grades = outcome.file.records, [], {}
    for prompt in outcome.prompts:
        for sample in range(config.num_samples if turn < len(prompt.turns) else 0):
            key = (prompt.id, sample, turn)
            before = [(prompt.id, sample, earlier) for earlier in range(turn)]
            if not all(earlier in records for earlier in before):
                outcome.lost.append(key)
                continue
            answers = [records[earlier]["text"] for earlier in before]
            text, ids = prompt_text(prompt.turns[: turn + 1], answers, tokenizer, chat)
            if key in records:
                if records[key]["prompt"] != text:
                    raise ValueError(f"{outcome.file.path}: the text of id {prompt.id!r} belongs to another prompt")
                # The file of prompts may have other answers now.
                grades[key] = FORMATS[config.format].grade(prompt, records[key]["text"])
            elif outcome.room is not None and len(ids) > outcome.room:
                outcome.lost.append(key)
            else:
                requests.append((key, text, ids))
    outcome.file.grade(grades)
    return requests


def _record(key: Key, prompt: str, generated: Generated, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    identity, sample, turn = key
    return {
        "id": identity,
        "sample": sample,
        "turn": turn,
        "prompt": prompt,
        "text": generated.text,
        "tokens": token_pieces(tokenizer, generated.ids),
        "token_ids": generated.ids,
        "tau": generated.tau,
        "entropy": generated.entropy,
        "finish_reason": generated.finish_reason,
    }
