"""Dataset source: recorded episodes, played or written before the run.

Recorded answers are attributed to the policy now assigned to their seat.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import chain
from typing import Any, Protocol

from palestra.core.chat import Chat
from palestra.core.seeding import derive_seed
from palestra.core.types import AlgorithmState, Answer, Episode, Metrics, Node, Seat
from palestra.engine.sampling.request import max_positions
from palestra.text.policies.base import Policy, Query
from palestra.text.policies.lm import LanguagePolicy
from palestra.text.rollouts.dataset import DataFile
from palestra.text.rollouts.metrics import member_name
from palestra.text.rollouts.sources import STAGE_START_KEY, EpisodeCallback
from palestra.text.rollouts.tree_rollout import Branching

FINGERPRINTS_KEY = "data"  # key in `state`: fingerprint of each source when the run began
CHECK_CHUNK_SIZE = 64  # episodes per call of `build_samples` in the check


class AlgorithmInfo(Protocol):
    """The interface of an algorithm that a source uses."""

    @property
    def type(self) -> str: ...
    @property
    def needs_old_logprobs(self) -> bool: ...
    @property
    def branching(self) -> Branching: ...
    def build_samples(
        self, episodes: Sequence[Episode], policy: str, state: AlgorithmState
    ) -> tuple[list[Any], Metrics]: ...


@dataclass
class DatasetSource:
    """Episodes of `records`, reshuffled in every epoch. `seats` returns the current policy of each seat; `roles`
    maps env and seat to the role text at the start of rebuilt prompts. Raises ValueError if a prompt has to be rebuilt
    without a role or system text."""

    records: Sequence[DataFile]
    seats: Callable[[], dict[Seat, Policy]]
    seed: int
    roles: Mapping[str, Mapping[Seat, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        team = self.seats()
        self.kept_token_seats = [_kept_seats(record, team) for record in self.records]
        for record, kept in zip(self.records, self.kept_token_seats, strict=True):
            for seat in record.seats if record.has_trees and not self.roles else []:
                policy = team[seat]
                if seat not in kept and isinstance(policy, LanguagePolicy) and policy.system is None:
                    raise ValueError(
                        f"{record.path} has no tokens of seat {seat} that {policy.name} could read, and a rebuilt "
                        "prompt begins with the seat's role in the env: add env: as it was played, or the policy's "
                        "system: text"
                    )

    @property
    def name(self) -> str:
        """The paths of the files, joined by commas."""
        return ", ".join(record.path for record in self.records)

    @cached_property
    def items(self) -> list[tuple[Episode, AbstractSet[Seat], DataFile]]:
        """Every episode, with the seats whose recorded tokens are kept, and its file."""
        items: list[tuple[Episode, AbstractSet[Seat], DataFile]] = []
        for record, kept in zip(self.records, self.kept_token_seats, strict=True):
            items += [(episode, kept, record) for episode in record.episodes]
        return items

    @cached_property
    def fingerprint(self) -> str:
        """Hash of what was recorded: observations, answers with their tokens, rewards and successes. It is independent
        of file names."""
        digest = hashlib.blake2b(digest_size=8)
        for episode, _, _ in self.items:
            for node in episode.nodes:
                texts = {seat: (a.text, a.thought, a.stop_reason) for seat, a in node.answers.items()}
                paid = (node.team_reward, node.rewards, node.success, node.seat_success)
                digest.update(repr((node.parent, paid, node.observations, texts)).encode())
                for answer in node.answers.values():
                    digest.update(answer.token_ids.tobytes() + answer.logprobs.tobytes())
        return digest.hexdigest()

    async def play(
        self, numbers: Sequence[int], branching: Branching, state: AlgorithmState, on_episode: EpisodeCallback = None
    ) -> list[Episode]:
        """Returns the episodes of these numbers as recorded trees; ignores `branching`. A stage begins with an epoch.
        Raises ValueError if the data changed since the run began."""
        if state.setdefault(FINGERPRINTS_KEY, {}).setdefault(self.name, self.fingerprint) != self.fingerprint:
            raise ValueError(
                f"the data in {self.name} have changed since the run began: restore them, or start a new run"
            )
        team, (_, first) = self.seats(), state.get(STAGE_START_KEY, (0, 0))
        episodes = [self.episode(number - first, team) for number in numbers]
        if on_episode:
            for episode in episodes:
                on_episode(episode)
        return episodes

    def observe(self, episodes: Sequence[Episode], state: AlgorithmState) -> Metrics:
        """Does nothing: recorded data does not depend on results."""
        return {}

    def episode(self, number: int, team: Mapping[Seat, Policy]) -> Episode:
        """Returns an episode by its number in the stage: with n episodes, epoch * n + position in the epoch's order."""
        epoch, place = divmod(number, len(self.items))
        return self.attribute_episode(*self.items[_order(self.seed, epoch, len(self.items))[place]], team)

    def attribute_episode(
        self, episode: Episode, kept: AbstractSet[Seat], record: DataFile, team: Mapping[Seat, Policy]
    ) -> Episode:
        """Returns a recorded episode with answers attributed to the policies of `team`; siblings that shared an answer
        share it again. Raises ValueError with the row if the chat template or the base's length does not allow it."""
        nodes: list[Node] = []
        encoded: dict[int, Answer] = {}
        pasts: dict[int | None, dict[Seat, tuple[tuple[Any, Answer], ...]]] = {None: {}}
        for node in episode.nodes:
            past = pasts[node.parent]
            answers = dict[Seat, Answer]()
            for seat, answer in node.answers.items():
                seen = node.observations[seat]
                before = past.get(seat, ())
                if id(answer) not in encoded:
                    query = Query(self._role(episode.env, seat), seen, history=before)
                    encoded[id(answer)] = _as_sampled(answer, team[seat], query, seat in kept, record, episode.seed)
                answers[seat] = encoded[id(answer)]
            pasts[node.id] = past | {s: (*past.get(s, ()), (node.observations[s], a)) for s, a in answers.items()}
            nodes.append(replace(node, answers=answers, advantages={}))
        return replace(episode, seats={seat: team[seat].name for seat in episode.seats if seat in team}, nodes=nodes)

    def _role(self, env: str, seat: Seat) -> str:
        roles = [self.roles[env]] if env in self.roles else self.roles.values()
        return next((own[seat] for own in roles if seat in own), "")

    def check(self, algorithm: AlgorithmInfo, learners: AbstractSet[str]) -> None:
        """Raises ValueError if an algorithm cannot train on these episodes, or finds no sample for any of `learners` in
        them."""
        if algorithm.type in ("dpo", "reward_model") and algorithm.branching.branch_at == "turn":
            self._check_one_answer()
        team = self.seats()
        taught = {seat for seat, policy in team.items() if member_name(policy.name) in learners}
        if algorithm.needs_old_logprobs:
            self._check_sampled(algorithm, taught)
        limit = min((most for policy in team.values() if (most := _max_tokens(policy))), default=None)
        for item in self.items:
            if limit is not None and _most_tokens(item[0]) > limit:
                self.attribute_episode(*item, team)
        for start in range(0, len(self.items), CHECK_CHUNK_SIZE):
            episodes = [self.attribute_episode(*item, team) for item in self.items[start : start + CHECK_CHUNK_SIZE]]
            if any(s.has_gradient for name in learners for s in algorithm.build_samples(episodes, name, {})[0]):
                return
        lines = list(chain.from_iterable(episode.leaves() for episode, *_ in self.items))
        wins = sum(max([leaf.success or 0.0, *leaf.seat_success.values()]) >= 0.5 for leaf in lines)
        forks = sum(map(_differing, self._families()))
        raise ValueError(
            f"{algorithm.type} finds nothing to learn in {self.name}: {len(lines)} trajectories, of which {wins} "
            f"succeeded, and {forks} places where siblings have different rewards. To imitate trajectories without "
            "success set algorithm.imitate: all. To compare answers give rows of prompt, chosen and rejected, or "
            "episodes with branches; to compare whole trajectories set algorithm.branch_at: root"
        )

    def _check_one_answer(self) -> None:
        """Raises ValueError if the sides of a row have several answers each, which are not siblings of each other."""
        for record in self.records:
            for number, episode in enumerate(record.episodes if not record.has_trees else (), start=1):
                if len(episode.nodes) > len(episode.leaves()) > 1:
                    raise ValueError(
                        f"{record.path}, row {number} compares sides of several answers, and branch_at: turn compares "
                        "single ones: set algorithm.branch_at: root, or put the turns that are equal into the prompt"
                    )

    def _check_sampled(self, algorithm: AlgorithmInfo, taught: AbstractSet[Seat]) -> None:
        for record, kept in zip(self.records, self.kept_token_seats, strict=True):
            for seat in record.seats:
                drawn = seat in kept and any(answer.logprobs.any() for answer in record.answers(seat))
                if seat in taught and not drawn:
                    raise ValueError(
                        f'{record.path} has no log-probabilities for the answers of seat "{seat}", which '
                        f"{algorithm.type} needs. Set algorithm.type: sft or dpo, or give episodes that a policy of "
                        "the same base played (those of a run)"
                    )

    def _families(self) -> Iterator[list[Node]]:
        """Yields all sibling sets of all episodes."""
        for episode, *_ in self.items:
            for parent in dict.fromkeys(node.parent for node in episode.nodes):
                yield episode.children(parent)


def _differing(siblings: Sequence[Node]) -> bool:
    return len({(node.team_reward, *sorted(node.rewards.items())) for node in siblings}) > 1


def _kept_seats(record: DataFile, team: Mapping[Seat, Policy]) -> frozenset[Seat]:
    """Returns the seats of a file whose recorded tokens their policies read as they are."""
    return frozenset(seat for seat in record.seats if _keeps(record, seat, team[seat]))


def _keeps(record: DataFile, seat: Seat, policy: Policy) -> bool:
    """Returns True if the policy reads the recorded text from the recorded tokens of a seat. The text may end before a
    stop text that the tokens contain."""
    answers = record.answers(seat)
    if record.tokens == "retokenize" or not isinstance(policy, LanguagePolicy):
        return False
    if not all(len(answer.prompt_ids) and len(answer.token_ids) for answer in answers):
        return False
    return all(_reads(policy, node.observations[seat], node.answers[seat]) for node in record.nodes(seat))


def _reads(policy: LanguagePolicy, seen: Any, answer: Answer) -> bool:
    tools = seen.tools if isinstance(seen, Chat) else ()
    return policy.encoder.read(answer.token_ids, answer.prompt_ids, tools).text.startswith(answer.text)


def _as_sampled(answer: Answer, policy: Policy, query: Query, keep: bool, record: DataFile, number: int) -> Answer:
    """Returns a recorded answer, attributed to `policy`; a language model's is tokenised again unless `keep` is
    set. Raises ValueError with the row's `number` if the base does not take it."""
    if keep or not isinstance(policy, LanguagePolicy):
        return replace(answer, policy=policy.name)
    place = f"{record.path}, {'episode' if record.has_trees else 'row'} {number + (not record.has_trees)}"
    try:
        taught = policy.encode_demonstration(query, answer.text, answer.stop_reason, answer.thought)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None
    limit = _max_tokens(policy)
    size = len(taught.prompt_ids) + len(taught.token_ids)
    if limit is None or size <= limit:
        return taught
    room = limit - len(taught.prompt_ids)
    if record.too_long == "refuse" or room < 1:
        remedy = "shorten it, or leave it out" if room < 1 else "shorten it, or set too_long: cut beside its path"
        raise ValueError(f"{place} has {size:,} tokens, and the base of {policy.name} takes {limit:,}: {remedy}")
    return replace(taught, token_ids=taught.token_ids[:room], logprobs=taught.logprobs[:room], stop_reason="length")


def _max_tokens(policy: Policy) -> int | None:
    """Returns the maximum number of tokens of a policy's base; None if it is unknown here."""
    engine = policy.sampler.engine if isinstance(policy, LanguagePolicy) else None
    return max_positions(engine) if engine else None


def _most_tokens(episode: Episode) -> int:
    """Returns a bound on the tokens of an episode's longest prompt and answer: a token stands for a byte at least, and
    the chat template's marks of a message for 64."""
    most = 0
    for node in episode.nodes:
        for seat, answer in node.answers.items():
            most = max(most, _most_tokens_of(node.observations[seat], answer))
    return most + 64 * len(episode.nodes)


def _most_tokens_of(seen: Any, answer: Answer) -> int:
    messages = len(seen.messages) if isinstance(seen, Chat) else 1
    tools = len(str(seen.tools).encode()) if isinstance(seen, Chat) else 0
    return len(f"{seen}{answer.text}{answer.thought}".encode()) + tools + 64 * (messages + 2)


@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, count: int) -> list[int]:
    """Returns the order of `count` episodes in an epoch."""
    numbers = list(range(count))
    random.Random(derive_seed(seed, "data", epoch)).shuffle(numbers)
    return numbers
