"""Test the count of repeated requests: none is lost or counted twice on its way, and new ones are said once a minute."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipelines.store_errors import Retries, RetryLog


@given(st.lists(st.tuples(st.sampled_from(["add", "give"]), st.integers(0, 2)), max_size=60))
def test_counts_reach_whoever_receives_them_once(walk: list[tuple[str, int]]) -> None:
    """Three readers count, and give what they have to a fourth process at any time."""
    readers, receiver = [Retries() for _ in range(3)], Retries()
    log = RetryLog(lambda _: None)
    for action, number in [*walk, *(("give", number) for number in range(3))]:
        if action == "add":
            readers[number].add()
        else:
            receiver.add(readers[number].take())
            log.add(receiver.take())
    num_added = [action for action, _ in walk].count("add")
    assert log.total == receiver.num_total == sum(reader.num_total for reader in readers) == num_added
    assert receiver.take() == 0


def test_a_line_is_said_at_once_and_then_once_a_minute_with_what_is_new() -> None:
    now, lines = [1000.0], list[str]()
    log = RetryLog(lines.append, 5, clock=lambda: now[0])
    log.add(0)
    assert not lines
    for seconds, number in [(0, 3), (30, 5), (59, 1), (60, 0), (119, 1), (121, 0), (500, 0)]:
        now[0] = 1000.0 + seconds
        log.add(number)
    what = "requests to an object store failed and were repeated"
    assert lines == [f"{what}: 3; 8 so far", f"{what}: 6; 14 so far", f"{what}: 1; 15 so far"]
