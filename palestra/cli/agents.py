"""`palestra publish` and `palestra serve-agent`: export and serve trained agents."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Annotated

import typer

from palestra.api.console import print_line, require_packages, user_errors
from palestra.cli.seat_options import CheckpointOption


def publish(  # noqa: PLR0913 - a parameter for each option
    run: Annotated[Path, typer.Argument(help="a run")],
    out: Annotated[Path, typer.Option(help="the folder to write, which must not exist; a .json file for networks")],
    member: Annotated[
        str | None,
        typer.Option(help="one of the run's agents (optional if it has only one; of a game: plays all its seats)"),
    ] = None,
    checkpoint: CheckpointOption = None,
    greedy: Annotated[
        bool, typer.Option("--greedy", help="networks: export the most probable actions, not the probabilities")
    ] = False,
    merge: Annotated[
        bool, typer.Option("--merge", help="merge the adapter into its base and write the whole model")
    ] = False,
    base_name: Annotated[
        str | None, typer.Option(help="public name of the base, if it was trained from a local folder")
    ] = None,
    licence: Annotated[
        str | None, typer.Option("--license", help="licence of the weights, by its identifier on the hub: apache-2.0")
    ] = None,
    hub: Annotated[
        str | None,
        typer.Option("--push-to-hub", help="also upload the folder to this model on the Hugging Face Hub: USER/NAME"),
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="with --push-to-hub: a new model is private")] = False,
) -> None:
    """Export a trained agent: weights that peft, transformers and vLLM read, and a model card. Networks in a game that
    can be enumerated, or a population's final strategies, as a table of action probabilities by information state.

    Examples:

        palestra publish runs/demo --member planner --out planner
        palestra publish runs/demo --member planner --out planner-whole --merge --license apache-2.0
        palestra publish runs/demo --member planner --out planner --push-to-hub me/planner
        palestra publish runs/leduc_psro --out leduc.json

    `palestra.GamePolicy.load("leduc.json").to_openspiel()` is the table as a policy of OpenSpiel.
    """
    with user_errors(run):
        if out.suffix == ".json":
            if merge or base_name or licence or hub:
                raise ValueError(
                    "--merge, --base-name, --license and --push-to-hub are for weights, not for a table of a game"
                )
            _publish_table(run, out, member, checkpoint, greedy)
            return
        if private and not hub:
            raise ValueError("--private is for a model on the hub: name it with --push-to-hub USER/NAME")
        from palestra.api.agents.publish import create_hub_repo, push_to_hub
        from palestra.api.agents.publish import publish as write
        from palestra.api.agents.trained_agent import find_agents

        agents = find_agents(run, [member] if member else [], checkpoint)
        if len(agents) > 1:
            raise ValueError(
                f"{run} has {len(agents)} agents: pass --member {'|'.join(agent.name for agent in agents)}"
            )
        if greedy:
            raise ValueError("--greedy is for a table of a game (--out NAME.json); weights are published as they are")
        address = create_hub_repo(hub, private or None) if hub else None  # before the work of a merge
        write(agents[0], out, merge=merge, base_name=base_name, licence=licence)
        print_line(f"{out}: {agents[0].versioned_name}, {'merged into its base' if merge else agents[0].kind}")
        if hub:
            push_to_hub(out, hub)
            print_line(f"uploaded to {address}")


def _publish_table(run: Path, out: Path, member: str | None, checkpoint: int | None, greedy: bool) -> None:
    from palestra.evaluation.final_strategies import describe_mixtures
    from palestra.evaluation.game_policy import export_game_policy

    if out.exists():
        raise ValueError(f"{out} exists: choose another name or remove it")
    policy = export_game_policy(run, member=member, checkpoint=checkpoint, greedy=greedy)
    policy.save(out)
    states = sum(map(len, policy.players))
    print_line(f"{out}: {states} information states, NashConv {policy.nash_conv:.6f}")
    if policy.mixtures:
        print_line(f"members: {describe_mixtures(policy.mixtures)}")


def serve_agent(  # noqa: PLR0913 - a parameter for each option
    where: Annotated[list[Path], typer.Argument(help="a run, or folders that `palestra publish` wrote")],
    member: Annotated[list[str] | None, typer.Option(help="one of the run's agents (default: all)")] = None,
    checkpoint: CheckpointOption = None,
    host: str = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one")] = 8080,
    key_env: Annotated[
        str | None,
        typer.Option(help="environment variable with the key that callers must send (default: any key is accepted)"),
    ] = None,
    key_file: Annotated[Path | None, typer.Option(help="a file with that key in its first line")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    allow_host: Annotated[
        list[str] | None, typer.Option(help="a name that the server is called by, besides its address and localhost")
    ] = None,
) -> None:
    """Serve trained agents over the OpenAI chat completions API; each agent is a model of its name.

    Examples:

        palestra serve-agent runs/demo --member planner
        palestra serve-agent planner --host 0.0.0.0 --key-env AGENT_KEY

    Ctrl-C or SIGTERM ends the server after pending answers; a second one ends it at once.
    """
    with user_errors(", ".join(map(str, where))):
        require_packages("serving an agent", "workflow", "starlette", "uvicorn", "httptools", "jsonschema")
        from palestra.api.agents.serve import load_agents, read_api_key
        from palestra.api.agents.trained_agent import find_agents

        key = read_api_key(key_env, key_file)
        if member and len(where) > 1:
            raise ValueError("--member names agents of one run: give that run alone")
        agents = list(chain.from_iterable(find_agents(path, member or [], checkpoint) for path in where))
        loaded = load_agents(agents, device)
    with user_errors():  # what fails while it serves is no damage of what was loaded
        from palestra.api.agents.serve import serve_agents

        serve_agents(loaded, host, port, key, print_line, allow_host or [])
