"""Runs a plan to its end: prepares the data, opens the MLflow run, trains and writes the report.

A run trains with Ray, which is started here, or with `workers.local` in this process; then nothing of Ray is imported.
What is refused before that, by the configuration, the plan or :func:`check_plan`, a `--dry-run` refuses too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import os
import signal
import sys
import tempfile
import threading
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import pyarrow.fs
import torch
from pyarrow.fs import LocalFileSystem

from jobs.engine.command_line import as_typed, ending_in_one_line, show
from jobs.engine.config import RunSection, TrainingConfig
from jobs.engine.console import Console, Mailbox, note_failure
from jobs.engine.export import open_export, write_task
from jobs.engine.fields import configuration_hash, differences, flatten, recorded_values, resolve_fields, with_fields
from jobs.engine.lease import Lease
from jobs.engine.masking import masked
from jobs.engine.metrics import TrackedRun, send_metrics, survive_outage
from jobs.engine.report import verdict, verdict_metrics, verdict_rows
from jobs.engine.resumption import (
    CrashedTrainingError,
    FatalTrainingError,
    check_start,
    describe_continuation,
    explain_storage,
    find_resumption,
    found_checkpoints,
    registered_step,
    whole_checkpoints,
)
from jobs.engine.run_list import describe_run
from jobs.engine.task import Plan, PreparedTask, create_members
from jobs.engine.tracking import (
    SQLITE,
    check_experiment,
    finish_run,
    mark_if_ended,
    open_run,
    reconnection_uri,
    resolve_uri,
    run_tags,
    sqlite_file,
    where_to_browse,
)
from jobs.engine.worker import WorkerJob, train_here
from pipelines.prepare import preparing_here
from pipelines.storage import create_directory, exists, join, read_json, resolve, write_bytes, write_json
from pipelines.store_errors import RETRIES
from tempnet.network import CONFIG_FILE, HUB_NAME, PAIRED_DIRECTORY, TempNet, model_card
from tempnet.network_config import TempNetConfig

if TYPE_CHECKING:
    from ray.train import UserCallback

RecordModels: TypeAlias = Callable[[TrainingConfig, TrackedRun, Mapping[str, Any] | None], None]
"""Registers a run's checkpoints as models in MLflow, and also its export if the run has an outcome; raises MLflow's errors,
and leaves models that are already registered unchanged."""


def tracking_uri(config: TrainingConfig) -> str:
    """Return the MLflow URI that a run is logged to; empty if it is not logged (see :func:`resolve_uri`)."""
    return resolve_uri(config.tracking, config.run.resolved_storage)


def make_plan(config: TrainingConfig) -> Plan:
    """Return the plan of a run, from the module `plan` beside the one that defines its configuration."""
    package = type(config).__module__.rpartition(".")[0]
    plan: Plan = import_module(f"{package}.plan").make_plan(config)
    return plan


def run_command(config: TrainingConfig, *, dry_run: bool, record_models: RecordModels) -> Mapping[str, Any] | None:
    """Make the plan, then print it (dry run) or run it and print the results; return the outcome, None for a dry run.

    Exits the process with a message if the configuration or data are refused, if the run fails, and on Ctrl-C.
    """
    with ending_in_one_line(lambda: config.run.directory):
        plan = make_plan(config)
        if dry_run:
            show(plan.describe())
            check_plan(plan)
            return None
        outcome = train(plan, record_models=record_models)
    show(f"\n{plan.summary_table(outcome)}\n")
    return outcome


def print_where_to_look(outcome: Mapping[str, Any], *, results: str, commands: Sequence[Sequence[str]]) -> None:
    """Print the last lines of a job: its directories, how to open MLflow, and which commands can follow."""
    print(f"  results   {outcome['directory']}/{results}")
    print(f"  model     {outcome['export']}\n")
    print("To look around, type:")
    if outcome["tracking_uri"]:
        print(where_to_browse(outcome["tracking_uri"], outcome.get("mlflow_experiment_id")))
    for command in commands:
        print(f"  {as_typed(command)}")


def train(
    plan: Plan,
    *,
    parent_run_id: str = "",
    in_this_process: bool = False,
    with_progress: bool = True,
    keep_checkpoints: bool = True,
    shares_cores: bool = False,
    saves_validated: bool = False,
    callbacks: Sequence[UserCallback] = (),
    origin: Mapping[str, str] | None = None,
    record_models: RecordModels | None = None,
) -> dict[str, Any]:
    """Run a plan to its end, continuing an earlier run of the same name, and return its outcome (`outcome.json`).

    Args:
        plan: the plan of the run.
        parent_run_id: ID of the MLflow run that this run is shown under; empty for none.
        in_this_process: whether this process is the run's only worker even without `workers.local`.
        with_progress: whether to show progress in this terminal.
        keep_checkpoints: whether to keep the checkpoints after the outcome is written.
        shares_cores, saves_validated: fields of `WorkerJob`.
        callbacks: callbacks of Ray Train.
        origin: `origin_tags` of the process that started the job; None: of this process.
        record_models: registers checkpoints and export as models in MLflow; None: no models are registered.

    Raises:
        ValueError: before training starts, if the run is refused; other exceptions are possible.
        FatalTrainingError: if the run has failed.
        KeyboardInterrupt: on Ctrl-C; the training since the last checkpoint is lost.
    """
    config = plan.config
    outcome = check_plan(plan)
    show(plan.describe())
    if outcome is not None:
        record_end(config, outcome, record_models)
        print("\nThis run is finished; its results:", flush=True)
        return outcome
    watch: AbstractContextManager[object] = nullcontext()
    if not config.workers.local:
        from jobs.engine.ray_failures import HeadWatch

        watch = HeadWatch(config.run.directory)
    with Lease(config.run.directory), watch:
        with preparing_here() if in_this_process else nullcontext():
            prepared = plan.prepare_with_room()
        outcome = claim_directory(config)  # only now, so that a run that cannot start does not take the name
        if outcome is not None:
            return outcome  # another driver held the lease until now and finished the run
        if so_far := describe_run(config.run.directory):
            show(so_far)
        tracked = record_start(plan, prepared, parent_run_id, origin or {})
        job = WorkerJob(
            create_task=prepared.create_task,
            tracked_runs={config.run.name: tracked} if tracked else {},
            shares_cores=shares_cores,
            saves_validated=saves_validated,
        )
        with mark_if_ended(tracked):
            try:
                result = fit(
                    config,
                    job,
                    data_cpus=plan.data_cpus,
                    in_this_process=in_this_process or config.workers.local,
                    with_progress=with_progress,
                    callbacks=callbacks,
                )
            except FatalTrainingError as error:
                directory = config.run.directory
                note_failure(directory, masked(error.cause), step=registered_step(directory), is_final=True)
                if tracked and record_models is not None:
                    with survive_outage("the checkpoints"):
                        record_models(config, tracked, None)
                raise
        outcome = finish(plan, prepared, tracked, result)
        write_json(f"{config.run.directory}/outcome.json", outcome)  # the run is not trained again
        if not keep_checkpoints:
            filesystem, path = resolve(config.run.directory)
            for name in found_checkpoints(config.run.directory):
                filesystem.delete_dir(f"{path}/{name}")
        record_end(config, outcome, record_models)
        return outcome


def train_group(
    plans: Sequence[Plan],
    *,
    directory: str,
    parent_run_id: str,
    origin: Mapping[str, str],
    record_models: RecordModels | None,
) -> dict[str, str]:
    """Train runs side by side to their end, or continue them. Ray must be running, and their names must be free.

    Their common checkpoints have a directory of their own; all else lies as if every run had been trained alone.

    Returns:
        Name → reason of every run that has failed; the others have an outcome.
    """
    prepared = []
    for number, plan in enumerate(plans):  # what this prints is the same for all of them
        with contextlib.redirect_stdout(io.StringIO()) if number else nullcontext():
            prepared.append(plan.prepare())
    # The 2 is the version of the group's checkpoints; those of the first are not read.
    content = "2" + "".join(f"{plan.config.run.name} {configuration_hash(plan.config)}\n" for plan in plans)
    digest = hashlib.blake2b(content.encode(), digest_size=6).hexdigest()
    configs = [task.config for task in prepared if task.config]
    # One directory deeper than runs are looked for (`jobs.runs`, `jobs.sweep`).
    config = with_fields(configs[0], {"run.name": digest, "run.storage": f"{directory}/side-by-side"})
    tracked: dict[str, TrackedRun] = {}
    for plan, task in zip(plans, prepared, strict=True):
        claim_directory(plan.config)
        if run := record_start(plan, task, parent_run_id, origin):
            tracked[plan.config.run.name] = run
    claim_directory(config)
    create = partial(create_members, prepared[0].create_task, configs, config)
    job = WorkerJob(create_task=create, tracked_runs=tracked)
    result = fit(config, job, data_cpus=plans[0].data_cpus, with_progress=True)
    finished = []
    for plan, task in zip(plans, prepared, strict=True):
        if found := result["members"].get(name := plan.config.run.name):
            found |= {"unsent_metrics": result["unsent_metrics"]}
            finished.append((plan.config, finish(plan, task, tracked.get(name), found)))
    # All at the end: a member that is finished before the others leaves a group of another digest, without checkpoints.
    for member, outcome in finished:
        write_json(f"{member.run.directory}/outcome.json", outcome)
    # With the record of its checkpoints: if all have failed, the same group begins again.
    filesystem, path = resolve(config.run.directory)
    filesystem.delete_dir(path)
    for member, outcome in finished:
        record_end(member, outcome, record_models)
    failed: dict[str, str] = result["failed"]
    return failed


def record_start(
    plan: Plan, prepared: PreparedTask, parent_run_id: str, origin: Mapping[str, str]
) -> TrackedRun | None:
    """Write what was prepared into the run's directory; return the run's MLflow run, or None if it is not logged."""
    config = plan.config
    prepared.write_records(config.run.directory)
    write_task(config)
    if not plan.tracking_uri:
        return None
    tags = {**origin, **run_tags(config, config.tracking)}
    return open_run(
        uri=plan.tracking_uri,
        experiment=config.tracking.experiment,
        name=config.run.name,
        directory=config.run.directory,
        parameters={**flatten(config), **prepared.parameters},
        tags=tags | ({"mlflow.parentRunId": parent_run_id} if parent_run_id else {}),
        data_sets=prepared.data_sets,
    )


def fit(
    config: TrainingConfig,
    job: WorkerJob,
    *,
    data_cpus: float,
    in_this_process: bool = False,
    with_progress: bool,
    callbacks: Sequence[UserCallback] = (),
) -> dict[str, Any]:
    """Train from the newest checkpoint that is whole, and return the result of rank 0 (`train_from_newest`).

    SIGTERM has the workers save the current step, and ends as Ctrl-C does.
    """
    make_mailbox: Callable[[], Any] = Mailbox
    carry_out: Callable[[TrainingConfig, WorkerJob], dict[str, Any]] = _train_in_this_process
    if not in_this_process:
        from jobs.engine.ray_train import RemoteMailbox, train_with_ray

        make_mailbox = RemoteMailbox
        carry_out = partial(train_with_ray, data_cpus=data_cpus, callbacks=callbacks)
    run, mailbox, ask = config.run, None, None
    if with_progress:
        mailbox = make_mailbox()
        ask = mailbox.ask_to_stop
        job = dataclasses.replace(job, mailbox=mailbox, with_bar=sys.stderr.isatty())
    console = Console(mailbox, run.num_steps, max_stall_minutes=run.max_stall_minutes) if mailbox else None
    with console or nullcontext():
        try:
            with stopping_softly(ask, run.grace_seconds) if ask else nullcontext():
                result = carry_out(config, job)
        except KeyboardInterrupt:
            if console is None or not console.stalled:
                raise
            raise FatalTrainingError(f"{console.stalled}; {describe_continuation(run.directory)}") from None
    if "fatal" in result:
        raise FatalTrainingError(result["fatal"])
    if "interrupted" in result:
        print(f"saved at step {result['interrupted']}", flush=True)
        raise KeyboardInterrupt
    return result


def _train_in_this_process(config: TrainingConfig, job: WorkerJob) -> dict[str, Any]:
    directory = config.run.directory
    try:
        return train_here(job, config)
    except Exception as error:
        if message := explain_storage([error], directory):
            raise FatalTrainingError(message) from error
        cause = f"{type(error).__name__}: {error}"
        trace = traceback.format_exc()
        raise CrashedTrainingError(f"{trace}{cause}; {describe_continuation(directory)}", cause) from error


def claim_directory(config: Named) -> dict[str, Any] | None:
    """Create the run's directory for this configuration, or reuse it; return the outcome if the run is finished."""
    outcome = find_outcome(config)
    create_directory(config.run.directory)
    write_json(f"{config.run.directory}/configuration.json", recorded_values(config))
    return outcome


# ---- what is refused before Ray starts -------------------------------------------------------------------------------


class Named(Protocol):
    """The configuration of a run, or of a group of runs, that has a section `run`."""

    @property
    def run(self) -> RunSection: ...


def check_plan(plan: Plan) -> dict[str, Any] | None:
    """Check that a training run can be started, and return its outcome if it is finished already."""
    config = plan.config
    outcome = check_directory(config)
    if outcome is None:
        if not find_resumption(config.run.directory, {}).checkpoints:  # raises if the run cannot be continued
            check_start(config)
        check_writable("run.export", config.run.export_directory)
        if plan.tracking_uri.startswith(SQLITE):
            check_writable("tracking.uri", str(sqlite_file(plan.tracking_uri).parent))
        if plan.tracking_uri:
            check_experiment(plan.tracking_uri, config.tracking.experiment)
        if not config.workers.local:
            from jobs.engine.cluster import check_machine

            check_machine()
            check_room(config, plan.data_cpus)
    return outcome


def check_directory(config: Named) -> dict[str, Any] | None:
    """Check that the name of a run is not taken and that its storage can be written; return the outcome of a finished run."""
    outcome = find_outcome(config)
    if outcome is None:
        check_writable("run.storage", config.run.directory)
        if not exists(config.run.prepared_directory):  # what is prepared already may lie where nothing can be written
            check_writable("run.prepared", config.run.prepared_directory)
    return outcome


def find_outcome(config: Named) -> dict[str, Any] | None:
    """Return the outcome of a finished run; None if the run is not finished or has not been started."""
    directory = config.run.directory
    held = read_json(f"{directory}/configuration.json")
    if held is None:
        if checkpoints := whole_checkpoints(directory):
            raise ValueError(
                f"run.name = {config.run.name!r}: {directory} holds {', '.join(checkpoints)}, but not the "
                "configuration.json that they were made with: bring it back, delete the directory, or choose another run.name"
            )
        return None
    if changed := differences(masked(held), recorded_values(config)):
        raise ValueError(
            f"run.name = {config.run.name!r} is taken in {config.run.resolved_storage} by another configuration: "
            f"{'; '.join(changed)}. Choose another run.name, or delete {directory}"
        )
    return read_json(f"{directory}/outcome.json")


def check_writable(field: str, uri: str) -> None:
    """Check that files can be written into a directory, which need not exist yet."""
    filesystem, path = resolve(uri)
    try:
        if isinstance(filesystem, LocalFileSystem):
            place = Path(path)
            while not os.path.lexists(place):
                place = place.parent
            # A file without a name, where the file system has such files: nothing is left even if this process is killed.
            with tempfile.TemporaryFile(dir=place):
                return
        trial = f".write-{uuid.uuid4().hex}"
        write_bytes(join(uri, trial), b"")
        filesystem.delete_file(f"{path}/{trial}")
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        if isinstance(error, FileNotFoundError) and error.errno:
            reason = "that file system takes no files"  # such as /proc
        raise type(error)(
            f"{field}: nothing can be written in {uri}: {reason}. Give another directory or URI"
        ) from error


def check_room(config: TrainingConfig, data_cpus: float) -> None:
    """Check that this machine has the CPUs and GPUs of a run, if it is here that the job will start Ray."""
    if config.workers.local:
        raise ValueError("workers.local = True is for one training run: this job runs several, with Ray; leave it out")
    from jobs.engine import cluster, ray_private

    if cluster.starts_own_ray():
        cluster.check_run(config, data_cpus, total=ray_private.local_resources())


# ---- the end of a run: it is sent to MLflow at once or, after an outage, at the next start ----------------------------


END_FILE = "mlflow_end.json"
"""Name of the file in a run's directory with what MLflow must still receive, until :func:`record_end` has sent it."""


def record_end(config: TrainingConfig, outcome: Mapping[str, Any], record_models: RecordModels | None = None) -> None:
    """Send the unsent metrics, the report, the models and the status FINISHED to MLflow, unless this was done before.

    An outage of MLflow only causes a warning, and what was to be sent is kept for the next call.
    """
    kept = read_json(f"{config.run.directory}/{END_FILE}")
    if kept is None:
        return
    tracked = TrackedRun(
        uri=reconnection_uri(outcome["tracking_uri"], config.tracking), run_id=outcome["mlflow_run_id"]
    )
    with survive_outage(f"the end of {config.run.name} (the same command sends it later)"):
        send_metrics(tracked, kept["unsent_metrics"])
        filesystem, path = resolve(f"{config.run.directory}/report")
        with tempfile.TemporaryDirectory() as local:
            pyarrow.fs.copy_files(path, local, source_filesystem=filesystem)
            final = {f"verdict/{key}": value for key, value in verdict_metrics(outcome).items()}
            if num_retries := outcome.get("store_retries"):
                final["store_retries"] = num_retries
            tags = {"batches_digest": outcome.get("batches_digest", "")}
            if judgement := outcome.get("temperature_verdict"):
                tags["temperature.verdict"] = judgement
            finish_run(tracked, status="FINISHED", artifacts=local, metrics=final, tags=tags, note=kept["note"])
        if record_models is not None:
            record_models(config, tracked, outcome)
        filesystem, path = resolve(f"{config.run.directory}/{END_FILE}")
        filesystem.delete_file(path)


def finish(plan: Plan, prepared: PreparedTask, tracked: TrackedRun | None, result: dict[str, Any]) -> dict[str, Any]:
    """Write the report, and what remains to be sent to MLflow; return the outcome, with which the run is finished."""
    config = plan.config
    unsent = result.pop("unsent_metrics", {}).get(config.run.name, [])
    data = {"num_samples": prepared.num_samples, **prepared.read_data_outcome()}
    num_samples = data.pop("num_samples")
    outcome = {
        **result,
        "run": config.run.name,
        "directory": config.run.directory,
        "started_at_step": config.run.start_step,
        "export": config.run.export_directory,
        "mlflow_run_id": tracked.run_id if tracked else None,
        "mlflow_experiment_id": tracked.experiment_id if tracked else None,
        "tracking_uri": masked(plan.tracking_uri),
        **prepared.outcome,
        **data,
        "store_retries": result.get("store_retries", 0) + RETRIES.take(),  # This process has prepared the data.
        "num_epochs": result["num_steps"] * config.optimizer.batch_size / num_samples if num_samples else None,
        "temperature_verdict": verdict(result),
    }
    with open_export(f"{config.run.directory}/report") as local:
        (local / "summary.txt").write_text(plan.summary_table(outcome) + "\n")
        (local / "outcome.json").write_text(json.dumps(outcome, indent=1))
        values = masked(dataclasses.asdict(resolve_fields(config)))
        (local / "configuration.json").write_text(json.dumps(values, indent=1))
        plan.write_report(local, outcome, tracked)
    if tracked:
        end = {"unsent_metrics": unsent, "note": f"```\n{plan.summary_table(outcome)}\n```"}
        write_json(f"{config.run.directory}/{END_FILE}", end)
    write_card(config, prepared, outcome)
    return outcome


def write_card(config: TrainingConfig, prepared: PreparedTask, outcome: Mapping[str, Any]) -> None:
    """Write the model card of an export with TempNets beside it."""
    export = config.run.export_directory
    with torch.device("meta"):  # The card needs the numbers of their parameters only.
        networks = {
            name: TempNet(TempNetConfig(**values))
            for kind in ("", "_image", "_text")
            if (values := read_json(f"{export}/{(name := f'{PAIRED_DIRECTORY}{kind}')}/{CONFIG_FILE}"))
        }
    if not networks:
        return
    base = getattr(getattr(config, "model", None), "path", "")
    facts = [("base model", base)] if base else []
    facts += [(f"{name} data", uri) for name, (_, _, uri) in prepared.data_sets.items()]
    facts += [("training loss", outcome["loss"]), *verdict_rows(outcome)]
    of_hub = base if HUB_NAME.fullmatch(base) and not exists(base) else ""
    card = model_card(networks, "/".join(export.split("/")[-3:]), of_hub, masked(facts))
    write_bytes(f"{export}/README.md", card.encode())


@contextmanager
def stopping_softly(ask: Callable[[], None], grace_seconds: float) -> Iterator[None]:
    """Let the first SIGTERM inside the block ask the workers to save and stop, and end the run after the grace period.

    A second one ends it at once. Without a grace period, or outside the main thread, SIGTERM means what it did before.
    """
    if threading.current_thread() is not threading.main_thread() or not grace_seconds:
        yield
        return
    main = threading.get_ident()
    timer = threading.Timer(grace_seconds, lambda: signal.pthread_kill(main, signal.SIGINT))
    timer.daemon = True
    is_asked = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal is_asked
        if is_asked:
            raise KeyboardInterrupt
        is_asked = True
        print(f"received SIGTERM: saving the current step, for at most {grace_seconds:g} s (run.grace_seconds)")
        ask()
        timer.start()

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        timer.cancel()
        signal.signal(signal.SIGTERM, before)
