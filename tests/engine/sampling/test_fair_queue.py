"""The fair queue on plain data: no starvation, no credit for pauses, order of each client's items."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.engine.sampling.fair_queue import FairQueue, WorkCounters
from palestra.engine.sampling.scheduler import row_allowance


def queue_of(**items):
    queue = FairQueue()
    for client, its in items.items():
        for item in its:
            queue.push(client, item)
    return queue


def serve_all(queue, cost=lambda item: 1):
    """All items in the order in which they are served, one at a time."""
    order = []
    while clients := queue.next_clients():
        item = queue.pop(clients[0])
        queue.work_counters.add_work(clients[0], cost(item))
        order.append(item)
    return order


def test_clients_alternate_and_keep_their_item_order():
    assert serve_all(queue_of(bob=["b1", "b2", "b3", "b4"], ada=["a1", "a2"])) == ["b1", "a1", "b2", "a2", "b3", "b4"]


def test_fairness_counts_work_not_items():
    order = serve_all(
        queue_of(bob=["B1", "B2", "B3"], ada=[f"a{i}" for i in range(8)]), lambda i: 4 if i[0] == "B" else 1
    )
    assert order == ["B1", "a0", "a1", "a2", "a3", "B2", "a4", "a5", "a6", "a7", "B3"]


def test_idle_clients_earn_no_credit():
    queue = queue_of(bob=range(100))
    for _ in range(50):
        queue.work_counters.add_work("bob", 1)
        queue.pop(queue.next_clients()[0])
    for item in "abcdef":
        queue.push("ada", item)
    order = serve_all(queue)[:12]
    assert sorted(str(item) for item in order if str(item) in "abcdef") == list("abcdef")
    assert [str(item) in "abcdef" for item in order] == [True, False] * 6


@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 50)), min_size=1, max_size=60),
    st.lists(st.booleans(), max_size=60),
)
def test_no_client_starves_and_shares_are_equal(items, arrivals):
    """Between two clients that wait the whole time, the work done differs by no more than the largest item."""
    queue, left, work = FairQueue(), list(items), {}
    arrivals = iter(arrivals)
    order = []
    while left or len(queue):
        if left and (not len(queue) or next(arrivals, True)):
            client, cost = left.pop(0)
            if client not in queue.next_clients():
                work = {}  # since the set of waiting clients last changed
            queue.push(client, (client, cost))
            continue
        waiting = queue.next_clients()
        client = waiting[0]
        item = queue.pop(client)
        queue.work_counters.add_work(client, item[1])
        order.append(item)
        work[client] = work.get(client, 0) + item[1]
        if all(other in queue.next_clients() for other in waiting):
            done = [work.get(other, 0) for other in waiting]
            assert max(done) - min(done) <= 2 * 50
        else:
            work = {}
    assert sorted(order) == sorted(items)
    for name in "abcd":
        assert [item for item in order if item[0] == name] == [item for item in items if item[0] == name]


def test_removed_items_are_not_served():
    queue = queue_of(bob=[1, 2], ada=[3])
    queue.remove(3)
    assert 3 not in queue and len(queue) == 2 and list(queue) == [1, 2] and queue.next_clients() == ["bob"]
    assert serve_all(queue) == [1, 2]


def test_equal_clients_alternate():
    shares = WorkCounters()
    order = []
    for _ in range(6):
        first = shares.service_order("abc")[0]
        shares.add_work(first, 1)
        order.append(first)
    assert order == list("abcabc")


@pytest.mark.parametrize("most", [1, 2, 6, 64, 512])
def test_row_allowance_leaves_rows_for_new_clients(most):
    assert row_allowance(0, 0, most) == most
    held = [most]
    while (more := row_allowance(0, sum(held), most)) > 0:
        held.append(more)
    assert len(held) >= 2 and sum(held) == most + -(-most // 8)
    assert row_allowance(held[0], sum(held) - 1, most) <= 0  # freed rows go to clients that have fewer
    assert row_allowance(0, sum(held) - 1, most) == 1
