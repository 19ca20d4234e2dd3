"""The queue and the tables, on SQLite (as in `palestra serve`) and on PostgreSQL; two stores stand for two
processes."""

import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy.exc import IntegrityError

from palestra.service.storage.store import ANSWER_TTL_S, Store, StoredAnswer
from palestra.service.storage.tables import checkpoints, models, requests, samplers, sessions, update_row, upsert_row


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.slow)])
def url(request, tmp_path):
    return f"sqlite:///{tmp_path}/store.db" if request.param == "sqlite" else request.getfixturevalue("postgres")


@pytest.fixture
def store(url):
    store = Store(url)
    yield store
    store.close()


def test_request_is_queued_taken_and_answered(store):
    id = store.submit("ann", "optim_step", b"body", key="model:m:1", model="m", seq=1)
    (row,) = store.take_queued()
    assert (row.id, row.kind, row.body, row.model, row.seq) == (id, "optim_step", b"body", "m", 1)
    assert store.take_queued() == [] and store.answered_ids([id]) == set() and store.queue_depth("ann") == (1, 4)
    store.write_answers([StoredAnswer.json(id, metrics={})])
    assert store.answered_ids([id, "other"]) == {id} and store.queue_depth() == (0, 0)
    row = store.get_request("ann", id)
    assert row.state == "done" and json.loads(row.result) == {"metrics": {}} and row.body is None
    assert store.get_request("bob", id) is None


def test_concurrent_duplicates_make_one_request(url):
    stores = [Store(url) for _ in range(4)]
    with ThreadPoolExecutor(8) as pool:
        ids = list(pool.map(lambda i: stores[i % 4].submit("ann", "sample", b"%d" % i, key="sampler:s:0"), range(32)))
    assert len(set(ids)) == 1 and len(stores[0].take_queued()) == 1
    for store in stores:
        store.close()


def test_two_workers_take_disjoint_requests(url):
    stores = [Store(url) for _ in range(2)]
    ids = {stores[0].submit("ann", "sample", b"") for _ in range(200)}
    with ThreadPoolExecutor(8) as pool:
        taken = [row.id for rows in pool.map(lambda i: stores[i % 2].take_queued(), range(16)) for row in rows]
    assert sorted(taken) == sorted(ids)
    for store in stores:
        store.close()


def test_requests_are_taken_in_order_of_arrival(store):
    ids = [store.submit("ann", "sample", b"") for _ in range(50)]
    assert [row.id for row in store.take_queued()] == ids


def test_requests_of_a_dead_worker_are_requeued(store):
    done, lost = (store.submit("ann", "sample", b"") for _ in range(2))
    store.take_queued()
    store.write_answers([StoredAnswer.json(done)])
    store.requeue_after_crash()
    assert [row.id for row in store.take_queued()] == [lost]


def test_refused_request_keeps_its_sequence_number(store):
    id = store.reject("ann", "forward_backward", "no such loss", key="model:m:1", model="m", seq=1)
    (row,) = store.take_queued()
    assert (row.id, row.seq) == (id, 1) and json.loads(row.result) == {"error": "no such loss", "category": "user"}
    store.write_answers([StoredAnswer(id, row.result, failed=True)])
    assert store.last_seq("m") == 1 and store.last_seq("other") == -1


def test_answers_that_wait_for_others_are_not_skipped_by_pollers(url):
    """A poller asks for the answers after the latest that it knows, while four writers in two processes commit."""
    stores = [Store(url) for _ in range(2)]
    ids = [stores[0].submit("ann", "sample", b"") for _ in range(120)]
    seen, cursor = set(), 0.0
    with ThreadPoolExecutor(4) as pool:
        tasks = [pool.submit(stores[i % 2].write_answers, [StoredAnswer.json(id)]) for i, id in enumerate(ids)]
        is_last = False
        while not is_last:
            is_last = all(task.done() for task in tasks)
            found = stores[0].find(requests, requests.c.finished > cursor)
            seen |= {row.id for row in found}
            cursor = max([cursor, *(row.finished for row in found)])
    for store in stores:
        store.close()
    assert seen == set(ids)


def test_results_and_row_updates_are_one_transaction(store):
    store.insert(sessions, id="s", owner="ann", created=1.0, seen=1.0, info={})
    id = store.submit("ann", "load", b"")
    broken = update_row(sessions, "s", seen=2.0).values(owner=None)  # no owner: refused
    with pytest.raises(IntegrityError, match=r"(?i)not.null"):
        store.write_answers([StoredAnswer.json(id)], [update_row(sessions, "s", seen=2.0), broken])
    assert store.get(sessions, "s").seen == 1.0 and store.answered_ids([id]) == set()


def test_rows_are_unique_updatable_and_sorted_newest_first(store):
    assert store.insert(sessions, id="a", owner="ann", created=1.0, seen=1.0, info={"tags": ["x"]})
    assert not store.insert(sessions, id="a", owner="bob", created=2.0, seen=2.0, info={})
    assert store.insert(sessions, id="b", owner="ann", created=3.0, seen=3.0, info={})
    store.update(sessions, "a", seen=9.0)
    assert store.get(sessions, "a").seen == 9.0 and store.get(sessions, "a").info == {"tags": ["x"]}
    assert [row.id for row in store.find(sessions, sessions.c.owner == "ann")] == ["b", "a"]
    assert store.count(sessions, sessions.c.owner == "bob") == 0


def checkpoint(path, folder, expires=None):
    row = {"path": path, "owner": "ann", "run": "m", "kind": "sampler", "base": "tiny", "lora": {}, "folder": folder}
    return row | {"size": 1, "created": time.time(), "expires": expires, "public": False, "info": {}}


def test_expired_rows_are_removed_and_used_folders_listed(store):
    now = time.time()
    store.execute(*upsert_row(checkpoints, checkpoint("kept", "f1")))
    store.execute(*upsert_row(checkpoints, checkpoint("kept", "f2")))  # replaces the first
    store.execute(*upsert_row(checkpoints, checkpoint("over", "f3", expires=now - 1)))
    for id, seen in (("old", now - ANSWER_TTL_S - 1), ("new", now)):
        store.insert(sessions, id=id, owner="ann", created=seen, seen=seen, info={})
        store.insert(samplers, id=f"{id}:1", session=id, owner="ann", base="tiny", folder=f"of-{id}", created=seen)
    model = {"id": "m", "session": "new", "owner": "ann", "base": "tiny", "lora": {}, "info": {}, "created": now}
    store.insert(models, **model, used=now, state="live", changed=0, kept=0, saved="f4")
    store.expire(now)
    assert store.referenced_folders() == {"f2", "of-new", "f4"}
    assert store.get(checkpoints, "over") is None


def test_results_expire_after_a_day(store):
    old, new = (store.submit("ann", "sample", b"") for _ in range(2))
    store.write_answers([StoredAnswer.json(old)])
    store.expire(time.time() + ANSWER_TTL_S + 1)
    assert store.get_request("ann", old) is None and store.get_request("ann", new) is not None


def test_database_of_another_version_is_refused(url, store):
    with store.database.engine.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE requests DROP COLUMN takes")
    with pytest.raises(ValueError, match=r"another version of palestra: its requests have no takes.*--data"):
        Store(url)
