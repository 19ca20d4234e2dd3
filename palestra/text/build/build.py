"""Builds a language-agent run from its config (text/config.py), with the policies that policy_resolver.py makes."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import filter as matching_names
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palestra.core.config import load, validate
from palestra.core.losses import has_dropout
from palestra.core.seeding import derive_seed
from palestra.core.types import Answer, Seat
from palestra.engine.bases.indistinct_words import check_words
from palestra.engine.sampling.token_sampling import SamplingConfig
from palestra.envs.remote.address import pop_metrics
from palestra.envs.remote.remote_env import env_factory, has_option, make_env
from palestra.envs.text.board_games import TextGame
from palestra.runs import find_run, list_checkpoints
from palestra.runs.seats import idle_notes, resolve_seats
from palestra.text.algorithms.grpo_config import GRPOConfig
from palestra.text.algorithms.reward_model import scoring_sample
from palestra.text.build.engines import Engines, build_engines
from palestra.text.build.policy_resolver import PolicyResolver, make_policy, stage_resolver, stage_scorers, teachers_of
from palestra.text.config import TextConfig
from palestra.text.learners.lm import CriticKind, LanguageLearner, Scorer
from palestra.text.learners.lm_config import FullPolicyConfig, LMPolicyConfig, LoraPolicyConfig
from palestra.text.policies.in_flight import InFlightPolicy
from palestra.text.rollouts.dataset import DataFile, read_data
from palestra.text.rollouts.dataset_source import DatasetSource
from palestra.text.rollouts.learned_reward import LearnedRewardSource
from palestra.text.rollouts.rank_split import RankSplitRunner, RankSplitSource
from palestra.text.rollouts.sources import EnvSource, EpisodeSource
from palestra.text.rollouts.tree_rollout import EpisodeRunner
from palestra.text.training.async_rollouts import AsyncTextTrainer
from palestra.text.training.trainer import Stage, TextEval, TextTrainer

if TYPE_CHECKING:
    from palestra.text.tinker.client import RemoteEngines


def build(config: TextConfig, engines: Engines | RemoteEngines | None = None) -> TextTrainer:
    """Builds everything that `config` describes, ready for `run_training`.

    Models come from `engines`, or are loaded if it is None. Raises ValueError if parts of the config do not fit
    together.
    """
    parts = list(config.stage_configs())
    records = [read_data(part.data, _only_seat(part)) if part.data else [] for part in parts]
    read = list(chain.from_iterable(records))
    seats = [seat_policies(part, files) for part, files in zip(parts, records, strict=True)]
    for part in parts:
        check_paid_steps(part)
    parts = [with_max_length(part, set(names.values())) for part, names in zip(parts, seats, strict=True)]
    policy_names = dict(chain.from_iterable(names.items() for names in seats))
    eval_seats = {name: _eval_seats(config, name) for name in config.evals}
    eval_runners = _make_runners(config, {name: eval_env_config(config, name) for name in config.evals})
    runners = [_make_runners(part, part.named_envs) for part in parts]
    engines = engines or build_engines(config)
    used = set().union(*(_playing_policies(part, names) for part, names in zip(parts, seats, strict=True)))
    used.update(*(names.values() for names in eval_seats.values()))
    for part in parts:
        seen = {name: policy for name, policy in part.policies.items() if name in used}
        engines.check_supported(part.algorithm.loss, part.algorithm.loss_options, seen, config.eval_sampling)
    critic = critic_kind(parts, used)
    learners = {
        name: engines.build_learner(name, policy, derive_seed(config.seed, "adapter", name), critic)
        for name, policy in parts[0].policies.items()
        if name in used and isinstance(policy, LoraPolicyConfig | FullPolicyConfig)
    }
    fixed = {n: make_policy(n, p, engines) for n, p in config.policies.items() if n in used and n not in learners}
    resolver = PolicyResolver(learners, fixed, engines, in_flight_policies(config, learners))
    learning = {name: learner for name, learner in learners.items() if name in policy_names.values()}
    check_sampling_masks(parts, learning)
    check_game_words(parts, learning)
    check_dropout(parts, learning)
    check_world_models(parts, learning)
    check_thinking_budgets(parts, config.eval_sampling, learners)
    labels = [stage.name for stage in config.stages] or [""]
    table = engines.rank_split()
    resolvers = [stage_resolver(part, config, resolver) for part in parts]
    sources = [_source(*row) for row in zip(parts, seats, runners, records, resolvers, strict=True)]
    if table:
        sources = [RankSplitSource(source, table) for source in sources]
        eval_runners = {name: RankSplitRunner(runner, table) for name, runner in eval_runners.items()}
    scorers = [stage_scorers(*row) for row in zip(parts, resolvers, strict=True)]
    stages = [_stage(*row, resolver) for row in zip(parts, labels, sources, scorers, strict=True)]
    make: Callable[..., TextTrainer] = TextTrainer
    if config.staleness:
        in_flight = {name: policy for name, policy in resolver.in_flight.items() if name in learning}
        make = partial(AsyncTextTrainer, staleness=config.staleness, in_flight=in_flight)
    return make(
        stages=stages,
        learners=learning,
        evals=[_build_eval(config, eval_runners[name], eval_seats[name], resolver) for name in config.evals],
        seed=config.seed,
        checkpoint_every=config.checkpoint_every,
        keep_every=config.keep_every,
        record_every=config.save_episodes_every,
        max_failed=config.max_failed,
        worker_metrics=pop_metrics,
        ranks=engines.ranks,
        notes=[
            *config.notes_on_settings(engines.ranks.world_size),
            *engines.notes(),
            *biased_sampling_notes(parts, learning),
            *chain.from_iterable(file.notes() for file in read),
            *idle_notes(config.policies, used),
        ],
    )


def in_flight_policies(config: TextConfig, learners: Mapping[str, LanguageLearner]) -> dict[str, InFlightPolicy]:
    """Returns the policies that play in training, by name, if in-flight weight updates are on; else no policies."""
    if config.in_flight_updates == "none":
        return {}
    return {name: InFlightPolicy(learner.policy, config.in_flight_updates) for name, learner in learners.items()}


def check_paid_steps(part: TextConfig) -> None:
    """Raises ValueError if a stage compares the answers of one step in an env that pays at the end of an episode."""
    branching = part.algorithm.branching
    if part.data or branching.branch_at == "root" or branching.continue_from == "all":
        return
    for env in part.named_envs.values():
        if make_env(**env).is_paid_at_end:
            raise ValueError(
                f'env "{env["type"]}" pays after its last turn, and branch_at: turn compares answers by what their own '
                "turn pays, so that only the last seat would learn: set algorithm.branch_at: root, or continue_from: "
                "all with a small group_size"
            )


def with_max_length(part: TextConfig, playing: Collection[str]) -> TextConfig:
    """Returns the config of a stage; an algorithm that needs a token limit gets that of the trained policies among
    `playing`. Raises ValueError if these differ, or if the algorithm's overlong buffer is longer."""
    if not isinstance(part.algorithm, GRPOConfig) or not part.algorithm.needs_max_length:
        return part
    seated = [policy for name, policy in part.policies.items() if name in playing]
    limits = {p.sampling.max_tokens for p in seated if isinstance(p, LoraPolicyConfig | FullPolicyConfig)}
    if not limits:
        return part
    if len(limits) > 1:
        raise ValueError(
            f"the policies' sampling.max_tokens are {', '.join(map(str, sorted(limits)))}, and the algorithm needs one "
            "limit: set algorithm.max_completion_length"
        )
    algorithm = part.algorithm.model_copy(update={"max_completion_length": limits.pop()})
    algorithm.check_overlong_buffer()
    return part.model_copy(update={"algorithm": algorithm})


def _source(
    part: TextConfig,
    seats: dict[Seat, str],
    runners: dict[str, EpisodeRunner],
    records: list[DataFile],
    resolver: PolicyResolver,
) -> EpisodeSource:
    """Returns a dataset source if the stage has data files, else a source that plays."""
    if records and part.algorithm.max_redraws:
        raise ValueError("flat_groups: refill plays other instances, and data: is recorded: set flat_groups: skip")
    if records and (part.instance_pool or part.reward_model or part.reward_weights):
        raise ValueError(
            "instance_pool, reward_model and reward_weights need episodes that are played, and data: is recorded: "
            "leave them out"
        )
    if records:
        roles = {kind: make_env(**env).roles for kind, env in part.named_envs.items()}
        recorded = DatasetSource(records, lambda: resolver.encoding_policies(seats), part.seed, roles)
        if learning := {name for name in seats.values() if name in resolver.learners}:
            recorded.check(part.algorithm, learning)
        return recorded
    teachers = {} if part.algorithm.needs_teacher else teachers_of(part)
    source = EnvSource(
        runners,
        lambda: resolver.training_policies(seats, teachers),
        part.seed,
        part.mix.weights,
        part.mix.curriculum,
        part.mix.floor,
        part.mix.rate,
        {kind: make_env(**env).seats for kind, env in part.named_envs.items()},
        part.instance_pool,
        part.reward_weights,
        part.episodes,
        part.failed_reward,
    )
    return learned_reward_source(part, source, resolver.engines, resolver.learners) if part.reward_model else source


def _stage(
    part: TextConfig, name: str, source: EpisodeSource, scorers: Mapping[str, Scorer], resolver: PolicyResolver
) -> Stage:
    def configure() -> None:
        for learner in resolver.learners.values():
            settings = part.policies[learner.name]
            assert isinstance(settings, LoraPolicyConfig | FullPolicyConfig)
            learner.set_config(settings)
            learner.teacher = scorers.get(learner.name)

    return Stage(source, part.algorithm, part.steps, part.episodes, name, configure)


def eval_env_config(config: TextConfig, name: str) -> dict[str, Any]:
    """Returns the env config of evaluation `name`: the training env with the evaluation's changes."""
    evaluation = config.evals[name]
    changes = evaluation.env or {}
    env = config.env_config(evaluation.base_env) | changes
    return env if "split" in changes else with_split(env, "test" if name == "test" else "dev")


def _eval_seats(config: TextConfig, name: str) -> dict[Seat, str]:
    """Returns the policy of each seat in an evaluation: as in training, except for seats that the evaluation
    assigns."""
    env = eval_env_config(config, name)
    changes = config.evals[name].seats
    own = make_env(**env).seats
    plays = f'evaluation {name} is of env "{env["type"]}", which plays {", ".join(own)}'
    if unknown := [key for key in changes if not matching_names(own, key)]:
        raise ValueError(f'evals.{name}.seats names "{unknown[0]}", but {plays}')
    trained = {key: policy for key, policy in config.seats.items() if matching_names(own, key)}
    return resolve_seats(own, list(config.policies), plays, changes, trained)


def _make_runners(config: TextConfig, envs: Mapping[str, dict[str, Any]]) -> dict[str, EpisodeRunner]:
    hold = not config.staleness
    return {name: make_episode_runner(env, name, config.max_joint_steps, hold) for name, env in envs.items()}


def _build_eval(
    config: TextConfig, runner: EpisodeRunner, seats: Mapping[Seat, str], resolver: PolicyResolver
) -> TextEval:
    evaluation = config.evals[runner.name]
    return TextEval(
        name=runner.name,
        episodes=evaluation.episodes,
        every=evaluation.every,
        samples=evaluation.samples,
        runner=runner,
        seat_policies=lambda: resolver.eval_policies(seats, config.eval_sampling),
    )


def _playing_policies(part: TextConfig, seats: Mapping[Seat, str]) -> set[str]:
    """Names of the policies that play in a stage, teachers included."""
    teachers = teachers_of(part)
    return {*seats.values(), *(teachers[name] for name in seats.values() if name in teachers)}


def _only_seat(config: TextConfig) -> Seat | None:
    """Returns the seat of dataset rows if there is only one seat, in the envs or, without envs, among `seats` or
    `policies`; else None."""
    played = set(chain.from_iterable(make_env(**env).seats for env in config.named_envs.values()))
    seats = played or set(config.seats or config.policies)
    return min(seats) if len(seats) == 1 else None


def seat_policies(config: TextConfig, data_files: Sequence[DataFile] = ()) -> dict[Seat, str]:
    """Returns the policy of each seat of the envs or, without envs, of each seat in the data files.

    Raises ValueError for a seat without a policy, and for an unknown name.
    """
    kinds = " and ".join(f'"{env["type"]}"' for env in config.named_envs.values())
    seats = list(dict.fromkeys(chain.from_iterable(make_env(**env).seats for env in config.named_envs.values())))
    plays = f"env {kinds} plays {', '.join(seats)}"
    if not config.named_envs:
        seats = list(dict.fromkeys(chain.from_iterable(record.seats for record in data_files)))
        plays = f"the data has answers of {', '.join(seats)}"
    for record in data_files:
        if missing := [seat for seat in record.seats if seat not in seats]:
            raise ValueError(f'{record.path} has answers of seat "{missing[0]}", which the env does not have: {plays}')
    result = resolve_seats(seats, list(config.policies), plays, config.seats)
    unused = set(config.policies) - set(result.values())
    for seat in (seat for seat, name in result.items() if name == "default" and seat not in config.seats):
        for close in difflib.get_close_matches(seat, unused, n=1, cutoff=0.75):
            raise ValueError(
                f'policies.{close} plays nowhere, and policies.default plays seat "{seat}": did you mean '
                f"policies.{seat}? If not, set seats: {{{seat}: default}}"
            )
    return result


def with_split(env: dict[str, Any], split: str) -> dict[str, Any]:
    """Returns `env` with its split set to `split`, if it has one."""
    return env | ({"split": split} if has_option(env, "split") else {})


def make_episode_runner(
    env: dict[str, Any], name: str, max_steps: int = 1000, hold_calls: bool = True
) -> EpisodeRunner:
    """Returns the runner of episodes of at most `max_steps` joint steps in `env` (type, options, and servers if it is
    remote); `hold_calls` as in EpisodeRunner.

    The options are checked here, before any model is loaded. Raises ValueError if one is wrong.
    """
    return EpisodeRunner(env_factory(env), name, max_steps=max_steps, hold_calls=hold_calls)


def critic_kind(parts: Sequence[TextConfig], used: Collection[str]) -> CriticKind:
    """Returns the kind of the learners' critic; `used` are the policies that play. Raises ValueError
    if stages select different critics, or if a central critic would read prompts of policies on
    different bases."""
    separate = {part.algorithm.has_separate_critic for part in parts if part.algorithm.needs_critic}
    if len(separate) > 1:
        raise ValueError(
            "one stage has critic: shared and another critic: separate or central, but a policy has one critic for "
            "the whole run: set the same in all stages"
        )
    for part in parts:
        policies = {name: part.policies[name] for name in sorted(used) if name in part.policies}
        bases = {name: policy.base for name, policy in policies.items() if isinstance(policy, LMPolicyConfig)}
        if part.algorithm.reads_joint_prompts and len(set(bases.values())) > 1:
            raise ValueError(
                f"critic: central reads the tokens of all seats, and {' and '.join(bases)} are on different bases "
                f"({', '.join(dict.fromkeys(bases.values()))}): use one base, or critic: separate"
            )
    if not separate:
        return "none"
    return "separate" if True in separate else "shared"


def check_sampling_masks(parts: Sequence[TextConfig], trained: Collection[str]) -> None:
    """Raises ValueError if a policy of `trained` keeps sampling masks in a stage whose loss is not of the sampled
    distribution."""
    for part in parts:
        for name, policy in _trained_policies([part], trained):
            sampling = policy.sampling
            kind = part.algorithm.type
            imitates_legal = sampling.legal_only and kind == "sft"  # which is about all tokens anyway
            has_ratios = part.algorithm.needs_old_logprobs and kind != "distill"  # a teacher is scored over all tokens
            if sampling.records_mask and not (has_ratios or imitates_legal):
                option = "legal_only" if sampling.legal_only else "keep_sampling_mask"
                raise ValueError(
                    f"policies.{name}.sampling.{option} trains the distribution over the tokens that it leaves, but "
                    f"type: {kind} trains that of all tokens: set {option}: false"
                )


def check_game_words(parts: Sequence[TextConfig], trained: Mapping[str, LanguageLearner]) -> None:
    """Raises ValueError if the base of an adapter of `trained` cannot tell two words of a game apart."""
    for part in parts:
        games = [game for env in part.named_envs.values() if isinstance(game := make_env(**env), TextGame)]
        for name, learner in trained.items():
            engine = learner.sampler.engine
            if engine is not None and isinstance(part.policies[name], LoraPolicyConfig):
                for game in games:
                    check_words(engine, game.told_words, game.action_words)


def check_dropout(parts: Sequence[TextConfig], trained: Collection[str]) -> None:
    """Raises ValueError if a policy of `trained` has dropout, but no stage has a loss that uses it."""
    if any(has_dropout(part.algorithm.loss) for part in parts):
        return
    for name, policy in parts[0].policies.items():
        if name in trained and isinstance(policy, LoraPolicyConfig) and policy.lora_dropout:
            raise ValueError(
                f"policies.{name}.lora_dropout has no effect with type: {parts[0].algorithm.type}, which compares "
                "log-probabilities with passes that have no dropout: leave it out, or train with sft or reward_model"
            )


def check_world_models(parts: Sequence[TextConfig], trained: Mapping[str, LanguageLearner]) -> None:
    """Raises ValueError if a policy of `trained` predicts observations in prompts that repeat its answer in another
    form: the answer would be predicted as if it were an observation."""
    for part in parts:
        for name, learner in trained.items() if getattr(part.algorithm, "world_model_weight", 0) else ():
            if learner.encoder.drops_thoughts:
                raise ValueError(
                    f"algorithm.world_model_weight predicts what follows an answer of {name}, and its base's chat "
                    f"template writes that answer anew without its thought: set policies.{name}.history_thoughts: keep"
                )


def check_thinking_budgets(
    parts: Sequence[TextConfig], eval_sampling: Mapping[str, Any], learners: Mapping[str, LanguageLearner]
) -> None:
    """Raises ValueError for a budget of thoughts of a later stage, or of evaluations, that cannot be kept."""
    for part in parts:
        for name, learner in learners.items():
            policy = part.policies[name]
            assert isinstance(policy, LMPolicyConfig)
            for changes in ({}, eval_sampling):
                sampling = SamplingConfig.model_validate({**policy.sampling.model_dump(), **changes})
                learner.encoder.check_thinking_budget(sampling.thinking_token_budget, sampling.max_tokens)


def biased_sampling_notes(parts: Sequence[TextConfig], trained: Collection[str]) -> list[str]:
    """Returns a line for each policy of `trained` whose policy gradient is biased by top-k, top-p or temperature 0."""
    played = [part for part in parts if part.algorithm.needs_old_logprobs and not part.data]
    truncated = [
        f"biased: {name} samples with {_cuts(policy.sampling)}, and its gradient is taken as if from all tokens: set "
        f"policies.{name}.sampling.keep_sampling_mask: true, or top_p: 1.0 and top_k: 0"
        for name, policy in _trained_policies(played, trained)
        if policy.sampling.is_truncated and not policy.sampling.records_mask
    ]
    greedy = [
        f"biased: {name} always takes the most likely token, and its gradient is taken as if from samples at "
        f"temperature 1: set policies.{name}.sampling.temperature above 0, or freeze the policy (type: frozen)"
        for name, policy in _trained_policies(played, trained)
        if policy.sampling.temperature == 0 and policy.lr != 0
    ]
    return list(dict.fromkeys(truncated + greedy))


def _trained_policies(
    parts: Iterable[TextConfig], trained: Collection[str]
) -> Iterator[tuple[str, LoraPolicyConfig | FullPolicyConfig]]:
    for part in parts:
        for name, policy in part.policies.items():
            if isinstance(policy, LoraPolicyConfig | FullPolicyConfig) and name in trained:
                yield name, policy


def _cuts(sampling: SamplingConfig) -> str:
    cuts = [f"top_k: {sampling.top_k}"] * (sampling.top_k > 0) + [f"top_p: {sampling.top_p:g}"] * (sampling.top_p < 1)
    return " and ".join(cuts)


def learned_reward_source(
    part: TextConfig, source: EnvSource, engines: Engines | RemoteEngines, learners: Mapping[str, LanguageLearner]
) -> LearnedRewardSource:
    """Returns `source` with the rewards of the reward model that a stage's `reward_model` names.

    Raises ValueError if the run or policy has no reward model, if its vocabulary differs from the learners', if the
    algorithm chooses branches by reward, or if the run plays or trains in other processes.
    """
    settings = part.reward_model
    assert settings is not None
    if not isinstance(engines, Engines) or engines.ranks.world_size > 1 or part.backend.type != "inline":
        raise ValueError(
            "reward_model needs a run that plays and trains in one process: leave out engine:, backend: and torchrun"
        )
    branching = part.algorithm.branching
    if branching.branch_at == "turn" and branching.continue_from in ("best", "epsilon"):
        raise ValueError(
            f"continue_from: {branching.continue_from} chooses by rewards during play, and reward_model gives its "
            "rewards after play: set algorithm.branch_at: root, or continue_from: random or all"
        )
    judge = _load(settings.path, engines)
    for name, learner in learners.items():
        if learner.encoder.tokenizer.get_vocab() != judge.encoder.tokenizer.get_vocab():
            raise ValueError(
                f"reward_model: {settings.path} scores the tokens of policies.{name}, but has a different vocabulary: "
                "train a reward model on the same base"
            )
    return LearnedRewardSource(source, partial(score_answers, judge), settings, set(learners))


async def score_answers(judge: LanguageLearner, answers: Sequence[Answer]) -> list[float]:
    """Returns the reward of each answer."""
    values = await judge.values(list(map(scoring_sample, answers)))
    return [float(value[0]) for value in values]


def _load(path: str, engines: Engines) -> LanguageLearner:
    """Returns the reward model of a run's newest checkpoint."""
    folder, _, name = path.rpartition(":") if not Path(path).exists() else (path, "", "")
    run = Path(folder)
    checkpoints = list_checkpoints(find_run(run)) if (run / "config.yaml").exists() else []
    if not checkpoints:
        raise ValueError(f"reward_model: {path} is not a run with a checkpoint: give the folder of a run, or RUN:NAME")
    config = validate(TextConfig, load(run / "config.yaml"))
    checkpoint = checkpoints[-1].verify()
    name = name or next(iter(checkpoint.names))
    if name not in checkpoint.names or not (checkpoint.path / checkpoint.names[name] / "critic.safetensors").exists():
        raise ValueError(
            f"reward_model: {path} has no reward model: train one with algorithm: {{type: reward_model}}; the run has "
            f"{', '.join(checkpoint.names)}"
        )
    policy = config.policies[name]
    assert isinstance(policy, LoraPolicyConfig | FullPolicyConfig)
    judge = engines.build_learner(name, policy, 0, "shared")
    judge.load(checkpoint.path / checkpoint.names[name])
    return judge
