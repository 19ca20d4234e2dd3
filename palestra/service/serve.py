"""Start and stop of the server: a front end in this process and the engine worker in another.

Additional front ends share the data folder and the database of the one with the worker. They communicate with it
through the database alone: without the wake-up socket, each side polls every few milliseconds.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shlex
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from palestra.core.files import acquire_lock, atomic_write
from palestra.core.http.listen import open_listener, url_host
from palestra.core.http.origin_middleware import OriginPolicy, is_loopback
from palestra.core.http.retry import RetryPolicy
from palestra.core.http.server import build_server
from palestra.engine.bases.names import resolve_base
from palestra.engine.bases.pretrained import load_config, load_tokenizer
from palestra.engine.forward.length_limit import position_limit
from palestra.engine.sampling.request import max_chars_per_token
from palestra.parallel.processes import exit_reason, join_or_kill, start_process
from palestra.service.server.api_keys import ApiKeys
from palestra.service.server.app import create_app
from palestra.service.server.state import BaseInfo, ClientLimits, ServiceContext
from palestra.service.storage.store import Store
from palestra.service.storage.wakeup import WakeupSocket
from palestra.service.storage.weight_store import WeightStore
from palestra.service.worker.worker import EngineOptions, WorkerSettings
from palestra.service.worker.worker_process import run_worker

STABLE_AFTER_S = 60.0  # seconds after which a worker counts as started successfully
RESTART = RetryPolicy(1.0, 30.0)  # pauses before a restart of a worker that died soon after its start
WORKER_STOP_TIMEOUT_S = 300.0  # seconds for the worker to complete its work on shutdown
DEFAULT_MAX_LENGTH = 32_768  # tokens of a sequence if the base's config names no limit (Mamba, Bloom)
DRAIN_TIMEOUT_S = 10  # seconds for open requests to end on shutdown

Say = Callable[[str], None]


class ServeOptions(EngineOptions):
    """Options of `palestra serve`."""

    aliases: dict[str, str] = {}
    """Additional names that clients may use: public name -> base."""
    host: str = "127.0.0.1"
    """Address to listen at."""
    port: int = 8000
    """Port to listen at; 0 chooses a free one."""
    auth: Path | None = None
    """File of API keys; None accepts any key."""
    root_path: str = ""
    """URL prefix of all routes, for a reverse proxy."""
    store: str | None = None
    """URL of the database; None uses SQLite in the data folder."""
    front_only: bool = False
    """Starts a front end without a worker, beside a server on the same data folder."""
    allow_origins: tuple[str, ...] = ()
    """Origins of web pages that may call the server."""
    metrics: bool = False
    """Serves metrics for Prometheus at /metrics."""
    limits: ClientLimits = ClientLimits()
    """Limits on what one client may request."""


def serve(options: ServeOptions, say: Say = print) -> None:
    """Serves until SIGTERM or SIGINT, then completes running work, saves every model, and returns.

    Raises ValueError if the data folder or the database belongs to another server (or, with `front_only`, to none), the
    port is taken, or a base or key file does not exist.
    """
    for alias, name in options.aliases.items():
        if name not in options.bases:
            raise ValueError(f'alias "{alias}" means base "{name}", but there are only {", ".join(options.bases)}')
    origins = OriginPolicy.for_host(options.host, options.allow_origins, pages=False)
    with _private_files(), hold_data(options):
        url = options.store or f"sqlite:///{(options.data / 'store.sqlite').resolve()}"
        context = _context(options, url)
        settings = WorkerSettings(store=url, **options.model_dump(include=set(EngineOptions.model_fields)))
        worker = None if options.front_only else WorkerProcess(settings, context, say)
        with open_listener(options.host, options.port) as listener:
            app = create_app(context, root_path=options.root_path, origins=origins, with_metrics=options.metrics)
            asyncio.run(_serve(options, app, worker, listener, say))
        context.store.close()


@contextmanager
def _private_files() -> Iterator[None]:
    """Makes what this process, and those that it starts, create readable by this user only."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def hold_data(options: ServeOptions) -> AbstractContextManager[Any]:
    """Locks the data folder while serving: one server with a worker at a time, and any number of front ends without
    one. A folder that it creates is this user's only; one that was there keeps its mode."""
    if not options.front_only:
        options.data.mkdir(parents=True, exist_ok=True)
        return acquire_lock(options.data / "server.lock", f"the server's data in {options.data}")
    if not (options.data / "secret").exists():
        raise ValueError(
            f"a front end alone joins a server on its data folder, but no server has been on {options.data}: start one "
            f"first, with --data {options.data} and the same --store"
        )
    return nullcontext()


def _context(options: ServeOptions, url: str) -> ServiceContext:
    wakeup, _ = WakeupSocket.pair()  # replaced when a worker starts
    keys = ApiKeys(options.auth, _secret(options.data / "secret"))
    store = Store(url)
    store.bind_data_folder(keys.sign("data folder"))
    return ServiceContext(
        store=store,
        weight_store=WeightStore(options.data / "weights"),
        keys=keys,
        bases={name: load_base_info(name, path, options.aliases) for name, path in options.bases.items()},
        wakeup=wakeup,
        limits=options.limits,
    )


async def _serve(
    options: ServeOptions, app: FastAPI, worker: WorkerProcess | None, listener: socket.socket, say: Say
) -> None:
    server = build_server(
        app,
        drain=DRAIN_TIMEOUT_S,
        keep_alive=75,  # longer than clients keep connections: otherwise they would write to closed ones
        on_shutdown=app.state.waiter.close,  # clients repeat their polls to the next server
        extra_s=WORKER_STOP_TIMEOUT_S if worker else 0.0,
        on_second_signal=worker.kill if worker else lambda: None,
    )
    watch = asyncio.create_task(worker.keep_alive()) if worker else None
    say(_how_to_connect(options, listener.getsockname()[1]))
    if options.data.stat().st_mode & 0o077:
        folder = shlex.quote(str(options.data))
        say(f"others can list {folder}; its files are private, and to close it too: chmod 700 {folder}")
    try:
        await server.serve(sockets=[listener])
    finally:
        if worker and watch:
            watch.cancel()
            await asyncio.to_thread(worker.stop)


class WorkerProcess:
    """The engine worker's process, restarted whenever it dies."""

    def __init__(self, settings: WorkerSettings, context: ServiceContext, say: Say) -> None:
        self.settings = settings
        self.context = context
        self.say = say
        self.process: BaseProcess | None = None

    def start(self) -> BaseProcess:
        """Starts a new process with a new wake-up socket."""
        self.context.wakeup, theirs = WakeupSocket.pair()  # readers of the old socket release it soon
        self.process = start_process(run_worker, (self.settings, theirs))
        theirs.sock.close()  # the worker has a copy; this one would keep the socket open after its death
        return self.process

    async def keep_alive(self) -> None:
        """Starts the worker and restarts it when it dies; the pause doubles while it dies within `STABLE_AFTER_S`
        seconds of its start."""
        failures = 0
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            process = self.start()
            await _wait_for_end(process)
            process.join()
            failures = 1 if loop.time() - began > STABLE_AFTER_S else failures + 1
            pause = RESTART.wait_s(failures)
            self.say(f"the engine's worker died ({exit_reason(process.exitcode)}); starting it again in {pause:.0f} s")
            await asyncio.sleep(pause)

    def kill(self) -> None:
        """Kills the process without saving."""
        if self.process is not None:
            self.process.kill()

    def stop(self) -> None:
        """Lets the worker complete its work and save its models; kills it after `WORKER_STOP_TIMEOUT_S` seconds, or at
        once while it still loads the base models."""
        if self.process is None or not self.process.is_alive():
            return
        wakeup = self.context.wakeup
        wakeup.read()  # updates `has_heard`
        if not wakeup.has_heard:
            self.process.kill()
        wakeup.ask_to_end()
        if join_or_kill(self.process, WORKER_STOP_TIMEOUT_S):
            self.say(f"the engine's worker has not ended within {WORKER_STOP_TIMEOUT_S:.0f} s: killed")


async def _wait_for_end(process: BaseProcess) -> None:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(process.sentinel, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(process.sentinel)


def load_base_info(name: str, path: str, aliases: dict[str, str]) -> BaseInfo:
    """Returns the metadata of a base model. Raises ValueError if it cannot be read."""
    where = resolve_base(path)
    config = load_config(where)
    tokenizer = load_tokenizer(where)
    text = config.get_text_config()
    return BaseInfo(
        name=name,
        path=where,
        public_names=tuple(alias for alias, target in aliases.items() if target == name),
        architecture=(config.architectures or [config.model_type])[0],
        vocab_size=text.vocab_size,
        max_length=position_limit(text) or DEFAULT_MAX_LENGTH,
        max_chars_per_token=max_chars_per_token(tokenizer),
        tokenizer=tokenizer,
    )


def _secret(path: Path) -> str:
    """Returns the secret that signs tokens and URLs, created if necessary and kept, so that these survive a restart.
    The file is written atomically, since other processes may read it."""
    if not path.exists():
        atomic_write(path, secrets.token_hex(32).encode(), 0o600)
    return path.read_text()


def _how_to_connect(options: ServeOptions, port: int) -> str:
    host = "127.0.0.1" if options.host in ("0.0.0.0", "::") else options.host
    key = "tml-..." if options.auth else "tml-anything"
    inside = options.auth or is_loopback(options.host)
    warning = "" if inside else "  (without --auth, anyone who reaches this machine may use it)"
    url = f"http://{url_host(host)}:{port}{options.root_path.rstrip('/')}"
    return f"serving; point a client here with TINKER_BASE_URL={url} TINKER_API_KEY={key}{warning}"
