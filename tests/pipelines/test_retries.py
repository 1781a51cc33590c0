"""Test the counts of repeated requests: none is lost or counted twice on its way, and they are said once a minute."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import fs

from pipelines.retries import Counts, Retries, RetryLog, count_all, count_by_reason
from pipelines.store_errors import name_reason, name_store

STORES, REASONS = ["s3://a", "s3://b at host:9000"], ["slow_down", "network_connection", "http_503"]


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.integers(0, 2), st.sampled_from(STORES), st.sampled_from(REASONS)),
            st.tuples(st.just("give"), st.integers(0, 2)),
        ),
        max_size=60,
    )
)
def test_counts_reach_whoever_receives_them_once(walk: list[tuple[str, int, str, str]]) -> None:
    """Three readers count, and give what they have to a fourth process at any time."""
    readers, receiver = [Retries() for _ in range(3)], Retries()
    log = RetryLog(lambda _: None)
    expected: Counter[tuple[str, str]] = Counter()
    for action, number, *what in walk:
        if action == "add":
            store, reason = what
            readers[number].add(store, reason)
            expected[store, reason] += 1
        else:
            receiver.receive(readers[number].take())
            log.add(receiver.take())
    for reader in readers:
        receiver.receive(reader.take())
    log.add(receiver.take())
    found = {(store, reason): number for store, reasons in log.totals.items() for reason, number in reasons.items()}
    assert found == dict(expected)
    assert receiver.num_total == sum(reader.num_total for reader in readers) == count_all(log.totals)
    by_reason: Counter[str] = Counter()
    for (_, reason), number in expected.items():
        by_reason[reason] += number
    assert count_by_reason(log.totals) == dict(by_reason)


def test_a_line_is_said_at_once_and_then_once_a_minute_with_what_is_new() -> None:
    now, lines = [1000.0], list[str]()
    before: Counts = {"s3://a": {"slow_down": 5}}
    log = RetryLog(lines.append, before, clock=lambda: now[0])
    log.add("")
    assert not lines
    for seconds, counts in [
        (0, {"s3://a": {"slow_down": 2, "network_connection": 1}}),
        (30, {"s3://a": {"network_connection": 4}, "s3://b": {"other": 1}}),
        (59, {"s3://a": {"slow_down": 1}}),
        (60, {}),
        (119, {"s3://b": {"other": 1}}),
        (121, {}),
        (500, {}),
    ]:
        now[0] = 1000.0 + seconds
        log.add(json.dumps(counts) if counts else "")
    what = "requests to an object store failed and were repeated"
    assert lines == [
        f"{what}: 3 to s3://a (last reason: network_connection); 8 so far",
        f"{what}: 5 to s3://a (last reason: slow_down), 1 to s3://b (last reason: other); 14 so far",
        f"{what}: 1 to s3://b (last reason: other); 15 so far",
    ]
    assert before == {"s3://a": {"slow_down": 5}}


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("AWS Error SLOW_DOWN during GetObject operation: ", "slow_down"),
        ("AWS Error NETWORK_CONNECTION during GetObject operation: curlCode: 56, Failure", "network_connection"),
        ("AWS Error UNKNOWN (HTTP status 503) during HeadObject operation: ", "http_503"),
        ("google::cloud::Status(UNAVAILABLE: Retry policy exhausted)", "unavailable"),
        ("the answer ends after 3 of 9 bytes from byte 0 on", "cut_answer"),
        ("what nobody has seen before", "other"),
    ],
)
def test_a_reason_is_one_word(message: str, reason: str) -> None:
    assert name_reason(OSError(message)) == reason


def test_a_store_is_named_by_bucket_and_address_without_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    plain, path = fs.FileSystem.from_uri("s3://key:secret@bucket/a/b?region=us-east-1")
    assert name_store(plain, f"s3://{path}") == "s3://bucket"
    given, path = fs.FileSystem.from_uri("s3://key:secret@bucket/a?region=us-east-1&endpoint_override=host:90")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://name:password@store.example:9000/path")
    assert name_store(given, f"s3://{path}") == "s3://bucket at host:90"
    assert name_store(plain, "s3://bucket/a/b") == "s3://bucket at store.example:9000"
    assert name_store(fs.PyFileSystem(fs.FSSpecHandler(MemoryFileSystem())), "memory:///bucket/a") == "memory://bucket"
