"""Training data of the base models `tiny` and `boards`: play by random and mediocre players, rules of motion, sums, and
small talk.

No player solves a puzzle. Boards are of split "base", and a state reached in play is used only if it, as a layout of
its own, belongs to that split too: there is no board of the splits train, dev and test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

from palestra.envs.support.splits import Split, split_of_layout
from palestra.envs.text.grid.grid import DIRECTIONS, OPPOSITE, cell_names, distances, format_cells, manhattan, walk
from palestra.envs.text.grid.grid_game import GridGame
from palestra.envs.text.grid.plan_path import PlanPath, walk_straight
from palestra.envs.text.grid.sokoban import Sokoban

RANDOM = 0.3  # share of answers given by a player that ignores the board
NOISE = 0.35  # share of a mediocre player's single decisions made at random
ANSWERS, ASKED, QUESTIONS = 3, 0.6, 4  # answers to a board; share of boards with questions; questions on such a board
GIVE_UP = 0.1  # probability that a mediocre executor drops the rest of the plan, before each of its parts

ROUTE_MOVES = 4  # maximum moves of a route in Plan-Path: a walk to a near cell, not a solution
TEAMS = {"planner_executor": 0.8, "alternating": 0.1, "single": 0.1}


@dataclass(frozen=True)
class Example:
    """One question and its answer; `kind` is for the counts in the model's README."""

    kind: str
    role: str
    question: str
    answer: str

    @property
    def prompt(self) -> str:
        """The prompt as the chat template writes it. Written out here because the template takes a millisecond a
        call."""
        role = f"<|system|>{self.role}<|end|>" if self.role else ""
        return f"{role}<|user|>{self.question}<|end|><|assistant|>"

    def messages(self) -> list[dict[str, str]]:
        turns = [{"role": "user", "content": self.question}, {"role": "assistant", "content": self.answer}]
        return [{"role": "system", "content": self.role}, *turns] if self.role else turns


def pick(rng: Random, weights: dict[Any, float]) -> Any:
    return rng.choices(list(weights), list(weights.values()))[0]


# ---- players: each answers from the current board, without search


def random_moves(rng: Random, most: int) -> list[int]:
    return [rng.randrange(4) for _ in range(rng.randint(1, most))]


def towards(rng: Random, beside: tuple[int, ...], at: int, far: Callable[[int], int]) -> int:
    """A direction that reduces `far`, a distance to the target; a random one if there is none, or by noise."""
    nearer = [d for d in range(4) if beside[d] >= 0 and far(beside[d]) < far(at)]
    return rng.choice(nearer) if nearer and rng.random() > NOISE else rng.randrange(4)


def distance_to(env: GridGame, to: int, boxes: tuple[int, ...], around: bool) -> Callable[[int], int]:
    """The distance of a cell from `to`: the length of a walk around walls and boxes, or the Manhattan distance."""
    if not around:
        return lambda cell: manhattan(env.size, cell, to)
    lengths = distances(env.instance.grid, to, boxes)
    return lambda cell: lengths.get(cell, env.size**2)


def sokoban_plan(env: Sokoban, rng: Random) -> list[tuple[int, int]]:
    """Pushes (box, direction) that slide a box towards its goal, whether or not they are possible."""
    boxes, goals = list(env.state[1]), sorted(env.instance.goals)
    plan = []
    for _ in range(rng.randint(1, env.plan_parts)):
        box = rng.randrange(len(boxes))
        beside = env.instance.grid.neighbors[boxes[box]]
        direction = towards(rng, beside, boxes[box], distance_to(env, goals[box], (), around=False))
        plan.append((box, direction))
        boxes[box] = beside[direction] if beside[direction] >= 0 else boxes[box]
    return plan


def sokoban_moves(env: Sokoban, plan: list[tuple[int, int]], rng: Random, around: bool) -> list[int]:
    """Moves that walk to the far side of each box of the plan, `around` walls and boxes or straight, and push it, until
    `GIVE_UP` or the limit of moves."""
    state = env.state
    moves: list[int] = []
    for box, direction in plan:
        stand = env.instance.grid.neighbors[state[1][box]][OPPOSITE[direction]]
        if stand < 0 or rng.random() < GIVE_UP:
            break
        far = distance_to(env, stand, state[1], around)
        while state[0] != stand and len(moves) < env.moves:
            beside = env.instance.grid.neighbors[state[0]]
            free = tuple(-1 if cell in state[1] else cell for cell in beside)
            moves.append(towards(rng, free, state[0], far))
            state = env.move(state, moves[-1]) or state
            if env.instance.grid.neighbors[state[1][box]][OPPOSITE[direction]] != stand:
                return moves  # it pushed the box away by mistake: the plan no longer applies
        if len(moves) < env.moves:
            moves.append(direction)
            state = env.move(state, direction) or state
    return moves or random_moves(rng, env.moves)


def path_plan(env: PlanPath, rng: Random) -> list[int]:
    """Waypoints in straight lines, mostly towards the goal, which ignore walls."""
    at, goal, size, plan = env.state, env.instance.goal, env.size, []
    for _ in range(rng.randint(1, env.plan_parts)):
        row, column = divmod(at, size)
        to_row, to_column = divmod(goal if rng.random() > NOISE else rng.randrange(size**2), size)
        if rng.random() < 0.3:  # stop short
            to_row, to_column = (row + to_row + 1) // 2, (column + to_column + 1) // 2
        at = row * size + to_column if rng.random() < 0.5 else to_row * size + column
        plan.append(at)
    return plan


def path_moves(env: PlanPath, targets: list[int], rng: Random, around: bool) -> list[int]:
    """Moves towards each target in turn, which ignore walls; or walk `around` them to a target that is near."""
    at = env.state
    moves: list[int] = []
    for target in targets:
        if rng.random() < GIVE_UP:
            break
        far = distance_to(env, target, (), around)
        if far(at) > ROUTE_MOVES:
            far = distance_to(env, target, (), around=False)
        for _ in range(far(at) + 1):
            if at == target or len(moves) == env.moves:
                break
            moves.append(towards(rng, env.instance.grid.neighbors[at], at, far))
            after = env.move(at, moves[-1])
            at = at if after is None else after
    return moves or random_moves(rng, env.moves)


def answer(env: GridGame, seat: str, rng: Random, around: bool) -> str:
    """The answer of a random or a mediocre player at this seat."""
    blind = rng.random() < RANDOM
    if seat == "planner":
        return env.write_plan(tuple(random_plan(env, rng) if blind else mediocre_plan(env, rng)))
    plan = env.plan if seat == "executor" else None if blind else mediocre_plan(env, rng)
    if blind or not plan:
        return " ".join(DIRECTIONS[d] for d in random_moves(rng, env.moves))
    if isinstance(env, Sokoban):
        moves = sokoban_moves(env, list(plan), rng, around)
    else:
        assert isinstance(env, PlanPath)
        moves = path_moves(env, list(plan), rng, around)
    return " ".join(DIRECTIONS[d] for d in moves)


def random_plan(env: GridGame, rng: Random) -> list[Any]:
    if isinstance(env, Sokoban):
        return [(rng.randrange(env.boxes), rng.randrange(4)) for _ in range(rng.randint(1, env.plan_parts))]
    return [rng.randrange(env.size**2) for _ in range(rng.randint(1, env.plan_parts))]


def mediocre_plan(env: GridGame, rng: Random) -> list[Any]:
    if isinstance(env, Sokoban):
        return sokoban_plan(env, rng)
    assert isinstance(env, PlanPath)
    return path_plan(env, rng)


# ---- questions about the board: how things move, not what to do


def trace(env: GridGame, rng: Random) -> Example:
    """A question: given moves, where the walker is after each of them, and any box that was pushed."""
    names, state, said = cell_names(env.size), env.state, []
    moves = random_moves(rng, 8)
    for direction in moves:
        before, state = state, env.move(state, direction)
        state = before if state is None else state
        if isinstance(env, PlanPath):
            said.append(names[state])
        else:
            said.append(names[state[0]] + pushed(before, state, names))
    return question(env, "moves", moves, " ".join(said))


def pushed(before: tuple[Any, ...], after: tuple[Any, ...], names: tuple[str, ...]) -> str:
    return "".join(f" box {names[new]}" for old, new in zip(before[1], after[1], strict=True) if old != new)


def end(env: GridGame, rng: Random) -> Example:
    """A question: given moves, where everything is after all of them."""
    moves, state = random_moves(rng, 6), env.state
    for direction in moves:
        after = env.move(state, direction)
        state = state if after is None else after
    if isinstance(env, PlanPath):
        return question(env, "end", moves, format_cells(env.size, [state]))
    return question(env, "end", moves, f"{format_cells(env.size, [state[0]])} box {format_cells(env.size, state[1])}")


def legal(env: GridGame, rng: Random) -> Example:
    """A question: the moves that are possible."""
    possible = [DIRECTIONS[d] for d in range(4) if env.move(env.state, d) is not None]
    return question(env, "legal", [], " ".join(possible) or "none")


def stand(env: Sokoban, rng: Random) -> Example:
    """A question: given pushes, the cell to stand on for each, up to the first that a wall, the border or a box
    prevents."""
    plan = rng.choice((random_plan, mediocre_plan))(env, rng)
    boxes, cells = list(env.state[1]), []
    for box, direction in plan:
        beside = env.instance.grid.neighbors[boxes[box]]
        if beside[OPPOSITE[direction]] < 0 or beside[direction] < 0 or beside[direction] in boxes:
            break
        cells.append(beside[OPPOSITE[direction]])
        boxes[box] = beside[direction]
    said = format_cells(env.size, cells) + ("" if len(cells) == len(plan) else " none")
    return about_plan(env, "stand", plan, said.strip())


def line(env: PlanPath, rng: Random) -> Example:
    """A question: given waypoints, where a straight walk to each of them ends."""
    plan = rng.choice((random_plan, mediocre_plan))(env, rng)
    at, ends = env.state, []
    for waypoint in plan:
        at = walk_straight(env.instance.grid, at, waypoint, -1)
        ends.append(at)
    return about_plan(env, "line", plan, format_cells(env.size, ends))


def question(env: GridGame, what: str, moves: list[int], said: str) -> Example:
    asked = f" moves {' '.join(DIRECTIONS[d] for d in moves)}" if moves else ""
    return Example(f"{env.name} {what}", f"{env.compact_name} {what}", env.compact_observation() + asked, said)


def about_plan(env: GridGame, what: str, plan: list[Any], said: str) -> Example:
    asked = f"{env.compact_observation()} plan {env.write_plan(tuple(plan))}"
    return Example(f"{env.name} {what}", f"{env.compact_name} {what}", asked, said)


def route(env: GridGame, rng: Random) -> Example:
    """A question: a shortest walk to a cell, around walls and boxes; "none" if there is no walk. It pushes no box, and
    in Plan-Path the cell is near."""
    player, boxes = (env.state, ()) if isinstance(env, PlanPath) else env.state
    taken = {*env.instance.grid.walls, player, *boxes}
    cells = [cell for cell in range(env.size**2) if cell not in taken]
    attempts = 101 if isinstance(env, PlanPath) else 1
    for _ in range(attempts):
        to = rng.choice(cells)
        moves = walk(env.instance.grid, player, to, boxes)
        if moves is not None and len(moves) <= ROUTE_MOVES:
            break
    said = "none" if moves is None else " ".join(DIRECTIONS[d] for d in moves[:8])
    asked = f"{env.compact_observation()} end {cell_names(env.size)[to]}"
    return Example(f"{env.name} route", f"{env.compact_name} route", asked, said)


# ---- the streams


@dataclass(frozen=True)
class Mix:
    """How often each stream, size of board and kind of question is drawn. One draw of a game is a whole episode."""

    streams: dict[str, float]
    sokoban_sizes: dict[int, float]
    path_sizes: dict[int, float]
    sokoban_questions: tuple[Callable[..., Example], ...] = (trace, trace, end, stand, legal)
    path_questions: tuple[Callable[..., Example], ...] = (trace, trace, end, line, legal)
    teams: dict[str, float] = field(default_factory=lambda: TEAMS)
    around: bool = False  # movers walk around walls and boxes to the next cell of their plan


TINY = Mix(
    streams={"sokoban": 5.0, "plan_path": 5.0, "sums": 5.0, "talk": 5.0},
    sokoban_sizes={3: 0.1, 4: 0.55, 5: 0.25, 6: 0.1},
    path_sizes={3: 0.05, 4: 0.2, 5: 0.4, 6: 0.2, 7: 0.08, 8: 0.04, 10: 0.03},
)
BOARDS = Mix(
    streams={"sokoban": 5.0, "plan_path": 4.0, "sums": 1.0, "talk": 1.0},
    sokoban_sizes={4: 0.2, 5: 0.2, 6: 0.6},
    path_sizes={5: 0.2, 6: 0.2, 8: 0.25, 10: 0.35},
    sokoban_questions=(trace, end, stand, legal, route, route),
    path_questions=(trace, end, line, legal, route, route),
    teams={"planner_executor": 0.6, "alternating": 0.05, "single": 0.35},
    around=True,
)


def play(game: str, rng: Random, split: Split = "base", mix: Mix = TINY) -> Iterator[list[Example]]:
    """Yields the runs of examples of one episode. A run is about one board, so that its examples share all or most of
    their prompt: answers of the seat that acts, or questions of one kind."""
    env = new_env(game, rng, split, mix)
    step = env.reset(rng.randrange(2**31))
    while not step.done:
        ((seat, observation),) = step.observations.items()
        said = [answer(env, seat, rng, mix.around) for _ in range(ANSWERS)]
        if split_of_layout(env.size, groups_now(env)) == split:
            yield [Example(f"{game} {seat}", env.roles[seat], observation, text) for text in said]
            if rng.random() < ASKED:
                ask = rng.choice(mix.sokoban_questions if isinstance(env, Sokoban) else mix.path_questions)
                yield [ask(env, rng) for _ in range(1 if ask is legal else QUESTIONS)]
        step = env.step({seat: said[0]})


def new_env(game: str, rng: Random, split: Split, mix: Mix) -> GridGame:
    team = pick(rng, mix.teams)
    if game == "plan_path":
        density = rng.choice((0.1, 0.22, 0.22))
        return PlanPath(size=pick(rng, mix.path_sizes), wall_density=density, split=split, team=team)
    size = pick(rng, mix.sokoban_sizes)
    boxes = 2 if size > 4 and rng.random() < 0.2 else 1
    return Sokoban(size=size, boxes=boxes, walls=rng.randint(0, max(1, size - 3)), split=split, team=team)


def groups_now(env: GridGame) -> tuple[Any, ...]:
    """The current state as a layout of its own: the groups of cells that `split_of_layout` takes."""
    if isinstance(env, PlanPath):
        return (env.instance.grid.walls, (env.state,), (env.instance.goal,))
    return (env.instance.grid.walls, env.instance.goals, env.state[1], (env.state[0],))


def sums(rng: Random) -> Example:
    a, b = (rng.randrange(10 ** rng.randint(1, 2)) for _ in range(2))
    sign = rng.choice("+-")
    asked = rng.choice(("{} {} {}", "what is {} {} {}?", "{} {} {} =")).format(a, sign, b)
    return Example("sums", rng.choice(("calculator", "")), asked, str(a + b if sign == "+" else a - b))


WORDS = ("red", "blue", "green", "cat", "dog", "bird", "house", "tree", "river", "stone", "apple", "bread", "window")


def talk(rng: Random) -> Example:
    a, b, word = rng.randrange(10), rng.randrange(10), rng.choice(WORDS)
    words = " ".join(rng.sample(WORDS, rng.randint(1, 3)))
    turns = rng.choice(DIRECTIONS)
    low = rng.randrange(6)
    choices = (
        (rng.choice(("hello", "hi", "good morning", "hey there")), rng.choice(("hello!", "hi, how can i help?"))),
        (rng.choice(("thank you", "thanks")), rng.choice(("you are welcome.", "any time."))),
        (f"say {words}", words),
        (f"repeat after me: {words}", words),
        (f"count from {low} to {low + 3}", " ".join(str(n) for n in range(low, low + 4))),
        (f"is {a} more than {b}?", "yes" if a > b else "no"),
        (f"is {a} less than {b}?", "yes" if a < b else "no"),
        (f"what is the opposite of {turns}?", DIRECTIONS[OPPOSITE[DIRECTIONS.index(turns)]]),
        (f"how many words: {words}", str(len(words.split()))),
        (f"how do you spell {word}?", " ".join(word)),
        (rng.choice(("who are you?", "what are you?")), "i am a tiny language model."),
    )
    asked, said = rng.choice(choices)
    return Example("talk", rng.choice(("assistant", "")), asked, said)


def runs(seed: int, split: Split = "base", mix: Mix = TINY) -> Iterator[list[Example]]:
    """Yields runs of examples without end. They depend only on `seed`, not on the machine."""
    rng = Random(seed)
    while True:
        stream = pick(rng, mix.streams)
        if stream == "sums":
            yield [sums(rng)]
        elif stream == "talk":
            yield [talk(rng)]
        else:
            yield from play(stream, rng, split, mix)
