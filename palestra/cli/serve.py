"""`palestra serve`, `serve-sampler` and `keys`: the training service, stand-alone samplers, and API keys."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from palestra.api.console import console, print_line, require_packages, user_errors

if TYPE_CHECKING:
    from palestra.service.serve import ServeOptions

ThreadsOption = Annotated[int, typer.Option(min=1, help="torch threads on a CPU")]
MaxSequencesOption = Annotated[int, typer.Option(min=1, help="sequences sampled at once")]
CacheOption = Annotated[
    float | None, typer.Option(min=0.001, help="memory of a base's KV cache in GiB; unset: half of the free memory")
]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu or cuda")]


def serve(  # noqa: PLR0913 - a parameter for each option
    base: Annotated[
        list[str] | None,
        typer.Option(
            "--base", help="a base that `palestra info` lists, or NAME=PATH of a folder or GGUF file (default: tiny)"
        ),
    ] = None,
    alias: Annotated[
        list[str] | None, typer.Option("--alias", help="an alias of a base for clients: `Qwen/Qwen3-0.6B=tiny`")
    ] = None,
    host: str = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one")] = 8000,
    data: Annotated[Path, typer.Option(help="the folder for weights and the database")] = Path("palestra-data"),
    auth: Annotated[
        Path | None, typer.Option(help="a file of API keys, see `palestra keys`; without it any key is accepted")
    ] = None,
    root_path: Annotated[str, typer.Option(help="a prefix of every address, such as /train")] = "",
    store: Annotated[
        str | None,
        typer.Option(help="database instead of SQLite in --data: postgresql+psycopg://USER:PASSWORD@HOST/NAME"),
    ] = None,
    front_only: Annotated[
        bool, typer.Option(help="front end without an engine, for a server that has one on the same --data and --store")
    ] = False,
    allow_origin: Annotated[
        list[str] | None, typer.Option(help="an origin whose web pages may use the server: https://chat.example.org")
    ] = None,
    device: DeviceOption = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16")] = "auto",
    threads: ThreadsOption = 1,
    max_num_seqs: MaxSequencesOption = 512,
    kv_cache_gib: CacheOption = None,
    metrics: Annotated[bool, typer.Option("--metrics", help="metrics for Prometheus at /metrics")] = False,
    poll: Annotated[float, typer.Option(min=0, max=40, help="maximum seconds that a poll for a result blocks")] = 30.0,
    queue: Annotated[int, typer.Option(min=1, help="maximum pending requests per key")] = 20_000,
    queue_bytes: Annotated[int, typer.Option(min=1, help="maximum bytes of pending requests per key")] = 2**29,
    answer_tokens: Annotated[
        int, typer.Option(min=1, help="maximum tokens in the answer of one call; each top-k alternative counts")
    ] = 2**21,
    models: Annotated[int, typer.Option(min=1, help="maximum models in training per key")] = 64,
    check: Annotated[
        bool, typer.Option("--check", help="print what will not work with these options, and do not serve")
    ] = False,
) -> None:
    """Serve training and sampling over HTTP to clients of Tinker and MinT.

    Examples:

        palestra serve
        palestra serve --base small=/models/small --alias Qwen/Qwen3-0.6B=small --port 9000
        palestra serve --base small=/models/small --check
        palestra keys add ada --auth keys.txt && palestra serve --host 0.0.0.0 --auth keys.txt

    Ctrl-C or SIGTERM ends the server after pending requests, with every model saved; a second one ends it at once.
    """
    with user_errors():
        require_service()
        if metrics:
            require_packages("--metrics", "metrics", "prometheus_client")
        from palestra.service.serve import ServeOptions
        from palestra.service.serve import serve as run_server
        from palestra.service.server.state import ClientLimits

        options = ServeOptions(
            bases=parse_named(base, "tiny"),
            aliases=parse_named(alias),
            host=host,
            port=port,
            data=data,
            auth=auth,
            root_path=root_path,
            store=store,
            front_only=front_only,
            allow_origins=tuple(allow_origin or ()),
            device=device,
            dtype=dtype,
            threads=threads,
            max_num_seqs=max_num_seqs,
            kv_cache_gib=kv_cache_gib,
            metrics=metrics,
            limits=ClientLimits(
                poll=poll, queue=queue, queue_bytes=queue_bytes, answer_tokens=answer_tokens, models=models
            ),
        )
        if check:
            _show_findings(options)
        else:
            run_server(options, print_line)


def _show_findings(options: ServeOptions) -> None:
    """Prints what `palestra serve` would meet. Raises ValueError if something will not work."""
    from palestra.service.check import check_options

    table = Table("what", "", "finding")
    failed = 0
    for found in check_options(options):
        failed += found.verdict == "fails"
        style = {"fails": "bold red", "note": "yellow"}.get(found.verdict, "")
        table.add_row(found.what, Text(found.verdict, style), Text(found.text))
    console.print(table)
    if failed:
        raise ValueError(f"{failed} of these will not work")


def serve_sampler(  # noqa: PLR0913 - a parameter for each option
    base: Annotated[
        str, typer.Option(help="a base that `palestra info` lists, a folder, GGUF file or hub name")
    ] = "tiny",
    host: str = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one")] = 8001,
    key_env: Annotated[
        str, typer.Option(help="the environment variable with the key that clients must send; unset: none")
    ] = "PALESTRA_SAMPLER_KEY",
    device: DeviceOption = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16")] = "auto",
    threads: ThreadsOption = 1,
    max_num_seqs: MaxSequencesOption = 512,
    kv_cache_gib: CacheOption = None,
    allow_host: Annotated[
        list[str] | None, typer.Option(help="a name that the server is called by, besides its address and localhost")
    ] = None,
    with_parent: Annotated[
        bool, typer.Option("--with-parent", help="end when standard input is closed, that is, with the parent process")
    ] = False,
) -> None:
    """Serve a base model and its adapters to training runs in other processes, over vLLM's API with token ids.

    Examples:

        palestra serve-sampler --base tiny --port 8001
        palestra train configs/demo.yaml --set 'sampler={type: vllm, urls: ["http://127.0.0.1:8001"]}'

    Ctrl-C or SIGTERM ends the server after pending requests; a second one ends it at once. The first line of output is
    its address.
    """
    with user_errors():
        require_packages("serving a sampler", "service", "starlette", "uvicorn", "httptools")
        from palestra.text.samplers.server import SamplerServerOptions
        from palestra.text.samplers.server import serve as run_server

        options = SamplerServerOptions(
            base=base,
            host=host,
            port=port,
            key_env=key_env,
            device=device,
            dtype=dtype,
            threads=threads,
            max_num_seqs=max_num_seqs,
            kv_cache_gib=kv_cache_gib,
            with_parent=with_parent,
            hosts=tuple(allow_host or ()),
        )
        run_server(options, lambda line: print(line, flush=True))


def parse_named(settings: list[str] | None, *default: str) -> dict[str, str]:
    """Parses `["small=/models/small", "tiny"]`, else `default`, to names and values."""
    pairs = [text.partition("=") for text in settings or default]
    return {name: value or name for name, _, value in pairs}


def require_service() -> None:
    """Raises ValueError if optional packages of the service are not installed."""
    require_packages(
        "the service", "service", "fastapi", "uvicorn", "httptools", "sqlalchemy", "jwt", "zstandard", "jsonschema"
    )


keys = typer.Typer(no_args_is_help=True, help="Add, list and remove API keys of the service.")
AuthOption = Annotated[Path, typer.Option(help="the file of keys that `palestra serve --auth` reads")]


@keys.command("add")
def add_key(name: Annotated[str, typer.Argument(help="name of the owner of the key")], auth: AuthOption) -> None:
    """Create a key and print it once.

    Only its hash is stored.

    Example:

        palestra keys add ada --auth keys.txt
    """
    with user_errors():
        print(_api_keys().add_key(auth, name))


@keys.command("list")
def list_keys(auth: AuthOption) -> None:
    """List the owners of keys, and the number of keys of each."""
    with user_errors():
        owners = [name for name, _ in _api_keys().read_keys(check_exists(auth))]
        for name in sorted(set(owners)):
            print(f"{name}  {owners.count(name)}")


@keys.command("remove")
def remove_keys(name: Annotated[str, typer.Argument(help="name of the owner of the keys")], auth: AuthOption) -> None:
    """Remove all keys of an owner. A running server refuses them from then on."""
    with user_errors():
        if not _api_keys().remove_keys(check_exists(auth), name):
            raise ValueError(f'"{name}" has no key in {auth}: `palestra keys list --auth {auth}` lists the names')


def _api_keys() -> ModuleType:
    require_service()
    from palestra.service.server import api_keys

    return api_keys


def check_exists(path: Path) -> Path:
    """Returns `path`. Raises ValueError if there is no such file."""
    if not path.exists():
        raise ValueError(f"there is no file {path}: `palestra keys add NAME --auth {path}` makes one")
    return path
