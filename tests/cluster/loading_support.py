"""Train a pretrained model under ZeRO 3, for a test and a benchmark of how it is loaded.

    python tests/cluster/loading_support.py RANK WORLD_SIZE PORT DIRECTORY HOW NUM_STEPS

does so on a rank of its own process, and prints what `train` returns as one line of JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from server_support import free_port

BATCH_SIZE, LENGTH = 4, 16


def run_ranks(directory: Path, how: str, world_size: int, num_steps: int) -> list[dict[str, Any]]:
    """Run all ranks, and return what each of them has printed."""
    port = str(free_port())
    environment = os.environ | {"OMP_NUM_THREADS": "1", "DEEPSPEED_LOG_LEVEL": "ERROR"}
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(world_size), port, str(directory), how, str(num_steps)],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(world_size)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=600) for process in ranks]
    for process, (_, told) in zip(ranks, outputs, strict=True):
        assert process.returncode == 0, told[-3000:]
    return [json.loads(said.splitlines()[-1]) for said, _ in outputs]


def train(rank: int, world_size: int, directory: str, how: str, num_steps: int) -> dict[str, Any]:
    """Train on one rank of a process group; return losses averaged over the ranks, and this process's peak of memory.

    The peak is in bytes, before DeepSpeed starts its engine. With `how` = "whole" every rank loads the model, which ZeRO 3
    then divides; with "divided", `jobs.engine.partitioned_loading` does.
    """
    import deepspeed
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from jobs.engine import deepspeed_engine  # noqa: F401 — keeps DeepSpeed from compiling an extension
    from jobs.engine.partitioned_loading import base_without_weights, load_partitioned
    from jobs.engine.task import with_and_without_decay
    from tempnet.weights import WeightFiles

    config = {
        "train_batch_size": BATCH_SIZE, "train_micro_batch_size_per_gpu": BATCH_SIZE // world_size,
        "zero_optimization": {"stage": 3}, "zero_allow_untested_optimizer": True, "steps_per_print": 1 << 60,
    }  # fmt: skip
    dtype = AutoConfig.from_pretrained(directory).dtype or torch.float32
    if how == "whole":
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
        parameters = list(model.parameters())
        groups = [
            {"params": [weight for weight in parameters if (weight.ndim >= 2) == decays], "weight_decay": 10.0 * decays}
            for decays in (True, False)
        ]
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
        deepspeed.zero.Init(module=model, config_dict_or_path=config)
    else:
        model = base_without_weights(directory, dtype=dtype)
        files = WeightFiles.find(directory)
        assert files is not None
        load_partitioned(model, files, config, rank=rank)
        base = {"name": "base", "parameters": list(model.parameters()), "learning_rate": 1e-3}
        groups = with_and_without_decay([base], 10.0)
    # ru_maxrss would not do: a process that another one has started begins with the peak of that one.
    status = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM:")) * 1024
    if not num_steps:
        return {"losses": [], "peak": peak}
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(num_steps):
        ids = torch.randint(model.config.vocab_size, (BATCH_SIZE, LENGTH), generator=generator).chunk(world_size)[rank]
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        mean = loss.detach().double() / world_size
        torch.distributed.all_reduce(mean)
        losses.append(float(mean))
    return {"losses": losses, "peak": peak}


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    number, count, address, place, kind, steps = sys.argv[1:]
    os.environ.update(RANK=number, LOCAL_RANK="0", WORLD_SIZE=count, MASTER_ADDR="127.0.0.1", MASTER_PORT=address)
    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")  # as Ray Train does; DeepSpeed does not know of it
    print(json.dumps(train(int(number), int(count), place, kind, int(steps))), flush=True)
