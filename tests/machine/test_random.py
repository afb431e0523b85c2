"""Random events, sense and nonsense, on a machine that is recounted after each one.

Safety: no event raises, every invariant holds. Liveness: once faults stop, every wanted key
ends in memory or erred, unless nobody ever defined what it needs. Nothing is left behind once
all clients are gone. A failure names its seed: ``Storm(seed).run(n)`` plays it again.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from cython_ext import events as ev
from cython_ext.entities import Worker
from tests.machine.builders import Graph, Rig, address_of

STEPS = 250
SEEDS = range(24)

WORKERS = ["a", "b", "d", "e", "f"]
CLIENTS = ["c", "k"]
PREFIXES = ["inc", "sum", "load"]


class Storm:
    """One seed: a rig, what it was told to do, and what it is told next."""

    def __init__(self, seed: int, **settings: Any) -> None:
        self.rng = random.Random(seed)
        settings.setdefault("worker_saturation", self.rng.choice([1.1, 1.1, 2.0, float("inf")]))
        settings.setdefault("allowed_failures", self.rng.choice([0, 1, 3]))
        settings.setdefault("no_workers_timeout", self.rng.choice([None, 5.0]))
        settings.setdefault("placement_candidates", self.rng.choice([1, 2, 16]))
        settings.setdefault("prefix_limit", self.rng.choice([0, 1, 1000]))
        self.rig = Rig("a b", "c", **settings)
        self.runs: list[tuple[Worker, Any, int]] = []
        self.gone: list[Worker] = []
        self.open: list[Graph] = []
        self.steps: list[tuple[int, Callable[[], None]]] = [
            (12, self.submit),
            (10, self.next_slice),
            (40, self.finish),
            (6, self.finish_stale),
            (6, self.err),
            (3, self.err_stale),
            (4, self.join),
            (3, self.lose),
            (4, self.change_status),
            (4, self.add_keys),
            (3, self.drop_data),
            (2, self.miss_data),
            (4, self.reschedule),
            (3, self.secede),
            (6, self.release),
            (4, self.want),
            (3, self.cancel),
            (4, self.retry),
            (4, self.scatter),
            (1, self.connect),
            (1, self.leave),
            (2, self.retire),
            (2, self.restrict),
            (1, self.supply),
            (3, self.replicate),
            (3, self.reduce),
            (2, self.reject),
            (2, self.report),
            (1, self.ask_who_has),
            (1, self.answer_steal),
            (3, self.wait),
            (1, self.fail_graph),
        ]

    # The run

    def run(self, steps: int) -> None:
        """All phases; raises at the first thing that does not hold."""
        weights = [weight for weight, _ in self.steps]
        actions = [action for _, action in self.steps]
        for action in self.rng.choices(actions, weights, k=steps):
            action()
            self.listen()
        self.calm_down()
        self.all_settled()
        for client in list(self.rig.state.clients):
            if self.rig.state.clients[client].peer is not None:
                self.rig.leave(client)
            else:
                self.rig.release(*self.rig.state.tasks, client=client)
        self.rig.nothing_left()

    def listen(self) -> None:
        """Remember what workers were told to compute."""
        for effect in self.rig.sink.take():
            if effect[0] == "compute-task":
                worker = self.rig.state.workers.get(effect[1])
                if worker is not None:
                    self.runs.append((worker, effect[2], effect[3]))
        del self.runs[:-60]

    def calm_down(self) -> None:
        """Faults stop: graphs come in, workers are well, every demand can be met."""
        rig = self.rig
        for graph in self.open:
            if graph.number in rig.machine.submissions:
                while graph.slice():
                    pass
                graph.end()
        for worker in list(rig.state.workers.values()):
            rig.send(ev.WorkerStatusChanged, worker=worker, status="running")
        for name in WORKERS:
            if address_of(name) not in rig.state.workers:
                rig.worker(name)
        for worker in list(rig.state.workers.values()):
            rig.send(ev.ResourcesSet, worker=worker, resources={"gpu": 2.0})
        rounds = 0
        while rig.state.task_counts["processing"]:
            for worker in list(rig.state.workers.values()):
                for task in worker.processing:
                    if task.state == "processing":
                        rig.finish(task.key)
            rounds += 1
            assert rounds < 1000

    def all_settled(self) -> None:
        rig = self.rig
        for task in rig.state.tasks.values():
            if task.n_wants and task.state not in ("memory", "erred"):
                assert self.undefined_below(task), (task, rig.machine.journal.story({task.key}))

    def undefined_below(self, task: Any) -> bool:
        """Whether the task needs, in the end, a key that nobody defined."""
        stack = [task]
        while stack:
            task = stack.pop()
            if task.run_spec is None and task.state == "released":
                return True
            stack.extend(need for need in task.dependencies if need.state != "memory")
        return False

    # Choices

    def key(self) -> Any:
        known = self.rig.state.tasks
        if known and self.rng.random() < 0.8:
            return self.rng.choice(list(known))
        return self.new_key()

    def new_key(self) -> str:
        return f"{self.rng.choice(PREFIXES)}-{self.rng.randrange(40)}"

    def some_keys(self) -> list[Any]:
        return list(dict.fromkeys(self.key() for _ in range(self.rng.randint(1, 3))))

    def a_worker(self) -> Worker | None:
        """Mostly one that is there, now and then one that is gone."""
        if self.gone and self.rng.random() < 0.1:
            return self.rng.choice(self.gone)
        workers = list(self.rig.state.workers.values())
        return self.rng.choice(workers) if workers else None

    def a_client(self) -> str:
        clients = [
            name for name, client in self.rig.state.clients.items() if client.peer is not None
        ]
        return self.rng.choice(clients) if clients else "nobody"

    def a_processing(self) -> Any:
        found = [task for task in self.rig.state.tasks.values() if task.state == "processing"]
        return self.rng.choice(found) if found else None

    # Graphs

    def submit(self) -> None:
        rng = self.rng
        client = self.a_client()
        if client == "nobody":
            return
        tasks: dict[Any, list[Any]] = {}
        if rng.random() < 0.1:
            tasks = {f"root-{i}": [] for i in range(12)}
        for _ in range(rng.randint(1, 7)):
            key = self.new_key()
            choice = list(tasks) + [k for k in self.rig.state.tasks if k not in tasks]
            needs = rng.sample(choice, min(len(choice), rng.choice([0, 0, 1, 1, 2, 3])))
            if key not in tasks:
                tasks[key] = [need for need in needs if need != key]
        keys = list(tasks)
        position = {key: i for i, key in enumerate(keys)}
        for key, needs in tasks.items():
            # What became a row of this graph after it was chosen must come first.
            tasks[key] = [need for need in needs if position.get(need, -1) < position[key]]
        annotations = {}
        for key in keys:
            if rng.random() < 0.3:
                annotations[key] = rng.choice(
                    [
                        {"retries": rng.choice([-1, 2, 10**30])},
                        {"workers": rng.sample(WORKERS, 2)},
                        {"workers": ["d"], "allow_other_workers": True},
                        {"workers": ["host-e"]},
                        {"resources": {"gpu": 1.0}},
                        {"user_priority": 5.0},
                    ]
                )
        graph = self.rig.begin(
            tasks,
            client=client,
            slices=[rng.randint(1, 4) for _ in range(rng.choice([0, 0, 3]))],
            wanted=rng.sample(keys, rng.randint(1, len(keys))),
            annotations=annotations,
            producers=rng.sample(keys, 1) if rng.random() < 0.1 else (),
            actors={rng.choice(keys)} if rng.random() < 0.1 else None,
            submitting_task=self.key() if rng.random() < 0.2 else None,
            fifo_timeout=rng.choice([0.0, 60.0]),
        )
        if graph.number in self.rig.machine.submissions:
            self.open.append(graph)
            self.next_slice()

    def next_slice(self) -> None:
        """Goes on although the client may be gone by now."""
        if self.open:
            graph = self.rng.choice(self.open)
            if not graph.slice():
                graph.end()
                self.open.remove(graph)

    def fail_graph(self) -> None:
        if self.open:
            graph = self.open.pop(self.rng.randrange(len(self.open)))
            graph.fail()

    # Workers

    def finish(self) -> None:
        task = self.a_processing()
        if task is not None:
            self.rig.finish(task.key, nbytes=self.rng.choice([0, 8, 10**9]))

    def finish_stale(self) -> None:
        run = self.stale_run()
        if run is not None:
            worker, key, run_id = run
            self.send_finish(worker, key, run_id)

    def send_finish(self, worker: Worker, key: Any, run_id: int) -> None:
        self.rig.send(
            ev.TaskFinished,
            worker=worker,
            key=key,
            run_id=run_id,
            nbytes=16,
            typename="int",
            type=b"int",
            compute_start=0.0,
            compute_stop=0.0,
            compute_seconds=self.rng.choice([0.001, 1.0, 30.0]),
            transfer_seconds=0.0,
            metadata=None,
            thread=None,
            startstops=None,
            has_compute=self.rng.random() < 0.5,
        )

    def stale_run(self) -> tuple[Worker, Any, int] | None:
        worker = self.a_worker()
        if worker is None:
            return None
        if self.runs and self.rng.random() < 0.7:
            worker, key, run_id = self.rng.choice(self.runs)
            if self.rng.random() < 0.5:
                # It may have come back since.
                worker = self.rig.state.workers.get(worker.address, worker)
            return worker, key, run_id
        return worker, self.key(), self.rng.choice([-1, 0, 3, 10**6])

    def err(self) -> None:
        task = self.a_processing()
        if task is not None:
            self.rig.err(task.key)

    def err_stale(self) -> None:
        run = self.stale_run()
        if run is None:
            return
        worker, key, run_id = run
        self.rig.send(
            ev.TaskErred,
            worker=worker,
            key=key,
            run_id=run_id,
            exception="late",
            traceback=None,
            exception_text="late",
            traceback_text="",
        )

    def join(self) -> None:
        self.rig.worker(
            self.rng.choice(WORKERS),
            nthreads=self.rng.choice([1, 1, 2, 4]),
            memory_limit=self.rng.choice([0, 0, 2 * 10**9]),
            status=self.rng.choice(["running", "running", "init", "paused"]),
            resources=self.rng.choice([{}, {"gpu": 1.0}]),
        )

    def lose(self) -> None:
        workers = list(self.rig.state.workers.values())
        if workers:
            worker = self.rng.choice(workers)
            if self.rng.random() < 0.3:
                worker.executing = {task.key: 1.0 for task in worker.processing[-2:]}
            self.rig.lose(worker, expected=self.rng.random() < 0.3)
            self.gone.append(worker)
            del self.gone[:-4]

    def change_status(self) -> None:
        worker = self.a_worker()
        if worker is not None:
            self.rig.send(
                ev.WorkerStatusChanged,
                worker=worker,
                status=self.rng.choice(
                    ["running", "running", "paused", "closing_gracefully", "closing", "what"]
                ),
            )

    def add_keys(self) -> None:
        worker = self.a_worker()
        if worker is not None:
            self.rig.send(ev.KeysAdded, worker=worker, keys=self.some_keys())

    def drop_data(self) -> None:
        worker = self.a_worker()
        if worker is not None:
            self.rig.send(ev.DataReleased, worker=worker, key=self.key())

    def miss_data(self) -> None:
        worker = self.a_worker()
        if worker is not None:
            self.rig.send(ev.ReplicaMissing, worker=worker, keys=self.some_keys())

    def reschedule(self) -> None:
        worker = self.a_worker() if self.rng.random() < 0.8 else None
        task = self.a_processing()
        key = task.key if task is not None and self.rng.random() < 0.7 else self.key()
        self.rig.send(ev.RescheduleAsked, worker=worker, key=key)

    def secede(self) -> None:
        task = self.a_processing()
        if task is not None:
            self.rig.secede(task.key, self.rng.choice([-1.0, 0.5]))

    def ask_who_has(self) -> None:
        worker = self.a_worker()
        if worker is not None:
            self.rig.send(ev.WhoHasAsked, worker=worker, keys=self.some_keys())

    def answer_steal(self) -> None:
        worker = self.a_worker()
        if worker is not None:
            state = self.rng.choice(["ready", "memory", None])
            self.rig.send(ev.StealAnswered, worker=worker, key=self.key(), state=state)

    def retire(self) -> None:
        worker = self.a_worker()
        if worker is None:
            return
        if self.rng.random() < 0.5:
            self.rig.send(ev.RetirementBegun, worker=worker)
        else:
            self.rig.send(ev.RetirementAborted, worker=worker, status="running")

    def supply(self) -> None:
        worker = self.a_worker()
        if worker is not None:
            resources = self.rng.choice([{}, {"gpu": 2.0}])
            self.rig.send(ev.ResourcesSet, worker=worker, resources=resources)

    # Clients and operators

    def release(self) -> None:
        self.rig.release(*self.some_keys(), client=self.a_client())

    def want(self) -> None:
        client = self.rng.choice([self.a_client(), "fire-and-forget", "queue-q"])
        if client != "nobody":
            self.rig.want(*self.some_keys(), client=client)

    def cancel(self) -> None:
        self.rig.cancel(*self.some_keys(), client=self.a_client(), force=self.rng.random() < 0.5)

    def retry(self) -> None:
        erred = [task.key for task in self.rig.state.tasks.values() if task.state == "erred"]
        self.rig.retry(*(erred or self.some_keys()), client=self.a_client())

    def scatter(self) -> None:
        client = self.rng.choice([self.a_client(), None])
        if client != "nobody":
            self.rig.scatter(
                self.key(), *self.rng.sample(WORKERS, self.rng.choice([1, 2])), client=client
            )

    def connect(self) -> None:
        name = self.rng.choice(CLIENTS)
        known = self.rig.state.clients.get(name)
        if known is None or known.peer is None:
            self.rig.client(name)

    def leave(self) -> None:
        client = self.a_client()
        if client != "nobody":
            self.rig.leave(client)

    def restrict(self) -> None:
        workers = self.rng.choice([None, ["a"], ["host-b", "d"]])
        self.rig.send(ev.RestrictionsSet, workers=dict.fromkeys(self.some_keys(), workers))

    def replicate(self) -> None:
        worker = self.a_worker()
        if worker is not None:
            self.rig.send(ev.ReplicasAsked, worker=worker, keys=self.some_keys())

    def reduce(self) -> None:
        worker = self.a_worker()
        if worker is not None:
            self.rig.send(
                ev.ReplicasDropped,
                worker=worker,
                keys=self.some_keys(),
                send=self.rng.random() < 0.5,
            )

    def reject(self) -> None:
        keys = self.some_keys()
        worker = self.a_worker() if self.rng.random() < 0.7 else None
        client = self.a_client() if worker is None else None
        if self.rng.random() < 0.03:
            self.rig.send(ev.Restarted)
        self.rig.send(ev.MessageRejected, worker=worker, client_id=client, keys=keys, reason="bad")

    def report(self) -> None:
        self.rig.send(ev.KeyReportAsked, client_id=self.a_client(), key=self.key())

    def wait(self) -> None:
        self.rig.wait(self.rng.choice([0.1, 1.0, 6.0]))


@pytest.mark.parametrize("seed", SEEDS)
def test_random_events_leave_the_books_right_and_nobody_waiting(seed: int) -> None:
    Storm(seed).run(STEPS)


def test_the_same_seed_gives_the_same_history() -> None:
    histories = []
    for _ in range(2):
        storm = Storm(7)
        storm.run(STEPS)
        histories.append(storm.rig.machine.journal.story())
    assert histories[0] == histories[1]
